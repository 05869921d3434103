package network

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
)

// The bounds of a policy. A sandbox with rules costs one nftables chain, and
// every packet that opens a connection walks it.
const (
	MaxRules       = 64  // rules in Allow, and in Deny
	maxDomainBytes = 253 // RFC 1035, section 2.3.4, less the root's own bytes
)

// neverPrefixes are what no rule opens: they mean this host or nobody.
// Sources: RFC 6890 (0/8, 127/8, 240/4, 255.255.255.255), RFC 5771 (224/4).
var neverPrefixes = prefixes("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "240.0.0.0/4")

// linkLocal holds the clouds' metadata services. Only a CIDR rule inside it
// opens it; a name that resolves into it does not.
var linkLocal = netip.MustParsePrefix("169.254.0.0/16")

// specialPrefixes are denied unless a rule lies inside them. Source: the IANA
// IPv4 special-purpose address registry (RFC 6890), without the three ranges
// for documentation, which lead nowhere. A host's own on-link prefixes are
// added to them at run time.
var specialPrefixes = append(prefixes(
	"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", // RFC 1918
	"100.64.0.0/10",   // RFC 6598, shared by carriers
	"192.0.0.0/24",    // RFC 6890, protocol assignments
	"192.88.99.0/24",  // RFC 7526, 6to4 relays
	"198.18.0.0/15",   // RFC 2544, benchmarks
	"169.254.0.0/16"), // RFC 3927, link-local
	neverPrefixes...)

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// Validate checks a policy: the mode, the number of rules, and that each has
// exactly one destination of a form that can be matched. The error has
// CodeInvalid and names the rule ("allow[2]: …").
func Validate(p sandbox.NetworkPolicy) error {
	switch p.Mode {
	case sandbox.NetworkEgress, "":
	case sandbox.NetworkNone:
		if n := len(p.Allow) + len(p.Deny); n > 0 {
			return sandbox.Errorf(sandbox.CodeInvalid, "network mode %q reaches nothing, so its %d rules would do nothing: leave them out, or use mode %q", p.Mode, n, sandbox.NetworkEgress)
		}
	default:
		return sandbox.Errorf(sandbox.CodeInvalid, "network mode %q is unknown: use %q or %q", clip(string(p.Mode)), sandbox.NetworkNone, sandbox.NetworkEgress)
	}
	for _, l := range []struct {
		name  string
		rules []sandbox.EgressRule
		allow bool
	}{{"allow", p.Allow, true}, {"deny", p.Deny, false}} {
		if len(l.rules) > MaxRules {
			return sandbox.Errorf(sandbox.CodeInvalid, "%s has %d rules: the most is %d; join CIDRs, or use a wildcard domain", l.name, len(l.rules), MaxRules)
		}
		for i, r := range l.rules {
			if why := checkRule(r, l.allow); why != "" {
				return sandbox.Errorf(sandbox.CodeInvalid, "%s[%d]: %s", l.name, i, why)
			}
		}
	}
	return nil
}

// checkRule says what is wrong with r, or "".
func checkRule(r sandbox.EgressRule, allow bool) string {
	hasCIDR := r.CIDR != netip.Prefix{}
	switch {
	case hasCIDR && r.Domain != "":
		return "has both a cidr and a domain: make two rules of it"
	case !hasCIDR && r.Domain == "":
		return "has neither a cidr nor a domain: give one"
	case !hasCIDR:
		return checkDomain(r.Domain)
	case !r.CIDR.IsValid():
		return "the cidr is not valid: write it as 203.0.113.0/24"
	case !r.CIDR.Addr().Is4():
		return "cidr " + r.CIDR.String() + " is not IPv4: sandboxes have no IPv6"
	case r.CIDR != r.CIDR.Masked():
		return "cidr " + r.CIDR.String() + " has bits set beyond its length: write " + r.CIDR.Masked().String() + " or " + netip.PrefixFrom(r.CIDR.Addr(), 32).String()
	case allow && within(r.CIDR, neverPrefixes):
		return "cidr " + r.CIDR.String() + " is loopback, multicast or reserved, which no rule opens"
	}
	return ""
}

func checkDomain(d string) string {
	shown := `domain "` + clip(d) + `"`
	name := strings.TrimPrefix(d, "*.")
	switch {
	case d == "*":
		return shown + " matches every name: use the cidr 0.0.0.0/0"
	case len(name) > maxDomainBytes:
		return shown + " is longer than 253 bytes"
	case strings.Contains(name, "*"):
		return shown + " has a wildcard that is not its first label: write *.example.com"
	case strings.HasSuffix(name, "."):
		return shown + " ends in a dot: leave it out"
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return shown + " is an address: use cidr " + name + "/32"
	}
	for label := range strings.SplitSeq(name, ".") {
		switch {
		case label == "":
			return shown + " has an empty label"
		case len(label) > 63:
			return shown + " has a label longer than 63 bytes"
		case label[0] == '-' || label[len(label)-1] == '-':
			return shown + " has a label that begins or ends with a hyphen"
		}
		for _, c := range []byte(label) {
			if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
				return shown + " may hold letters, digits, hyphens and dots; write other scripts in their xn-- form"
			}
		}
	}
	return ""
}

func clip(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

func within(p netip.Prefix, ranges []netip.Prefix) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool {
		return r.Bits() <= p.Bits() && r.Contains(p.Addr())
	})
}

func containsAddr(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(r netip.Prefix) bool { return r.Contains(a) })
}

// cidrRule is one compiled CIDR rule.
type cidrRule struct {
	prefix netip.Prefix
	port   uint16 // 0 is any
	public bool   // it does not lie inside a special range, so it opens none
}

// domainRule is one compiled domain rule.
type domainRule struct {
	name     string // lower case, without "*."
	wildcard bool
	port     uint16
}

func (r domainRule) matches(name string) bool {
	if r.wildcard {
		return len(name) > len(r.name)+1 && strings.HasSuffix(name, r.name) && name[len(name)-len(r.name)-1] == '.'
	}
	return name == r.name
}

// policy is a NetworkPolicy made ready to match.
type policy struct {
	none         bool
	allow, deny  []cidrRule
	allowDomains []domainRule
	denyDomains  []domainRule
	denyAll      bool // Deny covers every address on every port
}

// compile expects a policy that Validate passed. special decides which allow
// rules open special ranges.
func compile(p sandbox.NetworkPolicy, special []netip.Prefix) *policy {
	c := &policy{none: p.Mode == sandbox.NetworkNone}
	split := func(rules []sandbox.EgressRule) (cidrs []cidrRule, domains []domainRule) {
		for _, r := range rules {
			if r.Domain == "" {
				cidrs = append(cidrs, cidrRule{prefix: r.CIDR, port: r.Port, public: !within(r.CIDR, special)})
				continue
			}
			name := strings.ToLower(r.Domain)
			bare := strings.TrimPrefix(name, "*.")
			domains = append(domains, domainRule{name: bare, wildcard: bare != name, port: r.Port})
		}
		return cidrs, domains
	}
	c.allow, c.allowDomains = split(p.Allow)
	c.deny, c.denyDomains = split(p.Deny)
	c.denyAll = slices.ContainsFunc(c.deny, func(r cidrRule) bool { return r.prefix.Bits() == 0 && r.port == 0 })
	return c
}

// plain tells whether the policy is egress without any rule: most are, and
// they share one chain.
func (p *policy) plain() bool {
	return !p.none && len(p.allow)+len(p.deny)+len(p.allowDomains)+len(p.denyDomains) == 0
}

// ports gives the ports of the rules that match name, 0 for any.
func ports(rules []domainRule, name string) (out []uint16) {
	for _, r := range rules {
		if r.matches(name) {
			out = append(out, r.port)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// target is what a name opened or closed: an address on a port, 0 for any.
type target struct {
	addr netip.Addr
	port uint16
}

// permits mirrors the sandbox's nftables chain: it decides whether a
// connection may stay after a change of policy. port is 0 for protocols
// without ports.
func (p *policy) permits(dst netip.Addr, port uint16, allowed, denied map[target]named, special []netip.Prefix, own netip.Prefix) bool {
	hit := func(rules []cidrRule) bool {
		return slices.ContainsFunc(rules, func(r cidrRule) bool {
			return r.prefix.Contains(dst) && (r.port == 0 || r.port == port) &&
				(!r.public || !containsAddr(special, dst))
		})
	}
	has := func(m map[target]named) bool {
		_, any := m[target{dst, 0}]
		_, one := m[target{dst, port}]
		return any || one && port != 0
	}
	switch {
	case p.none, own.Contains(dst), containsAddr(neverPrefixes, dst):
		return false
	case hit(p.allow), has(allowed):
		return true
	case slices.ContainsFunc(p.deny, func(r cidrRule) bool {
		return r.prefix.Contains(dst) && (r.port == 0 || r.port == port)
	}), has(denied):
		return false
	}
	return !containsAddr(special, dst)
}
