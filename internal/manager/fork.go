package manager

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var pointForkHeld = fault.Register("manager.fork.held")

// maxForks is the most children of one fork.
const maxForks = 100

// Fork makes children of a sandbox that runs, is suspended or hibernated, from
// one capture of it; it goes on as it was. The children are made side by side,
// each with a result of its own. The error is of what concerns all of them.
//
// Errors: CodeInvalid, CodeConflict (its state), CodeUnsupported (its runtime
// cannot make the kind), CodeDiskFull.
func (m *Manager) Fork(ctx context.Context, tenant string, id sandbox.ID, r ForkRequest) ([]ForkResult, error) {
	if r.Count == 0 {
		r.Count = 1
	}
	if err := r.validate(); err != nil {
		return nil, err
	}
	ctx, stop := m.bound(ctx)
	defer stop()
	m.tasks.begin()
	defer m.tasks.end()
	source, n, err := m.captureForFork(ctx, tenant, id, r)
	if err != nil {
		return nil, err
	}
	defer func() { m.discard(context.WithoutCancel(ctx), m.snaps.Drop(forkHolder(n.ID))) }()
	pointForkHeld.Hit()
	results := make([]ForkResult, r.Count)
	var group sync.WaitGroup
	for i := range results {
		group.Go(func() {
			s, err := m.makeChild(ctx, source, n, r)
			if err == nil {
				results[i].Sandbox = s
			} else if !errors.As(err, &results[i].Err) {
				results[i].Err = sandbox.Errorf(sandbox.CodeInternal, "%w", err)
			}
		})
	}
	group.Wait()
	m.shareDisks(source.ID, n, results)
	if n.Kind == sandbox.SnapshotFull {
		m.spares.want(source, r.Count)
	}
	return results, nil
}

func (r ForkRequest) validate() error {
	if r.Count < 1 || r.Count > maxForks {
		return invalid("%d forks: give 1 to %d", r.Count, maxForks)
	}
	if err := validateKind(r.Kind); err != nil {
		return err
	}
	if err := validateTimeout(r.Timeout); err != nil {
		return err
	}
	if err := validateEnv(r.Env); err != nil {
		return err
	}
	return validateMetadata(r.Metadata)
}

// forkHolder holds a capture while children are made of it.
func forkHolder(capture string) string { return "fork-of-" + capture }

// captureForFork gives the source and a capture of it that is held.
func (m *Manager) captureForFork(ctx context.Context, tenant string, id sandbox.ID, r ForkRequest) (source store.Record, n store.Snapshot, err error) {
	l, done, err := m.change(ctx, tenant, id)
	if err != nil {
		return source, n, err
	}
	goneOn := func() {}
	defer func() {
		m.tasks.run(func() {
			defer done()
			goneOn()
		})
	}()
	kind, err := m.kindFor(ctx, l, r.Kind)
	if err != nil {
		return source, n, err
	}
	source = l.record()
	if kind == sandbox.SnapshotFull {
		m.spares.hurry(source, r.Count)
	}
	if source.State == sandbox.Hibernated {
		// What it wakes from is what its children come of: it stays for them
		// when it has woken.
		if n, err = m.store.GetSnapshot(ctx, source.Capture); err != nil {
			return source, n, err
		}
		if err = m.usable(ctx, n); err != nil {
			return source, n, err
		}
	} else {
		n = m.newSnapshot(source, kind)
		n.Hidden, n.Transient = true, true
		if n, goneOn, err = m.captureAndGoOn(ctx, l, n); err != nil {
			return source, n, err
		}
	}
	return source, n, m.snaps.Hold(n.ID, forkHolder(n.ID))
}

// makeChild makes one child of source from n.
func (m *Manager) makeChild(ctx context.Context, source store.Record, n store.Snapshot, r ForkRequest) (sandbox.Sandbox, error) {
	meta := r.Metadata
	if meta == nil {
		meta = source.Metadata
	}
	p, err := m.planFrom(ctx, n, CreateRequest{
		Env: merged(inherited(source), r.Env), Metadata: maps.Clone(meta), Timeout: r.Timeout, Network: source.Network,
		OnTimeout: source.OnTimeout, IdleTimeout: source.IdleTimeout, HibernateKind: source.HibernateKind, Volumes: source.Volumes, ManualWake: source.ManualWake, PublicTraffic: source.PublicTraffic, HostHeader: source.HostHeader,
	})
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	p.rec.Parent = source.ID
	l, err := m.make(ctx, p)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return l.record().Sandbox, nil
}

// planFrom fills in a create from the snapshot n; r names no template.
func (m *Manager) planFrom(ctx context.Context, n store.Snapshot, r CreateRequest) (plan, error) {
	full := n.Kind == sandbox.SnapshotFull
	switch {
	case r.Runtime == "":
		r.Runtime = n.Runtime
	case full && r.Runtime != n.Runtime:
		return plan{}, sandbox.Errorf(sandbox.CodeUnsupported, "the memory in snapshot %s is runtime %q's, and cannot be restored by %q: leave the runtime out, or start from a snapshot of kind disk", n.ID, n.Runtime, short(r.Runtime))
	}
	rt, err := m.chooseRuntime(ctx, r.Runtime)
	if err != nil {
		return plan{}, err
	}
	if full {
		for _, f := range []struct {
			what      string
			asked, is float64
		}{
			{"cpus", r.Resources.CPUs, n.Resources.CPUs},
			{"pids", float64(r.Resources.PIDs), float64(n.Resources.PIDs)},
			{"disk", float64(r.Resources.DiskMiB), float64(n.Resources.DiskMiB)},
		} {
			if f.asked != 0 && f.asked != f.is {
				return plan{}, sandbox.Errorf(sandbox.CodeUnsupported, "%s is %v in the full snapshot %s, and %v was asked for: only the memory can differ", f.what, f.is, n.ID, f.asked)
			}
		}
	}
	res := r.Resources.Or(n.Resources)
	if err := m.checkResources(rt, res); err != nil {
		return plan{}, err
	}
	if err := m.checkTimeouts(rt, r); err != nil {
		return plan{}, err
	}
	p := plan{runtime: rt, lifetime: r.Timeout}
	if n.TemplateID != "" {
		t, err := m.cfg.Templates.Get(ctx, n.Tenant, n.TemplateID)
		if err != nil {
			return plan{}, describe(err, "the template below snapshot "+n.ID)
		}
		p.config = t.Config
	}
	if full {
		// A sandbox's own variables are in the memory; it keeps them when it is
		// captured again.
		r.Env = merged(n.Env, r.Env)
		if r.Volumes != nil && !slices.Equal(r.Volumes, n.Volumes) {
			return plan{}, sandbox.Errorf(sandbox.CodeUnsupported, "the full snapshot %s has its source's volumes, and no others: leave them out, or start from a snapshot of kind disk", n.ID)
		}
		r.Volumes = n.Volumes
	}
	if r.Network.Mode == "" {
		r.Network = n.Network
	}
	if r.User == "" {
		r.User = n.User
	}
	if r.Workdir == "" {
		r.Workdir = n.Workdir
	}
	r.Template, r.Resources = n.Template, res
	if err := m.fill(&p, n.Tenant, r, n.TemplateID, slices.Clone(n.Layers)); err != nil {
		return plan{}, err
	}
	p.rec.Snapshot = n.ID
	p.from = &n
	if full {
		p.rec.Start = sandbox.StartRestore
	}
	return p, nil
}

// checkResources tells whether rt can keep a sandbox to res.
func (m *Manager) checkResources(rt sandbox.Runtime, res sandbox.Resources) error {
	if err := res.Validate(host.CPUs()); err != nil {
		return err
	}
	caps := rt.Capabilities()
	if res.MemoryMiB < caps.MinMemoryMiB {
		return invalid("memory is %d MiB: runtime %q needs at least %d", res.MemoryMiB, rt.Name(), caps.MinMemoryMiB)
	}
	if res.DiskMiB > 0 && !caps.DiskLimit {
		return sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q cannot limit the disk: leave the limit out or choose another runtime", rt.Name())
	}
	return nil
}

// checkTimeouts tells whether rt can do what r wants at its timeouts.
func (m *Manager) checkTimeouts(rt sandbox.Runtime, r CreateRequest) error {
	_, memory := rt.(sandbox.Restorer)
	if memory || r.HibernateKind == sandbox.SnapshotDisk {
		return nil
	}
	if r.OnTimeout == sandbox.OnTimeoutHibernate {
		return cannot(rt.Name(), "hibernate sandboxes with their memory", "let them keep their disk alone (kind disk), let the timeout kill it, or use gvisor")
	}
	if r.IdleTimeout > 0 {
		return cannot(rt.Name(), "hibernate sandboxes that are idle with their memory", "let them keep their disk alone (kind disk), give a timeout instead, or use gvisor")
	}
	return nil
}

// minIdle is the shortest idle time: to go to sleep and wake costs about that.
const minIdle = time.Second
