package gvisor

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/testenv"
)

// onXFS gives a directory on an XFS with reflinks.
func onXFS(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "mkfs.xfs", "apt-get install xfsprogs")
	img, dir := filepath.Join(t.TempDir(), "img"), t.TempDir()
	f, err := os.Create(img)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(600 << 20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, argv := range [][]string{{"mkfs.xfs", "-q", "-m", "reflink=1", img}, {"mount", "-o", "loop", img, dir}} {
		if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%v: %v: %s", argv, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return dir
}

func usedBytes(t *testing.T, dir string) int64 {
	t.Helper()
	unix.Sync()
	d, err := host.ReadDisk(dir)
	if err != nil {
		t.Fatal(err)
	}
	return d.Total - d.Free
}

func TestShare(t *testing.T) {
	dir := onXFS(t)
	const mib = 1 << 20
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 64*mib)
	for i := 0; i < len(data); i += 8 {
		v := rng.Uint64()
		for k := range 8 {
			data[i+k] = byte(v >> (8 * k))
		}
	}
	write := func(name string, parts ...[]byte) *os.File {
		t.Helper()
		f, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		at := int64(0)
		for _, p := range parts {
			if !zero(p) {
				if _, err := f.WriteAt(p, at); err != nil {
					t.Fatal(err)
				}
			}
			at += int64(len(p))
		}
		if err := f.Truncate(at); err != nil {
			t.Fatal(err)
		}
		return f
	}
	hole := make([]byte, 8*mib)
	src := write("src", data[:20*mib], hole, data[20*mib:])
	changed := bytes.Clone(data)
	changed[30*mib+5] ^= 1 // of a page in the middle
	changed[0] ^= 1
	copy_ := write("copy", changed[:20*mib], hole, changed[20*mib:])
	// A capture has what is no hole, closed up and behind other things.
	image := write("image", data[:3*pageSize], data[pageSize:20*mib], data[20*mib:50*mib])
	want := map[*os.File][]byte{}
	for _, f := range []*os.File{src, copy_, image} {
		all, err := os.ReadFile(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		want[f] = all
	}
	before := usedBytes(t, dir)
	if err := shareFiles(t.Context(), src, copy_); err != nil {
		t.Fatal(err)
	}
	one := usedBytes(t, dir)
	if saved := before - one; saved < 62*mib {
		t.Errorf("a copy of 64 MiB with two changes saves %d KiB", saved>>10)
	}
	if err := shareFound(t.Context(), src, image); err != nil {
		t.Fatal(err)
	}
	if saved := one - usedBytes(t, dir); saved < 48*mib {
		t.Errorf("a capture of 50 MiB saves %d KiB", saved>>10)
	}
	for f, old := range want {
		if now, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(now, old) {
			t.Errorf("%s has changed (%v)", f.Name(), err)
		}
	}
}

// TestShareWithout has nothing happen on a filesystem without reflinks.
func TestShareWithout(t *testing.T) {
	dir := t.TempDir()
	if host.Reflinks(dir) == nil {
		t.Skip("the filesystem of the tests has reflinks")
	}
	var files [2]*os.File
	for n := range files {
		f, err := os.Create(filepath.Join(dir, string(rune('a'+n))))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(bytes.Repeat([]byte("x"), shareLeast)); err != nil {
			t.Fatal(err)
		}
		files[n] = f
	}
	if err := (&Instance{}).notShared(t.Context(), shareFiles(t.Context(), files[0], files[1])); err != nil {
		t.Error(err)
	}
}
