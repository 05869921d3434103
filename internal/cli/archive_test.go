package cli

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func tarOf(t *testing.T, headers ...tar.Header) io.Reader {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, h := range headers {
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if err := tw.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			tw.Write([]byte("evil"))
		}
	}
	tw.Close()
	return &b
}

// An archive out of a sandbox must not write outside of where it is put.
func TestUnpackStaysInside(t *testing.T) {
	reg, link, hard, dir := byte(tar.TypeReg), byte(tar.TypeSymlink), byte(tar.TypeLink), byte(tar.TypeDir)
	for name, hs := range map[string][]tar.Header{
		"dot dot":                 {{Name: "top/../../out", Typeflag: reg}},
		"absolute":                {{Name: "/out", Typeflag: reg}},
		"through a symlink":       {{Name: "top/l", Typeflag: link, Linkname: ".."}, {Name: "top/l/../out", Typeflag: reg}, {Name: "top/l/out", Typeflag: reg}},
		"through an absolute one": {{Name: "top/l", Typeflag: link, Linkname: "OUTSIDE"}, {Name: "top/l/out", Typeflag: reg}},
		"over a symlink":          {{Name: "top/l", Typeflag: link, Linkname: "OUTSIDE/victim"}, {Name: "top/l", Typeflag: reg}},
		"the top is a symlink":    {{Name: "top", Typeflag: link, Linkname: "OUTSIDE"}, {Name: "top/out", Typeflag: reg}},
		"a hard link out":         {{Name: "top/h", Typeflag: hard, Linkname: "../victim"}},
		"a hard link by symlink":  {{Name: "top/l", Typeflag: link, Linkname: "OUTSIDE"}, {Name: "top/h", Typeflag: hard, Linkname: "top/l/victim"}, {Name: "top/h", Typeflag: reg}},
		"a directory's mode":      {{Name: "top/d", Typeflag: dir, Mode: 0o777}, {Name: "top/d", Typeflag: link, Linkname: "OUTSIDE"}},
		"devices":                 {{Name: "top/dev", Typeflag: tar.TypeBlock}, {Name: "top/fifo", Typeflag: tar.TypeFifo}},
	} {
		t.Run(name, func(t *testing.T) {
			outside, inside := t.TempDir(), filepath.Join(t.TempDir(), "a", "in")
			if err := os.MkdirAll(inside, 0o755); err != nil {
				t.Fatal(err)
			}
			victim := filepath.Join(outside, "victim")
			if err := os.WriteFile(victim, []byte("good"), 0o600); err != nil {
				t.Fatal(err)
			}
			for i := range hs {
				hs[i].Linkname = strings.ReplaceAll(hs[i].Linkname, "OUTSIDE", outside)
			}
			var errs bytes.Buffer
			p := &copier{a: &app{err: &errs}, quiet: true}
			err := p.unpack(context.Background(), tarOf(t, hs...), inside, "as")
			t.Logf("%v %s", err, errs.String())
			if data, err := os.ReadFile(victim); err != nil || string(data) != "good" {
				t.Errorf("the file outside: %q, %v", data, err)
			}
			if st, err := os.Stat(outside); err != nil || st.Mode().Perm() != 0o755 {
				t.Errorf("the directory outside: %v, %v", st.Mode(), err)
			}
			if es, _ := os.ReadDir(outside); len(es) != 1 {
				t.Errorf("outside there are now %v", es)
			}
			up := filepath.Dir(inside)
			if es, _ := os.ReadDir(up); len(es) != 1 {
				t.Errorf("above there are now %v", es)
			}
		})
	}
}

func TestPackAndUnpack(t *testing.T) {
	src, dst := t.TempDir(), t.TempDir()
	long := strings.Repeat("long", 60)
	for name, data := range map[string]string{"a": "A", "d/b": "B", "d/" + long: "L", "empty": ""} {
		path := filepath.Join(src, name)
		os.MkdirAll(filepath.Dir(path), 0o755)
		if err := os.WriteFile(path, []byte(data), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("a", filepath.Join(src, "link")); err != nil {
		t.Fatal(err)
	}
	var errs bytes.Buffer
	p := &copier{a: &app{err: &errs}, quiet: true}
	var b bytes.Buffer
	if err := p.pack(t.Context(), &b, src, "name"); err != nil {
		t.Fatal(err)
	}
	if err := p.unpack(t.Context(), &b, dst, "other"); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a": "A", "d/b": "B", "d/" + long: "L", "empty": "", "link": "A"} {
		if got, err := os.ReadFile(filepath.Join(dst, "other", name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if l, err := os.Readlink(filepath.Join(dst, "other/link")); err != nil || l != "a" {
		t.Errorf("link: %q, %v", l, err)
	}
	if st, err := os.Stat(filepath.Join(dst, "other/a")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode: %v, %v", st.Mode(), err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add([]byte("not a tar"))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		in := filepath.Join(dir, "in")
		if err := os.Mkdir(in, 0o755); err != nil {
			t.Fatal(err)
		}
		p := &copier{a: &app{err: io.Discard}, quiet: true}
		p.unpack(t.Context(), bytes.NewReader(data), in, "as")
		if es, _ := os.ReadDir(dir); len(es) != 1 {
			t.Fatalf("beside the target there are %v", es)
		}
	})
}
