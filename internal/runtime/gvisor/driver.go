// Package gvisor runs sandboxes in gVisor, by runsc: system calls of the
// sandbox are served by the Sentry, a kernel in user space with a system call
// filter of its own around it. It needs no KVM (platform systrap).
package gvisor

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"unicode"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Name is the runtime's name in the API.
const Name = "gvisor"

// overheadMiB is what the Sentry and the gofer of an idle sandbox need beside
// the workload (bench/ measures it). The sandbox's group gets as much above
// the limit that it was given, so that the limit is the workload's own.
const overheadMiB = 48

// overheadPIDs are the host threads of the Sentry and the gofer, and those
// that systrap keeps for each address space.
const overheadPIDs = 256

// The fault points of Create, before those of oci.Engine.Start.
var (
	pointBegun   = fault.Register("gvisor.create.begun")
	pointLinked  = fault.Register("gvisor.create.linked")
	pointBundled = fault.Register("gvisor.create.bundled")
)

// Driver is the gvisor runtime.
type Driver struct {
	cfg    oci.Config
	eng    *oci.Engine
	binary string // path of runsc; "" where there is none

	version func() string
}

var (
	_ sandbox.Runtime      = (*Driver)(nil)
	_ sandbox.Restorer     = (*Driver)(nil)
	_ sandbox.Preparer     = (*Driver)(nil)
	_ sandbox.Instance     = (*Instance)(nil)
	_ sandbox.Suspender    = (*Instance)(nil)
	_ sandbox.Checkpointer = (*Instance)(nil)
	_ sandbox.DiskCapturer = (*Instance)(nil)
	_ sandbox.DiskSharer   = (*Instance)(nil)
	_ sandbox.OOMWatcher   = (*Instance)(nil)
	_ sandbox.Loading      = (*Instance)(nil)
)

// New makes the driver. Config.Binary may be a path of runsc; empty looks it
// up beside the daemon's own binary and in PATH. A host that cannot run it is
// Probe's to tell.
func New(cfg oci.Config) (*Driver, error) {
	want := cfg.Binary
	if want != "" {
		cfg.Binary = oci.FindBinary(want)
	} else {
		beside := ""
		if exe, err := os.Executable(); err == nil {
			beside = filepath.Join(filepath.Dir(exe), "runsc")
		}
		cfg.Binary = oci.FindBinary(beside, filepath.Join(filepath.Dir(cfg.AgentPath), "runsc"), "runsc")
	}
	eng, err := oci.NewEngine(cfg, Name)
	if err != nil {
		return nil, err
	}
	if cfg.Binary == "" && want != "" {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "runsc %q cannot be found: give its path", want)
	}
	d := &Driver{cfg: cfg, eng: eng, binary: cfg.Binary, version: versionOf(cfg.Binary)}
	eng.LastWords = d.lastWords
	return d, nil
}

// Name implements sandbox.Runtime.
func (d *Driver) Name() string { return Name }

// Capabilities implements sandbox.Runtime.
func (d *Driver) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{
		Boundary:     "a kernel in user space (Sentry) with its own system call filter",
		ArbitraryELF: true,
		Suspend:      true,
		DiskCapture:  true,
		FullCapture:  true,
		DiskLimit:    true,
		HidesHost:    true,
		MinMemoryMiB: sandbox.MinMemoryMiB,
		OverheadMiB:  overheadMiB,
	}
}

// Probe implements sandbox.Runtime.
func (d *Driver) Probe(context.Context) error {
	no := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, format, args...)
	}
	if os.Geteuid() != 0 {
		return no("the gvisor runtime needs root: run the daemon as root")
	}
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		return no("gVisor does not run on %s: use the container runtime", runtime.GOARCH)
	}
	if d.binary == "" {
		return no("runsc is not installed: run `make build`, which builds the pinned one")
	}
	if err := unix.Access(d.cfg.AgentPath, unix.X_OK); err != nil {
		return no("the agent %s cannot be executed: %w: run `make build`", d.cfg.AgentPath, err)
	}
	return d.eng.Open()
}

// Create implements sandbox.Runtime.
func (d *Driver) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	if d.binary == "" {
		return nil, d.Probe(ctx)
	}
	i, err := d.begin(ctx, spec, func(cpus []int) (*oci.Instance, error) {
		// runsc takes the addresses off the interface when it starts, so they are
		// missing in a namespace that it ran in before.
		if err := restoreLink(spec.Link); err != nil {
			return nil, sandbox.Errorf(sandbox.CodeUnavailable, "network of sandbox %s: %w", spec.ID, err)
		}
		pointLinked.Hit()
		start, err := d.start(spec, cpus, "", nil)
		if err != nil {
			return nil, err
		}
		return d.eng.Start(ctx, start)
	})
	if err != nil {
		return nil, err
	}
	return &Instance{Instance: i, d: d}, nil
}

// begin records a sandbox, makes it by f, and removes it when f fails.
func (d *Driver) begin(ctx context.Context, spec sandbox.Spec, f func(cpus []int) (*oci.Instance, error)) (*oci.Instance, error) {
	cpus, err := d.eng.Begin(spec)
	if sandbox.CodeOf(err) == sandbox.CodeExists {
		return nil, err
	}
	if err != nil {
		return nil, errors.Join(err, d.eng.Clean(ctx, spec.ID))
	}
	pointBegun.Hit()
	i, err := f(cpus)
	if err != nil {
		return nil, d.cleaned(ctx, spec.ID, err)
	}
	return i, nil
}

// cleaned removes a sandbox that could not be made, for err.
func (d *Driver) cleaned(ctx context.Context, id sandbox.ID, err error) error {
	if cleanErr := d.eng.Clean(ctx, id); cleanErr != nil {
		return sandbox.Errorf(sandbox.CodeOf(err), "%w; and what was made could not be removed: %v", err, cleanErr)
	}
	return err
}

// start makes all that a new sandbox needs before runsc: one that goes on from
// the capture c in dir, or, where c is nil, one that boots.
func (d *Driver) start(spec sandbox.Spec, cpus []int, dir string, c *capture) (oci.Start, error) {
	want := ""
	if c != nil {
		if err := c.matches(spec); err != nil {
			return oci.Start{}, err
		}
		want = c.Agent
	}
	if err := os.MkdirAll(rwDir(spec.Dir), 0o700); err != nil {
		return oci.Start{}, sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	agent, err := d.placeAgent(spec, dir, want)
	if err != nil {
		return oci.Start{}, err
	}
	stage, err := d.eng.NewStage(spec, "", nil)
	if err != nil {
		return oci.Start{}, err
	}
	if err := d.bundle(spec, cpus, stage, agent); err != nil {
		stage.Close()
		return oci.Start{}, sandbox.Errorf(sandbox.CodeInternal, "bundle of sandbox %s: %w", spec.ID, err)
	}
	if c != nil {
		if err := d.writeCaptured(spec.ID, c); err != nil {
			stage.Close()
			return oci.Start{}, err
		}
	}
	pointBundled.Hit()
	return oci.Start{
		Spec:  spec,
		CPUs:  cpus,
		Stage: stage,
		Argv:  append(d.argv(), "--overlay2="+overlay(spec), "--panic-log="+d.panicLog(spec.ID)),
		Env:   runscEnv,
		After: func(g *oci.Cgroup, _ *oci.Process) error {
			// runsc took what the sandbox sees as its memory from the limit at
			// the start; the Sentry's own share comes on top.
			return g.SetMemory(int64(spec.Resources.MemoryMiB+overheadMiB) << 20)
		},
	}, nil
}

// runscEnv is the environment of runsc's processes.
var runscEnv = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

// argv are runsc and its flags that are the same for every sandbox.
func (d *Driver) argv() []string {
	return []string{
		d.binary,
		"--root=" + d.eng.StateDir(),
		"--platform=systrap",
		"--network=sandbox",
		"--allow-suid", // ids are the Sentry's alone
		"--file-access=exclusive",
		"--host-uds=none",
		"--host-fifo=none",
		"--gofer-network-namespace=new",
		"--host-settings=ignore",
		// A connection into or out of the sandbox is of one life: it is reset
		// when the sandbox is put to sleep, and closed in what goes on from a
		// capture. Those within it are kept.
		"--allow-live-tcp-migration=false",
		"--restore-spec-validation=ignore", // see capture.adapt
	}
}

// panicLog is where the Go runtime of a sandbox's Sentry writes when it ends
// itself.
func (d *Driver) panicLog(id sandbox.ID) string {
	return filepath.Join(d.eng.BundleDir(id), "panic.log")
}

// maxLastWords is how much of a panic is told.
const maxLastWords = 300

// lastWords gives the first line of a Sentry's panic. What it says may be the
// workload's doing.
func (d *Driver) lastWords(id sandbox.ID) string {
	f, err := os.Open(d.panicLog(id))
	if err != nil {
		return ""
	}
	defer f.Close()
	buf := make([]byte, maxLastWords)
	n, _ := io.ReadFull(f, buf)
	line, _, _ := strings.Cut(string(buf[:n]), "\n")
	line = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, line)
	if line == "" {
		return ""
	}
	return "the Sentry said: " + line
}

// rwDir holds a sandbox's changes to its root filesystem.
func rwDir(dir string) string { return filepath.Join(dir, "rw") }

// overlay keeps changes of the root filesystem in a file of the sandbox's
// directory, bounded by the disk limit.
func overlay(spec sandbox.Spec) string {
	o := "root:dir=" + rwDir(spec.Dir)
	if n := spec.Resources.DiskMiB; n > 0 {
		o += ",size=" + strconv.Itoa(n) + "M"
	}
	return o
}

func (d *Driver) bundle(s sandbox.Spec, cpus []int, stage *oci.Stage, agent string) error {
	g, err := d.eng.Cgroup(s.ID)
	if err != nil {
		return err
	}
	spec, err := oci.NewSpec(s, g, cpus, stage, agent)
	if err != nil {
		return err
	}
	stage.Point(oci.AgentMount)
	// On an empty /tmp runsc mounts a tmpfs, whose files would count as memory
	// and end the sandbox when they are many.
	stage.Point("/tmp/.warren")
	if err := oci.AddVolumes(spec, s, stage); err != nil {
		return err
	}
	for _, v := range s.Volumes {
		stage.PointDir(v.Path)
	}
	// A set-id program (sudo) changes ids in the Sentry alone: no right over
	// the host hangs on them.
	spec.Process.NoNewPrivileges = false
	pids := int64(s.Resources.PIDs + overheadPIDs)
	spec.Linux.Resources.Pids.Limit = &pids
	spec.Mounts = append(spec.Mounts,
		specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro", "nosuid", "nodev", "noexec"}},
	)
	// gVisor's /proc and /sys are the Sentry's, not the host's: there is
	// nothing to mask in them.
	spec.Linux.MaskedPaths, spec.Linux.ReadonlyPaths = nil, nil
	return d.eng.WriteBundle(s.ID, spec)
}

// Adopt implements sandbox.Runtime.
func (d *Driver) Adopt(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	i, err := d.eng.Adopt(ctx, spec)
	if err != nil {
		return nil, err
	}
	// Suspending is the Sentry's business here: a group that is frozen is what
	// a daemon left that ended in the middle of a Kill.
	if err := i.Cgroup().Thaw(); err != nil {
		i.Release()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "adopt sandbox %s: %w", spec.ID, err)
	}
	// Nor had it to be in the middle of a capture.
	if err := i.Unboost(); err != nil {
		i.Release()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "adopt sandbox %s: %w", spec.ID, err)
	}
	return &Instance{Instance: i, d: d}, nil
}

// Clean implements sandbox.Runtime.
func (d *Driver) Clean(ctx context.Context, id sandbox.ID) error { return d.eng.Clean(ctx, id) }

// List implements sandbox.Runtime.
func (d *Driver) List(ctx context.Context) ([]sandbox.ID, error) { return d.eng.List(ctx) }

// Close removes what the driver keeps on the host for all sandboxes, if none
// is left.
func (d *Driver) Close(ctx context.Context) error {
	ids, err := d.List(ctx)
	if err != nil || len(ids) > 0 {
		return err
	}
	return d.eng.Close()
}

// Binary is the path of runsc; "" where there is none.
func (d *Driver) Binary() string { return d.binary }
