package network

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/warrenhq/warren/internal/sandbox"
)

// totalSlots is how many /30 a /16 has, less the first, which holds the
// resolver's address.
const totalSlots = 1<<14 - 1

// Every link between the host and a sandbox is a network segment of its own,
// so all can have the same two addresses: a guest that is restored in another
// slot keeps its own and its gateway's. Locally administered (IEEE 802, bit
// 1 of the first byte), then "WR".
var (
	gatewayMAC = net.HardwareAddr{0x02, 'W', 'R', 0, 0, 1}
	sandboxMAC = net.HardwareAddr{0x02, 'W', 'R', 0, 0, 2}
)

const device = "eth0" // the interface inside

// layout names everything that belongs to one instance.
type layout struct {
	instance string
	runDir   string
	prefix   netip.Prefix // the /16
}

func (l layout) linkPrefix() string       { return "wr" + l.instance[:6] + "-" }
func (l layout) linkName(s int) string    { return fmt.Sprintf("%s%x", l.linkPrefix(), s) }
func (l layout) resolverLink() string     { return l.linkPrefix() + "dns" }
func (l layout) tableName() string        { return "warren_" + l.instance }
func (l layout) netnsDir() string         { return filepath.Join(l.runDir, "netns") }
func (l layout) pinPath(s int) string     { return filepath.Join(l.netnsDir(), strconv.Itoa(s)) }
func (l layout) resolver() netip.Addr     { return l.at(1) }
func (l layout) gateway(s int) netip.Addr { return l.at(4*s + 1) }
func (l layout) address(s int) netip.Addr { return l.at(4*s + 2) }

func (l layout) at(offset int) netip.Addr {
	b := l.prefix.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(offset))
	return netip.AddrFrom4(b)
}

// indexOf gives the /30 that a is in.
func (l layout) indexOf(a netip.Addr) (int, bool) {
	s, _, ok := l.place(a)
	return s, ok
}

// slotOf gives the slot whose sandbox has address a.
func (l layout) slotOf(a netip.Addr) (int, bool) {
	s, host, ok := l.place(a)
	return s, ok && s > 0 && host == 2
}

// place splits an address of the range into its /30 and its place there.
func (l layout) place(a netip.Addr) (s, host int, ok bool) {
	if !a.Is4() || !l.prefix.Contains(a) {
		return 0, 0, false
	}
	base, b := l.prefix.Addr().As4(), a.As4()
	off := int(binary.BigEndian.Uint32(b[:]) - binary.BigEndian.Uint32(base[:]))
	return off / 4, off % 4, true
}

// slotOfLink reads the slot out of a host end's name.
func (l layout) slotOfLink(name string) (int, bool) {
	p := l.linkPrefix()
	if len(name) <= len(p) || name[:len(p)] != p {
		return 0, false
	}
	s, err := strconv.ParseUint(name[len(p):], 16, 14)
	return int(s), err == nil && s > 0 && name == l.linkName(int(s))
}

func (l layout) slotOfPin(name string) (int, bool) {
	s, err := strconv.ParseUint(name, 10, 14)
	return int(s), err == nil && s > 0 && strconv.Itoa(int(s)) == name
}

// link is the slot as a driver sees it.
func (l layout) link(s int) sandbox.Link {
	return sandbox.Link{
		Slot:    s,
		NetNS:   l.pinPath(s),
		Device:  device,
		Address: netip.PrefixFrom(l.address(s), 30),
		Gateway: l.gateway(s),
		DNS:     l.resolver(),
	}
}

// mergeRanges turns prefixes into sorted, disjoint half-open ranges.
func mergeRanges(list []netip.Prefix) (out [][2]uint64) {
	var all [][2]uint64
	for _, p := range list {
		b := p.Masked().Addr().As4()
		start := uint64(binary.BigEndian.Uint32(b[:]))
		all = append(all, [2]uint64{start, start + 1<<(32-p.Bits())})
	}
	slices.SortFunc(all, func(a, b [2]uint64) int {
		if a[0] != b[0] {
			return int(int64(a[0]) - int64(b[0]))
		}
		return int(int64(a[1]) - int64(b[1]))
	})
	for _, r := range all {
		if n := len(out); n > 0 && r[0] <= out[n-1][1] {
			out[n-1][1] = max(out[n-1][1], r[1])
			continue
		}
		out = append(out, r)
	}
	return out
}
