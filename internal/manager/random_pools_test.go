package manager_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/pool"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestRandomPools has workers set and remove pools, claim, end and crash
// sandboxes, while runtimes fail and daemons come and go. Nobody ever gets a
// sandbox that another has or had; after each daemon the host holds what is on
// record and nothing else; and in the end the pools are full.
func TestRandomPools(t *testing.T) {
	seed := seeded(t)
	rounds, workers, steps := 6, 6, 40
	if testing.Short() {
		rounds = 2
	}
	w := newWorld(t)
	w.net.Total = 25
	w.tune = func(c *manager.Config) {
		c.Pools = pool.Options{Parallel: 3, Calm: time.Nanosecond, Patience: time.Millisecond, Backoff: time.Millisecond, BackoffMost: 20 * time.Millisecond}
	}
	dice := &lockedRand{r: rand.New(rand.NewPCG(seed, 0))}
	create := func(context.Context, sandbox.Spec) error { return dice.chance("a start", 12) }
	w.rt.OnCreate, w.full.OnCreate, w.full.OnRestore = create, create, create
	w.full.OnCheckpoint = func(context.Context, sandbox.ID) error { return dice.chance("a checkpoint", 6) }
	end := func(context.Context, sandbox.ID) error { return dice.chance("an end", 40) }
	w.rt.OnKill, w.full.OnKill = end, end
	var mu sync.Mutex
	owner := map[sandbox.ID]string{}
	starts := map[sandbox.StartKind]int{}
	runtimes := []string{"fake", "full"}
	step := func(m *manager.Manager, r *rand.Rand, who string) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(20+r.IntN(300))*time.Millisecond)
		defer cancel()
		runtime := runtimes[r.IntN(2)]
		switch r.IntN(10) {
		case 0, 1:
			m.SetPool(ctx, tenant, manager.PoolRequest{Runtime: runtime, Ready: r.IntN(5)})
		case 2:
			if all, err := m.Pools(ctx, tenant); err == nil && len(all) > 0 {
				m.RemovePool(ctx, tenant, all[r.IntN(len(all))].ID)
			}
		case 3:
			if all, err := m.Pools(ctx, tenant); err == nil && len(all) > 0 {
				if ids := all[r.IntN(len(all))].Members; len(ids) > 0 {
					if box := w.box(ids[r.IntN(len(ids))]); box != nil {
						box.Crash(sandbox.ReasonRuntimeCrashed, "the dice")
					}
				}
			}
		case 4, 5, 6:
			if all, _, err := m.List(ctx, tenant, manager.ListFilter{}); err == nil && len(all) > 0 {
				m.Kill(ctx, tenant, all[r.IntN(len(all))].ID)
			}
		default:
			s, err := m.Create(ctx, tenant, manager.CreateRequest{
				Runtime: runtime, Metadata: map[string]string{"of": who}, Network: sandbox.NetworkPolicy{Mode: []sandbox.NetworkMode{"", sandbox.NetworkNone}[r.IntN(2)]},
			})
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if was := owner[s.ID]; was != "" || s.Metadata["of"] != who {
				t.Errorf("%s got %s, which is %q's and says %q", who, s.ID, was, s.Metadata["of"])
			}
			owner[s.ID] = who
			starts[s.Start]++
		}
	}
	rest := func() {
		t.Helper()
		eventually(t, "all is at rest", func() bool {
			pools, err := w.m.Pools(context.Background(), tenant)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range pools {
				if p.Making+p.Ending > 0 || len(p.Members) != p.Ready {
					return false
				}
			}
			all, err := w.store.Unfinished(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range all {
				if box := w.box(r.ID); r.Op != "" || r.State != sandbox.Running || box == nil {
					return false
				}
			}
			return w.m.Capacity(context.Background()).Sandboxes == len(all)
		})
	}
	for round := range rounds {
		m := w.start(t)
		var wg sync.WaitGroup
		for n := range workers {
			r := rand.New(rand.NewPCG(seed, uint64(round*workers+n+1)))
			wg.Go(func() {
				for i := range steps {
					step(m, r, fmt.Sprintf("%d.%d.%d", round, n, i))
				}
			})
		}
		if round%2 == 1 {
			time.Sleep(time.Duration(dice.IntN(60)) * time.Millisecond)
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			m.Close(ctx)
			cancel()
			wg.Wait()
			w.m = nil
			continue
		}
		wg.Wait()
		w.stop(t)
	}
	w.rt.OnCreate, w.full.OnCreate, w.full.OnRestore, w.full.OnCheckpoint, w.rt.OnKill, w.full.OnKill = nil, nil, nil, nil, nil, nil
	w.net.Total = 1000
	m := w.start(t)
	for _, runtime := range runtimes {
		setPool(t, m, manager.PoolRequest{Runtime: runtime, Ready: 3})
	}
	rest()
	w.check(t)
	pools, err := m.Pools(t.Context(), tenant)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pools {
		for _, id := range p.Members {
			if owner[id] != "" {
				t.Errorf("%s was %s's and is a member of %s", id, owner[id], p.ID)
			}
		}
		if err := m.RemovePool(t.Context(), tenant, p.ID); err != nil {
			t.Fatal(err)
		}
	}
	rest()
	w.check(t)
	t.Logf("creates started by %v", starts)
}
