package manager

import (
	"context"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// Use says that a tenant's sandbox is in use until release is called, and
// wakes it if it is hibernated. While it is in use its idle time does not run.
// Who holds a stream into it, or proxies a request, holds a Use meanwhile;
// requests of Agent's client do so by themselves.
//
// CodeConflict: it does not run; the message tells why.
func (m *Manager) Use(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error) {
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	return m.use(ctx, l)
}

// UseAwake is Use for a caller that is not to wake the sandbox: CodeConflict,
// with the detail "state", where it is hibernated.
func (m *Manager) UseAwake(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error) {
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	return m.useIf(ctx, l, func() error {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is hibernated, and is woken by its owner alone", id).
			With("state", string(sandbox.Hibernated))
	})
}

// use waits until l runs, waking it where that is needed, and counts a user.
func (m *Manager) use(ctx context.Context, l *live) (release func(), err error) {
	return m.useIf(ctx, l, func() error { return m.wakeUp(ctx, l) })
}

// useIf is use with something else to do where l is hibernated.
func (m *Manager) useIf(ctx context.Context, l *live, asleepDo func() error) (release func(), err error) {
	for {
		l.mu.Lock()
		wait, err := l.whyWait()
		if wait == nil && err == nil {
			l.uses++
			if l.uses == 1 {
				m.idle.set(l.id, time.Time{})
			}
			l.mu.Unlock()
			return sync.OnceFunc(func() { m.unuse(l) }), nil
		}
		asleep := err == nil && l.paused == nil && l.rec.State == sandbox.Hibernated
		l.mu.Unlock()
		if err != nil {
			return nil, err
		}
		if asleep {
			if err := asleepDo(); err != nil {
				return nil, err
			}
			continue
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, ctxError(ctx, "wait for the capture of sandbox "+string(l.id))
		}
	}
}

// whyWait tells why l cannot be used now: a channel that closes when to look
// again, or an error where waiting is of no use. Neither: it can. l.mu is held.
func (l *live) whyWait() (<-chan struct{}, error) {
	switch {
	case l.ending != nil:
		return nil, l.mustRunLocked()
	case l.paused != nil:
		return l.paused, nil
	case l.rec.State == sandbox.Hibernated:
		return closed, nil
	}
	return nil, l.mustRunLocked()
}

var closed = func() chan struct{} {
	ch := make(chan struct{})
	close(ch)
	return ch
}()

func (m *Manager) unuse(l *live) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.uses--
	if l.uses == 0 {
		l.lastUse = m.now()
		m.armIdle(l)
	}
}

// armIdle sets the moment at which l has been idle for too long. l.mu is held.
func (m *Manager) armIdle(l *live) {
	var at time.Time
	if l.rec.IdleTimeout > 0 && l.uses == 0 && l.ending == nil && l.rec.State == sandbox.Running {
		at = l.lastUse.Add(l.rec.IdleTimeout)
	}
	m.idle.set(l.id, at)
}

// idled hibernates a sandbox that nobody used for its idle time. It does not
// block.
func (m *Manager) idled(id sandbox.ID) {
	l := m.find(id)
	if l == nil {
		return
	}
	m.tasks.run(func() {
		ctx, cancel := context.WithCancel(m.working)
		defer cancel()
		if m.busy(ctx, l) {
			l.mu.Lock()
			l.lastUse = m.now()
			m.armIdle(l)
			l.mu.Unlock()
			return
		}
		err := m.hibernate(ctx, l, "", func(r store.Record) bool {
			return r.State == sandbox.Running && l.uses == 0 && !m.now().Before(l.lastUse.Add(r.IdleTimeout))
		})
		if err == nil || ctx.Err() != nil {
			return
		}
		m.log.WarnContext(ctx, "hibernate an idle sandbox; it is tried again", "sandbox", id, "error", err)
		l.mu.Lock()
		l.lastUse = m.now()
		m.armIdle(l)
		l.mu.Unlock()
	})
}

// busyTimeout bounds the question for what runs in an idle sandbox.
const busyTimeout = 10 * time.Second

// busy tells whether a command of a client's runs in l, attached or not. The
// template's start command is none.
func (m *Manager) busy(ctx context.Context, l *live) bool {
	l.mu.Lock()
	agent := l.agent
	l.mu.Unlock()
	if agent == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	all, err := agent.Processes(ctx)
	if err != nil {
		return false // what does not answer is not kept awake for that
	}
	for _, p := range all {
		if p.GetTag() != startTag {
			return true
		}
	}
	return false
}
