package layer

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

var when = time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)

type ent struct {
	name, link string
	kind       byte
	mode       int64
	body       string
	uid        int
	pax        map[string]string
}

func mkTar(t testing.TB, ents ...ent) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range ents {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Size: int64(len(e.body)), ModTime: when, Uid: e.uid, Gid: e.uid, PAXRecords: e.pax}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if e.pax != nil {
			h.Format = tar.FormatPAX
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func extract(t testing.TB, o ExtractOptions, ents ...ent) (string, Stats, error) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "l")
	st, err := Extract(context.Background(), bytes.NewReader(mkTar(t, ents...)), dir, o)
	return dir, st, err
}

func TestExtract(t *testing.T) {
	testenv.Root(t)
	dir, st, err := extract(t, ExtractOptions{Whiteouts: true},
		ent{name: "./", kind: tar.TypeDir, mode: 0o711},
		ent{name: "bin/", kind: tar.TypeDir, mode: 0o755},
		ent{name: "bin/su", mode: 0o4755, body: "suid", uid: 0},
		ent{name: "bin/sh", link: "su", kind: tar.TypeSymlink, mode: 0o777},
		ent{name: "usr/bin/su2", link: "bin/su", kind: tar.TypeLink},
		ent{name: "home/u/f", body: "hi", uid: 1000},
		ent{name: "home/big", uid: 4_000_000},
		ent{name: "fifo", kind: tar.TypeFifo, mode: 0o600},
		ent{name: "dev/null", kind: tar.TypeChar},
		ent{name: "etc/.wh.gone"},
		ent{name: "var/.wh..wh..opq"},
		ent{name: "cap", mode: 0o755, pax: map[string]string{"SCHILY.xattr.user.a": "b", "SCHILY.xattr.security.selinux": "x"}},
		ent{name: "again", body: "first"},
		ent{name: "again", body: "second"},
		ent{name: "d2f/x", body: "y"},
		ent{name: "d2f", body: "now a file"},
		ent{name: "re/.wh.made"},
		ent{name: "re/made/", kind: tar.TypeDir, mode: 0o700},
		ent{name: "re/made/in", body: "in"},
	)
	if err != nil {
		t.Fatal(err)
	}
	if st.Bytes != 2+4+5+6+1+10+2 {
		t.Errorf("bytes = %d", st.Bytes)
	}
	stat := func(p string) unix.Stat_t {
		t.Helper()
		var s unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, p), &s); err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		return s
	}
	if s := stat("."); s.Mode&0o7777 != 0o711 {
		t.Errorf("root mode %o", s.Mode)
	}
	if s := stat("bin/su"); s.Mode&0o7777 != 0o4755 || s.Nlink != 2 || s.Mtim.Sec != when.Unix() {
		t.Errorf("bin/su: %o, %d links, %d", s.Mode, s.Nlink, s.Mtim.Sec)
	}
	if s := stat("bin"); s.Mtim.Sec != when.Unix() {
		t.Errorf("bin's time is %d", s.Mtim.Sec)
	}
	if s := stat("home/u/f"); s.Uid != 1000 {
		t.Errorf("uid %d", s.Uid)
	}
	if s := stat("home/big"); s.Uid != nobody {
		t.Errorf("uid %d", s.Uid)
	}
	if s := stat("etc/gone"); !isWhiteout(s) {
		t.Error("etc/gone is no whiteout")
	}
	if _, err := os.Lstat(filepath.Join(dir, "dev/null")); !os.IsNotExist(err) {
		t.Error("a device was made")
	}
	for p, want := range map[string]bool{"var": true, "re/made": true, "etc": false} {
		f, err := openDir(filepath.Join(dir, p))
		if err != nil {
			t.Fatal(err)
		}
		if got := opaque(f); got != want {
			t.Errorf("%s opaque = %v", p, got)
		}
		f.Close()
	}
	for p, want := range map[string]string{"again": "second", "d2f": "now a file", "re/made/in": "in"} {
		if b, _ := os.ReadFile(filepath.Join(dir, p)); string(b) != want {
			t.Errorf("%s = %q", p, b)
		}
	}
	f, _ := os.Open(filepath.Join(dir, "cap"))
	defer f.Close()
	if x, err := readXattrs(f); err != nil || x["user.a"] != "b" || x["security.selinux"] == "x" {
		t.Errorf("xattrs %v, %v", x, err)
	}
}

func TestExtractHostile(t *testing.T) {
	testenv.Root(t)
	long := strings.Repeat("d/", 3000)
	small := Limits{MaxBytes: 100, MaxFileBytes: 60, MaxEntries: 5, MaxDepth: 8}
	for _, c := range []struct {
		name  string
		ents  []ent
		lim   Limits
		code  sandbox.Code
		limit string
	}{
		{name: "dotdot", ents: []ent{{name: "../evil"}}, code: sandbox.CodeInvalid},
		{name: "dotdot inside", ents: []ent{{name: "a/../../evil"}}, code: sandbox.CodeInvalid},
		{name: "hard link out", ents: []ent{{name: "l", link: "../../../etc/passwd", kind: tar.TypeLink}}, code: sandbox.CodeInvalid},
		{name: "hard link absolute to the host", ents: []ent{{name: "l", link: "/etc/passwd", kind: tar.TypeLink}}, code: sandbox.CodeInvalid},
		{name: "hard link through symlink", ents: []ent{{name: "s", link: "/etc", kind: tar.TypeSymlink}, {name: "l", link: "s/passwd", kind: tar.TypeLink}}, code: sandbox.CodeInvalid},
		{name: "hard link to a directory", ents: []ent{{name: "d/", kind: tar.TypeDir}, {name: "l", link: "d", kind: tar.TypeLink}}, code: sandbox.CodeInvalid},
		{name: "file below dangling symlink", ents: []ent{{name: "s", link: "/nowhere/at/all", kind: tar.TypeSymlink}, {name: "s/evil"}}, code: sandbox.CodeInvalid},
		{name: "symlink loop", ents: []ent{{name: "s", link: "s", kind: tar.TypeSymlink}, {name: "s/evil"}}, code: sandbox.CodeInvalid},
		{name: "file as directory", ents: []ent{{name: "f"}, {name: "f/x"}}, code: sandbox.CodeInvalid},
		{name: "whiteout of dotdot", ents: []ent{{name: "d/.wh..."}}, code: sandbox.CodeInvalid},
		{name: "whiteout of nothing", ents: []ent{{name: "d/.wh."}}, code: sandbox.CodeInvalid},
		{name: "overlay redirect", ents: []ent{{name: "d/", kind: tar.TypeDir, pax: map[string]string{"SCHILY.xattr.trusted.overlay.redirect": "/etc"}}}, code: sandbox.CodeInvalid},
		{name: "overlay opaque", ents: []ent{{name: "d/", kind: tar.TypeDir, pax: map[string]string{"SCHILY.xattr.user.overlay.opaque": "y"}}}, code: sandbox.CodeInvalid},
		{name: "long path", ents: []ent{{name: long + "f"}}, code: sandbox.CodeTooLarge, limit: "path_bytes"},
		{name: "long name", ents: []ent{{name: strings.Repeat("n", 300)}}, code: sandbox.CodeTooLarge, limit: "name_bytes"},
		{name: "deep", ents: []ent{{name: strings.Repeat("d/", 9) + "f"}}, lim: small, code: sandbox.CodeTooLarge, limit: "depth"},
		{name: "big file", ents: []ent{{name: "f", body: strings.Repeat("x", 61)}}, lim: small, code: sandbox.CodeTooLarge, limit: "file_bytes"},
		{name: "big together", ents: []ent{{name: "f", body: strings.Repeat("x", 60)}, {name: "g", body: strings.Repeat("x", 60)}}, lim: small, code: sandbox.CodeTooLarge, limit: "bytes"},
		{name: "many", ents: []ent{{name: "1"}, {name: "2"}, {name: "3"}, {name: "4"}, {name: "5"}, {name: "6"}}, lim: small, code: sandbox.CodeTooLarge, limit: "entries"},
		{name: "root as file", ents: []ent{{name: "./", kind: tar.TypeSymlink, link: "/"}}, code: sandbox.CodeInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, _, err := extract(t, ExtractOptions{Whiteouts: true, Limits: c.lim}, c.ents...)
			if sandbox.CodeOf(err) != c.code {
				t.Fatalf("err = %v (%s), want %s", err, sandbox.CodeOf(err), c.code)
			}
			var e *sandbox.Error
			if errors.As(err, &e); c.limit != "" && e.Details["limit"] != c.limit {
				t.Errorf("limit %q, want %q", e.Details["limit"], c.limit)
			}
			if _, err := os.Lstat(filepath.Join(filepath.Dir(dir), "evil")); !os.IsNotExist(err) {
				t.Error("it wrote outside")
			}
		})
	}
}

func TestExtractStaysInside(t *testing.T) {
	testenv.Root(t)
	outside := t.TempDir()
	dir, _, err := extract(t, ExtractOptions{Whiteouts: true},
		ent{name: outside + "/", kind: tar.TypeDir}, // the same path, inside
		ent{name: "abs", link: outside, kind: tar.TypeSymlink},
		ent{name: "abs/f", body: "in scope"},
		ent{name: "rel", link: "../../../../../../../.." + outside, kind: tar.TypeSymlink},
		ent{name: "rel/g", body: "in scope"},
		ent{name: "proc", link: "/proc/self/root" + outside, kind: tar.TypeSymlink},
	)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"f", "g"} {
		if _, err := os.Lstat(filepath.Join(outside, f)); !os.IsNotExist(err) {
			t.Errorf("%s was written outside", f)
		}
		if _, err := os.Lstat(filepath.Join(dir, outside, f)); err != nil {
			t.Errorf("%s is not inside: %v", f, err)
		}
	}
}

func TestDecompressionRatio(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(make([]byte, 4<<20))
	w.Close()
	r, err := Decompress(&z, Limits{RatioFrom: 1 << 20, MaxRatio: 100})
	if err != nil {
		t.Fatal(err)
	}
	_, err = bytes.NewBuffer(nil).ReadFrom(r)
	if sandbox.CodeOf(err) != sandbox.CodeTooLarge {
		t.Fatalf("err = %v", err)
	}
}

func TestTruncated(t *testing.T) {
	testenv.Root(t)
	b := mkTar(t, ent{name: "f", body: strings.Repeat("x", 4096)})
	for _, n := range []int{100, 700, 2000} {
		_, err := Extract(context.Background(), bytes.NewReader(b[:n]), filepath.Join(t.TempDir(), "l"), ExtractOptions{})
		if sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
}

func TestRemoveDeepTree(t *testing.T) {
	top := t.TempDir()
	dir := filepath.Join(top, "deep")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	at, err := openDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5000 {
		if err := unix.Mkdirat(int(at.Fd()), "d", 0o755); err != nil {
			t.Fatal(err)
		}
		if i%100 == 0 {
			if err := unix.Mkdirat(int(at.Fd()), "e", 0o500); err != nil {
				t.Fatal(err)
			}
			if err := unix.Symlinkat("/", int(at.Fd()), "s"); err != nil {
				t.Fatal(err)
			}
		}
		next, err := strict(at, "d", unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			t.Fatal(err)
		}
		at.Close()
		at = next
	}
	at.Close()
	if err := RemoveTree(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir); !os.IsNotExist(err) {
		t.Fatalf("still there: %v", err)
	}
	if err := RemoveTree(dir); err != nil {
		t.Fatalf("the second time: %v", err)
	}
}

func TestHashTree(t *testing.T) {
	testenv.Root(t)
	same := []ent{{name: "a", body: "1"}, {name: "b", link: "a", kind: tar.TypeLink}, {name: "c/", kind: tar.TypeDir, mode: 0o755}, {name: "./", kind: tar.TypeDir, mode: 0o755}}
	hash := func(ents ...ent) string {
		t.Helper()
		dir, _, err := extract(t, ExtractOptions{Whiteouts: true}, ents...)
		if err != nil {
			t.Fatal(err)
		}
		d, _, err := HashTree(context.Background(), dir, HashOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := hash(same...)
	if again := hash(same...); again != first {
		t.Error("the same tree has two digests")
	}
	seen := map[string]int{first: -1}
	for i, change := range [][]ent{
		{{name: "a", body: "2"}}, {{name: "a", body: "1", mode: 0o600}}, {{name: "b", body: "1"}},
		{{name: "c", link: "a", kind: tar.TypeSymlink}}, {{name: ".wh.z"}}, {{name: "c/.wh..wh..opq"}},
		{{name: "a", body: "1", uid: 5}}, {{name: "a", body: "1", pax: map[string]string{"SCHILY.xattr.user.k": "v"}}},
	} {
		d := hash(append(append([]ent{}, same...), change...)...)
		if was, ok := seen[d]; ok {
			t.Errorf("changes %d and %d have one digest", i, was)
		}
		seen[d] = i
	}
}

func TestHashTreeRefuses(t *testing.T) {
	testenv.Root(t)
	for name, make := range map[string]func(dir string) error{
		"device":   func(d string) error { return unix.Mknod(d+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) },
		"redirect": func(d string) error { return unix.Setxattr(d, "trusted.overlay.redirect", []byte("/etc"), 0) },
		"deep":     func(d string) error { return os.MkdirAll(d+strings.Repeat("/d", 300), 0o755) },
	} {
		dir := t.TempDir()
		if err := make(dir); err != nil {
			t.Fatal(err)
		}
		if d, _, err := HashTree(context.Background(), dir, HashOptions{}); err == nil {
			t.Errorf("%s: it was taken as %s", name, d)
		}
	}
}

func layers(t *testing.T, stacks ...[]ent) []string {
	t.Helper()
	var dirs []string
	for _, s := range stacks {
		dir, _, err := extract(t, ExtractOptions{Whiteouts: true}, s...)
		if err != nil {
			t.Fatal(err)
		}
		dirs = append([]string{dir}, dirs...)
	}
	return dirs
}

// TestViewIsOverlay holds the view against the kernel's own merge.
func TestViewIsOverlay(t *testing.T) {
	testenv.Root(t)
	dirs := layers(t,
		[]ent{{name: "a/x", body: "1"}, {name: "a/y", body: "1"}, {name: "b/z", body: "1"}, {name: "c", body: "file"}, {name: "l", link: "/a", kind: tar.TypeSymlink}, {name: "p/q/r", body: "deep"}},
		[]ent{{name: "a/.wh.x"}, {name: "a/n", body: "2"}, {name: "b/.wh..wh..opq"}, {name: "b/w", body: "2"}, {name: "c/", kind: tar.TypeDir}, {name: ".wh.p"}},
		[]ent{{name: "a/x", body: "3"}, {name: "p/new", body: "3"}, {name: "c/d", body: "3"}},
	)
	at := t.TempDir()
	if err := unix.Mount("overlay", at, "overlay", unix.MS_RDONLY, "lowerdir="+strings.Join(dirs, ":")); err != nil {
		t.Skipf("needs overlayfs: %v", err)
	}
	defer unix.Unmount(at, 0)
	want := map[string]string{}
	filepath.Walk(at, func(p string, fi os.FileInfo, err error) error {
		rel := strings.TrimPrefix(strings.TrimPrefix(p, at), "/")
		if fi.Mode().IsRegular() {
			b, _ := os.ReadFile(p)
			want[rel] = string(b)
		} else {
			want[rel] = fi.Mode().Type().String()
		}
		return nil
	})
	v, err := OpenView(dirs)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	got := map[string]string{}
	var walk func(e Entry)
	walk = func(e Entry) {
		switch {
		case e.IsDir():
			got[e.Path] = os.ModeDir.String()
			names, err := v.ReadDir(e)
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range names {
				c, err := v.Child(e, n)
				if err != nil {
					t.Fatal(err)
				}
				walk(c)
			}
		case e.IsRegular():
			b, err := v.ReadFile(e.Path, 1000)
			if err != nil {
				t.Fatal(err)
			}
			got[e.Path] = string(b)
		default:
			got[e.Path] = os.ModeSymlink.String()
		}
	}
	root, _ := v.Lookup("/", true)
	walk(root)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("view\n %v\noverlay\n %v", got, want)
	}
	if b, err := v.ReadFile("l/n", 10); err != nil || string(b) != "2" {
		t.Errorf("through the symlink: %q, %v", b, err)
	}
}

// TestBuilderHostileBase copies to destinations that a base image aims at the
// host.
func TestBuilderHostileBase(t *testing.T) {
	testenv.Root(t)
	outside := t.TempDir()
	base := layers(t, []ent{
		{name: "abs", link: outside, kind: tar.TypeSymlink},
		{name: "up", link: "../../../../../.." + outside, kind: tar.TypeSymlink},
		{name: "app/", kind: tar.TypeDir, mode: 0o700, uid: 7},
		{name: "app/conf", link: outside + "/conf", kind: tar.TypeSymlink},
		{name: "etc/passwd", body: "root:x:0:0::/:/bin/sh\nu:x:1000:1000::/home/u:/bin/sh\n"},
	})
	src := layers(t, []ent{{name: "f", body: "content"}, {name: "d/sub/g", body: "g"}, {name: "d/esc", link: outside, kind: tar.TypeSymlink}, {name: "e/esc/h", body: "h"}})
	sv, err := OpenView(src)
	if err != nil {
		t.Fatal(err)
	}
	defer sv.Close()
	dir := filepath.Join(t.TempDir(), "new")
	b, err := NewBuilder(context.Background(), dir, base, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	look := func(p string) Entry {
		t.Helper()
		e, err := sv.Lookup(p, true)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	for _, dst := range []string{"/abs/f", "/up/f2", "/app/conf", "/new/deep/f"} {
		if err := b.Copy(sv, look("f"), dst, CopyOptions{}); err != nil {
			t.Fatalf("%s: %v", dst, err)
		}
	}
	if err := b.Copy(sv, look("d"), "/app", CopyOptions{Owner: &Owner{1000, 1000}}); err != nil {
		t.Fatal(err)
	}
	if err := b.Copy(sv, look("e"), "/app", CopyOptions{}); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Fatalf("a directory over a symlink: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if names, _ := os.ReadDir(outside); len(names) != 0 {
		t.Fatalf("it wrote outside: %v", names)
	}
	for p, want := range map[string]string{outside + "/f": "content", outside + "/f2": "content", outside + "/conf": "content", "new/deep/f": "content", "app/sub/g": "g"} {
		if got, _ := os.ReadFile(filepath.Join(dir, p)); string(got) != want {
			t.Errorf("%s = %q", p, got)
		}
	}
	var st unix.Stat_t
	if unix.Lstat(filepath.Join(dir, "app"), &st); st.Uid != 7 || st.Mode&0o777 != 0o700 {
		t.Errorf("app lost its attributes: %d %o", st.Uid, st.Mode)
	}
	if unix.Lstat(filepath.Join(dir, "app/sub/g"), &st); st.Uid != 1000 {
		t.Errorf("app/sub/g belongs to %d", st.Uid)
	}
}

func FuzzExtract(f *testing.F) {
	if os.Getuid() != 0 {
		f.Skip("needs root: run `make test-root` as root")
	}
	f.Add(mkTar(f, ent{name: "a/b", body: "x"}, ent{name: "s", link: "a", kind: tar.TypeSymlink}, ent{name: "s/c", body: "y"}, ent{name: "a/.wh.b"}, ent{name: "h", link: "a/b", kind: tar.TypeLink}))
	f.Add(mkTar(f, ent{name: "../x"}))
	f.Add(mkTar(f, ent{name: "s", link: "/", kind: tar.TypeSymlink}, ent{name: "s/tmp/x"}))
	f.Fuzz(func(t *testing.T, data []byte) {
		top := t.TempDir()
		dir := filepath.Join(top, "in", "l")
		os.Mkdir(filepath.Dir(dir), 0o755)
		lim := Limits{MaxBytes: 1 << 20, MaxFileBytes: 1 << 20, MaxEntries: 1000}
		_, err := Extract(context.Background(), bytes.NewReader(data), dir, ExtractOptions{Whiteouts: true, Limits: lim})
		if sandbox.CodeOf(err) == sandbox.CodeInternal {
			t.Errorf("an archive made it fail: %v", err)
		}
		if err == nil {
			if _, _, err := HashTree(context.Background(), dir, HashOptions{}); err != nil {
				t.Errorf("what it extracted is no layer: %v", err)
			}
		}
		for _, d := range []string{top, filepath.Dir(dir)} {
			if names, _ := os.ReadDir(d); len(names) != 1 {
				t.Fatalf("it wrote outside: %v", names)
			}
		}
		if err := RemoveTree(dir); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzDecompress(f *testing.F) {
	f.Add([]byte{0x1f, 0x8b, 8, 0}, int64(10))
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd, 0}, int64(10))
	f.Fuzz(func(t *testing.T, data []byte, _ int64) {
		r, err := Decompress(bytes.NewReader(data), Limits{RatioFrom: 1 << 16})
		if err != nil {
			return
		}
		defer r.Close()
		bytes.NewBuffer(nil).ReadFrom(r)
	})
}
