package network

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Release takes a slot back and destroys it; when it returns nil, its
// namespace's pin, its link and its rules are gone. What ran in it has ended; the
// other ends of connections that it left are told. It is idempotent. On an
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
	n.hangUp(e.slot)
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
