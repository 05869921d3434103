// Package storetest holds the suite that every store.Store passes.
package storetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// Suite runs the contract of store.Store. open opens the store that is kept
// at dir, a directory of the test's own; it is called again on the same
// directory after Close.
func Suite(t *testing.T, open func(t *testing.T, dir string) store.Store) {
	fresh := func(t *testing.T) store.Store {
		s := open(t, t.TempDir())
		t.Cleanup(func() { s.Close() })
		return s
	}
	t.Run("RecordComesBackWhole", func(t *testing.T) { testWhole(t, open) })
	t.Run("UpdateNeedsTheVersionItRead", func(t *testing.T) { testVersions(t, fresh(t)) })
	t.Run("ListFiltersAndPages", func(t *testing.T) { testList(t, fresh(t)) })
	t.Run("Unfinished", func(t *testing.T) { testUnfinished(t, fresh(t)) })
	t.Run("EventsAreInOrderAndAtomic", func(t *testing.T) { testEvents(t, fresh(t)) })
	t.Run("SeqGoesOnAfterPruneAndReopen", func(t *testing.T) { testSeq(t, open) })
	t.Run("Console", func(t *testing.T) { testConsole(t, fresh(t)) })
	t.Run("Maintain", func(t *testing.T) { testMaintain(t, fresh(t)) })
	t.Run("Keys", func(t *testing.T) { testKeys(t, fresh(t)) })
	t.Run("Snapshots", func(t *testing.T) { testSnapshots(t, open) })
	t.Run("Pools", func(t *testing.T) { testPools(t, open) })
	t.Run("Volumes", func(t *testing.T) { testVolumes(t, fresh(t)) })
	t.Run("Concurrent", func(t *testing.T) { testConcurrent(t, fresh(t)) })
	t.Run("CanceledContext", func(t *testing.T) { testCanceled(t, fresh(t)) })
}

var epoch = time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)

// Sample is a record with every field set.
func Sample(id sandbox.ID) store.Record {
	return store.Record{
		Sandbox: sandbox.Sandbox{
			ID: id, Tenant: "default", State: sandbox.Creating, Reason: "", Detail: "a detail",
			Runtime: "container", Template: "base", TemplateID: "tpl1",
			Resources: sandbox.Resources{CPUs: 0.5, MemoryMiB: 256, PIDs: 100, DiskMiB: 10},
			Network: sandbox.NetworkPolicy{
				Mode:  sandbox.NetworkEgress,
				Allow: []sandbox.EgressRule{{CIDR: netip.MustParsePrefix("10.0.0.0/8"), Port: 443}},
				Deny:  []sandbox.EgressRule{{Domain: "*.example.com"}},
			},
			Env:  map[string]string{"A": "1", "B": "ü\n\x00"},
			User: "user", Workdir: "/home/user", Metadata: map[string]string{"k": "v", "a.b\"]": "$['x']"},
			Hostname: "h", Token: "tok", TrafficToken: "tt", PublicTraffic: true, HostHeader: "shown.example:${PORT}",
			Link: sandbox.Link{
				Slot: 7, NetNS: "/run/x", Device: "eth0", Address: netip.MustParsePrefix("10.1.0.2/30"),
				Gateway: netip.MustParseAddr("10.1.0.1"), DNS: netip.MustParseAddr("10.1.0.1"),
			},
			Start: sandbox.StartCold, OOMKills: 3,
			Snapshot: "snp1", Parent: "sbx0", OnTimeout: sandbox.OnTimeoutHibernate, IdleTimeout: time.Minute,
			SuspendedAt: epoch.Add(3 * time.Minute), HibernatedAt: epoch.Add(4 * time.Minute),
			CreatedAt: epoch, StartedAt: epoch.Add(time.Second), ExpiresAt: epoch.Add(time.Hour), EndedAt: epoch.Add(2 * time.Hour),
		},
		Op: store.OpEnd, EndReason: sandbox.ReasonTimeout, EndDetail: "its time ran out",
		Internal: true, Layers: []string{"/l/2", "/l/1"}, BootID: "boot",
		Capture: "snp2", Lifetime: time.Hour, EphemeralEnv: []string{"B"}, Pool: "pol1",
	}
}

func simple(id sandbox.ID, state sandbox.State, created time.Time) store.Record {
	r := store.Record{Sandbox: sandbox.Sandbox{ID: id, Tenant: "default", State: state, Runtime: "container", Template: "base", TemplateID: "t1", CreatedAt: created}}
	if state.Ended() {
		r.EndedAt = created
	}
	return r
}

func diff(a, b any) string {
	return cmp.Diff(a, b, cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}), cmpopts.EquateEmpty())
}

func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func wantCode(t *testing.T, err error, code sandbox.Code) {
	t.Helper()
	if sandbox.CodeOf(err) != code {
		t.Fatalf("error is %v (%s), want %s", err, sandbox.CodeOf(err), code)
	}
}

func testWhole(t *testing.T, open func(*testing.T, string) store.Store) {
	ctx, dir := t.Context(), t.TempDir()
	s := open(t, dir)
	want := must(s.Insert(ctx, Sample("sbx1")))(t)
	if want.Version == 0 {
		t.Error("Insert gave no version")
	}
	_, err := s.Insert(ctx, Sample("sbx1"))
	wantCode(t, err, sandbox.CodeExists)
	if d := diff(want, must(s.Get(ctx, "sbx1"))(t)); d != "" {
		t.Error(d)
	}
	bare := must(s.Insert(ctx, simple("sbx2", sandbox.Creating, epoch)))(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	defer s.Close()
	if d := diff(want, must(s.Get(ctx, "sbx1"))(t)); d != "" {
		t.Error("after a reopen:", d)
	}
	if d := diff(bare, must(s.Get(ctx, "sbx2"))(t)); d != "" {
		t.Error("after a reopen:", d)
	}
	_, err = s.Get(ctx, "sbx3")
	wantCode(t, err, sandbox.CodeNotFound)
}

func testVersions(t *testing.T, s store.Store) {
	ctx := t.Context()
	first := must(s.Insert(ctx, Sample("sbx1")))(t)
	changed := first
	changed.State, changed.Op, changed.Metadata = sandbox.Running, store.OpNone, nil
	second := must(s.Update(ctx, changed))(t)
	if second.Version <= first.Version {
		t.Errorf("version went from %d to %d", first.Version, second.Version)
	}
	if d := diff(second, must(s.Get(ctx, "sbx1"))(t)); d != "" {
		t.Error(d)
	}
	_, err := s.Update(ctx, changed, sandbox.Event{Sandbox: "sbx1", Tenant: "default", At: epoch})
	wantCode(t, err, sandbox.CodeConflict)
	if evs := must(s.EventsAfter(ctx, "", 0, 10))(t); len(evs) != 0 {
		t.Errorf("a refused update left events %v", evs)
	}
	_, err = s.Update(ctx, simple("sbx9", sandbox.Running, epoch))
	wantCode(t, err, sandbox.CodeNotFound)
}

func testList(t *testing.T, s store.Store) {
	ctx := t.Context()
	for i := range 25 {
		r := simple(sandbox.ID(fmt.Sprintf("sbx%02d", i)), sandbox.Running, epoch.Add(time.Duration(i/2)*time.Second))
		r.Metadata = map[string]string{"n": fmt.Sprint(i % 5), "q\"'.": "x"}
		r.StartedAt = r.CreatedAt.Add(time.Second)
		switch i % 5 {
		case 1:
			r.Tenant = "other"
		case 2:
			r.State, r.EndedAt = sandbox.Killed, epoch
		case 3:
			r.Template, r.TemplateID, r.Runtime = "mine", "t2", "gvisor"
		case 4:
			r.Internal = true
		}
		must(s.Insert(ctx, r))(t)
	}
	for _, tc := range []struct {
		name string
		f    store.Filter
		want int
	}{
		{"all", store.Filter{}, 20},
		{"internal", store.Filter{Internal: true}, 25},
		{"tenant", store.Filter{Tenant: "other"}, 5},
		{"unknown tenant", store.Filter{Tenant: "nobody"}, 0},
		{"state", store.Filter{States: []sandbox.State{sandbox.Killed, sandbox.Failed}}, 5},
		{"template name", store.Filter{Template: "mine"}, 5},
		{"template id", store.Filter{Template: "t2"}, 5},
		{"runtime", store.Filter{Runtime: "gvisor", Tenant: "default"}, 5},
		{"metadata", store.Filter{Metadata: map[string]string{"n": "0"}}, 5},
		{"two of metadata", store.Filter{Metadata: map[string]string{"n": "0", "q\"'.": "x"}}, 5},
		{"metadata's other value", store.Filter{Metadata: map[string]string{"n": "0", "q\"'.": "y"}}, 0},
		{"started from", store.Filter{StartedFrom: epoch.Add(11 * time.Second)}, 4},
		{"the oldest first", store.Filter{Oldest: true}, 20},
		{"a quote is no SQL", store.Filter{Metadata: map[string]string{"n' OR 1=1 --": "0"}}, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			whole, next, err := s.List(ctx, tc.f)
			if err != nil || next != "" || len(whole) != tc.want {
				t.Fatalf("%d records, next %q, %v; want %d", len(whole), next, err, tc.want)
			}
			var paged []store.Record
			f := tc.f
			f.Limit = 3
			for {
				page, next, err := s.List(ctx, f)
				if err != nil {
					t.Fatal(err)
				}
				if len(page) > 3 {
					t.Fatalf("a page of %d", len(page))
				}
				paged = append(paged, page...)
				if f.Token = next; next == "" {
					break
				}
			}
			if d := diff(whole, paged); d != "" {
				t.Error("the pages are not the whole list:", d)
			}
			for i := 1; i < len(whole); i++ {
				if c := whole[i].CreatedAt.Compare(whole[i-1].CreatedAt); c > 0 && !tc.f.Oldest || c < 0 && tc.f.Oldest {
					t.Error("not in order")
				}
			}
		})
	}
	for _, token := range []string{"x", "!!", "MS4", "MS5zYngnIA"} {
		_, _, err := s.List(ctx, store.Filter{Token: token})
		wantCode(t, err, sandbox.CodeInvalid)
	}
}

func testUnfinished(t *testing.T, s store.Store) {
	ctx := t.Context()
	for i, st := range sandbox.States() {
		must(s.Insert(ctx, simple(sandbox.ID(fmt.Sprintf("sbx%d", i)), st, epoch.Add(time.Duration(i)))))(t)
	}
	half := simple("sbxhalf", sandbox.Killed, epoch.Add(time.Minute))
	half.Op, half.Internal = store.OpEnd, true
	must(s.Insert(ctx, half))(t)
	var got []sandbox.ID
	for _, r := range must(s.Unfinished(ctx))(t) {
		got = append(got, r.ID)
	}
	if d := cmp.Diff([]sandbox.ID{"sbx0", "sbx1", "sbx2", "sbx3", "sbxhalf"}, got); d != "" {
		t.Error(d)
	}
}

func event(id sandbox.ID, tenant, detail string) sandbox.Event {
	return sandbox.Event{
		At: epoch, Sandbox: id, Tenant: tenant, Type: sandbox.EventState,
		From: sandbox.Creating, To: sandbox.Failed, Reason: sandbox.ReasonCreateFailed, Detail: detail,
	}
}

func testEvents(t *testing.T, s store.Store) {
	ctx := t.Context()
	if seq := must(s.LastSeq(ctx))(t); seq != 0 {
		t.Errorf("an empty log's last seq is %d", seq)
	}
	r := must(s.Insert(ctx, simple("sbx1", sandbox.Creating, epoch), event("sbx1", "a", "1"), event("sbx1", "b", "2")))(t)
	must(s.Update(ctx, r, event("sbx1", "a", "3")))(t)
	all := must(s.EventsAfter(ctx, "", 0, 10))(t)
	if len(all) != 3 {
		t.Fatalf("%d events", len(all))
	}
	for i, e := range all {
		want := event("sbx1", []string{"a", "b", "a"}[i], fmt.Sprint(i+1))
		want.Seq = e.Seq
		if d := diff(want, e); d != "" {
			t.Error(d)
		}
		if i > 0 && e.Seq <= all[i-1].Seq {
			t.Error("seq does not grow")
		}
	}
	if seq := must(s.LastSeq(ctx))(t); seq != all[2].Seq {
		t.Errorf("last seq is %d, want %d", seq, all[2].Seq)
	}
	if got := must(s.EventsAfter(ctx, "a", 0, 10))(t); len(got) != 2 || got[1].Detail != "3" {
		t.Errorf("tenant a's events: %v", got)
	}
	if got := must(s.EventsAfter(ctx, "a", all[0].Seq, 10))(t); len(got) != 1 || got[0].Detail != "3" {
		t.Errorf("tenant a's events after its first: %v", got)
	}
	if got := must(s.EventsAfter(ctx, "", 0, 1))(t); len(got) != 1 || got[0].Detail != "1" {
		t.Errorf("limit 1: %v", got)
	}
}

func testSeq(t *testing.T, open func(*testing.T, string) store.Store) {
	ctx, dir := t.Context(), t.TempDir()
	s := open(t, dir)
	r := must(s.Insert(ctx, simple("sbx1", sandbox.Creating, epoch), event("sbx1", "a", "1"), event("sbx1", "a", "2")))(t)
	before := must(s.LastSeq(ctx))(t)
	if _, err := s.Maintain(ctx, store.Retention{Events: 0, Ended: 10}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	s = open(t, dir)
	defer s.Close()
	if got := must(s.LastSeq(ctx))(t); got != before {
		t.Errorf("last seq went from %d to %d", before, got)
	}
	must(s.Update(ctx, r, event("sbx1", "a", "3")))(t)
	if got := must(s.EventsAfter(ctx, "", before, 10))(t); len(got) != 1 || got[0].Detail != "3" {
		t.Errorf("after the prune: %v", got)
	}
}

func testConsole(t *testing.T, s store.Store) {
	ctx := t.Context()
	must(s.Insert(ctx, simple("sbx1", sandbox.Running, epoch)))(t)
	if got := must(s.Console(ctx, "sbx1"))(t); got != nil {
		t.Errorf("a console before any: %q", got)
	}
	for _, tail := range []string{"one\xff\x00", "two", ""} {
		if err := s.SetConsole(ctx, "sbx1", []byte(tail)); err != nil {
			t.Fatal(err)
		}
		if got := must(s.Console(ctx, "sbx1"))(t); string(got) != tail {
			t.Errorf("console is %q, want %q", got, tail)
		}
	}
	wantCode(t, s.SetConsole(ctx, "sbx9", nil), sandbox.CodeNotFound)
}

func testMaintain(t *testing.T, s store.Store) {
	ctx := t.Context()
	must(s.Insert(ctx, simple("sbxlive", sandbox.Running, epoch.Add(-time.Hour))))(t)
	half := simple("sbxhalf", sandbox.Killed, epoch.Add(-time.Hour))
	half.Op = store.OpEnd
	must(s.Insert(ctx, half))(t)
	for i := range 10 {
		r := simple(sandbox.ID(fmt.Sprintf("sbx%d", i)), sandbox.Killed, epoch.Add(time.Duration(i)*time.Second))
		must(s.Insert(ctx, r, event(r.ID, "a", fmt.Sprint(i))))(t)
		if err := s.SetConsole(ctx, r.ID, []byte("tail")); err != nil {
			t.Fatal(err)
		}
	}
	n := must(s.Maintain(ctx, store.Retention{EndedAfter: epoch.Add(3 * time.Second), Ended: 100, Events: 4}))(t)
	if n != 3 {
		t.Errorf("pruned %d by age, want 3", n)
	}
	if got := must(s.Console(ctx, "sbx0"))(t); got != nil {
		t.Error("the console outlived its record")
	}
	n = must(s.Maintain(ctx, store.Retention{Ended: 5, Events: 4}))(t)
	if n != 2 {
		t.Errorf("pruned %d by count, want 2", n)
	}
	left, _, err := s.List(ctx, store.Filter{})
	if err != nil || len(left) != 7 {
		t.Errorf("%d records are left (%v), want 7", len(left), err)
	}
	evs := must(s.EventsAfter(ctx, "", 0, 100))(t)
	if len(evs) != 4 || evs[3].Detail != "9" {
		t.Errorf("events left: %v", evs)
	}
}

func testKeys(t *testing.T, s store.Store) {
	ctx := t.Context()
	key := func(id, tenant string) store.Key {
		return store.Key{ID: id, Tenant: tenant, Name: "n", Prefix: "e2b_12", Hash: sha256.Sum256([]byte(id)), CreatedAt: epoch}
	}
	for _, k := range []store.Key{key("k1", "a"), key("k2", "b"), key("k3", "a")} {
		if err := s.InsertKey(ctx, k); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, s.InsertKey(ctx, key("k1", "a")), sandbox.CodeExists)
	if d := diff(key("k2", "b"), must(s.KeyByHash(ctx, key("k2", "").Hash))(t)); d != "" {
		t.Error(d)
	}
	_, err := s.KeyByHash(ctx, [32]byte{})
	wantCode(t, err, sandbox.CodeNotFound)
	if ks := must(s.ListKeys(ctx, "a"))(t); len(ks) != 2 || ks[0].ID != "k1" {
		t.Errorf("a's keys: %v", ks)
	}
	if ks := must(s.ListKeys(ctx, ""))(t); len(ks) != 3 {
		t.Errorf("all keys: %v", ks)
	}
	if err := s.TouchKey(ctx, "k1", epoch.Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	if k := must(s.KeyByHash(ctx, key("k1", "").Hash))(t); !k.LastUsedAt.Equal(epoch.Add(time.Hour)) {
		t.Errorf("last used at %v", k.LastUsedAt)
	}
	wantCode(t, s.DeleteKey(ctx, "b", "k1"), sandbox.CodeNotFound)
	if err := s.DeleteKey(ctx, "a", "k1"); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.DeleteKey(ctx, "a", "k1"), sandbox.CodeNotFound)
	if err := s.TouchKey(ctx, "k1", epoch); err != nil {
		t.Errorf("touching a key that is gone: %v", err)
	}
}

func testConcurrent(t *testing.T, s store.Store) {
	ctx := t.Context()
	must(s.Insert(ctx, simple("sbx0", sandbox.Running, epoch)))(t)
	const workers, rounds = 8, 10
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				for {
					r, err := s.Get(ctx, "sbx0")
					if err != nil {
						t.Error(err)
						return
					}
					r.OOMKills++
					_, err = s.Update(ctx, r, event("sbx0", "a", ""))
					if err == nil {
						break
					}
					if !errors.Is(err, &sandbox.Error{Code: sandbox.CodeConflict}) {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if r := must(s.Get(ctx, "sbx0"))(t); r.OOMKills != workers*rounds {
		t.Errorf("%d of %d updates are there", r.OOMKills, workers*rounds)
	}
	if evs := must(s.EventsAfter(ctx, "", 0, 1000))(t); len(evs) != workers*rounds {
		t.Errorf("%d of %d events are there", len(evs), workers*rounds)
	}
}

func testCanceled(t *testing.T, s store.Store) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Insert(ctx, simple("sbx1", sandbox.Creating, epoch))
	wantCode(t, err, sandbox.CodeCanceled)
	_, err = s.Get(ctx, "sbx1")
	wantCode(t, err, sandbox.CodeCanceled)
	if _, err = s.Get(t.Context(), "sbx1"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("a canceled insert left %v", err)
	}
}
