package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// rig runs agents in gVisor, by runsc alone, with this machine's own root
// filesystem inside: what is installed here can be tested in there. What is
// written there stays in memory.
type rig struct {
	t     *testing.T
	runsc string
	agent string
	dir   string
	n     int
}

func newRig(t *testing.T) *rig {
	t.Helper()
	testenv.Root(t)
	runsc := os.Getenv("WARREN_BIN")
	if runsc == "" {
		runsc = "../../bin"
	}
	runsc, err := filepath.Abs(filepath.Join(runsc, "runsc"))
	if err != nil {
		t.Fatal(err)
	}
	testenv.Command(t, runsc, "make build, or tell its directory in WARREN_BIN")
	testenv.Command(t, "ip", "install iproute2")
	r := &rig{t: t, runsc: runsc, agent: buildAgent(t), dir: t.TempDir()}
	t.Cleanup(func() { unix.Unmount(filepath.Join(r.dir, "state", "null-netns"), unix.MNT_DETACH) }) // runsc keeps it
	return r
}

// box is one gVisor sandbox, or the place for one.
type box struct {
	*rig
	id, ns, addr, host, bundle string
}

func (r *rig) ip(args ...string) {
	r.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		r.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// box makes a network namespace with a link to here, and a bundle.
func (r *rig) box() *box {
	r.t.Helper()
	r.n++
	// Of the process's number, so that two runs do not meet.
	net2, net3 := os.Getpid()>>8&0xff, os.Getpid()&0xff
	id := fmt.Sprintf("wat%d-%d", os.Getpid(), r.n)
	b := &box{rig: r, id: id, ns: id, bundle: filepath.Join(r.dir, id)}
	b.host = fmt.Sprintf("198.%d.%d.%d", 18+net2&1, net3, r.n*4+1)
	b.addr = fmt.Sprintf("198.%d.%d.%d", 18+net2&1, net3, r.n*4+2)
	link := fmt.Sprintf("w%da%d", os.Getpid(), r.n)
	r.ip("netns", "add", b.ns)
	r.t.Cleanup(func() { exec.Command("ip", "netns", "del", b.ns).Run() })
	r.ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", b.ns)
	r.t.Cleanup(func() { exec.Command("ip", "link", "del", link).Run() })
	r.ip("addr", "add", b.host+"/30", "dev", link)
	r.ip("link", "set", link, "up")
	r.ip("-n", b.ns, "addr", "add", b.addr+"/30", "dev", "eth0")
	r.ip("-n", b.ns, "link", "set", "eth0", "up")
	r.ip("-n", b.ns, "link", "set", "lo", "up")
	r.ip("-n", b.ns, "route", "add", "default", "via", b.host)
	caps := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE"}
	config := map[string]any{
		"ociVersion": "1.0.2",
		"hostname":   id,
		"root":       map[string]any{"path": "/"},
		"process": map[string]any{
			"args": []string{r.agent}, "cwd": "/", "env": []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			"capabilities": map[string]any{"bounding": caps, "effective": caps, "permitted": caps},
		},
		"mounts": []map[string]any{
			{"destination": "/proc", "type": "proc", "source": "proc"},
			{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
			{"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
		},
		"linux": map[string]any{"namespaces": []map[string]any{
			{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"},
			{"type": "network", "path": "/run/netns/" + b.ns},
		}},
	}
	data, err := json.Marshal(config)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.MkdirAll(b.bundle, 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.bundle, "config.json"), data, 0o644); err != nil {
		r.t.Fatal(err)
	}
	return b
}

func (b *box) command(args ...string) (time.Duration, error) {
	argv := append([]string{
		"--root=" + filepath.Join(b.dir, "state"), "--platform=systrap", "--network=sandbox", "--overlay2=root:memory",
		"--ignore-cgroups", "--host-settings=ignore", "--log=" + filepath.Join(b.bundle, "runsc.log"), "--debug-log=" + b.bundle + "/",
	}, args...)
	began := time.Now()
	cmd := exec.Command(b.runsc, argv...)
	f, err := os.Create(filepath.Join(b.bundle, "out"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	cmd.Stdout, cmd.Stderr = f, f
	err = cmd.Run()
	if err != nil {
		text, _ := os.ReadFile(f.Name())
		logged, _ := os.ReadFile(filepath.Join(b.bundle, "runsc.log"))
		err = fmt.Errorf("runsc %s: %w: %s%s", strings.Join(args, " "), err, text, logged)
	}
	return time.Since(began), err
}

func (b *box) must(args ...string) time.Duration {
	b.t.Helper()
	d, err := b.command(args...)
	if err != nil {
		b.t.Fatal(err)
	}
	return d
}

func (b *box) client(token string) *agentclient.Client {
	b.t.Helper()
	b.t.Cleanup(func() { b.command("delete", "--force", b.id) })
	c := b.clientNoWait(token)
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	if err := c.WaitReady(ctx); err != nil {
		logged, _ := os.ReadFile(filepath.Join(b.bundle, "runsc.log"))
		b.t.Fatalf("%v\n%s", err, logged)
	}
	return c
}

// start runs an agent.
func (r *rig) start() (*box, *agentclient.Client) {
	r.t.Helper()
	b := r.box()
	b.must("run", "--detach", "--bundle="+b.bundle, b.id)
	return b, b.client("")
}

// checkpoint captures b, which goes on, or not.
func (b *box) checkpoint(goOn bool) (string, time.Duration) {
	b.t.Helper()
	b.rig.n++
	dir := filepath.Join(b.dir, "image"+strconv.Itoa(b.n))
	args := []string{"checkpoint", "--image-path=" + dir}
	if goOn {
		args = append(args, "--leave-running")
	}
	return dir, b.must(append(args, b.id)...)
}

// restore makes a new sandbox of a capture.
func (r *rig) restore(image, token string) (*box, *agentclient.Client) {
	r.t.Helper()
	b := r.box()
	b.must("restore", "--detach", "--bundle="+b.bundle, "--image-path="+image, b.id)
	return b, b.client(token)
}

func TestFreezeInGVisor(t *testing.T) {
	r := newRig(t)
	_, c := r.start()
	testFreeze(t, c)
}

func (b *box) restored(token string) agentclient.RestoredRequest {
	var req agentclient.RestoredRequest
	req.AccessToken, req.SandboxID, req.Hostname, req.Timestamp = token, b.id, b.id, time.Now()
	return req
}

// A capture of a frozen sandbox is frozen when it is restored, and goes on when
// it is told to, in the source as in the forks.
func TestRestoredInGVisor(t *testing.T) {
	r := newRig(t)
	source, c := r.start()
	first := agentclient.InitRequest{AccessToken: "one", SandboxID: source.id, Hostname: source.id, EnvVars: map[string]string{"KEEP": "k", "SECRET": "s"}}
	if err := c.Init(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	c = source.client("one")
	sh(t, c, "mkdir -p /etc/warren/restored.d && printf '#!/bin/sh\\necho $WARREN_SANDBOX_ID $WARREN_GENERATION >/tmp/hook\\n' >/etc/warren/restored.d/10-test && chmod 755 /etc/warren/restored.d/10-test; echo before >/tmp/f")
	spin := background(t, c, 4, part("spin", 4))
	identity := func(c *agentclient.Client) []string {
		return []string{sh(t, c, "cat /etc/machine-id"), sh(t, c, "hostname"), sh(t, c, "cat /run/warren/generation"), sh(t, c, "echo $E2B_SANDBOX_ID")}
	}
	began := time.Now()
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	frozen := time.Now()
	image, took := source.checkpoint(true)
	time.Sleep(2 * gapMin) // or the parts do not tell of it
	thawed := time.Now()
	if err := c.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("freeze %s, checkpoint %s", frozen.Sub(began), took)
	still(t, spin, names("spin", 4), frozen, thawed)
	before := identity(c)

	seen := [][]string{before}
	for i := range 2 {
		b, old := r.restore(image, "one")
		// Frozen: only the control calls answer.
		if _, err := old.Run(t.Context(), agentclient.Command{Path: "true", User: "root"}); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
			t.Fatalf("a command in the frozen fork: %v", err)
		}
		if err := b.clientNoWait("wrong").Restored(t.Context(), b.restored("x")); sandbox.CodeOf(err) != sandbox.CodeUnauthenticated {
			t.Fatalf("restored with a wrong token: %v", err)
		}
		time.Sleep(500 * time.Millisecond)
		release := time.Now()
		req := b.restored("two")
		req.DropEnv = []string{"SECRET"}
		if err := old.Restored(t.Context(), req); err != nil {
			t.Fatal(err)
		}
		t.Logf("fork %d: restored took %s", i, time.Since(release))
		if _, err := old.Run(t.Context(), agentclient.Command{Path: "true", User: "root"}); sandbox.CodeOf(err) != sandbox.CodeUnauthenticated {
			t.Errorf("the capture's token in the fork: %v", err)
		}
		c := b.client("two")
		if got := sh(t, c, "echo $KEEP-$SECRET; cat /tmp/f"); got != "k-\nbefore" {
			t.Errorf("environment and file: %q", got)
		}
		id := identity(c)
		if id[1] != b.id || id[3] != b.id {
			t.Errorf("identity %q of %s", id, b.id)
		}
		if got := sh(t, c, "cat /tmp/hook"); got != b.id+" "+id[2] {
			t.Errorf("the hook wrote %q", got)
		}
		for _, other := range seen {
			for j := range id {
				if id[j] == other[j] || id[j] == "" {
					t.Errorf("identity %q is as %q", id, other)
				}
			}
		}
		seen = append(seen, id)
		// The spinners of the fork did not run between capture and release: their
		// output goes on in the fork's own agent.
		l := follow(t, c, os.Args[0])
		still(t, l, names("spin", 4), frozen, release)
	}
	if got := identity(c); strings.Join(got, " ") != strings.Join(before, " ") {
		t.Errorf("the source changed: %q, was %q", got, before)
	}
}

func (b *box) clientNoWait(token string) *agentclient.Client {
	c := agentclient.New(func(ctx context.Context, port int) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp4", net.JoinHostPort(b.addr, strconv.Itoa(port)))
	}, token)
	b.t.Cleanup(c.Close)
	return c
}

// follow attaches to the one command that runs a program.
func follow(t *testing.T, c *agentclient.Client, program string) *lines {
	t.Helper()
	all, err := c.Processes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if p.GetConfig().GetCmd() == program {
			l := &lines{}
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() {
				defer close(done)
				c.Attach(ctx, p.GetPid(), agentclient.Output{Stdout: l.write})
			}()
			t.Cleanup(func() { cancel(); <-done })
			return l
		}
	}
	t.Fatalf("no command to reattach to among %v", all)
	return nil
}

// Calls that waited at the capture wait on in the source, in a fork, and in a
// fork of that.
func TestCallsInGVisor(t *testing.T) {
	r := newRig(t)
	b, c := r.start()
	if err := c.Init(t.Context(), agentclient.InitRequest{AccessToken: "0", SandboxID: b.id}); err != nil {
		t.Fatal(err)
	}
	c = b.client("0")
	dir := startCalls(t, c)
	var all []*agentclient.Client
	for i := range 3 {
		if err := c.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		image, _ := b.checkpoint(true)
		if err := c.Thaw(t.Context()); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
		if len(all) == 3 {
			break
		}
		fork, old := r.restore(image, fmt.Sprint(i))
		if err := old.Restored(t.Context(), fork.restored(fmt.Sprint(i+1))); err != nil {
			t.Fatal(err)
		}
		b, c = fork, fork.client(fmt.Sprint(i+1))
	}
	for _, c := range all {
		checkCalls(t, c, dir)
	}
}

// Connections to the outside end in a fork at once; in the source they go on,
// as those inside do in both. Listeners listen.
func TestConnectionsInGVisor(t *testing.T) {
	r := newRig(t)
	source, c := r.start()
	needs(t, c, "python3")
	if err := c.Init(t.Context(), agentclient.InitRequest{AccessToken: "one", SandboxID: source.id}); err != nil {
		t.Fatal(err)
	}
	c = source.client("one")
	l, err := net.Listen("tcp4", net.JoinHostPort(source.host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- conn
		}
	}()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	const script = `
import select, socket, sys, threading, time
out = socket.create_connection((sys.argv[1], int(sys.argv[2])))
web = socket.create_server(("0.0.0.0", 8080))
lo = socket.create_connection(("127.0.0.1", 8080))
peer, _ = web.accept()
def reader():
    while True:
        try:
            data = out.recv(100)
        except OSError as e:
            data = b""
            print("out", type(e).__name__, flush=True)
        print("out", data.decode() or "closed", flush=True)
        if not data:
            return
def poller():
    p = select.poll(); p.register(out, select.POLLRDHUP)
    print("poll", bool(p.poll()), flush=True)
def server():
    while True:
        s, _ = web.accept()
        s.sendall(b"hello"); s.close()
def pairs():
    n = 0
    while True:
        peer.sendall(b"x"); assert lo.recv(1) == b"x"
        n += 1
        if n % 10 == 0: print("pair", n, flush=True)
        time.sleep(0.01)
for f in reader, poller, server, pairs: threading.Thread(target=f).start()
print("up", flush=True)
`
	in := background(t, c, 1, agentclient.Command{Path: "python3", Args: []string{"-c", script, source.host, port}})
	outside := <-accepted
	defer outside.Close()
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	image, _ := source.checkpoint(true)
	if err := c.Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	b, old := r.restore(image, "one")
	if err := old.Restored(t.Context(), b.restored("two")); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	fc := b.client("two")
	fork := follow(t, fc, "python3")
	eventually(t, 5*time.Second, func() error {
		if len(fork.with("out closed")) == 0 || len(fork.with("poll True")) == 0 {
			return fmt.Errorf("the fork's connection goes on: %q", fork.all())
		}
		return nil
	})
	t.Logf("closed in the fork within %s: %q", time.Since(began), append(fork.with("out"), fork.with("poll")...))
	serves := func(addr string) {
		t.Helper()
		conn, err := net.DialTimeout("tcp4", net.JoinHostPort(addr, "8080"), 5*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(5 * time.Second))
		if data, err := io.ReadAll(conn); err != nil || string(data) != "hello" {
			t.Errorf("the listener: %q %v", data, err)
		}
	}
	serves(b.addr)
	serves(source.addr)
	for _, l := range []*lines{in, fork} {
		n := len(l.with("pair"))
		eventually(t, 5*time.Second, func() error {
			if len(l.with("pair")) < n+3 {
				return fmt.Errorf("the connection inside stands still: %q", l.all())
			}
			return nil
		})
	}
	outside.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := outside.Write([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, func() error {
		if len(in.with("out still here")) == 0 {
			return fmt.Errorf("the source's connection: %q", in.all())
		}
		return nil
	})
	// What the other end of a connection hears when the source ends with its
	// capture is gVisor's; docs/decisions/0002-freeze.md has what was found.
	if err := c.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	image, _ = source.checkpoint(false)
	outside.SetReadDeadline(time.Now().Add(time.Second))
	_, err = outside.Read(make([]byte, 1))
	t.Logf("the other end, a second after the source has hibernated: %v", err)
	b, old = r.restore(image, "one")
	wake := b.restored("three")
	wake.Wake = true
	if err := old.Restored(t.Context(), wake); err != nil {
		t.Fatal(err)
	}
	woken := follow(t, b.client("three"), "python3")
	eventually(t, 5*time.Second, func() error {
		if len(woken.with("out ConnectionAbortedError")) == 0 && len(woken.with("out closed")) == 0 {
			return fmt.Errorf("the woken one's connection goes on: %q", woken.all())
		}
		return nil
	})
	serves(b.addr)
}
