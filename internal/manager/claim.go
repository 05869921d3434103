package manager

import (
	"context"
	"reflect"

	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointClaimRecorded = fault.Register("manager.claim.recorded")
	pointClaimNetwork  = fault.Register("manager.claim.network")
	pointClaimInit     = fault.Register("manager.claim.initialized")
	pointClaimDone     = fault.Register("manager.claim.done")
)

// begin carries a create of a template out the fastest way that there is: a
// pool's member, else a restore from a pool's warm capture, else a boot.
func (m *Manager) begin(ctx context.Context, p plan) (*live, error) {
	if len(p.rec.Volumes) > 0 { // they are mounted at the start
		return m.make(ctx, p)
	}
	// Nothing inside may change a host name: one that is asked for is given at
	// the start.
	if p.rec.Hostname == string(p.rec.ID) {
		if l, err := m.claim(ctx, p); l != nil || err != nil {
			return l, err
		}
	}
	if n := m.warmFor(poolKey(p.rec)); n != nil {
		warm := p.restoring(n)
		err := m.usable(ctx, *n)
		var l *live
		if err == nil {
			l, err = m.make(ctx, warm)
		}
		if err == nil || !badCapture(ctx, err) {
			return l, err
		}
		m.log.WarnContext(ctx, "restore a template's warm capture; the sandbox boots", "sandbox", warm.rec.ID, "capture", n.ID, "error", err)
		p = p.again()
	}
	return m.make(ctx, p)
}

// claim makes a pool's member the sandbox of p; nil where no pool has one. A
// member that turns out dead is ended, and the next taken.
func (m *Manager) claim(ctx context.Context, p plan) (*live, error) {
	ctx, stop := m.bound(ctx)
	defer stop()
	for {
		id, ok := m.pools.Take(poolKey(p.rec))
		if !ok {
			return nil, nil
		}
		l := m.find(id)
		if l == nil {
			continue
		}
		err := m.claimMember(ctx, l, p)
		if err == nil {
			return l, nil
		}
		// Whatever it was told: it is nobody's any more.
		m.requestEnd(l, sandbox.ReasonCreateFailed, "it was claimed from its pool: "+oneLine(err))
		if ctx.Err() != nil {
			return nil, ctxError(ctx, "claim a sandbox from its pool")
		}
		switch sandbox.CodeOf(err) {
		case sandbox.CodeInvalid, sandbox.CodeDiskFull: // the next would not fare better
			return nil, describe(err, "claim a sandbox from its pool")
		}
		m.log.WarnContext(ctx, "claim a pool's member; another is taken", "sandbox", id, "error", err)
	}
}

// claimMember makes the member l the sandbox of p, all but its id and what
// follows from that: host name and address. Until the last record it is a member that nobody sees; a daemon that finds it
// between the two ends it.
func (m *Manager) claimMember(ctx context.Context, l *live, p plan) error {
	if err := l.take(ctx); err != nil {
		return err
	}
	defer l.give()
	if err := l.mustRun(); err != nil {
		return err
	}
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	l.setInterrupt(interrupt) // by its end
	defer l.setInterrupt(nil)
	if err := m.update(ctx, l, func(r *store.Record) { r.Op = store.OpClaim }); err != nil {
		return err
	}
	pointClaimRecorded.Hit()
	member := l.record()
	next := p.claimed(member)
	l.mu.Lock()
	agent := l.agent
	l.mu.Unlock()
	if agent == nil {
		return l.mustRun()
	}
	// Side by side: the kernel takes its time to forget rules.
	group, both := errgroup.WithContext(ctx)
	group.Go(func() error {
		if reflect.DeepEqual(next.Network, member.Network) {
			return nil
		}
		if err := m.cfg.Network.SetPolicy(both, member.Link, next.Network); err != nil {
			return orCtx(ctx, "set the sandbox's network policy", err)
		}
		pointClaimNetwork.Hit()
		return nil
	})
	group.Go(func() error {
		id := m.identity(next, p.env)
		id.Hostname, id.Nameservers = "", nil // it has them: they are files to write
		short, cancel := context.WithTimeout(both, initTimeout)
		defer cancel()
		if err := agent.Init(short, id); err != nil {
			return orCtx(ctx, "give the sandbox its environment", err)
		}
		pointClaimInit.Hit()
		return nil
	})
	if err := group.Wait(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ctxError(ctx, "claim the sandbox")
	}
	now := m.now()
	next.StartedAt = now
	if p.lifetime > 0 {
		next.ExpiresAt = now.Add(p.lifetime)
	}
	events := append(m.stateEvents(next, "", sandbox.Creating), m.stateEvents(next, sandbox.Creating, sandbox.Running)...)
	// Done or not, and nothing between: a client that goes away now has it.
	if err := m.update(context.WithoutCancel(ctx), l, func(r *store.Record) { *r = next }, events...); err != nil {
		return err
	}
	pointClaimDone.Hit()
	l.mu.Lock()
	l.lastUse = now
	m.armIdle(l)
	l.mu.Unlock()
	m.ttl.set(l.id, next.ExpiresAt)
	return nil
}

// claimed is the record of p's sandbox, made of a member. The member's tokens
// were told to nobody yet.
func (p plan) claimed(member store.Record) store.Record {
	r, asked := member, p.rec
	r.Pool, r.Internal, r.Op = "", false, store.OpNone
	r.State, r.Start, r.CreatedAt = sandbox.Running, sandbox.StartPool, asked.CreatedAt
	r.Template, r.Network = asked.Template, asked.Network
	r.Env, r.EphemeralEnv, r.User, r.Workdir, r.Metadata = asked.Env, asked.EphemeralEnv, asked.User, asked.Workdir, asked.Metadata
	r.PublicTraffic, r.OnTimeout, r.IdleTimeout, r.Lifetime = asked.PublicTraffic, asked.OnTimeout, asked.IdleTimeout, asked.Lifetime
	r.HibernateKind, r.ManualWake, r.HostHeader = asked.HibernateKind, asked.ManualWake, asked.HostHeader
	return r
}
