package network

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/vishvananda/netlink"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestExhaustionAndReuse(t *testing.T) {
	newWorld(t)
	n := open(t, func(c *Config) { c.slots = 4; c.PoolSize = 2 })
	var links []sandbox.Link
	for range 4 {
		links = append(links, acquire(t, n, egress(nil, nil)))
	}
	if used, total := n.Capacity(); used != 4 || total != 4 {
		t.Errorf("capacity is %d of %d", used, total)
	}
	if _, err := n.Acquire(t.Context(), "sbx1", egress(nil, nil)); sandbox.CodeOf(err) != sandbox.CodeNoCapacity {
		t.Errorf("the fifth of four: %v", err)
	}
	for range 2 { // Release is idempotent
		if err := n.Release(t.Context(), links[1]); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(links[1].NetNS); !errors.Is(err, os.ErrNotExist) {
		t.Error("the pin of a released slot:", err)
	}
	again := acquire(t, n, egress(nil, nil))
	if again.Slot != links[1].Slot {
		t.Errorf("got slot %d, not %d", again.Slot, links[1].Slot)
	}
	mustReach(t, again, publicA+":80")
	if err := n.SetPolicy(t.Context(), sandbox.Link{Slot: 9}, egress(nil, nil)); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Error("SetPolicy of nothing:", err)
	}
}

// A released slot's namespace must be gone, not only its name: a link of ours
// in it goes with it.
func TestReleasedNamespaceDies(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	l := acquire(t, n, egress(nil, nil))
	fd, err := os.Open(l.NetNS)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "canary0"
	v := netlink.NewVeth(attrs)
	v.PeerName, v.PeerNamespace = "canary1", netlink.NsFd(fd.Fd())
	if err := netlink.LinkAdd(v); err != nil {
		t.Fatal(err)
	}
	fd.Close()
	// A mount namespace that copied the pin must not keep it.
	keeper := exec.Command("sleep", "60")
	keeper.SysProcAttr = newMountNS()
	if err := keeper.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { keeper.Process.Kill(); keeper.Wait() }()
	if err := n.Release(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(long)
	for {
		if _, err := netlink.LinkByName("canary0"); err != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the namespace of a released slot lives on")
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestConcurrentAcquire(t *testing.T) {
	newWorld(t)
	n := open(t, func(c *Config) { c.PoolSize = 4 })
	const many = 24
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[int]bool{}
	for range many {
		wg.Go(func() {
			l, err := n.Acquire(t.Context(), sandbox.NewID(), egress(nil, []sandbox.EgressRule{cidr(publicB+"/32", 0)}))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			if seen[l.Slot] {
				t.Errorf("slot %d was given twice", l.Slot)
			}
			seen[l.Slot] = true
			mu.Unlock()
			mustReach(t, l, publicA+":80")
			mustNotReach(t, l, publicB+":80")
			if l.Slot%2 == 0 {
				if err := n.Release(context.Background(), l); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

func TestRestartAdoptsAndSweeps(t *testing.T) {
	newWorld(t)
	u, addr := newUpstream(t)
	u.set("internal.example", "internal.example. 300 IN A "+private)
	cfg := testConfig(t)
	cfg.Resolvers = []netip.AddrPort{addr}
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	plain, gone := acquire(t, n, egress(nil, nil)), acquire(t, n, egress(nil, nil))
	named := acquire(t, n, egress([]sandbox.EgressRule{domain("internal.example", 80)}, nil))
	if _, err := ask(t, named, "udp", "internal.example", mdns.TypeA); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), cfg); sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Error("a second daemon on one state directory:", err)
	}
	prefix := n.Prefix()
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	// Without a daemon, everything holds but names.
	mustReach(t, plain, publicA+":80")
	mustReach(t, named, private+":80")
	mustNotReach(t, plain, private+":80", metadata+":80", hostAddr+":7070")

	n, err = Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, l := range []sandbox.Link{plain, named} {
			if err := n.Release(t.Context(), l); err != nil {
				t.Error(err)
			}
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		mustBeClean(t, cfg)
	}()
	if n.Prefix() != prefix {
		t.Errorf("the range moved from %s to %s", prefix, n.Prefix())
	}
	mustReach(t, plain, publicA+":80")
	if err := n.Adopt(t.Context(), plain, "sbxplain", egress(nil, nil)); err != nil {
		t.Fatal(err)
	}
	if err := n.Adopt(t.Context(), named, "sbxnamed", egress([]sandbox.EgressRule{domain("internal.example", 80)}, nil)); err != nil {
		t.Fatal(err)
	}
	mustReach(t, named, private+":80") // opened by the earlier daemon
	mustNotReach(t, named, private+":443")
	never := n.builder.link(77)
	if err := n.Adopt(t.Context(), never, "sbxnever", egress(nil, nil)); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Error("adopting what never was:", err)
	}
	if err := n.Sweep(t.Context(), map[int]sandbox.ID{plain.Slot: "sbxplain"}); err != nil {
		t.Fatal(err)
	}
	if _, err := netlink.LinkByName(n.builder.linkName(gone.Slot)); err == nil {
		t.Error("Sweep left the link of a slot that nobody uses")
	}
	if _, err := os.Stat(gone.NetNS); err == nil {
		t.Error("Sweep left the pin of a slot that nobody uses")
	}
	if h := n.rules.held(gone.Slot); h != (held{}) {
		t.Error("Sweep left rules of a slot that nobody uses:", h)
	}
	mustReach(t, plain, publicA+":80")
	mustReach(t, named, private+":80")
	if err := n.SetPolicy(t.Context(), named, egress(nil, nil)); err != nil {
		t.Fatal(err)
	}
	mustNotReach(t, named, private+":80")
}

func TestTwoDaemons(t *testing.T) {
	newWorld(t)
	a, b := open(t, nil), open(t, nil)
	if a.Prefix().Overlaps(b.Prefix()) {
		t.Fatalf("ranges %s and %s overlap", a.Prefix(), b.Prefix())
	}
	open := egress([]sandbox.EgressRule{cidr("10.0.0.0/8", 0)}, nil)
	la, lb := acquire(t, a, open), acquire(t, b, open)
	mustReach(t, la, publicA+":80")
	mustReach(t, lb, publicA+":80")
	if _, err := inside(t, lb.NetNS, func() (int, error) { return 0, echoUDP(lb.Address.Addr().String() + ":80") }); err != nil {
		t.Fatal(err)
	}
	if err := pingUDP(t, la, lb.Address.Addr().String()+":80", short); err == nil {
		t.Error("a sandbox reached one of another daemon")
	}
	mustNotReach(t, la, lb.Gateway.String()+":7070", b.Resolver().String()+":7070")
}

func TestRangeAvoidsRoutesAndStaysClear(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t)
	if err := os.MkdirAll(cfg.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, dst := range []string{"10.0.0.0/8", "172.16.0.0/13"} {
		p := netip.MustParsePrefix(dst)
		r := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: ipNet(p.Addr().AsSlice(), p.Bits()), Scope: netlink.SCOPE_LINK, Table: 77}
		if err := netlink.RouteAdd(r); err != nil {
			t.Fatal(err)
		}
		defer netlink.RouteDel(r)
	}
	// One whose state directory is gone is forgotten.
	stale := testConfig(t)
	if err := os.MkdirAll(filepath.Join(cfg.HostDir, "networks"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := writeJSON(registryPath(stale), record{Instance: stale.Instance, StateDir: "/nonexistent/warren", Prefix: netip.MustParsePrefix("172.24.0.0/16")}); err != nil {
		t.Fatal(err)
	}
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if n.Prefix() != netip.MustParsePrefix("172.24.0.0/16") {
		t.Errorf("chose %s", n.Prefix())
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	mustBeClean(t, cfg)
	if _, err := os.Stat(registryPath(stale)); err == nil {
		t.Error("a stale registry entry stays")
	}
}

func TestFlushedRulesetIsRestored(t *testing.T) {
	n, _ := openWithNames(t)
	l := acquire(t, n, egress([]sandbox.EgressRule{domain("internal.example", 0)}, nil))
	none := acquire(t, n, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	if _, err := ask(t, l, "udp", "internal.example", mdns.TypeA); err != nil {
		t.Fatal(err)
	}
	if err := n.rules.drop(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(long)
	for n.rules.held(l.Slot) == (held{}) || n.rules.held(none.Slot) == (held{}) {
		if time.Now().After(deadline) {
			t.Fatal("the table stays away")
		}
		time.Sleep(5 * time.Millisecond)
	}
	for {
		if c, err := dial(t, l, private+":80"); err == nil {
			c.Close()
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	mustReach(t, l, publicA+":80")
	mustNotReach(t, l, private2+":80")
	mustNotReach(t, none, publicA+":80")
}

func TestHostNetworksAreFollowed(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	up, err := netlink.LinkByName("uplink0")
	if err != nil {
		t.Fatal(err)
	}
	a := &netlink.Addr{IPNet: ipNet([]byte{9, 9, 9, 1}, 24)}
	if err := netlink.AddrAdd(up, a); err != nil {
		t.Fatal(err)
	}
	defer netlink.AddrDel(up, a)
	has := func() bool { return within(netip.MustParsePrefix("9.9.9.0/24"), n.rules.specialNow()) }
	for deadline := time.Now().Add(long); !has(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a new network of the host is not denied")
		}
	}
	l := acquire(t, n, egress(nil, nil))
	mustNotReach(t, l, publicB+":80")
}

func TestCheckNamesOtherFirewalls(t *testing.T) {
	newWorld(t)
	nft := "/usr/sbin/nft"
	if _, err := os.Stat(nft); err != nil {
		t.Skip("needs nft: install nftables")
	}
	n, _ := openWithNames(t)
	if bad := n.Check(t.Context()); len(bad) != 0 {
		t.Error("a good host is found fault with:", bad)
	}
	run := func(script string) {
		t.Helper()
		cmd := exec.Command(nft, "-f", "-")
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	run("table ip filter {\nchain FORWARD { type filter hook forward priority 0; policy drop; }\nchain DOCKER-USER { }\nchain INPUT { type filter hook input priority 0; policy drop; ct state established accept; }\n}\n")
	defer run("delete table ip filter")
	bad := n.Check(t.Context())
	all := ""
	for _, e := range bad {
		all += e.Message + "\n"
	}
	for _, want := range []string{"iptables -I DOCKER-USER -i " + n.builder.linkPrefix() + "+ -j ACCEPT", "iptables -I INPUT -i " + n.builder.linkPrefix() + "+ -j ACCEPT"} {
		if !strings.Contains(all, want) {
			t.Errorf("Check does not say %q:\n%s", want, all)
		}
	}
	l := acquire(t, n, egress(nil, nil))
	if c, err := dialWithin(t, l, publicA+":80", short); err == nil {
		c.Close()
		t.Error("the other firewall does not drop: this test is wrong")
	}
	run("insert rule ip filter FORWARD iifname \"" + n.builder.linkPrefix() + "*\" accept; insert rule ip filter FORWARD oifname \"" + n.builder.linkPrefix() + "*\" accept; insert rule ip filter INPUT iifname \"" + n.builder.linkPrefix() + "*\" accept")
	if bad := n.Check(t.Context()); len(bad) != 0 {
		t.Error("the remedy was applied, and is asked for again:", bad)
	}
	mustReach(t, l, publicA+":80")
	mustNotReach(t, l, private+":80")
}

func TestClosed(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t)
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	mustBeClean(t, cfg)
	if _, err := n.Acquire(t.Context(), "sbx", egress(nil, nil)); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
		t.Error(err)
	}
}

func TestCanceledAcquireLeavesNothing(t *testing.T) {
	newWorld(t)
	n := open(t, func(c *Config) { c.PoolSize = -1 })
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Millisecond)
		l, err := n.Acquire(ctx, "sbx", egress(nil, nil))
		cancel()
		if err == nil {
			err = n.Release(t.Context(), l)
		}
		if err != nil && sandbox.CodeOf(err) != sandbox.CodeTimeout && sandbox.CodeOf(err) != sandbox.CodeCanceled {
			t.Error(err)
		}
	}
	onHost, err := n.builder.onHost()
	if err != nil || len(onHost) > 0 {
		t.Error("left:", onHost, err)
	}
}

// A daemon that died between a slot's release and the forgetting of its
// connections must not hand them on: the next sandbox of the slot could go on
// with one that its policy denies.
func TestConnectionsOfTheDeadAreForgotten(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t)
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	kept, gone := acquire(t, n, egress(nil, nil)), acquire(t, n, egress(nil, nil))
	for _, l := range []sandbox.Link{kept, gone} {
		if err := pingUDP(t, l, publicA+":80", long); err != nil {
			t.Fatal(err)
		}
	}
	n.cancel() // and so nobody forgets
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.wg.Wait()
	if err := n.remove(n.used[gone.Slot]); err != nil {
		t.Fatal(err)
	}
	if err := n.dns.Close(); err != nil {
		t.Fatal(err)
	}
	n.unlock()
	n, err = Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	count := func(l sandbox.Link) (k int) {
		if _, err := forget(func(f flow) bool {
			if f.src == l.Address.Addr() {
				k++
			}
			return false
		}); err != nil {
			t.Fatal(err)
		}
		return k
	}
	if count(kept) == 0 || count(gone) != 0 {
		t.Errorf("%d connections of the living, %d of the dead", count(kept), count(gone))
	}
	if err := n.Sweep(t.Context(), nil); err != nil {
		t.Error(err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	mustBeClean(t, cfg)
}
