package manager

import (
	"context"
	"errors"
	"net"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/network"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// Get gives a tenant's sandbox, ended ones too, as long as they are on record.
func (m *Manager) Get(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Sandbox, error) {
	s, err := m.Lookup(ctx, id)
	if err == nil && s.Tenant != tenant {
		return sandbox.Sandbox{}, notFound(id)
	}
	return s, err
}

// Lookup gives a sandbox of any tenant. It is for the proxy, where the
// sandbox's own tokens decide.
func (m *Manager) Lookup(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	if l := m.find(id); l != nil && l.record().Pool == "" {
		return shown(l.record()), nil
	}
	rec, err := m.store.Get(ctx, id)
	if err == nil && rec.Pool != "" {
		err = notFound(id)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return shown(rec), nil
}

// ByToken finds the live sandbox for whose agent's token is tells true. It asks
// about every one, also behind the one that is found: the time that it takes
// tells nothing.
func (m *Manager) ByToken(is func(token string) bool) (found sandbox.Sandbox, ok bool) {
	m.mu.Lock()
	all := make([]*live, 0, len(m.live))
	for _, l := range m.live {
		all = append(all, l)
	}
	m.mu.Unlock()
	var which *live
	for _, l := range all {
		l.mu.Lock()
		token, none := l.rec.Token, l.rec.Pool != "" || l.rec.Internal || l.rec.Token == ""
		l.mu.Unlock()
		if is(token) && !none {
			which = l
		}
	}
	if which == nil {
		return sandbox.Sandbox{}, false
	}
	return shown(which.record()), true
}

// shown is what others see of a record. A hibernated sandbox's places on the
// host are on record until they were given back, and not the sandbox's any more.
func shown(r store.Record) sandbox.Sandbox {
	if r.State == sandbox.Hibernated {
		r.Link, r.Instance = sandbox.Link{}, ""
	}
	return r.Sandbox
}

// The bounds of a page of List.
const (
	defaultPage = 100
	maxPage     = 1000
)

// List gives a page of a tenant's sandboxes, in f's order, and the token
// of the next page, "" after the last.
func (m *Manager) List(ctx context.Context, tenant string, f ListFilter) (page []sandbox.Sandbox, next string, err error) {
	if f.Limit < 0 || f.Limit > maxPage {
		return nil, "", invalid("a page of %d: give 1 to %d, or 0 for %d", f.Limit, maxPage, defaultPage)
	}
	if f.Limit == 0 {
		f.Limit = defaultPage
	}
	if len(f.Metadata) > maxMetadata {
		return nil, "", invalid("a filter of %d metadata entries: at most %d", len(f.Metadata), maxMetadata)
	}
	if len(f.States) == 0 {
		f.States = []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Suspended, sandbox.Hibernated}
	}
	for _, s := range f.States {
		if !known(s) {
			return nil, "", invalid("%q is not a state: give some of %v", short(string(s)), sandbox.States())
		}
	}
	recs, next, err := m.store.List(ctx, store.Filter{
		Tenant: tenant, States: f.States, Metadata: f.Metadata, Template: f.Template, Runtime: f.Runtime,
		StartedFrom: f.StartedFrom, Oldest: f.Oldest, Limit: f.Limit, Token: f.Token,
	})
	if err != nil {
		return nil, "", err
	}
	page = make([]sandbox.Sandbox, len(recs))
	for i, r := range recs {
		page[i] = shown(r)
	}
	return page, next, nil
}

func known(s sandbox.State) bool {
	for _, k := range sandbox.States() {
		if s == k {
			return true
		}
	}
	return false
}

// Stats reads what a running sandbox uses.
func (m *Manager) Stats(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Stats, error) {
	l, err := m.running(ctx, tenant, id)
	if err != nil {
		return sandbox.Stats{}, err
	}
	l.mu.Lock()
	inst, limit := l.inst, int64(l.rec.Resources.MemoryMiB)<<20
	l.mu.Unlock()
	s, err := inst.Stats(ctx)
	if s.MemoryLimit == 0 {
		s.MemoryLimit = limit
	}
	return s, err
}

// Agent gives the client of a sandbox's agent, and wakes the sandbox if it is
// hibernated. The client stays good until the sandbox ends or hibernates;
// nobody but the Manager closes it. Each of its requests, for as long as its
// answer streams, is a Use. CodeConflict: it does not run; the message tells
// why.
func (m *Manager) Agent(ctx context.Context, tenant string, id sandbox.ID) (*agentclient.Client, error) {
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	release, err := m.use(ctx, l)
	if err != nil {
		return nil, err
	}
	defer release()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.outer == nil {
		return nil, sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is being ended", id)
	}
	return l.outer, nil
}

// Dial connects to a port inside a sandbox: on its address, or else through
// the agent on its loopback. It wakes the sandbox if it is hibernated; who keeps
// the connection holds a Use beside it. CodeUnavailable: nothing listens there.
func (m *Manager) Dial(ctx context.Context, tenant string, id sandbox.ID, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, invalid("port %d: give 1 to 65535", port)
	}
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	release, err := m.use(ctx, l)
	if err != nil {
		return nil, err
	}
	defer release()
	l.mu.Lock()
	inst, agent, conns := l.inst, l.agent, l.conns
	l.mu.Unlock()
	conn, err := conns.dial(ctx, inst, port)
	if err == nil || port == sandbox.AgentPort || agent == nil || !errors.Is(err, &sandbox.Error{Code: sandbox.CodeUnavailable}) {
		return conn, err
	}
	return agent.DialPort(ctx, port)
}

// SetNetwork changes what a sandbox that runs or is suspended may reach;
// connections that the new policy forbids are cut where the network can. For a
// hibernated one it is what it may reach when it wakes: it wakes none.
func (m *Manager) SetNetwork(ctx context.Context, tenant string, id sandbox.ID, p sandbox.NetworkPolicy) error {
	if p.Mode == "" {
		p.Mode = sandbox.NetworkEgress
	}
	if err := network.Validate(p); err != nil {
		return err
	}
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return err
	}
	// Before the turn, too: a create has it for long.
	if err := l.mustBeMade(); err != nil {
		return err
	}
	if err := l.take(ctx); err != nil {
		return err
	}
	defer l.give()
	if err := l.mustBeMade(); err != nil {
		return err
	}
	rec := l.record()
	if rec.State == sandbox.Hibernated {
		return m.update(ctx, l, func(r *store.Record) { r.Network = p })
	}
	before := rec.Network
	// Recorded first: a daemon that starts after a crash asserts what is on
	// record.
	if err := m.update(ctx, l, func(r *store.Record) { r.Network = p }); err != nil {
		return err
	}
	err = m.cfg.Network.SetPolicy(ctx, l.record().Link, p)
	if err == nil {
		return nil
	}
	back := context.WithoutCancel(ctx)
	undo := m.cfg.Network.SetPolicy(back, l.record().Link, before)
	return errors.Join(err, undo, m.update(back, l, func(r *store.Record) { r.Network = before }))
}
