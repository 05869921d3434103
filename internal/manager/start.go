package manager

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/snapshot"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointStartEntered = fault.Register("manager.start.entered")
	pointStartAdopted = fault.Register("manager.start.adopted")
	pointStartCleaned = fault.Register("manager.start.cleaned")
	pointStartSwept   = fault.Register("manager.start.swept")
	pointStartDirs    = fault.Register("manager.start.dirs")
)

const (
	// adoptions is how many sandboxes are adopted at the same time.
	adoptions = 8
	// answerTimeout is how long an adopted sandbox's agent may take to answer.
	answerTimeout = 30 * time.Second
	// adoptTries is how often an adoption that fails, other than by the
	// sandbox being gone, is tried.
	adoptTries = 3
)

// Start takes over what an earlier daemon left: it adopts what runs, finishes
// or undoes what was half done, and removes what nothing on record explains.
// Then calls are served. An error means that nothing is served; sandboxes that
// run go on running.
func (m *Manager) Start(ctx context.Context) error {
	if m.opened.Swap(true) {
		return sandbox.Errorf(sandbox.CodeInternal, "manager: started twice")
	}
	for _, dir := range []string{m.sandboxes(), filepath.Join(m.cfg.StateDir, "tmp")} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return diskError("make "+dir, err)
		}
	}
	var err error
	if m.snaps, err = snapshot.Open(filepath.Join(m.cfg.StateDir, "snapshots")); err != nil {
		return err
	}
	snaps, _, err := m.store.ListSnapshots(ctx, store.SnapshotFilter{Hidden: true})
	if err != nil {
		return err
	}
	for _, n := range snaps {
		if err := m.holdSnapshot(ctx, n); err != nil {
			m.log.WarnContext(ctx, "hold what a snapshot stands on", "snapshot", n.ID, "error", err)
		}
	}
	if err := m.startPools(ctx); err != nil {
		return err
	}
	if err := m.startBuilds(ctx); err != nil {
		return err
	}
	if err := m.startVolumes(ctx); err != nil {
		return err
	}
	recs, err := m.store.Unfinished(ctx)
	if err != nil {
		return err
	}
	for _, rec := range recs {
		l := m.newLive(rec)
		if rt := m.runtimes[rec.Runtime]; rt != nil && rec.State != sandbox.Hibernated {
			m.ledger.force(rec.ID, claimOf(rec.Resources, rt.Capabilities()))
		}
		if err := m.holdSandbox(ctx, rec); err != nil {
			m.log.WarnContext(ctx, "hold what an adopted sandbox stands on", "sandbox", rec.ID, "error", err)
		}
		m.enter(l)
	}
	pointStartEntered.Hit()
	// Every holder is known now: what none holds can go.
	if err := m.cfg.Templates.Collect(ctx); err != nil {
		m.log.WarnContext(ctx, "remove what no template needs", "error", err)
	}
	if err := m.sweepSnapshots(ctx, snaps); err != nil {
		m.log.WarnContext(ctx, "remove captures that nothing needs", "error", err)
	}
	var group errgroup.Group
	group.SetLimit(adoptions)
	for _, rec := range recs {
		l := m.find(rec.ID)
		group.Go(func() error { return m.takeOver(ctx, l) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	pointStartAdopted.Hit()
	err = m.cleanHost(ctx)
	if ctx.Err() != nil {
		return ctxError(ctx, "remove what is not on record")
	}
	if err != nil {
		// One thing that will not go must not keep the others from being served.
		m.log.ErrorContext(ctx, "remove what is not on record; it is tried again", "error", err)
		m.tasks.run(func() { m.cleanAgain(m.watching) })
	}
	if err := m.emptyTmp(); err != nil {
		return err
	}
	pointStartDirs.Hit()
	m.tasks.run(func() { m.ttl.run(m.watching, m.expire) })
	m.tasks.run(func() { m.idle.run(m.watching, m.idled) })
	m.tasks.run(func() { m.upkeep(m.watching) })
	m.tasks.run(func() { m.spares.age(m.watching) })
	m.pools.Run(m.watching)
	m.serving.Store(true)
	return nil
}

// sweepSnapshots removes captures that are not on record, and hidden ones that
// nobody holds.
func (m *Manager) sweepSnapshots(ctx context.Context, recorded []store.Snapshot) error {
	known := map[string]bool{}
	var hidden []string
	for _, n := range recorded {
		known[n.ID] = true
		if n.Hidden && len(m.snaps.Users(n.ID)) == 0 {
			hidden = append(hidden, n.ID)
		}
	}
	m.discard(ctx, hidden)
	return m.snaps.Sweep(func(id string) bool { return known[id] })
}

// takeOver adopts l or ends it with the reason why it cannot go on. The error
// is ctx's alone.
func (m *Manager) takeOver(ctx context.Context, l *live) error {
	reason, detail := m.adopt(ctx, l)
	if ctx.Err() != nil {
		return ctxError(ctx, "take over the sandboxes")
	}
	if reason == "" {
		l.mu.Lock()
		inst, expires := l.inst, l.rec.ExpiresAt
		l.lastUse = m.now()
		m.armIdle(l)
		rec := l.rec
		l.mu.Unlock()
		if rec.Pool != "" {
			m.pools.Adopt(rec.Pool, l.id, poolKey(rec))
		}
		if inst != nil {
			m.watch(l, inst)
		}
		m.ttl.set(l.id, expires)
		m.log.InfoContext(ctx, "adopted a sandbox", "sandbox", l.id)
		return nil
	}
	m.log.InfoContext(ctx, "end a sandbox of an earlier daemon", "sandbox", l.id, "reason", reason, "detail", detail)
	if err := m.endAndWait(ctx, l, reason, detail); err != nil && ctx.Err() == nil {
		return nil // told to the log by finish, which goes on trying
	}
	if ctx.Err() != nil {
		return ctxError(ctx, "take over the sandboxes")
	}
	return nil
}

// adopt makes l live again; else it gives the reason of its end.
func (m *Manager) adopt(ctx context.Context, l *live) (sandbox.Reason, string) {
	rec := l.record()
	switch {
	case rec.Op == store.OpEnd:
		return rec.EndReason, rec.EndDetail
	case rec.State == sandbox.Hibernated:
		return m.adoptHibernated(ctx, l)
	case rec.BootID != m.bootID:
		return sandbox.ReasonHostRestarted, "the host was restarted while it ran"
	case rec.State == sandbox.Creating:
		return sandbox.ReasonInterrupted, "the daemon ended while it was being made"
	case rec.Op == store.OpClaim:
		return sandbox.ReasonInterrupted, "the daemon ended while it was being claimed from its pool"
	case rec.Pool != "" && !m.pools.Has(rec.Pool):
		return sandbox.ReasonKilledByUser, "its pool was removed"
	case rec.Internal && rec.Pool == "":
		return sandbox.ReasonInterrupted, "the daemon ended during the build that it was a step of"
	case expired(rec, m.now()) && rec.OnTimeout != sandbox.OnTimeoutHibernate:
		return sandbox.ReasonTimeout, timeoutDetail + " while no daemon ran"
	}
	rt := m.runtimes[rec.Runtime]
	if rt == nil {
		return sandbox.ReasonRuntimeCrashed, "its runtime is not in this build"
	}
	inst, err := m.adoptInstance(ctx, rt, rec)
	if err != nil {
		return m.whyGone(err)
	}
	agent := l.setInstance(m, inst)
	if err := m.cfg.Network.Adopt(ctx, rec.Link, rec.HostID(), rec.Network); err != nil {
		// It must not run on with rules that nobody vouches for.
		return sandbox.ReasonPolicy, "its network could not be taken over: " + oneLine(err)
	}
	if rec.State == sandbox.Suspended || rec.Op == store.OpSuspend {
		if why := m.adoptSuspended(ctx, l); why != nil {
			return sandbox.ReasonRuntimeCrashed, "it was suspended and could not be taken over: " + oneLine(why)
		}
		if l.record().State == sandbox.Suspended {
			return "", ""
		}
	}
	answer, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := agent.WaitReady(answer); err != nil {
		// It may have ended just now: then that is the reason.
		ended, stop := context.WithTimeout(ctx, time.Second)
		defer stop()
		if exit, err := inst.Wait(ended); err == nil {
			return exit.Reason, exit.Detail
		}
		return sandbox.ReasonRuntimeCrashed, "its agent does not answer: " + oneLine(err)
	}
	// The last daemon may have ended in the middle of a capture.
	m.thaw(ctx, l)
	m.refollowStart(answer, l, agent)
	return "", ""
}

func expired(rec store.Record, now time.Time) bool {
	return !rec.ExpiresAt.IsZero() && !rec.ExpiresAt.After(now)
}

// adoptHibernated removes what runs of a sandbox that is hibernated: of a
// hibernation that was not finished, or of a wake. It needs nothing of the boot
// in which it was made.
func (m *Manager) adoptHibernated(ctx context.Context, l *live) (sandbox.Reason, string) {
	rec := l.record()
	if expired(rec, m.now()) {
		return sandbox.ReasonTimeout, timeoutDetail + " while no daemon ran"
	}
	if m.runtimes[rec.Runtime] == nil {
		return "", "" // its capture waits for a build that has it
	}
	if err := m.evict(ctx, l); err != nil {
		m.log.ErrorContext(ctx, "remove what runs of a hibernated sandbox; it is tried again before it wakes", "sandbox", l.id, "error", err)
	}
	return "", ""
}

// adoptSuspended makes a sandbox that was suspended, or was about to be or to
// go on, what its record says with its intent undone or finished.
func (m *Manager) adoptSuspended(ctx context.Context, l *live) error {
	rec := l.record()
	s, ok := l.instance().(sandbox.Suspender)
	if !ok {
		return cannot(rec.Runtime, "suspend sandboxes", "run the Warren that suspended it")
	}
	switch {
	case rec.Op == store.OpSuspend:
		if err := s.Unsuspend(ctx); err != nil {
			return err
		}
		m.thaw(ctx, l)
		return m.update(ctx, l, func(r *store.Record) { r.Op = store.OpNone })
	case rec.Op == store.OpUnsuspend:
		return m.unsuspend(ctx, l)
	}
	return s.Suspend(ctx)
}

func (m *Manager) adoptInstance(ctx context.Context, rt sandbox.Runtime, rec store.Record) (sandbox.Instance, error) {
	var err error
	for try := range adoptTries {
		if try > 0 {
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
				return nil, ctxError(ctx, "adopt sandbox "+string(rec.ID))
			}
		}
		var inst sandbox.Instance
		if inst, err = rt.Adopt(ctx, m.spec(rec)); err == nil {
			return inst, nil
		}
		if errors.Is(err, &sandbox.Error{Code: sandbox.CodeNotFound}) {
			return nil, err
		}
		m.log.WarnContext(ctx, "adopt a sandbox", "sandbox", rec.ID, "error", err)
	}
	return nil, err
}

// whyGone gives the end of a sandbox that could not be adopted. A runtime that
// knows more than that it is gone says so in the error's "reason".
func (m *Manager) whyGone(err error) (sandbox.Reason, string) {
	var known *sandbox.Error
	if !errors.As(err, &known) || known.Code != sandbox.CodeNotFound {
		return sandbox.ReasonRuntimeCrashed, "it could not be adopted: " + oneLine(err)
	}
	if known.Details["reason"] == string(sandbox.ReasonOOM) {
		return sandbox.ReasonOOM, "it ran out of memory while no daemon ran"
	}
	return sandbox.ReasonRuntimeCrashed, "it ended while no daemon ran"
}

// cleanHost removes what the host has of sandboxes that are not live. It may
// run beside creates: what it looks for on the host first, it looks for among
// the live ones afterwards.
func (m *Manager) cleanHost(ctx context.Context) error {
	errs := []error{m.cleanUnknown(ctx)}
	pointStartCleaned.Hit()
	errs = append(errs, m.cfg.Network.Sweep(ctx, m.slots()))
	pointStartSwept.Hit()
	return errors.Join(append(errs, m.removeUnknownDirs(ctx))...)
}

// cleanAgain tries cleanHost until it works or ctx is done.
func (m *Manager) cleanAgain(ctx context.Context) {
	for wait := retryEnd; ; wait = min(2*wait, retryEndMost) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		err := m.cleanHost(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		m.log.ErrorContext(ctx, "remove what is not on record; it is tried again", "error", err)
	}
}

// cleanUnknown removes what runtimes hold of sandboxes that are not live.
func (m *Manager) cleanUnknown(ctx context.Context) error {
	var errs []error
	for _, rt := range m.cfg.Runtimes {
		ids, err := rt.List(ctx)
		if errors.Is(err, &sandbox.Error{Code: sandbox.CodeUnavailable}) {
			m.log.WarnContext(ctx, "a runtime that this host cannot run is not cleaned", "runtime", rt.Name(), "error", err)
			continue
		}
		if err != nil {
			errs = append(errs, describe(err, "list what runtime "+rt.Name()+" holds"))
		}
		known := m.hosted()
		for _, id := range ids {
			if known[id] == rt.Name() {
				continue
			}
			m.log.WarnContext(ctx, "remove a sandbox that is not on record", "sandbox", id, "runtime", rt.Name())
			if err := rt.Clean(ctx, id); err != nil {
				errs = append(errs, describe(err, "remove the unknown sandbox "+string(id)))
			}
		}
	}
	return errors.Join(errs...)
}

// slots gives the network slots of the live sandboxes and the spares.
func (m *Manager) slots() map[int]sandbox.ID {
	inUse := m.spares.slots() // first: a spare becomes a sandbox's
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.live {
		if r := l.record(); r.Link.NetNS != "" {
			inUse[r.Link.Slot] = r.HostID()
		}
	}
	return inUse
}

// hosted gives the runtime of each id under which the host has something of a
// live sandbox, or of a spare.
func (m *Manager) hosted() map[sandbox.ID]string {
	ids := m.spares.ids() // first: a spare becomes a sandbox's
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, l := range m.live {
		r := l.record()
		ids[id], ids[r.HostID()] = r.Runtime, r.Runtime
	}
	return ids
}

// removeUnknownDirs removes the directories of sandboxes that are not live.
func (m *Manager) removeUnknownDirs(ctx context.Context) error {
	entries, err := os.ReadDir(m.sandboxes())
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "list the sandboxes' directories: %w", err)
	}
	var errs []error
	known := m.hosted()
	for _, e := range entries {
		id := sandbox.ID(e.Name())
		if known[id] != "" {
			continue
		}
		m.log.WarnContext(ctx, "remove the directory of a sandbox that is not live", "name", e.Name())
		errs = append(errs, m.removeDir(id))
	}
	return errors.Join(errs...)
}

// emptyTmp removes what an earlier daemon was writing.
func (m *Manager) emptyTmp() error {
	tmp := filepath.Join(m.cfg.StateDir, "tmp")
	entries, err := os.ReadDir(tmp)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "list %s: %w", tmp, err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(tmp, e.Name())); err != nil {
			return sandbox.Errorf(sandbox.CodeInternal, "empty %s: %w", tmp, err)
		}
	}
	return nil
}
