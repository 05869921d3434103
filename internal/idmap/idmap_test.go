package idmap

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/testenv"
)

func TestForSlot(t *testing.T) {
	for _, c := range []struct {
		slot int
		base uint32
		ok   bool
	}{
		{0, 1 << 24, true},
		{1, 1<<24 + 65536, true},
		{16383, 1<<24 + 16383*65536, true},
		{-1, 0, false},
		{16384, 0, false},
	} {
		r, err := ForSlot(c.slot)
		if (err == nil) != c.ok || r.Base != c.base {
			t.Errorf("ForSlot(%d) = %d, %v; want %d", c.slot, r.Base, err, c.base)
		}
		if c.ok && uint64(r.Base)+Size > 1<<31 {
			t.Errorf("slot %d: ids reach %d, above 2^31", c.slot, uint64(r.Base)+Size)
		}
	}
}

func TestUserNSMapsTheRangeAndLeavesNoProcess(t *testing.T) {
	testenv.Root(t)
	r, _ := ForSlot(7)
	ns, err := r.UserNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", ns.Fd())); err != nil || !strings.HasPrefix(name, "user:[") {
		t.Fatalf("not a user namespace: %q, %v", name, err)
	}
	children, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", unix.Gettid()))
	if err == nil && len(strings.TrimSpace(string(children))) != 0 {
		t.Errorf("children left: %s", children)
	}
}

func TestOpenTreeShowsMappedIDs(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(file, 0, 1000); err != nil {
		t.Fatal(err)
	}
	r, _ := ForSlot(3)
	ns, err := r.UserNS()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	tree, err := OpenTree(dir, ns, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	var st unix.Stat_t
	if err := unix.Fstatat(int(tree.Fd()), "f", &st, 0); err != nil {
		t.Fatal(err)
	}
	if st.Uid != r.Base || st.Gid != r.Base+1000 {
		t.Errorf("through the mapping the file is %d:%d, want %d:%d", st.Uid, st.Gid, r.Base, r.Base+1000)
	}
	ro, err := OpenTree(dir, nil, unix.MOUNT_ATTR_RDONLY)
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	if _, err := unix.Openat(int(ro.Fd()), "new", unix.O_CREAT|unix.O_WRONLY, 0o600); err != syscall.EROFS {
		t.Errorf("writing through a read-only tree: %v, want EROFS", err)
	}
}

func TestSupported(t *testing.T) {
	testenv.Root(t)
	if err := Supported("/proc"); err == nil {
		t.Error("/proc is said to have idmapped mounts; it has none")
	}
}

func TestUserNSIsKept(t *testing.T) {
	testenv.Root(t)
	var names []string
	for slot := range maxKept + 10 {
		r, _ := ForSlot(slot)
		for range 2 {
			ns, err := r.UserNS()
			if err != nil {
				t.Fatal(err)
			}
			name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, name)
			if err := ns.Close(); err != nil { // the caller's own
				t.Fatal(err)
			}
		}
		if n := len(names); names[n-1] != names[n-2] {
			t.Errorf("slot %d: %s and then %s", slot, names[n-2], names[n-1])
		}
	}
	if len(kept) > maxKept {
		t.Errorf("%d are kept, more than %d", len(kept), maxKept)
	}
}

func BenchmarkUserNS(b *testing.B) {
	testenv.Root(b)
	r, _ := ForSlot(0)
	for b.Loop() {
		ns, err := r.newUserNS()
		if err != nil {
			b.Fatal(err)
		}
		ns.Close()
	}
}
