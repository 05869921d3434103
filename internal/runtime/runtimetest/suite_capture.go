package runtimetest

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// seen is what a sandbox sees of its root filesystem: the kind, mode, owner,
// links, size, time, target and content of each file, a line each. Sizes of
// directories are their filesystem's business, and / and /tmp get Warren's mount
// points at each start.
func seen(t *testing.T, i sandbox.Instance) []string {
	t.Helper()
	return strings.Split(Sh(t, i, `
		skip="( -path /proc -o -path /sys -o -path /dev -o -path /.warren -o -path /tmp/.warren ) -prune -o"
		find / $skip -type d ! -path / ! -path /tmp -print0 | sort -z | xargs -0 stat -c '%N %A %u:%g %y'
		find / $skip ! -type d -print0 | sort -z | xargs -0 stat -c '%N %A %u:%g %h %s %y'
		find / $skip -type f -print0 | sort -z | xargs -0 md5sum`), "\n")
}

// testCapture takes a sandbox's changes as a layer, and runs others on it.
func testCapture(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	c, ok := i.(sandbox.DiskCapturer)
	if ok != e.Driver.Capabilities().DiskCapture {
		t.Fatalf("DiskCapturer is %v, the capability says otherwise", ok)
	}
	if !ok {
		t.Skip("this runtime cannot capture disks")
	}
	Sh(t, i, `
		rm -r /etc/of-layer /opt/suid && mkdir /opt/suid && echo new > /opt/suid/only
		echo a > /a && chown 1000:1000 /a && chmod 4755 /a && ln /a /b && ln -s /a /c
		dd if=/dev/zero of=/sparse bs=1 count=1 seek=10000000 2>/dev/null
		mkdir -p /deep/er && chmod 700 /deep && chown 1000:1000 /deep/er && touch -d '2001-02-03 04:05:06' /deep/er
		mknod /fifo p; echo q > "/we ird
name"; mkdir /opt/again && rm -r /opt/again && mkdir /opt/again
		for n in $(seq 300); do echo $n > /deep/$n; done; dd if=/dev/urandom of=/deep/bulk bs=64k count=40 2>/dev/null
		mkdir /renamed; mv /deep/er /renamed/; rm /bin/dmesg; echo x >> /etc/passwd; chmod 600 /etc/group; touch -d @86400 /root`)
	before := seen(t, i)
	dir := filepath.Join(t.TempDir(), "captured")
	if err := c.CaptureDisk(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	Sh(t, i, "echo later > /a") // it goes on, and the capture does not follow
	if err := c.CaptureDisk(t.Context(), dir); err == nil {
		t.Error("captured onto a directory that exists")
	}
	var sparse unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "sparse"), &sparse); err != nil || sparse.Blocks > 100 {
		t.Errorf("the hole was filled: %d blocks, %v", sparse.Blocks, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, ".warren")); err == nil {
		t.Error("the capture has Warren's own mount point")
	}
	small := t.TempDir()
	Run(t, "mount", "-t", "tmpfs", "-o", "size=1m", "small", small)
	t.Cleanup(func() { Run(t, "umount", small) })
	if err := c.CaptureDisk(t.Context(), filepath.Join(small, "c")); sandbox.CodeOf(err) != sandbox.CodeDiskFull {
		t.Errorf("a capture that does not fit: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(small, "c")); err == nil {
		t.Error("a capture that does not fit left its directory")
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	part := filepath.Join(t.TempDir(), "part")
	if err := c.CaptureDisk(canceled, part); err == nil {
		t.Error("a canceled capture worked")
	}
	if _, err := os.Lstat(part); err == nil {
		t.Error("a canceled capture left its directory")
	}
	Sh(t, i, "true") // thawed all the same

	next := e.Spec(t)
	next.Layers = append([]string{dir}, spec.Layers...)
	j := e.Create(t, next)
	for _, x := range []struct{ cmd, want string }{
		{"ls /etc/of-layer 2>/dev/null || echo gone", "gone"},
		{"ls /opt/suid", "only"}, // the directory hides the lower one
		{"cat /a; stat -c '%u:%g %a %h' /a", "a\n1000:1000 4755 2"},
		{"readlink /c", "/a"},
		{"stat -c %s /sparse", "10000001"},
		{"stat -c '%u %a' /deep; stat -c '%u %y' /renamed/er", "0 700\n1000 2001-02-03 04:05:06.000000000 +0000"},
		{"test -p /fifo && echo fifo", "fifo"},
	} {
		if got := Sh(t, j, x.cmd); got != x.want {
			t.Errorf("on the capture %s = %q, want %q", x.cmd, got, x.want)
		}
	}

	if d := cmp.Diff(before, seen(t, j)); d != "" {
		t.Errorf("on the capture the files are others (-before +after):\n%s", d)
	}

	// A capture of what stands on a capture.
	Sh(t, j, "rm /a /deep/1; echo third > /deep/2; mkdir /opt/suid2; rm -r /renamed; mkdir /renamed")
	third := seen(t, j)
	onto := filepath.Join(t.TempDir(), "onto")
	if err := j.(sandbox.DiskCapturer).CaptureDisk(t.Context(), onto); err != nil {
		t.Fatal(err)
	}
	last := e.Spec(t)
	last.Layers = append([]string{onto}, next.Layers...)
	if d := cmp.Diff(third, seen(t, e.Create(t, last))); d != "" {
		t.Errorf("on the capture of a capture the files are others (-before +after):\n%s", d)
	}

	// A file larger than the sandbox's memory, and a hole larger than the disk.
	Sh(t, j, "dd if=/dev/urandom of=/large bs=1M count=300 2>/dev/null; dd if=/dev/null of=/huge bs=1M count=0 seek=1048576 2>/dev/null")
	large := filepath.Join(t.TempDir(), "large")
	if err := j.(sandbox.DiskCapturer).CaptureDisk(t.Context(), large); err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int64{"large": 300 << 20, "huge": 1 << 40} {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(large, name), &st); err != nil || st.Size != size || st.Blocks*512 > 301<<20 {
			t.Errorf("%s has %d bytes in %d blocks, %v", name, st.Size, st.Blocks, err)
		}
	}
	Sh(t, j, "true")

	// A suspended one is captured and stays suspended.
	if s, ok := i.(sandbox.Suspender); ok {
		if err := s.Suspend(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.CaptureDisk(t.Context(), filepath.Join(t.TempDir(), "c")); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, _, err := Exec(ctx, i, "true"); err == nil {
			t.Error("the capture woke the suspended sandbox")
		}
	}
}
