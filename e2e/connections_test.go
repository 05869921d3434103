package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// outside is a machine beside the host: a network namespace with an address of
// its own (of RFC 2544's range for tests), in which servers hold connections and
// tell when they end.
type outside struct {
	t    *testing.T
	addr string
	mu   sync.Mutex
	ends map[string]time.Time // when the other end of a connection knew, by its first line
	up   map[string]bool
}

func newOutside(t *testing.T) *outside {
	t.Helper()
	name := fmt.Sprintf("wrtest%d", os.Getpid()%100000)
	o := &outside{t: t, addr: "198.18.77.2", ends: map[string]time.Time{}, up: map[string]bool{}}
	ip := func(line string) {
		t.Helper()
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
	ip("netns add " + name)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	ip("link add " + name + " type veth peer name eth0 netns " + name)
	ip("addr add 198.18.77.1/30 dev " + name)
	ip("link set " + name + " up")
	ip("-n " + name + " addr add " + o.addr + "/30 dev eth0")
	ip("-n " + name + " link set eth0 up")
	ip("-n " + name + " route add default via 198.18.77.1")
	type result struct {
		l   net.Listener
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in the namespace
		fd, err := unix.Open("/run/netns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			unix.Close(fd)
		}
		var l net.Listener
		if err == nil {
			l, err = net.Listen("tcp4", o.addr+":9000")
		}
		done <- result{l, err}
	}()
	r := <-done
	must(t, r.err)
	t.Cleanup(func() { r.l.Close() })
	go func() {
		for {
			c, err := r.l.Accept()
			if err != nil {
				return
			}
			go o.hold(c)
		}
	}()
	return o
}

// hold keeps a connection as its first line says, until its end: "… idle" waits
// for what never comes, "… takes" reads, "… gives" writes all the time.
func (o *outside) hold(c net.Conn) {
	defer c.Close()
	var line []byte
	for b := make([]byte, 1); len(line) < 100; line = append(line, b[0]) {
		if _, err := c.Read(b); err != nil {
			return
		}
		if b[0] == '\n' {
			break
		}
	}
	who := string(line)
	o.mu.Lock()
	o.up[who] = true
	o.mu.Unlock()
	buf := make([]byte, 64<<10)
	for err := error(nil); err == nil; {
		if strings.HasSuffix(who, "gives") {
			_, err = c.Write(buf)
		} else {
			_, err = c.Read(buf)
		}
	}
	o.mu.Lock()
	o.ends[who] = time.Now()
	o.mu.Unlock()
}

// are waits until the connections are there.
func (o *outside) are(who ...string) {
	o.t.Helper()
	ok := eventually(func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		for _, w := range who {
			if !o.up[w] {
				return false
			}
		}
		return true
	}, longest)
	if !ok {
		o.t.Fatalf("the connections %q were not made", who)
	}
}

func (o *outside) ended(who string) (time.Time, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	at, ok := o.ends[who]
	return at, ok
}

// end waits until the other ends know that the connections have ended, and tells
// how long after since the last knew.
func (o *outside) end(since time.Time, who ...string) {
	o.t.Helper()
	var last time.Duration
	for _, w := range who {
		if !eventually(func() bool { _, ok := o.ended(w); return ok }, 10*time.Second) {
			o.t.Errorf("after 10 s the other end of %q knows nothing of its end", w)
			continue
		}
		at, _ := o.ended(w)
		last = max(last, at.Sub(since))
	}
	o.t.Logf("the other ends of %q knew after %s", who, last)
}

var ways = []string{"idle", "takes", "gives"}

// connect makes three connections to outside in a sandbox, of processes that
// leave a file when they see the end of theirs.
func (o *outside) connect(l *lab, id, name string) (who []string) {
	o.t.Helper()
	for _, way := range ways {
		input := "tail -f /dev/null"
		if way == "takes" {
			input = "cat /dev/zero"
		}
		w := name + " " + way
		l.sh(o.t, id, fmt.Sprintf(`rm -f /tmp/%[2]s.end; setsid sh -c '{ echo "%[1]s"; %[3]s; } | { nc %[4]s 9000 >/dev/null; echo >/tmp/%[2]s.end; }' </dev/null >/dev/null 2>&1 &`, w, way, input, o.addr))
		who = append(who, w)
	}
	o.are(who...)
	return who
}

// closedInside wants the processes inside to have seen the ends of theirs.
func (o *outside) closedInside(l *lab, id string) {
	o.t.Helper()
	began := time.Now()
	for _, way := range ways {
		if !eventually(func() bool {
			return l.exec(o.t, id, wire.Exec{Cmd: wire.Command{Argv: []string{"test", "-e", "/tmp/" + way + ".end"}}}).ExitCode == 0
		}, 10*time.Second) {
			o.t.Errorf("after 10 s the process with the connection that is %s has not seen its end", way)
		}
	}
	o.t.Logf("the processes inside knew within %s", time.Since(began))
}

// Connections to the outside end on both sides, promptly, where a sandbox is
// put to sleep, in its forks, and where it ends; those of a fork's source go on.
func TestOutsideConnections(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	o := newOutside(t)
	can := l.abilities(t)
	l.each(t, func(t *testing.T, runtime string) {
		o.t = t
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Network: wire.Network{Mode: sandbox.NetworkEgress, Allow: []wire.EgressRule{{CIDR: o.addr + "/32"}}}})
		who := o.connect(l, sb.ID, runtime+"-first")
		if full(can[runtime]) {
			forked, err := l.cl.Fork(t.Context(), sb.ID, wire.Fork{Count: 1})
			must(t, err)
			if len(forked.Forks) != 1 || forked.Forks[0].Sandbox == nil {
				t.Fatalf("%+v", forked)
			}
			o.closedInside(l, forked.Forks[0].Sandbox.ID)
			must(t, l.cl.Kill(t.Context(), forked.Forks[0].Sandbox.ID))
			for _, w := range who {
				if _, ended := o.ended(w); ended {
					t.Errorf("the fork's source has lost its connection %q", w)
				}
			}
			began := time.Now()
			must(t, l.cl.Hibernate(t.Context(), sb.ID))
			t.Logf("hibernated in %s", time.Since(began))
			o.end(began, who...)
			must(t, l.cl.Wake(t.Context(), sb.ID))
			o.closedInside(l, sb.ID)
			who = o.connect(l, sb.ID, runtime+"-second")
		}
		began := time.Now()
		must(t, l.cl.Kill(t.Context(), sb.ID))
		o.end(began, who...)
	})
}
