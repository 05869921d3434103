package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointSpareSlot = fault.Register("manager.spare.slot")
	pointSpareMade = fault.Register("manager.spare.made")
)

const (
	// spareAge is how long spares of a kind that nobody uses are kept.
	spareAge = 10 * time.Minute
	// spareRest is how long after a fork or a wake new spares are made: what
	// was restored has its first requests to answer.
	spareRest = 250 * time.Millisecond
	// spareWait is how long a spare that cannot be made now is not tried again.
	spareWait = 30 * time.Second
)

// spares are sandboxes that are made but for what runs in them (see
// sandbox.Preparer): forks' children, wakes and starts from full snapshots go on
// in them, and need not wait for a runtime to start. They are made of what was
// forked, hibernated or woken lately, are on nobody's record, and give way to
// creates that the host has no room for. A daemon removes those of one before
// it as things that nothing explains.
type spares struct {
	m   *Manager
	max int

	mu     sync.Mutex
	closed bool
	kinds  map[string]*spareKind
	all    map[sandbox.ID]*spare // ready ones, and ones that were taken and not yet handed
	making int                   // being made, of all kinds
}

// spareKind is spares that are alike: what can go on in one can in all.
type spareKind struct {
	of      store.Record // what they are made of: runtime, template, layers, resources
	want    int          // ready at the same time
	ready   []*spare     // the oldest first
	waiting []chan *spare
	filling bool          // one at a time: more would only slow the restores that they are for
	making  bool          // one is being made at this moment
	kick    chan struct{} // ends the rest of the filling
	used    time.Time
	rest    time.Time // none is made before
	until   time.Time // none is tried before: the last one failed
	dropped bool      // none of it is wanted any more
}

// spare is one prepared sandbox. Its id is a sandbox's that is not there yet.
type spare struct {
	id       sandbox.ID
	kind     *spareKind
	link     sandbox.Link
	prepared sandbox.Prepared
	used     bool // a sandbox has gone on in it, or tried to; of who took it
}

func newSpares(m *Manager, most int) *spares {
	return &spares{m: m, max: most, kinds: map[string]*spareKind{}, all: map[sandbox.ID]*spare{}}
}

// moveInto makes p's sandbox the one that s is.
func (p *plan) moveInto(s *spare) {
	if p.rec.Hostname == string(p.rec.ID) {
		p.rec.Hostname = string(s.id)
	}
	p.rec.ID, p.spare = s.id, s
}

// kindOf gives the kind of spare that rec can go on in, nil where there can be
// none. The caller has s.mu.
func (s *spares) kindOf(rec store.Record) *spareKind {
	if _, ok := s.m.runtimes[rec.Runtime].(sandbox.Preparer); !ok || s.max <= 0 || s.closed || rec.Internal || len(rec.Volumes) > 0 {
		return nil
	}
	for _, layer := range rec.Layers {
		if s.m.snaps.Owner(layer) != "" {
			return nil // a snapshot that a spare stands on could not be removed
		}
	}
	key := fmt.Sprintf("%s\x00%s\x00%+v\x00%s", rec.Runtime, rec.TemplateID, rec.Resources, strings.Join(rec.Layers, "\x00"))
	k := s.kinds[key]
	if k == nil {
		k = &spareKind{kick: make(chan struct{}, 1), of: store.Record{
			Sandbox: sandbox.Sandbox{Runtime: rec.Runtime, TemplateID: rec.TemplateID, Resources: rec.Resources},
			Layers:  slices.Clone(rec.Layers),
		}}
		s.kinds[key] = k
	}
	k.used = s.m.now()
	return k
}

// want keeps n spares ready for sandboxes like rec, or as many as there may be,
// from a little later on.
func (s *spares) want(rec store.Record, n int) { s.keep(rec, n, spareRest) }

// hurry is want for now: a capture is being taken meanwhile.
func (s *spares) hurry(rec store.Record, n int) { s.keep(rec, n, 0) }

func (s *spares) keep(rec store.Record, n int, rest time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.kindOf(rec); k != nil {
		k.want = max(k.want, min(n, s.max))
		k.rest = s.m.now().Add(rest)
		if k.until.After(k.rest) {
			return
		}
		select {
		case k.kick <- struct{}{}:
		default:
		}
		s.refill(k)
	}
}

// refill begins to make what k lacks. The caller has s.mu.
func (s *spares) refill(k *spareKind) {
	if k.filling || s.closed || len(k.ready) >= k.want {
		return
	}
	k.filling = true
	s.m.tasks.run(func() { s.fill(s.m.watching, k) })
}

// fill makes spares of k until there are as many as are wanted.
func (s *spares) fill(ctx context.Context, k *spareKind) {
	for {
		rested := s.rested(ctx, k)
		first, more := s.begin(k, rested)
		if first != nil {
			s.discard(first)
		}
		if !more {
			return
		}
		made, err := s.prepare(ctx, k)
		if err != nil && ctx.Err() == nil {
			s.m.log.WarnContext(ctx, "make a spare; forks and wakes are slower without", "runtime", k.of.Runtime, "error", err)
		}
		if s.made(k, made) {
			s.discard(made)
		}
	}
}

// rested waits until spares of k may be made; false: none shall be any more.
func (s *spares) rested(ctx context.Context, k *spareKind) bool {
	for {
		s.mu.Lock()
		rest := k.rest.Sub(s.m.now())
		s.mu.Unlock()
		if ctx.Err() != nil {
			return false
		}
		if rest <= 0 {
			return true
		}
		timer, stop := s.m.clock.After(rest)
		select {
		case <-timer:
		case <-k.kick:
		case <-ctx.Done():
		}
		stop()
	}
}

// begin tells whether one more of k is to be made now, and gives one of the
// kind that was used the longest time ago where that has to go for it. Where
// none is, the filling is over.
func (s *spares) begin(k *spareKind, rested bool) (first *spare, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { k.filling = more }()
	if s.closed || !rested || len(k.ready) >= k.want {
		return nil, false
	}
	n := s.making
	var oldest *spareKind
	for _, other := range s.kinds {
		n += len(other.ready)
		if other != k && len(other.ready) > 0 && (oldest == nil || other.used.Before(oldest.used)) {
			oldest = other
		}
	}
	if n >= s.max {
		if oldest == nil {
			return nil, false
		}
		first, oldest.ready, oldest.want = oldest.ready[0], oldest.ready[1:], 0
	}
	k.making = true
	s.making++
	return first, true
}

// made takes what prepare made, nil where it failed; true: it is not needed.
func (s *spares) made(k *spareKind, sp *spare) (spurious bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k.making = false
	s.making--
	switch {
	case sp == nil:
		k.want, k.until = 0, s.m.now().Add(spareWait)
	case s.closed || k.dropped:
		spurious = true
	case len(k.waiting) == 0:
		k.ready = append(k.ready, sp)
	}
	if len(k.waiting) > 0 {
		if spurious {
			sp = nil
		}
		k.waiting[0] <- sp
		k.waiting = k.waiting[1:]
	}
	return spurious
}

// take gives a spare that rec can go on in, and waits for one that is being
// made; nil where there is none. Each is ended by handed.
func (s *spares) take(ctx context.Context, rec store.Record) *spare {
	s.mu.Lock()
	k := s.kindOf(rec)
	if k == nil {
		s.mu.Unlock()
		return nil
	}
	if len(k.ready) > 0 {
		last := len(k.ready) - 1
		got := k.ready[last]
		k.ready = k.ready[:last]
		s.mu.Unlock()
		return got
	}
	if !k.making || len(k.waiting) > 0 {
		s.mu.Unlock()
		return nil
	}
	w := make(chan *spare, 1)
	k.waiting = append(k.waiting, w)
	s.mu.Unlock()
	select {
	case got := <-w:
		return got
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(k.waiting, w); i >= 0 {
		k.waiting = slices.Delete(k.waiting, i, i+1)
	} else if got := <-w; got != nil {
		if !s.closed && !k.dropped {
			k.ready = append(k.ready, got)
		} else {
			s.m.tasks.run(func() { s.discard(got) })
		}
	}
	return nil
}

// handed tells that sp is a sandbox's now, or was and is gone; one that was
// not used is removed.
func (s *spares) handed(sp *spare) {
	if !sp.used {
		s.discard(sp)
		return
	}
	s.forget(sp)
	if l := s.m.find(sp.id); l == nil {
		s.m.unhold(string(sp.id)) // it lives on under another id
		s.m.ledger.release(sp.id)
	}
}

func (s *spares) forget(sp *spare) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, sp.id)
}

// has tells whether id is a spare's.
func (s *spares) has(id sandbox.ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[id] != nil
}

// ids gives the runtime of each spare.
func (s *spares) ids() map[sandbox.ID]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[sandbox.ID]string{}
	for id, sp := range s.all {
		all[id] = sp.kind.of.Runtime
	}
	return all
}

// slots gives the network slots of all spares.
func (s *spares) slots() map[int]sandbox.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[int]sandbox.ID{}
	for id, sp := range s.all {
		if sp.link.NetNS != "" {
			all[sp.link.Slot] = id
		}
	}
	return all
}

// ready gives the network slots of those that wait, by id.
func (s *spares) ready() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]int{}
	for _, k := range s.kinds {
		for _, sp := range k.ready {
			all[string(sp.id)] = sp.link.Slot
		}
	}
	return all
}

// prepare makes one spare.
func (s *spares) prepare(ctx context.Context, k *spareKind) (_ *spare, err error) {
	m := s.m
	sp := &spare{id: sandbox.NewID(), kind: k}
	s.mu.Lock()
	s.all[sp.id] = sp
	s.mu.Unlock()
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove(context.WithoutCancel(ctx), sp))
		}
	}()
	rec := k.of
	rec.ID = sp.id
	rt := m.runtimes[rec.Runtime]
	f, err := m.facts()
	if err != nil {
		return nil, err
	}
	c := claimOf(sandbox.Resources{PIDs: processFloor}, rt.Capabilities())
	if err := m.ledger.admit(sp.id, c, f); err != nil {
		return nil, err
	}
	defer m.ledger.settle(sp.id)
	if err := m.holdSandbox(ctx, rec); err != nil {
		return nil, err
	}
	if err := m.makeDir(sp.id); err != nil {
		return nil, err
	}
	link, err := m.cfg.Network.Acquire(ctx, sp.id, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	sp.link = link
	s.mu.Unlock()
	pointSpareSlot.Hit()
	rec.Link, rec.Hostname = sp.link, string(sp.id)
	if sp.prepared, err = rt.(sandbox.Preparer).Prepare(ctx, m.spec(rec)); err != nil {
		return nil, err
	}
	pointSpareMade.Hit()
	return sp, nil
}

// discard removes a spare from the host.
func (s *spares) discard(sp *spare) {
	ctx := context.WithoutCancel(s.m.working)
	if err := s.remove(ctx, sp); err != nil {
		s.m.log.ErrorContext(ctx, "remove a spare; it is tried again", "sandbox", sp.id, "error", err)
		s.m.tasks.run(func() { s.m.cleanAgain(s.m.watching) })
	}
}

// remove takes back what there is of a spare.
func (s *spares) remove(ctx context.Context, sp *spare) error {
	defer s.forget(sp)
	m := s.m
	var errs []error
	if sp.prepared != nil {
		errs = append(errs, sp.prepared.Discard(ctx))
	} else {
		errs = append(errs, m.runtimes[sp.kind.of.Runtime].Clean(ctx, sp.id))
	}
	if sp.link.NetNS != "" {
		errs = append(errs, m.cfg.Network.Release(ctx, sp.link))
	}
	errs = append(errs, m.removeDir(sp.id))
	m.unhold(string(sp.id))
	m.ledger.release(sp.id)
	return errors.Join(errs...)
}

// drop removes the ready spares of the kinds that which chooses, and tells
// whether there were any.
func (s *spares) drop(which func(*spareKind) bool) bool {
	s.mu.Lock()
	var gone []*spare
	for key, k := range s.kinds {
		if which(k) {
			gone = append(gone, k.ready...)
			k.ready, k.want, k.dropped = nil, 0, true
			delete(s.kinds, key)
		}
	}
	s.mu.Unlock()
	var all sync.WaitGroup
	for _, sp := range gone {
		all.Go(func() { s.discard(sp) })
	}
	all.Wait()
	return len(gone) > 0
}

// age removes the spares of kinds that are not used any more, until ctx is
// done.
func (s *spares) age(ctx context.Context) {
	for {
		timer, stop := s.m.clock.After(spareAge / 4)
		select {
		case <-ctx.Done():
			stop()
			return
		case <-timer:
		}
		old := s.m.now().Add(-spareAge)
		s.drop(func(k *spareKind) bool { return k.used.Before(old) })
	}
}

// close removes all spares, and lets none be made any more.
func (s *spares) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.drop(func(*spareKind) bool { return true })
}
