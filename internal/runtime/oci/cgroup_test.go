package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/testenv"
)

// trees gives the host's real trees, and its v2 tree alone as a host of v2 has
// it: a hybrid host's is without controllers, but it freezes and kills.
func trees(t *testing.T) map[string]*hierarchies {
	testenv.Root(t)
	h, err := mounted()
	if err != nil {
		t.Skipf("needs cgroups: %v", err)
	}
	all := map[string]*hierarchies{string(h.mode): h}
	if h.mode == host.CgroupHybrid {
		all["v2 of hybrid"] = &hierarchies{mode: host.CgroupV2, roots: []string{"/sys/fs/cgroup/unified"}}
	}
	return all
}

// group makes a group with n processes that fork others all the time.
func group(t *testing.T, h *hierarchies, n int) *Cgroup {
	t.Helper()
	g := &Cgroup{h: h, path: fmt.Sprintf("/warren-test%d/%d", os.Getpid(), time.Now().UnixNano())}
	for _, root := range h.roots {
		if err := os.MkdirAll(filepath.Join(root, g.path), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Remove(filepath.Join(root, filepath.Dir(g.path))) })
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove(ctx)); err != nil {
			t.Error(err)
		}
		if g.exists() {
			t.Error("the group is left")
		}
	})
	if h.mode != host.CgroupV2 { // a new v1 cpuset takes no process
		for _, dir := range []string{filepath.Dir(g.path), g.path} {
			for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
				data, err := os.ReadFile(filepath.Join(h.v1["cpuset"], file))
				if err != nil {
					t.Fatal(err)
				}
				if err := writeFile(filepath.Join(h.v1["cpuset"], dir, file), string(data)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for range n {
		cmd := exec.Command("/bin/sh", "-c", "read x; for n in 1 2 3 4 5 6 7 8; do sleep 1000 & done; while true; do sleep 0.01; done")
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { cmd.Wait() })
		t.Cleanup(func() { cmd.Process.Kill() })
		for _, root := range h.roots {
			if err := writeFile(filepath.Join(root, g.path, "cgroup.procs"), fmt.Sprint(cmd.Process.Pid)); err != nil {
				t.Fatal(err)
			}
		}
		in.Write([]byte("go\n"))
	}
	return g
}

func TestCgroupFreezeAndKill(t *testing.T) {
	for name, h := range trees(t) {
		t.Run(name, func(t *testing.T) {
			g := group(t, h, 3)
			if f, err := g.Frozen(); f || err != nil {
				t.Fatalf("Frozen = %v, %v", f, err)
			}
			for range 2 {
				if err := g.Freeze(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if f, err := g.Frozen(); !f || err != nil {
				t.Fatalf("Frozen = %v, %v", f, err)
			}
			before, err := g.procs()
			if err != nil || len(before) < 3 {
				t.Fatalf("procs = %v, %v", before, err)
			}
			if err := g.Thaw(); err != nil {
				t.Fatal(err)
			}
			if f, err := g.Frozen(); f || err != nil {
				t.Fatalf("Frozen after Thaw = %v, %v", f, err)
			}
			if err := g.Freeze(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := g.Kill(t.Context()); err != nil { // frozen as it is
				t.Fatal(err)
			}
			if left, err := g.procs(); err != nil || len(left) != 0 {
				t.Fatalf("procs after Kill = %v, %v", left, err)
			}
			for range 2 {
				if err := g.Remove(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if err := g.Kill(t.Context()); err != nil {
				t.Errorf("Kill of what is gone: %v", err)
			}
		})
	}
}

func TestCgroupRemovesWhatIsBelow(t *testing.T) {
	for name, h := range trees(t) {
		t.Run(name, func(t *testing.T) {
			g := group(t, h, 0)
			if err := os.MkdirAll(filepath.Join(h.roots[0], g.path, "a", "b"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := g.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
			if g.exists() {
				t.Error("it is left")
			}
		})
	}
}

func TestRemoveOfABusyGroupEndsWithItsContext(t *testing.T) {
	for name, h := range trees(t) {
		t.Run(name, func(t *testing.T) {
			g := group(t, h, 1)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := g.Remove(ctx); !errors.Is(err, unix.EBUSY) {
				t.Errorf("Remove = %v, want EBUSY", err)
			}
		})
	}
}

func TestProcess(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "read x; exit 3")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := openProcess(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := openProcess(p.PID, p.Start+1); !errors.Is(err, errGone) {
		t.Errorf("another process of the pid = %v, want errGone", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := p.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Wait of a living one = %v", err)
	}
	in.Close()
	q, err := openProcess(p.PID, p.Start)
	if err == nil {
		defer q.Close()
		if err := q.Wait(t.Context()); err != nil {
			t.Errorf("Wait = %v", err)
		}
	}
	cmd.Wait()
	if status, known := p.exitStatus(true); known && status.ExitStatus() != 3 {
		t.Errorf("exit status = %d, want 3", status.ExitStatus())
	}
	if _, err := openProcess(p.PID, p.Start); !errors.Is(err, errGone) {
		t.Errorf("after its end = %v, want errGone", err)
	}
	if err := p.kill(); err != nil {
		t.Errorf("kill of what ended: %v", err)
	}
}
