package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/daemon"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/sandbox"
)

// longest bounds whatever a test waits for: much longer than it takes, also on
// a busy machine.
const longest = 90 * time.Second

// lab is a state directory on which one daemon after another runs.
type lab struct {
	dir, state, socket string
	flags              []string // of serve, beside state and socket
	bin                string

	cl    *client.Client // of the unix socket
	tcp   string         // URL of the TCP address; new with each start
	key   string         // the first API key
	where census.Where
	d     *served

	can map[string]error // which runtimes the host can run
}

// served is one daemon.
type served struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended
	serves chan string   // its TCP address, once it serves
	keys   chan string

	mu  sync.Mutex
	log bytes.Buffer
}

func (p *served) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// setup changes a lab before its daemon starts.
type setup func(t *testing.T, l *lab)

func withFlags(flags ...string) setup {
	return func(_ *testing.T, l *lab) { l.flags = append(l.flags, flags...) }
}

// newLab starts a daemon on a new state directory with the template "tiny".
// When t ends, all that it has is ended, and nothing may be left of it.
func newLab(t *testing.T, setups ...setup) *lab {
	t.Helper()
	l := openLab(t, setups...)
	l.start(t)
	l.importTiny(t)
	return l
}

func openLab(t *testing.T, setups ...setup) *lab {
	t.Helper()
	l := &lab{bin: warrenBin(t)}
	image(t)
	// Not t.TempDir: its names are too long for a socket.
	dir, err := os.MkdirTemp("", "wrn-")
	if err != nil {
		t.Fatal(err)
	}
	l.dir, l.state, l.socket = dir, filepath.Join(dir, "state"), filepath.Join(dir, "sock")
	if err := os.Mkdir(l.state, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.tearDown(t)
		os.RemoveAll(dir)
	})
	l.flags = []string{"--listen", "127.0.0.1:0", "--pool=-1", "--grace", "3s"}
	for _, s := range setups {
		s(t, l)
	}
	run, err := daemon.RunDir(l.state)
	if err != nil {
		t.Fatal(err)
	}
	l.where = census.Where{Instance: filepath.Base(run), State: l.state, RunDir: run}
	if l.cl, err = client.New("unix://"+l.socket, client.Options{}); err != nil {
		t.Fatal(err)
	}
	return l
}

var (
	servesLine = regexp.MustCompile(`serves on unix://\S+(?: and http://(\S+))?`)
	keyLine    = regexp.MustCompile(`\be2b_[0-9a-f]{40}\b`)
)

// launch starts a daemon and does not wait for it to serve.
func (l *lab) launch(t *testing.T, env ...string) *served {
	t.Helper()
	args := append([]string{"serve", "--state", l.state, "--socket", l.socket}, l.flags...)
	p := &served{cmd: exec.Command(l.bin, args...), done: make(chan struct{}), serves: make(chan string, 1), keys: make(chan string, 1)}
	p.cmd.Env = append(os.Environ(), env...)
	// A group of its own: an interrupt of the test run is not the daemon's.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: 0}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = w, w
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		defer close(p.done)
		defer r.Close()
		p.read(r)
		p.cmd.Wait()
	}()
	l.d, l.where.Daemon = p, p.cmd.Process.Pid
	return p
}

// read keeps the daemon's output, and finds in it what a person would.
func (p *served) read(r io.Reader) {
	buf := make([]byte, 32<<10)
	var line []byte
	for {
		n, err := r.Read(buf)
		p.mu.Lock()
		if p.log.Len() < 8<<20 {
			p.log.Write(buf[:n])
		}
		p.mu.Unlock()
		line = append(line, buf[:n]...)
		for {
			i := bytes.IndexByte(line, '\n')
			if i < 0 {
				break
			}
			if m := keyLine.Find(line[:i]); m != nil {
				select {
				case p.keys <- string(m):
				default:
				}
			}
			if m := servesLine.FindSubmatch(line[:i]); m != nil {
				p.serves <- string(m[1])
			}
			line = line[i+1:]
		}
		if err != nil {
			return
		}
	}
}

// start starts a daemon and waits until it serves.
func (l *lab) start(t *testing.T, env ...string) *served {
	t.Helper()
	p := l.launch(t, env...)
	select {
	case addr := <-p.serves:
		if addr != "" {
			if _, port, err := net.SplitHostPort(addr); err == nil {
				addr = "127.0.0.1:" + port
			}
			l.tcp = "http://" + addr
		}
	case <-p.done:
		t.Fatalf("the daemon ended (%v):\n%s", p.cmd.ProcessState, p.output())
	case <-time.After(longest):
		t.Fatalf("the daemon does not serve:\n%s", p.output())
	}
	select {
	case l.key = <-p.keys:
	default:
	}
	l.cl.Close() // its connections were to the daemon before
	return p
}

// kill ends the daemon as a power cut would.
func (p *served) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

func (p *served) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// terminate stops the daemon cleanly.
func (p *served) terminate(t *testing.T) {
	t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(longest):
		t.Errorf("the daemon does not stop:\n%s", p.output())
		p.kill()
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the daemon stopped with %v:\n%s", p.cmd.ProcessState, p.output())
	}
	if strings.Contains(p.output(), "panic in a request") || strings.Contains(p.output(), "DATA RACE") {
		t.Errorf("the daemon's log tells of a fault of its own:\n%s", p.output())
	}
}

// tearDown ends everything, and checks that nothing is left on the host.
func (l *lab) tearDown(t *testing.T) {
	if l.d == nil {
		return
	}
	if l.d.ended() {
		l.start(t)
	}
	pools, err := l.cl.Pools(context.Background())
	if err != nil {
		t.Errorf("list the pools: %v", err)
	}
	for _, p := range pools {
		if err := l.cl.RemovePool(context.Background(), p.ID); err != nil {
			t.Errorf("remove the pool %s: %v", p.ID, err)
		}
	}
	for _, sb := range l.list(t, client.Filter{Live: true}) {
		if err := l.cl.Kill(context.Background(), sb.ID); err != nil {
			t.Errorf("kill %s: %v", sb.ID, err)
		}
	}
	l.verify(t)
	l.d.terminate(t)
	l.cl.Close()
	l.where.Daemon = 0
	var left []census.Item
	eventually(func() bool {
		items, err := census.Take(l.where)
		if err != nil {
			return false
		}
		left = census.Unexplained(items, nil, false)
		return len(left) == 0
	}, 10*time.Second)
	for _, i := range left {
		t.Errorf("left on the host after the end of all: %s", i)
	}
	if t.Failed() {
		log := l.d.output()
		t.Logf("the daemon's log ends:\n%s", log[max(0, len(log)-4000):])
	}
	os.RemoveAll(l.where.RunDir)
}

// verify checks that what is on the host is what the live sandboxes explain.
func (l *lab) verify(t *testing.T) {
	t.Helper()
	var problems []string
	eventually(func() bool { // what has ended may take a moment to leave the kernel's lists
		problems = nil
		live := map[sandbox.ID]int{}
		for _, sb := range l.list(t, client.Filter{Live: true}) {
			id := sb.ID
			if sb.Instance != "" {
				id = sb.Instance
			}
			live[sandbox.ID(id)] = slotOf(sb.Address)
		}
		c, err := l.cl.Capacity(context.Background())
		if err != nil {
			problems = append(problems, err.Error())
			return false
		}
		for id, slot := range c.Spares {
			live[sandbox.ID(id)] = slot
		}
		items, err := census.Take(l.where)
		if err != nil {
			problems = append(problems, err.Error())
			return false
		}
		for _, i := range census.Unexplained(items, live, true) {
			problems = append(problems, "not explained by a live sandbox: "+i.String())
		}
		for _, m := range census.Missing(items, live) {
			problems = append(problems, "missing: "+m)
		}
		return len(problems) == 0
	}, 15*time.Second)
	for _, p := range problems {
		t.Error(p)
	}
}

// slotOf reads the slot out of a sandbox's address: the second of the slot's
// four in the daemon's /16.
func slotOf(address string) int {
	var a, b, c, d int
	if _, err := fmt.Sscanf(address, "%d.%d.%d.%d", &a, &b, &c, &d); err != nil {
		return -1
	}
	return (c*256 + d) / 4
}

// eventually calls f until it is true, for at most d.
func eventually(f func() bool, d time.Duration) bool {
	for end := time.Now().Add(d); ; time.Sleep(30 * time.Millisecond) {
		if f() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

func (l *lab) importTiny(t *testing.T) {
	t.Helper()
	if res := l.cli(t, "template", "import", "--name", "tiny", "docker-archive:"+image(t)); res.code != 0 {
		t.Fatalf("import the image: exit %d\n%s", res.code, res.stderr)
	}
}

func (l *lab) list(t *testing.T, f client.Filter) []wire.Sandbox {
	t.Helper()
	var all []wire.Sandbox
	for sb, err := range l.cl.Sandboxes(context.Background(), f) {
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		all = append(all, sb)
	}
	return all
}

// each runs f as a subtest for each runtime that the host can run.
func (l *lab) each(t *testing.T, f func(t *testing.T, runtime string)) {
	t.Helper()
	if l.can == nil {
		all, err := l.cl.Runtimes(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		l.can = map[string]error{}
		for _, r := range all {
			if r.Error != nil {
				l.can[r.Name] = r.Error.Err()
			}
		}
	}
	for _, runtime := range runtimes {
		t.Run(runtime, func(t *testing.T) {
			if err := l.can[runtime]; err != nil {
				t.Skipf("this host cannot run %s: %v", runtime, err)
			}
			f(t, runtime)
		})
	}
}

// create makes a sandbox of "tiny", which ends with t at the latest.
func (l *lab) create(t *testing.T, r wire.CreateSandbox) wire.Sandbox {
	t.Helper()
	if r.Template == "" && r.Snapshot == "" {
		r.Template = "tiny"
	}
	if r.Resources.MemoryMiB == 0 {
		r.Resources.MemoryMiB = 256
	}
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	sb, err := l.cl.CreateSandbox(ctx, r)
	if err != nil {
		t.Fatalf("create: %v (%s)", err, sandbox.CodeOf(err))
	}
	t.Cleanup(func() {
		if l.d != nil && !l.d.ended() {
			l.cl.Kill(context.Background(), sb.ID)
		}
	})
	return sb
}

// exec runs a command to its end.
func (l *lab) exec(t *testing.T, id string, r wire.Exec) wire.ExecResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	res, err := l.cl.Exec(ctx, id, r)
	if err != nil {
		t.Fatalf("exec %v: %v (%s)", r.Cmd.Args(), err, sandbox.CodeOf(err))
	}
	return res
}

// run runs argv inside and gives its output; it has to succeed.
func (l *lab) run(t *testing.T, id string, argv ...string) string {
	t.Helper()
	res := l.exec(t, id, wire.Exec{Cmd: wire.Command{Argv: argv}})
	if res.ExitCode != 0 {
		t.Fatalf("%q in %s: exit %d\n%s%s", argv, id, res.ExitCode, res.OutBytes(), res.ErrBytes())
	}
	return strings.TrimSpace(string(res.OutBytes()))
}

// sh runs a command line inside, which has to succeed.
func (l *lab) sh(t *testing.T, id, line string) string {
	t.Helper()
	return l.run(t, id, "/bin/sh", "-c", line)
}

func (l *lab) get(t *testing.T, id string) wire.Sandbox {
	t.Helper()
	sb, err := l.cl.Sandbox(context.Background(), id)
	if err != nil {
		t.Fatalf("get %s: %v", id, err)
	}
	return sb
}

// waitEnded waits for a sandbox's end and checks how it ended.
func (l *lab) waitEnded(t *testing.T, id string, state sandbox.State, reason sandbox.Reason) wire.Sandbox {
	t.Helper()
	var sb wire.Sandbox
	eventually(func() bool { sb = l.get(t, id); return sb.State.Ended() }, longest)
	if sb.State != state || sb.Reason != reason || sb.EndedAt == nil {
		t.Fatalf("sandbox %s is %s, reason %q, detail %q, ended %v; want %s, %s", id, sb.State, sb.Reason, sb.Detail, sb.EndedAt, state, reason)
	}
	return sb
}
