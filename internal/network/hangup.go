package network

import (
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"time"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// hangUpWait is how long the other ends may take to close: those that are
	// there need a round trip, and the host its time where it is busy.
	hangUpWait = time.Second
	// maxHangUps bounds the connections of one sandbox that are closed so.
	maxHangUps = 4096
)

// States of a TCP connection in the kernel's table
// (linux/netfilter/nf_conntrack_tcp.h).
const (
	tcpEstablished = 3
	tcpFinWait     = 4
	tcpCloseWait   = 5
)

// conn is a TCP connection that a sandbox has made.
type conn struct {
	local, remote netip.AddrPort
	state         uint8
}

// hangUp closes the connections that what ran in slot s has left open for their
// other ends. A container's kernel does that when its processes end. gVisor's
// ends with them and tells nobody: an other end that only reads would wait for
// its own keepalive.
//
// Nobody knows the connections' sequence numbers any more but the other ends. So
// each is sent a SYN from the slot's namespace, on the connection's own path; it
// answers with the numbers that it expects (RFC 5961, section 4.2), and to that
// the namespace's kernel, which has no such connection, answers with a reset that
// the other end has to believe.
//
// It is a courtesy: what fails is not told. The slot's processes must have ended,
// and its rules must still be there.
func (n *Network) hangUp(s int) {
	address := n.builder.address(s)
	open, err := connections(address)
	if err != nil || len(open) == 0 {
		return
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in the slot's namespace
		done <- n.builder.sendSYNs(s, open)
	}()
	if <-done != nil {
		return
	}
	ctx, cancel := context.WithTimeout(n.ctx, hangUpWait)
	defer cancel()
	for wait := 2 * time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		left, err := connections(address)
		if err != nil {
			return
		}
		waiting := false
		for _, c := range left {
			waiting = waiting || c.state == tcpEstablished
		}
		if !waiting {
			return
		}
	}
}

// sendSYNs puts the inside of slot s in place, which its processes may have taken
// down, and sends a SYN in each connection. It leaves the calling thread in the
// slot's namespace.
func (b builder) sendSYNs(s int, open []conn) error {
	ns, err := unix.Open(b.pinPath(s), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(ns)
	if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
		return err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	eth, err := h.LinkByName(device)
	if err != nil {
		return err
	}
	gw := b.gateway(s)
	err = errors.Join(
		h.LinkSetUp(eth),
		h.AddrReplace(eth, &netlink.Addr{IPNet: ipNet(b.address(s).AsSlice(), 30)}),
		h.NeighSet(permanent(eth, gw.AsSlice(), gatewayMAC)),
		h.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: gw.AsSlice()}),
	)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, c := range open {
		to := &unix.SockaddrInet4{Addr: c.remote.Addr().As4()}
		unix.Sendto(fd, synPacket(c.local, c.remote, rand.Uint32()), 0, to) // one that is lost is not told either
	}
	return nil
}

// synPacket is an IPv4 packet with a TCP header that has SYN alone (RFC 791, RFC
// 9293). The kernel fills in the length, the id and the checksum of the former.
func synPacket(from, to netip.AddrPort, seq uint32) []byte {
	p := make([]byte, 40)
	src, dst := from.Addr().As4(), to.Addr().As4()
	p[0], p[8], p[9] = 0x45, 64, unix.IPPROTO_TCP
	copy(p[12:], src[:])
	copy(p[16:], dst[:])
	t := p[20:]
	binary.BigEndian.PutUint16(t[0:], from.Port())
	binary.BigEndian.PutUint16(t[2:], to.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	t[12], t[13] = 5<<4, 2                   // header words, SYN
	binary.BigEndian.PutUint16(t[14:], 1024) // window
	sum := uint32(unix.IPPROTO_TCP) + uint32(len(t))
	for _, b := range [][]byte{src[:], dst[:], t} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(t[16:], ^uint16(sum))
	return p
}

// Attributes of a dump that the kernel filters, since Linux 5.8
// (linux/netfilter/nfnetlink_conntrack.h). An older one gives the whole table.
const (
	ctaFilter          = 25
	ctaFilterOrigFlags = 1
	ctaFilterIPSrc     = 1 << 0
)

// connections lists the TCP connections of a sandbox's address in the kernel's
// table that are not closed, at most maxHangUps.
func connections(address netip.Addr) ([]conn, error) {
	le := make([]byte, 4)
	binary.NativeEndian.PutUint32(le, ctaFilterIPSrc)
	filter, err := mdl.MarshalAttributes([]mdl.Attribute{
		nested(nl.CTA_TUPLE_ORIG, nested(nl.CTA_TUPLE_IP, mdl.Attribute{Type: nl.CTA_IP_V4_SRC, Data: address.AsSlice()})),
		nested(ctaFilter, mdl.Attribute{Type: ctaFilterOrigFlags, Data: le}),
	})
	if err != nil {
		return nil, err
	}
	var out []conn
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	req.AddRawData(filter)
	err = req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		if len(msg) < nl.SizeofNfgenmsg {
			return true
		}
		if c, ok := parseConn(msg[nl.SizeofNfgenmsg:]); ok && c.local.Addr() == address {
			out = append(out, c)
		}
		return len(out) < maxHangUps
	})
	if errors.Is(err, netlink.ErrDumpInterrupted) {
		err = nil
	}
	return out, err
}

// nested is an attribute that holds others.
func nested(kind uint16, inner ...mdl.Attribute) mdl.Attribute {
	data, _ := mdl.MarshalAttributes(inner) // fails only for more than 64 KiB
	return mdl.Attribute{Type: kind | unix.NLA_F_NESTED, Data: data}
}

// parseConn reads an entry of the table; ok is false for one that is not TCP's,
// or closed.
func parseConn(attrs []byte) (c conn, ok bool) {
	var local, remote netip.Addr
	var lport, rport uint16
	proto := uint8(0)
	leaves(attrs, func(path [3]uint16, data []byte) {
		switch {
		case path[0] == nl.CTA_TUPLE_ORIG && path[1] == nl.CTA_TUPLE_IP:
			if a, ok := netip.AddrFromSlice(data); ok && path[2] == nl.CTA_IP_V4_SRC {
				local = a
			} else if ok && path[2] == nl.CTA_IP_V4_DST {
				remote = a
			}
		case path[0] == nl.CTA_TUPLE_ORIG && path[1] == nl.CTA_TUPLE_PROTO:
			switch {
			case path[2] == nl.CTA_PROTO_NUM && len(data) == 1:
				proto = data[0]
			case path[2] == nl.CTA_PROTO_SRC_PORT && len(data) == 2:
				lport = binary.BigEndian.Uint16(data)
			case path[2] == nl.CTA_PROTO_DST_PORT && len(data) == 2:
				rport = binary.BigEndian.Uint16(data)
			}
		case path == [3]uint16{nl.CTA_PROTOINFO, nl.CTA_PROTOINFO_TCP, nl.CTA_PROTOINFO_TCP_STATE} && len(data) == 1:
			c.state = data[0]
		}
	})
	c.local, c.remote = netip.AddrPortFrom(local, lport), netip.AddrPortFrom(remote, rport)
	open := c.state == tcpEstablished || c.state == tcpFinWait || c.state == tcpCloseWait
	return c, proto == unix.IPPROTO_TCP && local.Is4() && remote.Is4() && open
}

// leaves calls f for each attribute at the third level.
func leaves(attrs []byte, f func(path [3]uint16, data []byte)) {
	const kind = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
	top, err := mdl.UnmarshalAttributes(attrs)
	if err != nil {
		return
	}
	for _, a := range top {
		second, err := mdl.UnmarshalAttributes(a.Data)
		if err != nil {
			continue
		}
		for _, b := range second {
			third, err := mdl.UnmarshalAttributes(b.Data)
			if err != nil {
				continue
			}
			for _, c := range third {
				f([3]uint16{a.Type & kind, b.Type & kind, c.Type & kind}, c.Data)
			}
		}
	}
}
