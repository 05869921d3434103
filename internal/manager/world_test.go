package manager_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/manager/managertest"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const tenant = "default"

// world is a host in memory with a state directory, on which one Manager after
// another runs.
type world struct {
	dir   string
	store *faultyStore
	rt    *managertest.Runtime
	other *managertest.Runtime
	full  *managertest.MemoryRuntime
	net   *managertest.Network
	tpl   *managertest.Templates
	clock *managertest.Clock
	host  *managertest.Host
	tune  func(*manager.Config)

	m *manager.Manager
}

// faultyStore fails updates by choice.
type faultyStore struct {
	store.Store
	onUpdate func(r store.Record) error
}

func (s *faultyStore) Update(ctx context.Context, r store.Record, events ...sandbox.Event) (store.Record, error) {
	if s.onUpdate != nil {
		if err := s.onUpdate(r); err != nil {
			return r, err
		}
	}
	return s.Store.Update(ctx, r, events...)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{
		dir: t.TempDir(), rt: managertest.NewRuntime("fake"), other: managertest.NewRuntime("other"), full: managertest.NewMemoryRuntime("full"), net: managertest.NewNetwork(1000),
		tpl: managertest.NewTemplates(), clock: managertest.NewClock(time.Now()), host: managertest.NewHost(),
	}
	s, err := store.OpenSQLite(t.Context(), filepath.Join(w.dir, "warren.db"), store.Options{Ballast: -1})
	if err != nil {
		t.Fatal(err)
	}
	w.store = &faultyStore{Store: s}
	t.Cleanup(func() {
		w.stop(t)
		for _, rt := range []*managertest.Runtime{w.rt, w.other, w.full.Runtime} {
			rt.OnKill = nil
			ids, _ := rt.List(context.Background())
			for _, id := range ids {
				rt.Clean(context.Background(), id)
			}
		}
		s.Close()
	})
	return w
}

// start runs a Manager on w; an earlier one must have been stopped.
func (w *world) start(t *testing.T) *manager.Manager {
	t.Helper()
	cfg := manager.Config{
		StateDir: w.dir, Store: w.store, Runtimes: []sandbox.Runtime{w.rt, w.other, w.full}, Planned: []string{"isolate"},
		Network: w.net, Templates: w.tpl, Clock: w.clock, Host: w.host,
	}
	if w.tune != nil {
		w.tune(&cfg)
	}
	m, err := manager.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w.m = m
	if err := m.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// stop closes the Manager, as at the end of a daemon.
func (w *world) stop(t *testing.T) {
	t.Helper()
	if w.m == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := w.m.Close(ctx); err != nil {
		t.Error(err)
	}
	w.m = nil
}

// check compares what the host holds with the live sandboxes on record, once
// what was hibernated has left.
func (w *world) check(t *testing.T) {
	t.Helper()
	if w.m != nil {
		w.rest(t)
	}
	recs, _, err := w.store.List(context.Background(), store.Filter{Internal: true})
	if err != nil {
		t.Fatal(err)
	}
	live := map[sandbox.ID]store.Record{} // not ended
	running := map[sandbox.ID]store.Record{}
	needed := map[string]bool{} // captures
	for _, r := range recs {
		switch {
		case r.State.Ended():
			if r.Reason == "" || r.EndedAt.IsZero() || r.Reason.FinalState() != r.State {
				t.Errorf("%s ended as %s for reason %q at %v", r.ID, r.State, r.Reason, r.EndedAt)
			}
			if r.Token != "" || r.TrafficToken != "" || len(r.Env) > 0 {
				t.Errorf("%s keeps its secrets after its end", r.ID)
			}
			if r.Op != store.OpNone {
				t.Errorf("%s has ended and still has the intent %q", r.ID, r.Op)
			}
		case (r.State == sandbox.Running || r.State == sandbox.Suspended) && r.Op == store.OpNone:
			live[r.ID], running[r.HostID()] = r, r
			frozen, suspended := false, false
			if box := w.box(r.HostID()); box != nil {
				frozen, suspended = box.Stopped()
			}
			if stopped := r.State == sandbox.Suspended; suspended != stopped || frozen != (stopped && r.Runtime == "full") {
				t.Errorf("%s is %s, and stopped by its agent: %v, by its runtime: %v", r.ID, r.State, frozen, suspended)
			}
		case r.State == sandbox.Hibernated && r.Op == store.OpNone:
			live[r.ID] = r
			if r.Capture == "" || r.HibernatedAt.IsZero() {
				t.Errorf("%s is hibernated at %v in %q", r.ID, r.HibernatedAt, r.Capture)
			}
		default:
			t.Errorf("%s is left %s with the intent %q", r.ID, r.State, r.Op)
		}
	}
	held := map[sandbox.ID]bool{}
	var spares []sandbox.ID
	if w.m != nil {
		spares = w.full.Ready()
		if n := len(w.m.Capacity(context.Background()).Spares); n != len(spares) {
			t.Errorf("capacity tells %d spares, there are %v", n, spares)
		}
	}
	for _, rt := range []*managertest.Runtime{w.rt, w.other, w.full.Runtime} {
		ids, _ := rt.List(context.Background())
		for _, id := range ids {
			held[id] = true
			if slices.Contains(spares, id) {
				continue
			}
			if running[id].Runtime != rt.Name() {
				t.Errorf("runtime %s holds %s, which is not live there", rt.Name(), id)
			}
		}
	}
	slots := w.net.Holders()
	if len(slots) != len(running)+len(spares) {
		t.Errorf("%d slots for %d running sandboxes and %d spares", len(slots), len(running), len(spares))
	}
	snaps, _, err := w.store.ListSnapshots(context.Background(), store.SnapshotFilter{Hidden: true})
	if err != nil {
		t.Fatal(err)
	}
	layers := func(all []string) {
		for _, l := range all {
			if rel, ok := strings.CutPrefix(l, filepath.Join(w.dir, "snapshots")+"/"); ok {
				needed[filepath.Dir(rel)] = true
			}
		}
	}
	pools, err := w.store.ListPools(context.Background(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pools {
		needed[p.Capture] = true
	}
	for _, r := range live {
		needed[r.Snapshot], needed[r.Capture] = true, true
		layers(r.Layers)
	}
	for _, n := range snaps {
		if !n.Hidden {
			needed[n.ID] = true
			layers(n.Layers)
		}
	}
	for _, n := range snaps { // those below hidden ones that are needed
		if needed[n.ID] {
			layers(n.Layers)
		}
	}
	for _, n := range snaps {
		if !needed[n.ID] {
			t.Errorf("nothing needs the capture %s of %s", n.ID, n.Source)
		}
	}
	if dirs, _ := filepath.Glob(filepath.Join(w.dir, "snapshots", "snp*")); len(dirs) != len(snaps) {
		t.Errorf("%d directories for %d captures", len(dirs), len(snaps))
	}
	if half, _ := filepath.Glob(filepath.Join(w.dir, "snapshots", "tmp", "*")); len(half) > 0 {
		t.Errorf("left of captures: %v", half)
	}
	holds := w.tpl.Holders()
	if len(holds) != len(live)+len(snaps)+len(spares) {
		t.Errorf("%d template holds for %d live sandboxes, %d captures and %d spares", len(holds), len(live), len(snaps), len(spares))
	}
	dirs, err := os.ReadDir(filepath.Join(w.dir, "sandboxes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, d := range dirs {
		names[d.Name()] = true
	}
	for _, id := range spares {
		if !names[string(id)] {
			t.Errorf("the spare %s has no directory", id)
		}
		delete(names, string(id))
	}
	for _, r := range live {
		if !names[string(r.HostID())] {
			t.Errorf("%s has no directory", r.ID)
		}
		delete(names, string(r.HostID()))
		delete(names, string(r.ID)) // of its console, where it had another one
	}
	if len(names) > 0 {
		t.Errorf("directories of no sandbox: %v", names)
	}
	for id, r := range running {
		if !held[id] {
			t.Errorf("no runtime holds %s", id)
		}
		if slots[r.Link.Slot] != id {
			t.Errorf("slot %d is %q's, not %s's", r.Link.Slot, slots[r.Link.Slot], id)
		}
	}
	if w.m != nil {
		c := w.m.Capacity(context.Background())
		memory := int64(len(spares)) * 8 << 20
		for _, r := range running {
			memory += int64(r.Resources.MemoryMiB+8) << 20
		}
		if c.Sandboxes != len(live) || c.MemoryPromised != memory || c.CreatesInFlight != 0 {
			t.Errorf("capacity tells %d sandboxes, %d bytes, %d creates; want %d, %d, 0", c.Sandboxes, c.MemoryPromised, c.CreatesInFlight, len(live), memory)
		}
	}
	w.checkEvents(t)
}

// at is where the host has what runs of a sandbox.
func (w *world) at(id sandbox.ID) sandbox.ID {
	r, err := w.store.Get(context.Background(), id)
	if err != nil {
		return id
	}
	return r.HostID()
}

// box finds a sandbox on the host; nil where it is not there.
func (w *world) box(id sandbox.ID) *managertest.Box {
	for _, rt := range []*managertest.Runtime{w.rt, w.other, w.full.Runtime} {
		if b := rt.Box(id); b != nil {
			return b
		}
	}
	return nil
}

// checkEvents checks that every sandbox's events are a legal life.
func (w *world) checkEvents(t *testing.T) {
	t.Helper()
	evs, err := w.store.EventsAfter(context.Background(), "", 0, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	at := map[sandbox.ID]sandbox.State{}
	for _, e := range evs {
		if e.Type != sandbox.EventState {
			continue
		}
		if e.From != at[e.Sandbox] {
			t.Errorf("event %d: %s goes from %q, but was %q", e.Seq, e.Sandbox, e.From, at[e.Sandbox])
		}
		if e.From != "" && !e.From.CanBecome(e.To) {
			t.Errorf("event %d: %s goes from %s to %s", e.Seq, e.Sandbox, e.From, e.To)
		}
		if e.To.Ended() != (e.Reason != "") {
			t.Errorf("event %d: %s to %s with reason %q", e.Seq, e.Sandbox, e.To, e.Reason)
		}
		at[e.Sandbox] = e.To
	}
}

func create(t *testing.T, m *manager.Manager, r manager.CreateRequest) sandbox.Sandbox {
	t.Helper()
	s, err := m.Create(t.Context(), tenant, r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantCode(t *testing.T, err error, code sandbox.Code, words ...string) {
	t.Helper()
	if sandbox.CodeOf(err) != code {
		t.Fatalf("error is %v (%q), want %s", err, sandbox.CodeOf(err), code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not tell of %q", err, w)
		}
	}
}

// eventually waits until f holds.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("it never came to be that %s", what)
}

func (w *world) waitEnded(t *testing.T, id sandbox.ID) sandbox.Sandbox {
	t.Helper()
	var s sandbox.Sandbox
	eventually(t, string(id)+" has ended", func() bool {
		s, _ = w.m.Get(context.Background(), tenant, id)
		all, err := w.store.Unfinished(context.Background())
		return s.State.Ended() && err == nil && w.m.Capacity(context.Background()).Sandboxes == len(all) // it is let go of, too
	})
	return s
}
