package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	pointPinFile   = fault.Register("network.slot.pinfile")
	pointPinned    = fault.Register("network.slot.pinned")
	pointLinked    = fault.Register("network.slot.linked")
	pointAddressed = fault.Register("network.slot.addressed")
	pointBuilt     = fault.Register("network.slot.built")
	pointUnlinked  = fault.Register("network.slot.unlinked")
	pointUnpinned  = fault.Register("network.slot.unpinned")
)

// insideSysctls are set in every slot's namespace. A kernel without one of
// them (IPv6 off, say) is left as it is.
var insideSysctls = [][2]string{
	{"net/ipv6/conf/all/disable_ipv6", "1"},
	{"net/ipv6/conf/default/disable_ipv6", "1"},
	{"net/ipv4/ip_unprivileged_port_start", "0"},
	// The range is in the ids of the namespace's owner, the host: sandboxes'
	// gids all lie in it.
	{"net/ipv4/ping_group_range", "0 2147483647"},
	// Two minutes, and then four probes in one: a peer that went away with a
	// capture or a restore is noticed in three minutes instead of two hours.
	{"net/ipv4/tcp_keepalive_time", "120"},
	{"net/ipv4/tcp_keepalive_intvl", "15"},
	{"net/ipv4/tcp_keepalive_probes", "4"},
}

// hostSysctls are set for every host end, as %s.
var hostSysctls = [][2]string{
	{"net/ipv6/conf/%s/disable_ipv6", "1"},
	{"net/ipv6/conf/%s/accept_ra", "0"},
	{"net/ipv4/conf/%s/rp_filter", "1"},
	{"net/ipv4/conf/%s/proxy_arp", "0"},
	{"net/ipv4/conf/%s/accept_redirects", "0"},
	{"net/ipv4/conf/%s/send_redirects", "0"},
	{"net/ipv4/conf/%s/route_localnet", "0"},
	{"net/ipv4/conf/%s/forwarding", "1"},
	{"net/ipv4/conf/%s/arp_ignore", "1"}, // answer ARP for the gateway's address only
}

func writeSysctl(name, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// builder makes and destroys slots on the host.
type builder struct {
	layout
	mtu int
}

// build makes slot s: a pinned namespace with its link up. On error the slot
// may be half made; destroy takes it away.
func (b builder) build(ctx context.Context, s int) error {
	if ctx.Err() != nil {
		return ctxError(ctx)
	}
	f, err := os.OpenFile(b.pinPath(s), os.O_CREATE|os.O_EXCL|os.O_RDONLY|unix.O_CLOEXEC, 0o400)
	if err != nil {
		return slotError(s, "create its pin", err)
	}
	f.Close()
	pointPinFile.Hit()
	in, err := b.namespace(s)
	if err != nil {
		return err
	}
	defer in.Close()
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return slotError(s, "open netlink", err)
	}
	defer host.Close()
	if err := b.addLink(s, host); err != nil {
		return slotError(s, "make its link", err)
	}
	pointLinked.Hit()
	for _, sc := range hostSysctls {
		if err := writeSysctl(fmt.Sprintf(sc[0], b.linkName(s)), sc[1]); err != nil {
			return slotError(s, "set a sysctl of its link", err)
		}
	}
	if err := b.raiseHostEnd(s, host); err != nil {
		return slotError(s, "set up its link", err)
	}
	pointAddressed.Hit()
	if err := b.raiseInside(s, in); err != nil {
		return slotError(s, "set up its inside", err)
	}
	if err := waitUp(ctx, host, b.linkName(s)); err != nil {
		return slotError(s, "wait for its link", err)
	}
	pointBuilt.Hit()
	return nil
}

// namespace makes and pins the slot's namespace, and gives netlink in it.
func (b builder) namespace(s int) (*netlink.Handle, error) {
	type result struct {
		h   *netlink.Handle
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The thread never goes back to the host's namespace: it is not
		// unlocked, so the Go runtime ends it with the goroutine.
		runtime.LockOSThread()
		h, err := b.unshare(s)
		done <- result{h, err}
	}()
	r := <-done
	return r.h, r.err
}

// unshare takes the calling thread into a new namespace and pins that.
func (b builder) unshare(s int) (*netlink.Handle, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, slotError(s, "make a network namespace", err)
	}
	self := "/proc/self/task/" + strconv.Itoa(unix.Gettid()) + "/ns/net"
	if err := unix.Mount(self, b.pinPath(s), "", unix.MS_BIND, ""); err != nil {
		return nil, slotError(s, "pin its namespace", err)
	}
	pointPinned.Hit()
	for _, sc := range insideSysctls {
		if err := writeSysctl(sc[0], sc[1]); err != nil {
			return nil, slotError(s, "set "+strings.ReplaceAll(sc[0], "/", "."), err)
		}
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE) // of this thread's namespace
	if err != nil {
		return nil, slotError(s, "open netlink in it", err)
	}
	return h, nil
}

func (b builder) addLink(s int, host *netlink.Handle) error {
	ns, err := unix.Open(b.pinPath(s), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(ns)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = b.linkName(s), b.mtu, gatewayMAC
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerMTU, veth.PeerHardwareAddr, veth.PeerNamespace = device, uint32(b.mtu), sandboxMAC, netlink.NsFd(ns)
	return host.LinkAdd(veth)
}

func (b builder) raiseHostEnd(s int, h *netlink.Handle) error {
	link, err := h.LinkByName(b.linkName(s))
	if err != nil {
		return err
	}
	return errors.Join(
		h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(b.gateway(s).AsSlice(), 30)}),
		h.NeighSet(permanent(link, b.address(s).AsSlice(), sandboxMAC)),
		h.LinkSetUp(link),
	)
}

func (b builder) raiseInside(s int, h *netlink.Handle) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	eth, err := h.LinkByName(device)
	if err != nil {
		return err
	}
	gw := b.gateway(s)
	return errors.Join(
		h.LinkSetUp(lo),
		h.AddrAdd(eth, &netlink.Addr{IPNet: ipNet(b.address(s).AsSlice(), 30)}),
		h.LinkSetUp(eth),
		h.NeighSet(permanent(eth, gw.AsSlice(), gatewayMAC)),
		h.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: gw.AsSlice()}),
	)
}

// waitUp waits for the kernel to notice that the link has a carrier. The end
// of a veth that went up first, the host's, drops what is sent on it until
// then: an answer that is lost costs a second, the first retransmission.
func waitUp(ctx context.Context, h *netlink.Handle, name string) error {
	const most = 5 * time.Second
	for begin := time.Now(); ; {
		link, err := h.LinkByName(name)
		if err != nil {
			return err
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Since(begin) > most {
			return fmt.Errorf("link %s has state %s after %v", name, link.Attrs().OperState, most)
		}
		select {
		case <-ctx.Done():
			return ctxError(ctx)
		case <-time.After(time.Millisecond):
		}
	}
}

func ipNet(ip net.IP, bits int) *net.IPNet {
	return &net.IPNet{IP: ip, Mask: net.CIDRMask(bits, 32)}
}

func permanent(link netlink.Link, ip net.IP, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: ip, HardwareAddr: mac}
}

// destroy removes the slot's link and pin, whole or half made. The namespace
// goes with the last process in it; without its link it reaches nothing.
func (b builder) destroy(s int) error {
	err := deleteLink(b.linkName(s))
	pointUnlinked.Hit()
	pin := b.pinPath(s)
	if e := unix.Unmount(pin, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); e != nil && e != unix.EINVAL && e != unix.ENOENT {
		err = errors.Join(err, fmt.Errorf("unmount %s: %w", pin, e))
	}
	pointUnpinned.Hit()
	// Removing the file also detaches copies of the mount in other mount
	// namespaces, which would keep the network namespace alive.
	if e := os.Remove(pin); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	if err != nil {
		return slotError(s, "remove it", err)
	}
	return nil
}

func deleteLink(name string) error {
	link, err := netlink.LinkByName(name)
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete link %s: %w", name, err)
	}
	return nil
}

// intact tells whether slot s is on the host, whole: its pin is a namespace
// and its link is there.
func (b builder) intact(s int) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(b.pinPath(s), &st); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		return false, slotError(s, "look at its pin", err)
	}
	if st.Type != unix.NSFS_MAGIC {
		return false, nil
	}
	_, err := netlink.LinkByName(b.linkName(s))
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return false, nil
	}
	if err != nil {
		return false, slotError(s, "look at its link", err)
	}
	return true, nil
}

// onHost lists the slots of which the host holds a link or a pin.
func (b builder) onHost() ([]int, error) {
	var out []int
	entries, err := os.ReadDir(b.netnsDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "list network namespaces: %w", err)
	}
	for _, e := range entries {
		if s, ok := b.slotOfPin(e.Name()); ok {
			out = append(out, s)
		}
	}
	links, err := listLinks()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "list links: %w", err)
	}
	for _, l := range links {
		if s, ok := b.slotOfLink(l.Attrs().Name); ok {
			out = append(out, s)
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// listLinks tries again when the list changed while it was read.
func listLinks() (links []netlink.Link, err error) {
	for range 10 {
		if links, err = netlink.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return links, err
		}
	}
	return links, nil // ten times a partial list: the caller's next look finds the rest
}

func slotError(s int, what string, err error) error {
	var e *sandbox.Error
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, fs.ErrPermission):
		return sandbox.Errorf(sandbox.CodeUnavailable, "network slot %d: cannot %s: %w; run the daemon as root with CAP_NET_ADMIN and CAP_SYS_ADMIN", s, what, err)
	case errors.Is(err, unix.ENOSPC):
		return sandbox.Errorf(sandbox.CodeNoCapacity, "network slot %d: cannot %s: %w; raise user.max_net_namespaces or fs.mount-max", s, what, err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "network slot %d: cannot %s: %w", s, what, err)
}
