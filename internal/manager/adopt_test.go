package manager_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/manager/managertest"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

func TestAdoption(t *testing.T) {
	for _, tc := range []struct {
		name   string
		damage func(t *testing.T, w *world, id sandbox.ID)
		reason sandbox.Reason // "" is adopted
	}{
		{"runs on", func(*testing.T, *world, sandbox.ID) {}, ""},
		{"gone", func(t *testing.T, w *world, id sandbox.ID) { w.rt.Clean(t.Context(), id) }, sandbox.ReasonRuntimeCrashed},
		{"dead", func(t *testing.T, w *world, id sandbox.ID) { w.rt.Box(id).Crash(sandbox.ReasonOOM, "") }, sandbox.ReasonRuntimeCrashed},
		{"host restarted", func(t *testing.T, w *world, id sandbox.ID) {
			w.rt.Clean(t.Context(), id)
			w.host.Set(func(h *managertest.Host) { h.Boot = "boot2" })
		}, sandbox.ReasonHostRestarted},
		{"was being made", func(t *testing.T, w *world, id sandbox.ID) {
			w.edit(t, id, func(r *store.Record) { r.State, r.Op = sandbox.Creating, store.OpCreate })
		}, sandbox.ReasonInterrupted},
		{"was being made, nothing there yet", func(t *testing.T, w *world, id sandbox.ID) {
			w.edit(t, id, func(r *store.Record) {
				r.State, r.Op, r.Link = sandbox.Creating, store.OpCreate, sandbox.Link{}
			})
			w.rt.Clean(t.Context(), id)
			os.RemoveAll(filepath.Join(w.dir, "sandboxes", string(id)))
		}, sandbox.ReasonInterrupted},
		{"was being ended", func(t *testing.T, w *world, id sandbox.ID) {
			w.edit(t, id, func(r *store.Record) { r.Op, r.EndReason = store.OpEnd, sandbox.ReasonKilledByUser })
		}, sandbox.ReasonKilledByUser},
		{"was being ended, gone already", func(t *testing.T, w *world, id sandbox.ID) {
			w.edit(t, id, func(r *store.Record) { r.Op, r.EndReason = store.OpEnd, sandbox.ReasonTimeout })
			w.rt.Clean(t.Context(), id)
			os.RemoveAll(filepath.Join(w.dir, "sandboxes", string(id)))
		}, sandbox.ReasonTimeout},
		{"network lost", func(t *testing.T, w *world, id sandbox.ID) {
			w.net.OnAdopt = func(sandbox.ID) error { return errors.New("no such link") }
		}, sandbox.ReasonPolicy},
		{"build step", func(t *testing.T, w *world, id sandbox.ID) {
			w.edit(t, id, func(r *store.Record) { r.Internal = true })
		}, sandbox.ReasonInterrupted},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			s := create(t, w.start(t), manager.CreateRequest{Env: map[string]string{"A": "b"}})
			w.stop(t)
			tc.damage(t, w, s.ID)
			w.rt.Plant(sandbox.Spec{ID: "sbxorphan"})
			w.net.Acquire(t.Context(), "sbxorphan", sandbox.NetworkPolicy{})
			os.MkdirAll(filepath.Join(w.dir, "sandboxes", "sbxorphan", "x"), 0o700)
			os.WriteFile(filepath.Join(w.dir, "tmp", "half"), nil, 0o600)

			m := w.start(t)
			got, err := m.Get(t.Context(), tenant, s.ID)
			if tc.reason == "" {
				if err != nil || got.State != sandbox.Running || got.Token != s.Token || got.Env["A"] != "b" || got.Link != s.Link {
					t.Errorf("it was adopted as %+v, %v", got, err)
				}
				if a, err := m.Agent(t.Context(), tenant, s.ID); err != nil || a.WaitReady(t.Context()) != nil {
					t.Errorf("its agent cannot be reached: %v", err)
				}
				if n := len(w.rt.Box(s.ID).Inits); n != 1 {
					t.Errorf("its agent was told who it is %d times", n)
				}
			} else if got.State != tc.reason.FinalState() || got.Reason != tc.reason {
				t.Errorf("it is %s, %s (%s), want %s", got.State, got.Reason, got.Detail, tc.reason)
			}
			if _, err := os.Stat(filepath.Join(w.dir, "tmp", "half")); err == nil {
				t.Error("tmp was not emptied")
			}
			if w.rt.Box("sbxorphan") != nil {
				t.Error("the orphan is still there")
			}
			if tc.name == "build step" {
				w.checkEvents(t)
				return // its events are not told
			}
			w.check(t)
		})
	}
}

// edit changes a record as a crash in the middle of something would have left
// it. The events of what did not happen stay: only the record counts.
func (w *world) edit(t *testing.T, id sandbox.ID, f func(*store.Record)) {
	t.Helper()
	r, err := w.store.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	was := r.State
	f(&r)
	var evs []sandbox.Event
	if r.State != was {
		// Keep the log legal for checkEvents: forget the old life.
		if _, err := w.store.Maintain(t.Context(), store.Retention{Ended: 1000, Events: 0}); err != nil {
			t.Fatal(err)
		}
		evs = append(evs, sandbox.Event{Sandbox: id, Tenant: r.Tenant, Type: sandbox.EventState, To: r.State, At: time.Now()})
	}
	if _, err := w.store.Store.Update(t.Context(), r, evs...); err != nil {
		t.Fatal(err)
	}
}

func TestStartFailsWhole(t *testing.T) {
	w := newWorld(t)
	s := create(t, w.start(t), manager.CreateRequest{})
	w.stop(t)
	m, err := manager.New(manager.Config{
		StateDir: w.dir, Store: w.store, Runtimes: []sandbox.Runtime{w.rt, w.other}, Network: w.net, Templates: w.tpl, Clock: w.clock, Host: w.host,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Start(ctx); err == nil {
		t.Error("started with a context that is done")
	}
	_, err = m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeUnavailable)
	m.Close(t.Context())
	m = w.start(t)
	if s, err := m.Get(t.Context(), tenant, s.ID); err != nil || s.State != sandbox.Running {
		t.Errorf("it is %s (%s), %v", s.State, s.Reason, err)
	}
	w.check(t)
}

func TestWhatWillNotGoKeepsNobodyFromBeingServed(t *testing.T) {
	w := newWorld(t)
	w.rt.Plant(sandbox.Spec{ID: "sbxorphan"})
	var tries atomic.Int32
	w.rt.OnKill = func(context.Context, sandbox.ID) error {
		if tries.Add(1) == 1 {
			return errors.New("busy")
		}
		return nil
	}
	m := w.start(t)
	if w.rt.Box("sbxorphan") == nil {
		t.Fatal("the orphan is gone already")
	}
	create(t, m, manager.CreateRequest{})
	eventually(t, "the orphan is gone", func() bool { return w.rt.Box("sbxorphan") == nil })
	w.check(t)
}
