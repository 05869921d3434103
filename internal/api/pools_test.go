package api_test

import (
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestPools(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	for _, bad := range []wire.SetPool{{Ready: -1}, {Ready: 1001}} {
		if _, err := w.root.SetPool(ctx, bad); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	if _, err := w.root.SetPool(ctx, wire.SetPool{Template: "none", Ready: 1}); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("a template that is not there: %v", err)
	}
	p, err := w.root.SetPool(ctx, wire.SetPool{Ready: 2})
	if err != nil || p.Template != "base" || p.Ready != 2 || p.Resources.MemoryMiB == 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	for end := time.Now().Add(20 * time.Second); p.Available != 2 && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if p, err = w.root.Pool(ctx, "base"); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.Members) != 2 || p.Error != nil {
		t.Fatalf("%+v", p)
	}
	if _, err := w.root.Sandbox(ctx, p.Members[0]); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("a member is seen: %v", err)
	}
	all, err := w.root.Pools(ctx)
	if err != nil || len(all) != 1 || all[0].ID != p.ID || all[0].Members != nil {
		t.Errorf("%+v, %v", all, err)
	}
	sb, err := w.root.CreateSandbox(ctx, wire.CreateSandbox{Env: map[string]string{"A": "1"}})
	if err != nil || sb.Start != "pool" || sb.ID != p.Members[0] || len(sb.EnvNames) != 1 {
		t.Errorf("%+v of %v, %v", sb, p.Members, err)
	}
	rival, err := client.New(w.unix, client.Options{Tenant: "rival"})
	if err != nil {
		t.Fatal(err)
	}
	defer rival.Close()
	if _, err := rival.Pool(ctx, p.ID); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("another tenant sees the pool: %v", err)
	}
	if err := rival.RemovePool(ctx, p.ID); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("another tenant removes the pool: %v", err)
	}
	if err := w.root.RemovePool(ctx, p.ID); err != nil {
		t.Error(err)
	}
	if all, err := w.root.Pools(ctx); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
	if err := w.root.Kill(ctx, sb.ID); err != nil {
		t.Error(err)
	}
}
