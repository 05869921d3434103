package manager

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Clock tells the time and waits.
type Clock interface {
	Now() time.Time
	// After gives a channel that receives once, after d, and a function that
	// gives its resources back early.
	After(d time.Duration) (<-chan time.Time, func())
}

// SystemClock is the host's clock.
func SystemClock() Clock { return systemClock{} }

type systemClock struct{}

func (systemClock) Now() time.Time { return time.Now() }

func (systemClock) After(d time.Duration) (<-chan time.Time, func()) {
	t := time.NewTimer(d)
	return t.C, func() { t.Stop() }
}

// now is the time as it goes on record: without the monotonic part, so that
// it compares with what the store gives back, and in UTC.
func (m *Manager) now() time.Time { return m.clock.Now().Round(0).UTC() }

// maxSleep bounds how long deadlines sleep without looking at the wall clock,
// which can be set while timers run by the monotonic one.
const maxSleep = time.Minute

// deadlines fires at each sandbox's time of expiry. One goroutine serves all.
type deadlines struct {
	clock Clock
	wake  chan struct{}

	mu    sync.Mutex
	heap  deadlineHeap
	index map[sandbox.ID]*deadline
}

type deadline struct {
	id  sandbox.ID
	at  time.Time
	pos int
}

func newDeadlines(c Clock) *deadlines {
	return &deadlines{clock: c, wake: make(chan struct{}, 1), index: map[sandbox.ID]*deadline{}}
}

// set moves id's deadline; the zero time takes it away.
func (d *deadlines) set(id sandbox.ID, at time.Time) {
	d.mu.Lock()
	e := d.index[id]
	switch {
	case e == nil && !at.IsZero():
		e = &deadline{id: id, at: at}
		d.index[id] = e
		heap.Push(&d.heap, e)
	case e != nil && at.IsZero():
		heap.Remove(&d.heap, e.pos)
		delete(d.index, id)
	case e != nil:
		e.at = at
		heap.Fix(&d.heap, e.pos)
	}
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// run calls fire for each deadline that passed, until ctx is done. fire must
// not block.
func (d *deadlines) run(ctx context.Context, fire func(sandbox.ID)) {
	for {
		now := d.clock.Now()
		sleep := maxSleep
		for {
			id, wait, ok := d.next(now)
			if !ok {
				break
			}
			if wait > 0 {
				sleep = min(sleep, wait)
				break
			}
			fire(id)
		}
		timer, stop := d.clock.After(sleep)
		select {
		case <-ctx.Done():
			stop()
			return
		case <-d.wake:
			stop()
		case <-timer:
		}
	}
}

// next gives the first deadline and how long it is away, taking it out if it
// has passed.
func (d *deadlines) next(now time.Time) (id sandbox.ID, wait time.Duration, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.heap) == 0 {
		return "", 0, false
	}
	e := d.heap[0]
	if wait := e.at.Sub(now.Round(0)); wait > 0 {
		return e.id, wait, true
	}
	heap.Pop(&d.heap)
	delete(d.index, e.id)
	return e.id, 0, true
}

type deadlineHeap []*deadline

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}

func (h *deadlineHeap) Push(x any) {
	e := x.(*deadline)
	e.pos = len(*h)
	*h = append(*h, e)
}

func (h *deadlineHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}
