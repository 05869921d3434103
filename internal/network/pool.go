package network

import (
	"context"
	"errors"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

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
