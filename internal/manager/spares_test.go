package manager_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// withSpares is a world with a sandbox that was forked once and has n spares.
func withSpares(t *testing.T, n int) (*world, sandbox.ID) {
	t.Helper()
	w := newWorld(t)
	w.tune = func(c *manager.Config) { c.Spares = n }
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	for _, r := range fork(t, m, id, n) {
		if err := m.Kill(t.Context(), tenant, r); err != nil {
			t.Fatal(err)
		}
	}
	w.settle(t, n)
	return w, id
}

// settle waits for n spares.
func (w *world) settle(t *testing.T, n int) {
	t.Helper()
	eventually(t, "there are as many spares as are wanted", func() bool {
		w.clock.Advance(time.Second)
		return len(w.m.Capacity(context.Background()).Spares) == n
	})
	w.rest(t)
}

func fork(t *testing.T, m *manager.Manager, id sandbox.ID, n int) []sandbox.ID {
	t.Helper()
	all, err := m.Fork(t.Context(), tenant, id, manager.ForkRequest{Count: n})
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]sandbox.ID, len(all))
	for i, r := range all {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		ids[i] = r.Sandbox.ID
	}
	return ids
}

// TestSpareTaken: forks and wakes go on in what waits for them, and more is
// made afterwards.
func TestSpareTaken(t *testing.T) {
	w, id := withSpares(t, 2)
	write(t, w.full, id, "one")
	spares := w.full.Ready()
	children := fork(t, w.m, id, 1)
	if children[0] != spares[0] && children[0] != spares[1] {
		t.Errorf("the child is %s, and not one of the spares %v", children[0], spares)
	}
	wantMemory(t, w.full, children[0], "one", "one")
	w.settle(t, 2)
	w.check(t)

	if err := w.m.Hibernate(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	spares = w.full.Ready()
	if err := w.m.Wake(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	at := w.at(id)
	if at == id || (at != spares[0] && at != spares[1]) {
		t.Errorf("%s woke as %s, and not in one of the spares %v", id, at, spares)
	}
	wantMemory(t, w.full, at, "one", "one")
	if got := w.full.Box(at).Spec.Hostname; got != string(id) {
		t.Errorf("its hostname is %s", got)
	}
	w.settle(t, 2)
	w.check(t)

	// The next daemon finds it, and no spare of the last one.
	w.stop(t)
	if left := w.full.Ready(); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	m := w.start(t)
	w.check(t)
	if err := m.Hibernate(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	w.rest(t)
	w.check(t)
	if err := m.Kill(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	w.check(t)
}

// TestSpareOfDeadDaemon: what a daemon that was killed had ready is removed.
func TestSpareOfDeadDaemon(t *testing.T) {
	w, _ := withSpares(t, 2)
	w.full.OnKill = func(context.Context, sandbox.ID) error { return errors.New("the daemon is dead") }
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	w.m.Close(ctx)
	w.m = nil
	w.full.OnKill = nil
	if n := len(w.full.Ready()); n != 2 {
		t.Fatalf("%d spares outlived the daemon, want 2", n)
	}
	w.start(t)
	w.rest(t)
	w.check(t)
}

// TestSpareGone: a spare that has died costs time and nothing else.
func TestSpareGone(t *testing.T) {
	w, id := withSpares(t, 1)
	write(t, w.full, id, "one")
	for _, s := range w.full.Ready() {
		w.full.Clean(t.Context(), s)
	}
	wantMemory(t, w.full, fork(t, w.m, id, 1)[0], "one", "one")
	w.settle(t, 1)
	w.check(t)
}

// TestSpareGivesWay: the host's last room is a sandbox's.
func TestSpareGivesWay(t *testing.T) {
	w, id := withSpares(t, 2)
	w.net.Total = 3
	fork(t, w.m, id, 1) // in the slot of a spare
	create(t, w.m, manager.CreateRequest{Runtime: "full"})
	w.rest(t)
	if n := len(w.m.Capacity(t.Context()).Spares); n != 0 {
		t.Errorf("%d spares are left", n)
	}
	w.check(t)
	_, err := w.m.Create(t.Context(), tenant, manager.CreateRequest{Runtime: "full"})
	wantCode(t, err, sandbox.CodeNoCapacity, "slots")
}

// TestSpareAges: spares that nobody needs any more are removed.
func TestSpareAges(t *testing.T) {
	w, _ := withSpares(t, 2)
	eventually(t, "the spares are gone", func() bool {
		w.clock.Advance(time.Minute)
		return len(w.full.Ready()) == 0
	})
	w.rest(t)
	w.check(t)
}
