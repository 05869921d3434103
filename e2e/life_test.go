package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/daemon"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/process"
)

// TestTimeout lets times to live run out: with nobody connected, across a
// daemon's death, and not when they were moved.
func TestTimeout(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		t.Run("nobody connected", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 0.5})
			l.cl.Close()
			end := l.waitEnded(t, sb.ID, sandbox.Killed, sandbox.ReasonTimeout)
			if end.EndedAt.Before(*sb.ExpiresAt) {
				t.Errorf("it ended at %v, before %v", end.EndedAt, sb.ExpiresAt)
			}
		})
		t.Run("moved", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 1})
			moved, err := l.cl.SetTimeout(t.Context(), sb.ID, time.Hour)
			if err != nil { // so busy a machine that it was too late
				if got := l.get(t, sb.ID); got.Reason != sandbox.ReasonTimeout {
					t.Fatalf("set the timeout: %v, and it is %s", err, got.State)
				}
				t.Skip("the machine was too busy to move the timeout in time")
			}
			if !moved.ExpiresAt.After(sb.ExpiresAt.Add(time.Minute)) {
				t.Errorf("the end moved from %v to %v", sb.ExpiresAt, moved.ExpiresAt)
			}
			time.Sleep(time.Until(*sb.ExpiresAt) + 500*time.Millisecond)
			l.sh(t, sb.ID, "true")
			if never, err := l.cl.SetTimeout(t.Context(), sb.ID, 0); err != nil || never.ExpiresAt != nil {
				t.Errorf("without an end it expires at %v: %v", never.ExpiresAt, err)
			}
			if _, err := l.cl.SetTimeout(t.Context(), sb.ID, 100*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			l.waitEnded(t, sb.ID, sandbox.Killed, sandbox.ReasonTimeout)
		})
	})
	t.Run("bad values", func(t *testing.T) {
		sb := l.create(t, wire.CreateSandbox{Runtime: "container", Timeout: 3600})
		for _, body := range []string{`{"timeout":-1}`, `{"timeout":1e30}`, `{"timeout":"1h"}`, `{}`, `{"timeout":NaN}`} {
			l.raw(t, "POST", "/v1/sandboxes/"+sb.ID+"/timeout", map[string][]string{"Content-Type": {"application/json"}}, strings.NewReader(body)).
				wantError(t, sandbox.CodeInvalid)
		}
		if got := l.get(t, sb.ID); !got.ExpiresAt.Equal(*sb.ExpiresAt) {
			t.Errorf("refused values moved the end from %v to %v", sb.ExpiresAt, got.ExpiresAt)
		}
	})
	t.Run("while no daemon runs", func(t *testing.T) {
		ids := map[string]string{}
		var last time.Time
		for _, runtime := range runtimes {
			if l.can[runtime] == nil {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 2})
				ids[runtime], last = sb.ID, *sb.ExpiresAt
			}
		}
		later := l.create(t, wire.CreateSandbox{Runtime: "container", Timeout: 3600})
		l.d.kill()
		time.Sleep(time.Until(last) + 300*time.Millisecond)
		l.start(t)
		for _, id := range ids {
			l.waitEnded(t, id, sandbox.Killed, sandbox.ReasonTimeout)
		}
		if got := l.get(t, later.ID); got.State != sandbox.Running || !got.ExpiresAt.Equal(*later.ExpiresAt) {
			t.Errorf("one with time left is %s, and expires at %v, not %v", got.State, got.ExpiresAt, later.ExpiresAt)
		}
	})
}

// firstProcess finds a sandbox's first process on the host: of gVisor, the
// sentry.
func (l *lab) firstProcess(t *testing.T, id, runtime string) int {
	t.Helper()
	items, err := census.Take(l.where)
	must(t, err)
	best := 0
	for _, i := range items {
		if i.Kind != census.Process || string(i.ID) != id {
			continue
		}
		pidText, _, _ := strings.Cut(i.Name, " ")
		pid, _ := strconv.Atoi(pidText)
		line, _ := os.ReadFile(filepath.Join("/proc", pidText, "cmdline"))
		sentry := strings.Contains(strings.ReplaceAll(string(line), "\x00", " "), " boot ")
		agent := strings.Contains(string(line), "agent")
		if runtime == "gvisor" && sentry || runtime != "gvisor" && agent {
			if best == 0 || pid < best {
				best = pid
			}
		}
	}
	if best == 0 {
		t.Fatalf("sandbox %s has no first process among %v", id, items)
	}
	return best
}

// TestCrash kills a sandbox's first process from outside.
func TestCrash(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		beside := l.create(t, wire.CreateSandbox{Runtime: runtime})
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		r, err := l.cl.Start(t.Context(), sb.ID, client.Command{Args: []string{"sleep", "1000"}})
		must(t, err)
		buffered := make(chan error, 1)
		go func() {
			_, err := l.cl.Exec(context.Background(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sleep", "1001"}}})
			buffered <- err
		}()
		eventually(func() bool { return strings.Contains(l.run(t, sb.ID, "ps"), "sleep 1001") }, longest)
		must(t, unix.Kill(l.firstProcess(t, sb.ID, runtime), unix.SIGKILL))
		end := l.waitEnded(t, sb.ID, sandbox.Failed, sandbox.ReasonRuntimeCrashed)
		if end.Detail == "" {
			t.Error("the record has no word on the end")
		}
		if _, err := r.Wait(t.Context()); err == nil {
			t.Error("a command of a sandbox that crashed is said to have ended well")
		}
		wantError(t, <-buffered, sandbox.CodeUnavailable, "ended under the command", "runtime_crashed")
		if took := time.Since(*end.EndedAt); took > 30*time.Second {
			t.Errorf("what waited for the sandbox heard of its end %v later", took)
		}
		_, err = l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
		wantError(t, err, sandbox.CodeConflict, "runtime_crashed")
		must(t, l.cl.Kill(t.Context(), sb.ID)) // ended already: no error
		if got := l.get(t, sb.ID); got.Reason != sandbox.ReasonRuntimeCrashed {
			t.Errorf("a kill after the end changed its reason to %s", got.Reason)
		}
		l.sh(t, beside.ID, "true")
		l.verify(t)

		t.Run("the agent ends itself", func(t *testing.T) {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
			// As root inside, everything may be tried against PID 1; the
			// kernel keeps it, or the sandbox ends with a reason.
			line := "kill -9 1; kill -STOP 1" // which the kernel keeps from an init
			if runtime == "gvisor" {
				line = "kill -9 1" // which gVisor does not
			}
			l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c", line}}, User: "root", Timeout: 10})
			ok := eventually(func() bool {
				if l.get(t, sb.ID).State.Ended() {
					return true
				}
				_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}, Timeout: 10})
				return err == nil
			}, longest)
			if got := l.get(t, sb.ID); !ok || got.State.Ended() && got.Reason != sandbox.ReasonRuntimeCrashed {
				t.Errorf("it neither answers nor has it ended as it should: %s, %s", got.State, got.Reason)
			}
			if runtime == "container" {
				l.sh(t, sb.ID, "true")
			}
		})
	})
}

// TestDaemonDies kills the daemon under a command's stream: the command goes
// on, can be found by pid and by tag, and its end is told.
func TestDaemonDies(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		tag := "the-counter"
		stdin := false
		stream, err := l.cl.Process(sb.ID).Start(t.Context(), connect.NewRequest(&process.StartRequest{
			Process: &process.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c",
				`echo started >> /tmp/starts; i=0; while [ ! -e /tmp/stop ]; do i=$((i+1)); echo $i >> /tmp/count; echo $i; sleep 0.05; done; echo last; exit 7`}},
			Tag: &tag, Stdin: &stdin,
		}))
		must(t, err)
		defer stream.Close()
		var pid uint32
		for pid == 0 && stream.Receive() {
			pid = stream.Msg().GetEvent().GetStart().GetPid()
		}
		if pid == 0 {
			t.Fatalf("the command does not start: %v", stream.Err())
		}
		lines := func() int { n, _ := strconv.Atoi(l.sh(t, sb.ID, "tail -n 1 /tmp/count 2>/dev/null || true")); return n }
		eventually(func() bool { return lines() > 3 }, longest)
		l.d.kill()
		for stream.Receive() {
		}
		if stream.Err() == nil {
			t.Error("the stream of a dead daemon ended well")
		}
		l.start(t)
		at := lines()
		if !eventually(func() bool { return lines() > at+3 }, longest) {
			t.Errorf("the command does not go on: %d lines", lines())
		}
		if out := l.sh(t, sb.ID, "cat /tmp/starts"); out != "started" {
			t.Errorf("it was started again: %q", out)
		}
		for _, sel := range []*process.ProcessSelector{
			{Selector: &process.ProcessSelector_Pid{Pid: pid}},
			{Selector: &process.ProcessSelector_Tag{Tag: tag}},
		} {
			again, err := l.cl.Process(sb.ID).Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: sel}))
			must(t, err)
			if !again.Receive() || again.Msg().GetEvent().GetStart().GetPid() != pid {
				t.Errorf("connected to %v: %v", again.Msg(), again.Err())
			}
			again.Close()
		}
		again, err := l.cl.Process(sb.ID).Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{
			Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}},
		}))
		must(t, err)
		defer again.Close()
		l.sh(t, sb.ID, "touch /tmp/stop")
		var end *process.ProcessEvent_EndEvent
		var out strings.Builder
		for again.Receive() {
			out.Write(again.Msg().GetEvent().GetData().GetStdout())
			if e := again.Msg().GetEvent().GetEnd(); e != nil {
				end = e
			}
		}
		if end.GetExitCode() != 7 || !end.GetExited() || !strings.HasSuffix(out.String(), "last\n") {
			t.Errorf("its end is told as %v, %v; its output ends with %.50q", end, again.Err(), out.String())
		}
		l.verify(t)
	})
}

var errSeen = errors.New("seen enough")

// TestEvents follows the lives of sandboxes, and goes on after the daemon's
// death where it was.
func TestEvents(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		killed := l.create(t, wire.CreateSandbox{Runtime: runtime})
		// The first part of the life, then the daemon dies, then the second.
		history := func(t *testing.T, after int64, want int, ids ...string) []wire.Event {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()
			var all []wire.Event
			err := l.cl.Events(ctx, "", after, func(e wire.Event) error {
				for _, id := range ids {
					if string(e.Sandbox) == id {
						all = append(all, e)
					}
				}
				if len(all) >= want {
					return errSeen
				}
				return nil
			})
			if !errors.Is(err, errSeen) {
				t.Fatalf("the events are %v: %v", all, err)
			}
			return all
		}
		first := history(t, 0, 2, killed.ID)
		if first[0].To != sandbox.Creating || first[1].From != sandbox.Creating || first[1].To != sandbox.Running {
			t.Errorf("the first events are %+v", first)
		}
		last := first[1].Seq
		must(t, l.cl.Kill(t.Context(), killed.ID))
		l.d.kill()
		l.start(t)
		timed := l.create(t, wire.CreateSandbox{Runtime: runtime, Timeout: 0.1})
		crashed := l.create(t, wire.CreateSandbox{Runtime: runtime})
		l.waitEnded(t, timed.ID, sandbox.Killed, sandbox.ReasonTimeout)
		must(t, unix.Kill(l.firstProcess(t, crashed.ID, runtime), unix.SIGKILL))
		l.waitEnded(t, crashed.ID, sandbox.Failed, sandbox.ReasonRuntimeCrashed)
		rest := history(t, last, 7, killed.ID, timed.ID, crashed.ID)
		told := map[string][]string{}
		for _, e := range rest {
			if e.Seq <= last {
				t.Errorf("seq %d comes behind %d", e.Seq, last)
			}
			last = e.Seq
			told[string(e.Sandbox)] = append(told[string(e.Sandbox)], fmt.Sprintf("%s>%s:%s", e.From, e.To, e.Reason))
		}
		for id, want := range map[string]string{
			killed.ID:  "running>killed:killed_by_user",
			timed.ID:   ">creating: creating>running: running>killed:timeout",
			crashed.ID: ">creating: creating>running: running>failed:runtime_crashed",
		} {
			if got := strings.Join(told[id], " "); got != want {
				t.Errorf("of %s is told %q, not %q", id, got, want)
			}
		}
	})
	t.Run("as they are sent", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), longest)
		defer cancel()
		got := make(chan wire.Event, 10)
		go l.cl.Events(ctx, "", -1, func(e wire.Event) error { got <- e; return nil })
		time.Sleep(100 * time.Millisecond)
		sb := l.create(t, wire.CreateSandbox{Runtime: "container"})
		for _, want := range []sandbox.State{sandbox.Creating, sandbox.Running} {
			select {
			case e := <-got:
				if string(e.Sandbox) != sb.ID || e.To != want {
					t.Errorf("the event is %+v; want %s of %s", e, want, sb.ID)
				}
			case <-ctx.Done():
				t.Fatal("no event")
			}
		}
	})
}

// TestNoCapacity asks for more than a daemon with a small budget may give.
func TestNoCapacity(t *testing.T) {
	t.Parallel()
	l := newLab(t, withFlags("--mem-overcommit", "0.02", "--process-overcommit", "0.5"))
	capacity, err := l.cl.Capacity(t.Context())
	must(t, err)
	l.each(t, func(t *testing.T, runtime string) {
		began := time.Now()
		_, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{
			Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: int(capacity.MemoryBudget>>20) + 1},
		})
		wantError(t, err, sandbox.CodeNoCapacity, "memory", "end sandboxes")
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("the refusal took %v", took)
		}
		a := l.raw(t, "POST", "/v1/sandboxes", map[string][]string{"Content-Type": {"application/json"}},
			strings.NewReader(fmt.Sprintf(`{"template":"tiny","runtime":%q,"resources":{"memory_mib":%d}}`, runtime, capacity.MemoryBudget>>20)))
		a.wantError(t, sandbox.CodeNoCapacity)
		if a.status != 503 || a.header.Get("Retry-After") == "" {
			t.Errorf("the status is %d, Retry-After %q", a.status, a.header.Get("Retry-After"))
		}
		// What fits does, until it is promised; an end gives it back.
		var made []wire.Sandbox
		for len(made) < 50 {
			sb, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128, PIDs: 64}})
			if err != nil {
				wantError(t, err, sandbox.CodeNoCapacity, "memory")
				break
			}
			made = append(made, sb)
		}
		if len(made) == 0 || len(made) == 50 {
			t.Fatalf("%d were made", len(made))
		}
		must(t, l.cl.Kill(t.Context(), made[0].ID))
		again, err := l.cl.CreateSandbox(t.Context(), wire.CreateSandbox{Template: "tiny", Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128, PIDs: 64}})
		if err != nil {
			t.Errorf("after an end there is no room: %v", err)
		}
		for _, sb := range append(made[1:], again) {
			l.cl.Kill(t.Context(), sb.ID)
		}
	})
	for _, sb := range l.list(t, client.Filter{States: []sandbox.State{sandbox.Creating}}) {
		t.Errorf("a refused create left %s", sb.ID)
	}
}

// TestSideBySide has two daemons on one host, and one of them die.
func TestSideBySide(t *testing.T) {
	t.Parallel()
	a, b := newLab(t), newLab(t)
	sa, sb := a.create(t, wire.CreateSandbox{Runtime: "container"}), b.create(t, wire.CreateSandbox{Runtime: "container"})
	if a.where.Instance == b.where.Instance || sa.ID == sb.ID {
		t.Fatal("both are the same")
	}
	_, err := a.cl.Sandbox(t.Context(), sb.ID)
	wantError(t, err, sandbox.CodeNotFound)
	_, err = a.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
	wantError(t, err, sandbox.CodeNotFound)
	if err := a.cl.Kill(t.Context(), sb.ID); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("one daemon ends the other's sandbox: %v", err)
	}
	a.verify(t)
	b.verify(t)
	a.d.kill()
	b.verify(t)
	a.start(t) // sweeps what is its own, and only that
	a.verify(t)
	b.verify(t)
	b.sh(t, sb.ID, "true")
	a.sh(t, sa.ID, "true")
	// Another daemon on the same state, and one on the same socket, are refused.
	for name, other := range map[string]*lab{
		"same state":  {bin: a.bin, state: a.state, socket: a.socket + "2", flags: []string{"--listen", "none"}},
		"same socket": {bin: a.bin, state: a.state + "2", socket: a.socket, flags: []string{"--listen", "none"}},
	} {
		p := other.launch(t)
		select {
		case <-p.done:
		case <-time.After(longest):
			p.cmd.Process.Signal(syscall.SIGTERM)
			<-p.done
		}
		if p.cmd.ProcessState.ExitCode() == 0 || !strings.Contains(p.output(), "another daemon") && !strings.Contains(p.output(), "serves on") {
			t.Errorf("%s: it ended with %v: %s", name, p.cmd.ProcessState, p.output())
		}
	}
	a.sh(t, sa.ID, "true")
	run, err := daemon.RunDir(a.state + "2")
	must(t, err)
	os.RemoveAll(run)
}
