package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// The test's world: this process's namespace is the host, with its uplink in
// 192.0.2.0/24; behind it a router that owns public, private and link-local
// addresses, with an echo server on every one.
const (
	publicA  = "8.8.8.8"
	publicB  = "9.9.9.9"
	publicC  = "93.184.216.34"
	private  = "10.200.7.7"
	private2 = "172.16.5.5"
	carrier  = "100.64.3.3"
	metadata = "169.254.169.254"
	router   = "192.0.2.1" // on the host's own network
	hostAddr = "192.0.2.2"
)

type world struct {
	ns string // pin of the router's namespace
}

var (
	worldOnce sync.Once
	theWorld  *world
	worldErr  error
)

// worldClosers end the world's servers.
var worldClosers struct {
	sync.Mutex
	list []io.Closer
}

func closeLater(c io.Closer) {
	worldClosers.Lock()
	defer worldClosers.Unlock()
	worldClosers.list = append(worldClosers.list, c)
}

func closeWorld() {
	worldClosers.Lock()
	defer worldClosers.Unlock()
	for _, c := range worldClosers.list {
		c.Close()
	}
	if theWorld != nil {
		unix.Unmount(filepath.Dir(theWorld.ns), unix.MNT_DETACH)
		os.Remove(filepath.Dir(theWorld.ns))
		os.RemoveAll(hostDir())
	}
}

// newWorld makes the world once for the whole test process.
func newWorld(t testing.TB) *world {
	t.Helper()
	testenv.Root(t)
	worldOnce.Do(func() { theWorld, worldErr = makeWorld() })
	if worldErr != nil {
		t.Fatal("making the test's world:", worldErr)
	}
	return theWorld
}

func makeWorld() (*world, error) {
	dir, err := os.MkdirTemp("", "warren-world-")
	if err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil {
		return nil, err
	}
	w := &world{ns: filepath.Join(dir, "router")}
	if err := os.WriteFile(w.ns, nil, 0o600); err != nil {
		return nil, err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return nil, err
	}
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer host.Close()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			self := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
			if err := unix.Mount(self, w.ns, "", unix.MS_BIND, ""); err != nil {
				return err
			}
			fd, err := unix.Open(self, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "uplink0"
			v := netlink.NewVeth(attrs)
			v.PeerName, v.PeerNamespace = "eth0", netlink.NsFd(fd)
			if err := host.LinkAdd(v); err != nil {
				return err
			}
			eth, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			errs := []error{netlink.LinkSetUp(lo), netlink.LinkSetUp(eth),
				netlink.AddrAdd(eth, &netlink.Addr{IPNet: ipNet(net.ParseIP(router).To4(), 24)})}
			for _, a := range []string{publicA, publicB, publicC, private, private2, carrier, metadata} {
				errs = append(errs, netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(net.ParseIP(a).To4(), 32)}),
					echoUDP(a+":80"), echoUDP(a+":443"), echoUDP(a+":53"))
			}
			for _, port := range []string{"80", "443", "53", "7070"} {
				errs = append(errs, echo(port))
			}
			return errors.Join(errs...)
		}()
	}()
	if err := <-done; err != nil {
		return nil, err
	}
	up, err := netlink.LinkByName("uplink0")
	if err != nil {
		return nil, err
	}
	return w, errors.Join(
		netlink.AddrAdd(up, &netlink.Addr{IPNet: ipNet(net.ParseIP(hostAddr).To4(), 24)}),
		netlink.LinkSetUp(up),
		netlink.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: net.ParseIP(router)}),
		echo("7070"), // the host's own service, on every address
		echoUDP("0.0.0.0:7070"),
	)
}

// echoUDP answers datagrams at one address, from that address.
func echoUDP(addr string) error {
	u, err := net.ListenPacket("udp4", addr)
	if err != nil {
		return err
	}
	closeLater(u)
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			u.WriteTo(b[:n], from)
		}
	}()
	return nil
}

// echo serves TCP on port, in the calling thread's namespace, to the
// end of the process: it answers with the peer's address first.
func echo(port string) error {
	l, err := net.Listen("tcp4", "0.0.0.0:"+port)
	if err != nil {
		return err
	}
	closeLater(l)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			closeLater(c) // for those whose end never hears that it is cut
			go func() { defer c.Close(); fmt.Fprintf(c, "%s\n", c.RemoteAddr()); io.Copy(c, c) }()
		}
	}()
	return nil
}

// inside runs f in a thread of the namespace that path pins.
func inside[T any](t testing.TB, path string, f func() (T, error)) (T, error) {
	t.Helper()
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends here
		var r result
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- result{err: fmt.Errorf("namespace of the test: %w", err)}
			return
		}
		defer unix.Close(fd)
		if r.err = unix.Setns(fd, unix.CLONE_NEWNET); r.err == nil {
			r.v, r.err = f()
		}
		done <- r
	}()
	r := <-done
	return r.v, r.err
}

const (
	short = 700 * time.Millisecond // for what must fail at once
	long  = 10 * time.Second       // for what must succeed, on a busy machine
)

// dial opens a TCP connection from inside and reads the first line.
func dial(t testing.TB, l sandbox.Link, addr string) (net.Conn, error) {
	t.Helper()
	return dialWithin(t, l, addr, long)
}

func dialWithin(t testing.TB, l sandbox.Link, addr string, wait time.Duration) (net.Conn, error) {
	t.Helper()
	return inside(t, l.NetNS, func() (net.Conn, error) {
		d := net.Dialer{Timeout: wait}
		c, err := d.Dial("tcp4", addr)
		if err != nil {
			return nil, err
		}
		c.SetReadDeadline(time.Now().Add(wait))
		if _, err := readLine(c); err != nil {
			c.Close()
			return nil, err
		}
		return c, nil
	})
}

func readLine(c net.Conn) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := c.Read(b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
}

func mustReach(t testing.TB, l sandbox.Link, addrs ...string) {
	t.Helper()
	for _, a := range addrs {
		c, err := dial(t, l, a)
		if err != nil {
			t.Errorf("slot %d should reach %s: %v", l.Slot, a, err)
			continue
		}
		c.Close()
	}
}

// mustNotReach also wants the refusal to be seen at once.
func mustNotReach(t testing.TB, l sandbox.Link, addrs ...string) {
	t.Helper()
	for _, a := range addrs {
		begin := time.Now()
		c, err := dial(t, l, a)
		if err == nil {
			c.Close()
			t.Errorf("slot %d should not reach %s", l.Slot, a)
		} else if !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("slot %d: the refusal of %s took %v and was %v", l.Slot, a, time.Since(begin), err)
		}
	}
}

// pingUDP sends one datagram and waits for its echo.
func pingUDP(t testing.TB, l sandbox.Link, addr string, wait time.Duration) error {
	t.Helper()
	_, err := inside(t, l.NetNS, func() (int, error) {
		c, err := net.Dial("udp4", addr)
		if err != nil {
			return 0, err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(wait))
		if _, err := c.Write([]byte("hello")); err != nil {
			return 0, err
		}
		return c.Read(make([]byte, 16))
	})
	return err
}

// ask resolves a name from inside.
func ask(t testing.TB, l sandbox.Link, network, name string, qtype uint16) (*mdns.Msg, error) {
	t.Helper()
	return inside(t, l.NetNS, func() (*mdns.Msg, error) {
		m := new(mdns.Msg)
		m.SetQuestion(mdns.Fqdn(name), qtype)
		c := mdns.Client{Net: network, Timeout: long}
		r, _, err := c.Exchange(m, l.DNS.String()+":53")
		return r, err
	})
}

// upstream is the fake resolver of the host.
type upstream struct {
	mu    sync.Mutex
	zone  map[string][]string // "name" → record texts without the name
	asked map[string]int
}

func newUpstream(t testing.TB) (*upstream, netip.AddrPort) {
	t.Helper()
	u := &upstream{zone: map[string][]string{}, asked: map[string]int{}}
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := pc.LocalAddr().(*net.UDPAddr).AddrPort()
	l, err := net.Listen("tcp4", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	var servers []*mdns.Server
	for _, s := range []*mdns.Server{{PacketConn: pc, Handler: u}, {Listener: l, Handler: u}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go s.ActivateAndServe()
		<-started
		servers = append(servers, s)
	}
	t.Cleanup(func() {
		for _, s := range servers {
			s.Shutdown()
		}
	})
	return u, addr
}

func (u *upstream) set(name string, records ...string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.zone[name] = records
}

func (u *upstream) count(name string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.asked[name]
}

func (u *upstream) ServeDNS(w mdns.ResponseWriter, q *mdns.Msg) {
	u.mu.Lock()
	defer u.mu.Unlock()
	m := new(mdns.Msg)
	m.SetReply(q)
	name := strings.TrimSuffix(strings.ToLower(q.Question[0].Name), ".")
	u.asked[name]++
	records, ok := u.zone[name]
	if !ok {
		m.Rcode = mdns.RcodeNameError
	}
	for i := 0; i < len(records); i++ {
		rr, err := mdns.NewRR(records[i])
		if err != nil {
			panic(err)
		}
		if rr.Header().Rrtype == q.Question[0].Qtype || rr.Header().Rrtype == mdns.TypeCNAME {
			m.Answer = append(m.Answer, rr)
		}
	}
	if w.LocalAddr().Network() == "udp" {
		m.Truncate(1232)
	}
	w.WriteMsg(m)
}

// open starts a Network of its own instance.
func open(t testing.TB, change func(*Config)) *Network {
	t.Helper()
	cfg := testConfig(t)
	if change != nil {
		change(&cfg)
	}
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for s := range usedSlots(n) {
			if err := n.Release(context.Background(), n.builder.link(s)); err != nil {
				t.Error(err)
			}
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		mustBeClean(t, cfg)
	})
	return n
}

func usedSlots(n *Network) map[int]sandbox.ID {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[int]sandbox.ID{}
	for s, e := range n.used {
		out[s] = e.id
	}
	return out
}

var hostDir = sync.OnceValue(func() string {
	dir, err := os.MkdirTemp("", "warren-host-")
	if err != nil {
		panic(err)
	}
	return dir
})

var nextInstance struct {
	sync.Mutex
	n uint32
}

func testConfig(t testing.TB) Config {
	t.Helper()
	nextInstance.Lock()
	nextInstance.n++
	instance := fmt.Sprintf("%06x00", 0xa00000+nextInstance.n)
	nextInstance.Unlock()
	dir := t.TempDir()
	return Config{Instance: instance, RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), HostDir: hostDir(), PoolSize: 1}
}

// mustBeClean checks that nothing of the instance is left on the host.
func mustBeClean(t testing.TB, cfg Config) {
	t.Helper()
	for _, l := range leftovers(t, cfg) {
		t.Error("left on the host: ", l)
	}
}

func leftovers(t testing.TB, cfg Config) (out []string) {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "wr"+cfg.Instance[:6]) {
			out = append(out, "link "+l.Attrs().Name)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, cfg.RunDir) {
			out = append(out, "mount "+line)
		}
	}
	r := ruleset{table: table{layout: layout{instance: cfg.Instance}}}
	if there, err := r.exists(); err != nil || there {
		out = append(out, fmt.Sprint("table ", r.tableName(), err))
	}
	entries, _ := os.ReadDir(filepath.Join(cfg.RunDir, "netns"))
	for _, e := range entries {
		out = append(out, "pin "+e.Name())
	}
	if _, err := os.Stat(registryPath(cfg)); err == nil {
		out = append(out, "registry entry")
	}
	return out
}

func acquire(t testing.TB, n *Network, p sandbox.NetworkPolicy) sandbox.Link {
	t.Helper()
	l, err := n.Acquire(t.Context(), sandbox.NewID(), p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func egress(allow, deny []sandbox.EgressRule) sandbox.NetworkPolicy {
	return sandbox.NetworkPolicy{Mode: sandbox.NetworkEgress, Allow: allow, Deny: deny}
}

func cidr(s string, port uint16) sandbox.EgressRule {
	return sandbox.EgressRule{CIDR: netip.MustParsePrefix(s), Port: port}
}

func domain(s string, port uint16) sandbox.EgressRule {
	return sandbox.EgressRule{Domain: s, Port: port}
}
