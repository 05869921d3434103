package volume

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

func open(t testing.TB) (*Dir, string) {
	t.Helper()
	dir := t.TempDir()
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d, dir
}

func read(t *testing.T, d *Dir, p string) string {
	t.Helper()
	f, size, err := d.Read(p)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	data, err := io.ReadAll(f)
	if err != nil || int64(len(data)) != size {
		t.Fatalf("%d bytes of %d, %v", len(data), size, err)
	}
	return string(data)
}

func wantCode(t *testing.T, what string, err error, code sandbox.Code) {
	t.Helper()
	if sandbox.CodeOf(err) != code {
		t.Errorf("%s: %v, want %s", what, err, code)
	}
}

func TestContent(t *testing.T) {
	d, _ := open(t)
	mode := uint32(0o640)
	e, err := d.Write("/a/b/f", strings.NewReader("one"), Attributes{Mode: &mode}, true)
	if err != nil || e.Name != "f" || e.Path != "/a/b/f" || e.Type != TypeFile || e.Size != 3 || e.Mode != 0o640 || e.MTime.IsZero() {
		t.Fatalf("%+v, %v", e, err)
	}
	if _, err := d.Write("a/b/../b/f", strings.NewReader("two"), Attributes{}, false); err != nil {
		t.Fatal(err)
	}
	if got := read(t, d, "a/b/f"); got != "two" {
		t.Errorf("it has %q", got)
	}
	_, err = d.Write("/none/f", strings.NewReader(""), Attributes{}, false)
	wantCode(t, "no directory", err, sandbox.CodeNotFound)
	_, err = d.Write("/a/b", strings.NewReader(""), Attributes{}, false)
	if err == nil {
		t.Error("a directory was replaced by a file")
	}
	_, err = d.Write("/", strings.NewReader(""), Attributes{}, false)
	wantCode(t, "the root", err, sandbox.CodeInvalid)
	if _, err := d.MakeDir("/d", Attributes{}, false); err != nil {
		t.Fatal(err)
	}
	_, err = d.MakeDir("/d", Attributes{}, false)
	wantCode(t, "again", err, sandbox.CodeExists)
	if _, err := d.MakeDir("/d/e", Attributes{}, true); err != nil {
		t.Fatal(err)
	}
	mode = 0o1777
	if e, err := d.Set("/d", Attributes{Mode: &mode}); err != nil || e.Mode != 0o1777 || e.Type != TypeDirectory {
		t.Errorf("%+v, %v", e, err)
	}
	for depth, want := range map[int]string{1: "/a /d", 2: "/a /a/b /d /d/e", 3: "/a /a/b /a/b/f /d /d/e"} {
		list, err := d.List(t.Context(), "/", depth)
		var got []string
		for _, e := range list {
			got = append(got, e.Path)
		}
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("depth %d: %v, %v", depth, got, err)
		}
	}
	_, err = d.List(t.Context(), "/a/b/f", 1)
	wantCode(t, "a file's list", err, sandbox.CodeNotFound)
	_, err = d.List(t.Context(), "/", 0)
	wantCode(t, "no depth", err, sandbox.CodeInvalid)
	wantCode(t, "the root's removal", d.Remove("/x/.."), sandbox.CodeInvalid)
	wantCode(t, "nothing's removal", d.Remove("/x"), sandbox.CodeNotFound)
	if err := d.Remove("/a"); err != nil {
		t.Error(err)
	}
	_, err = d.Stat("/a/b/f")
	wantCode(t, "what was removed", err, sandbox.CodeNotFound)
	for _, p := range []string{"", "a\x00b", strings.Repeat("x/", 3000)} {
		_, err := d.Stat(p)
		wantCode(t, "a path", err, sandbox.CodeInvalid)
	}
	if left, _ := d.List(t.Context(), "/", 9); len(left) != 2 {
		t.Errorf("left: %+v", left)
	}
}

// TestHostile has a sandbox make what it likes in the volume, and change it
// while calls go on: nothing outside is read, changed or removed.
func TestHostile(t *testing.T) {
	d, dir := open(t)
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Symlink(outside, filepath.Join(dir, "out")))
	must(os.Symlink(secret, filepath.Join(dir, "file")))
	must(os.Symlink("../../../../../../../.."+outside, filepath.Join(dir, "dots")))
	must(syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o666))
	must(os.WriteFile(filepath.Join(dir, "in"), []byte("in"), 0o644))
	must(os.Symlink("in", filepath.Join(dir, "link")))
	if got := read(t, d, "link"); got != "in" {
		t.Errorf("a link within: %q", got)
	}
	if e, err := d.Stat("file"); err != nil || e.Type != TypeSymlink || e.Target != secret {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := d.Stat("fifo"); err != nil || e.Type != TypeUnknown {
		t.Errorf("%+v, %v", e, err)
	}
	begun := time.Now()
	if _, _, err := d.Read("fifo"); err == nil {
		t.Error("a FIFO was read")
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("the FIFO was waited for, %v", took)
	}
	uid, mode := uint32(12345), uint32(0o777)
	all := Attributes{UID: &uid, Mode: &mode}
	attack := func(p string) {
		if f, _, err := d.Read(p); err == nil {
			data, _ := io.ReadAll(f)
			f.Close()
			if strings.Contains(string(data), "secret") {
				t.Errorf("%s was read", p)
			}
		}
		d.Write(p+"/new", strings.NewReader("evil"), all, true)
		d.MakeDir(p+"/dir", all, true)
		d.Set(p, all)
		d.Set(p+"/secret", all)
		if list, err := d.List(context.Background(), p, 3); err == nil {
			for _, e := range list {
				if e.Name == "secret" {
					t.Errorf("%s was listed", p)
				}
			}
		}
		d.Remove(p + "/secret")
	}
	for _, p := range []string{"out", "file", "dots", "out/..", "/../.." + outside, "dots/."} {
		attack(p)
	}
	// And a directory that is a link now and then.
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		flip := filepath.Join(dir, "flip")
		for {
			select {
			case <-stop:
				return
			default:
			}
			os.RemoveAll(flip)
			os.Mkdir(flip, 0o777)
			os.RemoveAll(flip)
			os.Symlink(outside, flip)
		}
	})
	for range 300 {
		attack("flip")
	}
	close(stop)
	wg.Wait()
	entries, err := os.ReadDir(outside)
	must(err)
	st, err := os.Stat(secret)
	must(err)
	if data, _ := os.ReadFile(secret); len(entries) != 1 || string(data) != "secret" || st.Mode().Perm() != 0o600 || st.Sys().(*syscall.Stat_t).Uid == uid {
		t.Errorf("outside there is %v, %q, %v", entries, data, st.Mode())
	}
}

func FuzzClean(f *testing.F) {
	for _, s := range []string{"/", "..", "a/../../b", "//x", ".", "a\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		rel, err := clean(s)
		if err == nil && !filepath.IsLocal(rel) {
			t.Errorf("%q is %q", s, rel)
		}
	})
}
