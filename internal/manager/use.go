package manager

import (
	"context"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// uses counts the requests and streams that are at work with a sandbox. One
// with none for its idle timeout is idle.
type uses struct {
	mu   sync.Mutex
	n    int
	last time.Time // when n last fell to 0; zero before
}

// idleSince gives since when nothing uses it, the zero time where nothing ever
// did; ok is false while something does.
func (u *uses) idleSince() (since time.Time, ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.last, u.n == 0
}

func (u *uses) add() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.n++
}

func (u *uses) done(now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.n--; u.n == 0 {
		u.last = now
	}
}

// Use keeps a running sandbox from being taken for idle until release is
// called, once or more often. Every request into a sandbox, and every stream as
// long as it is open, is to have its own.
func (m *Manager) Use(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error) {
	l, err := m.of(ctx, tenant, id)
	if err != nil {
		return nil, err
	}
	l.uses.add() // before the look at its state: it is not idle from here on
	release = sync.OnceFunc(func() { l.uses.done(m.now()) })
	if _, err := m.running(ctx, tenant, id); err != nil {
		release()
		return nil, err
	}
	return release, nil
}
