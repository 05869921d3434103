package beneath

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func setup(t testing.TB) (top string, r *Root) {
	top = t.TempDir()
	dst := filepath.Join(top, "dst")
	if err := errors.Join(os.MkdirAll(filepath.Join(dst, "d/e"), 0o755), os.Mkdir(filepath.Join(top, "outside"), 0o755),
		os.WriteFile(filepath.Join(top, "outside/secret"), []byte("secret"), 0o600), os.WriteFile(filepath.Join(dst, "d/f"), []byte("f"), 0o644),
		os.Symlink(filepath.Join(top, "outside"), filepath.Join(dst, "abs")), os.Symlink("../outside", filepath.Join(dst, "rel")),
		os.Symlink("..", filepath.Join(dst, "up")), os.Symlink("d/e", filepath.Join(dst, "in")), os.Symlink("in/..", filepath.Join(dst, "round")),
		os.Symlink("../../..", filepath.Join(dst, "d/far")), os.Symlink("loop", filepath.Join(dst, "loop"))); err != nil {
		t.Fatal(err)
	}
	r, err := Open(dst)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return top, r
}

func TestNothingEscapes(t *testing.T) {
	top, r := setup(t)
	for _, dir := range []string{"abs", "rel", "up/outside", "round/../../outside", "d/far", "in/../../../outside", "..", "../outside", "loop", "d/f", "none"} {
		name := dir + "/secret"
		_, e1 := r.Lstat(name)
		f, e2 := r.Open(name)
		g, e3 := r.Create(dir+"/new", 0o600)
		is, e4 := r.IsDir(dir)
		_, e5 := r.Readlink(name)
		if is || f != nil || g != nil {
			t.Errorf("%s was reached", dir)
		}
		if dir != "d/f" && e4 == nil {
			t.Errorf("%s: IsDir has no error", dir)
		}
		for i, err := range []error{e1, e2, e3, e5, r.Mkdir(dir+"/dir", 0o755), r.Symlink("x", dir+"/link"), r.Link("d/f", dir+"/hard"), r.Link(name, "hard"),
			r.Remove(name), r.Lchown(name, os.Getuid(), os.Getgid()), r.ChmodDir(dir, 0o777), r.ChmodDir(dir+"/.", 0o777), r.SetModTime(name, time.Unix(1, 0))} {
			if err == nil {
				t.Errorf("%s: call %d has no error", dir, i)
			}
		}
	}
	if es, err := os.ReadDir(filepath.Join(top, "outside")); err != nil || len(es) != 1 {
		t.Errorf("outside: %v %v", es, err)
	}
	st, err := os.Stat(filepath.Join(top, "outside/secret"))
	if err != nil || st.Sys().(*syscall.Stat_t).Nlink != 1 || time.Since(st.ModTime()) > time.Hour {
		t.Errorf("the secret: %v %v", st, err)
	}
	if st, _ := os.Stat(filepath.Join(top, "outside")); st.Mode().Perm() != 0o755 {
		t.Errorf("outside: %v", st.Mode())
	}
	for _, name := range []string{"abs/x", "rel/x", "up/x", "../x", "/x"} {
		if _, err := r.Lstat(name); !errors.Is(err, ErrEscapes) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestWithin(t *testing.T) {
	top, r := setup(t)
	for _, name := range []string{"in/a", "round/b", "d/e/../c", "d/e/d"} {
		f, err := r.Create(name, 0o600)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		f.Close()
	}
	for _, p := range []string{"d/e/a", "d/b", "d/c", "d/e/d"} {
		if _, err := os.Lstat(filepath.Join(top, "dst", p)); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(r.Link("in/a", "d/a2"), r.Symlink("/anything", "in/s"), r.Mkdir("in/dir", 0o700), r.ChmodDir("in/dir", 0o751), r.SetModTime("in/dir", time.Unix(1000, 0))); err != nil {
		t.Error(err)
	}
	st, err := os.Stat(filepath.Join(top, "dst/d/e/dir"))
	if err != nil || st.Mode().Perm() != 0o751 || st.ModTime().Unix() != 1000 {
		t.Errorf("%v %v", st, err)
	}
	if s, err := r.Readlink("in/s"); err != nil || s != "/anything" {
		t.Errorf("%q %v", s, err)
	}
	if _, err := r.Create("in/a", 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("again: %v", err)
	}
	if is, err := r.IsDir("in"); !is || err != nil {
		t.Errorf("%v %v", is, err)
	}
	if is, err := r.IsDir("."); !is || err != nil {
		t.Errorf("%v %v", is, err)
	}
}

// Beneath "/" absolute links stay beneath.
func TestSlash(t *testing.T) {
	top, _ := setup(t)
	r, err := Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if _, err := r.Lstat(strings.TrimPrefix(filepath.Join(top, "dst/abs/secret"), "/")); err != nil {
		t.Error(err)
	}
}

func TestDescriptorsAreClosed(t *testing.T) {
	_, r := setup(t)
	count := func() int { es, _ := os.ReadDir("/proc/self/fd"); return len(es) }
	before := count()
	for range 100 {
		for _, n := range []string{"in/x", "d/e/y", "up/x", "abs/x", "loop/x", "d/f/x", "none/x", "round/z"} {
			r.Lstat(n)
			r.IsDir(n)
			r.Link("d/f", n+"/q")
		}
	}
	if after := count(); after > before+2 {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

func FuzzLstat(f *testing.F) {
	for _, s := range []string{"abs/secret", "up/outside/secret", "in/../../../outside/secret", "round/../d/far/x"} {
		f.Add(s)
	}
	top, r := setup(f)
	var secret syscall.Stat_t
	syscall.Stat(filepath.Join(top, "outside/secret"), &secret)
	f.Fuzz(func(t *testing.T, name string) {
		if st, err := r.Lstat(name); err == nil && st.Ino == secret.Ino {
			t.Errorf("%q reached the secret", name)
		}
	})
}
