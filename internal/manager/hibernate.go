package manager

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointHibernateRecorded = fault.Register("manager.hibernate.recorded")
	pointHibernateInstance = fault.Register("manager.hibernate.instance")
	pointHibernateSlot     = fault.Register("manager.hibernate.slot")
	pointHibernateDir      = fault.Register("manager.hibernate.dir")
	pointHibernateDone     = fault.Register("manager.hibernate.done")
	pointWakeSlot          = fault.Register("manager.wake.slot")
	pointWakeRestored      = fault.Register("manager.wake.restored")
	pointWakeGoing         = fault.Register("manager.wake.going")
	pointWakeRecorded      = fault.Register("manager.wake.recorded")
	pointWakeDone          = fault.Register("manager.wake.done")
)

// Hibernate puts a sandbox that runs or is suspended on storage: it keeps
// nothing of the host's memory, processes and network. Connections into it
// end. It is nil for one that hibernates already.
//
// It returns when what the sandbox keeps is whole, flushed and on record. What
// the host has of it goes right afterwards; creates, forks and wakes that the
// host has no room for until then wait for that.
//
// kind is what it keeps: its memory and disk, or its disk alone, of which it
// boots when it wakes, its template's start command included; "" is the
// sandbox's own HibernateKind.
//
// Errors: CodeConflict (its state), CodeUnsupported (its runtime cannot make
// the kind), CodeDiskFull; on error it goes on as it was.
func (m *Manager) Hibernate(ctx context.Context, tenant string, id sandbox.ID, kind sandbox.SnapshotKind) error {
	if err := validateKind(kind); err != nil {
		return err
	}
	m.tasks.begin()
	defer m.tasks.end()
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return err
	}
	return m.hibernate(ctx, l, kind, func(store.Record) bool { return true })
}

// hibernate does so if cond still holds when l's turn has come; cond is called
// with l.mu held.
func (m *Manager) hibernate(ctx context.Context, l *live, kind sandbox.SnapshotKind, cond func(store.Record) bool) error {
	ctx, stop := m.bound(ctx)
	defer stop()
	if err := l.take(ctx); err != nil {
		return err
	}
	asleep, err := m.putToSleep(ctx, l, kind, cond)
	if !asleep {
		l.give()
		return err
	}
	gone := m.depart(l)
	m.tasks.run(func() {
		defer l.give()
		defer gone()
		if err := m.evict(m.working, l); err != nil {
			m.log.ErrorContext(ctx, "remove what ran of a hibernated sandbox; it is tried again", "sandbox", l.id, "error", err)
			m.tasks.run(func() { m.evictAgain(m.working, l) })
		}
		pointHibernateDone.Hit()
	})
	return nil
}

// putToSleep makes l, whose turn the caller has, one that is hibernated on
// record and does not run. What the host has of it is evict's to remove.
func (m *Manager) putToSleep(ctx context.Context, l *live, kind sandbox.SnapshotKind, cond func(store.Record) bool) (asleep bool, err error) {
	l.mu.Lock()
	rec, ok, ending := l.rec, cond(l.rec), l.ending != nil
	l.mu.Unlock()
	switch {
	case ending:
		return false, l.notEnding()
	case !ok || rec.State == sandbox.Hibernated:
		return false, nil
	}
	if kind == "" {
		kind = rec.HibernateKind
	}
	if kind == "" {
		kind = sandbox.SnapshotFull
	}
	if _, can := m.runtimes[rec.Runtime].(sandbox.Restorer); kind == sandbox.SnapshotFull && !can && rec.State.Live() {
		return false, cannot(rec.Runtime, "capture memory", "hibernate it with its disk alone (kind disk), suspend it, or use gvisor")
	}
	if _, err := m.kindFor(ctx, l, kind); err != nil {
		return false, err
	}
	thaw := func() {}
	if rec.State == sandbox.Running {
		if thaw, err = m.freeze(ctx, l); err != nil {
			return false, err
		}
	}
	n := m.newSnapshot(rec, kind)
	n.Hidden = true
	n, err = m.capture(ctx, l, n, nil)
	if err != nil {
		thaw()
		return false, err
	}
	if err := m.snaps.Hold(n.ID, string(l.id)); err != nil {
		thaw()
		return false, err
	}
	// From here on the capture is the sandbox.
	err = m.update(ctx, l, func(r *store.Record) {
		r.State, r.Op, r.Capture = sandbox.Hibernated, store.OpHibernate, n.ID
		r.Layers = n.Layers // a disk's capture is one of them from now on
		r.HibernatedAt, r.SuspendedAt = m.now(), time.Time{}
		if r.OnTimeout == sandbox.OnTimeoutHibernate {
			r.ExpiresAt = time.Time{} // its time goes on when it wakes
		}
	}, m.stateEvents(rec, rec.State, sandbox.Hibernated)...)
	if err != nil {
		m.discard(context.WithoutCancel(ctx), m.snaps.Drop(string(l.id), m.standsOn(rec)...))
		thaw()
		return false, orCtx(ctx, "record the hibernation", err)
	}
	pointHibernateRecorded.Hit()
	l.detach()
	m.ttl.set(l.id, l.record().ExpiresAt)
	m.idle.set(l.id, time.Time{})
	if kind == sandbox.SnapshotFull {
		m.spares.want(rec, 1)
	}
	l.mu.Lock()
	l.unpause()
	l.mu.Unlock()
	return true, nil
}

// standsOn gives the captures that a sandbox that runs needs.
func (m *Manager) standsOn(rec store.Record) []string {
	ids := []string{rec.Snapshot}
	for _, layer := range rec.Layers {
		ids = append(ids, m.snaps.Owner(layer))
	}
	return ids
}

// detach makes l one that does not run: nobody watches it, and what is left of
// its instance is evict's to remove.
func (l *live) detach() {
	l.dropAgent()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inst != nil {
		l.corpse, l.inst = l.inst, nil
	}
	if l.unwatch != nil {
		l.unwatch()
		l.unwatch = nil
	}
}

// evict removes all that the host has of a sandbox that does not run: but its
// console and its record. Each step can be repeated. The caller has the turn.
func (m *Manager) evict(ctx context.Context, l *live) error {
	l.mu.Lock()
	rec, corpse := l.rec, l.corpse
	l.mu.Unlock()
	if err := m.endInstance(ctx, rec, corpse); err != nil {
		return err
	}
	pointHibernateInstance.Hit()
	l.mu.Lock()
	l.corpse = nil
	conns := l.conns
	l.mu.Unlock()
	conns.hangUp()
	stripped := make(chan error, 1)
	go func() { // beside the slot, whose end tells far ends of connections
		err := m.stripDirs(rec)
		pointHibernateDir.Hit()
		stripped <- err
	}()
	err := m.disconnect(ctx, l)
	pointHibernateSlot.Hit()
	if err := errors.Join(err, <-stripped); err != nil {
		return err
	}
	l.mu.Lock()
	l.rec.Instance = ""
	l.mu.Unlock()
	m.ledger.release(l.id)
	if rec.Op == store.OpHibernate {
		if err := m.update(ctx, l, func(r *store.Record) { r.Op = store.OpNone }); err != nil {
			return err
		}
	}
	l.mu.Lock()
	l.gone = true
	l.mu.Unlock()
	return nil
}

// evicted tells whether the host has nothing of l but its console.
func (l *live) evicted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gone
}

// depart notes that l is leaving the host, until gone is called.
func (m *Manager) depart(l *live) (gone func()) {
	over := make(chan struct{})
	m.mu.Lock()
	defer m.mu.Unlock()
	m.departures[l.id] = over
	return func() {
		m.mu.Lock()
		delete(m.departures, l.id)
		m.mu.Unlock()
		close(over)
	}
}

// departing gives a channel for each sandbox that is leaving the host. It
// closes when that one has left, or is to be tried again later.
func (m *Manager) departing() []chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Values(m.departures))
}

// evictAgain tries evict until it works, or somebody else has done it.
func (m *Manager) evictAgain(ctx context.Context, l *live) {
	for wait := retryEnd; ; wait = min(2*wait, retryEndMost) {
		select {
		case <-ctx.Done():
			return
		case <-l.ended:
			return
		case <-time.After(wait):
		}
		if l.take(ctx) != nil {
			return
		}
		rec := l.record()
		err := l.notEnding()
		if err == nil && rec.State == sandbox.Hibernated && rec.Op == store.OpHibernate {
			err = m.evict(ctx, l)
		}
		l.give()
		if err == nil {
			return
		}
		m.log.ErrorContext(ctx, "remove what ran of a hibernated sandbox", "sandbox", l.id, "error", err)
	}
}

// stripDirs leaves nothing but the console of a sandbox's files, and that in
// the directory of its own.
func (m *Manager) stripDirs(rec store.Record) error {
	if rec.Instance != "" {
		if err := os.MkdirAll(m.dir(rec.ID), 0o700); err != nil {
			return diskError("make the sandbox's directory", err)
		}
		if err := console.Carry(m.dir(rec.Instance), m.dir(rec.ID)); err != nil {
			return diskError("keep the sandbox's console", err)
		}
		if err := m.removeDir(rec.Instance); err != nil {
			return err
		}
	}
	return m.stripDir(rec.ID)
}

// stripDir removes all but the console from a sandbox's directory. It refuses
// while anything is mounted there.
func (m *Manager) stripDir(id sandbox.ID) error {
	dir := m.dir(id)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "read the sandbox's directory: %w", err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "read the mounts: %w", err)
	}
	if len(mounts) > 0 {
		return sandbox.Errorf(sandbox.CodeInternal, "%s is still mounted", mounts[0].Mountpoint)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "console.") {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return sandbox.Errorf(sandbox.CodeInternal, "empty the sandbox's directory: %w", err)
		}
	}
	return nil
}

// Wake brings a hibernated sandbox back, as it was. It is nil for one that
// runs. Use, Agent and Dial wake by themselves.
//
// Errors: CodeConflict (its state), CodeNoCapacity, CodeCorruptCapture,
// CodeUnsupported (another version took its capture); on error it stays
// hibernated, and nothing of it is lost.
func (m *Manager) Wake(ctx context.Context, tenant string, id sandbox.ID) error {
	m.tasks.begin()
	defer m.tasks.end()
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return err
	}
	if l.record().State == sandbox.Hibernated {
		return m.wakeUp(ctx, l)
	}
	return l.mustRun()
}

// waking is a wake under way.
type waking struct {
	done chan struct{}
	err  error // read after done
}

// wakeUp wakes l once for all who come together. It goes on when ctx ends:
// others may wait for it.
func (m *Manager) wakeUp(ctx context.Context, l *live) error {
	l.mu.Lock()
	w := l.waking
	if w == nil {
		w = &waking{done: make(chan struct{})}
		l.waking = w
		m.tasks.run(func() {
			w.err = m.wake(m.working, l)
			l.mu.Lock()
			l.waking = nil
			l.mu.Unlock()
			close(w.done)
		})
	}
	l.mu.Unlock()
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
		return ctxError(ctx, "wait for sandbox "+string(l.id)+" to wake")
	}
}

// wake makes a hibernated sandbox run. On error it is hibernated still.
func (m *Manager) wake(ctx context.Context, l *live) error {
	if err := l.take(ctx); err != nil {
		return errStopping
	}
	defer l.give()
	rec := l.record()
	if err := l.notEnding(); err != nil {
		return err
	}
	if rec.State != sandbox.Hibernated {
		return l.mustRun()
	}
	rt := m.runtimes[rec.Runtime]
	if rt == nil {
		return m.unknownRuntime(rec.Runtime)
	}
	n, err := m.store.GetSnapshot(ctx, rec.Capture)
	if err != nil {
		return describe(err, "wake sandbox "+string(l.id))
	}
	if err := m.usable(ctx, n); err != nil {
		return describe(err, "sandbox "+string(l.id)+" cannot be woken and stays hibernated")
	}
	if !l.evicted() { // what an earlier attempt left
		if err := m.evict(ctx, l); err != nil {
			return err
		}
	}
	if err := m.admit(ctx, l.id, rec.Resources, rt, n.SizeBytes); err != nil {
		return err
	}
	l.mu.Lock()
	l.gone = false
	l.mu.Unlock()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	l.setInterrupt(interrupt)
	defer l.setInterrupt(nil)
	if err := m.bringBack(ctx, l, rt, n); err != nil {
		l.detach()
		if e := m.evict(m.working, l); e != nil {
			m.log.ErrorContext(ctx, "remove what was made to wake a sandbox", "sandbox", l.id, "error", e)
		}
		m.ledger.release(l.id)
		if ended := l.notEnding(); ended != nil {
			return ended // it is not its going away that others are to be told of
		}
		return describe(orCtx(ctx, "restore the sandbox", err), "sandbox "+string(l.id)+" could not be woken and stays hibernated")
	}
	pointWakeDone.Hit()
	return nil
}

// bringBack restores l from its capture n, up to the record that it runs.
func (m *Manager) bringBack(ctx context.Context, l *live, rt sandbox.Runtime, n store.Snapshot) error {
	if err := m.creates.Acquire(ctx, 1); err != nil {
		return ctxError(ctx, "wait for other creates")
	}
	defer m.creates.Release(1)
	defer m.ledger.settle(l.id)
	var spare *spare
	if n.Kind == sandbox.SnapshotFull {
		spare = m.spares.take(ctx, l.record())
	}
	if spare != nil {
		defer m.spares.handed(spare)
		// On record with the state: until then Start finds it by its absence.
		l.mu.Lock()
		l.rec.Instance = spare.id
		l.mu.Unlock()
		if err := console.Carry(m.dir(l.id), m.dir(spare.id)); err != nil {
			return diskError("keep the sandbox's console", err)
		}
	} else if err := os.MkdirAll(m.dir(l.id), 0o700); err != nil {
		return diskError("make the sandbox's directory", err)
	}
	if err := m.connect(ctx, l, spare); err != nil {
		return err
	}
	pointWakeSlot.Hit()
	start := m.goOn
	if n.Kind == sandbox.SnapshotDisk {
		start = m.reboot
	}
	following, err := start(ctx, l, rt, n, spare)
	if err != nil {
		return err
	}
	rec := l.record()
	pointWakeGoing.Hit()
	now := m.now()
	// Its commands go on already: nobody's giving up may take it back now.
	err = m.update(context.WithoutCancel(ctx), l, func(r *store.Record) {
		r.State, r.Op, r.Capture, r.BootID = sandbox.Running, store.OpNone, "", m.bootID
		r.HibernatedAt = time.Time{}
		if r.OnTimeout == sandbox.OnTimeoutHibernate && r.Lifetime > 0 {
			r.ExpiresAt = now.Add(r.Lifetime)
		}
	}, m.stateEvents(rec, sandbox.Hibernated, sandbox.Running)...)
	if err != nil {
		return err
	}
	pointWakeRecorded.Hit()
	m.watch(l, l.instance())
	l.mu.Lock()
	l.lastUse = now
	m.armIdle(l)
	expires := l.rec.ExpiresAt
	l.mu.Unlock()
	m.ttl.set(l.id, expires)
	if spare != nil {
		if err := m.removeDir(l.id); err != nil {
			m.log.WarnContext(ctx, "remove a directory that a sandbox has no more; its end does", "sandbox", l.id, "error", err)
		}
	}
	following()
	return nil
}

// goOn restores l from its capture's memory, and lets its commands go on.
// following is what is left to do when it is on record that it runs.
func (m *Manager) goOn(ctx context.Context, l *live, rt sandbox.Runtime, n store.Snapshot, spare *spare) (following func(), err error) {
	inst, err := m.revive(ctx, l, rt, n.ID, spare)
	if err != nil {
		return nil, err
	}
	agent := l.setInstance(m, inst)
	pointWakeRestored.Hit()
	req := agentclient.RestoredRequest{InitRequest: m.identity(l.record(), nil), Wake: true}
	if err := m.tellRestored(ctx, l, n.Token, req); err != nil {
		return nil, err
	}
	return func() {
		m.loaded(l, inst, n.ID)
		m.spares.want(l.record(), 1)
		m.tasks.run(func() {
			ctx, cancel := context.WithTimeout(l.ctx, answerTimeout)
			defer cancel()
			m.refollowStart(ctx, l, agent)
		})
	}, nil
}

// reboot starts l anew from its disk.
func (m *Manager) reboot(ctx context.Context, l *live, rt sandbox.Runtime, _ store.Snapshot, _ *spare) (following func(), err error) {
	rec := l.record()
	p := plan{runtime: rt, reboot: true}
	if rec.TemplateID != "" {
		t, err := m.cfg.Templates.Get(ctx, rec.Tenant, rec.TemplateID)
		if err != nil {
			return nil, describe(err, "the template of the sandbox")
		}
		p.config = t.Config
	}
	p.env = merged(p.config.Env, rec.Env)
	return func() {}, m.boot(ctx, l, p)
}

// revive restores l from a capture, in spare where there is one. Its commands
// are stopped still, and its network has its rules.
func (m *Manager) revive(ctx context.Context, l *live, rt sandbox.Runtime, capture string, spare *spare) (sandbox.Instance, error) {
	if spare == nil {
		return m.restoreIn(ctx, l, rt, capture, nil)
	}
	ruled := make(chan error, 1)
	go func() { ruled <- m.cfg.Network.SetPolicy(ctx, spare.link, l.record().Network) }()
	inst, err := m.restoreIn(ctx, l, rt, capture, spare)
	if ruleErr := <-ruled; err == nil && ruleErr != nil {
		l.setInstance(m, inst) // for its end
		err = orCtx(ctx, "give the sandbox its network's rules", ruleErr)
	}
	return inst, err
}

func (m *Manager) restoreIn(ctx context.Context, l *live, rt sandbox.Runtime, capture string, spare *spare) (sandbox.Instance, error) {
	dir, spec := m.snaps.Path(capture), m.spec(l.record())
	if spare != nil {
		inst, err := spare.prepared.Restore(ctx, dir, spec.Hostname)
		if err == nil || ctx.Err() != nil {
			return inst, err
		}
		m.log.WarnContext(ctx, "restore in a spare; it is restored without one", "sandbox", l.id, "error", err)
	}
	r, ok := rt.(sandbox.Restorer)
	if !ok {
		return nil, cannot(rt.Name(), "restore memory", "start from a snapshot of kind disk")
	}
	return r.Restore(ctx, dir, spec)
}

// tellRestored gives a restored sandbox its identity, and lets its commands
// go. token is the capture's.
func (m *Manager) tellRestored(ctx context.Context, l *live, token string, req agentclient.RestoredRequest) error {
	ctx, cancel := context.WithTimeout(ctx, initTimeout)
	defer cancel()
	ctx, stop := whileRuns(ctx, l.instance())
	defer stop()
	agent := agentclient.New(l.dialer(), token)
	defer agent.Close()
	return orNil(ctx, "give the sandbox its identity", agent.Restored(ctx, req))
}

// orNil is orCtx for an err that may be nil.
func orNil(ctx context.Context, what string, err error) error {
	if err == nil {
		return nil
	}
	return orCtx(ctx, what, err)
}

func (l *live) setInterrupt(f context.CancelCauseFunc) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.interrupt = f
	if f != nil && l.ending != nil {
		f(errKilled)
	}
}
