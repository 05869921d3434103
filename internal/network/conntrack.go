package network

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"

	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

func fromIPNet(n net.IPNet) (netip.Prefix, bool) {
	ip := n.IP.To4()
	ones, bits := n.Mask.Size()
	if ip == nil || bits == 128 {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(ip)), ones).Masked(), true
}

// flow is one connection in the kernel's table, as its first packet had it.
type flow struct {
	src, dst netip.Addr
	dport    uint16 // 0 where the protocol has none
	masked   bool   // answers go to another address than src: it is masqueraded
}

// forget deletes the connections of the kernel's table that drop chooses. It
// reads the table as a stream: a busy host's has hundreds of thousands.
func forget(drop func(flow) bool) (int, error) {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
	var chosen [][]byte
	err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(msg []byte) bool {
		if len(msg) < nl.SizeofNfgenmsg {
			return true
		}
		tuple, f, ok := origTuple(msg[nl.SizeofNfgenmsg:])
		if ok && drop(f) {
			chosen = append(chosen, tuple)
		}
		return true
	})
	// An interrupted dump is a whole one, but for entries that moved; those
	// are of connections that came or went meanwhile.
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return 0, sandbox.Errorf(sandbox.CodeInternal, "read the host's connection table: %w", err)
	}
	for _, tuple := range chosen {
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		req.AddRawData(tuple)
		if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return 0, sandbox.Errorf(sandbox.CodeInternal, "delete a connection from the host's table: %w", err)
		}
	}
	return len(chosen), nil
}

// origTuple finds CTA_TUPLE_ORIG, returns it as an attribute ready to be sent
// back, with its zone, and reads it.
func origTuple(attrs []byte) (raw []byte, f flow, ok bool) {
	top, err := mdl.UnmarshalAttributes(attrs)
	if err != nil {
		return nil, f, false
	}
	var back []mdl.Attribute
	var reply flow
	for _, a := range top {
		switch a.Type &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER) {
		case nl.CTA_TUPLE_ORIG:
			back = append(back, a)
			f, ok = parseTuple(a.Data)
		case nl.CTA_TUPLE_REPLY:
			reply, _ = parseTuple(a.Data)
		case nl.CTA_ZONE:
			back = append(back, a)
		}
	}
	if !ok {
		return nil, f, false
	}
	f.masked = reply.dst != f.src
	raw, err = mdl.MarshalAttributes(back)
	return raw, f, err == nil
}

func parseTuple(data []byte) (f flow, ok bool) {
	nested, err := mdl.UnmarshalAttributes(data)
	if err != nil {
		return f, false
	}
	for _, n := range nested {
		inner, err := mdl.UnmarshalAttributes(n.Data)
		if err != nil {
			continue
		}
		kind := n.Type &^ unix.NLA_F_NESTED
		for _, a := range inner {
			switch {
			case kind == nl.CTA_TUPLE_IP && a.Type == nl.CTA_IP_V4_SRC && len(a.Data) == 4:
				f.src = netip.AddrFrom4([4]byte(a.Data))
			case kind == nl.CTA_TUPLE_IP && a.Type == nl.CTA_IP_V4_DST && len(a.Data) == 4:
				f.dst = netip.AddrFrom4([4]byte(a.Data))
			case kind == nl.CTA_TUPLE_PROTO && a.Type == nl.CTA_PROTO_DST_PORT && len(a.Data) == 2:
				f.dport = binary.BigEndian.Uint16(a.Data)
			}
		}
	}
	return f, f.src.IsValid() && f.dst.IsValid()
}
