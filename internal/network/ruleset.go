package network

import (
	"context"
	"errors"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// held is what the kernel's table holds of one slot.
type held struct {
	links, plain, custom, dns bool // an element in the set of that name; custom has a chain too
	allow, deny               bool // a set of its own
}

// named is one address that a name opened or closed.
type named struct {
	name    string
	expires time.Time
}

// ruleset writes the table. The kernel takes one transaction at a time, so
// its own lock is what orders them; mu guards only the mirror.
type ruleset struct {
	table
	// whole is held for writing while the table is made anew, and for reading
	// while a transaction relies on the mirror.
	whole   sync.RWMutex
	mu      sync.Mutex
	slots   map[int]held   // mirror of the kernel, changed after each transaction
	special []netip.Prefix // what setSpecial holds
}

// commit runs f's messages as one transaction: all or nothing.
func commit(f func(c *nftables.Conn) error) error {
	// A connection per transaction: after a refusal, a lasting one may still
	// hold answers to messages that nobody reads. The buffers hold an answer
	// for each of the largest policy's rules.
	c, err := nftables.New(nftables.WithSockOptions(func(nl *netlink.Conn) error {
		return errors.Join(nl.SetReadBuffer(1<<21), nl.SetWriteBuffer(1<<21))
	}))
	if err != nil {
		return err
	}
	if err := f(c); err != nil {
		return err
	}
	return c.Flush()
}

// open makes the table, or keeps the one of an earlier daemon when it is what
// this one would make, and reads what it holds.
func (r *ruleset) open() error {
	found, err := r.load()
	if err != nil {
		return err
	}
	if found {
		return r.setSpecial(r.special)
	}
	return r.rebuild()
}

// rebuild replaces the table with one that holds no sandbox.
func (r *ruleset) rebuild() error {
	r.whole.Lock()
	defer r.whole.Unlock()
	special := r.specialNow()
	err := commit(func(c *nftables.Conn) error {
		if err := r.create(c); err != nil {
			return err
		}
		return c.SetAddElements(r.set(setSpecial), intervals(special))
	})
	if err != nil {
		return nftError("make the table", err)
	}
	r.mu.Lock()
	r.slots = map[int]held{}
	r.mu.Unlock()
	return nil
}

func (r *ruleset) specialNow() []netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.special)
}

// setSpecial replaces the ranges that are denied by default.
func (r *ruleset) setSpecial(list []netip.Prefix) error {
	err := commit(func(c *nftables.Conn) error {
		c.FlushSet(r.set(setSpecial))
		return c.SetAddElements(r.set(setSpecial), intervals(list))
	})
	if err != nil {
		return nftError("set the private ranges", err)
	}
	r.mu.Lock()
	r.special = slices.Clone(list)
	r.mu.Unlock()
	return nil
}

// load reads the table into the mirror. found is false when there is none, or
// another version's.
func (r *ruleset) load() (found bool, err error) {
	c, err := nftables.New()
	if err != nil {
		return false, nftError("open netlink", err)
	}
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, nftError("list chains", err)
	}
	slots := map[int]held{}
	note := func(s int, f func(*held)) {
		h := slots[s]
		f(&h)
		slots[s] = h
	}
	for _, ch := range chains {
		if ch.Table.Name == r.tableName() && ch.Name == r.marker() {
			found = true
		}
	}
	if !found {
		return false, nil
	}
	sets, err := c.GetSets(r.nft())
	if err != nil {
		return false, nftError("list sets", err)
	}
	for _, s := range sets {
		if n, ok := slotOfName(s.Name); ok {
			note(n, func(h *held) { h.allow = h.allow || s.Name[0] == 'a'; h.deny = h.deny || s.Name[0] == 'd' })
		}
	}
	for name, mark := range map[string]func(*held){
		setLinks:  func(h *held) { h.links = true },
		setPlain:  func(h *held) { h.plain = true },
		setCustom: func(h *held) { h.custom = true },
		setDNS:    func(h *held) { h.dns = true },
	} {
		elems, err := c.GetSetElements(r.set(name))
		if err != nil {
			return false, nftError("list set "+name, err)
		}
		for _, e := range elems {
			if s, ok := r.slotOfElement(e); ok {
				note(s, mark)
			}
		}
	}
	r.mu.Lock()
	r.slots = slots
	r.mu.Unlock()
	return true, nil
}

// slotOfName reads the slot out of the name of a chain or set of its own.
func slotOfName(name string) (int, bool) {
	if len(name) != 5 || (name[0] != 'a' && name[0] != 'd' && name[0] != 'c') {
		return 0, false
	}
	s, err := strconv.ParseUint(name[1:], 16, 14)
	return int(s), err == nil
}

// exists tells whether the table is there at all.
func (r *ruleset) exists() (bool, error) {
	c, err := nftables.New()
	if err != nil {
		return false, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == r.tableName() }), nil
}

// drop removes the table.
func (r *ruleset) drop() error {
	err := commit(func(c *nftables.Conn) error { c.AddTable(r.nft()); c.DelTable(r.nft()); return nil })
	if err != nil {
		return nftError("remove the table", err)
	}
	return nil
}

func (r *ruleset) held(s int) held {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.slots[s]
}

func (r *ruleset) heldSlots() (out []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for s, h := range r.slots {
		if h != (held{}) {
			out = append(out, s)
		}
	}
	return out
}

// names is what domain rules have opened and closed so far.
type names struct{ allow, deny map[target]named }

// apply makes slot s obey p, in one transaction; p of nil takes the slot out
// of the table. keep is what stays of the slot's opened and closed addresses;
// nil leaves the sets as they are. Calls about one slot must not overlap.
func (r *ruleset) apply(s int, p *policy, keep *names) error {
	var want held
	if p != nil {
		want = held{links: true, plain: p.plain(), dns: !p.none}
		want.custom = !p.none && !want.plain
		want.allow, want.deny = want.custom && len(p.allowDomains) > 0, want.custom && len(p.denyDomains) > 0
	}
	r.whole.RLock()
	defer r.whole.RUnlock()
	have := r.held(s)
	err := commit(func(c *nftables.Conn) error {
		return r.change(c, s, have, want, p, keep)
	})
	if err != nil {
		return nftError("write the rules of slot "+strconv.Itoa(s), err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if want == (held{}) {
		delete(r.slots, s)
	} else {
		r.slots[s] = want
	}
	return nil
}

func (r *ruleset) change(c *nftables.Conn, s int, have, want held, p *policy, keep *names) error {
	var errs []error
	member := func(name string, have, want bool, e nftables.SetElement) {
		switch set := r.set(name); {
		case want && !have:
			errs = append(errs, c.SetAddElements(set, []nftables.SetElement{e}))
		case have && !want:
			errs = append(errs, c.SetDeleteElements(set, []nftables.SetElement{e}))
		}
	}
	member(setPlain, have.plain, want.plain, r.addrElement(s))
	member(setDNS, have.dns, want.dns, r.addrElement(s))

	chain := &nftables.Chain{Table: r.nft(), Name: slotChain(s)}
	if have.custom && !want.custom {
		member(setCustom, true, false, r.addrElement(s))
	}
	if have.custom {
		c.FlushChain(chain)
	} else if want.custom {
		c.AddChain(chain)
	}
	own := func(name string, have, want bool, keep map[target]named, kept bool) {
		set := r.slotSet(name)
		switch {
		case have && !want:
			c.DelSet(set)
			return
		case want && !have:
			errs = append(errs, c.AddSet(set, nil))
		case want && kept:
			c.FlushSet(set)
		}
		if want && kept {
			errs = append(errs, addTargets(c, set, keep))
		}
	}
	var k names
	if keep != nil {
		k = *keep
	}
	own(allowSet(s), have.allow, want.allow, k.allow, keep != nil)
	own(denySet(s), have.deny, want.deny, k.deny, keep != nil)
	if want.custom {
		for _, cr := range r.slotRules(s, p) {
			c.AddRule(&nftables.Rule{Table: r.nft(), Chain: &nftables.Chain{Name: cr.chain}, Exprs: cr.exprs})
		}
		if !have.custom {
			e := r.addrElement(s)
			e.VerdictData = chainVerdict(s)
			member(setCustom, false, true, e)
		}
	} else if have.custom {
		c.DelChain(chain)
	}
	member(setLinks, have.links, want.links, r.linkElement(s))
	return errors.Join(errs...)
}

// addTargets queues elements in portions that fit a netlink attribute.
func addTargets(c *nftables.Conn, set *nftables.Set, m map[target]named) error {
	var elems []nftables.SetElement
	for t, n := range m {
		left := time.Until(n.expires).Round(time.Millisecond)
		if left <= 0 {
			continue
		}
		elems = append(elems, nftables.SetElement{Key: targetKey(t), Timeout: left, Comment: n.name})
	}
	for part := range slices.Chunk(elems, 100) {
		if err := c.SetAddElements(set, part); err != nil {
			return err
		}
	}
	return nil
}

// extend adds addresses to a slot's set, or prolongs them.
func (r *ruleset) extend(setName string, m map[target]named) error {
	set := r.slotSet(setName)
	var bare []nftables.SetElement
	for t, n := range m {
		bare = append(bare, nftables.SetElement{Key: targetKey(t), Timeout: maxOpen, Comment: n.name})
	}
	err := commit(func(c *nftables.Conn) error {
		// Adding an element that is there does not prolong it (Linux before
		// 6.12), and deleting one that is not fails: so add, delete, add.
		return errors.Join(c.SetAddElements(set, bare), c.SetDeleteElements(set, bare), addTargets(c, set, m))
	})
	if err != nil {
		return nftError("open addresses in "+setName, err)
	}
	return nil
}

// targets reads what a slot's set holds.
func (r *ruleset) targets(setName string) (map[target]named, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, nftError("open netlink", err)
	}
	elems, err := c.GetSetElements(r.slotSet(setName))
	if err != nil {
		return nil, nftError("list set "+setName, err)
	}
	out := map[target]named{}
	for _, e := range elems {
		if len(e.Key) != 8 {
			continue
		}
		t := target{netip.AddrFrom4([4]byte(e.Key[:4])), uint16(e.Key[4])<<8 | uint16(e.Key[5])}
		out[t] = named{name: e.Comment, expires: time.Now().Add(e.Expires)}
	}
	return out, nil
}

// nftError tells what failed and what helps.
func nftError(what string, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	switch {
	case errors.Is(err, fs.ErrPermission):
		return sandbox.Errorf(sandbox.CodeUnavailable, "nftables: cannot %s: %w; run the daemon as root with CAP_NET_ADMIN", what, err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return sandbox.Errorf(sandbox.CodeUnavailable, "nftables: cannot %s: %w; the kernel needs nf_tables with inet, nat, ct, connlimit, reject and rt (modprobe nf_tables nft_ct nft_nat nft_masq nft_connlimit nft_reject_inet)", what, err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "nftables: cannot %s: %w", what, err)
}
