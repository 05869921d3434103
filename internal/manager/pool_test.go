package manager_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/manager/managertest"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

func setPool(t *testing.T, m *manager.Manager, r manager.PoolRequest) manager.Pool {
	t.Helper()
	p, err := m.SetPool(t.Context(), tenant, r)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// waitPool waits until the pool has so many members and is at rest.
func (w *world) waitPool(t *testing.T, id string, ready int) (p manager.Pool) {
	t.Helper()
	eventually(t, "the pool is at rest", func() bool {
		var err error
		if p, err = w.m.PoolByName(context.Background(), tenant, id); err != nil {
			t.Fatal(err)
		}
		return len(p.Members) == ready && p.Making+p.Ending == 0
	})
	return p
}

func TestPoolIsClaimed(t *testing.T) {
	for _, runtime := range []string{"fake", "full"} {
		t.Run(runtime, func(t *testing.T) {
			w := newWorld(t)
			m := w.start(t)
			p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Template: "base", Runtime: runtime, Ready: 3}).ID, 3)
			if p.TemplateID != "tplbase" || p.LastError != nil || (p.Capture != nil) != (runtime == "full") {
				t.Errorf("%+v", p)
			}
			w.check(t)
			wantHidden(t, m, p.Members...)
			first, _ := w.store.EventsAfter(t.Context(), "", 0, 1000)
			if len(first) != 0 {
				t.Errorf("members had events: %v", first)
			}
			tokens := map[string]bool{}
			for i := range 5 { // more than there were at once
				w.waitPool(t, p.ID, 3)
				s := create(t, m, manager.CreateRequest{
					Runtime: runtime, Env: map[string]string{"A": "1", "S": "x"}, EphemeralEnv: []string{"S"}, Metadata: map[string]string{"k": "v"},
					User: "bob", Workdir: "/w", Timeout: time.Hour, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}, PublicTraffic: true,
				})
				if s.Start != sandbox.StartPool || s.State != sandbox.Running || s.Metadata["k"] != "v" || s.User != "bob" || s.Workdir != "/w" ||
					!s.ExpiresAt.Equal(s.StartedAt.Add(time.Hour)) || s.Network.Mode != sandbox.NetworkNone || !s.PublicTraffic || s.Hostname != string(s.ID) {
					t.Errorf("%d: %+v", i, s)
				}
				if i == 0 && !slices.Contains(p.Members, s.ID) {
					t.Errorf("%s was no member of %v", s.ID, p.Members)
				}
				if tokens[s.Token] || tokens[s.TrafficToken] || s.Token == "" || s.TrafficToken == "" {
					t.Errorf("%d: its tokens are not its own", i)
				}
				tokens[s.Token], tokens[s.TrafficToken] = true, true
				if w.net.Policy(s.Link.Slot).Mode != sandbox.NetworkNone {
					t.Errorf("its slot has the policy %+v", w.net.Policy(s.Link.Slot))
				}
				inits := w.box(s.ID).Inits
				last := inits[len(inits)-1]
				if last.AccessToken != s.Token || last.EnvVars["A"] != "1" || last.EnvVars["LANG"] != "C" || last.DefaultUser != "bob" ||
					last.DefaultWorkdir != "/w" || last.SandboxID != string(s.ID) || w.box(s.ID).Spec.Hostname != string(s.ID) {
					t.Errorf("its agent was told %+v", last)
				}
				if got := state(t, m, s.ID); got.Start != sandbox.StartPool {
					t.Errorf("%+v", got)
				}
				if rec, err := w.store.Get(t.Context(), s.ID); err != nil || rec.Pool != "" || rec.Internal || rec.Op != "" || rec.Lifetime != time.Hour || !slices.Equal(rec.EphemeralEnv, []string{"S"}) {
					t.Errorf("its record is %+v, %v", rec, err)
				}
				if _, err := m.Agent(t.Context(), tenant, s.ID); err != nil {
					t.Error(err)
				}
			}
			w.waitPool(t, p.ID, 3)
			w.check(t)
			for _, r := range []manager.CreateRequest{
				{Runtime: "other"}, {Runtime: runtime, Resources: sandbox.Resources{MemoryMiB: 600}},
			} {
				if s := create(t, m, r); s.Start != sandbox.StartCold {
					t.Errorf("%+v started by %s", r, s.Start)
				}
			}
			if s := create(t, m, manager.CreateRequest{Runtime: runtime, Hostname: "named"}); s.Hostname != "named" || s.Start == sandbox.StartPool || w.box(s.ID).Spec.Hostname != "named" {
				t.Errorf("%+v", s)
			}
			if err := m.RemovePool(t.Context(), tenant, p.ID); err != nil {
				t.Fatal(err)
			}
			w.check(t)
			if s := create(t, m, manager.CreateRequest{Runtime: runtime}); s.Start != sandbox.StartCold {
				t.Errorf("without a pool it started by %s", s.Start)
			}
		})
	}
}

// wantHidden checks that a tenant comes to none of ids in any way.
func wantHidden(t *testing.T, m *manager.Manager, ids ...sandbox.ID) {
	t.Helper()
	page, _, err := m.List(t.Context(), tenant, manager.ListFilter{States: sandbox.States()})
	if err != nil || len(page) != 0 {
		t.Errorf("listed are %v, %v", page, err)
	}
	if nodes, err := m.Tree(t.Context(), tenant, ""); err != nil || len(nodes) != 0 {
		t.Errorf("the tree has %v, %v", nodes, err)
	}
	if found, ok := m.ByToken(func(string) bool { return true }); ok {
		t.Errorf("a token leads to %s", found.ID)
	}
	for _, id := range ids {
		ctx := t.Context()
		_, get := m.Get(ctx, tenant, id)
		_, lookup := m.Lookup(ctx, id)
		_, agent := m.Agent(ctx, tenant, id)
		_, use := m.Use(ctx, tenant, id)
		_, stats := m.Stats(ctx, tenant, id)
		_, fork := m.Fork(ctx, tenant, id, manager.ForkRequest{})
		_, snap := m.Snapshot(ctx, tenant, id, manager.SnapshotRequest{})
		_, ttl := m.SetTimeout(ctx, tenant, id, time.Second)
		_, logs := m.Logs(ctx, tenant, id, false)
		_, dial := m.Dial(ctx, tenant, id, sandbox.AgentPort)
		for what, err := range map[string]error{
			"get": get, "lookup": lookup, "agent": agent, "use": use, "stats": stats, "fork": fork, "snapshot": snap, "timeout": ttl, "logs": logs, "dial": dial,
			"kill": m.Kill(ctx, tenant, id), "suspend": m.Suspend(ctx, tenant, id), "hibernate": m.Hibernate(ctx, tenant, id, ""), "wake": m.Wake(ctx, tenant, id),
			"network": m.SetNetwork(ctx, tenant, id, sandbox.NetworkPolicy{}),
		} {
			if sandbox.CodeOf(err) != sandbox.CodeNotFound {
				t.Errorf("%s of a member: %v", what, err)
			}
		}
	}
}

func TestPoolRefusals(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	for _, tc := range []struct {
		r    manager.PoolRequest
		code sandbox.Code
	}{
		{manager.PoolRequest{Template: "base", Ready: -1}, sandbox.CodeInvalid},
		{manager.PoolRequest{Template: "base", Ready: 1001}, sandbox.CodeInvalid},
		{manager.PoolRequest{Template: "nothing", Ready: 1}, sandbox.CodeNotFound},
		{manager.PoolRequest{Runtime: "nothing", Ready: 1}, sandbox.CodeNotFound},
		{manager.PoolRequest{Runtime: "isolate", Ready: 1}, sandbox.CodeUnsupported},
		{manager.PoolRequest{Resources: sandbox.Resources{MemoryMiB: 1}, Ready: 1}, sandbox.CodeInvalid},
	} {
		_, err := m.SetPool(t.Context(), tenant, tc.r)
		wantCode(t, err, tc.code)
	}
	_, err := m.PoolByName(t.Context(), tenant, "base")
	wantCode(t, err, sandbox.CodeNotFound)
	wantCode(t, m.RemovePool(t.Context(), tenant, "base"), sandbox.CodeNotFound)
	a := setPool(t, m, manager.PoolRequest{Runtime: "fake", Ready: 1})
	if again := setPool(t, m, manager.PoolRequest{Template: "base", Runtime: "fake", Ready: 2}); again.ID != a.ID || again.Ready != 2 || !again.CreatedAt.Equal(a.CreatedAt) {
		t.Errorf("%+v became %+v", a, again)
	}
	if p, err := m.PoolByName(t.Context(), tenant, "base"); err != nil || p.ID != a.ID {
		t.Errorf("%+v, %v", p, err)
	}
	b := setPool(t, m, manager.PoolRequest{Runtime: "fake", Resources: sandbox.Resources{MemoryMiB: 100}})
	_, err = m.PoolByName(t.Context(), tenant, "base")
	wantCode(t, err, sandbox.CodeConflict, a.ID, b.ID)
	_, err = m.PoolByName(t.Context(), "rival", a.ID)
	wantCode(t, err, sandbox.CodeNotFound)
	wantCode(t, m.RemovePool(t.Context(), "rival", a.ID), sandbox.CodeNotFound)
	if all, err := m.Pools(t.Context(), "rival"); err != nil || len(all) != 0 {
		t.Errorf("%v, %v", all, err)
	}
	w.waitPool(t, a.ID, 2)
	if s, err := m.Create(t.Context(), "rival", manager.CreateRequest{Runtime: "fake"}); err != nil || s.Start != sandbox.StartCold {
		t.Errorf("another tenant's create started by %s, %v", s.Start, err)
	}
}

// TestPoolFallsBack: a member, then a restore from the warm capture, then a
// boot, and a capture that is of no use is taken anew.
func TestPoolFallsBack(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	p := setPool(t, m, manager.PoolRequest{Runtime: "full", Ready: 1})
	w.waitPool(t, p.ID, 1)
	hold := make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	defer release()
	var mu sync.Mutex
	refuse := false
	w.full.OnRestore = func(ctx context.Context, spec sandbox.Spec) error {
		rec, err := w.store.Get(context.Background(), spec.ID)
		if err == nil && rec.Pool != "" { // no member while we look
			select {
			case <-hold:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		mu.Lock()
		defer mu.Unlock()
		if refuse {
			return errors.New("the capture is no good")
		}
		return nil
	}
	var got []sandbox.StartKind
	for i := range 3 {
		if i == 2 {
			mu.Lock()
			refuse = true
			mu.Unlock()
		}
		s := create(t, m, manager.CreateRequest{Runtime: "full", Env: map[string]string{"A": "1"}})
		got = append(got, s.Start)
		if s.Hostname != string(s.ID) {
			t.Errorf("%+v", s)
		}
	}
	if want := []sandbox.StartKind{sandbox.StartPool, sandbox.StartRestore, sandbox.StartCold}; !slices.Equal(got, want) {
		t.Errorf("they started by %v, want %v", got, want)
	}
	old := w.waitAnyCapture(t, p.ID)
	release() // a member's restore fails now, too: the capture is taken anew
	eventually(t, "the capture is another", func() bool {
		q, err := m.PoolByName(t.Context(), tenant, p.ID)
		return err == nil && q.Capture != nil && q.Capture.ID != old && len(q.Members) == 1
	})
	mu.Lock()
	refuse = false
	mu.Unlock()
	w.waitPool(t, p.ID, 1)
	w.check(t)
}

func (w *world) waitAnyCapture(t *testing.T, id string) string {
	t.Helper()
	p, err := w.m.PoolByName(t.Context(), tenant, id)
	if err != nil || p.Capture == nil {
		t.Fatalf("%+v, %v", p, err)
	}
	return p.Capture.ID
}

func TestPoolWithoutCapture(t *testing.T) {
	w := newWorld(t)
	w.full.OnCheckpoint = func(context.Context, sandbox.ID) error { return errors.New("it cannot be captured") }
	m := w.start(t)
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "full", Ready: 3}).ID, 3)
	if p.Capture != nil || p.LastError != nil {
		t.Errorf("%+v", p)
	}
	w.check(t)
}

func TestPoolMembersThatDie(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "fake", Ready: 3}).ID, 3)
	dead := p.Members[0]
	w.rt.Box(dead).Crash(sandbox.ReasonRuntimeCrashed, "of old age")
	eventually(t, "another is made", func() bool {
		q := w.waitPool(t, p.ID, 3)
		return !slices.Contains(q.Members, dead)
	})
	w.check(t)

	// One whose record cannot be changed any more is ended, and the next taken.
	p = w.waitPool(t, p.ID, 3)
	bad := p.Members[0]
	w.store.onUpdate = func(r store.Record) error {
		if r.ID == bad && r.Pool == "" {
			return sandbox.Errorf(sandbox.CodeInternal, "no luck")
		}
		return nil
	}
	if s := create(t, m, manager.CreateRequest{Runtime: "fake"}); s.Start != sandbox.StartPool || s.ID != p.Members[1] {
		t.Errorf("%s of %v was claimed, by %s", s.ID, p.Members, s.Start)
	}
	wantHiddenOne(t, m, bad)
	w.waitPool(t, p.ID, 3)
	eventually(t, "the bad one has ended", func() bool {
		rec, err := w.store.Get(t.Context(), bad)
		return err == nil && rec.State.Ended()
	})
	w.check(t)
}

func wantHiddenOne(t *testing.T, m *manager.Manager, id sandbox.ID) {
	t.Helper()
	if _, err := m.Get(t.Context(), tenant, id); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("a member that was not claimed to the end is seen: %v", err)
	}
}

func TestPoolClaimsAtOnce(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	const n = 30
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "full", Ready: n}).ID, n)
	var all sync.WaitGroup
	got, errs := make([]sandbox.Sandbox, n), make([]error, n)
	for i := range n {
		all.Go(func() {
			got[i], errs[i] = m.Create(context.Background(), tenant, manager.CreateRequest{Runtime: "full"})
		})
	}
	all.Wait()
	seen := map[sandbox.ID]bool{}
	for i, s := range got {
		if errs[i] != nil || s.Start != sandbox.StartPool || seen[s.ID] {
			t.Errorf("%d: %s by %q, %v", i, s.ID, s.Start, errs[i])
		}
		seen[s.ID] = true
	}
	w.waitPool(t, p.ID, n)
	w.check(t)
}

func TestPoolSurvivesTheDaemon(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "full", Ready: 3}).ID, 3)
	removed := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "fake", Ready: 2}).ID, 2)
	w.stop(t)
	// The last daemon died in a claim, after a pool was taken off the records.
	half, err := w.store.Get(t.Context(), p.Members[0])
	if err != nil {
		t.Fatal(err)
	}
	half.Op = store.OpClaim
	if _, err := w.store.Update(t.Context(), half); err != nil {
		t.Fatal(err)
	}
	if err := w.store.DeletePool(t.Context(), removed.ID); err != nil {
		t.Fatal(err)
	}
	m = w.start(t)
	if box := w.full.Box(half.ID); box != nil {
		t.Error("the one that was being claimed lives")
	}
	wantHiddenOne(t, m, half.ID)
	if ids, _ := w.rt.List(t.Context()); len(ids) != 0 {
		t.Errorf("members of the removed pool live: %v", ids)
	}
	q := w.waitPool(t, p.ID, 3)
	for _, id := range p.Members[1:] {
		if !slices.Contains(q.Members, id) {
			t.Errorf("%s was not adopted: %v", id, q.Members)
		}
	}
	if q.Capture == nil || q.Capture.ID != p.Capture.ID || q.Ready != 3 {
		t.Errorf("%+v became %+v", p, q)
	}
	w.check(t)
	s := create(t, m, manager.CreateRequest{Runtime: "full", Timeout: time.Minute})
	if s.Start != sandbox.StartPool {
		t.Errorf("%+v", s)
	}
	w.clock.Advance(2 * time.Minute)
	if s := w.waitEnded(t, s.ID); s.Reason != sandbox.ReasonTimeout {
		t.Errorf("it ended for %s", s.Reason)
	}
	w.waitPool(t, p.ID, 3)
	w.stop(t)
	w.host.Set(func(h *managertest.Host) { h.Boot = "boot2" }) // members are gone with the host
	for _, id := range w.waitNone(t) {
		w.full.Box(id).Crash(sandbox.ReasonRuntimeCrashed, "")
	}
	w.start(t)
	w.waitPool(t, p.ID, 3)
	w.check(t)
}

func (w *world) waitNone(t *testing.T) []sandbox.ID {
	ids, err := w.full.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

func TestPoolFollowsItsTemplate(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	w.tpl.Put(template.Template{Name: "app", ID: "tplone", Tenant: tenant})
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Template: "app", Runtime: "full", Ready: 2}).ID, 2)
	claimed := create(t, m, manager.CreateRequest{Template: "app", Runtime: "full"})
	w.waitPool(t, p.ID, 2)
	if claimed.TemplateID != "tplone" {
		t.Errorf("%+v", claimed)
	}
	// Rebuilt.
	w.tpl.OnBuild = func(context.Context, template.StepRunner) (template.Template, error) {
		two := template.Template{Name: "app", ID: "tpltwo", Tenant: tenant}
		w.tpl.Put(two)
		return two, nil
	}
	if _, err := m.BuildTemplate(t.Context(), tenant, manager.BuildRequest{Dockerfile: &template.DockerfileOptions{Target: template.Target{Name: "app"}}}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "members are of the new content", func() bool {
		q := w.waitPool(t, p.ID, 2)
		return q.TemplateID == "tpltwo" && q.Capture != nil && q.Capture.TemplateID == "tpltwo"
	})
	if s := create(t, m, manager.CreateRequest{Template: "app", Runtime: "full"}); s.Start != sandbox.StartPool || s.TemplateID != "tpltwo" {
		t.Errorf("%+v", s)
	}
	w.waitPool(t, p.ID, 2)
	w.check(t) // the old capture stays for what was claimed
	all, _, err := m.List(t.Context(), tenant, manager.ListFilter{})
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, m.RemoveTemplate(t.Context(), tenant, "app"), sandbox.CodeConflict)
	for _, s := range all {
		if err := m.Kill(t.Context(), tenant, s.ID); err != nil {
			t.Fatal(err)
		}
	}
	// Members do not keep a template.
	if err := m.RemoveTemplate(t.Context(), tenant, "app"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pool says why it is empty", func() bool {
		q := w.waitPool(t, p.ID, 0)
		return q.LastError != nil && q.LastError.Code == sandbox.CodeNotFound && q.Capture == nil
	})
	w.check(t)
	if holds := w.tpl.Holders(); len(holds) != 0 {
		t.Errorf("still held: %v", holds)
	}
}

func TestPoolGivesWay(t *testing.T) {
	w := newWorld(t)
	w.net.Total = 4
	m := w.start(t)
	p := w.waitPool(t, setPool(t, m, manager.PoolRequest{Runtime: "fake", Ready: 3}).ID, 3)
	for range 4 { // of another runtime: no member is claimed
		create(t, m, manager.CreateRequest{Runtime: "other"})
	}
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{Runtime: "other"})
	wantCode(t, err, sandbox.CodeNoCapacity)
	q := w.waitPool(t, p.ID, 0)
	if q.LastError == nil || q.LastError.Code != sandbox.CodeNoCapacity {
		t.Errorf("its error is %v", q.LastError)
	}
	w.check(t)
	w.net.Total = 1000
	setPool(t, m, manager.PoolRequest{Runtime: "fake", Ready: 3})
	w.waitPool(t, p.ID, 3)
	// What can never fit costs nobody anything.
	_, err = m.Create(t.Context(), tenant, manager.CreateRequest{Runtime: "other", Resources: sandbox.Resources{MemoryMiB: 1 << 23}})
	wantCode(t, err, sandbox.CodeNoCapacity)
	if q := w.waitPool(t, p.ID, 3); q.LastError != nil {
		t.Errorf("its error is %v", q.LastError)
	}
	w.check(t)
}
