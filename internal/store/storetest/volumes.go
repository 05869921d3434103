package storetest

import (
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

func testVolumes(t *testing.T, s store.Store) {
	ctx := t.Context()
	b := store.Volume{ID: "vol2", Tenant: "one", Name: "b", Token: "t2", CreatedAt: epoch.Add(time.Second)}
	a := store.Volume{ID: "vol1", Tenant: "one", Name: "a", Token: "t1", CreatedAt: epoch}
	other := store.Volume{ID: "vol3", Tenant: "two", Name: "a", Token: "t3", CreatedAt: epoch}
	for _, v := range []store.Volume{b, a, other} {
		if err := s.InsertVolume(ctx, v); err != nil {
			t.Fatal(err)
		}
	}
	again := a
	again.ID = "vol4"
	wantCode(t, s.InsertVolume(ctx, again), sandbox.CodeExists)
	if d := diff([]store.Volume{a, b}, must(s.ListVolumes(ctx, "one"))(t)); d != "" {
		t.Error(d)
	}
	if all := must(s.ListVolumes(ctx, ""))(t); len(all) != 3 {
		t.Errorf("%d in all", len(all))
	}
	if d := diff(other, must(s.VolumeNamed(ctx, "two", "a"))(t)); d != "" {
		t.Error(d)
	}
	if d := diff(b, must(s.GetVolume(ctx, "vol2"))(t)); d != "" {
		t.Error(d)
	}
	for range 2 {
		if err := s.DeleteVolume(ctx, "vol2"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.GetVolume(ctx, "vol2")
	wantCode(t, err, sandbox.CodeNotFound)
	_, err = s.VolumeNamed(ctx, "two", "b")
	wantCode(t, err, sandbox.CodeNotFound)
}
