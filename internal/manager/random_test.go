package manager_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

var seedFlag = flag.Uint64("seed", 0, "seed of the randomized tests; 0 picks one")

// seeded gives the seed of a randomized test, and tells it.
func seeded(t *testing.T) uint64 {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -seed=%d", seed)
	return seed
}

// chance takes up to a millisecond, and fails what one time in n.
func (r *lockedRand) chance(what string, n int) error {
	time.Sleep(time.Duration(r.IntN(1000)) * time.Microsecond)
	if r.IntN(n) == 0 {
		return errors.New("the dice said no to " + what)
	}
	return nil
}

// TestRandomLives has workers create, end, crash and change sandboxes at
// random while runtimes fail and daemons come and go, and checks after each
// daemon that the host holds what is on record and nothing else.
func TestRandomLives(t *testing.T) {
	seed := seeded(t)
	rounds, workers, steps := 6, 8, 40
	if testing.Short() {
		rounds = 2
	}
	w := newWorld(t)
	w.net.Total = 20
	dice := &lockedRand{r: rand.New(rand.NewPCG(seed, 0))}
	w.rt.OnCreate = func(ctx context.Context, _ sandbox.Spec) error {
		switch dice.IntN(10) {
		case 0:
			return errors.New("the dice said no")
		case 1:
			<-ctx.Done() // until a kill, the client or the end of the daemon
			return ctx.Err()
		default:
			time.Sleep(time.Duration(dice.IntN(2000)) * time.Microsecond)
			return nil
		}
	}
	w.rt.OnKill = func(context.Context, sandbox.ID) error {
		if dice.IntN(30) == 0 {
			return errors.New("the dice said no")
		}
		time.Sleep(time.Duration(dice.IntN(500)) * time.Microsecond)
		return nil
	}
	for round := range rounds {
		m := w.start(t)
		var wg sync.WaitGroup
		for n := range workers {
			r := rand.New(rand.NewPCG(seed, uint64(round*workers+n+1)))
			wg.Go(func() {
				for range steps {
					randomStep(t, w, m, r)
				}
			})
		}
		if round%2 == 0 {
			wg.Wait()
			settle(t, w)
			w.check(t)
		} else {
			// The daemon ends with everything under way.
			time.Sleep(time.Duration(dice.IntN(30)) * time.Millisecond)
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			m.Close(ctx)
			cancel()
			wg.Wait()
			w.m = nil
			continue
		}
		w.stop(t)
	}
	// The last daemon finds what the others left.
	w.rt.OnKill = nil
	w.start(t)
	settle(t, w)
	w.check(t)
}

// settle waits until no end or create is under way.
func settle(t *testing.T, w *world) {
	t.Helper()
	eventually(t, "nothing is under way", func() bool {
		all, err := w.store.Unfinished(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if r.Op != "" || r.State != sandbox.Running {
				return false
			}
			if box := w.rt.Box(r.ID); box == nil {
				return false
			}
			if !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(w.clock.Now()) {
				return false
			}
			if a, err := w.m.Agent(context.Background(), tenant, r.ID); err != nil || !answers(a) {
				return false // it crashed, and the manager is about to notice
			}
		}
		return w.m.Capacity(context.Background()).Sandboxes == len(all)
	})
}

func answers(a interface{ WaitReady(context.Context) error }) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	return a.WaitReady(ctx) == nil
}

func randomStep(t *testing.T, w *world, m *manager.Manager, r *rand.Rand) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+r.IntN(200))*time.Millisecond)
	defer cancel()
	pick := func() (sandbox.ID, bool) {
		all, _, err := m.List(ctx, tenant, manager.ListFilter{})
		if err != nil || len(all) == 0 {
			return "", false
		}
		return all[r.IntN(len(all))].ID, true
	}
	switch r.IntN(10) {
	case 0, 1, 2, 3:
		_, err := m.Create(ctx, tenant, manager.CreateRequest{Timeout: time.Duration(r.IntN(3)) * time.Minute})
		switch sandbox.CodeOf(err) {
		case "", sandbox.CodeInternal, sandbox.CodeTimeout, sandbox.CodeCanceled, sandbox.CodeNoCapacity, sandbox.CodeConflict, sandbox.CodeUnavailable:
		default:
			t.Errorf("create: %v (%s)", err, sandbox.CodeOf(err))
		}
	case 4, 5:
		if id, ok := pick(); ok {
			m.Kill(ctx, tenant, id)
		}
	case 6:
		if id, ok := pick(); ok {
			m.SetTimeout(ctx, tenant, id, time.Duration(r.IntN(100))*time.Second)
		}
	case 7:
		if id, ok := pick(); ok {
			if box := w.rt.Box(id); box != nil {
				box.Crash(sandbox.ReasonRuntimeCrashed, fmt.Sprint("dice ", r.IntN(6)))
			}
		}
	case 8:
		if id, ok := pick(); ok {
			if box := w.rt.Box(id); box != nil {
				box.OOM()
			}
			m.SetNetwork(ctx, tenant, id, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
		}
	case 9:
		w.clock.Advance(time.Duration(r.IntN(30)) * time.Second)
	}
}

type lockedRand struct {
	mu sync.Mutex
	r  *rand.Rand
}

func (l *lockedRand) IntN(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.r.IntN(n)
}
