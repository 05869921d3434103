package network

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestDefaultEgress(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	a, b := acquire(t, n, sandbox.NetworkPolicy{}), acquire(t, n, egress(nil, nil))
	mustReach(t, a, publicA+":80", publicB+":443")
	mustReach(t, b, publicA+":80")
	if err := pingUDP(t, a, publicA+":443", long); err != nil {
		t.Error("udp to a public address:", err)
	}
	mustNotReach(t, a,
		private+":80", private2+":80", carrier+":80", metadata+":80", // private ranges
		router+":80",                                                                                            // the host's own network
		hostAddr+":7070", a.Gateway.String()+":7070", b.Gateway.String()+":7070", n.Resolver().String()+":7070", // the host
		b.Address.Addr().String()+":80") // another sandbox
	for _, addr := range []string{private + ":80", hostAddr + ":7070", b.Address.Addr().String() + ":80"} {
		if err := pingUDP(t, a, addr, short); err == nil {
			t.Errorf("udp reached %s", addr)
		}
	}
	// The host's loopback: from inside, 127.0.0.1 is the sandbox's own.
	if c, err := dial(t, a, "127.0.0.1:7070"); err == nil {
		c.Close()
		t.Error("reached the host's loopback")
	}
}

// A sandbox's own server must stay out of reach of the others, of the outside
// and of the host's unprivileged users, but not of the daemon.
func TestOnlyRootOfTheHostReachesIn(t *testing.T) {
	w := newWorld(t)
	n := open(t, nil)
	a, b := acquire(t, n, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}), acquire(t, n, egress(nil, nil))
	l, err := inside(t, a.NetNS, func() (net.Listener, error) { return net.Listen("tcp4", ":49983") })
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "agent")
			c.Close()
		}
	}()
	addr := a.Address.Addr().String() + ":49983"
	c, err := net.DialTimeout("tcp4", addr, long)
	if err != nil {
		t.Fatal("the daemon must reach the agent:", err)
	}
	if line, err := readLine(c); err != nil || line != "agent" {
		t.Errorf("the agent said %q, %v", line, err)
	}
	c.Close()
	mustNotReach(t, b, addr)

	// Another user of the host.
	fd, err := dialAs(65534, addr)
	if err == nil {
		unix.Close(fd)
		t.Error("an unprivileged user of the host reached the agent")
	}
	// Somebody outside with a route to us.
	_, err = inside(t, w.ns, func() (int, error) {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return 0, err
		}
		pfx := n.Prefix()
		r := &netlink.Route{LinkIndex: eth.Attrs().Index, Dst: ipNet(pfx.Addr().AsSlice(), 16), Gw: net.ParseIP(hostAddr)}
		if err := netlink.RouteAdd(r); err != nil {
			return 0, err
		}
		defer netlink.RouteDel(r)
		c, err := net.DialTimeout("tcp4", addr, short)
		if err == nil {
			c.Close()
			t.Error("the outside reached the agent")
		}
		return 0, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// dialAs connects with a socket that belongs to uid.
func dialAs(uid int, addr string) (int, error) {
	a, err := net.ResolveTCPAddr("tcp4", addr)
	if err != nil {
		return 0, err
	}
	type result struct {
		fd  int
		err error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread()
		// The raw call changes this thread alone; the thread ends here.
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
			done <- result{0, e}
			return
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			done <- result{0, err}
			return
		}
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 1})
		sa := &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(a.IP.To4())}
		if err := unix.Connect(fd, sa); err != nil {
			unix.Close(fd)
			done <- result{0, err}
			return
		}
		done <- result{fd, nil}
	}()
	r := <-done
	return r.fd, r.err
}

func TestNone(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	l := acquire(t, n, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	if l.DNS != n.Resolver() {
		t.Errorf("its resolver is %v: it must be known already for when the policy changes", l.DNS)
	}
	mustNotReach(t, l, publicA+":80", private+":80", hostAddr+":7070", n.Resolver().String()+":53")
	// At once, or every look-up of a name would wait for its time-out.
	if err := pingUDP(t, l, n.Resolver().String()+":53", long); err == nil {
		t.Error("a sandbox without a network asked the resolver")
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the resolver's refusal does not arrive")
	}
}

func TestRules(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	for _, tc := range []struct {
		name        string
		allow, deny []sandbox.EgressRule
		yes, no     []string
	}{
		{"deny one address", nil, []sandbox.EgressRule{cidr(publicA+"/32", 0)},
			[]string{publicB + ":80"}, []string{publicA + ":80", publicA + ":443", private + ":80"}},
		{"deny one port", nil, []sandbox.EgressRule{cidr("0.0.0.0/0", 80)},
			[]string{publicA + ":443"}, []string{publicA + ":80", publicB + ":80"}},
		{"allow list", []sandbox.EgressRule{cidr(publicA+"/32", 443), cidr("9.9.0.0/16", 0)}, []sandbox.EgressRule{cidr("0.0.0.0/0", 0)},
			[]string{publicA + ":443", publicB + ":80", publicB + ":443"}, []string{publicA + ":80", publicC + ":80", private + ":80"}},
		{"allow in a private range", []sandbox.EgressRule{cidr("10.200.7.0/24", 80), cidr("172.16.5.5/32", 0)}, nil,
			[]string{private + ":80", private2 + ":443", publicA + ":80"}, []string{private + ":443", carrier + ":80", metadata + ":80", router + ":80"}},
		{"allow on the host's network", []sandbox.EgressRule{cidr("192.0.2.1/32", 0)}, nil,
			[]string{router + ":80"}, []string{hostAddr + ":7070"}},
		{"allow of everything opens nothing private", []sandbox.EgressRule{cidr("0.0.0.0/0", 0)}, nil,
			[]string{publicA + ":80"}, []string{private + ":80", metadata + ":80", router + ":80", hostAddr + ":7070"}},
		{"allow of metadata must be narrow", []sandbox.EgressRule{cidr("169.254.169.254/32", 80)}, nil,
			[]string{metadata + ":80"}, []string{metadata + ":443"}},
		{"allow of the host's address does not open the host", []sandbox.EgressRule{cidr("192.0.2.0/24", 0)}, nil,
			[]string{router + ":80"}, []string{hostAddr + ":7070", n.Resolver().String() + ":7070"}},
		{"allow of a range around the sandboxes", []sandbox.EgressRule{cidr("10.0.0.0/8", 0)}, nil,
			[]string{private + ":80"}, []string{n.builder.gateway(1).String() + ":7070", n.builder.address(900).String() + ":80"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := egress(tc.allow, tc.deny)
			l := acquire(t, n, p)
			mustReach(t, l, tc.yes...)
			mustNotReach(t, l, tc.no...)
			c := compile(p, n.rules.specialNow())
			for i, addr := range append(tc.yes, tc.no...) {
				dst, err := net.ResolveTCPAddr("tcp4", addr)
				if err != nil {
					t.Fatal(err)
				}
				ap := dst.AddrPort()
				if ap.Port() == 7070 {
					continue // the host's own: another hook decides, whatever the policy
				}
				if got, want := c.permits(ap.Addr().Unmap(), ap.Port(), nil, nil, n.rules.specialNow(), n.Prefix()), i < len(tc.yes); got != want {
					t.Errorf("permits(%s) is %v: the rules of the kernel say %v", addr, got, want)
				}
			}
			if err := n.Release(t.Context(), l); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestSpoofedSourceIsDropped(t *testing.T) {
	w := newWorld(t)
	n := open(t, nil)
	a, b := acquire(t, n, egress(nil, nil)), acquire(t, n, egress(nil, nil))
	seen, err := inside(t, w.ns, func() (net.PacketConn, error) { return net.ListenPacket("udp4", publicA+":9999") })
	if err != nil {
		t.Fatal(err)
	}
	defer seen.Close()
	send := func(src string) error {
		_, err := inside(t, a.NetNS, func() (int, error) {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return 0, err
			}
			defer unix.Close(fd)
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_TRANSPARENT, 1); err != nil {
				return 0, err
			}
			if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte(net.ParseIP(src).To4())}); err != nil {
				return 0, err
			}
			return 0, unix.Sendto(fd, []byte(src), 0, &unix.SockaddrInet4{Port: 9999, Addr: [4]byte(net.ParseIP(publicA).To4())})
		})
		return err
	}
	for _, src := range []string{b.Address.Addr().String(), a.Gateway.String(), publicB, "192.0.2.77", a.Address.Addr().String()} {
		if err := send(src); err != nil {
			t.Fatalf("from %s: %v", src, err)
		}
	}
	// The honest one was sent last: whatever came before it would be here.
	seen.SetReadDeadline(time.Now().Add(long))
	buf := make([]byte, 64)
	k, from, err := seen.ReadFrom(buf)
	if err != nil || string(buf[:k]) != a.Address.Addr().String() {
		t.Errorf("got %q from %v, %v", buf[:k], from, err)
	}
	if from != nil && from.(*net.UDPAddr).IP.String() != hostAddr {
		t.Errorf("the source is %v: want the host's, masqueraded", from)
	}
}

func TestSlotInside(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	l := acquire(t, n, egress(nil, nil))
	_, err := inside(t, l.NetNS, func() (int, error) {
		links, err := netlink.LinkList()
		if err != nil {
			return 0, err
		}
		for _, link := range links {
			a := link.Attrs()
			if a.Name == "lo" && a.Flags&net.FlagUp == 0 {
				t.Error("lo is down")
			}
			if a.Name == "eth0" && a.HardwareAddr.String() != sandboxMAC.String() {
				t.Error("eth0 has", a.HardwareAddr)
			}
			v6, err := netlink.AddrList(link, netlink.FAMILY_V6)
			if err != nil || len(v6) > 0 {
				t.Error("IPv6:", v6, err)
			}
		}
		// A port below 1024 and a ping socket, as nobody.
		for _, s := range [][3]int{{unix.SOCK_STREAM, 0, 80}, {unix.SOCK_DGRAM, unix.IPPROTO_ICMP, 0}} {
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, 70000, 70000, 70000); e != 0 {
				return 0, e
			}
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, 70000, 70000, 70000); e != 0 && s[0] == unix.SOCK_STREAM {
				return 0, e
			}
			fd, err := unix.Socket(unix.AF_INET, s[0]|unix.SOCK_CLOEXEC, s[1])
			if err != nil {
				t.Error("socket", s, err)
				continue
			}
			if err := unix.Bind(fd, &unix.SockaddrInet4{Port: s[2]}); err != nil {
				t.Error("bind", s, err)
			}
			unix.Close(fd)
		}
		return 0, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	newWorld(t)
	n := open(t, nil)
	l := acquire(t, n, egress(nil, nil))
	limit := int(n.rules.maxConns)
	refused, err := inside(t, l.NetNS, func() (int, error) {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return 0, err
		}
		defer unix.Close(fd)
		refused := 0
		for i := range limit + 500 {
			// One connection for each port of an address that takes anything.
			err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 1000 + i, Addr: [4]byte(net.ParseIP(publicC).To4())})
			if err != nil {
				refused++ // the ICMP error of an earlier one
			}
		}
		return refused, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	src, count := l.Address.Addr(), 0
	if _, err := forget(func(f flow) bool {
		if f.src == src {
			count++
		}
		return false
	}); err != nil {
		t.Fatal(err)
	}
	if count > limit+50 || count < limit/2 {
		t.Errorf("%d connections in the host's table (%d refusals seen): the limit is %d", count, refused, limit)
	}
	if err := n.Release(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(long)
	for {
		left := 0
		if _, err := forget(func(f flow) bool {
			if f.src == src {
				left++
			}
			return false
		}); err != nil {
			t.Fatal(err)
		}
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d connections of a released sandbox are left", left)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
