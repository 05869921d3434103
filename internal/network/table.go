package network

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The sets of the table. What one sandbox costs is an element in some of
// them; only a sandbox with rules of its own has a chain and sets too.
const (
	setLinks   = "links"   // ifname . ipv4_addr: the sandboxes, each on its own link
	setPlain   = "plain"   // ipv4_addr: egress without rules
	setCustom  = "custom"  // ipv4_addr : verdict, to the sandbox's own chain
	setDNS     = "dns"     // ipv4_addr: may ask the resolver
	setSpecial = "special" // ranges that only a rule inside them opens
	setNever   = "never"   // ranges that nothing opens
	setConns   = "conns"   // ipv4_addr: counts each sandbox's connections
	setPorted  = "ported"  // protocols with ports
)

// table is one instance's nftables table, as it should be.
type table struct {
	layout
	maxConns uint32
}

func (t table) nft() *nftables.Table {
	return &nftables.Table{Name: t.tableName(), Family: nftables.TableFamilyINet}
}

var (
	typeLink   = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	typeTarget = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
)

// set describes a set by name, for adding it as for changing its elements.
func (t table) set(name string) *nftables.Set {
	s := &nftables.Set{Table: t.nft(), Name: name, KeyType: nftables.TypeIPAddr}
	switch name {
	case setLinks:
		s.KeyType, s.Concatenation = typeLink, true
	case setCustom:
		s.IsMap, s.DataType = true, nftables.TypeVerdict
	case setSpecial, setNever:
		s.Interval = true
	case setConns:
		s.Dynamic, s.Size = true, 2*(totalSlots+1)
	case setPorted:
		s.KeyType = nftables.TypeInetProto
	}
	return s
}

// slotSet describes the sets that hold what names opened or closed for one
// sandbox. Their elements end by themselves.
func (t table) slotSet(name string) *nftables.Set {
	return &nftables.Set{Table: t.nft(), Name: name, KeyType: typeTarget, Concatenation: true,
		HasTimeout: true, Timeout: maxOpen, Size: maxTargets}
}

func slotChain(s int) string { return fmt.Sprintf("c%04x", s) }
func allowSet(s int) string  { return fmt.Sprintf("a%04x", s) }
func denySet(s int) string   { return fmt.Sprintf("d%04x", s) }

func chainVerdict(s int) *expr.Verdict {
	return &expr.Verdict{Kind: expr.VerdictGoto, Chain: slotChain(s)}
}

type baseChain struct {
	name string
	hook *nftables.ChainHook
	prio *nftables.ChainPriority
	kind nftables.ChainType
}

// The order of the table's work on a packet from a sandbox:
//
//	prerouting  is it from that sandbox's own address? else it is gone
//	forward     → egress: established, then the sandbox's policy
//	input       → to_host: the resolver, and answers to the daemon
//
// and on one to a sandbox: forward → ingress (answers only), output → to_sandbox
// (root only). Whatever has nothing to do with a sandbox leaves every base
// chain at its first rules.
var baseChains = []baseChain{
	{"prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, nftables.ChainTypeFilter},
	{"output_raw", nftables.ChainHookOutput, nftables.ChainPriorityRaw, nftables.ChainTypeFilter},
	{"forward", nftables.ChainHookForward, nftables.ChainPriorityFilter, nftables.ChainTypeFilter},
	{"input", nftables.ChainHookInput, nftables.ChainPriorityFilter, nftables.ChainTypeFilter},
	{"output", nftables.ChainHookOutput, nftables.ChainPriorityFilter, nftables.ChainTypeFilter},
	{"postrouting", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainTypeNAT},
}

var plainChains = []string{"refuse", "open", "public", "egress", "ingress", "to_host", "to_sandbox"}

type chainRule struct {
	chain string
	exprs []expr.Any
}

// rules is the table's fixed part.
func (t table) rules() []chainRule {
	var (
		ours        = t.linkPrefix()
		fromSandbox = iifPrefix(expr.CmpOpEq, ours)
		toSandbox   = oifPrefix(expr.CmpOpEq, ours)
		resolver    = t.resolver().As4()
		toResolver  = match{loadDaddr(1), cmpEq(1, resolver[:])}
		ofResolver  = match{loadSaddr(1), cmpEq(1, resolver[:])}
		udp         = l4proto(unix.IPPROTO_UDP)
		tcp         = l4proto(unix.IPPROTO_TCP)
		icmp        = l4proto(unix.IPPROTO_ICMP)
		established = ctState(expr.CtStateBitESTABLISHED)
		related     = ctState(expr.CtStateBitRELATED)
		refuse      = gotoChain("refuse")
	)
	return []chainRule{
		// Spoofed sources end before they can cost a conntrack entry. So does
		// whatever a slot sends before a sandbox has it.
		{"prerouting", rule(iifPrefix(expr.CmpOpNeq, ours), accept)},
		{"prerouting", rule(ipv4(expr.CmpOpNeq), drop)},
		{"prerouting", rule(match{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, loadSaddr(2),
			&expr.Lookup{SourceRegister: 1, SetName: setLinks, Invert: true},
		}, drop)},
		// A query costs no conntrack entry: the resolver limits its rate.
		{"prerouting", rule(toResolver, udp, dport(53), match{&expr.Notrack{}})},
		{"output_raw", rule(toSandbox, ofResolver, udp, sport(53), match{&expr.Notrack{}})},

		{"forward", rule(fromSandbox, gotoChain("egress"))},
		{"forward", rule(toSandbox, gotoChain("ingress"))},
		{"input", rule(fromSandbox, gotoChain("to_host"))},
		{"output", rule(toSandbox, gotoChain("to_sandbox"))},

		{"egress", rule(toSandbox, refuse)},
		{"egress", rule(established, accept)},
		{"egress", rule(related, icmp, accept)},
		{"egress", rule(ctState(expr.CtStateBitINVALID), drop)},
		{"egress", rule(daddrInSet(setNever, false), refuse)},
		{"egress", rule(saddrInSet(setPlain), gotoChain("public"))},
		{"egress", rule(match{loadSaddr(1), &expr.Lookup{SourceRegister: 1, SetName: setCustom, IsDestRegSet: true}})},
		{"egress", rule(refuse)},

		{"public", rule(daddrInSet(setSpecial, false), refuse)},
		{"public", rule(gotoChain("open"))},

		{"open", rule(overLimit(setConns, t.maxConns), refuse)},
		{"open", rule(clampMSS())},
		{"open", rule(accept)},

		// Nothing outside opens a connection to a sandbox.
		{"ingress", rule(established, clampMSS())},
		{"ingress", rule(established, ctReply(), accept)},
		{"ingress", rule(related, icmp, accept)},
		{"ingress", rule(drop)},

		{"to_host", rule(established, ctReply(), accept)},
		{"to_host", rule(related, icmp, accept)},
		{"to_host", rule(toResolver, saddrInSet(setDNS), udp, dport(53), accept)},
		{"to_host", rule(toResolver, saddrInSet(setDNS), tcp, dport(53), established, accept)},
		{"to_host", rule(toResolver, saddrInSet(setDNS), tcp, dport(53), overLimit(setConns, t.maxConns), refuse)},
		{"to_host", rule(toResolver, saddrInSet(setDNS), tcp, dport(53), accept)},
		{"to_host", rule(refuse)},

		{"to_sandbox", rule(ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept)},
		{"to_sandbox", rule(ofResolver, udp, sport(53), accept)},
		// "No resolver here", while the daemon is down or the sandbox has no
		// network: conntrack knows nothing of the query that it answers.
		{"to_sandbox", rule(icmpUnreachable(), accept)},
		{"to_sandbox", rule(meta(expr.MetaKeySKUID, expr.CmpOpEq, make([]byte, 4)), accept)},
		{"to_sandbox", rule(drop)},

		// A refusal that the program inside sees at once, as an error of its
		// connect, rather than a wait for a time-out.
		{"refuse", rule(tcpFlags(tcpSYN, 0), reject(unix.NFT_REJECT_TCP_RST, 0))},
		// The one refusal that gVisor's UDP sockets heed too.
		{"refuse", rule(udp, reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH))},
		{"refuse", rule(reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED))},

		{"postrouting", rule(oifPrefix(expr.CmpOpNeq, ours), ipv4(expr.CmpOpEq), saddrIn(t.prefix), match{&expr.Masq{}})},
	}
}

// marker names an empty chain after the table's fixed part, so that a daemon
// can tell whether the table that it finds is the one that it would make.
func (t table) marker() string {
	h := sha256.New()
	for _, r := range t.rules() {
		fmt.Fprint(h, r.chain)
		for _, e := range r.exprs {
			b, err := expr.Marshal(byte(nftables.TableFamilyINet), e)
			fmt.Fprint(h, b, err)
		}
	}
	for _, c := range baseChains {
		fmt.Fprint(h, c.name, *c.hook, *c.prio, c.kind)
	}
	return "layout_" + hex.EncodeToString(h.Sum(nil)[:6])
}

// create queues the whole table, in place of any that is there.
func (t table) create(c *nftables.Conn) error {
	nt := t.nft()
	c.AddTable(nt)
	c.DelTable(nt)
	c.AddTable(nt)
	for _, name := range append(slices.Clone(plainChains), t.marker()) {
		c.AddChain(&nftables.Chain{Table: nt, Name: name})
	}
	for _, name := range []string{setLinks, setPlain, setCustom, setDNS, setSpecial, setNever, setConns, setPorted} {
		var elems []nftables.SetElement
		switch name {
		case setNever:
			elems = intervals(append(slices.Clone(neverPrefixes), t.prefix))
		case setPorted:
			for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_UDPLITE, unix.IPPROTO_DCCP} {
				elems = append(elems, nftables.SetElement{Key: []byte{p}})
			}
		}
		if err := c.AddSet(t.set(name), elems); err != nil {
			return err
		}
	}
	for _, b := range baseChains {
		policy := nftables.ChainPolicyAccept
		c.AddChain(&nftables.Chain{Table: nt, Name: b.name, Hooknum: b.hook, Priority: b.prio, Type: b.kind, Policy: &policy})
	}
	for _, r := range t.rules() {
		c.AddRule(&nftables.Rule{Table: nt, Chain: &nftables.Chain{Name: r.chain}, Exprs: r.exprs})
	}
	return nil
}

// slotRules is the chain of a sandbox with rules of its own: what it allows,
// what it denies, and then what every sandbox may.
func (t table) slotRules(s int, p *policy) (out []chainRule) {
	add := func(parts ...match) { out = append(out, chainRule{slotChain(s), rule(parts...)}) }
	cidrs := func(rules []cidrRule, allow bool, then match) {
		for _, r := range rules {
			m := daddrIn(r.prefix)
			if r.port != 0 {
				m = append(append(hasPorts(), dport(r.port)...), m...)
			}
			if allow && r.public {
				m = append(m, daddrInSet(setSpecial, true)...)
			}
			add(m, then)
		}
	}
	cidrs(p.allow, true, gotoChain("open"))
	if len(p.allowDomains) > 0 {
		add(daddrPortInSet(allowSet(s), true), gotoChain("open"))
		add(daddrPortInSet(allowSet(s), false), gotoChain("open"))
	}
	cidrs(p.deny, false, gotoChain("refuse"))
	if len(p.denyDomains) > 0 {
		add(daddrPortInSet(denySet(s), true), gotoChain("refuse"))
		add(daddrPortInSet(denySet(s), false), gotoChain("refuse"))
	}
	add(gotoChain("public"))
	return out
}

// linkElement is the sandbox on its own link.
func (t table) linkElement(s int) nftables.SetElement {
	return nftables.SetElement{Key: append(ifname(t.linkName(s)), addrKey(t.address(s))...)}
}

func (t table) addrElement(s int) nftables.SetElement {
	return nftables.SetElement{Key: addrKey(t.address(s))}
}

// slotOfElement reads back the slot of an element of the sets that are keyed
// by a sandbox's address.
func (t table) slotOfElement(e nftables.SetElement) (int, bool) {
	if e.IntervalEnd || len(e.Key) < 4 {
		return 0, false
	}
	return t.indexOf(netip.AddrFrom4([4]byte(e.Key[len(e.Key)-4:])))
}
