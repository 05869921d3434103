package manager

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"maps"
	"os"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

var (
	pointCreateRecorded = fault.Register("manager.create.recorded")
	pointCreateDir      = fault.Register("manager.create.dir")
	pointCreateSlot     = fault.Register("manager.create.slot")
	pointCreateStarted  = fault.Register("manager.create.started")
	pointCreateInit     = fault.Register("manager.create.initialized")
	pointCreateReady    = fault.Register("manager.create.ready")
	pointCreateRunning  = fault.Register("manager.create.running")
	pointRestoreStarted = fault.Register("manager.restore.started")
	pointRestoreGoing   = fault.Register("manager.restore.going")
)

// baseTemplate is the template of a create that names none.
const baseTemplate = "base"

// initTimeout bounds the first call to an agent that answers already.
const initTimeout = 30 * time.Second

// plan is a create that was checked: all that follows can only fail by the
// host's state.
type plan struct {
	rec      store.Record
	runtime  sandbox.Runtime
	config   template.Config
	env      map[string]string // the template's and the request's
	lifetime time.Duration
	from     *store.Snapshot // nil: a template
	spare    *spare          // nil: all of it is to be made
	reboot   bool            // it boots from the disk that it had before
}

// Create makes a sandbox and returns once it is ready for use: its agent
// answers and its template's start command is up. On error nothing of it is
// left on the host; a create that was begun stays on record as failed. When
// ctx ends, the create is undone.
//
// Errors: CodeInvalid, CodeNotFound (template or runtime), CodeUnavailable
// (the host cannot run the runtime), CodeUnsupported (the runtime cannot do
// what was asked), CodeNoCapacity, CodeBadTemplate, CodeConflict (it was
// killed meanwhile), CodeDiskFull, CodeTimeout.
func (m *Manager) Create(ctx context.Context, tenant string, r CreateRequest) (sandbox.Sandbox, error) {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return sandbox.Sandbox{}, err
	}
	defer m.pools.Busy()()
	p, err := m.plan(ctx, tenant, r)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	start := m.begin
	if r.Snapshot != "" {
		start = m.make
	}
	l, err := start(ctx, p)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return l.record().Sandbox, nil
}

// plan checks r and fills in what it leaves open.
func (m *Manager) plan(ctx context.Context, tenant string, r CreateRequest) (plan, error) {
	if err := r.validate(); err != nil {
		return plan{}, err
	}
	var err error
	if r.Volumes, err = m.resolveVolumes(ctx, tenant, r.Volumes); err != nil {
		return plan{}, err
	}
	if r.Snapshot != "" {
		n, err := m.snapshotOf(ctx, tenant, r.Snapshot)
		if err != nil {
			return plan{}, err
		}
		p, err := m.planFrom(ctx, n, r)
		if err == nil {
			err = m.usable(ctx, n)
		}
		if sandbox.CodeOf(err) == sandbox.CodeCorruptCapture {
			// Nobody holds it yet: it may just have been removed.
			if _, gone := m.snapshotOf(ctx, tenant, r.Snapshot); sandbox.CodeOf(gone) == sandbox.CodeNotFound {
				err = gone
			}
		}
		return p, err
	}
	rt, err := m.chooseRuntime(ctx, r.Runtime)
	if err != nil {
		return plan{}, err
	}
	var t template.Template
	layers := r.InlineLayers
	if layers == nil {
		if r.Template == "" {
			r.Template = baseTemplate
		}
		if t, layers, err = m.resolveTemplate(ctx, tenant, r.Template); err != nil {
			return plan{}, err
		}
	}
	r.Resources = r.Resources.Or(t.Resources).Or(sandbox.DefaultResources())
	if err := m.checkResources(rt, r.Resources); err != nil {
		return plan{}, err
	}
	if err := m.checkTimeouts(rt, r); err != nil {
		return plan{}, err
	}
	if r.User == "" {
		r.User = t.Config.User
	}
	if r.Workdir == "" {
		r.Workdir = t.Config.Workdir
	}
	p := plan{runtime: rt, config: t.Config, lifetime: r.Timeout}
	err = m.fill(&p, tenant, r, t.ID, layers)
	return p, err
}

// merged is an environment with what over has in place of base's.
func merged(base, over map[string]string) map[string]string {
	env := make(map[string]string, len(base)+len(over))
	maps.Copy(env, base)
	maps.Copy(env, over)
	return env
}

// fill makes the record of p from r, in which nothing is open but names and
// the network's mode.
func (m *Manager) fill(p *plan, tenant string, r CreateRequest, templateID string, layers []string) error {
	p.env = merged(p.config.Env, r.Env)
	if err := validateEnv(p.env); err != nil {
		return err
	}
	id := sandbox.NewID()
	p.rec = store.Record{
		Sandbox: sandbox.Sandbox{
			ID: id, Tenant: tenant, State: sandbox.Creating, Runtime: p.runtime.Name(),
			Template: r.Template, TemplateID: templateID, Resources: r.Resources, Network: r.Network,
			Env: r.Env, User: r.User, Workdir: r.Workdir, Metadata: r.Metadata, Hostname: r.Hostname,
			Token: secret(), TrafficToken: secret(), PublicTraffic: r.PublicTraffic, HostHeader: r.HostHeader,
			OnTimeout: r.OnTimeout, IdleTimeout: r.IdleTimeout, HibernateKind: r.HibernateKind, ManualWake: r.ManualWake, Volumes: r.Volumes,
			Start: sandbox.StartCold, CreatedAt: m.now(),
		},
		Op: store.OpCreate, Internal: r.InlineLayers != nil, Layers: layers, BootID: m.bootID,
		Lifetime: r.Timeout, EphemeralEnv: r.EphemeralEnv,
	}
	if p.rec.Network.Mode == "" {
		p.rec.Network.Mode = sandbox.NetworkEgress
	}
	if p.rec.Hostname == "" {
		p.rec.Hostname = string(id)
	}
	return nil
}

// secret makes a token of 256 random bits.
func secret() string {
	var b [32]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// make admits p and carries it out.
func (m *Manager) make(ctx context.Context, p plan) (*live, error) {
	if p.restores() {
		if s := m.spares.take(ctx, p.rec); s != nil {
			defer m.spares.handed(s)
			p.moveInto(s)
			m.ledger.release(s.id) // what the sandbox takes is claimed anew
		}
	}
	id := p.rec.ID
	var image int64
	if p.restores() {
		image = p.from.SizeBytes
	}
	var err error
	if p.rec.Pool != "" {
		err = m.tryAdmit(id, p.rec.Resources, p.runtime, image)
	} else {
		defer m.pools.Busy()()
		err = m.admit(ctx, id, p.rec.Resources, p.runtime, image)
	}
	if err != nil {
		return nil, err
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	l := m.newLive(p.rec)
	l.abort = abort
	l.take(context.Background()) // nobody else has it yet
	m.enter(l)
	gone := func(err error) (*live, error) { // nothing was recorded
		m.leave(l)
		return nil, err
	}
	// Before the record: what is on record finds its layers. A volume that is
	// being removed is seen to be in use from here on.
	err = m.volumesThere(ctx, p.rec.Volumes)
	if err == nil {
		err = m.holdSandbox(ctx, p.rec)
	}
	if err != nil {
		m.unhold(string(id))
		return gone(err)
	}
	rec, err := m.store.Insert(ctx, p.rec, m.stateEvents(p.rec, "", sandbox.Creating)...)
	if err != nil {
		m.unhold(string(id))
		return gone(err)
	}
	l.mu.Lock()
	l.rec = rec
	l.mu.Unlock()
	m.bell.ring()
	pointCreateRecorded.Hit()

	err = m.build(ctx, l, p)
	if err == nil {
		err = m.publish(l)
	}
	m.ledger.settle(id)
	if err == nil {
		l.give()
		return l, nil
	}
	return nil, m.undo(ctx, l, err)
}

// build makes what is on the host.
func (m *Manager) build(ctx context.Context, l *live, p plan) error {
	if err := m.creates.Acquire(ctx, 1); err != nil {
		return ctxError(ctx, "wait for other creates")
	}
	defer m.creates.Release(1)
	if p.spare == nil {
		if err := m.makeDir(l.id); err != nil {
			return err
		}
	}
	pointCreateDir.Hit()
	if err := m.connect(ctx, l, p.spare); err != nil {
		return err
	}
	pointCreateSlot.Hit()
	start := m.boot
	if p.restores() {
		start = m.restore
	}
	if err := start(ctx, l, p); err != nil {
		return err
	}
	now := m.now()
	err := m.update(ctx, l, func(r *store.Record) {
		r.State, r.Op, r.StartedAt = sandbox.Running, store.OpNone, now
		if p.lifetime > 0 {
			r.ExpiresAt = now.Add(p.lifetime)
		}
	}, m.stateEvents(p.rec, sandbox.Creating, sandbox.Running)...)
	if err != nil {
		return orCtx(ctx, "record the sandbox", err)
	}
	pointCreateRunning.Hit()
	return nil
}

// admit claims what a sandbox needs; where that does not fit, what was just
// hibernated leaves first, and spares and then pools' members give way. image
// is the size of the memory that it is restored from.
func (m *Manager) admit(ctx context.Context, id sandbox.ID, r sandbox.Resources, rt sandbox.Runtime, image int64) error {
	defer m.pools.Busy()()
	for {
		departing := m.departing()
		err := m.tryAdmit(id, r, rt, image)
		if !m.ledger.madeRoomFor(claimOf(r, rt.Capabilities()), err) {
			return err
		}
		for _, gone := range departing {
			select {
			case <-gone:
			case <-ctx.Done():
				return err
			}
		}
		if len(departing) > 0 {
			continue
		}
		if m.spares.drop(func(*spareKind) bool { return true }) {
			continue
		}
		idle, ok := m.pools.GiveWay(sandbox.Errorf(sandbox.CodeNoCapacity, "a member gave way to a sandbox that the host had no room for"))
		if !ok {
			return err
		}
		if l := m.find(idle); l != nil {
			if e := m.endAndWait(m.working, l, sandbox.ReasonKilledByUser, "it gave way to a sandbox that the host had no room for"); e != nil {
				return err
			}
		}
	}
}

// tryAdmit is admit without anybody giving way.
func (m *Manager) tryAdmit(id sandbox.ID, r sandbox.Resources, rt sandbox.Runtime, image int64) error {
	moves := m.spares.has(id) // into a spare, and takes its slot
	if used, total := m.cfg.Network.Capacity(); !moves && total > 0 && used >= total {
		return sandbox.Errorf(sandbox.CodeNoCapacity, "all %d network slots are in use: end sandboxes", total).With("resource", "slots")
	}
	f, err := m.facts()
	if err != nil {
		return err
	}
	c := claimOf(r, rt.Capabilities())
	c.memoryNow += image
	return m.ledger.admit(id, c, f)
}

// restores tells whether p goes on from memory, and does not boot.
func (p plan) restores() bool { return p.from != nil && p.from.Kind == sandbox.SnapshotFull }

// connect takes a network slot for l: its spare's, which has the rules of none
// until revive is done, or another one.
func (m *Manager) connect(ctx context.Context, l *live, s *spare) error {
	var link sandbox.Link
	if s != nil {
		s.used, link = true, s.link
	} else {
		var err error
		if link, err = m.cfg.Network.Acquire(ctx, l.id, l.record().Network); err != nil {
			return orCtx(ctx, "take a network slot", err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rec.Link = link // goes on record with the state: until then a sweep finds the slot by its absence
	return nil
}

// boot starts l from its layers.
func (m *Manager) boot(ctx context.Context, l *live, p plan) error {
	inst, err := p.runtime.Create(ctx, m.spec(l.record()))
	if err != nil {
		return orCtx(ctx, "start the sandbox", err)
	}
	agent := l.setInstance(m, inst)
	pointCreateStarted.Hit()
	if err := m.initAgent(ctx, agent, l.record(), p); err != nil {
		return orCtx(ctx, "give the sandbox its identity", err)
	}
	pointCreateInit.Hit()
	if err := m.startCommand(ctx, l, agent, p.config); err != nil {
		return orCtx(ctx, "run the template's start command", err)
	}
	pointCreateReady.Hit()
	return nil
}

// restore starts l from a capture's memory.
func (m *Manager) restore(ctx context.Context, l *live, p plan) error {
	inst, err := m.revive(ctx, l, p.runtime, p.from.ID, p.spare)
	if err != nil {
		return orCtx(ctx, "restore the sandbox", err)
	}
	agent := l.setInstance(m, inst)
	pointRestoreStarted.Hit()
	req := agentclient.RestoredRequest{InitRequest: m.identity(l.record(), p.env), DropEnv: p.from.EphemeralEnv}
	if err := m.tellRestored(ctx, l, p.from.Token, req); err != nil {
		return err
	}
	pointRestoreGoing.Hit()
	if p.from.Transient {
		m.loaded(l, inst, p.from.ID)
	}
	m.tasks.run(func() {
		ctx, cancel := context.WithTimeout(l.ctx, answerTimeout)
		defer cancel()
		m.refollowStart(ctx, l, agent)
	})
	return nil
}

func (m *Manager) initAgent(ctx context.Context, agent *agentclient.Client, rec store.Record, p plan) error {
	ctx, cancel := context.WithTimeout(ctx, initTimeout)
	defer cancel()
	req := m.identity(rec, p.env)
	req.Copied, req.Rebooted = p.from != nil, p.reboot
	return agent.Init(ctx, req)
}

// identity is what the agent of rec is told of it.
func (m *Manager) identity(rec store.Record, env map[string]string) agentclient.InitRequest {
	req := agentclient.InitRequest{
		EnvVars: env, AccessToken: rec.Token, Timestamp: m.clock.Now(),
		DefaultUser: rec.User, DefaultWorkdir: rec.Workdir,
		SandboxID: string(rec.ID), TemplateID: rec.TemplateID, Hostname: rec.Hostname,
	}
	if rec.Link.Address.IsValid() {
		req.Address = rec.Link.Address.Addr()
	}
	if rec.Link.DNS.IsValid() {
		req.Nameservers = append(req.Nameservers, rec.Link.DNS)
	}
	return req
}

// publish lets others use l, unless its end was asked for meanwhile.
func (m *Manager) publish(l *live) error {
	l.mu.Lock()
	if l.ending != nil {
		l.mu.Unlock()
		return errKilled
	}
	l.abort = nil
	rec, inst := l.rec, l.inst
	l.lastUse = m.now()
	m.armIdle(l)
	l.mu.Unlock()
	m.watch(l, inst)
	m.ttl.set(l.id, rec.ExpiresAt)
	return nil
}

var errKilled = errors.New("its end was asked for")

// undo takes back a create that failed by cause, records why, and gives the
// error to tell. The caller has the turn.
func (m *Manager) undo(ctx context.Context, l *live, cause error) error {
	e := &ending{reason: sandbox.ReasonCreateFailed, detail: oneLine(cause), at: m.now(), tried: make(chan struct{})}
	l.mu.Lock()
	asked := l.ending
	if asked == nil {
		l.ending = e
	} else {
		e = asked
	}
	l.abort = nil
	l.mu.Unlock()
	l.give()
	// A client that went away must not keep this from being done.
	m.tasks.run(func() { m.finish(m.working, l) })
	select {
	case <-l.ended:
	case <-e.tried:
	}
	if asked != nil {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s was ended while it was being made (%s)", l.id, asked.reason).
			With("reason", string(asked.reason))
	}
	return describe(cause, "sandbox "+string(l.id)+" could not be made")
}

// orCtx prefers telling why ctx ended to telling what failed by that.
func orCtx(ctx context.Context, what string, err error) error {
	if ctx.Err() != nil {
		return ctxError(ctx, what)
	}
	var known *sandbox.Error
	if errors.As(err, &known) {
		return err
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", what, err)
}

// describe gives err a place, keeping its code and details.
func describe(err error, what string) error {
	var known *sandbox.Error
	if !errors.As(err, &known) {
		return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", what, err)
	}
	out := sandbox.Errorf(known.Code, "%s: %w", what, err)
	for k, v := range known.Details {
		out = out.With(k, v)
	}
	return out
}

// makeDir makes a sandbox's own directory.
func (m *Manager) makeDir(id sandbox.ID) error {
	if err := os.Mkdir(m.dir(id), 0o700); err != nil {
		return diskError("make the sandbox's directory", err)
	}
	return nil
}
