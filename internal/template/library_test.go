package template

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

func importFiles(t testing.TB, l *Library, target Target, files ...file) Template {
	t.Helper()
	tpl, err := tryImport(t, l, target, files...)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

func tryImport(t testing.TB, l *Library, target Target, files ...file) (Template, error) {
	t.Helper()
	img := imageOf(t, v1.Config{}, tarOf(t, files...))
	return l.Import(context.Background(), ImportOptions{Target: target, Ref: "docker-archive:x", Archive: bytes.NewReader(dockerArchive(t, "x:1", img))}, nil)
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"base": true, "a": true, "my-app_1.2": true, strings.Repeat("x", 63): true,
		"": false, strings.Repeat("x", 64): false, "A": false, "../x": false, ".": false, "-a": false, "a-": false,
		"a/b": false, "a:b": false, "ä": false, "a b": false, "a\nb": false, NewID(): false,
	} {
		if err := CheckName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestTenants(t *testing.T) {
	testenv.Root(t)
	ctx := context.Background()
	l := openLibrary(t, filepath.Join(t.TempDir(), "lib"))
	shared := importFiles(t, l, Target{Name: "base", Shared: true}, file{name: "f", body: "shared"})
	private := importFiles(t, l, Target{Name: "private"}, file{name: "f", body: "private"})
	own := importFiles(t, l, Target{Tenant: "acme", Name: "base"}, file{name: "f", body: "own"})
	if _, err := tryImport(t, l, Target{Tenant: "acme", Name: "x", Shared: true}); sandbox.CodeOf(err) != sandbox.CodeForbidden {
		t.Errorf("another tenant shared a template: %v", err)
	}
	for _, c := range []struct {
		tenant, name string
		want         string
	}{
		{"", "base", shared.ID}, {"default", "base", shared.ID}, {"acme", "base", own.ID}, {"other", "base", shared.ID},
		{"other", shared.ID, shared.ID}, {"other", own.ID, ""}, {"acme", "private", ""}, {"acme", private.ID, ""}, {"", own.ID, ""},
	} {
		got, err := l.Get(ctx, c.tenant, c.name)
		if got.ID != c.want || (c.want == "") != (sandbox.CodeOf(err) == sandbox.CodeNotFound) {
			t.Errorf("%s asks for %s: %s, %v", c.tenant, c.name, got.ID, err)
		}
	}
	if ts, _ := l.List(ctx, "acme"); len(ts) != 1 || ts[0].ID != own.ID {
		t.Errorf("acme lists %v", ts)
	}
	if ts, _ := l.List(ctx, "other"); len(ts) != 1 || ts[0].ID != shared.ID {
		t.Errorf("other lists %v", ts)
	}
	_, err := l.Remove(ctx, "other", "base")
	codeIs(t, err, sandbox.CodeForbidden)
	if _, err := l.Remove(ctx, "acme", "base"); err != nil {
		t.Fatal(err)
	}
	if got, _ := l.Get(ctx, "acme", "base"); got.ID != shared.ID {
		t.Errorf("acme now gets %s", got.ID)
	}
	wantClean(t, l)
}

func TestHold(t *testing.T) {
	testenv.Root(t)
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "lib")
	l := openLibrary(t, dir)
	first := importFiles(t, l, Target{Name: "x"}, file{name: "f", body: "1"})
	if err := l.Hold(ctx, first.ID, "sbx1"); err != nil {
		t.Fatal(err)
	}
	second := importFiles(t, l, Target{Name: "x"}, file{name: "f", body: "2"})
	if first.ID == second.ID {
		t.Fatal("a rebuild kept the id")
	}
	if got, _ := l.Get(ctx, "", "x"); got.ID != second.ID {
		t.Errorf("the name leads to %s", got.ID)
	}
	if got := tree(t, l, first, func(string) bool { return false }); got != "f 100644 0:0 \"1\"\n" {
		t.Errorf("the held template has %q", got)
	}
	// As after a crash: holds are made again, then garbage is collected.
	l.Close()
	l2, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l2.Close()
	if err := l2.Hold(ctx, first.ID, "sbx1"); err != nil {
		t.Fatal(err)
	}
	if err := l2.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l2.Resolve(ctx, "", first.ID); err != nil {
		t.Fatal(err)
	}
	codeIs(t, l2.Hold(ctx, second.ID, "sbx1"), sandbox.CodeConflict)
	if got := l2.Holders(first.ID); len(got) != 1 || got[0] != "sbx1" {
		t.Errorf("holders %v", got)
	}
	_, err = l2.Remove(ctx, "", first.ID)
	codeIs(t, err, sandbox.CodeConflict)
	if err := l2.Drop(ctx, "sbx1"); err != nil {
		t.Fatal(err)
	}
	if err := l2.Drop(ctx, "sbx1"); err != nil {
		t.Fatal(err)
	}
	_, _, err = l2.Resolve(ctx, "", first.ID)
	codeIs(t, err, sandbox.CodeNotFound)
	codeIs(t, l2.Hold(ctx, first.ID, "sbx2"), sandbox.CodeNotFound)
	wantClean(t, l2)
	if _, err := os.Stat(l2.layerDir(first.Layers[0])); !os.IsNotExist(err) {
		t.Error("the layer is still there")
	}
}

func TestOpenTwice(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lib")
	openLibrary(t, dir)
	_, err := Open(dir)
	codeIs(t, err, sandbox.CodeConflict)
}

func TestBrokenRecords(t *testing.T) {
	testenv.Root(t)
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "lib")
	l := openLibrary(t, dir)
	importFiles(t, l, Target{Name: "good"}, file{name: "f"})
	bad := importFiles(t, l, Target{Name: "bad"}, file{name: "g"})
	lost := importFiles(t, l, Target{Name: "lost"}, file{name: "h"})
	l.Close()
	os.WriteFile(l.recordPath(bad), []byte("{"), 0o600)
	os.RemoveAll(l.layerDir(lost.Layers[0]))
	l2, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l2.Close()
	if p := l2.Problems(); len(p) != 1 || !strings.Contains(p[0].Error(), "bad.json") {
		t.Errorf("problems %v", p)
	}
	if _, _, err := l2.Resolve(ctx, "", "good"); err != nil {
		t.Error(err)
	}
	_, _, err = l2.Resolve(ctx, "", "lost")
	codeIs(t, err, sandbox.CodeBadTemplate)
}

// TestConcurrent builds, holds, drops and removes the same names at once, and
// checks that what is held can be read all the time.
func TestConcurrent(t *testing.T) {
	testenv.Root(t)
	ctx := context.Background()
	l := openLibrary(t, filepath.Join(t.TempDir(), "lib"))
	importFiles(t, l, Target{Name: "n0"}, file{name: "f", body: "0"})
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(w)))
			for i := range 25 {
				name := fmt.Sprintf("n%d", r.IntN(2))
				switch r.IntN(3) {
				case 0:
					if _, err := tryImport(t, l, Target{Name: name}, file{name: "f", body: fmt.Sprint(r.IntN(3))}); err != nil {
						t.Error(err)
					}
				case 1:
					if _, err := l.Remove(ctx, "", name); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
						t.Error(err)
					}
				case 2:
					tpl, dirs, err := l.Resolve(ctx, "", name)
					if err != nil {
						continue
					}
					holder := fmt.Sprintf("h%d-%d", w, i)
					if l.Hold(ctx, tpl.ID, holder) != nil {
						continue // it went meanwhile, and Hold says so
					}
					for range 20 {
						if _, err := os.ReadFile(filepath.Join(dirs[0], "f")); err != nil {
							t.Errorf("held: %v", err)
						}
					}
					if err := l.Drop(ctx, holder); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	if err := l.Collect(ctx); err != nil {
		t.Fatal(err)
	}
	wantClean(t, l)
}
