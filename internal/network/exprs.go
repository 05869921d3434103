package network

import (
	"net"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// This file spells nftables' bytecode. Registers: 1 is the first of 16 bytes,
// 9 the second word of it (NFT_REG32_01), 2 the 16 bytes after.

type match []expr.Any

// rule joins matches and statements.
func rule(parts ...match) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func meta(key expr.MetaKey, op expr.CmpOp, data []byte) match {
	return match{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: data}}
}

// A name without its final zero matches as a prefix ("wr123456-*").
func iifPrefix(op expr.CmpOp, prefix string) match {
	return meta(expr.MetaKeyIIFNAME, op, []byte(prefix))
}

func oifPrefix(op expr.CmpOp, prefix string) match {
	return meta(expr.MetaKeyOIFNAME, op, []byte(prefix))
}

func ipv4(op expr.CmpOp) match {
	return meta(expr.MetaKeyNFPROTO, op, []byte{unix.NFPROTO_IPV4})
}

func l4proto(proto byte) match { return meta(expr.MetaKeyL4PROTO, expr.CmpOpEq, []byte{proto}) }

// hasPorts matches the protocols whose header begins with two ports.
func hasPorts() match {
	return match{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Lookup{SourceRegister: 1, SetName: setPorted}}
}

func load(base expr.PayloadBase, offset, length, reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: base, Offset: offset, Len: length}
}

func loadSaddr(reg uint32) expr.Any { return load(expr.PayloadBaseNetworkHeader, 12, 4, reg) }
func loadDaddr(reg uint32) expr.Any { return load(expr.PayloadBaseNetworkHeader, 16, 4, reg) }
func loadSport(reg uint32) expr.Any { return load(expr.PayloadBaseTransportHeader, 0, 2, reg) }
func loadDport(reg uint32) expr.Any { return load(expr.PayloadBaseTransportHeader, 2, 2, reg) }

func cmpEq(reg uint32, data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

func inPrefix(loadAddr expr.Any, p netip.Prefix) match {
	if p.Bits() == 0 {
		return nil
	}
	a := p.Addr().As4()
	if p.Bits() == 32 {
		return match{loadAddr, cmpEq(1, a[:])}
	}
	return match{loadAddr,
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: net.CIDRMask(p.Bits(), 32), Xor: make([]byte, 4)},
		cmpEq(1, a[:])}
}

func saddrIn(p netip.Prefix) match { return inPrefix(loadSaddr(1), p) }
func daddrIn(p netip.Prefix) match { return inPrefix(loadDaddr(1), p) }

func saddrInSet(set string) match {
	return match{loadSaddr(1), &expr.Lookup{SourceRegister: 1, SetName: set}}
}

func daddrInSet(set string, invert bool) match {
	return match{loadDaddr(1), &expr.Lookup{SourceRegister: 1, SetName: set, Invert: invert}}
}

// daddrPortInSet matches `ip daddr . dport @set`, or with any the element of
// port 0, which stands for every port and every protocol.
func daddrPortInSet(set string, any bool) match {
	look := &expr.Lookup{SourceRegister: 1, SetName: set}
	if any {
		return match{loadDaddr(1), &expr.Immediate{Register: 9, Data: make([]byte, 4)}, look}
	}
	return append(hasPorts(), loadDaddr(1), loadDport(9), look)
}

func dport(p uint16) match {
	return match{loadDport(1), cmpEq(1, binaryutil.BigEndian.PutUint16(p))}
}

func sport(p uint16) match {
	return match{loadSport(1), cmpEq(1, binaryutil.BigEndian.PutUint16(p))}
}

// icmpUnreachable matches ICMP's "destination unreachable" (RFC 792), whatever
// its code.
func icmpUnreachable() match {
	return append(l4proto(unix.IPPROTO_ICMP), load(expr.PayloadBaseTransportHeader, 0, 1, 1), cmpEq(1, []byte{3}))
}

func ctState(bits uint32) match {
	return match{&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)}}
}

// ctReply matches packets that answer the one that opened the connection.
func ctReply() match {
	return match{&expr.Ct{Register: 1, Key: expr.CtKeyDIRECTION}, cmpEq(1, []byte{1})}
}

// tcpFlags matches TCP packets whose flags under mask are exactly want.
func tcpFlags(mask, want byte) match {
	return append(l4proto(unix.IPPROTO_TCP),
		load(expr.PayloadBaseTransportHeader, 13, 1, 1),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{mask}, Xor: []byte{0}},
		cmpEq(1, []byte{want}))
}

// clampMSS writes the path's MTU, less headers, into a SYN's MSS option.
func clampMSS() match {
	return append(tcpFlags(tcpSYN|tcpRST, tcpSYN),
		&expr.Rt{Register: 1, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.Exthdr{SourceRegister: 1, Type: 2, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt})
}

// The TCP flags that rules look at (RFC 9293, section 3.1).
const (
	tcpSYN = 0x02
	tcpRST = 0x04
)

// overLimit matches a packet that opens one connection too many for its
// source address.
func overLimit(set string, limit uint32) match {
	return match{loadSaddr(1), &expr.Dynset{
		SrcRegKey: 1, SetName: set, Operation: unix.NFT_DYNSET_OP_ADD,
		Exprs: []expr.Any{&expr.Connlimit{Count: limit, Flags: expr.NFT_CONNLIMIT_F_INV}},
	}}
}

func verdict(kind expr.VerdictKind) match { return match{&expr.Verdict{Kind: kind}} }

var (
	accept = verdict(expr.VerdictAccept)
	drop   = verdict(expr.VerdictDrop)
)

func gotoChain(name string) match { return match{&expr.Verdict{Kind: expr.VerdictGoto, Chain: name}} }

func reject(kind uint32, code uint8) match { return match{&expr.Reject{Type: kind, Code: code}} }

// ifname pads a link's name as nftables keys it.
func ifname(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func addrKey(a netip.Addr) []byte {
	b := a.As4()
	return b[:]
}

func targetKey(t target) []byte {
	b := t.addr.As4()
	return append(b[:], byte(t.port>>8), byte(t.port), 0, 0)
}

// intervals turns disjoint prefixes into the elements of an interval set.
func intervals(list []netip.Prefix) (out []nftables.SetElement) {
	for _, r := range mergeRanges(list) {
		out = append(out, nftables.SetElement{Key: binaryutil.BigEndian.PutUint32(uint32(r[0]))})
		if r[1] <= 0xffffffff {
			out = append(out, nftables.SetElement{Key: binaryutil.BigEndian.PutUint32(uint32(r[1])), IntervalEnd: true})
		}
	}
	return out
}
