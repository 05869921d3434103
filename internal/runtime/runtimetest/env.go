// Package runtimetest is the test suite of the contract sandbox.Runtime, for
// the drivers that are built on an OCI runtime. Every driver's own tests run
// it: runtimetest.Suite(t, factory).
//
// It makes its own root filesystem (busybox), network namespaces and names, and
// leaves nothing on the host.
package runtimetest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// A Driver is what the suite tests: a runtime that can be closed as by the
// daemon's clean stop.
type Driver interface {
	sandbox.Runtime
	Close(ctx context.Context) error
}

// A Factory makes a driver, as a starting daemon does. The suite calls it
// several times with one configuration: each is a restart.
type Factory func(cfg oci.Config) (Driver, error)

// An Env is one daemon's place on the host.
type Env struct {
	Config  oci.Config
	Driver  Driver
	Layer   string // a busybox root filesystem
	dir     string
	factory Factory
}

// New makes an Env that is removed, and checked to be removable, at the end of
// the test. It skips t where this machine cannot run it.
func New(t testing.TB, f Factory) *Env {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "ip", "apt-get install iproute2")
	busybox := testenv.Command(t, "/bin/busybox", "apt-get install busybox-static")
	dir := t.TempDir()
	name, err := host.Instance(dir)
	if err != nil {
		t.Fatal(err)
	}
	e := &Env{dir: dir, factory: f, Layer: filepath.Join(dir, "layer")}
	e.Config = oci.Config{Instance: name, RunDir: filepath.Join(dir, "run"), AgentPath: agent(t)}
	makeRoot(t, busybox, e.Layer)
	e.Driver = e.Reopen(t)
	if err := e.Driver.Probe(t.Context()); err != nil {
		t.Skipf("cannot run here: %v", err)
	}
	t.Cleanup(func() {
		ids, err := e.Driver.List(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			if err := e.Driver.Clean(context.Background(), id); err != nil {
				t.Error(err)
			}
		}
		if err := e.Driver.Close(context.Background()); err != nil {
			t.Error(err)
		}
		e.checkGone(t)
	})
	return e
}

// Reopen makes another driver with the same configuration.
func (e *Env) Reopen(t testing.TB) Driver {
	t.Helper()
	d, err := e.factory(e.Config)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// checkGone fails t for what is left on the host.
func (e *Env) checkGone(t testing.TB) {
	t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup/warren-", "/sys/fs/cgroup/*/warren-"} {
		left, _ := filepath.Glob(pattern + e.Config.Instance + "*")
		if len(left) > 0 {
			t.Errorf("cgroups left: %v", left)
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, e.dir) {
			t.Errorf("mount left: %s", line)
		}
	}
	left, _ := os.ReadDir(e.Config.RunDir)
	for _, f := range left {
		t.Errorf("left in the run directory: %s", f.Name())
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		args, _ := os.ReadFile(p)
		if strings.Contains(string(args), e.dir) {
			t.Errorf("process left: %s", strings.ReplaceAll(string(args), "\x00", " "))
		}
	}
}

var slots atomic.Int32

// Spec makes the specification of a new sandbox, with a network namespace of
// its own.
func (e *Env) Spec(t testing.TB) sandbox.Spec {
	t.Helper()
	return e.SpecAt(t, e.Link(t))
}

// SpecAt is Spec with a namespace that exists already.
func (e *Env) SpecAt(t testing.TB, link sandbox.Link) sandbox.Spec {
	t.Helper()
	id := sandbox.NewID()
	dir := filepath.Join(e.dir, "sandboxes", string(id))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return sandbox.Spec{
		ID: id, Dir: dir, Layers: []string{e.Layer}, Link: link, Hostname: "box",
		Resources: sandbox.Resources{CPUs: 1, MemoryMiB: 256, PIDs: 128},
	}
}

// Link makes a network namespace with one end of a veth pair, the other end on
// the host. Both go at the test's end.
func (e *Env) Link(t testing.TB) sandbox.Link {
	t.Helper()
	n := int(slots.Add(1)) + os.Getpid()%8000
	name := fmt.Sprintf("wrt%s-%d", e.Config.Instance, n)
	outer := fmt.Sprintf("wt%s-%x", e.Config.Instance[:6], n)
	base := netip.AddrFrom4([4]byte{10, 213, byte(n * 4 >> 8), byte(n * 4)})
	if n*4 > 65535 {
		t.Fatal("out of test addresses")
	}
	gw, addr := base.Next(), base.Next().Next()
	Run(t, "ip", "netns", "add", name)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	Run(t, "ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
	t.Cleanup(func() { exec.Command("ip", "link", "del", outer).Run() })
	Run(t, "ip", "addr", "add", gw.String()+"/30", "dev", outer)
	Run(t, "ip", "link", "set", outer, "up")
	Run(t, "ip", "-n", name, "link", "set", "lo", "up")
	Run(t, "ip", "-n", name, "addr", "add", addr.String()+"/30", "dev", "eth0")
	Run(t, "ip", "-n", name, "link", "set", "eth0", "up")
	Run(t, "ip", "-n", name, "route", "add", "default", "via", gw.String())
	return sandbox.Link{Slot: n, NetNS: "/run/netns/" + name, Device: "eth0", Address: netip.PrefixFrom(addr, 30), Gateway: gw}
}

// Run runs a command of the host and fails t when it fails.
func Run(t testing.TB, argv ...string) {
	t.Helper()
	if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
}

// Create makes a sandbox and fails t when that fails.
func (e *Env) Create(t testing.TB, spec sandbox.Spec) sandbox.Instance {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	i, err := e.Driver.Create(ctx, spec)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		if err := i.Kill(context.Background()); err != nil {
			t.Errorf("kill: %v", err)
		}
	})
	return i
}

// Exec runs a shell command inside, as root. out is both streams.
func Exec(ctx context.Context, i sandbox.Instance, command string) (out string, code int, err error) {
	c := agentclient.New(i.Dial, "")
	defer c.Close()
	r, err := c.Run(ctx, agentclient.Command{
		Path: "/bin/sh", Args: []string{"-c", command}, User: "root", Cwd: "/",
	})
	if err != nil {
		return "", 0, err
	}
	return strings.TrimRight(string(r.Stdout)+string(r.Stderr), "\n"), r.ExitCode, nil
}

// Sh runs a shell command inside and fails t unless it exits by 0.
func Sh(t testing.TB, i sandbox.Instance, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	out, code, err := Exec(ctx, i, command)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	if code != 0 {
		t.Fatalf("%s: exit %d: %s", command, code, out)
	}
	return out
}

var (
	agentOnce sync.Once
	agentPath string
	agentErr  error
)

// agent builds the agent once for a test program.
func agent(t testing.TB) string {
	t.Helper()
	agentOnce.Do(func() {
		dir, err := os.MkdirTemp("", "warren-agent")
		if err != nil {
			agentErr = err
			return
		}
		agentPath = filepath.Join(dir, "warren-agent")
		agentErr = build(agentPath, "github.com/warrenhq/warren/cmd/warren-agent")
	})
	if agentErr != nil {
		t.Fatal(agentErr)
	}
	return agentPath
}

// build makes a static program of a package.
func build(path, pkg string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", pkg, err, out)
	}
	return nil
}

// Main is a TestMain's body: it looks for leaked goroutines, removes what the
// tests share, and is the daemon that the crash tests start and kill.
func Main(m *testing.M, f Factory) int {
	if os.Getenv(childEnv) != "" {
		return child(f)
	}
	code := m.Run()
	if agentPath != "" {
		os.RemoveAll(filepath.Dir(agentPath))
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return code
}

// applets are the busybox programs that the suite uses.
var applets = strings.Fields("sh cat ls echo true false id ps sleep mount umount mknod chown chmod touch rm mkdir mv ln stat readlink " +
	"free nproc uptime hostname head dd wc grep kill ping su unshare nsenter tr df find awk seq sync test env date nc chroot sysctl dmesg md5sum sort xargs")

func makeRoot(t testing.TB, busybox, dir string) {
	t.Helper()
	for _, d := range []string{"bin", "etc", "tmp", "root", "var/lib", "home/user", "opt/suid"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "tmp"), 0o1777); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte, mode os.FileMode) {
		if err := os.WriteFile(filepath.Join(dir, name), data, mode); err != nil {
			t.Fatal(err)
		}
	}
	write("bin/busybox", data, 0o755)
	write("opt/suid/busybox", data, 0o755)
	if err := os.Chmod(filepath.Join(dir, "opt/suid/busybox"), 0o755|os.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	for _, a := range applets {
		if err := os.Symlink("busybox", filepath.Join(dir, "bin", a)); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/passwd", []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"), 0o644)
	write("etc/group", []byte("root:x:0:\nuser:x:1000:\n"), 0o644)
	write("etc/of-layer", []byte("from the layer\n"), 0o644)
	if err := os.Lchown(filepath.Join(dir, "home/user"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
}
