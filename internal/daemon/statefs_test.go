package daemon

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/host/statefs"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// onXFS has a stage's state directory on an XFS that the daemon mounts, with
// the templates in it.
func onXFS(t *testing.T) *stage {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "mkfs.xfs", "apt-get install xfsprogs")
	var fs *statefs.FS
	s := newStage(t, func(dir string, cfg *Config) {
		cfg.StateFS, cfg.StateFSSize = statefs.XFS, 1<<30
		cfg.Budget.DiskReserve = 1 << 20
		if host.Reflinks(cfg.State) == nil {
			t.Skip("the filesystem of the tests has reflinks itself")
		}
		var err error
		fs, err = statefs.Open(t.Context(), statefs.Config{State: cfg.State, Kind: statefs.XFS, Size: cfg.StateFSSize, Log: slog.New(slog.DiscardHandler)})
		if sandbox.CodeOf(err) == sandbox.CodeUnavailable {
			t.Skipf("cannot run here: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := fs.Close(); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *stage) loops(t *testing.T) (names []string) {
	t.Helper()
	items, err := census.Take(s.where)
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range items {
		if i.Kind == census.Loop {
			names = append(names, i.Name)
		}
	}
	return names
}

func TestStateFS(t *testing.T) {
	s := onXFS(t)
	if n := s.loops(t); n != nil || statefs.Mounted(s.cfg.State) {
		t.Fatalf("before the start there are %v", n)
	}
	s.start(t)
	first := s.loops(t)
	if len(first) != 1 || !statefs.Mounted(s.cfg.State) {
		t.Fatalf("the daemon has the loop devices %v", first)
	}
	if err := host.Reflinks(s.cfg.State); err != nil {
		t.Fatal(err)
	}
	s.verify(t)

	// A snapshot of a disk costs what is written of it, not the disk: nothing.
	for _, runtime := range []string{"container", "gvisor"} {
		id := s.create(t, wire.CreateSandbox{Runtime: runtime}).ID
		if _, err := s.run(id, "dd if=/dev/urandom of=/root/bulk bs=1M count=100"); err != nil {
			t.Fatal(err)
		}
		before := s.used(t)
		for range 3 {
			n, err := s.client.CreateSnapshot(t.Context(), id, wire.CreateSnapshot{Kind: sandbox.SnapshotDisk})
			if err != nil {
				t.Fatalf("%v\n%s", err, s.d.stderr)
			}
			if n.SizeBytes < 100<<20 {
				t.Errorf("the snapshot has %d bytes", n.SizeBytes)
			}
		}
		if cost := s.used(t) - before; cost > 20<<20 {
			t.Errorf("three snapshots of the disk of a %s, with 100 MiB written, cost %d MiB", runtime, cost>>20)
		}
	}

	// Copies with memory share what they have not changed, soon after the fork.
	s.killAll(t)
	id := s.create(t, wire.CreateSandbox{Runtime: "gvisor"}).ID
	const sum = "busybox md5sum /root/bulk"
	old, err := s.run(id, "dd if=/dev/urandom of=/root/bulk bs=1M count=100 2>/dev/null; "+sum)
	if err != nil {
		t.Fatal(err)
	}
	before := s.used(t)
	forks, err := s.client.Fork(t.Context(), id, wire.Fork{Count: 2, Kind: sandbox.SnapshotFull})
	if err != nil {
		t.Fatal(err)
	}
	cost := s.used(t) - before
	for end := time.Now().Add(time.Minute); cost > 40<<20 && time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		cost = s.used(t) - before
	}
	if cost > 40<<20 {
		t.Errorf("two copies of a sandbox with 100 MiB on its disk cost %d MiB", cost>>20)
	}
	for _, f := range forks.Forks {
		if f.Error != nil {
			t.Fatal(f.Error.Err())
		}
		if now, err := s.run(f.Sandbox.ID, sum); err != nil || now != old {
			t.Errorf("the copy has %q, not %q (%v)", now, old, err)
		}
	}
	s.killAll(t)

	// The daemon is killed: the mount is found again, and what ran runs on.
	counted := s.create(t, wire.CreateSandbox{Runtime: "container"}).ID
	s.counter(t, counted)
	if _, err := s.run(counted, "until test -s /tmp/count; do sleep 0.05; done"); err != nil {
		t.Fatal(err)
	}
	s.d.kill(t)
	s.start(t)
	s.counts(t, counted)
	if n := s.loops(t); !slices.Equal(n, first) {
		t.Errorf("after a kill the loop devices are %v, not %v", n, first)
	}
	s.verify(t)

	// It stops cleanly while sandboxes run: it stays mounted.
	s.d.terminate(t)
	if !statefs.Mounted(s.cfg.State) {
		t.Error("the state directory was unmounted under a sandbox")
	}
	// It does not need to be told again, and grows.
	s.cfg.StateFS, s.cfg.StateFSSize = "", 2<<30
	s.start(t)
	s.counts(t, counted)
	if d, err := host.ReadDisk(s.cfg.State); err != nil || d.Total < 3<<29 {
		t.Errorf("the filesystem has %d MiB (%v)", d.Total>>20, err)
	}
	if n := s.loops(t); !slices.Equal(n, first) {
		t.Errorf("the loop devices are %v, not %v", n, first)
	}

	// What is removed is given back to the host's filesystem.
	s.killAll(t)
	for n, err := range s.client.Snapshots(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		if err := s.client.RemoveSnapshot(t.Context(), n.ID); err != nil {
			t.Fatal(err)
		}
	}
	s.d.terminate(t)
	if gone := s.loops(t); gone != nil || statefs.Mounted(s.cfg.State) {
		t.Errorf("after a clean stop without sandboxes there are %v", gone)
	}
	var st unix.Stat_t
	if err := unix.Stat(statefs.Image(s.cfg.State), &st); err != nil || st.Blocks*512 > 100<<20 {
		t.Errorf("the image holds %d MiB of the host's disk (%v)", st.Blocks*512>>20, err)
	}
}

// used is what the state directory's filesystem holds.
func (s *stage) used(t *testing.T) int64 {
	t.Helper()
	unix.Sync()
	d, err := host.ReadDisk(s.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	return d.Total - d.Free
}

// TestStateFSFull takes captures that do not fit.
func TestStateFSFull(t *testing.T) {
	s := onXFS(t)
	s.start(t)
	id := s.create(t, wire.CreateSandbox{Runtime: "gvisor"}).ID
	if _, err := s.run(id, "dd if=/dev/urandom of=/root/bulk bs=1M count=200"); err != nil {
		t.Fatal(err)
	}
	d, err := host.ReadDisk(s.cfg.State)
	if err != nil {
		t.Fatal(err)
	}
	ballast := filepath.Join(s.cfg.State, "others")
	f, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, d.Free-(60<<20)); err != nil {
		t.Fatal(err)
	}
	f.Close()
	_, err = s.client.CreateSnapshot(t.Context(), id, wire.CreateSnapshot{Name: "whole", Kind: sandbox.SnapshotFull})
	if sandbox.CodeOf(err) != sandbox.CodeDiskFull {
		t.Errorf("a full snapshot on a full disk: %v", err)
	}
	for n, err := range s.client.Snapshots(t.Context(), "") {
		t.Errorf("there is a snapshot %v, %v", n, err)
	}
	for _, dir := range []string{"snapshots", "snapshots/tmp"} {
		left, _ := os.ReadDir(filepath.Join(s.cfg.State, dir))
		for _, e := range left {
			if e.Name() != "tmp" {
				t.Errorf("%s/%s is left", dir, e.Name())
			}
		}
	}
	// The disk alone shares its blocks, and fits.
	if _, err := s.client.CreateSnapshot(t.Context(), id, wire.CreateSnapshot{Name: "shared", Kind: sandbox.SnapshotDisk}); err != nil {
		t.Errorf("a snapshot of the disk on a nearly full one: %v", err)
	}
	if out, err := s.run(id, "ls -s /root/bulk"); err != nil || !strings.Contains(out, "bulk") {
		t.Errorf("the sandbox does not go on: %q, %v", out, err)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	s.verify(t)
}

// TestStateFSCrash kills the daemon at each step of the making and mounting.
func TestStateFSCrash(t *testing.T) {
	s := onXFS(t)
	for _, point := range []string{"statefs.made", "statefs.attached", "statefs.mounted"} {
		t.Run(point, func(t *testing.T) {
			again := *s
			if point == "statefs.made" { // on a directory of its own
				again.cfg.State = filepath.Join(filepath.Dir(s.cfg.State), "new")
				if err := os.Mkdir(again.cfg.State, 0o700); err != nil {
					t.Fatal(err)
				}
				again.where.State = again.cfg.State
			}
			if p := again.launch(t, fault.Env+"="+point); !p.died(time.Minute) {
				t.Fatalf("the daemon does not come by the point:\n%s", p.stderr)
			}
			p := again.start(t)
			if n := again.loops(t); len(n) != 1 || !statefs.Mounted(again.cfg.State) {
				t.Errorf("the next daemon has %v", n)
			}
			p.terminate(t)
			if statefs.Mounted(again.cfg.State) {
				t.Error("it is left mounted")
			}
		})
	}
	s.start(t) // for the end of the stage
}

func TestStateFSRefuses(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "mkfs.xfs", "apt-get install xfsprogs")
	log := slog.New(slog.DiscardHandler)
	full := filepath.Join(t.TempDir(), "state")
	if err := os.MkdirAll(filepath.Join(full, "templates"), 0o700); err != nil {
		t.Fatal(err)
	}
	if host.Reflinks(full) == nil {
		t.Skip("the filesystem of the tests has reflinks itself")
	}
	for _, x := range []struct {
		cfg  statefs.Config
		code sandbox.Code
		says string
	}{
		{statefs.Config{State: full, Kind: "btrfs"}, sandbox.CodeInvalid, "xfs"},
		{statefs.Config{State: full, Kind: statefs.XFS, Size: 1 << 20}, sandbox.CodeInvalid, "512"},
		{statefs.Config{State: full, Kind: statefs.XFS}, sandbox.CodeConflict, "templates"},
		{statefs.Config{State: full + "none", Kind: statefs.XFS}, sandbox.CodeInvalid, "state directory"},
	} {
		x.cfg.Log = log
		fs, err := statefs.Open(t.Context(), x.cfg)
		if fs != nil || sandbox.CodeOf(err) != x.code || !strings.Contains(err.Error(), x.says) {
			t.Errorf("%+v: %v", x.cfg, err)
		}
	}
	if fs, err := statefs.Open(t.Context(), statefs.Config{State: full, Log: log}); fs != nil || err != nil {
		t.Errorf("without an image: %v, %v", fs, err)
	}
	if _, err := os.Lstat(statefs.Image(full)); err == nil {
		t.Error("an image was made")
	}
	t.Setenv("PATH", "")
	empty := t.TempDir()
	_, err := statefs.Open(t.Context(), statefs.Config{State: empty, Kind: statefs.XFS, Log: log})
	if sandbox.CodeOf(err) != sandbox.CodeUnavailable || !strings.Contains(err.Error(), "apt-get install xfsprogs") {
		t.Errorf("without mkfs.xfs: %v", err)
	}
}
