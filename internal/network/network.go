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
	"sync"

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
	e := n.newEntry(id, s, c)
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
	return n.builder.link(s), nil
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
	keep, reached, err := e.replace(c)
	if err != nil {
		return err
	}
	pointPolicy.Hit()
	n.lookAhead(e)
	if !reached {
		return nil // the look at the table is of all the host's connections
	}
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
	e := n.newEntry(id, l.Slot, c)
	e.reached = true // nobody knows
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
