// Package pool keeps sandboxes ready to be claimed: so many of each pool, made
// in the background, when nothing else is under way, and ended when their pool
// shrinks or their template changes.
//
// It knows who is ready and decides who is to be made or ended; making, ending
// and claiming are its Maker's, the manager.
package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Key is what a member can be claimed as: only a create that comes to the same
// key gets it.
type Key struct {
	Tenant     string
	TemplateID string // the content, not the name
	Runtime    string
	Resources  sandbox.Resources // with nothing left open
}

// Settings are what a pool is to be.
type Settings struct {
	ID        string
	Tenant    string
	Template  string            // by name: members of what it meant before are replaced
	Runtime   string            // by name
	Resources sandbox.Resources // zero fields: the template's value, then the default
	Ready     int               // members to keep ready; 0 is none
}

// Maker makes and ends members. Its methods are called from many goroutines.
type Maker interface {
	// Key tells what members of s have to be now. CodeNotFound: there is
	// nothing to make them of, and those that there are go.
	Key(ctx context.Context, s Settings) (Key, error)
	// Make makes a member, which is ready when it returns.
	Make(ctx context.Context, s Settings, k Key) (sandbox.ID, error)
	// End ends a member, and returns when it is gone.
	End(ctx context.Context, id sandbox.ID) error
}

// Options tune Pools. Zero fields take their defaults.
type Options struct {
	// Parallel is how many members are made at the same time, in all pools: 1.
	Parallel int
	// Calm is how long nothing else must have been made or claimed before a
	// member is: 50 ms.
	Calm time.Duration
	// Patience is how long a member waits for that at the most, so that a host
	// that is never calm has members, too: 2 s.
	Patience time.Duration
	// Backoff is the wait after a failure; it doubles with each that follows,
	// up to BackoffMost: 1 s and 1 min.
	Backoff, BackoffMost time.Duration
	// Go runs a goroutine; nil is the go statement.
	Go func(func())
}

func (o Options) withDefaults() Options {
	if o.Parallel == 0 {
		o.Parallel = 1
	}
	if o.Calm == 0 {
		o.Calm = 50 * time.Millisecond
	}
	if o.Patience == 0 {
		o.Patience = 2 * time.Second
	}
	if o.Backoff == 0 {
		o.Backoff = time.Second
	}
	if o.BackoffMost == 0 {
		o.BackoffMost = time.Minute
	}
	if o.Go == nil {
		o.Go = func(f func()) { go f() }
	}
	return o
}

// Pools are all pools of one daemon. It is safe for concurrent use.
type Pools struct {
	maker  Maker
	o      Options
	places chan struct{} // of members being made

	mu    sync.Mutex
	ctx   context.Context // set by Run
	pools map[string]*pool
	busy  int       // creates and claims under way
	last  time.Time // when busy fell to 0
}

type member struct {
	id  sandbox.ID
	key Key
}

// pool is one pool. Its fields are Pools.mu's.
type pool struct {
	s       Settings
	key     Key      // of the last look
	members []member // ready, the oldest first
	making  int
	ending  int
	lost    map[sandbox.ID]bool // ended while others were made: perhaps those
	removed bool

	err     error // of the last attempt; nil once one worked
	errAt   time.Time
	wait    time.Duration // after the next failure
	retryAt time.Time     // no member is made before

	makes    context.Context // of members being made; ends when none is wanted
	giveUp   context.CancelFunc
	kick     chan struct{}
	over     chan struct{} // closed when it is removed and has nothing left
	overOnce sync.Once
}

// New makes Pools without any pool. Nothing is made or ended until Run.
func New(maker Maker, o Options) *Pools {
	o = o.withDefaults()
	return &Pools{maker: maker, o: o, places: make(chan struct{}, o.Parallel), pools: map[string]*pool{}}
}

// Run begins to keep the pools, until ctx is done. It does not block.
func (ps *Pools) Run(ctx context.Context) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.ctx = ctx
	for _, p := range ps.pools {
		ps.begin(p)
	}
}

// begin runs p's loop. ps.mu is held.
func (ps *Pools) begin(p *pool) {
	ctx := ps.ctx
	p.makes, p.giveUp = context.WithCancel(ctx)
	ps.o.Go(func() { ps.keep(ctx, p) })
}

// Set adds a pool, or changes the one of the same ID. A failure before does
// not hold it back.
func (ps *Pools) Set(s Settings) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.pools[s.ID]
	if p == nil {
		p = &pool{s: s, lost: map[sandbox.ID]bool{}, kick: make(chan struct{}, 1), over: make(chan struct{})}
		ps.pools[s.ID] = p
		if ps.ctx != nil {
			ps.begin(p)
		}
	}
	p.s, p.removed = s, false
	p.forgive()
	if s.Ready == 0 {
		p.err = nil
		ps.stopMaking(p)
	}
	p.look()
}

// forgive lets members be made again at once. Pools.mu is held.
func (p *pool) forgive() { p.wait, p.retryAt = 0, time.Time{} }

func (p *pool) look() {
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// stopMaking gives up what is being made. ps.mu is held.
func (ps *Pools) stopMaking(p *pool) {
	if p.giveUp != nil {
		p.giveUp()
		p.makes, p.giveUp = context.WithCancel(ps.ctx)
	}
}

// Remove takes a pool away, and returns when its last member is gone, or ctx
// is done: then its members go without the caller. It is nil where there is no
// such pool.
func (ps *Pools) Remove(ctx context.Context, id string) error {
	ps.mu.Lock()
	p := ps.pools[id]
	if p != nil {
		p.removed = true
		ps.stopMaking(p)
		p.look()
	}
	ps.mu.Unlock()
	if p == nil {
		return nil
	}
	select {
	case <-p.over:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Look has every pool compare what it has with what it is to have: templates
// changed.
func (ps *Pools) Look() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.pools {
		p.forgive()
		p.look()
	}
}

// Adopt adds a member that is ready already. false: there is no such pool.
func (ps *Pools) Adopt(poolID string, id sandbox.ID, k Key) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.pools[poolID]
	if p == nil || p.removed {
		return false
	}
	p.members = append(p.members, member{id, k})
	p.look()
	return true
}

// Has tells whether there is a pool of this ID.
func (ps *Pools) Has(id string) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.pools[id]
	return p != nil && !p.removed
}

// Take gives a member of key k away, once; the pool has it no more.
func (ps *Pools) Take(k Key) (id sandbox.ID, ok bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var from *pool
	for _, p := range ps.pools {
		if !p.removed && p.s.Ready > 0 && slices.ContainsFunc(p.members, func(m member) bool { return m.key == k }) &&
			(from == nil || len(p.members) > len(from.members)) {
			from = p
		}
	}
	if from == nil {
		return "", false
	}
	i := slices.IndexFunc(from.members, func(m member) bool { return m.key == k })
	id = from.members[i].id
	from.members = slices.Delete(from.members, i, i+1)
	from.look()
	return id, true
}

// GiveWay takes a member out of the fullest pool, for its caller to end: the
// host has no room for something that somebody asked for. No member is made in
// that pool for a while.
func (ps *Pools) GiveWay(why error) (id sandbox.ID, ok bool) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var from *pool
	for _, p := range ps.pools {
		if len(p.members) > 0 && (from == nil || len(p.members) > len(from.members)) {
			from = p
		}
	}
	if from == nil {
		return "", false
	}
	id = from.members[0].id
	from.members = slices.Delete(from.members, 0, 1)
	ps.failed(from, why)
	from.look()
	return id, true
}

// Lost tells that a sandbox has ended, a member perhaps.
func (ps *Pools) Lost(id sandbox.ID) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.pools {
		if i := slices.IndexFunc(p.members, func(m member) bool { return m.id == id }); i >= 0 {
			p.members = slices.Delete(p.members, i, i+1)
			p.look()
		} else if p.making > 0 {
			p.lost[id] = true
		}
	}
}

// Busy tells that something that somebody waits for is being made or claimed,
// until done is called: no member is begun meanwhile, within Patience.
func (ps *Pools) Busy() (done func()) {
	ps.mu.Lock()
	ps.busy++
	ps.mu.Unlock()
	return sync.OnceFunc(func() {
		ps.mu.Lock()
		defer ps.mu.Unlock()
		ps.busy--
		if ps.busy == 0 {
			ps.last = time.Now()
		}
	})
}

// calm tells whether nothing else is under way, and was not a moment ago.
func (ps *Pools) calm() bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.busy == 0 && time.Since(ps.last) >= ps.o.Calm
}

func (ps *Pools) waitCalm(ctx context.Context) {
	const look = 5 * time.Millisecond
	for end := time.Now().Add(ps.o.Patience); !ps.calm() && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return
		case <-time.After(look):
		}
	}
}

// State is a pool at one moment.
type State struct {
	Key     Key          // what members have to be, as of the last look; zero before
	Members []sandbox.ID // ready
	Making  int
	Ending  int
	Err     error // why the last member could not be made; nil where it could
	ErrAt   time.Time
}

// State tells how a pool is; the zero State where there is none.
func (ps *Pools) State(id string) State {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.pools[id]
	if p == nil {
		return State{}
	}
	s := State{Key: p.key, Making: p.making, Ending: p.ending, Err: p.err, ErrAt: p.errAt}
	for _, m := range p.members {
		s.Members = append(s.Members, m.id)
	}
	return s
}

const forever = 1<<63 - 1

// keep is a pool's loop.
func (ps *Pools) keep(ctx context.Context, p *pool) {
	for ctx.Err() == nil {
		wait := ps.step(ctx, p)
		if wait == 0 {
			wait = forever
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-p.over:
			timer.Stop()
			return
		case <-p.kick:
		case <-timer.C:
		}
		timer.Stop()
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p.giveUp()
}

// step begins what is to be done now, and tells after how long there is more
// to do: 0 is not before the pool changes.
func (ps *Pools) step(ctx context.Context, p *pool) (wait time.Duration) {
	ps.mu.Lock()
	s, removed := p.s, p.removed
	ps.mu.Unlock()
	none := removed || s.Ready == 0
	key, err := Key{}, error(nil)
	// Also where none is to be: the maker gives up what it keeps for them.
	if !removed {
		key, err = ps.maker.Key(ctx, s)
	}
	if ctx.Err() != nil {
		return 0
	}
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p.s != s || p.removed != removed {
		p.look() // it changed meanwhile
		return 0
	}
	switch {
	case err == nil:
		p.key = key
	case none:
	case sandbox.CodeOf(err) == sandbox.CodeNotFound:
		ps.failed(p, err)
		ps.stopMaking(p)
		p.key, none = Key{}, true // until somebody tells that templates changed
	default:
		return ps.failed(p, err)
	}
	keep := p.members[:0:0]
	for _, m := range p.members {
		if !none && m.key == key && len(keep) < s.Ready {
			keep = append(keep, m)
			continue
		}
		p.ending++
		ps.o.Go(func() { ps.end(ctx, p, m) })
	}
	p.members = keep
	if p.removed && p.making == 0 && p.ending == 0 {
		delete(ps.pools, s.ID)
		p.giveUp()
		p.overOnce.Do(func() { close(p.over) })
		return 0
	}
	if none {
		return 0
	}
	if left := time.Until(p.retryAt); left > 0 {
		return left
	}
	for len(p.members)+p.making < s.Ready && p.making < ps.o.Parallel {
		p.making++
		makes := p.makes
		ps.o.Go(func() { ps.fill(makes, p, s, key) })
	}
	return 0
}

// failed notes err, and gives the wait until the next attempt. ps.mu is held.
func (ps *Pools) failed(p *pool, err error) time.Duration {
	p.wait = min(max(2*p.wait, ps.o.Backoff), ps.o.BackoffMost)
	p.err, p.errAt = err, time.Now()
	p.retryAt = p.errAt.Add(p.wait)
	return p.wait
}

// fill makes one member.
func (ps *Pools) fill(ctx context.Context, p *pool, s Settings, key Key) {
	id, err := ps.make(ctx, s, key)
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p.making--
	switch {
	case err == nil && p.lost[id]: // it has ended already
	case err == nil:
		p.members = append(p.members, member{id, key}) // wanted or not: the next step tells
		p.err = nil
		p.forgive()
	case ctx.Err() == nil: // else nobody wants it any more
		ps.failed(p, err)
	}
	if p.making == 0 {
		clear(p.lost)
	}
	p.look()
}

func (ps *Pools) make(ctx context.Context, s Settings, key Key) (sandbox.ID, error) {
	select {
	case ps.places <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-ps.places }()
	ps.waitCalm(ctx)
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	return ps.maker.Make(ctx, s, key)
}

// end ends a member that the pool has no more.
func (ps *Pools) end(ctx context.Context, p *pool, m member) {
	err := ps.maker.End(ctx, m.id)
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p.ending--
	if err != nil && !errors.Is(err, context.Canceled) {
		p.err, p.errAt = err, time.Now()
	}
	p.look()
}
