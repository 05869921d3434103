// Package network gives every sandbox a network of its own: a pinned network
// namespace with one link to the host, a /30 of the daemon's private /16, and
// the rules of what it may reach.
//
// # What holds
//
// The kernel enforces everything, in one nftables table of the instance: it
// holds while the daemon is down, and a sandbox that no rule names reaches
// nothing. A sandbox reaches, in this order of decision: nothing under an
// address that is not its own; never another sandbox, the host's own
// addresses, loopback, multicast or reserved ranges; what its Allow names; not
// what its Deny names; not private ranges or the networks that the host's own
// interfaces are in; and else everything. A CIDR rule opens a private range
// only if it lies inside it: allowing 0.0.0.0/0 does not open the neighbours'
// 10.0.0.0/8 or a cloud's metadata service. IPv6 there is none.
//
// A refusal is an ICMP error or a TCP reset, so that programs fail at once.
//
// # Names
//
// Sandboxes ask a resolver in the daemon, at the first address of the /16;
// while the daemon is down, names do not resolve. A name that Allow names
// opens the addresses of its answer for the answer's time to live, before the
// answer is sent, private ones included, but never link-local ones. A name
// that Deny names does not exist, and its addresses are closed, whoever asked
// for them: those of exact names are looked up ahead, those of wildcards when
// somebody asks. An address can have many names, so closing one may close
// others. When Deny covers 0.0.0.0/0, only allowed names are asked for at
// all, so that queries cannot carry data out.
//
// # Crashes
//
// Everything on the host is found by the instance's name, so nothing is
// recorded beforehand but the range: Adopt takes what live sandboxes use, and
// Sweep removes the rest, whole or half made.
package network

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/network/dns"
	"github.com/warrenhq/warren/internal/sandbox"
)

// DefaultPoolSize is how many slots are kept ready where the Config does not
// say: a burst of that many creates waits for no namespace.
const DefaultPoolSize = 8

const (
	refillers    = 2 // slots being made for the pool at once
	inlineBuilds = 4 // slots being made for waiting Acquires at once
)

var (
	pointTaken     = fault.Register("network.acquire.taken")
	pointRuled     = fault.Register("network.acquire.ruled")
	pointPolicy    = fault.Register("network.policy.ruled")
	pointUnruled   = fault.Register("network.release.unruled")
	pointDestroyed = fault.Register("network.release.destroyed")
	pointAdopted   = fault.Register("network.adopt.ruled")
	pointSwept     = fault.Register("network.sweep.slot")
)

// Config is what Open needs.
type Config struct {
	Instance  string           // host.Instance of the state directory
	RunDir    string           // /run/warren/<instance>: the pins are in RunDir/netns
	StateDir  string           // network.json, the chosen range, is in it
	HostDir   string           // what the daemons of one host share; "" is /run/warren
	PoolSize  int              // slots kept ready; 0 is DefaultPoolSize, negative is none
	Resolvers []netip.AddrPort // whom to forward names to; empty follows the host's /etc/resolv.conf
	Log       *slog.Logger     // faults of work that nobody waits for; nil discards them

	slots int // how many slots there are; for tests
}

var instancePattern = regexp.MustCompile(`^[0-9a-f]{8}$`)

// Network hands out slots. All its methods are safe for concurrent use; calls
// about one slot must come one after the other.
type Network struct {
	cfg      Config
	builder  builder
	rules    *ruleset
	dns      *dns.Server
	upstream *upstreams
	unlock   func()

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	kick   chan struct{} // the pool may want a slot
	flush  chan struct{} // released slots wait for their connections to be forgotten
	inline chan struct{} // tokens of inlineBuilds
	lookup chan *entry   // sandboxes whose denied names are to be looked up

	mu       sync.Mutex
	closed   bool
	used     map[int]*entry
	ready    []int         // the pool, oldest first
	building int           // slots being made
	free     []int         // never used, or clean again; longest unused first
	found    map[int]bool  // on the host since an earlier daemon, or undestroyable: Adopt or Sweep decides
	dirty    []int         // released; the host may still know their connections
	freed    chan struct{} // closed and replaced when free grows
}

// Open takes the instance's range and makes its table, resolver and pool. An
// instance can be open once on a host: a second Open fails with CodeConflict.
// CodeUnavailable: the host cannot do it; the message has the remedy.
func Open(ctx context.Context, cfg Config) (_ *Network, err error) {
	if !instancePattern.MatchString(cfg.Instance) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "network: instance %q is not 8 hex digits", cfg.Instance)
	}
	if cfg.HostDir == "" {
		cfg.HostDir = "/run/warren"
	}
	if cfg.PoolSize == 0 {
		cfg.PoolSize = DefaultPoolSize
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.slots == 0 {
		cfg.slots = totalSlots
	}
	n := &Network{
		cfg:    cfg,
		kick:   make(chan struct{}, 1),
		flush:  make(chan struct{}, 1),
		inline: make(chan struct{}, inlineBuilds),
		lookup: make(chan *entry, 64),
		used:   map[int]*entry{},
		found:  map[int]bool{},
		freed:  make(chan struct{}),
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	if err := n.openHost(ctx); err != nil {
		if n.unlock != nil {
			err = errors.Join(err, n.Close())
		}
		return nil, first(err)
	}
	for range refillers {
		n.wg.Go(n.refill)
	}
	n.wg.Go(n.forgetReleased)
	n.wg.Go(n.lookupDenied)
	n.signal(n.kick)
	return n, nil
}

// first gives the domain's error of err alone, for an errors.Join has no code.
func first(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e
	}
	return err
}

func (n *Network) signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Resolver is the address at which sandboxes ask for names.
func (n *Network) Resolver() netip.Addr { return n.builder.resolver() }

// Prefix is the instance's /16.
func (n *Network) Prefix() netip.Prefix { return n.builder.prefix }

// Capacity counts the slots that sandboxes have, and all.
func (n *Network) Capacity() (used, total int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.used), n.cfg.slots
}

// begin counts an operation in, so that Close waits for it.
func (n *Network) begin() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return errClosed()
	}
	n.wg.Add(1)
	return nil
}

func errClosed() error {
	return sandbox.Errorf(sandbox.CodeUnavailable, "the network is closed: the daemon is stopping")
}

// Acquire gives sandbox id a slot under policy p: from the pool, or made on
// the spot when that is empty. CodeInvalid: the policy. CodeNoCapacity: every
// slot is in use.
func (n *Network) Acquire(ctx context.Context, id sandbox.ID, p sandbox.NetworkPolicy) (sandbox.Link, error) {
	c, err := n.compile(p)
	if err != nil {
		return sandbox.Link{}, err
	}
	if err := n.begin(); err != nil {
		return sandbox.Link{}, err
	}
	defer n.wg.Done()
	s, err := n.take(ctx)
	if err != nil {
		return sandbox.Link{}, err
	}
	pointTaken.Hit()
	e := &entry{id: id, slot: s, net: n, policy: c, opened: names{map[target]named{}, map[target]named{}}}
	n.mu.Lock()
	n.used[s] = e
	n.mu.Unlock()
	if err := n.rules.apply(s, c, nil); err != nil {
		n.mu.Lock()
		delete(n.used, s)
		n.mu.Unlock()
		return sandbox.Link{}, first(errors.Join(err, n.discard(s)))
	}
	pointRuled.Hit()
	n.lookAhead(e)
	return n.builder.link(s, c), nil
}

func (n *Network) compile(p sandbox.NetworkPolicy) (*policy, error) {
	if err := Validate(p); err != nil {
		return nil, err
	}
	for i, r := range p.Allow {
		if r.CIDR.IsValid() && within(r.CIDR, []netip.Prefix{n.builder.prefix}) {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "allow[%d]: cidr %s is the sandboxes' own range, which no rule opens", i, r.CIDR)
		}
	}
	return compile(p, n.rules.specialNow()), nil
}

// take gets a whole slot that nobody uses.
func (n *Network) take(ctx context.Context) (int, error) {
	for {
		n.mu.Lock()
		if len(n.ready) > 0 {
			s := n.ready[0]
			n.ready = n.ready[1:]
			n.mu.Unlock()
			n.signal(n.kick)
			return s, nil
		}
		if len(n.free) > 0 {
			n.mu.Unlock()
			return n.takeInline(ctx)
		}
		wait, soon := n.freed, len(n.dirty)+n.building > 0
		n.mu.Unlock()
		if !soon {
			return 0, sandbox.Errorf(sandbox.CodeNoCapacity, "all %d network slots are in use: remove sandboxes, or run a second daemon with a state directory of its own", n.cfg.slots)
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return 0, ctxError(ctx)
		case <-n.ctx.Done():
			return 0, errClosed()
		}
	}
}

func ctxError(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return sandbox.Errorf(sandbox.CodeTimeout, "waiting for a network slot: %w", ctx.Err())
	}
	return sandbox.Errorf(sandbox.CodeCanceled, "waiting for a network slot: %w", ctx.Err())
}

// takeInline makes a slot for one that waits, or takes one that the pool got
// meanwhile.
func (n *Network) takeInline(ctx context.Context) (int, error) {
	for {
		n.mu.Lock()
		wait := n.freed
		if len(n.ready) > 0 {
			n.mu.Unlock()
			return n.take(ctx)
		}
		n.mu.Unlock()
		select {
		case n.inline <- struct{}{}:
			defer func() { <-n.inline }()
			s, ok, err := n.construct(ctx)
			if err != nil {
				return 0, err
			}
			if !ok {
				return n.take(ctx) // another took the last free one
			}
			return s, nil
		case <-wait:
		case <-ctx.Done():
			return 0, ctxError(ctx)
		case <-n.ctx.Done():
			return 0, errClosed()
		}
	}
}

// construct builds the slot that has been free longest; ok is false when none is.
func (n *Network) construct(ctx context.Context) (s int, ok bool, err error) {
	n.mu.Lock()
	if len(n.free) == 0 {
		n.mu.Unlock()
		return 0, false, nil
	}
	s, n.free = n.free[0], n.free[1:]
	n.building++
	n.mu.Unlock()
	err = n.builder.build(ctx, s)
	n.mu.Lock()
	n.building--
	n.mu.Unlock()
	if err != nil {
		return 0, true, first(errors.Join(err, n.discard(s)))
	}
	return s, true, nil
}

// discard destroys a slot that no sandbox had, or gives it up to Sweep.
func (n *Network) discard(s int) error {
	err := n.builder.destroy(s)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		n.found[s] = true
		return err
	}
	n.freeLocked(s)
	return nil
}

func (n *Network) freeLocked(s ...int) {
	n.free = append(n.free, s...)
	close(n.freed)
	n.freed = make(chan struct{})
}

// refill keeps the pool full.
func (n *Network) refill() {
	delay := time.Duration(0)
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.kick:
		}
		for n.wants() {
			s, ok, err := n.construct(n.ctx)
			if err != nil && n.ctx.Err() == nil {
				delay = min(max(2*delay, 100*time.Millisecond), 30*time.Second)
				n.cfg.Log.Warn("network: cannot make a slot for the pool", "err", err, "retry_in", delay)
				select {
				case <-n.ctx.Done():
				case <-time.After(delay):
				}
				continue
			}
			delay = 0
			if !ok || err != nil {
				break
			}
			n.mu.Lock()
			n.ready = append(n.ready, s)
			close(n.freed)
			n.freed = make(chan struct{})
			n.mu.Unlock()
			n.signal(n.kick) // wake the other refiller too
		}
	}
}

func (n *Network) wants() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ctx.Err() == nil && len(n.ready)+n.building < n.cfg.PoolSize && len(n.free) > 0
}

// entryOf gives the sandbox in l's slot.
func (n *Network) entryOf(l sandbox.Link) (*entry, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if e := n.used[l.Slot]; e != nil {
		return e, nil
	}
	return nil, sandbox.Errorf(sandbox.CodeNotFound, "network slot %d is not in use", l.Slot)
}

// SetPolicy changes what a live sandbox may reach, from the next packet on.
// Connections that the new policy denies are cut: the next packet of such a
// one is judged as if it opened it. CodeNotFound: nothing has the slot.
func (n *Network) SetPolicy(ctx context.Context, l sandbox.Link, p sandbox.NetworkPolicy) error {
	c, err := n.compile(p)
	if err != nil {
		return err
	}
	if err := n.begin(); err != nil {
		return err
	}
	defer n.wg.Done()
	e, err := n.entryOf(l)
	if err != nil {
		return err
	}
	keep, err := e.replace(c)
	if err != nil {
		return err
	}
	pointPolicy.Hit()
	n.lookAhead(e)
	special, src := n.rules.specialNow(), n.builder.address(l.Slot)
	_, err = forget(func(f flow) bool {
		return f.src == src && f.dst != n.Resolver() &&
			!c.permits(f.dst, f.dport, keep.allow, keep.deny, special, n.builder.prefix)
	})
	return err
}

// Adopt takes over the slot of a sandbox that an earlier daemon gave it, and
// asserts its rules again. CodeNotFound: the host has no such slot any more.
func (n *Network) Adopt(ctx context.Context, l sandbox.Link, id sandbox.ID, p sandbox.NetworkPolicy) error {
	c, err := n.compile(p)
	if err != nil {
		return err
	}
	if err := n.begin(); err != nil {
		return err
	}
	defer n.wg.Done()
	if l.Slot < 1 || l.Slot > n.cfg.slots || l.Address.Addr() != n.builder.address(l.Slot) {
		return sandbox.Errorf(sandbox.CodeNotFound, "network slot %d with address %s is not of this daemon's range %s", l.Slot, l.Address, n.Prefix())
	}
	whole, err := n.builder.intact(l.Slot)
	if err != nil {
		return err
	}
	if !whole {
		return sandbox.Errorf(sandbox.CodeNotFound, "network slot %d is gone from the host", l.Slot)
	}
	e := &entry{id: id, slot: l.Slot, net: n, policy: c, opened: names{map[target]named{}, map[target]named{}}}
	if err := n.claimSlot(e); err != nil {
		return err
	}
	if err := e.reload(c); err != nil {
		n.mu.Lock()
		delete(n.used, l.Slot)
		n.found[l.Slot] = true
		n.mu.Unlock()
		return err
	}
	pointAdopted.Hit()
	n.lookAhead(e)
	return nil
}

// claimSlot marks a slot of the host in use by e.
func (n *Network) claimSlot(e *entry) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if other := n.used[e.slot]; other != nil && other.id != e.id {
		return sandbox.Errorf(sandbox.CodeConflict, "network slot %d is in use by sandbox %s", e.slot, other.id)
	}
	if !n.found[e.slot] && n.used[e.slot] == nil {
		return sandbox.Errorf(sandbox.CodeConflict, "network slot %d was not on the host when the daemon started", e.slot)
	}
	delete(n.found, e.slot)
	n.used[e.slot] = e
	return nil
}

// Release takes a slot back and destroys it; when it returns nil, its
// namespace's pin, its link and its rules are gone. It is idempotent. On an
// error the slot stays unused until Sweep has removed it.
func (n *Network) Release(ctx context.Context, l sandbox.Link) error {
	if err := n.begin(); err != nil {
		return err
	}
	defer n.wg.Done()
	n.mu.Lock()
	e := n.used[l.Slot]
	if e == nil && n.found[l.Slot] && l.Address.Addr() == n.builder.address(l.Slot) {
		e = &entry{slot: l.Slot, net: n} // of an earlier daemon, never adopted
	}
	delete(n.used, l.Slot)
	delete(n.found, l.Slot)
	n.mu.Unlock()
	if e == nil {
		return nil
	}
	return n.remove(e)
}

func (n *Network) remove(e *entry) error {
	err := e.end()
	pointUnruled.Hit()
	err = errors.Join(err, n.builder.destroy(e.slot))
	pointDestroyed.Hit()
	n.mu.Lock()
	if err != nil {
		n.found[e.slot] = true
	} else {
		n.dirty = append(n.dirty, e.slot)
	}
	n.mu.Unlock()
	n.signal(n.flush)
	return first(err)
}

// forgetReleased deletes the host's connections of released slots, many slots
// at a time, and gives the slots back.
func (n *Network) forgetReleased() {
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.flush:
		}
		n.mu.Lock()
		batch := n.dirty
		n.dirty = nil
		n.building += len(batch) // still on their way, for whoever waits
		n.mu.Unlock()
		err := n.forgetSlots(batch)
		n.mu.Lock()
		n.building -= len(batch)
		if err != nil {
			n.dirty = append(n.dirty, batch...)
		} else if len(batch) > 0 {
			n.freeLocked(batch...)
		}
		n.mu.Unlock()
		if err != nil {
			n.cfg.Log.Warn("network: released slots wait", "slots", len(batch), "err", err)
			select {
			case <-n.ctx.Done():
			case <-time.After(time.Second):
				n.signal(n.flush)
			}
			continue
		}
		n.signal(n.kick)
	}
}

func (n *Network) forgetSlots(slots []int) error {
	if len(slots) == 0 {
		return nil
	}
	gone := make(map[netip.Addr]bool, 2*len(slots))
	for _, s := range slots {
		gone[n.builder.address(s)], gone[n.builder.gateway(s)] = true, true
	}
	_, err := forget(func(f flow) bool { return gone[f.src] || gone[f.dst] })
	return err
}

// Sweep removes every slot that the host has from an earlier daemon, whole or
// half made, and that is not in inUse. Slots that this daemon gave out are
// never touched: only Release ends them.
func (n *Network) Sweep(ctx context.Context, inUse map[int]sandbox.ID) error {
	if err := n.begin(); err != nil {
		return err
	}
	defer n.wg.Done()
	n.mu.Lock()
	var list []int
	for s := range n.found {
		if _, ok := inUse[s]; !ok {
			list = append(list, s)
			delete(n.found, s)
		}
	}
	n.mu.Unlock()
	slices.Sort(list)
	var g errgroup.Group
	g.SetLimit(inlineBuilds)
	var mu sync.Mutex
	var errs []error
	for i, s := range list {
		if ctx.Err() != nil {
			n.mu.Lock()
			for _, s := range list[i:] {
				n.found[s] = true
			}
			n.mu.Unlock()
			errs = append(errs, ctxError(ctx))
			break
		}
		g.Go(func() error {
			err := n.remove(&entry{slot: s, net: n})
			pointSwept.Hit()
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, err)
			return nil
		})
	}
	g.Wait()
	if err := errors.Join(errs...); err != nil {
		return sandbox.Errorf(sandbox.CodeOf(err), "sweep network slots: %w", err)
	}
	return nil
}

// slotRange is every slot but those in except.
func slotRange(total int, except map[int]bool) []int {
	out := make([]int, 0, total)
	for s := 1; s <= total; s++ {
		if !except[s] {
			out = append(out, s)
		}
	}
	return out
}
