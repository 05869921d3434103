package e2e

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// listenAll serves TCP on all addresses of the host, and tells of connections.
func listenAll(t *testing.T, addr string) (port int, reached func() int) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	must(t, err)
	t.Cleanup(func() { ln.Close() })
	got := make(chan struct{}, 1000)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			got <- struct{}{}
			c.Close()
		}
	}()
	return ln.Addr().(*net.TCPAddr).Port, func() int { return len(got) }
}

// hostAddresses are those of the host's own interfaces.
func hostAddresses(t *testing.T) (all []string) {
	t.Helper()
	addrs, err := net.InterfaceAddrs()
	must(t, err)
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			all = append(all, n.IP.String())
		}
	}
	return all
}

// TestIsolation tries from inside to reach what is none of a sandbox's business.
func TestIsolation(t *testing.T) {
	t.Parallel()
	l := newLab(t, withFlags("--listen", "0.0.0.0:0"))
	onLoopback, loopbackReached := listenAll(t, "127.0.0.1:0")
	everywhere, reached := listenAll(t, "0.0.0.0:0")
	api := l.tcp[strings.LastIndex(l.tcp, ":")+1:]
	l.each(t, func(t *testing.T, runtime string) {
		other := l.create(t, wire.CreateSandbox{Runtime: runtime})
		serve(t, l, other.ID, "0.0.0.0:8000")
		if a := l.raw(t, "GET", "/v1/sandboxes/"+other.ID+"/ports/8000/", nil, nil); a.status != 200 {
			t.Fatalf("the other sandbox's port is not there at all: %d %s", a.status, a.body)
		}
		for _, mode := range []sandbox.NetworkMode{sandbox.NetworkEgress, sandbox.NetworkNone} {
			t.Run(string(mode), func(t *testing.T) {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Network: wire.Network{Mode: mode}})
				gateway := gatewayOf(t, sb.Address)
				targets := []string{
					fmt.Sprintf("tcp!127.0.0.1:%d", onLoopback), fmt.Sprintf("tcp!127.0.0.1:%d", everywhere), fmt.Sprintf("tcp6![::1]:%d", onLoopback),
					fmt.Sprintf("tcp!%s:%d", gateway, everywhere), fmt.Sprintf("tcp!%s:%s", gateway, api), "tcp!" + gateway + ":22",
					"tcp!169.254.169.254:80", "tcp6![fd00:ec2::254]:80", "tcp!10.0.0.1:80", "tcp!192.168.0.1:80", "tcp!172.17.0.1:80",
					"tcp!" + other.Address + ":8000", fmt.Sprintf("tcp!%s:%d", other.Address, sandbox.AgentPort),
					"udp!" + gateway + ":53",
				}
				for _, addr := range hostAddresses(t) {
					host := net.JoinHostPort(addr, fmt.Sprint(everywhere))
					targets = append(targets, "tcp!"+host, "tcp!"+net.JoinHostPort(addr, api))
				}
				if mode == sandbox.NetworkNone {
					targets = append(targets, "tcp!1.1.1.1:443", "udp!1.1.1.1:53", "udp!8.8.8.8:53", "name!example.com")
				}
				out := l.run(t, sb.ID, append([]string{"inside", "dial"}, targets...)...)
				if n := len(strings.Split(out, "\n")); n != len(targets) {
					t.Fatalf("%d answers to %d targets:\n%s", n, len(targets), out)
				}
				for _, line := range strings.Split(out, "\n") {
					if strings.HasSuffix(line, " ok") || strings.Contains(line, " ok ") {
						t.Errorf("from inside it reaches %s", line)
					}
				}
				// Its own loopback and its agent's link work all the same.
				serve(t, l, sb.ID, "127.0.0.1:8001")
				if out := l.run(t, sb.ID, "inside", "dial", "tcp!127.0.0.1:8001"); !strings.HasSuffix(out, " ok") {
					t.Errorf("its own loopback: %s", out)
				}
			})
		}
		t.Run("sees nothing of the host", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			ps := l.run(t, sb.ID, "ps", "-o", "pid,args")
			if n := len(strings.Split(ps, "\n")); n > 6 {
				t.Errorf("it sees %d processes:\n%s", n, ps)
			}
			if strings.Contains(ps, "serve") || strings.Contains(ps, "e2e.test") {
				t.Errorf("it sees the host's:\n%s", ps)
			}
			all := l.sh(t, sb.ID, "cat /proc/self/mountinfo; cat /proc/1/environ 2>/dev/null | tr '\\0' '\\n'; ls / /run /tmp; cat /proc/net/unix 2>/dev/null; cat /etc/resolv.conf /etc/hosts")
			for _, secret := range []string{l.socket, "warren.db", l.key} {
				if strings.Contains(all, secret) {
					t.Errorf("inside it says %q:\n%s", secret, all)
				}
			}
			host, _ := os.Hostname()
			if out := l.run(t, sb.ID, "hostname"); out != sb.ID || out == host {
				t.Errorf("its name is %q", out)
			}
			// Root inside is no root of the host's: none of this may go well.
			for _, line := range []string{
				"mount -t tmpfs none /mnt || mkdir -p /m && mount -t proc none /m", "echo 1 > /proc/sys/kernel/panic", "echo b > /proc/sysrq-trigger",
				"mknod /tmp/sda b 8 0 && cat /tmp/sda", "cat /dev/mem", "head -c 1 /proc/kcore", "ip link add x type dummy && ip link set eth0 netns 1",
				"echo 0 > /sys/fs/cgroup/memory/memory.limit_in_bytes", "echo x > /proc/1/oom_score_adj_none", "reboot -f; false", "insmod /x.ko", "swapoff -a && false", "hostname -F /etc/passwd && false",
				"unshare -U true && false; chroot /proc/1/root/../../.. ls /var/lib/warren",
			} {
				res := l.exec(t, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c", line}}, User: "root", Timeout: 20})
				if res.ExitCode == 0 && runtime == "container" {
					t.Errorf("%q went well as root inside: %q %q", line, res.OutBytes(), res.ErrBytes())
				}
			}
			l.sh(t, sb.ID, "true")
		})
	})
	if n := loopbackReached(); n > 0 {
		t.Errorf("the host's loopback was reached %d times", n)
	}
	if n := reached(); n > 0 {
		t.Errorf("the host was reached %d times", n)
	}
}

// gatewayOf gives the host's end of a sandbox's /30.
func gatewayOf(t *testing.T, address string) string {
	t.Helper()
	ip := net.ParseIP(address).To4()
	if ip == nil {
		t.Fatalf("the address is %q", address)
	}
	ip[3]--
	return ip.String()
}
