package manager

import (
	"context"
	"errors"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointSuspendRecorded   = fault.Register("manager.suspend.recorded")
	pointSuspendFrozen     = fault.Register("manager.suspend.frozen")
	pointSuspendDone       = fault.Register("manager.suspend.done")
	pointUnsuspendRecorded = fault.Register("manager.unsuspend.recorded")
	pointUnsuspendGoing    = fault.Register("manager.unsuspend.going")
	pointUnsuspendDone     = fault.Register("manager.unsuspend.done")
)

// freezeTimeout bounds the agent's stopping of all processes, and thawTimeout
// one attempt to let them go on.
const (
	freezeTimeout = 30 * time.Second
	thawTimeout   = 30 * time.Second
)

// Suspend freezes a running sandbox in RAM: it keeps its memory and gets no
// CPU. It is nil for one that is suspended already.
//
// Errors: CodeConflict (it does not run), CodeUnsupported (its runtime cannot).
func (m *Manager) Suspend(ctx context.Context, tenant string, id sandbox.ID) error {
	l, done, err := m.change(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer done()
	rec := l.record()
	if rec.State == sandbox.Suspended {
		return l.notEnding()
	}
	if err := l.mustRun(); err != nil {
		return err
	}
	s, ok := l.instance().(sandbox.Suspender)
	if !ok {
		return cannot(rec.Runtime, "suspend sandboxes", "hibernate it where the runtime can, or kill it")
	}
	if err := m.update(ctx, l, func(r *store.Record) { r.Op = store.OpSuspend }); err != nil {
		return err
	}
	pointSuspendRecorded.Hit()
	thaw, err := m.freeze(ctx, l)
	if err == nil {
		err = s.Suspend(ctx)
	}
	pointSuspendFrozen.Hit()
	if err == nil {
		err = m.update(ctx, l, func(r *store.Record) {
			r.State, r.Op, r.SuspendedAt = sandbox.Suspended, store.OpNone, m.now()
		}, m.stateEvents(rec, sandbox.Running, sandbox.Suspended)...)
	}
	if err != nil {
		back := context.WithoutCancel(ctx)
		if e := s.Unsuspend(back); e != nil {
			m.log.ErrorContext(ctx, "let a sandbox go on that could not be suspended", "sandbox", id, "error", e)
		}
		thaw()
		return errors.Join(orCtx(ctx, "suspend the sandbox", err), m.update(back, l, func(r *store.Record) { r.Op = store.OpNone }))
	}
	pointSuspendDone.Hit()
	l.mu.Lock()
	l.unpause()
	m.armIdle(l)
	l.mu.Unlock()
	return nil
}

// Unsuspend lets a suspended sandbox go on. It is nil for one that runs.
//
// Errors: CodeConflict (it is neither suspended nor running).
func (m *Manager) Unsuspend(ctx context.Context, tenant string, id sandbox.ID) error {
	l, done, err := m.change(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer done()
	rec := l.record()
	if rec.State == sandbox.Running {
		return l.notEnding()
	}
	if err := l.notEnding(); err != nil {
		return err
	}
	if rec.State != sandbox.Suspended {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is %s: only a suspended one can be unsuspended", id, rec.State).
			With("state", string(rec.State))
	}
	if err := m.update(ctx, l, func(r *store.Record) { r.Op = store.OpUnsuspend }); err != nil {
		return err
	}
	pointUnsuspendRecorded.Hit()
	return m.unsuspend(ctx, l)
}

// unsuspend finishes an OpUnsuspend. The caller has the turn.
func (m *Manager) unsuspend(ctx context.Context, l *live) error {
	rec := l.record()
	s, ok := l.instance().(sandbox.Suspender)
	if !ok {
		return cannot(rec.Runtime, "suspend sandboxes", "kill it")
	}
	if err := s.Unsuspend(ctx); err != nil {
		return orCtx(ctx, "unsuspend the sandbox", err)
	}
	m.thaw(ctx, l)
	pointUnsuspendGoing.Hit()
	err := m.update(context.WithoutCancel(ctx), l, func(r *store.Record) {
		r.State, r.Op, r.SuspendedAt = sandbox.Running, store.OpNone, time.Time{}
	}, m.stateEvents(rec, sandbox.Suspended, sandbox.Running)...)
	if err != nil {
		return err
	}
	pointUnsuspendDone.Hit()
	l.mu.Lock()
	l.lastUse = m.now()
	m.armIdle(l)
	l.mu.Unlock()
	return nil
}

// change begins a change of a tenant's live sandbox: Close waits for it, it
// has the turn, and ctx may end it. done ends it.
func (m *Manager) change(ctx context.Context, tenant string, id sandbox.ID) (l *live, done func(), err error) {
	m.tasks.begin()
	if l, err = m.of(ctx, tenant, id); err == nil {
		err = l.take(ctx)
	}
	if err != nil {
		m.tasks.end()
		return nil, nil, err
	}
	return l, func() { l.give(); m.tasks.end() }, nil
}

// bound gives a context that ends with ctx, and when Close does not wait any
// longer.
func (m *Manager) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(m.working, func() { cancel(errStopping) })
	return ctx, func() { stop(); cancel(nil) }
}

func cannot(runtime, what, instead string) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q cannot %s: %s", runtime, what, instead)
}

// freeze stops the commands of l where its memory can be captured, so that no
// capture sees one at work, and keeps new requests waiting. thaw lets all go
// on; it is never nil, and has been called where err is not nil. The caller
// has the turn.
//
// A runtime that captures disks alone stops the whole sandbox while it does.
func (m *Manager) freeze(ctx context.Context, l *live) (thaw func(), err error) {
	l.mu.Lock()
	inst, agent := l.inst, l.agent
	if l.paused == nil {
		l.paused = make(chan struct{})
	}
	l.mu.Unlock()
	goOn := func() {
		l.mu.Lock()
		l.unpause()
		l.mu.Unlock()
	}
	if _, ok := inst.(sandbox.Checkpointer); !ok || agent == nil {
		return goOn, nil
	}
	thaw = func() {
		m.thaw(ctx, l)
		goOn()
	}
	short, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	short, stop := whileRuns(short, inst)
	defer stop()
	if err := agent.Freeze(short); err != nil {
		thaw()
		return thaw, orCtx(short, "stop the sandbox's commands", err)
	}
	return thaw, nil
}

var errInstanceEnded = sandbox.Errorf(sandbox.CodeUnavailable, "the sandbox ended meanwhile: `warren inspect` tells why")

// whileRuns gives a context that ends with ctx, and when inst has ended: who
// waits for its answer would not learn it by the network.
func whileRuns(ctx context.Context, inst sandbox.Instance) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		if _, err := inst.Wait(ctx); err == nil {
			cancel(errInstanceEnded)
		}
	}()
	return ctx, func() { cancel(nil) }
}

// unpause lets requests go on. l.mu is held.
func (l *live) unpause() {
	if l.paused != nil {
		close(l.paused)
		l.paused = nil
	}
}

// thaw lets the commands of l go on that the agent stopped, also when ctx has
// ended. Where that fails it goes on trying: nothing else would.
func (m *Manager) thaw(ctx context.Context, l *live) {
	l.mu.Lock()
	inst, agent := l.inst, l.agent
	l.mu.Unlock()
	if _, ok := inst.(sandbox.Checkpointer); !ok || agent == nil {
		return
	}
	once := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, thawTimeout)
		defer cancel()
		ctx, stop := whileRuns(ctx, inst)
		defer stop()
		err := agent.Thaw(ctx)
		if err != nil && context.Cause(ctx) == errInstanceEnded {
			return nil // there is nothing to thaw
		}
		return err
	}
	err := once(context.WithoutCancel(ctx))
	if err == nil {
		return
	}
	m.log.ErrorContext(ctx, "let the commands of a sandbox go on; it is tried again", "sandbox", l.id, "error", err)
	m.tasks.run(func() {
		for wait := retryEnd; ; wait = min(2*wait, retryEndMost) {
			select {
			case <-l.ctx.Done():
				return // the next daemon thaws what it adopts
			case <-time.After(wait):
			}
			if l.take(l.ctx) != nil {
				return
			}
			l.mu.Lock()
			moot := l.inst != inst || l.rec.State != sandbox.Running
			l.mu.Unlock()
			err := error(nil)
			if !moot {
				err = once(l.ctx)
			}
			l.give()
			if err == nil {
				return
			}
		}
	})
}

// instance gives l's instance; nil where it does not run.
func (l *live) instance() sandbox.Instance {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inst
}

// notEnding is nil unless somebody asked for l's end.
func (l *live) notEnding() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending != nil {
		return l.mustRunLocked()
	}
	return nil
}
