package snapshot

import (
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

func open(t *testing.T, dir string) *Library {
	t.Helper()
	l, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// captured makes a capture with names that a sandbox may choose.
func captured(t *testing.T, l *Library, transient bool) string {
	t.Helper()
	id := sandbox.NewSnapshotID()
	d, err := l.Begin(id)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string]string{"pages.img": strings.Repeat("p", 100_000), "sub/a%b\xff\n": "x", "empty": ""} {
		path := filepath.Join(d.Data, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/shadow", filepath.Join(d.Data, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(d.Data, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := d.Commit(t.Context(), Manifest{Kind: sandbox.SnapshotDisk, Runtime: "r"}, transient)
	if err != nil {
		t.Fatal(err)
	}
	if m.Size() != 100_001 || len(m.Files) != 6 {
		t.Errorf("%d bytes in %+v", m.Size(), m.Files)
	}
	return id
}

func wantCode(t *testing.T, err error, code sandbox.Code, words ...string) {
	t.Helper()
	if sandbox.CodeOf(err) != code {
		t.Fatalf("error is %v (%q), want %q", err, sandbox.CodeOf(err), code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not tell of %q", err, w)
		}
	}
}

func TestCheckFindsEveryChange(t *testing.T) {
	dir := t.TempDir()
	for _, fresh := range []bool{false, true} { // also by a daemon that did not write it
		for what, change := range map[string]func(data string) error{
			"changed": func(d string) error {
				return os.WriteFile(filepath.Join(d, "pages.img"), []byte(strings.Repeat("p", 99_999)+"q"), 0o600)
			},
			"cut":     func(d string) error { return os.Truncate(filepath.Join(d, "pages.img"), 99_999) },
			"longer":  func(d string) error { return os.Truncate(filepath.Join(d, "empty"), 1) },
			"missing": func(d string) error { return os.Remove(filepath.Join(d, "sub/a%b\xff\n")) },
			"more":    func(d string) error { return os.WriteFile(filepath.Join(d, "new"), nil, 0o600) },
			"another type": func(d string) error {
				os.Remove(filepath.Join(d, "empty"))
				return os.Mkdir(filepath.Join(d, "empty"), 0o700)
			},
			"another link": func(d string) error {
				os.Remove(filepath.Join(d, "link"))
				return os.Symlink("/etc/passwd", filepath.Join(d, "link"))
			},
			"no data": func(d string) error { return os.RemoveAll(d) },
			"no manifest": func(d string) error {
				return os.Remove(filepath.Join(filepath.Dir(d), manifestName))
			},
			"cut manifest": func(d string) error {
				return os.Truncate(filepath.Join(filepath.Dir(d), manifestName), 20)
			},
		} {
			l := open(t, dir)
			id := captured(t, l, false)
			if fresh {
				l = open(t, dir)
			}
			if err := l.Check(t.Context(), id); err != nil {
				t.Fatal(err)
			}
			if err := change(l.Path(id)); err != nil {
				t.Fatal(err)
			}
			if err := l.Check(t.Context(), id); sandbox.CodeOf(err) != sandbox.CodeCorruptCapture {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}

func TestCheckIsCanceled(t *testing.T) {
	dir := t.TempDir()
	id := captured(t, open(t, dir), false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantCode(t, open(t, dir).Check(ctx, id), sandbox.CodeCanceled)
}

func TestHalfMadeIsGone(t *testing.T) {
	dir := t.TempDir()
	l := open(t, dir)
	kept, unknown := captured(t, l, false), captured(t, l, true)
	d, err := l.Begin(sandbox.NewSnapshotID())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(d.Data, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Begin("../x"); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("began ../x: %v", err)
	}
	l = open(t, dir)
	if left, _ := os.ReadDir(filepath.Join(dir, "tmp")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := l.Sweep(func(id string) bool { return id == kept }); err != nil {
		t.Fatal(err)
	}
	wantCode(t, l.Check(t.Context(), unknown), sandbox.CodeCorruptCapture)
	if err := l.Check(t.Context(), kept); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Mode().Perm() != 0o700 {
		t.Errorf("others may read captures: %v, %v", fi.Mode(), err)
	}
}

func TestHolds(t *testing.T) {
	l := open(t, t.TempDir())
	a, b := captured(t, l, true), captured(t, l, true)
	for _, h := range []struct{ id, holder string }{{a, "sbx1"}, {a, "sbx2"}, {b, "sbx1"}, {a, "sbx1"}} {
		if err := l.Hold(h.id, h.holder); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, l.Hold(sandbox.NewSnapshotID(), "sbx1"), sandbox.CodeNotFound)
	if users := l.Retire(a); !reflect.DeepEqual(users, []string{"sbx1", "sbx2"}) {
		t.Errorf("its users are %v", users)
	}
	if free := l.Drop("sbx1", b); len(free) != 0 {
		t.Errorf("free are %v", free)
	}
	if free := l.Drop("sbx1"); !reflect.DeepEqual(free, []string{b}) {
		t.Errorf("free are %v", free)
	}
	if free := l.Drop("sbx2"); !reflect.DeepEqual(free, []string{a}) {
		t.Errorf("free are %v", free)
	}
	if users := l.Retire(a); len(users) > 0 {
		t.Errorf("its users are %v", users)
	}
	wantCode(t, l.Hold(a, "sbx1"), sandbox.CodeNotFound)
	l.Restore(a)
	if err := l.Hold(a, "sbx1"); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := l.Remove(b); err != nil {
			t.Error(err)
		}
	}
	if got := l.Owner(l.Path(a)); got != a {
		t.Errorf("%s is %q's", l.Path(a), got)
	}
	for _, p := range []string{"/x", l.Path(a) + "/x", filepath.Dir(l.Path(a)), l.Path("tmp")} {
		if got := l.Owner(p); got != "" {
			t.Errorf("%s is %q's", p, got)
		}
	}
}

func TestCopyHasALifeOfItsOwn(t *testing.T) {
	l := open(t, t.TempDir())
	from := sandbox.NewSnapshotID()
	d, err := l.Begin(from)
	if err != nil {
		t.Fatal(err)
	}
	os.Mkdir(d.Data, 0o700)
	if err := os.WriteFile(filepath.Join(d.Data, "pages.img"), []byte("pages"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Commit(t.Context(), Manifest{Kind: sandbox.SnapshotFull}, false); err != nil {
		t.Fatal(err)
	}
	to := sandbox.NewSnapshotID()
	if _, err := l.Copy(t.Context(), from, to); err != nil {
		t.Fatal(err)
	}
	if err := l.Check(t.Context(), from); err != nil {
		t.Error(err)
	}
	if err := l.Remove(from); err != nil {
		t.Fatal(err)
	}
	if err := l.Check(t.Context(), to); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(l.Path(to), "pages.img"), []byte("pagex"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := sandbox.NewSnapshotID()
	_, err = l.Copy(t.Context(), to, third)
	wantCode(t, err, sandbox.CodeCorruptCapture)
	if _, err := os.Stat(filepath.Dir(l.Path(third))); err == nil {
		t.Error("the copy of a corrupt capture is kept")
	}
	if err := os.Remove(filepath.Join(l.Path(to), "pages.img")); err != nil {
		t.Fatal(err)
	}
	_, err = l.Copy(t.Context(), to, third)
	wantCode(t, err, sandbox.CodeCorruptCapture, "missing")
}

func TestParseManifestRefuses(t *testing.T) {
	good := `{"version":1,"id":"snp00000000000000000","kind":"full","files":[{"path":"a","size":3,"crc32c":"0000000a"}]}`
	if m, err := ParseManifest([]byte(good)); err != nil || m.Size() != 3 || m.Files[0].Sum != 10 {
		t.Fatalf("%+v, %v", m, err)
	}
	for _, edit := range [][2]string{
		{`"version":1`, `"version":2`}, {"snp0", "../0"}, {`"full"`, `"half"`}, {`"a"`, `"../a"`}, {`"a"`, `"/a"`}, {`"a"`, `""`},
		{`"a"`, `"."`}, {`"a"`, `"a%00"`}, {`"a"`, `"a%2"`}, {`"a"`, `"a%zz"`}, {`"a"`, `"%2e%2e"`}, {`3`, `-3`}, {"0000000a", "a"}, {"]}", ""},
		{`}]`, `},{"path":"a"}]`}, {`"size":3`, `"size":3,"type":511`},
	} {
		if m, err := ParseManifest([]byte(strings.Replace(good, edit[0], edit[1], 1))); err == nil {
			t.Errorf("took %v: %+v", edit, m)
		}
	}
}

func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(`{"version":1,"id":"snp00000000000000000","kind":"disk","summed":true,"files":[{"path":"a%FF","size":3,"crc32c":"0000000a"},{"path":"d","type":2147483648}]}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseManifest(data)
		if err != nil {
			return
		}
		for _, file := range m.Files {
			if !fs.ValidPath(strings.ToValidUTF8(string(file.Path), "?")) || file.Size < 0 {
				t.Errorf("took the file %q of %d bytes", file.Path, file.Size)
			}
		}
		out, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseManifest(out)
		if err != nil || !reflect.DeepEqual(m.Files, again.Files) {
			t.Errorf("%s reads back as %+v, %v", out, again, err)
		}
	})
}
