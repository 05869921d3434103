package gvisor

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// pages is a file's entry in an index: its size and parts (start, end, place).
func pages(size uint64, parts ...[3]uint64) string {
	b := binary.LittleEndian.AppendUint64(nil, size)
	for _, p := range parts {
		for _, n := range p {
			b = binary.LittleEndian.AppendUint64(b, n)
		}
	}
	return string(b)
}

func extractUpper(ctx context.Context, r io.Reader, store *os.File, dir string) error {
	u, err := newUpper(ctx, store, dir)
	if err != nil {
		return err
	}
	defer u.root.Close()
	if err := u.extract(r); err != nil {
		return err
	}
	return u.finish()
}

type indexEntry struct {
	tar.Header
	content string
}

func dirEntry(name string) indexEntry {
	return indexEntry{Header: tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}}
}

func index(t testing.TB, entries ...indexEntry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.content))
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// aStore is a store of four pages: of a, b, zeros and d.
func aStore(t testing.TB) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "store"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	for n, c := range []string{"a", "b", "\x00", "d"} {
		if _, err := f.WriteAt([]byte(strings.Repeat(c, pageSize)), int64(n*pageSize)); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func TestExtractUpper(t *testing.T) {
	testenv.Root(t)
	store := aStore(t)
	data := index(t,
		indexEntry{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}},
		indexEntry{
			Header:  tar.Header{Name: "./f", Typeflag: tar.TypeReg, Mode: 0o6711, Uid: 7, Gid: 8, ModTime: time.Unix(981173106, 0), PAXRecords: map[string]string{"SCHILY.xattr.user.k": "v", "SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.user.overlay.opaque": "y"}},
			content: pages(pageSize*9+10, [3]uint64{0, pageSize, pageSize}, [3]uint64{8 * pageSize, 10 * pageSize, 2 * pageSize}),
		},
		indexEntry{Header: tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "./f"}},
		indexEntry{Header: tar.Header{Name: "./s", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd", Uid: 5}},
		indexEntry{Header: tar.Header{Name: "./gone", Typeflag: tar.TypeChar}},
		indexEntry{Header: tar.Header{Name: "./sda", Typeflag: tar.TypeBlock, Devmajor: 8}},
		indexEntry{Header: tar.Header{Name: "./p", Typeflag: tar.TypeFifo, Mode: 0o622}},
		indexEntry{Header: tar.Header{Name: "./new/", Typeflag: tar.TypeDir, Mode: 0o1777, ModTime: time.Unix(5, 0), PAXRecords: map[string]string{"SCHILY.xattr.trusted.overlay.opaque": "y"}}},
		dirEntry("./.warren/"), dirEntry("./.warren/agent/"),
		indexEntry{Header: tar.Header{Name: "./new/caf\xe9", Typeflag: tar.TypeReg, Mode: 0o600}, content: pages(0)},
	)
	dir := t.TempDir()
	if err := extractUpper(t.Context(), bytes.NewReader(data), store, dir); err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(dir, name) }
	got, err := os.ReadFile(at("f"))
	want := strings.Repeat("b", pageSize) + strings.Repeat("\x00", 8*pageSize) + strings.Repeat("d", 10)
	if err != nil || string(got) != want {
		t.Errorf("f has %d bytes (%v)", len(got), err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(at("f"), &st); err != nil || st.Mode&0o7777 != 0o6711 || st.Uid != 7 || st.Gid != 8 || st.Nlink != 2 || st.Mtim.Sec != 981173106 || st.Blocks > 3*8 {
		t.Errorf("f is %+v, %v", st, err)
	}
	names := make([]byte, 200)
	n, _ := unix.Llistxattr(at("f"), names)
	if string(names[:n]) != "user.k\x00" {
		t.Errorf("f has the attributes %q", names[:n])
	}
	for _, name := range []string{"gone", "sda"} {
		if err := unix.Lstat(at(name), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != 0 {
			t.Errorf("%s is no whiteout: %+v, %v", name, st, err)
		}
	}
	if to, err := os.Readlink(at("s")); to != "/etc/passwd" || err != nil {
		t.Errorf("s → %q, %v", to, err)
	}
	value := make([]byte, 8)
	if n, err := unix.Lgetxattr(at("new"), opaqueXattr, value); err != nil || string(value[:n]) != "y" {
		t.Errorf("new is not opaque: %v", err)
	}
	if err := unix.Lstat(at("new"), &st); err != nil || st.Mtim.Sec != 5 || st.Mode&0o7777 != 0o1777 {
		t.Errorf("new is %+v, %v", st, err)
	}
	if err := unix.Lstat(at("new/caf\xe9"), &st); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(at(".warren")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the mount point was captured")
	}
}

func TestExtractUpperRefuses(t *testing.T) {
	testenv.Root(t)
	root := dirEntry("./")
	file := func(name, content string) indexEntry {
		return indexEntry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content: content}
	}
	link := func(name, to string) indexEntry {
		return indexEntry{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}}
	}
	for name, entries := range map[string][]indexEntry{
		"out of the root":        {root, file("./../x", pages(0))},
		"absolute":               {root, file("/x", pages(0))},
		"no parent":              {root, file("./a/x", pages(0))},
		"below a link":           {root, link("./a", "/tmp"), file("./a/x", pages(0))},
		"twice":                  {root, link("./a", "/tmp/x"), file("./a", pages(0))},
		"link out":               {root, {Header: tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}}},
		"link to a directory":    {root, dirEntry("./d/"), {Header: tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "./d"}}},
		"link to what is not":    {root, {Header: tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "./d"}}},
		"negative owner":         {root, {Header: tar.Header{Name: "./f", Typeflag: tar.TypeFifo, Uid: -1}}},
		"no size":                {root, file("./f", "1234")},
		"half a part":            {root, file("./f", pages(1)+"12")},
		"no part of a page":      {root, file("./f", pages(4096, [3]uint64{0, 100, 0}))},
		"empty part":             {root, file("./f", pages(4096, [3]uint64{4096, 4096, 0}))},
		"parts that overlap":     {root, file("./f", pages(8192, [3]uint64{0, 8192, 0}, [3]uint64{4096, 8192, 0}))},
		"more than the store":    {root, file("./f", pages(1<<40, [3]uint64{0, 1 << 40, 0}))},
		"the store again, again": {root, file("./f", pages(16384, [3]uint64{0, 16384, 0})), file("./g", pages(16384, [3]uint64{0, 16384, 0}))},
		"far beyond the store":   {root, file("./f", pages(4096, [3]uint64{0, 4096, 1 << 63}))},
		"a size beyond all":      {root, file("./f", pages(1<<63))},
		"unknown type":           {root, {Header: tar.Header{Name: "./f", Typeflag: tar.TypeCont}}},
	} {
		t.Run(name, func(t *testing.T) {
			outside := filepath.Join(t.TempDir(), "in")
			if err := os.Mkdir(outside, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := extractUpper(t.Context(), bytes.NewReader(index(t, entries...)), aStore(t), outside); err == nil {
				t.Error("it was taken")
			} else if sandbox.CodeOf(err) == "" {
				t.Error("no code")
			}
			if left, _ := os.ReadDir(filepath.Dir(outside)); len(left) != 1 {
				t.Errorf("it wrote outside: %v", left)
			}
		})
	}
}

// FuzzExtractUpper looks for an index that writes outside its directory, makes
// more than the store has, or a device.
func FuzzExtractUpper(f *testing.F) {
	if os.Getuid() != 0 {
		f.Skip("needs root: run `make test-root` as root")
	}
	f.Add(index(f, dirEntry("./"), indexEntry{Header: tar.Header{Name: "./f", Typeflag: tar.TypeReg}, content: pages(5000, [3]uint64{0, 8192, 4096})}))
	f.Add(index(f, dirEntry("./"), dirEntry("./d/"), indexEntry{Header: tar.Header{Name: "./d/s", Typeflag: tar.TypeSymlink, Linkname: "../.."}},
		indexEntry{Header: tar.Header{Name: "./w", Typeflag: tar.TypeChar}}))
	f.Fuzz(func(t *testing.T, data []byte) {
		top := t.TempDir()
		dir := filepath.Join(top, "in")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		store := aStore(t)
		u, err := newUpper(t.Context(), store, dir)
		if err != nil {
			t.Fatal(err)
		}
		defer u.root.Close()
		_ = u.extract(bytes.NewReader(data)) // finish flushes the disk, which takes its time
		if left, _ := os.ReadDir(top); len(left) != 1 {
			t.Fatalf("it wrote outside: %v", left)
		}
		blocks := int64(0)
		filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			var st unix.Stat_t
			if err != nil || unix.Lstat(path, &st) != nil {
				return nil
			}
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFREG:
				blocks += st.Blocks * 512 / int64(max(st.Nlink, 1))
			case unix.S_IFBLK:
				t.Fatalf("%s is a device", path)
			case unix.S_IFCHR:
				if st.Rdev != 0 {
					t.Fatalf("%s is a device", path)
				}
			}
			return nil
		})
		if blocks > 8*pageSize {
			t.Fatalf("of a store of four pages it made %d bytes", blocks)
		}
	})
}
