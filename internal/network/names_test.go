package network

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/warrenhq/warren/internal/sandbox"
)

func openWithNames(t *testing.T) (*Network, *upstream) {
	t.Helper()
	newWorld(t)
	u, addr := newUpstream(t)
	u.set("public.example", "public.example. 300 IN A "+publicA, "public.example. 300 IN AAAA 2001:db8::1", "public.example. 300 IN TXT \"hello\"")
	u.set("other.example", "other.example. 300 IN A "+publicB)
	u.set("internal.example", "internal.example. 5 IN A "+private)
	u.set("api.internal.example", "api.internal.example. 5 IN A "+private2)
	u.set("alias.example", "alias.example. 60 IN CNAME other.example.", "other.example. 60 IN A "+publicB, "stray.example. 60 IN A "+publicC)
	u.set("rebind.example", "rebind.example. 1 IN A "+private, "rebind.example. 1 IN A 127.0.0.1", "rebind.example. 1 IN A "+metadata, "rebind.example. 1 IN A "+hostAddr)
	var big []string
	for i := range 200 {
		big = append(big, "big.example. 60 IN TXT \""+strings.Repeat("x", 40)+string(rune('a'+i%26))+"\"")
	}
	u.set("big.example", big...)
	return open(t, func(c *Config) { c.Resolvers = []netip.AddrPort{addr} }), u
}

func addrsOf(m *mdns.Msg) (out []string) {
	for _, rr := range m.Answer {
		if a, ok := rr.(*mdns.A); ok {
			out = append(out, a.A.String())
		}
	}
	return out
}

func TestNamesResolve(t *testing.T) {
	n, _ := openWithNames(t)
	l := acquire(t, n, egress(nil, nil))
	for _, network := range []string{"udp", "tcp"} {
		m, err := ask(t, l, network, "PUBLIC.example", mdns.TypeA)
		if err != nil || m.Rcode != 0 || len(addrsOf(m)) != 1 || addrsOf(m)[0] != publicA {
			t.Errorf("%s: %v, %v", network, m, err)
		}
		if m, err = ask(t, l, network, "nothing.example", mdns.TypeA); err != nil || m.Rcode != mdns.RcodeNameError {
			t.Errorf("%s: an unknown name: %v, %v", network, m, err)
		}
		if m, err = ask(t, l, network, "public.example", mdns.TypeTXT); err != nil || len(m.Answer) != 1 {
			t.Errorf("%s: TXT: %v, %v", network, m, err)
		}
	}
	// There is no IPv6, so no such address is told.
	if m, err := ask(t, l, "udp", "public.example", mdns.TypeAAAA); err != nil || m.Rcode != 0 || len(m.Answer) != 0 {
		t.Errorf("AAAA: %v, %v", m, err)
	}
	m, err := ask(t, l, "udp", "big.example", mdns.TypeTXT)
	if err != nil || !m.Truncated {
		t.Errorf("a big answer over UDP must say so: %v", err)
	}
	if m, err = ask(t, l, "tcp", "big.example", mdns.TypeTXT); err != nil || len(m.Answer) != 200 {
		t.Errorf("a big answer over TCP: %v", err)
	}
	// Rebinding: the answer passes, and opens nothing.
	if m, err = ask(t, l, "udp", "rebind.example", mdns.TypeA); err != nil || len(m.Answer) != 4 {
		t.Errorf("rebind: %v, %v", m, err)
	}
	mustNotReach(t, l, private+":80", metadata+":80", hostAddr+":7070")
}

func TestAllowedNames(t *testing.T) {
	n, u := openWithNames(t)
	l := acquire(t, n, egress([]sandbox.EgressRule{domain("public.example", 443), domain("*.internal.example", 0), domain("rebind.example", 0)},
		[]sandbox.EgressRule{cidr("0.0.0.0/0", 0)}))
	mustNotReach(t, l, publicA+":443", private2+":80")
	if m, err := ask(t, l, "udp", "public.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Fatal(m, err)
	}
	mustReach(t, l, publicA+":443")
	mustNotReach(t, l, publicA+":80", publicB+":443")
	if m, err := ask(t, l, "tcp", "API.internal.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Fatal(m, err)
	}
	mustReach(t, l, private2+":80", private2+":443")
	// Asked again, it is prolonged, not refused.
	for range 3 {
		if m, err := ask(t, l, "udp", "api.internal.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
			t.Fatal(m, err)
		}
	}
	// The wildcard is not its own apex, and a name that nothing allows is not
	// even asked for: a query can carry data out.
	for _, name := range []string{"internal.example", "secret-data.evil.example", "other.example", "8.8.8.8.in-addr.arpa"} {
		if m, err := ask(t, l, "udp", name, mdns.TypeA); err != nil || m.Rcode != mdns.RcodeRefused {
			t.Errorf("%s: %v, %v", name, m, err)
		}
		if u.count(name) != 0 {
			t.Errorf("%s was asked for upstream", name)
		}
	}
	// An allowed name opens private addresses, but never the host, metadata or
	// loopback.
	if m, err := ask(t, l, "udp", "rebind.example", mdns.TypeA); err != nil || len(m.Answer) != 4 {
		t.Fatal(m, err)
	}
	mustReach(t, l, private+":80")
	mustNotReach(t, l, metadata+":80", hostAddr+":7070")
}

func TestDeniedNames(t *testing.T) {
	n, _ := openWithNames(t)
	l := acquire(t, n, egress([]sandbox.EgressRule{domain("api.internal.example", 0)},
		[]sandbox.EgressRule{domain("other.example", 0), domain("*.internal.example", 0), domain("public.example", 80)}))
	// An exact name's addresses are closed without anybody asking.
	deadline := time.Now().Add(long)
	for {
		c, err := dial(t, l, publicB+":80")
		if err != nil {
			break
		}
		c.Close()
		if time.Now().After(deadline) {
			t.Fatal("the addresses of a denied name stay open")
		}
		time.Sleep(20 * time.Millisecond)
	}
	for _, name := range []string{"other.example", "alias.example"} {
		if m, err := ask(t, l, "udp", name, mdns.TypeA); err != nil || m.Rcode != mdns.RcodeNameError || len(m.Answer) != 0 {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
	mustNotReach(t, l, publicB+":80", publicB+":443")
	// On one port only: the name exists, and the rest of it is open.
	if m, err := ask(t, l, "udp", "public.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Errorf("public.example: %v, %v", m, err)
	}
	mustReach(t, l, publicA+":443", publicC+":80")
	mustNotReach(t, l, publicA+":80")
	// Allow goes before Deny.
	if m, err := ask(t, l, "udp", "api.internal.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Errorf("api.internal.example: %v, %v", m, err)
	}
	mustReach(t, l, private2+":80")
}

func TestSetPolicyIsLive(t *testing.T) {
	n, _ := openWithNames(t)
	l := acquire(t, n, egress(nil, nil))
	conns := map[string]interface {
		Write([]byte) (int, error)
		Read([]byte) (int, error)
		SetDeadline(time.Time) error
		Close() error
	}{}
	for _, a := range []string{publicA + ":80", publicB + ":80"} {
		c, err := dial(t, l, a)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[a] = c
	}
	works := func(a string) bool {
		c := conns[a]
		c.SetDeadline(time.Now().Add(long))
		if _, err := c.Write([]byte("x")); err != nil {
			return false
		}
		_, err := c.Read(make([]byte, 1))
		return err == nil
	}
	set := func(p sandbox.NetworkPolicy) {
		t.Helper()
		if err := n.SetPolicy(t.Context(), l, p); err != nil {
			t.Fatal(err)
		}
	}
	if !works(publicA+":80") || !works(publicB+":80") {
		t.Fatal("the connections do not work")
	}
	set(egress(nil, []sandbox.EgressRule{cidr(publicA+"/32", 0)}))
	mustNotReach(t, l, publicA+":80")
	if works(publicA + ":80") {
		t.Error("a connection that is now denied goes on")
	}
	if !works(publicB + ":80") {
		t.Error("a connection that is still allowed was cut")
	}
	set(egress([]sandbox.EgressRule{domain("internal.example", 0), domain("api.internal.example", 0)}, nil))
	mustReach(t, l, publicA+":80")
	for _, name := range []string{"internal.example", "api.internal.example"} {
		if _, err := ask(t, l, "udp", name, mdns.TypeA); err != nil {
			t.Fatal(err)
		}
	}
	mustReach(t, l, private+":80", private2+":80")
	// One name stays allowed, the other does not.
	set(egress([]sandbox.EgressRule{domain("internal.example", 0)}, nil))
	mustReach(t, l, private+":80")
	mustNotReach(t, l, private2+":80")
	set(sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	mustNotReach(t, l, publicA+":80", private+":80")
	if works(publicB + ":80") {
		t.Error("a connection goes on without a network")
	}
	set(egress(nil, nil))
	mustReach(t, l, publicA+":80")
	mustNotReach(t, l, private+":80")
}

func TestQueriesAreBounded(t *testing.T) {
	n, _ := openWithNames(t)
	l := acquire(t, n, egress(nil, nil))
	_, err := inside(t, l.NetNS, func() (int, error) {
		c, err := mdns.Dial("udp", l.DNS.String()+":53")
		if err != nil {
			return 0, err
		}
		defer c.Close()
		q := new(mdns.Msg)
		q.SetQuestion("public.example.", mdns.TypeA)
		for range 2000 {
			c.WriteMsg(q)
		}
		got := 0
		c.SetReadDeadline(time.Now().Add(2 * time.Second))
		for {
			if _, err := c.ReadMsg(); err != nil {
				break
			}
			got++
		}
		if got == 0 || got > 1500 {
			t.Errorf("%d answers to 2000 queries at once", got)
		}
		return 0, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	// Another sandbox does not notice.
	other := acquire(t, n, egress(nil, nil))
	if m, err := ask(t, other, "udp", "public.example", mdns.TypeA); err != nil || len(addrsOf(m)) != 1 {
		t.Error(m, err)
	}
}
