package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

// endWithin bounds the removal of what a sandbox left, which must not be ended
// by a client that went away.
const endWithin = 30 * time.Second

// The fault points of a sandbox's end.
var (
	pointKilled   = fault.Register("oci.kill.killed")
	pointUngroup  = fault.Register("oci.kill.cgroup_removed")
	pointUnstated = fault.Register("oci.kill.state_removed")
)

// An Engine keeps the sandboxes of one driver on the host.
type Engine struct {
	cfg    Config
	name   string // the runtime's
	parent string // cgroup path of all the daemon's sandboxes

	// LastWords, where set, gives what a sandbox's own kernel said of its end
	// when it crashed, "" where that is nothing. It is set before any sandbox.
	LastWords func(sandbox.ID) string

	mu    sync.Mutex
	ready bool // the parent group was made
}

// NewEngine checks cfg and makes nothing on the host yet.
func NewEngine(cfg Config, name string) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Engine{cfg: cfg, name: name, parent: "/warren-" + cfg.Instance}, nil
}

// dir is the driver's own directory: a sub-directory for each sandbox, and the
// OCI runtime's state.
func (e *Engine) dir() string { return filepath.Join(e.cfg.RunDir, "oci", e.name) }

// StateDir is the OCI runtime's own state directory (its --root).
func (e *Engine) StateDir() string { return filepath.Join(e.dir(), "state") }

// BundleDir is where a sandbox's bundle and record are.
func (e *Engine) BundleDir(id sandbox.ID) string {
	return filepath.Join(e.dir(), "sandboxes", string(id))
}

// Cgroup is the group of a sandbox, whether or not it exists.
func (e *Engine) Cgroup(id sandbox.ID) (*Cgroup, error) {
	h, err := mounted()
	if err != nil {
		return nil, unavailable(err)
	}
	return &Cgroup{h: h, path: e.parent + "/" + string(id)}, nil
}

// Open makes the directories and the parent group, once.
func (e *Engine) Open() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ready {
		return nil
	}
	for _, d := range []string{e.StateDir(), filepath.Join(e.dir(), "sandboxes")} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return unavailable(err)
		}
	}
	h, err := mounted()
	if err != nil {
		return unavailable(err)
	}
	if err := h.prepare(e.parent, e.cfg.MemoryBudget); err != nil {
		return unavailable(fmt.Errorf("make the cgroup %s: %w; run as root with /sys/fs/cgroup writable", e.parent, err))
	}
	e.ready = true
	return nil
}

func (e *Engine) cpus() (*cpuTable, error) {
	h, err := mounted()
	if err != nil {
		return nil, err
	}
	all, err := h.hostCPUs()
	if err != nil {
		return nil, fmt.Errorf("the host's CPUs: %w", err)
	}
	return cpuTableOf(e.cfg.Instance, all), nil
}

// Begin records that a sandbox is about to be made, and picks its CPUs: nil is
// all. CodeExists: there is one of this id.
func (e *Engine) Begin(spec sandbox.Spec) (cpus []int, err error) {
	if err := e.Open(); err != nil {
		return nil, err
	}
	dir := e.BundleDir(spec.ID)
	if err := os.Mkdir(dir, 0o711); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil, sandbox.Errorf(sandbox.CodeExists, "the %s runtime has a sandbox %s already: clean it first", e.name, spec.ID)
		}
		return nil, unavailable(err)
	}
	table, err := e.cpus()
	if err != nil {
		return nil, unavailable(err)
	}
	cpus = table.take(spec.ID, spec.Resources.CPUs)
	return cpus, writeRecord(dir, record{ID: spec.ID, CPUs: cpus})
}

// started completes the record by the first process.
func (e *Engine) started(id sandbox.ID, p *Process, cpus []int, prepared bool) error {
	return writeRecord(e.BundleDir(id), record{ID: id, PID: p.PID, Start: p.Start, CPUs: cpus, Prepared: prepared})
}

// find gives the process of a recorded sandbox; errGone where it does not run.
func (e *Engine) find(id sandbox.ID) (*Process, error) {
	r, err := readRecord(e.BundleDir(id))
	if err != nil {
		return nil, err
	}
	if r.PID == 0 {
		return nil, errGone // the daemon ended while it was being made
	}
	p, err := openProcess(r.PID, r.Start)
	if err != nil {
		return nil, err
	}
	table, err := e.cpus()
	if err != nil {
		p.Close()
		return nil, err
	}
	table.adopt(id, r.CPUs)
	return p, nil
}

// Clean removes all that the host holds of a sandbox. The OCI runtime's state
// is removed here and not by its own delete command: that takes a process or
// two for each, and refuses what is half made.
func (e *Engine) Clean(ctx context.Context, id sandbox.ID) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	g, err := e.Cgroup(id)
	if err != nil {
		return err
	}
	if err := e.killAll(ctx, id, g); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "end sandbox %s: %w", id, err)
	}
	pointKilled.Hit()
	if err := g.Remove(ctx); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "sandbox %s: %w", id, err)
	}
	pointUngroup.Hit()
	if err := e.removeState(id); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "state of sandbox %s: %w", id, err)
	}
	pointUnstated.Hit()
	if table, err := e.cpus(); err == nil {
		table.free(id)
	}
	if err := os.RemoveAll(e.BundleDir(id)); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "record of sandbox %s: %w", id, err)
	}
	return nil
}

// killAll ends every process of a sandbox. One that was not whole may also
// have processes of the OCI runtime, which could put others into the group.
// Those fork and exit while they are looked for, so one look that finds none
// proves nothing: crun becomes its own grandchild once. Two do.
func (e *Engine) killAll(ctx context.Context, id sandbox.ID, g *Cgroup) error {
	r, err := readRecord(e.BundleDir(id))
	looks := 2
	if err == nil && r.PID != 0 {
		looks = 0
	}
	for none := 0; none < looks; none++ {
		n, err := killStarters(e.bundleArg(id))
		if err != nil {
			return err
		}
		if n > 0 {
			none = -1
		}
		if err := g.Kill(ctx); err != nil {
			return err
		}
	}
	if err := g.Kill(ctx); err != nil {
		return err
	}
	return e.killFirst(ctx, id)
}

// killFirst ends the recorded first process, should it not be in the group,
// and waits until it is gone from there too.
func (e *Engine) killFirst(ctx context.Context, id sandbox.ID) error {
	p, err := e.find(id)
	if err != nil {
		return nil // not recorded, or gone
	}
	defer p.Close()
	if err := p.kill(); err != nil {
		return err
	}
	return p.Wait(ctx)
}

// removeState removes the OCI runtime's files of a sandbox: crun and runc have
// a directory of its id, runsc several files that begin with it.
func (e *Engine) removeState(id sandbox.ID) error {
	entries, err := os.ReadDir(e.StateDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		if idOfState(entry.Name()) == id {
			errs = append(errs, os.RemoveAll(filepath.Join(e.StateDir(), entry.Name())))
		}
	}
	return errors.Join(errs...)
}

// idOfState is the sandbox that a file in the OCI runtime's state directory is
// of; "" where it is of none.
func idOfState(name string) sandbox.ID {
	name = strings.TrimPrefix(name, "runsc-")
	if i := strings.IndexAny(name, "_."); i >= 0 {
		name = name[:i]
	}
	id, err := sandbox.ParseID(name)
	if err != nil {
		return ""
	}
	return id
}

// List gives every sandbox of which this driver holds a record, state or
// group. A group that another driver's record explains is that driver's.
func (e *Engine) List(context.Context) ([]sandbox.ID, error) {
	found := map[sandbox.ID]bool{}
	add := func(dir string, idOf func(string) sandbox.ID) error {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, entry := range entries {
			if id := idOf(entry.Name()); id != "" {
				found[id] = true
			}
		}
		return nil
	}
	if err := add(filepath.Join(e.dir(), "sandboxes"), idOfName); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "list sandboxes: %w", err)
	}
	if err := add(e.StateDir(), idOfState); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "list sandboxes: %w", err)
	}
	h, err := mounted()
	if err != nil {
		return nil, unavailable(err)
	}
	for _, root := range h.roots {
		err := add(filepath.Join(root, e.parent), func(name string) sandbox.ID {
			id := idOfName(name)
			if id == "" || !exists(filepath.Join(root, e.parent, name, "cgroup.procs")) || e.othersRecord(id) {
				return ""
			}
			return id
		})
		if err != nil {
			return nil, sandbox.Errorf(sandbox.CodeInternal, "list sandboxes: %w", err)
		}
	}
	ids := make([]sandbox.ID, 0, len(found))
	for id := range found {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids, nil
}

func idOfName(name string) sandbox.ID {
	id, err := sandbox.ParseID(name)
	if err != nil {
		return ""
	}
	return id
}

// othersRecord tells whether another driver of this daemon has a record of id.
func (e *Engine) othersRecord(id sandbox.ID) bool {
	drivers, err := os.ReadDir(filepath.Join(e.cfg.RunDir, "oci"))
	if err != nil {
		return false
	}
	for _, d := range drivers {
		if d.Name() != e.name && exists(filepath.Join(e.cfg.RunDir, "oci", d.Name(), "sandboxes", string(id))) {
			return true
		}
	}
	return false
}

// Close removes the daemon's parent group and directories where no sandbox is
// left in them, and nothing else.
func (e *Engine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ready = false
	for _, d := range []string{e.StateDir(), filepath.Join(e.dir(), "sandboxes"), e.dir(), filepath.Join(e.cfg.RunDir, "oci")} {
		os.Remove(d) // not empty: in use
	}
	h, err := mounted()
	if err != nil {
		return nil
	}
	for _, root := range h.roots {
		os.Remove(filepath.Join(root, e.parent))
	}
	return nil
}

func unavailable(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return err
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "%w", err)
}
