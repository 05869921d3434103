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
	"github.com/warrenhq/warren/internal/host"
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
	p, err := m.plan(ctx, tenant, r)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	l, err := m.make(ctx, p)
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
		if t, layers, err = m.cfg.Templates.Resolve(ctx, tenant, r.Template); err != nil {
			return plan{}, err
		}
	}
	res := r.Resources.Or(t.Resources).Or(sandbox.DefaultResources())
	if err := res.Validate(host.CPUs()); err != nil {
		return plan{}, err
	}
	caps := rt.Capabilities()
	if res.MemoryMiB < caps.MinMemoryMiB {
		return plan{}, invalid("memory is %d MiB: runtime %q needs at least %d", res.MemoryMiB, rt.Name(), caps.MinMemoryMiB)
	}
	if res.DiskMiB > 0 && !caps.DiskLimit {
		return plan{}, sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q cannot limit the disk: leave the limit out or choose another runtime", rt.Name())
	}
	env := maps.Clone(t.Config.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, r.Env)
	if err := validateEnv(env); err != nil {
		return plan{}, err
	}
	id := sandbox.NewID()
	p := plan{runtime: rt, config: t.Config, env: env, lifetime: r.Timeout}
	p.rec = store.Record{
		Sandbox: sandbox.Sandbox{
			ID: id, Tenant: tenant, State: sandbox.Creating, Runtime: rt.Name(),
			Template: r.Template, TemplateID: t.ID, Resources: res, Network: r.Network,
			Env: r.Env, User: r.User, Workdir: r.Workdir, Metadata: r.Metadata, Hostname: r.Hostname,
			Token: secret(), TrafficToken: secret(), PublicTraffic: r.PublicTraffic,
			Start: sandbox.StartCold, CreatedAt: m.now(),
		},
		Op: store.OpCreate, Internal: r.InlineLayers != nil, Layers: layers, BootID: m.bootID,
	}
	if p.rec.Network.Mode == "" {
		p.rec.Network.Mode = sandbox.NetworkEgress
	}
	if p.rec.User == "" {
		p.rec.User = t.Config.User
	}
	if p.rec.Workdir == "" {
		p.rec.Workdir = t.Config.Workdir
	}
	if p.rec.Hostname == "" {
		p.rec.Hostname = string(id)
	}
	return p, nil
}

// secret makes a token of 256 random bits.
func secret() string {
	var b [32]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// make admits p and carries it out.
func (m *Manager) make(ctx context.Context, p plan) (*live, error) {
	id := p.rec.ID
	if used, total := m.cfg.Network.Capacity(); total > 0 && used >= total {
		return nil, sandbox.Errorf(sandbox.CodeNoCapacity, "all %d network slots are in use: end sandboxes", total).With("resource", "slots")
	}
	f, err := m.facts()
	if err != nil {
		return nil, err
	}
	if err := m.ledger.admit(id, claimOf(p.rec.Resources, p.runtime.Capabilities()), f); err != nil {
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
	if p.rec.TemplateID != "" {
		// Before the record: what is on record finds its layers.
		if err := m.cfg.Templates.Hold(ctx, p.rec.TemplateID, string(id)); err != nil {
			return gone(err)
		}
	}
	rec, err := m.store.Insert(ctx, p.rec, m.stateEvents(p.rec, "", sandbox.Creating)...)
	if err != nil {
		m.dropHold(l)
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
	if err := m.makeDir(l.id); err != nil {
		return err
	}
	pointCreateDir.Hit()
	link, err := m.cfg.Network.Acquire(ctx, l.id, l.record().Network)
	if err != nil {
		return orCtx(ctx, "take a network slot", err)
	}
	l.mu.Lock()
	l.rec.Link = link // goes on record with the state: until then a sweep finds the slot by its absence
	l.mu.Unlock()
	pointCreateSlot.Hit()
	inst, err := p.runtime.Create(ctx, m.spec(l.record()))
	if err != nil {
		return orCtx(ctx, "start the sandbox", err)
	}
	agent := l.setInstance(inst)
	pointCreateStarted.Hit()
	if err := m.initAgent(ctx, agent, l.record(), p); err != nil {
		return orCtx(ctx, "give the sandbox its identity", err)
	}
	pointCreateInit.Hit()
	if err := m.startCommand(ctx, l, agent, p.config); err != nil {
		return orCtx(ctx, "run the template's start command", err)
	}
	pointCreateReady.Hit()
	now := m.now()
	err = m.update(ctx, l, func(r *store.Record) {
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

func (m *Manager) initAgent(ctx context.Context, agent *agentclient.Client, rec store.Record, p plan) error {
	ctx, cancel := context.WithTimeout(ctx, initTimeout)
	defer cancel()
	req := agentclient.InitRequest{
		EnvVars: p.env, AccessToken: rec.Token, Timestamp: m.clock.Now(),
		DefaultUser: rec.User, DefaultWorkdir: rec.Workdir,
		SandboxID: string(rec.ID), TemplateID: rec.TemplateID, Hostname: rec.Hostname,
	}
	if rec.Link.Address.IsValid() {
		req.Address = rec.Link.Address.Addr()
	}
	if rec.Link.DNS.IsValid() {
		req.Nameservers = append(req.Nameservers, rec.Link.DNS)
	}
	return agent.Init(ctx, req)
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
