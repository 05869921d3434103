package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The fault points of a capture.
var (
	pointCapturing = fault.Register("gvisor.capture.begun")
	pointCaptured  = fault.Register("gvisor.capture.written")
)

// captureName is the file of a capture that says what it can be restored in;
// the others are runsc's and the agent's binary.
const captureName = "warren.json"

// The Sentry's files of a capture (pkg/sentry/state/checkpointfiles).
const (
	stateName     = "checkpoint.img"
	pagesMetaName = "pages_meta.img"
	pagesName     = "pages.img"
)

// goneWithin bounds the wait for a Sentry to end that has written itself down.
const goneWithin = 30 * time.Second

// capture is what a restore needs to know beside runsc's own files.
type capture struct {
	Version string      `json:"version"`         // Driver.CaptureVersion
	Agent   string      `json:"agent"`           // SHA-256 of the binary that runs as the first process
	CPU     []string    `json:"cpu"`             // features of the host's processors
	Layers  []string    `json:"layers"`          // see layerNames
	Named   string      `json:"named,omitempty"` // what Driver.rename made of its hostname, if it did
	DiskMiB int         `json:"disk_mib"`        // the limit is part of the Sentry's own state
	Spec    *specs.Spec `json:"spec"`            // the bundle's
}

// Checkpoint implements sandbox.Checkpointer. A suspended sandbox is captured
// as it is, and what goes on from the capture is not suspended.
func (i *Instance) Checkpoint(ctx context.Context, dir string, o sandbox.CheckpointOptions) error {
	id := i.Spec().ID
	if err := os.Mkdir(dir, 0o700); err != nil {
		code := sandbox.CodeInternal
		switch {
		case errors.Is(err, fs.ErrExist):
			code = sandbox.CodeExists
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			code = sandbox.CodeDiskFull
		}
		return sandbox.Errorf(code, "capture sandbox %s: %w", id, err)
	}
	pointCapturing.Hit()
	err := i.checkpoint(ctx, dir, o)
	pointCaptured.Hit()
	if err != nil {
		if rmErr := os.RemoveAll(dir); rmErr != nil {
			err = errors.Join(err, rmErr)
		}
		return err
	}
	return nil
}

func (i *Instance) checkpoint(ctx context.Context, dir string, o sandbox.CheckpointOptions) error {
	spec := i.Spec()
	// The agent's binary is copied meanwhile: what runs has it mapped.
	copied := make(chan error, 1)
	go func() { copied <- i.describe(dir) }()
	// It goes on in either case: a Sentry that ends with its own save takes the
	// network away first, and the other ends of the connections never learn.
	err := i.Boost()
	if err == nil {
		err = i.d.save(ctx, spec.ID, dir, o.Durable)
	}
	if o.LeaveRunning || err != nil {
		err = errors.Join(err, i.Unboost())
	}
	if describeErr := <-copied; err == nil {
		err = describeErr
	}
	if err != nil {
		return runError(ctx, "capture", spec.ID, err, "")
	}
	if !o.LeaveRunning {
		return i.end(ctx)
	}
	return nil
}

// end kills what runs in the sandbox, by which its kernel closes the
// connections, and then waits for the Sentry to end, which it does by itself.
func (i *Instance) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goneWithin)
	defer cancel()
	i.Ending()
	if err := i.d.killAll(ctx, i.Spec().ID); err == nil {
		select {
		case <-i.Done():
		case <-ctx.Done():
		}
	}
	if err := i.Cgroup().Kill(ctx); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "end sandbox %s after its capture: %w", i.Spec().ID, err)
	}
	return nil
}

// runError makes an Error of what runsc or the filesystem said.
func runError(ctx context.Context, what string, id sandbox.ID, err error, said string) error {
	code := sandbox.CodeUnavailable
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		code, err = sandbox.CodeTimeout, ctx.Err()
	case ctx.Err() != nil:
		code, err = sandbox.CodeCanceled, ctx.Err()
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), strings.Contains(said+err.Error(), "no space left on device"):
		code = sandbox.CodeDiskFull
	}
	if said != "" && ctx.Err() == nil {
		return sandbox.Errorf(code, "%s sandbox %s: %w; runsc said: %s", what, id, err, said)
	}
	return sandbox.Errorf(code, "%s sandbox %s: %w", what, id, err)
}

// describe writes what Warren adds to runsc's files of a capture.
func (i *Instance) describe(dir string) error {
	spec := i.Spec()
	c := capture{Version: i.d.CaptureVersion(), Layers: layerNames(spec.Layers), DiskMiB: spec.Resources.DiskMiB}
	var err error
	if c.Named, err = i.d.named(spec.ID); err != nil {
		return err
	}
	if c.CPU, err = cpuFeatures(); err != nil {
		return err
	}
	bundle := i.d.eng.BundleDir(spec.ID)
	if c.Spec, err = readSpec(filepath.Join(bundle, "config.json")); err != nil {
		return err
	}
	if c.Agent, err = i.d.keepAgent(spec, filepath.Join(dir, agentName)); err != nil {
		return err
	}
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, captureName), data, 0o600)
}

func readSpec(path string) (*specs.Spec, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return spec, nil
}

// layerNames tells layers apart without saying where the state directory is:
// the last two parts of their paths.
func layerNames(layers []string) []string {
	names := make([]string, len(layers))
	for n, l := range layers {
		names[n] = filepath.Join(filepath.Base(filepath.Dir(l)), filepath.Base(l))
	}
	return names
}

func corrupt(err error) error {
	return sandbox.Errorf(sandbox.CodeCorruptCapture, "the capture is not whole: %w: make a new one", err)
}

// parseCapture reads what describe wrote.
func parseCapture(data []byte) (*capture, error) {
	c := new(capture)
	if err := json.Unmarshal(data, c); err != nil {
		return nil, corrupt(fmt.Errorf("%s: %w", captureName, err))
	}
	if c.Spec == nil || c.Spec.Process == nil || c.Spec.Linux == nil || c.Spec.Root == nil || c.Agent == "" {
		return nil, corrupt(fmt.Errorf("%s lacks the sandbox's specification", captureName))
	}
	return c, nil
}

// isBind tells whether a mount shows something of the host's: its type says so,
// or its options do, whatever the type.
func isBind(m specs.Mount) bool {
	return m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
}

// readCapture reads what a capture can be restored in, and checks it against
// this host and build.
func (d *Driver) readCapture(dir string) (*capture, error) {
	data, err := os.ReadFile(filepath.Join(dir, captureName))
	if err != nil {
		return nil, corrupt(err)
	}
	c, err := parseCapture(data)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(dir, stateName)); err != nil {
		return nil, corrupt(err)
	}
	if v := d.CaptureVersion(); c.Version != v {
		return nil, sandbox.Errorf(sandbox.CodeUnsupported,
			"the capture was made by %s and this is %s: restore it with the runsc that made it, or make a new one", c.Version, v)
	}
	have, err := cpuFeatures()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "%w", err)
	}
	var missing []string
	for _, f := range c.CPU {
		if _, ok := slices.BinarySearch(have, f); !ok {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return nil, sandbox.Errorf(sandbox.CodeUnsupported,
			"the capture was made on a processor with %s, which this one lacks: restore it on a host like the first", strings.Join(missing, ", "))
	}
	return c, nil
}

// matches tells whether a new sandbox is such as the capture can go on in.
func (c *capture) matches(spec sandbox.Spec) error {
	no := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeInvalid, format, args...)
	}
	if names := layerNames(spec.Layers); !slices.Equal(names, c.Layers) {
		return no("the capture's root filesystem is %s, and the new sandbox's is %s: give it the same layers",
			strings.Join(c.Layers, " over "), strings.Join(names, " over "))
	}
	if spec.Resources.DiskMiB != c.DiskMiB {
		return no("the capture's disk limit is %d MiB, and the new sandbox's is %d: it cannot change at a restore", c.DiskMiB, spec.Resources.DiskMiB)
	}
	return nil
}

// adapt makes the captured sandbox's specification that of a new one, of which
// fresh is what it would have if it were created: only what may differ between
// the lives is taken from there. runsc's own check of this would refuse other
// limits.
func (c *capture) adapt(fresh *specs.Spec) (*specs.Spec, error) {
	no := func(format string, args ...any) (*specs.Spec, error) {
		return nil, sandbox.Errorf(sandbox.CodeUnsupported, format+": make a new capture", args...)
	}
	out := *c.Spec
	out.Hostname = fresh.Hostname
	root := *c.Spec.Root
	root.Path = fresh.Root.Path
	out.Root = &root
	out.Hooks = fresh.Hooks // they run on the host
	linux := *c.Spec.Linux
	linux.CgroupsPath, linux.Resources = fresh.Linux.CgroupsPath, fresh.Linux.Resources
	if !slices.EqualFunc(linux.Namespaces, fresh.Linux.Namespaces, func(a, b specs.LinuxNamespace) bool { return a.Type == b.Type }) {
		return no("the capture's sandbox has other namespaces than this build of Warren makes")
	}
	linux.Namespaces = fresh.Linux.Namespaces
	out.Linux = &linux
	out.Mounts = slices.Clone(c.Spec.Mounts)
	for n := range out.Mounts {
		m := &out.Mounts[n]
		if !isBind(*m) {
			continue
		}
		at := slices.IndexFunc(fresh.Mounts, func(f specs.Mount) bool { return isBind(f) && f.Destination == m.Destination })
		if at < 0 {
			return no("the capture's sandbox has %s mounted, which this build of Warren does not mount", m.Destination)
		}
		m.Source = fresh.Mounts[at].Source
	}
	return &out, nil
}

// same tells whether fresh, adapted, is as it was before.
func (c *capture) same(fresh *specs.Spec) bool {
	adapted, err := c.adapt(fresh)
	if err != nil {
		return false
	}
	// Both through JSON: nil and empty are the same there.
	a, errA := json.Marshal(adapted)
	b, errB := json.Marshal(fresh)
	if errA != nil || errB != nil {
		return false
	}
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// cpuFeatures are the names of the processors' features that /proc/cpuinfo has
// ("flags" on x86, "Features" on arm64), sorted. gVisor lets a capture see the
// features of the host that it was made on, and refuses one with fewer.
var cpuFeatures = sync.OnceValues(func() ([]string, error) {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, err
	}
	return parseCPUFeatures(string(data)), nil
})

func parseCPUFeatures(cpuinfo string) []string {
	for line := range strings.Lines(cpuinfo) {
		key, value, ok := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); ok && (key == "flags" || key == "Features") {
			f := strings.Fields(value)
			slices.Sort(f)
			return slices.Compact(f)
		}
	}
	return nil
}
