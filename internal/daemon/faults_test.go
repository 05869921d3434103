package daemon

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

var seedFlag = flag.Uint64("seed", 0, "of the random tests; 0: another each time")

func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed: -seed=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// victim gives a process that works for a sandbox: its "sentry" or its "gofer",
// or a "command" of runsc that the daemon runs for it. 0: there is none now.
func (s *stage) victim(id, who string) int {
	all, _ := os.ReadDir("/proc")
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || !bytes.Contains(data, []byte(id)) || !bytes.Contains(data, []byte(s.where.Instance)) && !bytes.Contains(data, []byte(s.cfg.State)) {
			continue
		}
		argv := strings.Split(string(data), "\x00")
		is := ""
		switch {
		case slices.Contains(argv, "boot"):
			is = "sentry"
		case slices.Contains(argv, "gofer"):
			is = "gofer"
		case slices.ContainsFunc(argv, func(a string) bool { return a == "checkpoint" || a == "create" || a == "restore" }):
			is = "command"
		}
		if is == who {
			return pid
		}
	}
	return 0
}

// TestRuntimeDies kills the Sentry, the gofer or a command of runsc at odd
// moments of captures and restores. What was hibernated stays so with its
// data, what ran goes on or is told to have crashed, and nothing is left.
func TestRuntimeDies(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute; left out by -short")
	}
	r := seeded(t)
	s := newStage(t)
	s.start(t)
	const rounds = 6
	type deed struct {
		name   string
		sleep  bool // it begins hibernated
		do     func(ctx context.Context, id string) error
		child  bool // who dies is a copy of the sandbox
		within int  // milliseconds, in which it dies
	}
	for _, d := range []deed{
		{name: "hibernate", within: 150, do: func(ctx context.Context, id string) error { return s.client.Hibernate(ctx, id) }},
		{name: "snapshot", within: 150, do: func(ctx context.Context, id string) error {
			_, err := s.client.CreateSnapshot(ctx, id, wire.CreateSnapshot{})
			return err
		}},
		{name: "wake", sleep: true, within: 400, do: func(ctx context.Context, id string) error { return s.client.Wake(ctx, id) }},
		{name: "fork", child: true, within: 400, do: func(ctx context.Context, id string) error {
			res, err := s.client.Fork(ctx, id, wire.Fork{Count: 2})
			failed := 0
			for _, f := range res.Forks {
				if f.Error != nil {
					failed++
				}
			}
			if failed > 1 {
				t.Errorf("one copy was killed, and %d failed: %+v %+v", failed, res.Forks[0].Error, res.Forks[1].Error)
			}
			return err
		}},
	} {
		t.Run(d.name, func(t *testing.T) {
			killed := map[string]int{}
			for round := range rounds {
				sb := s.create(t, wire.CreateSandbox{Runtime: "gvisor"})
				if _, err := s.run(sb.ID, "echo precious > /tmp/file"); err != nil {
					t.Fatal(err)
				}
				s.counter(t, sb.ID)
				if d.sleep {
					hibernated(t, s, sb.ID)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				done := make(chan error, 1)
				go func() { done <- d.do(ctx, sb.ID) }()
				victim := sb.ID
				for end := time.Now().Add(5 * time.Second); d.child && victim == sb.ID && time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
					for _, c := range s.live(t) {
						if c.Parent == sb.ID {
							victim = c.ID
						}
					}
				}
				time.Sleep(time.Duration(r.IntN(d.within)) * time.Millisecond)
				who, begun := []string{"sentry", "gofer", "command"}[round%3], time.Now()
				for pid := 0; pid == 0 && len(done) == 0; time.Sleep(time.Millisecond) {
					if pid = s.victim(victim, who); pid > 0 && syscall.Kill(pid, syscall.SIGKILL) == nil {
						killed[who]++
					}
				}
				err := <-done
				cancel()
				if took := time.Since(begun); took > 20*time.Second {
					t.Errorf("with the %s dead it took %v", who, took)
				}
				time.Sleep(300 * time.Millisecond) // a death is noticed soon
				got, gerr := s.client.Sandbox(t.Context(), sb.ID)
				if gerr != nil {
					t.Fatal(gerr)
				}
				switch c := sandbox.CodeOf(err); c {
				case "", sandbox.CodeUnavailable, sandbox.CodeConflict:
				case sandbox.CodeInternal:
					if !d.sleep { // runsc tells of a Sentry that died as of any failure
						t.Errorf("with the %s dead: %v (%s)", who, err, c)
					}
				default:
					t.Errorf("with the %s dead: %v (%s)", who, err, c)
				}
				ended := got.State.Ended()
				switch {
				case ended && got.Reason != sandbox.ReasonRuntimeCrashed:
					t.Errorf("with the %s dead it ended for %s (%s)", who, got.Reason, got.Detail)
				case ended && (d.child || d.sleep && err != nil):
					t.Errorf("with the %s dead it ended (%s), after %v", who, got.Detail, err)
				case !ended:
					// It runs or sleeps, with all that it had; it may be about to end.
					out, err := s.run(sb.ID, "cat /tmp/file")
					if err != nil || out != "precious" {
						if now, e := s.client.Sandbox(t.Context(), sb.ID); e != nil || now.Reason != sandbox.ReasonRuntimeCrashed || d.child {
							t.Errorf("with the %s dead it was %s and has %q, %v; now it is %s", who, got.State, out, err, now.State)
						}
						break
					}
					s.counts(t, sb.ID)
				}
				t.Logf("%s: %v, then it is %s (%s) after %v", who, err, got.State, got.Detail, time.Since(begun).Round(time.Millisecond))
				s.killAll(t)
			}
			t.Logf("killed: %v", killed)
			s.removeSnapshots(t)
			s.verify(t)
			if t.Failed() {
				t.Logf("the daemon said:\n%s", s.d.stderr)
			}
		})
	}
}

// cell is one file of one sandbox, which one client writes: the last number
// that the write of was answered, and the last that was sent.
type cell struct{ answered, sent int }

// cast is what clients make of a few sandboxes together.
type cast struct {
	s *stage
	t *testing.T

	mu    sync.Mutex
	alive []string         // sandboxes, by id
	cells map[string]*cell // by sandbox and client
	snaps []string
	done  map[string]int // calls that were answered well
}

func (c *cast) cell(id string, client int) *cell {
	key := fmt.Sprint(id, "/", client)
	if c.cells[key] == nil {
		c.cells[key] = &cell{}
	}
	return c.cells[key]
}

// check reads a client's file and compares it with what was written: nothing
// that was answered is lost, and nothing comes that was never sent.
func (c *cast) check(ctx context.Context, id string, client int) error {
	c.mu.Lock()
	before := *c.cell(id, client)
	c.mu.Unlock()
	rc, _, err := c.s.client.ReadFile(ctx, id, fmt.Sprint("/tmp/client", client), "")
	n := 0
	switch {
	case sandbox.CodeOf(err) == sandbox.CodeNotFound && strings.Contains(err.Error(), "/tmp/client"):
	case err != nil:
		return err
	default:
		data, err := io.ReadAll(rc)
		rc.Close()
		if err != nil {
			return err
		}
		if n, err = strconv.Atoi(strings.TrimSpace(string(data))); err != nil {
			c.t.Errorf("%s has %q of client %d", id, data, client)
		}
	}
	if n < before.answered || n > before.sent {
		c.t.Errorf("%s has %d of client %d, which wrote up to %d for sure and sent up to %d", id, n, client, before.answered, before.sent)
	}
	return nil
}

// legal tells of an error that no state of a sandbox explains.
func (c *cast) legal(what string, err error) bool {
	switch sandbox.CodeOf(err) {
	case "":
		if err == nil {
			c.mu.Lock()
			c.done[what]++
			c.mu.Unlock()
			return true
		}
		if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
			return false
		}
	case sandbox.CodeConflict, sandbox.CodeNoCapacity, sandbox.CodeTimeout, sandbox.CodeCanceled, sandbox.CodeNotFound:
		return false
	case sandbox.CodeUnavailable: // a command that is cut off by a capture or an end
		if what == "exec" || what == "read" || what == "write" {
			return false
		}
	}
	c.t.Errorf("%s: %v (%s)", what, err, sandbox.CodeOf(err))
	return false
}

// step does one thing to one of the sandboxes. The client is the only one that
// writes its file in each of them.
func (c *cast) step(r *rand.Rand, me int) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	if r.IntN(8) == 0 { // a client that gives up
		cancel()
		ctx, cancel = context.WithTimeout(context.Background(), time.Duration(1+r.IntN(400))*time.Millisecond)
	}
	defer cancel()
	c.mu.Lock()
	id := c.alive[r.IntN(len(c.alive))]
	n := len(c.alive)
	c.mu.Unlock()
	switch op := r.IntN(20); op {
	case 0:
		c.legal("suspend", c.s.client.Suspend(ctx, id))
	case 1, 2:
		c.legal("unsuspend", c.s.client.Unsuspend(ctx, id))
	case 3, 4:
		c.legal("hibernate", c.s.client.Hibernate(ctx, id))
	case 5:
		c.legal("wake", c.s.client.Wake(ctx, id))
	case 6:
		if n >= 7 {
			return
		}
		// What a copy has of each client was answered when the fork was asked
		// for, or sent before it was done.
		c.mu.Lock()
		low := map[int]int{}
		for k := range 8 {
			low[k] = c.cell(id, k).answered
		}
		c.mu.Unlock()
		res, err := c.s.client.Fork(ctx, id, wire.Fork{Count: 1 + r.IntN(2)})
		c.legal("fork", err)
		c.mu.Lock()
		for _, f := range res.Forks {
			if f.Error != nil {
				continue
			}
			for k := range 8 {
				*c.cell(f.Sandbox.ID, k) = cell{answered: low[k], sent: c.cell(id, k).sent}
			}
			c.alive = append(c.alive, f.Sandbox.ID)
		}
		c.mu.Unlock()
		for _, f := range res.Forks {
			if f.Error != nil {
				c.legal("copy", f.Error.Err())
			}
		}
	case 7:
		if n < 4 {
			return
		}
		c.mu.Lock()
		for i, a := range c.alive {
			if a == id {
				c.alive = append(c.alive[:i:i], c.alive[i+1:]...)
			}
		}
		c.mu.Unlock()
		c.legal("kill", c.s.client.Kill(context.Background(), id))
	case 8:
		n, err := c.s.client.CreateSnapshot(ctx, id, wire.CreateSnapshot{})
		if c.legal("snapshot", err) {
			c.mu.Lock()
			c.snaps = append(c.snaps, n.ID)
			c.mu.Unlock()
		}
	case 9:
		c.mu.Lock()
		var snap string
		if len(c.snaps) > 0 {
			snap = c.snaps[r.IntN(len(c.snaps))]
		}
		c.mu.Unlock()
		if snap == "" {
			return
		}
		if r.IntN(2) == 0 {
			c.legal("remove snapshot", c.s.client.RemoveSnapshot(ctx, snap))
			return
		}
		sb, err := c.s.client.CreateSandbox(ctx, wire.CreateSandbox{Snapshot: snap})
		if c.legal("create from snapshot", err) {
			c.legal("kill", c.s.client.Kill(context.Background(), sb.ID))
		}
	case 10:
		_, err := c.s.client.Tree(ctx, "")
		c.legal("tree", err)
	case 11, 12, 13:
		res, err := c.s.client.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Shell: "echo $((6*7)); cat /proc/sys/kernel/hostname"}})
		if c.legal("exec", err) && !strings.Contains(string(res.OutBytes()), "42\n"+id) {
			c.t.Errorf("a command in %s gave %q", id, res.OutBytes())
		}
	case 14, 15, 16:
		c.legal("read", c.check(ctx, id, me))
	default:
		c.mu.Lock()
		cl := c.cell(id, me)
		next := cl.sent + 1
		cl.sent = next
		c.mu.Unlock()
		data := fmt.Sprint(next)
		if c.legal("write", c.s.client.WriteFile(ctx, id, fmt.Sprint("/tmp/client", me), "", strings.NewReader(data), int64(len(data)), 0)) {
			c.mu.Lock()
			cl.answered = next
			c.mu.Unlock()
		}
	}
}

// TestManyClients has clients suspend, hibernate, wake, fork, capture, use and
// kill the same few gVisor sandboxes at once. Every answer is one that a state
// explains, no sandbox loses a write that was answered, and nothing is left.
func TestManyClients(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute; left out by -short")
	}
	r := seeded(t)
	s := newStage(t)
	s.start(t)
	c := &cast{s: s, t: t, cells: map[string]*cell{}, done: map[string]int{}}
	for range 3 {
		c.alive = append(c.alive, s.create(t, wire.CreateSandbox{Runtime: "gvisor"}).ID)
	}
	var wg sync.WaitGroup
	end := time.Now().Add(25 * time.Second)
	for me := range 8 {
		mine := rand.New(rand.NewPCG(r.Uint64(), uint64(me)))
		wg.Go(func() {
			for time.Now().Before(end) && !t.Failed() {
				c.step(mine, me)
			}
		})
	}
	wg.Wait()
	t.Logf("answered: %v", c.done)
	for _, sb := range s.list(t, client.Filter{}) {
		switch sb.State {
		case sandbox.Running, sandbox.Suspended, sandbox.Hibernated:
		case sandbox.Killed, sandbox.Failed:
			if sb.Reason != sandbox.ReasonKilledByUser && sb.Reason != sandbox.ReasonCreateFailed {
				t.Errorf("%s ended for %s (%s)", sb.ID, sb.Reason, sb.Detail)
			}
		default:
			t.Errorf("%s is %s", sb.ID, sb.State)
		}
	}
	for _, id := range c.alive {
		sb, err := s.client.Sandbox(t.Context(), id)
		if err == nil && sb.State == sandbox.Suspended {
			err = s.client.Unsuspend(t.Context(), id)
		}
		for me := 0; me < 8 && err == nil; me++ {
			err = c.check(t.Context(), id, me)
		}
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	s.verify(t)
	s.killAll(t)
	s.removeSnapshots(t)
	if strings.Contains(s.d.stderr.String(), "DATA RACE") || t.Failed() {
		t.Errorf("the daemon said:\n%s", s.d.stderr)
	}
}
