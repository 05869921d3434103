package manager

import (
	"context"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// watch looks after a running sandbox until it ends or Close begins.
func (m *Manager) watch(l *live, inst sandbox.Instance) {
	m.tasks.run(func() {
		for {
			exit, err := inst.Wait(l.ctx)
			if err == nil {
				e := &ending{reason: exit.Reason, detail: exit.Detail, at: exit.At.Round(0).UTC(), tried: make(chan struct{})}
				if exit.At.IsZero() {
					e.at = m.now()
				}
				if l.ctx.Err() == nil {
					m.requestEndIf(l, e, func(store.Record) bool { return true })
				}
				return
			}
			if l.ctx.Err() != nil {
				return
			}
			m.log.ErrorContext(l.ctx, "watch a sandbox", "sandbox", l.id, "error", err)
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
	if w, ok := inst.(sandbox.OOMWatcher); ok {
		m.tasks.run(func() {
			if err := w.WatchOOM(l.ctx, func(total int64) { m.noteOOM(l, total) }); err != nil && l.ctx.Err() == nil {
				m.log.WarnContext(l.ctx, "watch a sandbox's memory", "sandbox", l.id, "error", err)
			}
		})
	}
}

// noteOOM records that the kernel ended a command in l, total in all so far.
func (m *Manager) noteOOM(l *live, total int64) {
	ctx := l.ctx
	if l.take(ctx) != nil {
		return
	}
	defer l.give()
	rec := l.record()
	if rec.State.Ended() || total <= rec.OOMKills {
		return
	}
	err := m.update(ctx, l, func(r *store.Record) { r.OOMKills = total }, sandbox.Event{
		At: m.now(), Sandbox: l.id, Tenant: rec.Tenant, Type: sandbox.EventOOM,
		Detail: "the kernel ended a command at the memory limit; the sandbox goes on",
	})
	if err != nil && ctx.Err() == nil {
		m.log.WarnContext(ctx, "record an out-of-memory kill", "sandbox", l.id, "error", err)
	}
}

// expire ends a sandbox whose time to live ran out, unless that was moved
// meanwhile. It does not block.
func (m *Manager) expire(id sandbox.ID) {
	l := m.find(id)
	if l == nil {
		return
	}
	now := m.now()
	e := &ending{reason: sandbox.ReasonTimeout, detail: timeoutDetail, at: now, tried: make(chan struct{})}
	m.requestEndIf(l, e, func(r store.Record) bool { return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now) })
}

const timeoutDetail = "its time to live ran out"

// SetTimeout moves the end of a running sandbox's time to live to d from now;
// 0 takes it away. CodeConflict: it does not run.
func (m *Manager) SetTimeout(ctx context.Context, tenant string, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error) {
	if err := validateTimeout(d); err != nil {
		return sandbox.Sandbox{}, err
	}
	l, err := m.running(ctx, tenant, id)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := l.take(ctx); err != nil {
		return sandbox.Sandbox{}, err
	}
	defer l.give()
	if err := l.mustRun(); err != nil {
		return sandbox.Sandbox{}, err
	}
	var at time.Time
	if d > 0 {
		at = m.now().Add(d)
	}
	// In memory first: a deadline that passes while the new one is recorded
	// must not end the sandbox any more.
	before, err := l.setExpiry(at)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := m.update(ctx, l, func(*store.Record) {}); err != nil {
		if _, again := l.setExpiry(before); again == nil {
			m.ttl.set(id, before)
		}
		return sandbox.Sandbox{}, err
	}
	m.ttl.set(id, at)
	return l.record().Sandbox, nil
}

// setExpiry sets the expiry unless l's end was asked for.
func (l *live) setExpiry(at time.Time) (before time.Time, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending != nil {
		return before, sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is being ended (%s)", l.id, l.ending.reason)
	}
	before, l.rec.ExpiresAt = l.rec.ExpiresAt, at
	return before, nil
}
