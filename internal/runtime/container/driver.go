// Package container runs sandboxes as Linux containers, by crun or runc: every
// one in namespaces of its own (user ids included), with limits, a system call
// filter and hardly any capability. The kernel is the host's.
package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/idmap"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Name is the runtime's name in the API.
const Name = "container"

// overheadMiB is what an idle container costs beside its workload: the agent
// is inside and counts as workload; this is the kernel's share, rounded up.
const overheadMiB = 2

// agentOOMScore keeps the kernel from choosing the agent while anything else
// in the sandbox can be ended.
const agentOOMScore = -998

// The fault points of Create, before those of oci.Engine.Start.
var (
	pointBegun   = fault.Register("container.create.begun")
	pointBundled = fault.Register("container.create.bundled")
)

// Driver is the container runtime.
type Driver struct {
	cfg    oci.Config
	eng    *oci.Engine
	binary string // path of crun or runc; "" where there is none
	lxcfs  *lxcfs
	filter filter
}

var (
	_ sandbox.Runtime      = (*Driver)(nil)
	_ sandbox.Instance     = (*Instance)(nil)
	_ sandbox.Suspender    = (*Instance)(nil)
	_ sandbox.DiskCapturer = (*Instance)(nil)
	_ sandbox.OOMWatcher   = (*Instance)(nil)
)

// New makes the driver. Config.Binary may be "crun", "runc" or a path; empty
// takes crun where it is installed, else runc (docs/decisions/0001). A host
// that cannot run it is Probe's to tell.
func New(cfg oci.Config) (*Driver, error) {
	binary := oci.FindBinary("crun", "runc")
	if cfg.Binary != "" {
		binary = oci.FindBinary(cfg.Binary)
	}
	want := cfg.Binary
	cfg.Binary = binary
	eng, err := oci.NewEngine(cfg, Name)
	if err != nil {
		return nil, err
	}
	if binary == "" && want != "" {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the OCI runtime %q cannot be found: give crun, runc or a path", want)
	}
	return &Driver{cfg: cfg, eng: eng, binary: binary, lxcfs: newLXCFS(cfg.RunDir)}, nil
}

// Name implements sandbox.Runtime.
func (d *Driver) Name() string { return Name }

// Capabilities implements sandbox.Runtime.
func (d *Driver) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{
		Boundary:     "namespaces with user ids of its own, cgroups, seccomp; the host's kernel",
		ArbitraryELF: true,
		Suspend:      true,
		DiskCapture:  true,
		HidesHost:    d.lxcfs.available(),
		MinMemoryMiB: sandbox.MinMemoryMiB,
		OverheadMiB:  overheadMiB,
	}
}

// mapsIDs caches that the run directory's host can map ids, by filesystem.
var mapsIDs sync.Map

// Probe implements sandbox.Runtime.
func (d *Driver) Probe(ctx context.Context) error {
	no := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, format, args...)
	}
	if os.Geteuid() != 0 {
		return no("the container runtime needs root: run the daemon as root")
	}
	if d.binary == "" {
		return no("no OCI runtime is installed: run `apt-get install crun` (or runc)")
	}
	if err := unix.Access(d.cfg.AgentPath, unix.X_OK); err != nil {
		return no("the agent %s cannot be executed: %w: run `make build`", d.cfg.AgentPath, err)
	}
	if data, err := os.ReadFile("/proc/filesystems"); err == nil && !strings.Contains(string(data), "\toverlay\n") {
		// Loaded at the first mount on most hosts.
		if _, err := os.Stat("/sys/module/overlay"); err != nil && !moduleExists("overlay") {
			return no("the kernel has no overlayfs: load the module (`modprobe overlay`)")
		}
	}
	if data, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err == nil && strings.TrimSpace(string(data)) == "0" {
		return no("user namespaces are turned off: `sysctl user.max_user_namespaces=16384`")
	}
	if err := d.probeMounts(); err != nil {
		return err
	}
	return d.eng.Open()
}

// probeMounts tries an idmapped mount where the state is most likely to be.
func (d *Driver) probeMounts() error {
	dir := filepath.Dir(d.cfg.AgentPath)
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "%s: %w", dir, err)
	}
	if _, ok := mapsIDs.Load(st.Dev); ok {
		return nil
	}
	if err := idmap.Supported(dir); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "containers need idmapped mounts under overlayfs (Linux 5.19, and a filesystem like ext4, XFS or btrfs): %w", err)
	}
	mapsIDs.Store(st.Dev, true)
	return nil
}

func moduleExists(name string) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	data, err := os.ReadFile(filepath.Join("/lib/modules", unix.ByteSliceToString(u.Release[:]), "modules.dep"))
	return err == nil && strings.Contains(string(data), "/"+name+".ko")
}

// Create implements sandbox.Runtime.
func (d *Driver) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	if d.binary == "" {
		return nil, d.Probe(ctx)
	}
	cpus, err := d.eng.Begin(spec)
	if sandbox.CodeOf(err) == sandbox.CodeExists {
		return nil, err
	}
	if err != nil {
		return nil, errors.Join(err, d.eng.Clean(ctx, spec.ID))
	}
	pointBegun.Hit()
	i, err := d.create(ctx, spec, cpus)
	if err != nil {
		if cleanErr := d.eng.Clean(ctx, spec.ID); cleanErr != nil {
			err = sandbox.Errorf(sandbox.CodeOf(err), "%w; and what was made could not be removed: %v", err, cleanErr)
		}
		return nil, err
	}
	return &Instance{Instance: i}, nil
}

func (d *Driver) create(ctx context.Context, spec sandbox.Spec, cpus []int) (*oci.Instance, error) {
	ids, err := idmap.ForSlot(spec.Link.Slot)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
	}
	stage, err := d.eng.NewStage(spec, rwDir(spec.Dir), &ids)
	if err != nil {
		return nil, err
	}
	if err := d.bundle(ctx, spec, ids, cpus, stage); err != nil {
		stage.Close()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "bundle of sandbox %s: %w", spec.ID, err)
	}
	pointBundled.Hit()
	i, err := d.eng.Start(ctx, oci.Start{
		Spec:    spec,
		CPUs:    cpus,
		Stage:   stage,
		Argv:    d.argv(),
		NoUnify: d.isCrun(),
		// By the spec it would be set inside the user namespace, where it must
		// not go down. The agent raises the score of what it starts, so that it
		// is spared too where the daemon may not lower its own.
		After: func(_ *oci.Cgroup, first *oci.Process) error { return first.SpareFromOOM(agentOOMScore) },
	})
	if err == nil && d.isCrun() {
		d.filter.learn(filepath.Join(d.eng.StateDir(), string(spec.ID)))
	}
	return i, err
}

func (d *Driver) isCrun() bool { return filepath.Base(d.binary) == "crun" }

func (d *Driver) argv() []string {
	argv := []string{d.binary, "--root=" + d.eng.StateDir()}
	if d.isCrun() {
		argv = append(argv, "--cgroup-manager=cgroupfs")
	}
	return argv
}

// rwDir holds a sandbox's changes to its root filesystem.
func rwDir(dir string) string { return filepath.Join(dir, "rw") }

// Adopt implements sandbox.Runtime.
func (d *Driver) Adopt(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	i, err := d.eng.Adopt(ctx, spec)
	if err != nil {
		return nil, err
	}
	inst := &Instance{Instance: i}
	if _, err := os.Stat(capturing(spec)); err == nil { // the last daemon ended in the middle of a capture
		if err := inst.Unsuspend(ctx); err != nil {
			i.Release()
			return nil, sandbox.Errorf(sandbox.CodeInternal, "adopt sandbox %s: %w", spec.ID, err)
		}
		os.Remove(capturing(spec))
	}
	return inst, nil
}

// Clean implements sandbox.Runtime.
func (d *Driver) Clean(ctx context.Context, id sandbox.ID) error { return d.eng.Clean(ctx, id) }

// List implements sandbox.Runtime.
func (d *Driver) List(ctx context.Context) ([]sandbox.ID, error) { return d.eng.List(ctx) }

// Close ends what the driver keeps on the host for all sandboxes, if none is
// left; with live ones it leaves all in place for the next daemon.
func (d *Driver) Close(ctx context.Context) error {
	ids, err := d.List(ctx)
	if err != nil || len(ids) > 0 {
		return err
	}
	if err := d.lxcfs.stop(ctx); err != nil {
		return fmt.Errorf("container runtime: %w", err)
	}
	return d.eng.Close()
}

// Binary is the path of the OCI runtime in use; "" where there is none.
func (d *Driver) Binary() string { return d.binary }
