package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/daemon"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"warren": func() { os.Exit(Main()) }})
}

// TestScripts drives real sandboxes by the real command line and a real
// daemon. The scripts are testdata/script/*.txtar; their template "base" is
// busybox. Beside testscript's own commands they have
//
//	exits CODE COMMAND...   run it and want this exit code
//	keep VAR                put the trimmed stdout of the last command in $VAR
//	size FILE BYTES         make a file of so many random-looking bytes
//	wait-for FILE TEXT      wait until FILE holds TEXT
//	wait-state ID STATE     wait until the sandbox is in this state
//
// and the conditions runtime:R, suspend:R, disk:R and full:R: R runs here, and
// can suspend, and capture disks and all of a sandbox.
func TestScripts(t *testing.T) {
	testenv.Root(t)
	busybox := testenv.Command(t, "busybox", "apt-get install busybox-static")
	testenv.Command(t, "crun", "apt-get install crun")
	d := startDaemon(t, busybox)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("WARREN_HOST", "unix://"+d.socket)
			e.Setenv("TCP", "http://"+d.listen)
			e.Setenv("ADDR", d.listen)
			e.Setenv("STATE", d.state)
			e.Setenv("TINY", d.tiny)
			return nil
		},
		Condition: func(cond string) (bool, error) {
			if name, ok := strings.CutPrefix(cond, "runtime:"); ok {
				_, ok := d.runtimes[name]
				return ok, nil
			}
			// suspend:gvisor, disk:container, full:gvisor
			if ability, name, ok := strings.Cut(cond, ":"); ok {
				can := d.runtimes[name]
				switch ability {
				case "suspend":
					return can.Suspend, nil
				case "disk":
					return can.DiskCapture, nil
				case "full":
					return can.FullCapture, nil
				}
			}
			return false, fmt.Errorf("no condition %q", cond)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits": cmdExits, "keep": cmdKeep, "size": cmdSize, "wait-for": cmdWaitFor, "wait-state": cmdWaitState,
		},
	})
}

func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

func cmdKeep(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: keep VAR")
	}
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}

func cmdSize(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: size FILE BYTES")
	}
	n, err := strconv.Atoi(args[1])
	ts.Check(err)
	data := make([]byte, n)
	x := uint64(88172645463325252) // xorshift64: every byte value, the same each time
	for i := range data {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		data[i] = byte(x)
	}
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), data, 0o644))
}

func cmdWaitFor(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: wait-for FILE TEXT")
	}
	var data []byte
	for range 600 {
		data, _ = os.ReadFile(ts.MkAbs(args[0]))
		if bytes.Contains(data, []byte(args[1])) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	ts.Fatalf("%s does not hold %q but %q", args[0], args[1], data)
}

func cmdWaitState(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: wait-state ID STATE")
	}
	c, err := client.New(ts.Getenv("WARREN_HOST"), client.Options{})
	ts.Check(err)
	defer c.Close()
	var sb wire.Sandbox
	for range 600 {
		sb, err = c.Sandbox(context.Background(), args[0])
		ts.Check(err)
		if string(sb.State) == args[1] {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	ts.Fatalf("%s is %s (%s %s), not %s", args[0], sb.State, sb.Reason, sb.Detail, args[1])
}

// testDaemon is a daemon of this test's own.
type testDaemon struct {
	dir, state, socket, listen, tiny string
	runtimes                         map[string]sandbox.Capabilities // of those that run here
}

func startDaemon(t *testing.T, busybox string) *testDaemon {
	t.Helper()
	// Not t.TempDir: its names are too long for a socket.
	dir, err := os.MkdirTemp("", "warren-cli-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &testDaemon{runtimes: map[string]sandbox.Capabilities{}, dir: dir, state: filepath.Join(dir, "state"), socket: filepath.Join(dir, "s"), tiny: filepath.Join(dir, "tiny.tar")}
	agent := filepath.Join(dir, "warren-agent")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", agent, "github.com/warrenhq/warren/cmd/warren-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // a free port
	if err != nil {
		t.Fatal(err)
	}
	d.listen = l.Addr().String()
	l.Close()
	args := []string{"serve", "--state", d.state, "--socket", d.socket, "--listen", d.listen, "--agent", agent, "--pool", "2", "--log-level", "warn"}
	if runsc, err := filepath.Abs("../../bin/runsc"); err == nil {
		if _, err := os.Stat(runsc); err == nil {
			args = append(args, "--runsc", runsc)
		}
	}
	serve := exec.Command("warren", args...)
	var log syncBuffer
	serve.Stdout, serve.Stderr = &log, &log
	serve.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- serve.Wait() }()
	c, err := client.New("unix://"+d.socket, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for sb, err := range c.Sandboxes(context.Background(), client.Filter{Live: true}) {
			if err != nil {
				t.Error(err)
				break
			}
			t.Errorf("a script left sandbox %s behind", sb.ID)
			c.Kill(context.Background(), sb.ID)
		}
		c.Close()
		serve.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("the daemon's end: %v\n%s", err, log.String())
			}
		case <-time.After(30 * time.Second):
			serve.Process.Kill()
			t.Errorf("the daemon did not end by SIGTERM\n%s", log.String())
		}
		cleanHost(t, d.state)
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", log.String())
		}
	})
	deadline := time.Now().Add(30 * time.Second)
	for {
		res, err := http.Get("http://" + d.listen + "/readyz")
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				break
			}
		}
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("the daemon has ended: %v\n%s", err, log.String())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("the daemon is not ready\n%s", log.String())
		}
	}
	if !strings.Contains(log.String(), "e2b_") {
		t.Errorf("the first start shows no API key:\n%s", log.String())
	}
	makeTiny(t, busybox, d.tiny)
	imp := exec.Command("warren", "template", "import", "--name", "base", "--shared", "docker-archive:"+d.tiny)
	imp.Env = append(os.Environ(), "WARREN_HOST=unix://"+d.socket)
	if out, err := imp.CombinedOutput(); err != nil {
		t.Fatalf("import the template: %v\n%s", err, out)
	}
	rs, err := c.Runtimes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		if r.Available {
			d.runtimes[r.Name] = r.Capabilities
		}
	}
	if len(d.runtimes) == 0 {
		t.Skip("no runtime can run here: see `warren runtimes`")
	}
	return d
}

// cleanHost checks that the daemon and its sandboxes have left nothing of their
// own on the host, and takes away the empty places that wait for its next start.
func cleanHost(t *testing.T, state string) {
	t.Helper()
	runDir, err := daemon.RunDir(state)
	if err != nil {
		t.Error(err)
		return
	}
	instance := filepath.Base(runDir)
	items, err := census.Take(census.Where{Instance: instance, State: state, RunDir: runDir})
	if err != nil {
		t.Error(err)
	}
	for _, i := range items {
		if !i.Shared {
			t.Errorf("left on the host: %s", i)
		}
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/warren-" + instance)
	for _, g := range append(groups, "/sys/fs/cgroup/warren-"+instance) {
		os.Remove(g) // rmdir(2): empty ones alone
	}
	os.RemoveAll(runDir)
}

// makeTiny writes an image of busybox with the users root and user.
func makeTiny(t *testing.T, busybox, archive string) {
	t.Helper()
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	add := func(h tar.Header, data []byte) {
		h.Size = int64(len(data))
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		tw.Write(data)
	}
	for _, dir := range []string{"bin/", "etc/", "proc/", "dev/", "sys/", "root/", "home/"} {
		add(tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	add(tar.Header{Name: "home/user/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000, Gid: 1000}, nil)
	add(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	for _, applet := range strings.Fields(string(list)) {
		if applet != "busybox" {
			add(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
		}
	}
	add(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"))
	add(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\nuser:x:1000:\n"))
	add(tar.Header{Name: "etc/not-a-program", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("x\n"))
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	if image, err = mutate.Config(image, v1.Config{Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}}); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("tiny:latest")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(archive, tag, image); err != nil {
		t.Fatal(err)
	}
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
