package manager

import (
	"context"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// watch looks after a running sandbox until it ends or Close begins.
func (m *Manager) watch(l *live, inst sandbox.Instance) {
	ctx, cancel := context.WithCancel(l.ctx)
	l.mu.Lock()
	l.unwatch = cancel
	l.mu.Unlock()
	m.tasks.run(func() {
		for {
			exit, err := inst.Wait(ctx)
			if err == nil {
				e := &ending{reason: exit.Reason, detail: exit.Detail, at: exit.At.Round(0).UTC(), tried: make(chan struct{})}
				if exit.At.IsZero() {
					e.at = m.now()
				}
				if ctx.Err() == nil {
					// A hibernated one's instance ends because it was captured.
					m.requestEndIf(l, e, func(r store.Record) bool { return l.inst == inst && r.State.Live() })
				}
				return
			}
			if ctx.Err() != nil {
				return
			}
			m.log.ErrorContext(ctx, "watch a sandbox", "sandbox", l.id, "error", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
	if w, ok := inst.(sandbox.OOMWatcher); ok {
		m.tasks.run(func() {
			if err := w.WatchOOM(ctx, func(total int64) { m.noteOOM(ctx, l, total) }); err != nil && ctx.Err() == nil {
				m.log.WarnContext(ctx, "watch a sandbox's memory", "sandbox", l.id, "error", err)
			}
		})
	}
}

// noteOOM records that the kernel ended a command in l, total in all so far.
func (m *Manager) noteOOM(ctx context.Context, l *live, total int64) {
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

// expire ends or hibernates a sandbox whose time to live ran out, unless that
// was moved meanwhile. It does not block.
func (m *Manager) expire(id sandbox.ID) {
	l := m.find(id)
	if l == nil {
		return
	}
	now := m.now()
	over := func(r store.Record) bool { return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now) }
	if rec := l.record(); rec.OnTimeout == sandbox.OnTimeoutHibernate && rec.State != sandbox.Creating {
		m.tasks.run(func() { m.hibernateAtTimeout(l, over) })
		return
	}
	e := &ending{reason: sandbox.ReasonTimeout, detail: timeoutDetail, at: now, tried: make(chan struct{})}
	m.requestEndIf(l, e, over)
}

// hibernateRetry is how long after a hibernation at the timeout that failed it
// is tried again.
const hibernateRetry = 10 * time.Second

func (m *Manager) hibernateAtTimeout(l *live, over func(store.Record) bool) {
	err := m.hibernate(m.working, l, "", over)
	if err == nil || m.working.Err() != nil || l.notEnding() != nil {
		return
	}
	m.log.WarnContext(m.working, "hibernate a sandbox at its timeout; it is tried again", "sandbox", l.id, "error", err)
	m.ttl.set(l.id, m.now().Add(hibernateRetry))
}

const timeoutDetail = "its time to live ran out"

// SetTimeout moves the end of a sandbox's time to live to d from now; 0 takes it
// away. It wakes no hibernated one: where that is to hibernate again at its
// timeout, d counts from when it wakes. CodeConflict: it has ended, or is being
// made.
func (m *Manager) SetTimeout(ctx context.Context, tenant string, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error) {
	if err := validateTimeout(d); err != nil {
		return sandbox.Sandbox{}, err
	}
	l, done, err := m.change(ctx, tenant, id)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	defer done()
	rec := l.record()
	if rec.State == sandbox.Creating {
		return sandbox.Sandbox{}, l.mustRun()
	}
	var at time.Time
	if d > 0 && (rec.State != sandbox.Hibernated || rec.OnTimeout != sandbox.OnTimeoutHibernate) {
		at = m.now().Add(d)
	}
	// In memory first: a deadline that passes while the new one is recorded
	// must not end the sandbox any more.
	before, err := l.setExpiry(at)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := m.update(ctx, l, func(r *store.Record) { r.Lifetime = d }); err != nil {
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
