package manager

import (
	"context"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// eventPage is how many events a subscriber reads from the store at once, and
// how many its channel holds.
const eventPage = 64

// Subscribe gives a tenant's events ("" is every tenant's) after the one
// numbered afterSeq, in order and without gaps, first what is on record, then
// what comes; -1 is only what comes. The channel closes when ctx is done, or
// when the manager closes.
//
// Subscribers read from the store at their own pace: a slow one costs nothing
// but its place, and gets events as long as they are kept (the last 100,000 by
// default).
func (m *Manager) Subscribe(ctx context.Context, tenant string, afterSeq int64) (<-chan sandbox.Event, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	if afterSeq < 0 {
		last, err := m.store.LastSeq(ctx)
		if err != nil {
			return nil, err
		}
		afterSeq = last
	}
	out := make(chan sandbox.Event, eventPage)
	m.tasks.run(func() {
		defer close(out)
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(m.watching, cancel)()
		for {
			rung := m.bell.next() // before the look, so that none is missed
			for {
				page, err := m.store.EventsAfter(ctx, tenant, afterSeq, eventPage)
				if err != nil {
					if ctx.Err() == nil {
						m.log.WarnContext(ctx, "read the events for a subscriber", "error", err)
					}
					return // the client resumes by seq
				}
				for _, e := range page {
					select {
					case out <- e:
						afterSeq = e.Seq
					case <-ctx.Done():
						return
					}
				}
				if len(page) < eventPage {
					break
				}
			}
			select {
			case <-rung:
			case <-ctx.Done():
				return
			}
		}
	})
	return out, nil
}

// bell wakes any number of waiters.
type bell struct {
	mu sync.Mutex
	ch chan struct{}
}

// next gives a channel that is closed by the next ring.
func (b *bell) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

// keyUses bounds how often a key's use is written down.
type keyUses struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// keyUseEvery is how exact LastUsedAt is.
const keyUseEvery = time.Minute

// due tells whether a use at now is to be written down.
func (k *keyUses) due(id string, now time.Time) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now.Sub(k.last[id]) < keyUseEvery {
		return false
	}
	if k.last == nil {
		k.last = map[string]time.Time{}
	}
	k.last[id] = now
	return true
}

func (k *keyUses) forget(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.last, id)
}
