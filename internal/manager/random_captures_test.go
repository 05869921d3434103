package manager_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// model is what sandboxes must hold: the last value that a command inside was
// seen to write, or, where none wrote, one of an ancestor's.
type model struct {
	mu     sync.Mutex
	last   map[sandbox.ID]string
	author map[string]sandbox.ID // of a value; every value is written once
}

// write has a command inside write, if one can run.
func (m *model) write(w *world, id sandbox.ID, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if box := w.full.Box(w.at(id)); box != nil && box.Write(value) {
		m.last[id], m.author[value] = value, id
	}
}

// check compares what a sandbox that runs has, with its ancestors given.
func (m *model) check(t *testing.T, w *world, id sandbox.ID, ancestors map[sandbox.ID]bool) {
	t.Helper()
	if want, ok := m.last[id]; ok {
		wantMemory(t, w.full, w.at(id), want, want)
		return
	}
	memory, disk := w.full.Box(w.at(id)).Holds()
	for _, has := range []string{memory, disk} {
		if has != "" && !ancestors[m.author[has]] {
			t.Errorf("%s has %q, which %s wrote: it is no ancestor", id, has, m.author[has])
		}
	}
}

// TestRandomCaptures has workers suspend, hibernate, wake, fork, capture, use
// and end sandboxes at random, while runtimes fail and daemons come and go.
// After each daemon the host holds what is on record and nothing else, and in
// the end every sandbox has what its commands wrote last.
func TestRandomCaptures(t *testing.T) {
	seed := seeded(t)
	rounds, workers, steps := 6, 8, 40
	if testing.Short() {
		rounds = 2
	}
	w := newWorld(t)
	w.net.Total = 25
	dice := &lockedRand{r: rand.New(rand.NewPCG(seed, 0))}
	w.full.OnCheckpoint = func(context.Context, sandbox.ID) error { return dice.chance("a checkpoint", 10) }
	w.full.OnRestore = func(context.Context, sandbox.Spec) error { return dice.chance("a restore", 10) }
	w.full.OnPrepare = func(context.Context, sandbox.Spec) error { return dice.chance("a spare", 10) }
	w.tune = func(c *manager.Config) { c.Spares = int(seed % 4) }
	w.full.OnKill = func(context.Context, sandbox.ID) error { return dice.chance("an end", 40) }
	mod := &model{last: map[sandbox.ID]string{}, author: map[string]sandbox.ID{}}
	for round := range rounds {
		m := w.start(t)
		var wg sync.WaitGroup
		for n := range workers {
			r := rand.New(rand.NewPCG(seed, uint64(round*workers+n+1)))
			wg.Go(func() {
				for i := range steps {
					captureStep(t, w, m, r, mod, fmt.Sprintf("%d.%d.%d", round, n, i))
				}
			})
		}
		if round%2 == 0 {
			wg.Wait()
			w.restAwake(t)
			w.check(t)
			w.stop(t)
			continue
		}
		time.Sleep(time.Duration(dice.IntN(60)) * time.Millisecond)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		m.Close(ctx)
		cancel()
		wg.Wait()
		w.m = nil
	}
	w.full.OnKill, w.full.OnRestore, w.full.OnCheckpoint, w.full.OnPrepare = nil, nil, nil, nil
	w.net.Total = 1000
	m := w.start(t)
	w.restAwake(t)
	w.check(t)
	all, _, err := m.List(t.Context(), tenant, manager.ListFilter{Limit: 1000})
	if err != nil {
		t.Fatal(err)
	}
	states := map[sandbox.State]int{}
	for _, s := range all {
		states[s.State]++
		switch s.State {
		case sandbox.Suspended:
			err = m.Unsuspend(t.Context(), tenant, s.ID)
		case sandbox.Hibernated:
			err = m.Wake(t.Context(), tenant, s.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		ancestors := map[sandbox.ID]bool{}
		for at := s; ; {
			source := at.Parent
			if n, err := w.store.GetSnapshot(t.Context(), at.Snapshot); err == nil {
				source = n.Source
			} else if source == "" && at.Snapshot != "" {
				ancestors = nil // a snapshot that is gone: nothing tells any more
				break
			}
			if source == "" || ancestors[source] {
				break
			}
			ancestors[source] = true
			if at, err = m.Get(t.Context(), tenant, source); err != nil {
				t.Fatal(err)
			}
		}
		if ancestors != nil {
			mod.check(t, w, s.ID, ancestors)
		}
	}
	t.Logf("in the end there are %v", states)
	w.check(t)
}

// restAwake is rest, and that what is said to run answers.
func (w *world) restAwake(t *testing.T) {
	t.Helper()
	w.rest(t)
	eventually(t, "all that runs answers", func() bool {
		all, err := w.store.Unfinished(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range all {
			if r.Op != "" {
				return false
			}
			if r.State == sandbox.Running {
				if a, err := w.m.Agent(context.Background(), tenant, r.ID); err != nil || !answers(a) {
					return false
				}
			}
		}
		return w.m.Capacity(context.Background()).Sandboxes == len(all)
	})
}

func captureStep(t *testing.T, w *world, m *manager.Manager, r *rand.Rand, mod *model, value string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+r.IntN(300))*time.Millisecond)
	defer cancel()
	all, _, err := m.List(ctx, tenant, manager.ListFilter{})
	if err != nil {
		return
	}
	var id sandbox.ID
	if len(all) > 0 {
		id = all[r.IntN(len(all))].ID
	}
	legal := func(what string, err error) {
		switch sandbox.CodeOf(err) {
		case "", sandbox.CodeInternal, sandbox.CodeTimeout, sandbox.CodeCanceled, sandbox.CodeNoCapacity, sandbox.CodeConflict, sandbox.CodeUnavailable, sandbox.CodeNotFound:
		default:
			t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
		}
	}
	if id == "" || len(all) < 4 {
		_, err := m.Create(ctx, tenant, manager.CreateRequest{Runtime: "full"})
		legal("create", err)
		return
	}
	switch r.IntN(16) {
	case 0:
		legal("suspend", m.Suspend(ctx, tenant, id))
	case 1:
		legal("unsuspend", m.Unsuspend(ctx, tenant, id))
	case 2, 3:
		legal("hibernate", m.Hibernate(ctx, tenant, id))
	case 4:
		legal("wake", m.Wake(ctx, tenant, id))
	case 5, 6:
		a, err := m.Agent(ctx, tenant, id)
		legal("use", err)
		if err == nil {
			answers(a)
		}
	case 7, 8, 9:
		mod.write(w, id, value)
	case 10, 11:
		res, err := m.Fork(ctx, tenant, id, manager.ForkRequest{Count: 1 + r.IntN(3)})
		legal("fork", err)
		for _, c := range res {
			if c.Err != nil {
				legal("a fork's child", c.Err)
			}
		}
	case 12:
		kind := sandbox.SnapshotFull
		if r.IntN(2) == 0 {
			kind = sandbox.SnapshotDisk
		}
		n, err := m.Snapshot(ctx, tenant, id, manager.SnapshotRequest{Kind: kind})
		legal("snapshot", err)
		if err == nil && r.IntN(2) == 0 {
			_, err := m.Create(ctx, tenant, manager.CreateRequest{Snapshot: n.ID})
			legal("create from a snapshot", err)
		}
	case 13:
		if page, _, err := m.Snapshots(ctx, tenant, manager.SnapshotFilter{}); err == nil && len(page) > 0 {
			legal("remove a snapshot", m.RemoveSnapshot(ctx, tenant, page[r.IntN(len(page))].ID))
		}
		_, err := m.Tree(ctx, tenant, "")
		legal("tree", err)
	case 14, 15:
		legal("kill", m.Kill(ctx, tenant, id))
	}
}
