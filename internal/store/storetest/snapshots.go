package storetest

import (
	"fmt"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// SampleSnapshot is a snapshot's record with every field set.
func SampleSnapshot(id, name string) store.Snapshot {
	r := Sample("sbx1")
	return store.Snapshot{
		Snapshot: sandbox.Snapshot{
			ID: id, Name: name, Tenant: r.Tenant, Kind: sandbox.SnapshotFull, Source: r.ID, Parent: "snp0",
			Runtime: "gvisor", Template: r.Template, TemplateID: r.TemplateID, RuntimeVersion: "runsc 1",
			Resources: r.Resources, Network: r.Network, User: r.User, Workdir: r.Workdir, Metadata: r.Metadata,
			Hidden: true, SizeBytes: 12345, CreatedAt: epoch,
		},
		Layers: r.Layers, Token: "tok", Env: r.Env, EphemeralEnv: []string{"B"}, Transient: true,
	}
}

func testSnapshots(t *testing.T, open func(*testing.T, string) store.Store) {
	ctx, dir := t.Context(), t.TempDir()
	s := open(t, dir)
	want := SampleSnapshot("snp1", "one")
	if err := s.InsertSnapshot(ctx, want); err != nil {
		t.Fatal(err)
	}
	wantCode(t, s.InsertSnapshot(ctx, SampleSnapshot("snp2", "one")), sandbox.CodeExists)
	wantCode(t, s.InsertSnapshot(ctx, SampleSnapshot("snp1", "two")), sandbox.CodeExists)
	other := SampleSnapshot("snp3", "one")
	other.Tenant = "other"
	for _, n := range []store.Snapshot{other, SampleSnapshot("snp4", ""), SampleSnapshot("snp5", "")} {
		if err := s.InsertSnapshot(ctx, n); err != nil {
			t.Errorf("%s: %v", n.ID, err) // a name is a tenant's, and none is no name
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	defer s.Close()
	if d := diff(want, must(s.GetSnapshot(ctx, "snp1"))(t)); d != "" {
		t.Error(d)
	}
	if d := diff(want, must(s.SnapshotNamed(ctx, "default", "one"))(t)); d != "" {
		t.Error(d)
	}
	for _, name := range []string{"", "two", "snp1"} {
		_, err := s.SnapshotNamed(ctx, "default", name)
		wantCode(t, err, sandbox.CodeNotFound)
	}
	_, err := s.GetSnapshot(ctx, "snp9")
	wantCode(t, err, sandbox.CodeNotFound)

	for i := range 7 {
		n := SampleSnapshot(fmt.Sprintf("snpp%d", i), fmt.Sprintf("p%d", i))
		n.Hidden, n.Source, n.CreatedAt = false, "sbx7", epoch.Add(time.Duration(i/2)*time.Second)
		if err := s.InsertSnapshot(ctx, n); err != nil {
			t.Fatal(err)
		}
	}
	for _, tc := range []struct {
		name string
		f    store.SnapshotFilter
		want int
	}{
		{"all", store.SnapshotFilter{}, 7},
		{"hidden", store.SnapshotFilter{Hidden: true}, 11},
		{"tenant", store.SnapshotFilter{Hidden: true, Tenant: "other"}, 1},
		{"source", store.SnapshotFilter{Source: "sbx7"}, 7},
		{"another source", store.SnapshotFilter{Source: "sbx8"}, 0},
		{"name", store.SnapshotFilter{Name: "p3"}, 1},
	} {
		whole, next, err := s.ListSnapshots(ctx, tc.f)
		if err != nil || next != "" || len(whole) != tc.want {
			t.Fatalf("%s: %d records, next %q, %v; want %d", tc.name, len(whole), next, err, tc.want)
		}
		var paged []store.Snapshot
		for f := tc.f; ; {
			f.Limit = 3
			page, next, err := s.ListSnapshots(ctx, f)
			if err != nil || len(page) > 3 {
				t.Fatalf("%s: a page of %d, %v", tc.name, len(page), err)
			}
			paged = append(paged, page...)
			if f.Token = next; next == "" {
				break
			}
		}
		if d := diff(whole, paged); d != "" {
			t.Errorf("%s: the pages are not the whole list: %s", tc.name, d)
		}
	}
	_, _, err = s.ListSnapshots(ctx, store.SnapshotFilter{Token: "!!"})
	wantCode(t, err, sandbox.CodeInvalid)

	for range 2 {
		if err := s.DeleteSnapshot(ctx, "snp1"); err != nil {
			t.Fatal(err)
		}
	}
	_, err = s.GetSnapshot(ctx, "snp1")
	wantCode(t, err, sandbox.CodeNotFound)
	if err := s.InsertSnapshot(ctx, SampleSnapshot("snp6", "one")); err != nil {
		t.Errorf("the name is not free again: %v", err)
	}
}
