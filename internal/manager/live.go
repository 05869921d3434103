package manager

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// live is a sandbox that has not ended.
type live struct {
	id    sandbox.ID
	ctx   context.Context // of its watchers and followers; ends with it, or when Close begins
	cease context.CancelFunc
	turn  chan struct{} // holds one token; who has it may change the sandbox. A channel, since waiting ends with a context
	ended chan struct{} // closed when the end is recorded

	mu     sync.Mutex // of what follows; never held over I/O
	rec    store.Record
	inst   sandbox.Instance        // nil until it runs
	agent  *agentclient.Client     // nil until it runs
	outer  *agentclient.Client     // the same for others, who thereby use it
	conns  *conns                  // into inst
	corpse sandbox.Instance        // what did run and is to be removed
	gone   bool                    // it is hibernated, and evict has been done
	abort  context.CancelCauseFunc // of the create under way
	ending *ending                 // set once: the first end that was asked for

	unwatch   context.CancelFunc      // of inst's watchers
	interrupt context.CancelCauseFunc // of the wake under way
	paused    chan struct{}           // closed when a capture under way lets it go on; nil without one
	waking    *waking                 // the wake under way
	uses      int                     // see Use
	lastUse   time.Time               // when uses fell to 0
}

// ending is one end of a sandbox, asked for and not yet recorded.
type ending struct {
	reason sandbox.Reason
	detail string
	at     time.Time

	tried chan struct{} // closed after the first attempt
	err   error         // of that attempt; read after tried
}

func (m *Manager) newLive(rec store.Record) *live {
	l := &live{id: rec.ID, rec: rec, turn: make(chan struct{}, 1), ended: make(chan struct{}), conns: &conns{}}
	l.ctx, l.cease = context.WithCancel(m.watching)
	l.turn <- struct{}{}
	return l
}

// take waits for the turn. Each take needs a give.
func (l *live) take(ctx context.Context) error {
	select {
	case <-l.turn:
		return nil
	case <-ctx.Done():
		return ctxError(ctx, "wait for another change of the sandbox")
	}
}

func (l *live) give() { l.turn <- struct{}{} }

func (l *live) record() store.Record {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rec
}

// update records what change makes of the record, with its events. The caller
// has the turn.
func (m *Manager) update(ctx context.Context, l *live, change func(r *store.Record), events ...sandbox.Event) error {
	rec := l.record()
	change(&rec)
	if rec.Internal {
		events = nil
	}
	rec, err := m.store.Update(ctx, rec, events...)
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.rec = rec
	l.mu.Unlock()
	if len(events) > 0 {
		m.bell.ring()
	}
	return nil
}

// setInstance makes l's instance known and, with it, its agent.
func (l *live) setInstance(m *Manager, inst sandbox.Instance) *agentclient.Client {
	l.mu.Lock()
	l.inst, l.conns = inst, &conns{}
	l.mu.Unlock()
	agent := agentclient.New(l.dialer(), l.record().Token)
	outer := agent.Using(func(ctx context.Context) (func(), error) { return m.use(ctx, l) })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.agent, l.outer = agent, outer
	return agent
}

// dialer opens connections into l's instance as it is now.
func (l *live) dialer() agentclient.Dialer {
	l.mu.Lock()
	inst, conns := l.inst, l.conns
	l.mu.Unlock()
	return func(ctx context.Context, port int) (net.Conn, error) { return conns.dial(ctx, inst, port) }
}

// dropAgent closes the connections to the agent.
func (l *live) dropAgent() {
	l.mu.Lock()
	agent := l.agent
	l.agent, l.outer = nil, nil
	l.mu.Unlock()
	if agent != nil {
		agent.Close()
	}
}

// spec is what the runtime was or is to be given.
func (m *Manager) spec(r store.Record) sandbox.Spec {
	return sandbox.Spec{
		ID: r.HostID(), Dir: m.dir(r.HostID()), Layers: r.Layers, Link: r.Link,
		Resources: r.Resources, Hostname: r.Hostname, Volumes: m.mounts(r.Volumes),
	}
}

// enter makes l known.
func (m *Manager) enter(l *live) {
	m.mu.Lock()
	m.live[l.id] = l
	m.mu.Unlock()
}

// leave forgets l: its end is recorded, or it never was.
func (m *Manager) leave(l *live) {
	l.cease()
	m.pools.Lost(l.id)
	m.ledger.release(l.id)
	m.ttl.set(l.id, time.Time{})
	m.idle.set(l.id, time.Time{})
	m.mu.Lock()
	delete(m.live, l.id)
	m.mu.Unlock()
	close(l.ended)
}

// find gives the live sandbox id, nil where there is none.
func (m *Manager) find(id sandbox.ID) *live {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live[id]
}

// of gives the tenant's live sandbox. Where it has ended the error is
// CodeConflict and tells how; where the tenant has no such one, CodeNotFound.
func (m *Manager) of(ctx context.Context, tenant string, id sandbox.ID) (*live, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	if l := m.find(id); l != nil && l.isOf(tenant) {
		return l, nil
	}
	rec, err := m.store.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	if rec.Tenant != tenant || rec.Pool != "" {
		return nil, notFound(id)
	}
	if !rec.State.Ended() {
		// It is being entered or has just left: between the two looks.
		if l := m.find(id); l != nil && l.isOf(tenant) {
			return l, nil
		}
		if rec, err = m.store.Get(ctx, id); err != nil {
			return nil, err
		}
	}
	return nil, hasEnded(rec.Sandbox)
}

// isOf tells whether l is a sandbox of the tenant's: a pool's member is nobody's.
func (l *live) isOf(tenant string) bool {
	rec := l.record()
	return rec.Tenant == tenant && rec.Pool == ""
}

// running gives the tenant's sandbox if it runs and nobody asked for its end.
func (m *Manager) running(ctx context.Context, tenant string, id sandbox.ID) (*live, error) {
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	return l, l.mustRun()
}

// mustRun is nil if l runs and nobody asked for its end.
func (l *live) mustRun() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mustRunLocked()
}

// mustBeMade is nil if l runs, is suspended or hibernated, and nobody asked for
// its end.
func (l *live) mustBeMade() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.rec.State; l.ending == nil && (s == sandbox.Suspended || s == sandbox.Hibernated) {
		return nil
	}
	return l.mustRunLocked()
}

func (l *live) mustRunLocked() error {
	switch {
	case l.ending != nil:
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is being ended (%s)", l.id, l.ending.reason).
			With("state", string(l.rec.State)).With("reason", string(l.ending.reason))
	case l.rec.State != sandbox.Running || l.inst == nil:
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is %s: it must be running", l.id, l.rec.State).
			With("state", string(l.rec.State))
	}
	return nil
}

func hasEnded(s sandbox.Sandbox) *sandbox.Error {
	msg := "sandbox %s has ended: %s, %s"
	args := []any{s.ID, s.State, s.Reason}
	if s.Detail != "" {
		msg, args = msg+" (%s)", append(args, s.Detail)
	}
	return sandbox.Errorf(sandbox.CodeConflict, msg, args...).With("state", string(s.State)).With("reason", string(s.Reason))
}

func notFound(id sandbox.ID) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeNotFound, "no sandbox %q: `warren ls --all` shows what there is", id)
}

// ctxError tells that what could not be done before ctx ended. A cause that is
// an *sandbox.Error is the error.
func ctxError(ctx context.Context, what string) error {
	cause := context.Cause(ctx)
	var known *sandbox.Error
	switch {
	case errors.As(cause, &known):
		return known
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "%s: took longer than allowed: %w", what, cause)
	}
	return sandbox.Errorf(sandbox.CodeCanceled, "%s: the client went away: %w", what, cause)
}
