package manager_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/manager/managertest"
	"github.com/warrenhq/warren/internal/sandbox"
)

// write changes what a running sandbox has in memory and on the disk.
func write(t *testing.T, rt *managertest.MemoryRuntime, id sandbox.ID, value string) {
	t.Helper()
	if box := rt.Box(id); box == nil || !box.Write(value) {
		t.Fatalf("no command of %s can run", id)
	}
}

func wantMemory(t *testing.T, rt *managertest.MemoryRuntime, id sandbox.ID, memory, disk string) {
	t.Helper()
	box := rt.Box(id)
	if box == nil {
		t.Fatalf("%s does not run", id)
	}
	if m, d := box.Holds(); m != memory || d != disk {
		t.Errorf("%s has %q in memory and %q on the disk, want %q and %q", id, m, d, memory, disk)
	}
	if frozen, suspended := box.Stopped(); frozen || suspended {
		t.Errorf("%s is stopped (by its agent: %v, by its runtime: %v)", id, frozen, suspended)
	}
}

func state(t *testing.T, m *manager.Manager, id sandbox.ID) sandbox.Sandbox {
	t.Helper()
	s, err := m.Get(t.Context(), tenant, id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSuspend(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	for range 2 { // both are idempotent
		if err := m.Suspend(t.Context(), tenant, id); err != nil {
			t.Fatal(err)
		}
	}
	if s := state(t, m, id); s.State != sandbox.Suspended || s.SuspendedAt.IsZero() {
		t.Errorf("it is %s since %v", s.State, s.SuspendedAt)
	}
	if frozen, suspended := w.full.Box(id).Stopped(); !frozen || !suspended {
		t.Error("it is not stopped")
	}
	_, err := m.Agent(t.Context(), tenant, id)
	wantCode(t, err, sandbox.CodeConflict, "suspended")
	w.check(t)
	w.stop(t)
	w.full.Box(id).Write("x") // of no effect
	m = w.start(t)
	if s := state(t, m, id); s.State != sandbox.Suspended {
		t.Errorf("the next daemon has it %s", s.State)
	}
	for range 2 {
		if err := m.Unsuspend(t.Context(), tenant, id); err != nil {
			t.Fatal(err)
		}
	}
	if s := state(t, m, id); s.State != sandbox.Running || !s.SuspendedAt.IsZero() {
		t.Errorf("it is %s since %v", s.State, s.SuspendedAt)
	}
	wantMemory(t, w.full, id, "", "")
	w.check(t)
	if err := m.Suspend(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	wantCode(t, m.Suspend(t.Context(), tenant, id), sandbox.CodeConflict, "ended")
	w.check(t)
}

func TestHibernateAndWake(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full", Env: map[string]string{"A": "1"}}).ID
	token := state(t, m, id).Token
	for i := range 5 {
		value := strings.Repeat("x", i+1)
		write(t, w.full, id, value)
		if i == 3 { // also from suspended
			if err := m.Suspend(t.Context(), tenant, id); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Hibernate(t.Context(), tenant, id, ""); err != nil {
			t.Fatal(err)
		}
		w.rest(t)
		if s := state(t, m, id); s.State != sandbox.Hibernated || s.HibernatedAt.IsZero() || s.Link.NetNS != "" {
			t.Fatalf("it is %s since %v with %v", s.State, s.HibernatedAt, s.Link)
		}
		if w.full.Box(id) != nil {
			t.Fatal("it still runs")
		}
		w.check(t)
		if i == 2 { // the next daemon has it hibernated, also after a reboot
			w.stop(t)
			w.host.Set(func(h *managertest.Host) { h.Boot = "boot2" })
			m = w.start(t)
			w.check(t)
		}
		// Many come together, and it wakes once.
		var restores atomic.Int32
		w.full.OnRestore = func(context.Context, sandbox.Spec) error {
			restores.Add(1)
			time.Sleep(5 * time.Millisecond)
			return nil
		}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				a, err := m.Agent(t.Context(), tenant, id)
				if err != nil {
					t.Error(err)
					return
				}
				if err := a.WaitReady(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := restores.Load(); n != 1 {
			t.Errorf("it was restored %d times", n)
		}
		wantMemory(t, w.full, id, value, value)
		r := w.full.Box(id).Restores
		if len(r) != 1 || !r[0].Wake || r[0].AccessToken != token || r[0].SandboxID != string(id) {
			t.Errorf("its agent was told %+v", r)
		}
		w.check(t)
	}
	if err := m.Hibernate(t.Context(), tenant, id, ""); err != nil {
		t.Fatal(err)
	}
	if err := m.Kill(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	w.check(t)
}

// TestHibernatedLeaves: a hibernation is over when its capture is on record. Who
// needs the room that it gives waits until it does, and so does its wake.
func TestHibernatedLeaves(t *testing.T) {
	w := newWorld(t)
	w.net.Total = 1
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	write(t, w.full, id, "kept")
	leave := make(chan struct{})
	w.full.OnKill = func(ctx context.Context, _ sandbox.ID) error {
		select {
		case <-leave:
		case <-ctx.Done():
		}
		return ctx.Err()
	}
	if err := m.Hibernate(t.Context(), tenant, id, ""); err != nil {
		t.Fatal(err)
	}
	if s := state(t, m, id); s.State != sandbox.Hibernated {
		t.Errorf("it is %s", s.State)
	}
	if w.full.Box(id) == nil {
		t.Error("what ran of it has left already")
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := m.Create(short, tenant, manager.CreateRequest{Runtime: "fake"})
	wantCode(t, err, sandbox.CodeNoCapacity, "slots")
	short, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	wantCode(t, m.Suspend(short, tenant, id), sandbox.CodeTimeout)

	created := make(chan error, 1)
	var other sandbox.Sandbox
	go func() {
		var err error
		other, err = m.Create(t.Context(), tenant, manager.CreateRequest{Runtime: "fake"})
		created <- err
	}()
	select {
	case err := <-created:
		t.Fatalf("a create did not wait for the room: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	close(leave)
	if err := <-created; err != nil {
		t.Fatal(err)
	}
	w.rest(t)
	w.check(t)
	if err := m.Kill(t.Context(), tenant, other.ID); err != nil {
		t.Fatal(err)
	}
	if err := m.Wake(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	wantMemory(t, w.full, id, "kept", "kept")
	w.check(t)
}

// TestWakeThatFails: whatever a wake fails by, nothing of the sandbox is lost.
func TestWakeThatFails(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	write(t, w.full, id, "kept")
	if err := m.Hibernate(t.Context(), tenant, id, ""); err != nil {
		t.Fatal(err)
	}
	refused := func(code sandbox.Code, words ...string) {
		t.Helper()
		_, err := m.Agent(t.Context(), tenant, id)
		wantCode(t, err, code, words...)
		if s := state(t, m, id); s.State != sandbox.Hibernated {
			t.Fatalf("it is %s", s.State)
		}
		w.check(t)
	}
	w.full.OnRestore = func(context.Context, sandbox.Spec) error { return errors.New("no luck") }
	refused(sandbox.CodeInternal, "no luck", "stays hibernated")
	w.full.OnRestore = nil
	w.full.Version = "2"
	refused(sandbox.CodeUnsupported, `"1"`, `"2"`, "take it anew")
	w.full.Version = "1"
	w.host.Set(func(h *managertest.Host) { h.Mem.Available = 0 })
	refused(sandbox.CodeNoCapacity, "memory")
	w.host.Set(func(h *managertest.Host) { h.Mem.Available = 60 << 30 })

	images, err := filepath.Glob(filepath.Join(w.dir, "snapshots", "snp*", "data", "memory.img"))
	if err != nil || len(images) != 1 {
		t.Fatalf("%v, %v", images, err)
	}
	good, err := os.ReadFile(images[0])
	if err != nil {
		t.Fatal(err)
	}
	for what, bad := range map[string][]byte{
		"changed": append([]byte(" "), good[1:]...), "cut": good[:len(good)-3], "empty": nil,
	} {
		if err := os.WriteFile(images[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Log(what)
		refused(sandbox.CodeCorruptCapture, "memory.img", "stays hibernated")
	}
	if err := os.Remove(images[0]); err != nil {
		t.Fatal(err)
	}
	refused(sandbox.CodeCorruptCapture, "missing")
	if err := os.WriteFile(images[0], good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.Wake(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	wantMemory(t, w.full, id, "kept", "kept")
	w.check(t)
}

func TestHibernateThatFails(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	plain := create(t, m, manager.CreateRequest{Runtime: "fake"}).ID
	wantCode(t, m.Hibernate(t.Context(), tenant, plain, ""), sandbox.CodeUnsupported, "capture memory", "gvisor")
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{Runtime: "fake", OnTimeout: sandbox.OnTimeoutHibernate})
	wantCode(t, err, sandbox.CodeUnsupported, "hibernate")
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	w.full.OnCheckpoint = func(context.Context, sandbox.ID) error { return errors.New("no luck") }
	wantCode(t, m.Hibernate(t.Context(), tenant, id, ""), sandbox.CodeInternal, "no luck")
	write(t, w.full, id, "goes on")
	w.full.OnCheckpoint = nil
	wantMemory(t, w.full, id, "goes on", "goes on")
	if _, err := m.Agent(t.Context(), tenant, id); err != nil {
		t.Error(err)
	}
	w.check(t)
}

func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	ctx := t.Context()
	src := create(t, m, manager.CreateRequest{Runtime: "full", Env: map[string]string{"A": "1", "SECRET": "s"}, EphemeralEnv: []string{"SECRET"}}).ID
	write(t, w.full, src, "then")
	full, err := m.Snapshot(ctx, tenant, src, manager.SnapshotRequest{Name: "one", Metadata: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	if full.Kind != sandbox.SnapshotFull || full.Source != src || full.SizeBytes == 0 || full.RuntimeVersion != "1" {
		t.Errorf("%+v", full)
	}
	disk, err := m.Snapshot(ctx, tenant, src, manager.SnapshotRequest{Kind: sandbox.SnapshotDisk})
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.Snapshot(ctx, tenant, src, manager.SnapshotRequest{Name: "one"})
	wantCode(t, err, sandbox.CodeExists)
	for _, bad := range []string{"a/b", "..", " ", strings.Repeat("a", 129), disk.ID} {
		_, err = m.Snapshot(ctx, tenant, src, manager.SnapshotRequest{Name: bad})
		wantCode(t, err, sandbox.CodeInvalid)
	}
	write(t, w.full, src, "later")
	if err := m.Kill(ctx, tenant, src); err != nil {
		t.Fatal(err)
	}
	w.check(t)
	w.stop(t) // they outlive the source, and the daemon
	m = w.start(t)

	a := create(t, m, manager.CreateRequest{Snapshot: "one", Env: map[string]string{"B": "2"}})
	wantMemory(t, w.full, a.ID, "then", "then")
	if a.Snapshot != full.ID || a.Start != sandbox.StartRestore || a.Token == "" {
		t.Errorf("%+v", a)
	}
	r := w.full.Box(a.ID).Restores
	if len(r) != 1 || r[0].Wake || r[0].AccessToken != a.Token || r[0].Hostname != a.Hostname || len(r[0].DropEnv) != 1 ||
		r[0].EnvVars["A"] != "1" || r[0].EnvVars["B"] != "2" || r[0].EnvVars["SECRET"] != "" {
		t.Errorf("its agent was told %+v", r)
	}
	b := create(t, m, manager.CreateRequest{Snapshot: disk.ID})
	wantMemory(t, w.full, b.ID, "", "then")
	if b.Start != sandbox.StartCold {
		t.Errorf("%+v", b)
	}
	other := create(t, m, manager.CreateRequest{Snapshot: disk.ID, Runtime: "fake"}) // a disk is any runtime's
	if _, d := w.rt.Box(other.ID).Holds(); d != "then" {
		t.Errorf("its disk has %q", d)
	}
	_, err = m.Create(ctx, tenant, manager.CreateRequest{Snapshot: "one", Runtime: "fake"})
	wantCode(t, err, sandbox.CodeUnsupported, "memory")
	_, err = m.Create(ctx, tenant, manager.CreateRequest{Snapshot: "one", Template: "base"})
	wantCode(t, err, sandbox.CodeInvalid)
	_, err = m.Create(ctx, "other", manager.CreateRequest{Snapshot: full.ID})
	wantCode(t, err, sandbox.CodeNotFound)
	_, err = m.Snapshot(ctx, tenant, other.ID, manager.SnapshotRequest{Kind: sandbox.SnapshotFull})
	wantCode(t, err, sandbox.CodeUnsupported, "ask for kind disk, or use gvisor")

	// A snapshot of a sandbox of a snapshot stands on both.
	write(t, w.full, b.ID, "more")
	second, err := m.Snapshot(ctx, tenant, b.ID, manager.SnapshotRequest{Name: "two", Kind: sandbox.SnapshotDisk})
	if err != nil || second.Parent != disk.ID {
		t.Fatalf("%+v, %v", second, err)
	}
	c := create(t, m, manager.CreateRequest{Snapshot: "two"})
	wantMemory(t, w.full, c.ID, "", "more")

	page, next, err := m.Snapshots(ctx, tenant, manager.SnapshotFilter{Limit: 2})
	if err != nil || len(page) != 2 || next == "" {
		t.Fatalf("%v, %q, %v", page, next, err)
	}
	wantCode(t, m.RemoveSnapshot(ctx, tenant, "one"), sandbox.CodeConflict, string(a.ID))
	for _, id := range []sandbox.ID{a.ID, b.ID, other.ID, c.ID} {
		if err := m.Kill(ctx, tenant, id); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, m.RemoveSnapshot(ctx, tenant, disk.ID), sandbox.CodeConflict, second.ID)
	for _, name := range []string{"two", disk.ID, "one"} {
		if err := m.RemoveSnapshot(ctx, tenant, name); err != nil {
			t.Fatal(err)
		}
		_, err := m.SnapshotByName(ctx, tenant, name)
		wantCode(t, err, sandbox.CodeNotFound)
	}
	w.check(t)
	if left, _ := filepath.Glob(filepath.Join(w.dir, "snapshots", "snp*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestFork(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	ctx := t.Context()
	src := create(t, m, manager.CreateRequest{Runtime: "full", Env: map[string]string{"A": "1", "S": "s"}, EphemeralEnv: []string{"S"}, Metadata: map[string]string{"k": "v"}}).ID
	children := map[sandbox.ID]bool{}
	forkIn := func(want sandbox.State) {
		t.Helper()
		res, err := m.Fork(ctx, tenant, src, manager.ForkRequest{Count: 5, Env: map[string]string{"B": "2"}})
		if err != nil || len(res) != 5 {
			t.Fatalf("%v, %v", res, err)
		}
		for _, r := range res {
			if r.Err != nil {
				t.Fatal(r.Err)
			}
			s := r.Sandbox
			children[s.ID] = true
			wantMemory(t, w.full, s.ID, "held", "held")
			told := w.full.Box(s.ID).Restores
			if s.Parent != src || s.Metadata["k"] != "v" || len(told) != 1 || told[0].EnvVars["A"] != "1" || told[0].EnvVars["B"] != "2" || told[0].EnvVars["S"] != "" || told[0].Wake {
				t.Errorf("%+v was told %+v", s, told)
			}
		}
		if s := state(t, m, src); s.State != want {
			t.Errorf("the source is %s, not %s", s.State, want)
		}
		w.check(t)
	}
	write(t, w.full, src, "held")
	forkIn(sandbox.Running)
	wantMemory(t, w.full, src, "held", "held")
	if err := m.Suspend(ctx, tenant, src); err != nil {
		t.Fatal(err)
	}
	forkIn(sandbox.Suspended)
	if frozen, suspended := w.full.Box(src).Stopped(); !frozen || !suspended {
		t.Error("the fork woke the suspended source")
	}
	if err := m.Hibernate(ctx, tenant, src, ""); err != nil {
		t.Fatal(err)
	}
	forkIn(sandbox.Hibernated)
	if w.full.Box(src) != nil {
		t.Error("the fork woke the hibernated source")
	}
	if len(children) != 15 {
		t.Errorf("%d different children", len(children))
	}
	// Some fail, each for itself, and the source goes on.
	var n atomic.Int32
	w.full.OnRestore = func(_ context.Context, spec sandbox.Spec) error {
		if spec.ID != src && n.Add(1)%2 == 0 {
			return errors.New("no luck")
		}
		return nil
	}
	res, err := m.Fork(ctx, tenant, src, manager.ForkRequest{Count: 4})
	if err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, r := range res {
		if r.Err != nil {
			failed++
			continue
		}
		children[r.Sandbox.ID] = true
	}
	if failed != 2 {
		t.Errorf("%d of 4 failed, want 2", failed)
	}
	if err := m.Wake(ctx, tenant, src); err != nil {
		t.Fatal(err)
	}
	w.check(t)
	w.full.OnRestore = nil
	// A fork of a fork, and the tree of all.
	var child sandbox.ID
	for id := range children {
		child = id
	}
	res, err = m.Fork(ctx, tenant, child, manager.ForkRequest{Kind: sandbox.SnapshotDisk})
	if err != nil || res[0].Err != nil {
		t.Fatal(err, res)
	}
	grand := res[0].Sandbox.ID
	wantMemory(t, w.full, grand, "", "held")
	snap, err := m.Snapshot(ctx, tenant, grand, manager.SnapshotRequest{Name: "leaf"})
	if err != nil {
		t.Fatal(err)
	}
	tree, err := m.Tree(ctx, tenant, string(child))
	if err != nil || len(tree) != 3 || tree[0].ID != string(child) || tree[1].ID != string(grand) || tree[1].Parent != string(child) ||
		tree[2].ID != snap.ID || tree[2].Parent != string(grand) || tree[2].DiskBytes == 0 || tree[1].MemoryBytes == 0 {
		t.Errorf("%+v, %v", tree, err)
	}
	if all, err := m.Tree(ctx, tenant, ""); err != nil || len(all) != 1+len(children)+2 {
		t.Errorf("%d nodes, %v", len(all), err)
	}
	_, err = m.Tree(ctx, "other", string(child))
	wantCode(t, err, sandbox.CodeNotFound)
	// The hidden captures go with the last that needs them, across daemons too.
	w.stop(t)
	m = w.start(t)
	w.check(t)
	if err := m.RemoveSnapshot(ctx, tenant, "leaf"); err != nil {
		t.Fatal(err)
	}
	for _, id := range append([]sandbox.ID{src, grand}, keys(children)...) {
		if err := m.Kill(ctx, tenant, id); err != nil {
			t.Fatal(err)
		}
	}
	w.check(t)
	if left, _ := filepath.Glob(filepath.Join(w.dir, "snapshots", "snp*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// rest waits until nothing is under way.
func (w *world) rest(t *testing.T) {
	t.Helper()
	eventually(t, "nothing is under way", func() bool {
		all, err := w.store.Unfinished(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		slots := len(w.full.Ready())
		for _, r := range all {
			if r.Op != "" {
				return false
			}
			if r.State != sandbox.Hibernated {
				slots++ // a wake that fails has one for a while, and nothing on record
			}
		}
		c := w.m.Capacity(context.Background())
		return c.Sandboxes == len(all) && c.CreatesInFlight == 0 && len(c.Spares) == len(w.full.Ready()) && len(w.net.Holders()) == slots
	})
}

func keys(m map[sandbox.ID]bool) []sandbox.ID {
	var all []sandbox.ID
	for id := range m {
		all = append(all, id)
	}
	return all
}

// TestFrozenSourceIsThawed: a daemon that ended in the middle of a capture
// leaves a sandbox stopped, and the next one lets it go on.
func TestFrozenSourceIsThawed(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full"}).ID
	w.stop(t)
	w.full.Box(id).Freeze()
	w.start(t)
	write(t, w.full, id, "goes on")
	w.check(t)
}

func TestHibernateAtTimeout(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full", Timeout: time.Minute, OnTimeout: sandbox.OnTimeoutHibernate}).ID
	for range 3 {
		write(t, w.full, id, "kept")
		w.clock.Advance(61 * time.Second)
		eventually(t, "it hibernates", func() bool { return state(t, m, id).State == sandbox.Hibernated })
		w.clock.Advance(time.Hour) // its time does not go on
		if err := m.Wake(t.Context(), tenant, id); err != nil {
			t.Fatal(err)
		}
		wantMemory(t, w.full, id, "kept", "kept")
		if s := state(t, m, id); !s.ExpiresAt.Equal(w.clock.Now().Add(time.Minute).Round(0)) {
			t.Errorf("it expires at %v, now is %v", s.ExpiresAt, w.clock.Now())
		}
	}
	// One that is to be killed is, also while it hibernates.
	killed := create(t, m, manager.CreateRequest{Runtime: "full", Timeout: time.Second}).ID
	if err := m.Hibernate(t.Context(), tenant, killed, ""); err != nil {
		t.Fatal(err)
	}
	w.clock.Advance(2 * time.Second)
	if s := w.waitEnded(t, killed); s.Reason != sandbox.ReasonTimeout {
		t.Errorf("it ended for %s", s.Reason)
	}
	w.rest(t)
	w.check(t)
}

func TestIdle(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	id := create(t, m, manager.CreateRequest{Runtime: "full", IdleTimeout: time.Minute}).ID
	release, err := m.Use(t.Context(), tenant, id)
	if err != nil {
		t.Fatal(err)
	}
	w.clock.Advance(time.Hour)
	w.clock.Advance(time.Hour)
	time.Sleep(20 * time.Millisecond)
	if s := state(t, m, id); s.State != sandbox.Running {
		t.Fatalf("in use it is %s", s.State)
	}
	release()
	release() // of no effect
	w.clock.Advance(59 * time.Second)
	time.Sleep(20 * time.Millisecond)
	if s := state(t, m, id); s.State != sandbox.Running {
		t.Fatalf("after 59 s it is %s", s.State)
	}
	w.clock.Advance(2 * time.Second)
	eventually(t, "it hibernates", func() bool { return state(t, m, id).State == sandbox.Hibernated })
	w.rest(t)
	w.check(t)
	if release, err = m.Use(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	release()
	w.clock.Advance(61 * time.Second)
	eventually(t, "it hibernates again", func() bool { return state(t, m, id).State == sandbox.Hibernated })
	w.rest(t)
	w.check(t)
}
