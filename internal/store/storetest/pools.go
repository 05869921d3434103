package storetest

import (
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

func testPools(t *testing.T, open func(*testing.T, string) store.Store) {
	ctx, dir := t.Context(), t.TempDir()
	s := open(t, dir)
	pool := func(id, tenant string, at time.Duration) store.Pool {
		return store.Pool{
			ID: id, Tenant: tenant, Template: "base", Runtime: "gvisor", Resources: Sample("sbx1").Resources, Ready: 3, CreatedAt: epoch.Add(at),
		}
	}
	one, two, other := pool("pol1", "default", 2), pool("pol2", "default", 1), pool("pol3", "other", 0)
	for _, p := range []store.Pool{one, two, other} {
		if err := s.PutPool(ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.SetPoolCapture(ctx, "pol1", "snp1"); err != nil {
		t.Fatal(err)
	}
	// Put again it keeps its age and its capture.
	again := one
	again.Ready, again.Runtime, again.CreatedAt, again.Capture = 7, "container", epoch.Add(time.Hour), "snp2"
	if err := s.PutPool(ctx, again); err != nil {
		t.Fatal(err)
	}
	if err := s.SetPoolCapture(ctx, "pol9", "snp1"); err != nil {
		t.Errorf("the capture of a pool that is gone: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	defer s.Close()
	one.Ready, one.Runtime, one.Capture = 7, "container", "snp1"
	if d := diff(one, must(s.GetPool(ctx, "pol1"))(t)); d != "" {
		t.Error(d)
	}
	_, err := s.GetPool(ctx, "pol9")
	wantCode(t, err, sandbox.CodeNotFound)
	if d := diff([]store.Pool{two, one}, must(s.ListPools(ctx, "default"))(t)); d != "" {
		t.Error(d)
	}
	if d := diff([]store.Pool{other, two, one}, must(s.ListPools(ctx, ""))(t)); d != "" {
		t.Error(d)
	}
	for range 2 {
		if err := s.DeletePool(ctx, "pol1"); err != nil {
			t.Error(err)
		}
	}
	if d := diff([]store.Pool{two}, must(s.ListPools(ctx, "default"))(t)); d != "" {
		t.Error(d)
	}
}
