package network

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/network/dns"
	"github.com/warrenhq/warren/internal/sandbox"
)

// How long the address of a name stays open or closed: its record's time to
// live, within bounds, and a while for the client that got it last.
const (
	minOpen    = time.Minute
	maxOpen    = 2 * time.Hour
	grace      = 30 * time.Second
	maxTargets = 4096 // addresses that names have opened, and closed, for one sandbox
	lookupGap  = 5 * time.Minute
)

// entry is one sandbox in its slot.
type entry struct {
	id   sandbox.ID
	slot int
	net  *Network

	// mu orders the transactions about this one slot, so that an answer of the
	// resolver does not open an address under a policy that has just gone. It
	// is held over one call of the kernel, never over the network.
	mu      sync.Mutex
	policy  *policy // nil once the sandbox is gone
	opened  names
	reached bool // it may have connections: not all of its policies were of none
}

var _ dns.Client = (*entry)(nil)

// Judge implements dns.Client.
func (e *entry) Judge(name string) dns.Action {
	e.mu.Lock()
	p := e.policy
	e.mu.Unlock()
	return p.judge(name)
}

func (p *policy) judge(name string) dns.Action {
	match := func(rules []domainRule) bool {
		return slices.ContainsFunc(rules, func(r domainRule) bool { return r.matches(name) })
	}
	switch {
	case p == nil || p.none:
		return dns.Refuse
	case match(p.allowDomains):
		return dns.Open
	case slices.ContainsFunc(p.denyDomains, func(r domainRule) bool { return r.port == 0 && r.matches(name) }):
		return dns.Block
	case match(p.denyDomains):
		return dns.Close
	case p.denyAll:
		return dns.Refuse
	}
	return dns.Forward
}

// Resolved implements dns.Client.
func (e *entry) Resolved(ctx context.Context, a dns.Action, name string, addrs []netip.Addr, ttl time.Duration) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.policy
	if p == nil {
		return sandbox.Errorf(sandbox.CodeNotFound, "the sandbox is gone")
	}
	set, into, rules := denySet(e.slot), e.opened.deny, p.denyDomains
	if a == dns.Open {
		set, into, rules = allowSet(e.slot), e.opened.allow, p.allowDomains
	}
	now := time.Now()
	until := now.Add(min(max(ttl, minOpen)+grace, maxOpen))
	fresh := map[target]named{}
	for _, port := range ports(rules, name) {
		for _, addr := range addrs {
			t := target{addr, port}
			if !e.net.mayOpen(addr) || into[t].expires.Sub(now) > ttl+grace/2 {
				continue // it stays as long as the client may use the answer
			}
			fresh[t] = named{name: name, expires: until}
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	for t, old := range into {
		if old.expires.Before(now) {
			delete(into, t)
		}
	}
	if len(into)+len(fresh) > maxTargets {
		return sandbox.Errorf(sandbox.CodeTooLarge, "names have led to more than %d addresses", maxTargets)
	}
	if err := e.net.rules.extend(set, fresh); err != nil {
		return err
	}
	for t, v := range fresh {
		into[t] = v
	}
	return nil
}

// mayOpen keeps names from opening what no name should lead to.
func (n *Network) mayOpen(a netip.Addr) bool {
	return a.Is4() && !linkLocal.Contains(a) && !containsAddr(neverPrefixes, a) && !n.builder.prefix.Contains(a)
}

// newEntry is the sandbox id that gets slot s under p.
func (n *Network) newEntry(id sandbox.ID, s int, p *policy) *entry {
	return &entry{id: id, slot: s, net: n, policy: p, opened: names{map[target]named{}, map[target]named{}}, reached: !p.none}
}

// replace puts the sandbox under p. What names opened stays as far as p has
// rules for the same names; it returns that, and whether the sandbox may have
// connections that p denies.
func (e *entry) replace(p *policy) (keep names, reached bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.policy == nil {
		return names{}, false, sandbox.Errorf(sandbox.CodeNotFound, "network slot %d is not in use", e.slot)
	}
	keep = names{stillNamed(e.opened.allow, p.allowDomains), stillNamed(e.opened.deny, p.denyDomains)}
	if err := e.net.rules.apply(e.slot, p, &keep); err != nil {
		return names{}, false, err
	}
	reached = e.reached
	e.policy, e.opened, e.reached = p, keep, reached || !p.none
	return names{copyNames(keep.allow), copyNames(keep.deny)}, reached, nil
}

func stillNamed(m map[target]named, rules []domainRule) map[target]named {
	out := map[target]named{}
	for t, n := range m {
		if n.expires.After(time.Now()) && slices.Contains(ports(rules, n.name), t.port) {
			out[t] = n
		}
	}
	return out
}

func copyNames(m map[target]named) map[target]named {
	out := make(map[target]named, len(m))
	for t, n := range m {
		out[t] = n
	}
	return out
}

// reload asserts p after a restart, and reads back what names had opened.
func (e *entry) reload(p *policy) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.net.rules.apply(e.slot, p, nil); err != nil {
		return err
	}
	have := e.net.rules.held(e.slot)
	for _, s := range []struct {
		there bool
		name  string
		into  *map[target]named
	}{{have.allow, allowSet(e.slot), &e.opened.allow}, {have.deny, denySet(e.slot), &e.opened.deny}} {
		if !s.there {
			continue
		}
		m, err := e.net.rules.targets(s.name)
		if err != nil {
			return err
		}
		*s.into = m
	}
	return nil
}

// restore writes the sandbox's rules into a table that lost them.
func (e *entry) restore() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.policy == nil {
		return nil
	}
	return e.net.rules.apply(e.slot, e.policy, &e.opened)
}

// permits tells whether the sandbox may have connection f.
func (e *entry) permits(f flow, special []netip.Prefix) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.policy != nil && e.policy.permits(f.dst, f.dport, e.opened.allow, e.opened.deny, special, e.net.builder.prefix)
}

// end takes the sandbox out of the table.
func (e *entry) end() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.policy = nil
	return e.net.rules.apply(e.slot, nil, nil)
}

// exactDenied are the names whose addresses can be closed ahead.
func (e *entry) exactDenied() (out []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.policy == nil {
		return nil
	}
	for _, r := range e.policy.denyDomains {
		if !r.wildcard && !slices.Contains(out, r.name) {
			out = append(out, r.name)
		}
	}
	return out
}
