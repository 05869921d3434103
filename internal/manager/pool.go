package manager

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/pool"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointPoolRecorded   = fault.Register("manager.pool.recorded")
	pointPoolUnrecorded = fault.Register("manager.pool.unrecorded")
	pointPoolCaptured   = fault.Register("manager.pool.captured")
	pointPoolDropped    = fault.Register("manager.pool.dropped")
)

// maxReady is the most members of one pool.
const maxReady = 1000

// captureRetry is how long after a warm capture that could not be taken the
// next one is tried; members boot meanwhile.
const captureRetry = time.Minute

// PoolRequest says what a pool is to be. What it is of, and its members'
// limits, name it: the same again changes its size alone.
type PoolRequest struct {
	Template  string // by name; "" is "base"
	Runtime   string // "" is the default runtime
	Resources sandbox.Resources
	Ready     int // sandboxes to keep ready; 0 is none, with the pool on record
}

// Pool is a pool at one moment.
type Pool struct {
	ID         string
	Template   string
	TemplateID string // the content that members are made of now; "" while there is none
	Runtime    string
	Resources  sandbox.Resources // members' limits
	Ready      int               // members to keep ready
	Members    []sandbox.ID      // members that are ready
	Making     int               // members being made
	Ending     int               // members being ended
	Capture    *sandbox.Snapshot // the warm capture that members are restored from; nil: they boot
	LastError  *sandbox.Error    // why no member can be made; nil: they can
	ErrorAt    time.Time
	CreatedAt  time.Time
}

// pools is the manager's part of pools.
type pools struct {
	*pool.Pools
	changes chan struct{} // holds one token; who has it may change pools' records

	mu   sync.Mutex
	warm map[string]*warmth // by pool
}

// warmth is the warm capture of one pool.
type warmth struct {
	turn chan struct{} // holds one token; who has it may take the capture

	mu     sync.Mutex
	n      *store.Snapshot // nil: there is none
	failed time.Time       // when the last attempt to take it failed
}

func (m *Manager) newPools() {
	o := m.cfg.Pools
	o.Go = m.tasks.run
	if o.Parallel == 0 {
		o.Parallel = max(1, host.CPUs()/2)
	}
	m.pools.Pools = pool.New((*keeper)(m), o)
	m.pools.warm = map[string]*warmth{}
	m.pools.changes = make(chan struct{}, 1)
	m.pools.changes <- struct{}{}
}

func (p *pools) warmthOf(id string) *warmth {
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.warm[id]
	if w == nil {
		w = &warmth{turn: make(chan struct{}, 1)}
		w.turn <- struct{}{}
		p.warm[id] = w
	}
	return w
}

func (w *warmth) capture() *store.Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.n
}

// poolHolder holds a pool's warm capture.
func poolHolder(id string) string { return "of-" + id }

// poolID names the pool of one tenant's template, runtime and limits.
func poolID(tenant string, r PoolRequest) string {
	key, err := json.Marshal([]any{tenant, r.Template, r.Runtime, r.Resources})
	if err != nil {
		panic("manager: strings and numbers that are no JSON: " + err.Error())
	}
	sum := sha256.Sum256(key)
	const letters = "0123456789abcdefghjkmnpqrstvwxyz"
	id := []byte("pol")
	for _, b := range sum[:17] {
		id = append(id, letters[b%32])
	}
	return string(id)
}

// SetPool adds a pool, or changes the size of the one that there is. Its
// members are made and ended in the background.
//
// Errors: CodeInvalid, CodeNotFound (template or runtime), CodeUnavailable (the
// host cannot run the runtime), CodeUnsupported, CodeDiskFull.
func (m *Manager) SetPool(ctx context.Context, tenant string, r PoolRequest) (Pool, error) {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return Pool{}, err
	}
	if r.Ready < 0 || r.Ready > maxReady {
		return Pool{}, invalid("%d sandboxes to keep ready: give 0 to %d", r.Ready, maxReady)
	}
	if r.Template == "" {
		r.Template = baseTemplate
	}
	p, err := m.plan(ctx, tenant, CreateRequest{Template: r.Template, Runtime: r.Runtime, Resources: r.Resources})
	if err != nil {
		return Pool{}, err
	}
	r.Runtime = p.runtime.Name()
	if err := m.pools.lock(ctx); err != nil {
		return Pool{}, err
	}
	defer m.pools.unlock()
	rec := store.Pool{
		ID: poolID(tenant, r), Tenant: tenant, Template: r.Template, Runtime: r.Runtime, Resources: r.Resources,
		Ready: r.Ready, CreatedAt: m.now(),
	}
	if err := m.store.PutPool(ctx, rec); err != nil {
		return Pool{}, err
	}
	pointPoolRecorded.Hit()
	m.pools.Set(settings(rec))
	if rec, err = m.store.GetPool(ctx, rec.ID); err != nil {
		return Pool{}, err
	}
	out := m.describePool(rec)
	out.TemplateID, out.Resources = p.rec.TemplateID, p.rec.Resources // the pool may not have looked yet
	return out, nil
}

func (p *pools) lock(ctx context.Context) error {
	select {
	case <-p.changes:
		return nil
	case <-ctx.Done():
		return ctxError(ctx, "wait for another change of the pools")
	}
}

func (p *pools) unlock() { p.changes <- struct{}{} }

func settings(r store.Pool) pool.Settings {
	return pool.Settings{ID: r.ID, Tenant: r.Tenant, Template: r.Template, Runtime: r.Runtime, Resources: r.Resources, Ready: r.Ready}
}

func (m *Manager) describePool(r store.Pool) Pool {
	s := m.pools.State(r.ID)
	p := Pool{
		ID: r.ID, Template: r.Template, TemplateID: s.Key.TemplateID, Runtime: r.Runtime, Resources: r.Resources,
		Ready: r.Ready, Members: s.Members, Making: s.Making, Ending: s.Ending, CreatedAt: r.CreatedAt,
	}
	if s.Key != (pool.Key{}) {
		p.Resources = s.Key.Resources
	}
	if n := m.pools.warmthOf(r.ID).capture(); n != nil {
		p.Capture = &n.Snapshot
	}
	if s.Err != nil {
		p.ErrorAt = s.ErrAt.Round(0).UTC()
		if !errors.As(s.Err, &p.LastError) {
			p.LastError = sandbox.Errorf(sandbox.CodeInternal, "%w", s.Err)
		}
	}
	return p
}

// Pools gives a tenant's pools, the oldest first.
func (m *Manager) Pools(ctx context.Context, tenant string) ([]Pool, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	recs, err := m.store.ListPools(ctx, tenant)
	if err != nil {
		return nil, err
	}
	all := make([]Pool, len(recs))
	for i, r := range recs {
		all[i] = m.describePool(r)
	}
	return all, nil
}

// PoolByName gives a tenant's pool by its ID, or by its template where the
// tenant has one pool of that. CodeConflict: it has several.
func (m *Manager) PoolByName(ctx context.Context, tenant, name string) (Pool, error) {
	if err := m.ready(); err != nil {
		return Pool{}, err
	}
	r, err := m.poolOf(ctx, tenant, name)
	if err != nil {
		return Pool{}, err
	}
	return m.describePool(r), nil
}

func (m *Manager) poolOf(ctx context.Context, tenant, name string) (store.Pool, error) {
	recs, err := m.store.ListPools(ctx, tenant)
	if err != nil {
		return store.Pool{}, err
	}
	var of []store.Pool
	var ids []string
	for _, r := range recs {
		if r.ID == name {
			return r, nil
		}
		if r.Template == name {
			of, ids = append(of, r), append(ids, r.ID)
		}
	}
	switch len(of) {
	case 0:
		return store.Pool{}, sandbox.Errorf(sandbox.CodeNotFound, "no pool %q: `warren pool ls` shows what there is", short(name))
	case 1:
		return of[0], nil
	}
	return store.Pool{}, sandbox.Errorf(sandbox.CodeConflict, "template %q has %d pools: give the id of one (%s)", short(name), len(of), strings.Join(ids, ", "))
}

// RemovePool removes a tenant's pool, by ID or template, and returns when its
// members are gone. When ctx ends first they go without the caller.
func (m *Manager) RemovePool(ctx context.Context, tenant, name string) error {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return err
	}
	if err := m.pools.lock(ctx); err != nil {
		return err
	}
	defer m.pools.unlock()
	r, err := m.poolOf(ctx, tenant, name)
	if err != nil {
		return err
	}
	// From here on no daemon adopts a member of it.
	if err := m.store.DeletePool(ctx, r.ID); err != nil {
		return err
	}
	pointPoolUnrecorded.Hit()
	bound, stop := m.bound(ctx)
	defer stop()
	err = m.pools.Remove(bound, r.ID)
	m.dropWarm(context.WithoutCancel(ctx), r.ID)
	if err != nil {
		return ctxError(bound, "wait for the pool's members to end")
	}
	m.pools.mu.Lock()
	defer m.pools.mu.Unlock()
	delete(m.pools.warm, r.ID)
	return nil
}

// startPools makes the pools on record known, with holds on their captures.
// Nothing is made or ended before runPools.
func (m *Manager) startPools(ctx context.Context) error {
	recs, err := m.store.ListPools(ctx, "")
	if err != nil {
		return err
	}
	for _, r := range recs {
		m.pools.Set(settings(r))
		if r.Capture == "" {
			continue
		}
		n, err := m.store.GetSnapshot(ctx, r.Capture)
		if err == nil {
			err = m.snaps.Hold(n.ID, poolHolder(r.ID))
		}
		if err != nil {
			m.log.WarnContext(ctx, "a pool's warm capture is gone; another is taken", "pool", r.ID, "error", err)
			continue
		}
		m.pools.warmthOf(r.ID).n = &n
	}
	return nil
}

// poolKey is what rec can be claimed as.
func poolKey(rec store.Record) pool.Key {
	return pool.Key{Tenant: rec.Tenant, TemplateID: rec.TemplateID, Runtime: rec.Runtime, Resources: rec.Resources}
}

// keeper is the Manager as the maker of pools' members.
type keeper Manager

var _ pool.Maker = (*keeper)(nil)

// memberPlan is the plan of a member as its pool would have one now.
func (m *Manager) memberPlan(ctx context.Context, s pool.Settings) (plan, error) {
	p, err := m.plan(ctx, s.Tenant, CreateRequest{Template: s.Template, Runtime: s.Runtime, Resources: s.Resources})
	p.rec.Pool, p.rec.Internal = s.ID, true
	return p, err
}

// Key implements pool.Maker. It drops the warm capture of what no member is to
// be of any more.
func (k *keeper) Key(ctx context.Context, s pool.Settings) (pool.Key, error) {
	m := (*Manager)(k)
	p, err := m.memberPlan(ctx, s)
	key := poolKey(p.rec)
	n := m.pools.warmthOf(s.ID).capture()
	gone := sandbox.CodeOf(err) == sandbox.CodeNotFound
	if n != nil && (s.Ready == 0 || gone || err == nil && !captureFits(n, key)) {
		m.dropWarm(context.WithoutCancel(ctx), s.ID)
	}
	return key, err
}

// captureFits tells whether a sandbox restored from n is one of key.
func captureFits(n *store.Snapshot, key pool.Key) bool {
	return n.Tenant == key.Tenant && n.TemplateID == key.TemplateID && n.Runtime == key.Runtime && n.Resources == key.Resources
}

// Make implements pool.Maker: the member is restored from the pool's warm
// capture where the runtime can, which is taken of the first one.
func (k *keeper) Make(ctx context.Context, s pool.Settings, key pool.Key) (sandbox.ID, error) {
	m := (*Manager)(k)
	p, err := m.memberPlan(ctx, s)
	if err != nil {
		return "", err
	}
	if poolKey(p.rec) != key {
		return "", sandbox.Errorf(sandbox.CodeConflict, "template %q was changed while a member was made of it", s.Template)
	}
	w := m.pools.warmthOf(s.ID)
	if _, can := p.runtime.(sandbox.Restorer); can && w.capture() == nil {
		select {
		case <-w.turn:
		case <-ctx.Done():
			return "", ctxError(ctx, "wait for the pool's warm capture")
		}
		defer func() { w.turn <- struct{}{} }()
	}
	if n := w.capture(); n != nil && captureFits(n, key) {
		id, err := m.makeMember(ctx, p.restoring(n))
		if err != nil && badCapture(ctx, err) {
			m.dropWarm(context.WithoutCancel(ctx), s.ID)
		}
		return id, err
	}
	id, err := m.makeMember(ctx, p)
	if err == nil {
		err = m.takeWarm(ctx, s.ID, w, id)
	}
	if !m.pools.Has(s.ID) { // removed meanwhile
		m.dropWarm(context.WithoutCancel(ctx), s.ID)
	}
	return id, err
}

// makeMember carries p out.
func (m *Manager) makeMember(ctx context.Context, p plan) (sandbox.ID, error) {
	if p.restores() {
		if err := m.usable(ctx, *p.from); err != nil {
			return "", err
		}
	}
	l, err := m.make(ctx, p)
	if err != nil {
		return "", err
	}
	m.warmUp(ctx, l)
	return l.id, nil
}

// warmUpTimeout bounds warmUp: a member is as good without.
const warmUpTimeout = 10 * time.Second

// warmUp has a member run a command that does nothing, where it has one, so
// that its claimer's first does not wait for what only the first one needs: the
// connection to the agent, pages that a restore reads when they are touched.
func (m *Manager) warmUp(ctx context.Context, l *live) {
	l.mu.Lock()
	agent := l.agent
	l.mu.Unlock()
	if agent == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, warmUpTimeout)
	defer cancel()
	if _, err := agent.Run(ctx, agentclient.Command{Path: "/bin/true", User: "root"}); err != nil && ctx.Err() != nil {
		m.log.WarnContext(ctx, "warm a pool's member up", "sandbox", l.id, "error", err)
	}
}

// badCapture tells whether a restore that failed by err may have done so for
// its capture's sake.
func badCapture(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	switch sandbox.CodeOf(err) {
	case sandbox.CodeNoCapacity, sandbox.CodeDiskFull, sandbox.CodeConflict, sandbox.CodeCanceled:
		return false
	}
	return true
}

// takeWarm takes a pool's warm capture of its member id, where the runtime can,
// and the last attempt is some time ago. The member goes on; an error is of the
// member. The caller has w's turn.
func (m *Manager) takeWarm(ctx context.Context, poolID string, w *warmth, id sandbox.ID) error {
	l := m.find(id)
	if l == nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the pool's member %s has ended as soon as it was made", id)
	}
	if _, can := m.runtimes[l.record().Runtime].(sandbox.Restorer); !can || time.Since(w.failed) < captureRetry {
		return nil
	}
	n, err := m.captureWarm(ctx, poolID, l)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.n = &n
		return nil
	}
	w.failed = time.Now()
	if ctx.Err() == nil {
		m.log.WarnContext(ctx, "take a pool's warm capture; its members boot meanwhile", "pool", poolID, "error", err)
	}
	return l.mustRun()
}

// captureWarm captures l, and holds and records the capture for its pool.
func (m *Manager) captureWarm(ctx context.Context, poolID string, l *live) (n store.Snapshot, err error) {
	if err := l.take(ctx); err != nil {
		return n, err
	}
	defer l.give()
	if _, err := m.kindFor(l, sandbox.SnapshotFull); err != nil {
		return n, err
	}
	n = m.newSnapshot(l.record(), sandbox.SnapshotFull)
	n.Hidden = true
	n, goneOn, err := m.captureAndGoOn(ctx, l, n)
	goneOn()
	if err != nil {
		return n, err
	}
	if err := m.snaps.Hold(n.ID, poolHolder(poolID)); err != nil {
		return n, err
	}
	if err := m.store.SetPoolCapture(ctx, poolID, n.ID); err != nil {
		m.discard(context.WithoutCancel(ctx), m.snaps.Drop(poolHolder(poolID)))
		return n, err
	}
	pointPoolCaptured.Hit()
	return n, nil
}

// dropWarm gives a pool's warm capture up: it goes with the last sandbox that
// was restored from it.
func (m *Manager) dropWarm(ctx context.Context, poolID string) {
	w := m.pools.warmthOf(poolID)
	w.mu.Lock()
	n := w.n
	w.n = nil
	w.mu.Unlock()
	if n == nil {
		return
	}
	if err := m.store.SetPoolCapture(ctx, poolID, ""); err != nil {
		m.log.WarnContext(ctx, "forget a pool's warm capture", "pool", poolID, "error", err)
	}
	pointPoolDropped.Hit()
	m.discard(ctx, m.snaps.Drop(poolHolder(poolID)))
}

// warmFor gives the warm capture from which a create that comes to key can be
// restored; nil where there is none.
func (m *Manager) warmFor(key pool.Key) *store.Snapshot {
	m.pools.mu.Lock()
	defer m.pools.mu.Unlock()
	for _, w := range m.pools.warm {
		if n := w.capture(); n != nil && captureFits(n, key) {
			return n
		}
	}
	return nil
}

// End implements pool.Maker.
func (k *keeper) End(ctx context.Context, id sandbox.ID) error {
	m := (*Manager)(k)
	l := m.find(id)
	if l == nil {
		return nil
	}
	return m.endAndWait(ctx, l, sandbox.ReasonKilledByUser, "its pool needed it no more")
}

// restoring is p as a restore from the warm capture n.
func (p plan) restoring(n *store.Snapshot) plan {
	p.from = n
	p.rec.Snapshot, p.rec.Start = n.ID, sandbox.StartRestore
	return p
}

// again is p as a sandbox of another identity: what was begun of it has failed.
func (p plan) again() plan {
	id := sandbox.NewID()
	if p.rec.Hostname == string(p.rec.ID) {
		p.rec.Hostname = string(id)
	}
	p.rec.ID, p.rec.Token, p.rec.TrafficToken = id, secret(), secret()
	p.rec.Layers = slices.Clone(p.rec.Layers)
	return p
}
