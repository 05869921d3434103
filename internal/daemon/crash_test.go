package daemon

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/sandbox"
)

// operation is something that a daemon does and can be killed in.
type operation struct {
	name string
	// prepare makes what run needs, and is not part of the operation.
	prepare func(t *testing.T, s *stage) string
	run     func(ctx context.Context, t *testing.T, s *stage, prepared string)
	// survived checks what the next daemon makes of what was prepared.
	survived func(t *testing.T, s *stage, prepared string)
}

func createOp(runtime string) operation {
	return operation{name: "create " + runtime, run: func(ctx context.Context, t *testing.T, s *stage, _ string) {
		s.client.CreateSandbox(ctx, wire.CreateSandbox{Template: "tiny", Runtime: runtime, Network: wire.Network{
			Mode: "egress", Allow: []wire.EgressRule{{CIDR: "192.0.2.0/24"}},
		}})
	}}
}

func prepared(runtime string) func(t *testing.T, s *stage) string {
	return func(t *testing.T, s *stage) string {
		return s.create(t, wire.CreateSandbox{Runtime: runtime, Network: wire.Network{
			Mode: "egress", Allow: []wire.EgressRule{{CIDR: "192.0.2.0/24"}},
		}}).ID
	}
}

func killOp(runtime string) operation {
	return operation{name: "kill " + runtime, prepare: prepared(runtime), run: func(ctx context.Context, t *testing.T, s *stage, id string) {
		s.client.Kill(ctx, id)
	}}
}

var operations = []operation{
	createOp("container"),
	createOp("gvisor"),
	killOp("container"),
	killOp("gvisor"),
	{name: "timeout", prepare: prepared("container"), run: func(ctx context.Context, t *testing.T, s *stage, id string) {
		s.client.SetTimeout(ctx, id, 20*time.Millisecond)
		for ctx.Err() == nil {
			sb, err := s.client.Sandbox(ctx, id)
			if err != nil || sb.State.Ended() {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}},
	{name: "set network", prepare: prepared("container"), run: func(ctx context.Context, t *testing.T, s *stage, id string) {
		s.client.SetNetwork(ctx, id, wire.Network{Mode: "none"})
	}},
	captureOp("suspend", "container", running, func(ctx context.Context, s *stage, id string) { s.client.Suspend(ctx, id) }),
	captureOp("suspend", "gvisor", running, func(ctx context.Context, s *stage, id string) { s.client.Suspend(ctx, id) }),
	captureOp("unsuspend", "gvisor", suspended, func(ctx context.Context, s *stage, id string) { s.client.Unsuspend(ctx, id) }),
	captureOp("snapshot", "container", running, snapshotIt),
	captureOp("snapshot", "gvisor", running, snapshotIt),
	captureOp("snapshot of a suspended", "gvisor", suspended, snapshotIt),
	captureOp("snapshot of the disk", "gvisor", running, snapshotDisk),
	captureOp("snapshot of the disk of a suspended", "gvisor", suspended, snapshotDisk),
	captureOp("fork", "container", running, forkIt),
	captureOp("fork", "gvisor", running, forkIt),
	captureOp("fork of a hibernated", "gvisor", hibernated, forkIt),
	captureOp("hibernate", "gvisor", running, func(ctx context.Context, s *stage, id string) { hibernateIt(ctx, s, id) }),
	captureOp("hibernate a suspended", "gvisor", suspended, func(ctx context.Context, s *stage, id string) { hibernateIt(ctx, s, id) }),
	captureOp("wake", "gvisor", hibernated, func(ctx context.Context, s *stage, id string) { s.client.Wake(ctx, id) }),
	captureOp("kill a hibernated", "gvisor", hibernated, func(ctx context.Context, s *stage, id string) { s.client.Kill(ctx, id) }),
	{name: "remove snapshot", prepare: func(t *testing.T, s *stage) string {
		id := prepared("container")(t, s)
		n, err := s.client.CreateSnapshot(t.Context(), id, wire.CreateSnapshot{})
		if err != nil {
			t.Fatal(err)
		}
		return n.ID
	}, run: func(ctx context.Context, t *testing.T, s *stage, id string) {
		s.client.RemoveSnapshot(ctx, id)
	}},
	poolOp("pool fill", "container", 0, fillPool),
	poolOp("pool fill", "gvisor", 0, fillPool),
	poolOp("claim", "container", 1, claimIt),
	poolOp("claim", "gvisor", 1, claimIt),
	poolOp("drain", "container", 2, drainPool),
	poolOp("drain", "gvisor", 2, drainPool),
	{name: "build", run: func(ctx context.Context, t *testing.T, s *stage, _ string) {
		s.build(ctx, t)
	}},
	{name: "remove template", prepare: func(t *testing.T, s *stage) string {
		if err := s.build(t.Context(), t); err != nil {
			t.Fatalf("build: %v\n%s", err, s.d.stderr)
		}
		return ""
	}, run: func(ctx context.Context, t *testing.T, s *stage, _ string) {
		s.client.RemoveTemplate(ctx, "built")
	}},
}

// poolOp is an operation on a pool that has so many members before. What is
// on record of it afterwards, usePools tries.
func poolOp(name, runtime string, ready int, run func(ctx context.Context, s *stage, runtime, pool string)) operation {
	return operation{name: name + " " + runtime, prepare: func(t *testing.T, s *stage) string {
		if ready == 0 {
			return ""
		}
		p, err := s.client.SetPool(t.Context(), wire.SetPool{Template: "tiny", Runtime: runtime, Ready: ready})
		if err == nil {
			err = s.waitPool(t.Context(), p.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		return p.ID
	}, run: func(ctx context.Context, _ *testing.T, s *stage, pool string) { run(ctx, s, runtime, pool) }}
}

func fillPool(ctx context.Context, s *stage, runtime, _ string) {
	if p, err := s.client.SetPool(ctx, wire.SetPool{Template: "tiny", Runtime: runtime, Ready: 2}); err == nil {
		s.waitPool(ctx, p.ID)
	}
}

func claimIt(ctx context.Context, s *stage, runtime, pool string) {
	s.client.CreateSandbox(ctx, wire.CreateSandbox{Template: "tiny", Runtime: runtime, Env: map[string]string{"A": "1"}, Network: wire.Network{Mode: "none"}})
	s.waitPool(ctx, pool)
}

func drainPool(ctx context.Context, s *stage, _, pool string) { s.client.RemovePool(ctx, pool) }

// waitPool waits until a pool is full and at rest.
func (s *stage) waitPool(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		p, err := s.client.Pool(ctx, id)
		if err != nil || p.Available == p.Ready && p.Making+p.Ending == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the pool is not full: %+v", p)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// usePools claims every member of every pool, and removes the pools.
func (s *stage) usePools(t *testing.T) {
	t.Helper()
	pools, err := s.client.Pools(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pools {
		if err := s.waitPool(t.Context(), p.ID); err != nil {
			t.Error(err)
		}
		for range p.Ready {
			sb := s.create(t, wire.CreateSandbox{Runtime: p.Runtime, Env: map[string]string{"MINE": "yes"}})
			if out, err := s.run(sb.ID, "echo $MINE$A"); err != nil || out != "yes" || sb.Start != "pool" {
				t.Errorf("%s started by %s, and says %q, %v", sb.ID, sb.Start, out, err)
			}
		}
		if err := s.client.RemovePool(t.Context(), p.ID); err != nil {
			t.Error(err)
		}
	}
}

func running(*testing.T, *stage, string) {}

func suspended(t *testing.T, s *stage, id string) {
	if err := s.client.Suspend(t.Context(), id); err != nil {
		t.Fatal(err)
	}
}

func hibernated(t *testing.T, s *stage, id string) {
	if err := hibernateIt(t.Context(), s, id); err != nil {
		t.Fatal(err)
	}
}

// hibernateIt returns when what ran has left the host, too.
func hibernateIt(ctx context.Context, s *stage, id string) error {
	return errors.Join(s.client.Hibernate(ctx, id), s.client.WaitDeparted(ctx))
}

func snapshotIt(ctx context.Context, s *stage, id string) {
	s.client.CreateSnapshot(ctx, id, wire.CreateSnapshot{})
}

func snapshotDisk(ctx context.Context, s *stage, id string) {
	s.client.CreateSnapshot(ctx, id, wire.CreateSnapshot{Kind: sandbox.SnapshotDisk})
}

func forkIt(ctx context.Context, s *stage, id string) {
	s.client.Fork(ctx, id, wire.Fork{Count: 2})
}

// captureOp is an operation on a sandbox in whose memory a command counts.
// Whatever the operation comes to, the sandbox is what it was or what it was
// to be, and the command goes on.
func captureOp(name, runtime string, become func(t *testing.T, s *stage, id string), run func(ctx context.Context, s *stage, id string)) operation {
	return operation{name: name + " " + runtime, prepare: func(t *testing.T, s *stage) string {
		id := prepared(runtime)(t, s)
		s.counter(t, id)
		if _, err := s.run(id, "until test -s /tmp/count; do sleep 0.05; done"); err != nil {
			t.Fatal(err)
		}
		become(t, s, id)
		return id
	}, run: func(ctx context.Context, t *testing.T, s *stage, id string) {
		run(ctx, s, id)
	}, survived: func(t *testing.T, s *stage, id string) {
		sb, err := s.client.Sandbox(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		switch sb.State {
		case sandbox.Killed:
			if sb.Reason != sandbox.ReasonKilledByUser {
				t.Errorf("it ended for %s", sb.Reason)
			}
			return
		case sandbox.Suspended:
			if err := s.client.Unsuspend(t.Context(), id); err != nil {
				t.Error(err)
			}
		}
		s.counts(t, id) // wakes it
	}}
}

// removeSnapshots removes all, and checks that the disk has nothing of any.
func (s *stage) removeSnapshots(t *testing.T) {
	t.Helper()
	for n, err := range s.client.Snapshots(t.Context(), "") {
		if err == nil {
			err = s.client.RemoveSnapshot(t.Context(), n.ID)
		}
		if err != nil {
			t.Error(err)
		}
	}
	for _, dir := range []string{"snp*", "tmp/*"} {
		if left, _ := filepath.Glob(filepath.Join(s.cfg.State, "snapshots", dir)); len(left) > 0 {
			t.Errorf("left of captures: %v", left)
		}
	}
}

// build builds the template "built" from a Dockerfile of two steps.
func (s *stage) build(ctx context.Context, t *testing.T) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, data := range map[string]string{
		"Dockerfile": "FROM tiny\nCOPY file /file\nRUN echo built > /made && sleep 0.05\n",
		"file":       "x",
	} {
		w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))})
		io.WriteString(w, data)
	}
	w.Close()
	_, err := s.client.BuildTemplate(ctx, wire.BuildTemplate{Name: "built", Dockerfile: &wire.BuildDockerfile{NoCache: true}}, &b, nil)
	return err
}

// TestCrash kills the daemon at every fault point that each operation passes,
// starts the next, and checks what it makes of it: beside the operation, a
// container and a gVisor sandbox with a command that runs must go on.
func TestCrash(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes; left out by -short")
	}
	s := newStage(t)
	s.start(t)
	var kept []string
	for _, runtime := range []string{"container", "gvisor"} {
		sb := s.create(t, wire.CreateSandbox{Runtime: runtime, Metadata: map[string]string{"kept": "yes"}})
		s.counter(t, sb.ID)
		kept = append(kept, sb.ID)
	}
	reached := map[string]bool{}
	runs := 0
	survive := func(t *testing.T, checks ...func()) {
		t.Helper()
		runs++
		s.start(t)
		s.usePools(t)
		s.verify(t)
		for _, check := range checks {
			check()
		}
		for _, id := range kept {
			s.counts(t, id)
		}
		s.killAll(t, kept...)
		s.removeSnapshots(t)
		if t.Failed() {
			t.Logf("the daemon said:\n%s", s.d.stderr)
		}
	}
	for _, op := range operations {
		t.Run(op.name, func(t *testing.T) {
			prepare := func() string {
				if op.prepare == nil {
					return ""
				}
				return op.prepare(t, s)
			}
			p := prepare()
			s.d.order(t, "trace")
			op.run(t.Context(), t, s, p)
			s.d.order(t, "quiet")
			points := s.d.passed()
			s.d.mu.Lock()
			s.d.hits = nil
			s.d.mu.Unlock()
			if len(points) == 0 {
				t.Fatal("it passes no point")
			}
			s.killAll(t, kept...)
			s.removeSnapshots(t)
			s.verify(t)
			for _, point := range points {
				t.Run(point, func(t *testing.T) {
					p := prepare()
					s.d.order(t, "arm %s", point)
					ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
					defer cancel()
					op.run(ctx, t, s, p)
					if !s.d.died(5 * time.Second) {
						t.Errorf("the daemon did not come to %s again:\n%s", point, s.d.stderr)
						s.d.kill(t)
					}
					reached[point] = true
					survive(t, func() {
						if op.survived != nil {
							op.survived(t, s, p)
						}
					})
				})
			}
		})
	}
	t.Run("exec", func(t *testing.T) {
		// No point of the daemon's lies in an exec: it is killed at odd moments.
		for i := range 5 {
			id := prepared("container")(t, s)
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			go func() {
				for ctx.Err() == nil {
					s.run(id, "echo hello")
				}
			}()
			time.Sleep(time.Duration(20+30*i) * time.Millisecond)
			s.d.kill(t)
			cancel()
			survive(t)
		}
	})
	t.Run("stop", func(t *testing.T) {
		s.d.order(t, "trace")
		s.d.terminate(t)
		points := s.d.passed()
		s.start(t)
		for _, point := range points {
			t.Run(point, func(t *testing.T) {
				s.d.order(t, "arm %s", point)
				s.d.cmd.Process.Signal(syscall.SIGTERM)
				if !s.d.died(30 * time.Second) {
					t.Errorf("the daemon did not come to %s", point)
					s.d.kill(t)
				}
				reached[point] = true
				survive(t)
			})
		}
	})
	t.Run("start", func(t *testing.T) {
		mess := func() { // one half made, one half ended, one gone
			prepared("container")(t, s)
			gone := prepared("container")(t, s)
			pid := s.firstProcess(t, gone)
			half := prepared("container")(t, s)
			s.d.order(t, "arm manager.end.recorded")
			go s.client.Kill(context.Background(), half)
			if !s.d.died(10 * time.Second) {
				t.Fatal("the daemon lives")
			}
			killAndWait(t, pid)
			s.start(t, fault.Env+"=manager.start.entered:2") // never
			s.d.order(t, "arm manager.create.ready")
			s.client.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: "container"})
			if !s.d.died(10 * time.Second) {
				t.Fatal("the daemon lives")
			}
		}
		mess()
		s.start(t, traceEnv+"=1")
		points := s.d.passed()
		s.killAll(t, kept...)
		s.verify(t)
		for _, point := range points {
			t.Run(point, func(t *testing.T) {
				mess()
				if p := s.launch(t, fault.Env+"="+point); !p.died(time.Minute) {
					t.Errorf("the daemon did not come to %s:\n%s", point, p.stderr)
					p.kill(t)
				}
				reached[point] = true
				survive(t)
			})
		}
	})
	t.Run("stop with none left", func(t *testing.T) {
		s.killAll(t)
		kept = nil
		s.d.order(t, "trace")
		s.d.terminate(t)
		points := s.d.passed()
		s.start(t)
		for _, point := range points {
			t.Run(point, func(t *testing.T) {
				s.d.order(t, "arm %s", point)
				s.d.cmd.Process.Signal(syscall.SIGTERM)
				if !s.d.died(30 * time.Second) {
					t.Errorf("the daemon did not come to %s", point)
					s.d.kill(t)
				}
				reached[point] = true
				survive(t)
			})
		}
	})
	var never []string
	for _, point := range fault.Points() {
		if !reached[point] {
			never = append(never, point)
		}
	}
	t.Logf("%d kills at %d of %d points; not on the way of any operation here: %v", runs, len(reached), len(fault.Points()), never)
}

// firstProcess gives the pid of a sandbox's first process: the lowest of its
// group, as the runtime started it before all others.
func (s *stage) firstProcess(t *testing.T, id string) int {
	t.Helper()
	items, err := census.Take(s.where)
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, i := range items {
		if i.Kind == census.Process && i.ID == sandbox.ID(id) {
			first, _, _ := strings.Cut(i.Name, " ")
			if pid, err := strconv.Atoi(first); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	if len(pids) == 0 {
		t.Fatalf("%s has no process", id)
	}
	return slices.Min(pids)
}

// killAndWait ends a process of a sandbox from outside.
func killAndWait(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err != nil {
			return
		}
	}
	t.Fatalf("process %d does not end", pid)
}

func (s *stage) waitEnded(t *testing.T, id string, reason sandbox.Reason) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		sb, err := s.client.Sandbox(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if sb.State.Ended() {
			if sb.Reason != reason {
				t.Errorf("%s ended for %s (%s), want %s", id, sb.Reason, sb.Detail, reason)
			}
			return
		}
	}
	t.Errorf("%s did not end", id)
}
