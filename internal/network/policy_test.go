package network

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/warrenhq/warren/internal/network/dns"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestValidate(t *testing.T) {
	many := make([]sandbox.EgressRule, MaxRules+1)
	for i := range many {
		many[i] = domain("a.example", 0)
	}
	for _, tc := range []struct {
		name string
		p    sandbox.NetworkPolicy
		want string // part of the message; "" is valid
	}{
		{"zero", sandbox.NetworkPolicy{}, ""},
		{"none", sandbox.NetworkPolicy{Mode: "none"}, ""},
		{"egress", egress(nil, nil), ""},
		{"unknown mode", sandbox.NetworkPolicy{Mode: "bridge"}, `"bridge" is unknown: use "none" or "egress"`},
		{"none with rules", sandbox.NetworkPolicy{Mode: "none", Deny: many[:2]}, "its 2 rules would do nothing"},
		{"rules", egress([]sandbox.EgressRule{cidr("10.0.0.0/8", 443), domain("*.Example.com", 0), domain("registry", 5000), domain("_srv.xn--bcher-kva.example", 0)}, []sandbox.EgressRule{cidr("0.0.0.0/0", 0), cidr("127.0.0.0/8", 0)}), ""},
		{"too many", egress(many, nil), "allow has 65 rules: the most is 64"},
		{"empty rule", egress(nil, []sandbox.EgressRule{{Port: 80}}), "deny[0]: has neither"},
		{"both", egress([]sandbox.EgressRule{{CIDR: netip.MustParsePrefix("1.2.3.4/32"), Domain: "a.example"}}, nil), "allow[0]: has both"},
		{"IPv6", egress([]sandbox.EgressRule{cidr("2001:db8::/32", 0)}, nil), "not IPv4"},
		{"mapped IPv6", egress([]sandbox.EgressRule{cidr("::ffff:1.2.3.4/120", 0)}, nil), "not IPv4"},
		{"host bits", egress([]sandbox.EgressRule{cidr("10.1.2.3/8", 0)}, nil), "write 10.0.0.0/8 or 10.1.2.3/32"},
		{"loopback", egress([]sandbox.EgressRule{cidr("127.0.0.1/32", 0)}, nil), "which no rule opens"},
		{"multicast", egress([]sandbox.EgressRule{cidr("224.0.0.251/32", 0)}, nil), "which no rule opens"},
		{"invalid prefix", egress([]sandbox.EgressRule{{CIDR: netip.PrefixFrom(netip.MustParseAddr("1.2.3.4"), 40)}}, nil), "not valid"},
		{"star", egress([]sandbox.EgressRule{domain("*", 0)}, nil), "use the cidr 0.0.0.0/0"},
		{"inner star", egress([]sandbox.EgressRule{domain("a.*.example", 0)}, nil), "not its first label"},
		{"address", egress([]sandbox.EgressRule{domain("1.2.3.4", 0)}, nil), "use cidr 1.2.3.4/32"},
		{"final dot", egress([]sandbox.EgressRule{domain("a.example.", 0)}, nil), "ends in a dot"},
		{"empty label", egress([]sandbox.EgressRule{domain("a..example", 0)}, nil), "empty label"},
		{"only star dot", egress([]sandbox.EgressRule{domain("*.", 0)}, nil), "empty label"},
		{"long label", egress([]sandbox.EgressRule{domain(strings.Repeat("a", 64)+".example", 0)}, nil), "longer than 63"},
		{"long name", egress([]sandbox.EgressRule{domain(strings.Repeat("a.", 130)+"example", 0)}, nil), "longer than 253"},
		{"hyphen", egress([]sandbox.EgressRule{domain("-a.example", 0)}, nil), "hyphen"},
		{"other script", egress([]sandbox.EgressRule{domain("bücher.example", 0)}, nil), "xn--"},
		{"url", egress([]sandbox.EgressRule{domain("https://a.example/", 0)}, nil), "may hold letters"},
		{"invalid UTF-8", egress([]sandbox.EgressRule{domain("a\xff.example", 0)}, nil), "may hold letters"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := Validate(tc.p)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if sandbox.CodeOf(err) != sandbox.CodeInvalid || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestJudge(t *testing.T) {
	strict := compile(egress([]sandbox.EgressRule{domain("*.good.example", 443), domain("one.example", 0)}, []sandbox.EgressRule{cidr("0.0.0.0/0", 0)}), specialPrefixes)
	loose := compile(egress([]sandbox.EgressRule{domain("ok.bad.example", 0)}, []sandbox.EgressRule{domain("*.bad.example", 0), domain("mail.example", 25)}), specialPrefixes)
	for _, tc := range []struct {
		p    *policy
		name string
		want dns.Action
	}{
		{strict, "a.good.example", dns.Open}, {strict, "a.b.good.example", dns.Open},
		{strict, "good.example", dns.Refuse}, {strict, "evilgood.example", dns.Refuse}, {strict, "one.example", dns.Open},
		{strict, "x.one.example", dns.Refuse}, {strict, "", dns.Refuse}, {strict, ".good.example", dns.Refuse},
		{loose, "ok.bad.example", dns.Open}, {loose, "x.bad.example", dns.Block}, {loose, "bad.example", dns.Forward},
		{loose, "mail.example", dns.Close}, {loose, "anything.example", dns.Forward},
		{compile(sandbox.NetworkPolicy{Mode: "none"}, nil), "a.example", dns.Refuse}, {nil, "a.example", dns.Refuse},
	} {
		if got := tc.p.judge(tc.name); got != tc.want {
			t.Errorf("judge(%q) is %v, want %v", tc.name, got, tc.want)
		}
	}
}

// The layout's names must lead back to the slot, and no two slots may share
// an address.
func TestLayoutRoundTrips(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layout{instance: "abcdef01", runDir: "/run/warren/abcdef01", prefix: netip.MustParsePrefix("10.77.0.0/16")}
		s := rapid.IntRange(1, totalSlots).Draw(t, "slot")
		if got, ok := l.slotOfLink(l.linkName(s)); !ok || got != s {
			t.Fatalf("link %s: %d", l.linkName(s), got)
		}
		if len(l.linkName(s)) > 15 {
			t.Fatalf("link name %s is too long", l.linkName(s))
		}
		if got, ok := l.slotOf(l.address(s)); !ok || got != s {
			t.Fatalf("address %s: %d", l.address(s), got)
		}
		if _, ok := l.slotOf(l.gateway(s)); ok {
			t.Fatal("the gateway is taken for a sandbox")
		}
		p := netip.PrefixFrom(l.address(s), 30)
		if !p.Contains(l.gateway(s)) || p.Contains(l.resolver()) || !l.prefix.Contains(l.address(s)) {
			t.Fatalf("slot %d has %s, gateway %s", s, p, l.gateway(s))
		}
	})
}

func TestIntervalsAreDisjoint(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
			b := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "addr")
			return netip.PrefixFrom(netip.AddrFrom4([4]byte(b)), rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
		}), 0, 12).Draw(t, "prefixes")
		ranges := mergeRanges(list)
		last := uint64(0)
		for i, r := range ranges {
			if r[0] >= r[1] || i > 0 && r[0] <= last {
				t.Fatalf("%v → %v", list, ranges)
			}
			last = r[1]
		}
		probe := rapid.Uint32().Draw(t, "probe")
		a := netip.AddrFrom4([4]byte{byte(probe >> 24), byte(probe >> 16), byte(probe >> 8), byte(probe)})
		in := false
		for _, r := range ranges {
			in = in || uint64(probe) >= r[0] && uint64(probe) < r[1]
		}
		if in != containsAddr(list, a) {
			t.Fatalf("%s in %v is %v, in the ranges %v", a, list, !in, in)
		}
	})
}

// FuzzPolicy feeds policies as the API gets them. What Validate passes must
// compile into rules that fit, and be judged without a panic.
func FuzzPolicy(f *testing.F) {
	f.Add([]byte(`{"mode":"egress","allow":[{"cidr":"10.0.0.0/8","port":443},{"domain":"*.example.com"}],"deny":[{"cidr":"0.0.0.0/0"}]}`), "a.example.com", uint32(0x08080808), uint16(443))
	f.Add([]byte(`{"mode":"none"}`), "", uint32(0), uint16(0))
	tab := table{layout: layout{instance: "abcdef01", prefix: netip.MustParsePrefix("10.77.0.0/16")}}
	f.Fuzz(func(t *testing.T, data []byte, name string, addr uint32, port uint16) {
		var p sandbox.NetworkPolicy
		if json.Unmarshal(data, &p) != nil {
			return
		}
		if err := Validate(p); err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeInvalid {
				t.Error(err)
			}
			return
		}
		c := compile(p, specialPrefixes)
		if rules := tab.slotRules(5, c); len(rules) > 2*MaxRules+5 {
			t.Errorf("%d rules", len(rules))
		}
		dst := netip.AddrFrom4([4]byte{byte(addr >> 24), byte(addr >> 16), byte(addr >> 8), byte(addr)})
		if c.permits(dst, port, nil, nil, specialPrefixes, tab.prefix) && (containsAddr(neverPrefixes, dst) || tab.prefix.Contains(dst) || c.none) {
			t.Errorf("%s permits %s", data, dst)
		}
		c.judge(dns.Normalize(name))
	})
}

func FuzzResolvConf(f *testing.F) {
	f.Add([]byte("nameserver 1.1.1.1\nnameserver ::1\nsearch a b\noptions ndots:5\n"))
	f.Add([]byte("nameserver fe80::1%eth0\nnameserver\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, a := range parseResolvers(data) {
			if !a.IsValid() || a.Port() != 53 {
				t.Error(a)
			}
		}
	})
}

// FuzzTuple feeds what the kernel would say of a connection.
func FuzzTuple(f *testing.F) {
	f.Add([]byte{0x34, 0, 1, 0x80, 0x14, 0, 1, 0x80, 8, 0, 1, 0, 10, 64, 0, 6, 8, 0, 2, 0, 8, 8, 8, 8, 0x1c, 0, 2, 0x80, 5, 0, 1, 0, 6, 0, 0, 0, 6, 0, 2, 0, 1, 2, 0, 0, 6, 0, 3, 0, 0, 80, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		if raw, fl, ok := origTuple(data); ok && (!fl.src.Is4() || len(raw) == 0) {
			t.Error(fl)
		}
	})
}
