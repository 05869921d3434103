package daemon

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// childEnv makes the test binary a daemon: its value is the Config as JSON.
const childEnv = "WARREN_DAEMON_TEST_CONFIG"

// traceEnv has a child daemon tell of the fault points from its start on.
const traceEnv = "WARREN_DAEMON_TEST_TRACE"

func TestMain(m *testing.M) {
	if cfg := os.Getenv(childEnv); cfg != "" {
		child(cfg)
	}
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

// built is the directory of agentPath's program.
var built string

// child is a real daemon that takes orders on its standard input ("arm NAME",
// "trace", "quiet") and tells on its standard output what happens ("ready
// INFO", "hit NAME", "ok").
func child(config string) {
	var cfg Config
	if err := json.Unmarshal([]byte(config), &cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	var mu sync.Mutex
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Printf(format+"\n", args...)
	}
	tell := func(name string) { say("hit %s", name) }
	if os.Getenv(traceEnv) != "" {
		fault.Trace(tell)
	}
	go func() {
		defer stop() // the test is gone
		for in := bufio.NewScanner(os.Stdin); in.Scan(); say("ok") {
			switch order, arg, _ := strings.Cut(in.Text(), " "); order {
			case "arm":
				fault.Arm(arg, 1)
			case "trace":
				fault.Trace(tell)
			case "quiet":
				fault.Trace(nil)
			}
		}
	}()
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	err := Run(ctx, cfg, log, func(i Info) {
		b, _ := json.Marshal(i)
		say("ready %s", b)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// stage is a state directory on which one daemon after another runs.
type stage struct {
	cfg    Config
	where  census.Where
	client *client.Client
	d      *process
}

// process is one daemon.
type process struct {
	cmd    *exec.Cmd
	orders io.WriteCloser
	info   Info
	ready  chan Info
	oks    chan struct{}
	done   chan struct{} // closed when it has ended
	stderr *syncBuffer

	mu   sync.Mutex
	hits []string
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

var agentPath = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "warren-agent-")
	if err != nil {
		return "", err
	}
	built = dir
	path := filepath.Join(dir, "warren-agent")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "github.com/warrenhq/warren/cmd/warren-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the agent: %w\n%s", err, out)
	}
	return path, nil
})

// newStage makes a state directory with the templates "tiny" and "service" in
// it.
func newStage(t *testing.T, change ...func(dir string, cfg *Config)) *stage {
	t.Helper()
	testenv.Root(t)
	busybox := testenv.Command(t, "busybox", "apt-get install busybox-static")
	agent, err := agentPath()
	if err != nil {
		t.Fatal(err)
	}
	// Not t.TempDir: its names are too long for a socket.
	dir, err := os.MkdirTemp("", "warren-")
	if err != nil {
		t.Fatal(err)
	}
	s := &stage{cfg: Config{
		State: filepath.Join(dir, "state"), Socket: filepath.Join(dir, "sock"), Listen: "127.0.0.1:0", Agent: agent,
		PoolSize: -1, // so that every namespace is a sandbox's
		Ballast:  1 << 20, Grace: 5 * time.Second,
	}}
	if runsc := repoFile("bin/runsc"); runsc != "" {
		s.cfg.Runsc = runsc
	}
	if err := os.Mkdir(s.cfg.State, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(dir, &s.cfg)
	}
	run, err := RunDir(s.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	s.where = census.Where{Instance: filepath.Base(run), State: s.cfg.State, RunDir: run}
	importTiny(t, s.cfg.State, busybox, filepath.Join(dir, "tiny.tar"))
	s.client, err = client.New("unix://"+s.cfg.Socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.tearDown(t)
		s.client.Close()
		os.RemoveAll(dir)
	})
	return s
}

// repoFile finds a file of the repository; "" where it is not there.
func repoFile(rel string) string {
	path, err := filepath.Abs(filepath.Join("../..", rel))
	if err != nil {
		return ""
	}
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// launch starts a daemon and does not wait for it to be ready.
func (s *stage) launch(t *testing.T, env ...string) *process {
	t.Helper()
	config, err := json.Marshal(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := &process{
		cmd: exec.Command(os.Args[0]), ready: make(chan Info, 1), oks: make(chan struct{}, 1),
		done: make(chan struct{}), stderr: &syncBuffer{},
	}
	p.cmd.Env = append(append(os.Environ(), childEnv+"="+string(config)), env...)
	p.cmd.Stderr = p.stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.orders, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.done)
		for in := bufio.NewScanner(out); in.Scan(); {
			word, rest, _ := strings.Cut(in.Text(), " ")
			switch word {
			case "ready":
				var i Info
				json.Unmarshal([]byte(rest), &i)
				p.ready <- i
			case "ok":
				p.oks <- struct{}{}
			case "hit":
				p.mu.Lock()
				p.hits = append(p.hits, rest)
				p.mu.Unlock()
			}
		}
		p.cmd.Wait()
	}()
	s.d = p
	s.where.Daemon = p.cmd.Process.Pid
	return p
}

// start starts a daemon and waits until it serves.
func (s *stage) start(t *testing.T, env ...string) *process {
	t.Helper()
	p := s.launch(t, env...)
	select {
	case p.info = <-p.ready:
	case <-p.done:
		t.Fatalf("the daemon ended (%v):\n%s", p.cmd.ProcessState, p.stderr)
	case <-time.After(time.Minute):
		t.Fatalf("the daemon is not ready:\n%s", p.stderr)
	}
	return p
}

// order gives the daemon an order, and returns when it was carried out.
func (p *process) order(t *testing.T, format string, args ...any) {
	t.Helper()
	fmt.Fprintf(p.orders, format+"\n", args...)
	select {
	case <-p.oks:
	case <-p.done:
		t.Fatalf("the daemon has ended:\n%s", p.stderr)
	case <-time.After(20 * time.Second):
		t.Fatal("the daemon takes no orders")
	}
}

// passed gives the distinct points of the trace, in order.
func (p *process) passed() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var names []string
	seen := map[string]bool{}
	for _, n := range p.hits {
		if !seen[n] {
			seen[n] = true
			names = append(names, n)
		}
	}
	return names
}

// kill ends the daemon as a power cut would.
func (p *process) kill(t *testing.T) {
	t.Helper()
	p.cmd.Process.Kill()
	<-p.done
}

// terminate stops the daemon cleanly.
func (p *process) terminate(t *testing.T) {
	t.Helper()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(time.Minute):
		t.Errorf("the daemon does not stop:\n%s", p.stderr)
		p.kill(t)
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("the daemon stopped with %v:\n%s", p.cmd.ProcessState, p.stderr)
	}
}

// died tells whether the daemon ends within d, and was killed by its point.
func (p *process) died(d time.Duration) bool {
	select {
	case <-p.done:
		ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
		return ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL
	case <-time.After(d):
		return false
	}
}

// tearDown ends everything on the stage, and checks that nothing is left.
func (s *stage) tearDown(t *testing.T) {
	if s.d == nil {
		return
	}
	select {
	case <-s.d.done:
		s.start(t)
	default:
	}
	s.killAll(t)
	s.d.terminate(t)
	s.where.Daemon = 0
	items, err := census.Take(s.where)
	if err != nil {
		t.Error(err)
	}
	for _, i := range census.Unexplained(items, nil, false) {
		t.Errorf("left on the host after the end of all: %s", i)
	}
	os.RemoveAll(s.where.RunDir)
}

// killAll removes all pools, and ends all sandboxes but some.
func (s *stage) killAll(t *testing.T, but ...string) {
	t.Helper()
	pools, err := s.client.Pools(context.Background())
	if err != nil {
		t.Errorf("list the pools: %v", err)
	}
	for _, p := range pools {
		if err := s.client.RemovePool(context.Background(), p.ID); err != nil {
			t.Errorf("remove the pool %s: %v", p.ID, err)
		}
	}
	for _, sb := range s.live(t) {
		keep := false
		for _, id := range but {
			keep = keep || id == sb.ID
		}
		if keep {
			continue
		}
		if err := s.client.Kill(context.Background(), sb.ID); err != nil {
			t.Errorf("kill %s: %v", sb.ID, err)
		}
	}
}

func (s *stage) live(t *testing.T) []wire.Sandbox {
	t.Helper()
	return s.list(t, client.Filter{Live: true})
}

func (s *stage) list(t *testing.T, f client.Filter) []wire.Sandbox {
	t.Helper()
	var all []wire.Sandbox
	for sb, err := range s.client.Sandboxes(context.Background(), f) {
		if err != nil {
			t.Fatalf("list: %v\n%s", err, s.d.stderr)
		}
		all = append(all, sb)
	}
	return all
}

// create makes a sandbox of "tiny".
func (s *stage) create(t *testing.T, r wire.CreateSandbox) wire.Sandbox {
	t.Helper()
	if r.Template == "" {
		r.Template = "tiny"
	}
	sb, err := s.client.CreateSandbox(context.Background(), r)
	if err != nil {
		t.Fatalf("create: %v\n%s", err, s.d.stderr)
	}
	return sb
}

// run runs a shell command inside.
func (s *stage) run(id, command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var out, errs bytes.Buffer
	r, err := s.client.Start(ctx, id, client.Command{Args: []string{"/bin/sh", "-c", command}, Stdout: &out, Stderr: &errs})
	if err != nil {
		return "", err
	}
	exit, err := r.Wait(ctx)
	if err == nil && exit.Code != 0 {
		err = fmt.Errorf("exit %d: %s", exit.Code, errs.Bytes())
	}
	return strings.TrimSpace(out.String()), err
}

// counter starts a command inside that counts for ever.
func (s *stage) counter(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r, err := s.client.Start(ctx, id, client.Command{Args: []string{"/bin/sh", "-c",
		`echo started >> /tmp/starts; i=0; while :; do i=$((i+1)); echo $i > /tmp/new; busybox mv /tmp/new /tmp/count; sleep 0.05; done`}})
	if err != nil {
		t.Fatal(err)
	}
	go r.Wait(ctx)
}

// counts checks that the command of counter still runs, and was started once.
func (s *stage) counts(t *testing.T, id string) {
	t.Helper()
	out, err := s.run(id, `cat /tmp/starts; a=$(cat /tmp/count); n=0; while [ "$(cat /tmp/count)" = "$a" ]; do n=$((n+1)); [ $n -gt 100 ] && exit 9; sleep 0.1; done`)
	if err != nil || out != "started" {
		t.Errorf("the command in %s does not go on: %q, %v", id, out, err)
	}
}

// verify checks that every sandbox lives or has ended with a reason, and that
// the host has what the live ones explain and nothing else.
func (s *stage) verify(t *testing.T) {
	t.Helper()
	for _, sb := range s.list(t, client.Filter{}) {
		switch sb.State {
		case sandbox.Running:
			if out, err := s.run(sb.ID, "echo yes"); err != nil || out != "yes" {
				t.Errorf("%s is said to run and answers %q, %v", sb.ID, out, err)
			}
		case sandbox.Suspended, sandbox.Hibernated:
		case sandbox.Killed, sandbox.Failed:
			if sb.Reason == "" || sb.EndedAt == nil {
				t.Errorf("%s ended without a reason: %+v", sb.ID, sb)
			}
		default:
			t.Errorf("%s is left %s", sb.ID, sb.State)
		}
	}
	// What has ended may take a moment to leave the kernel's lists.
	var problems []string
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if problems = s.compare(t); len(problems) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, p := range problems {
		t.Error(p)
	}
}

func (s *stage) compare(t *testing.T) (problems []string) {
	t.Helper()
	live := map[sandbox.ID]int{}
	items, err := census.Take(s.where)
	if err != nil {
		return []string{err.Error()}
	}
	for _, sb := range s.live(t) {
		if sb.State != sandbox.Hibernated {
			id := sb.ID
			if sb.Instance != "" {
				id = sb.Instance
			}
			live[sandbox.ID(id)] = slotOf(sb.Address)
			continue
		}
		// Its console is all that the host has of it, beside its capture.
		items = slices.DeleteFunc(items, func(i census.Item) bool {
			return i.Kind == census.Dir && i.ID == sandbox.ID(sb.ID)
		})
	}
	c, err := s.client.Capacity(context.Background())
	if err != nil {
		return []string{err.Error()}
	}
	for id, slot := range c.Spares {
		live[sandbox.ID(id)] = slot
	}
	for _, i := range census.Unexplained(items, live, true) {
		problems = append(problems, "not explained by a live sandbox: "+i.String())
	}
	for _, m := range census.Missing(items, live) {
		problems = append(problems, "missing: "+m)
	}
	return problems
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
