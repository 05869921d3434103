package fstree

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// describe tells all of a tree that a copy must keep, a line for each file.
func describe(t *testing.T, dir string) []string {
	t.Helper()
	var lines []string
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		line := fmt.Sprintf("%s mode=%o owner=%d:%d mtime=%d.%09d", rel, st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			data, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" size=%d data=%x", st.Size, hash(data))
		case unix.S_IFLNK:
			target, _ := os.Readlink(path)
			line += " -> " + target
		case unix.S_IFCHR, unix.S_IFBLK:
			line += fmt.Sprintf(" rdev=%d", st.Rdev)
		}
		if !d.IsDir() {
			if st.Nlink > 1 {
				if f, ok := first[st.Ino]; ok {
					line += " link of " + f
				} else {
					first[st.Ino] = rel
				}
			}
			line += fmt.Sprintf(" nlink=%d", st.Nlink)
		}
		names := make([]byte, 4096)
		n, err := unix.Llistxattr(path, names)
		if err == nil && n > 0 {
			all := strings.Split(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00")
			sort.Strings(all)
			for _, name := range all {
				value := make([]byte, 4096)
				n, err := unix.Lgetxattr(path, name, value)
				if err != nil {
					return err
				}
				line += fmt.Sprintf(" %s=%x", name, value[:n])
			}
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

func hash(data []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, b := range data {
		h = (h ^ uint64(b)) * 1099511628211
	}
	return h
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// build makes a tree with everything that a captured upper can have.
func build(t *testing.T, dir string) {
	t.Helper()
	p := func(name string) string { return filepath.Join(dir, name) }
	must(t,
		os.MkdirAll(p("a/b/c"), 0o755),
		os.WriteFile(p("a/file"), []byte("content"), 0o640),
		os.Chown(p("a/file"), 1000, 1001),
		os.Chmod(p("a/file"), 0o640|fs.ModeSetuid|fs.ModeSetgid),
		os.Link(p("a/file"), p("a/b/hard")),
		os.Symlink("/etc/passwd", p("abs")),
		os.Symlink("nowhere", p("dangling")),
		os.Link(p("dangling"), p("dangling2")),
		os.Lchown(p("abs"), 5, 6),
		unix.Mknod(p("whiteout"), unix.S_IFCHR, 0),
		unix.Mkfifo(p("fifo"), 0o611),
		os.WriteFile(p("empty"), nil, 0o600),
		os.Chmod(p("a/b"), 0o700|fs.ModeSticky),
		unix.Lsetxattr(p("a"), "trusted.overlay.opaque", []byte("y"), 0),
		unix.Lsetxattr(p("a/b/c"), "user.k", []byte("v\x00w"), 0),
		unix.Lsetxattr(p("abs"), "trusted.l", []byte("link"), 0),
		os.WriteFile(p("a/ping"), []byte("x"), 0o755),
		// cap_net_raw=ep, VFS_CAP_REVISION_2 (linux/capability.h)
		unix.Lsetxattr(p("a/ping"), "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0),
		unix.UtimesNanoAt(unix.AT_FDCWD, p("a"), []unix.Timespec{{Sec: 1, Nsec: 2}, {Sec: 981173106, Nsec: 7}}, 0),
	)
	f, err := os.Create(p("sparse"))
	must(t, err)
	_, err = f.WriteAt([]byte("middle"), 5<<20)
	must(t, err, f.Truncate(20<<20), f.Close())
	big := make([]byte, 3<<20)
	for i := range big {
		big[i] = byte(rand.Uint32())
	}
	must(t, os.WriteFile(p("big"), big, 0o644))
	for i := range 600 { // more than one read of the directory
		must(t, os.WriteFile(p(fmt.Sprintf("a/b/c/%d", i)), []byte{byte(i)}, 0o644))
	}
}

func TestCopyKeepsEverything(t *testing.T) {
	testenv.Root(t)
	src, dst := filepath.Join(t.TempDir(), "src"), filepath.Join(t.TempDir(), "dst")
	must(t, os.Mkdir(src, 0o751))
	build(t, src)
	if err := Copy(t.Context(), src, dst, Options{}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(describe(t, src), describe(t, dst)); d != "" {
		t.Errorf("the copy differs (-source +copy):\n%s", d)
	}
	var st unix.Stat_t
	must(t, unix.Stat(filepath.Join(dst, "sparse"), &st))
	if st.Blocks*512 > 1<<20 {
		t.Errorf("the holes were filled: %d bytes on the disk", st.Blocks*512)
	}
}

func TestCopyByReflink(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "mkfs.xfs", "apt-get install xfsprogs")
	img, dir := filepath.Join(t.TempDir(), "img"), t.TempDir()
	f, err := os.Create(img)
	must(t, err, f.Truncate(512<<20), f.Close())
	if out, err := exec.Command("mkfs.xfs", "-q", "-m", "reflink=1", img).CombinedOutput(); err != nil {
		t.Skipf("mkfs.xfs: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", img, dir).CombinedOutput(); err != nil {
		t.Skipf("cannot mount XFS: %v: %s", err, out)
	}
	t.Cleanup(func() { exec.Command("umount", dir).Run() })
	src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
	must(t, os.Mkdir(src, 0o755))
	build(t, src)
	if out, err := exec.Command("dd", "if=/dev/urandom", "of="+filepath.Join(src, "bulk"), "bs=1M", "count=100").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	unix.Sync()
	var before, after unix.Statfs_t
	must(t, unix.Statfs(dir, &before), Copy(t.Context(), src, dst, Options{}), unix.Statfs(dir, &after))
	if used := (int64(before.Bfree) - int64(after.Bfree)) * before.Bsize; used > 20<<20 {
		t.Errorf("a copy of 100 MiB by reflinks took %d bytes", used)
	}
	if d := cmp.Diff(describe(t, src), describe(t, dst)); d != "" {
		t.Errorf("the copy differs (-source +copy):\n%s", d)
	}
}

func TestCopySkips(t *testing.T) {
	testenv.Root(t)
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "dst")
	build(t, src)
	must(t, Copy(t.Context(), src, dst, Options{Skip: func(p string) bool { return p == "a/b" || p == "big" }}))
	for _, gone := range []string{"a/b", "big"} {
		if _, err := os.Lstat(filepath.Join(dst, gone)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s was copied: %v", gone, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dst, "a/file")); err != nil {
		t.Error(err)
	}
}

func TestCopyFailsWhole(t *testing.T) {
	testenv.Root(t)
	src := t.TempDir()
	build(t, src)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dst := filepath.Join(t.TempDir(), "dst")
	if err := Copy(ctx, src, dst, Options{}); !errors.Is(err, context.Canceled) || sandbox.CodeOf(Error(err, "copy")) != sandbox.CodeCanceled {
		t.Errorf("canceled copy = %v", err)
	}
	if _, err := os.Lstat(dst); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a canceled copy left its directory")
	}
	if err := Copy(t.Context(), filepath.Join(src, "none"), dst, Options{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("copy of nothing = %v", err)
	}
	if err := Copy(t.Context(), src, t.TempDir(), Options{}); !errors.Is(err, fs.ErrExist) {
		t.Errorf("copy onto something = %v", err)
	}

	small := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=1m", "small", small).CombinedOutput(); err != nil {
		t.Skipf("cannot mount a tmpfs: %v: %s", err, out)
	}
	defer exec.Command("umount", small).Run()
	err := Copy(t.Context(), src, filepath.Join(small, "dst"), Options{})
	if sandbox.CodeOf(Error(err, "copy")) != sandbox.CodeDiskFull {
		t.Errorf("copy onto a full disk = %v", err)
	}
	if left, _ := os.ReadDir(small); len(left) != 0 {
		t.Error("the copy that did not fit was left")
	}
}
