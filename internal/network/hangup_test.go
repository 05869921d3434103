package network

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// What ran in a slot may end without a word, as gVisor does. The other ends of
// its connections are told when the slot is released, an idle one as well as one
// that is in the middle of sending.
func TestReleaseHangsUp(t *testing.T) {
	w := newWorld(t)
	n := open(t, nil)
	l := acquire(t, n, sandbox.NetworkPolicy{})
	server, err := inside(t, w.ns, func() (net.Listener, error) { return net.Listen("tcp4", publicA+":9191") })
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	pair := func() (in, out *net.TCPConn) {
		t.Helper()
		c, err := inside(t, l.NetNS, func() (net.Conn, error) { return net.DialTimeout("tcp4", server.Addr().String(), long) })
		if err != nil {
			t.Fatal(err)
		}
		o, err := server.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { o.Close() })
		return c.(*net.TCPConn), o.(*net.TCPConn)
	}
	vanish := func(c *net.TCPConn) {
		t.Helper()
		raw, err := c.SyscallConn()
		if err == nil {
			raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_REPAIR, 1) })
		}
		if err != nil {
			t.Fatal(err)
		}
		c.Close() // under repair it sends nothing
	}
	idleIn, idleOut := pair()
	halfIn, halfOut := pair()
	busyIn, busyOut := pair()
	halfIn.CloseWrite()
	ends := make(chan error, 3)
	reads := func(c *net.TCPConn) {
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		_, err := c.Read(make([]byte, 1))
		ends <- err
	}
	go reads(idleOut)
	sending := make(chan struct{})
	go func() {
		busyOut.SetWriteDeadline(time.Now().Add(30 * time.Second))
		busyOut.Write(make([]byte, 1))
		close(sending)
		for { // more than the buffers hold: nobody reads
			if _, err := busyOut.Write(make([]byte, 1<<20)); err != nil {
				ends <- err
				return
			}
		}
	}()
	<-sending
	if _, err := halfOut.Read(make([]byte, 1)); err == nil { // the end of what it sent
		t.Fatal("it sent what it did not")
	}
	// runsc takes the address with it.
	_, err = inside(t, l.NetNS, func() (int, error) {
		eth, err := netlink.LinkByName(device)
		if err != nil {
			return 0, err
		}
		return 0, netlink.AddrDel(eth, &netlink.Addr{IPNet: ipNet(l.Address.Addr().AsSlice(), 30)})
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*net.TCPConn{idleIn, halfIn, busyIn} {
		vanish(c)
	}
	select {
	case err := <-ends:
		t.Fatalf("an other end knew before it was told (%v): the test is of no use", err)
	case <-time.After(100 * time.Millisecond):
	}
	begin := time.Now()
	if err := n.Release(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	for range 2 {
		if err := <-ends; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("an other end saw %v", err)
		}
	}
	halfOut.SetWriteDeadline(time.Now().Add(30 * time.Second))
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := halfOut.Write([]byte("x")); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the half closed connection goes on")
		}
	}
	t.Logf("release took %s; all knew after %s", took, time.Since(begin))
}

func TestSYNPacket(t *testing.T) {
	// Of tcpdump's own verification: a correct checksum sums up to all ones.
	p := synPacket(netip.MustParseAddrPort("10.110.0.2:40000"), netip.MustParseAddrPort("8.8.8.8:443"), 0x01020304)
	sum := uint32(unix.IPPROTO_TCP) + 20
	for _, b := range [][]byte{p[12:20], p[20:]} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(b[i])<<8 | uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	if sum != 0xffff {
		t.Errorf("the checksum is wrong: %x", sum)
	}
	if len(p) != 40 || p[33] != 2 {
		t.Errorf("% x", p)
	}
}
