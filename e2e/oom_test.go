package e2e

import (
	"context"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TestOOM has a command take twice its sandbox's memory, and no more than that.
func TestOOM(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	hog := wire.Exec{Cmd: wire.Command{Argv: []string{"inside", "hog", "192"}}, Timeout: 60}
	limit := wire.ResourceRequest{MemoryMiB: 96}
	l.each(t, func(t *testing.T, runtime string) {
		beside := l.create(t, wire.CreateSandbox{Runtime: runtime})
		counter, err := l.cl.Start(t.Context(), beside.ID, client.Command{Args: []string{"sleep", "1000"}})
		must(t, err)
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: limit})
		ctx, cancel := context.WithTimeout(t.Context(), longest)
		defer cancel()
		res, err := l.cl.Exec(ctx, sb.ID, hog)
		if runtime == "container" {
			if err != nil {
				t.Fatalf("exec: %v (%s)", err, sandbox.CodeOf(err))
			}
			if res.ExitCode != 137 || res.Signal != "SIGKILL" || !res.OOM || strings.Contains(string(res.OutBytes()), "fitted") {
				t.Errorf("the command ended with %d, %q, oom %v, %q", res.ExitCode, res.Signal, res.OOM, res.OutBytes())
			}
			// The sandbox and its agent live on, and it is on record.
			if out := l.sh(t, sb.ID, "echo still here"); out != "still here" {
				t.Errorf("afterwards it answers %q", out)
			}
			var got wire.Sandbox
			if !eventually(func() bool { got = l.get(t, sb.ID); return got.OOMKills > 0 }, longest) || got.State != sandbox.Running {
				t.Errorf("it is %s with %d OOM kills", got.State, got.OOMKills)
			}
			told := false
			l.cl.Events(ctx, sb.ID, 0, func(e wire.Event) error {
				if e.Type == sandbox.EventOOM && string(e.Sandbox) == sb.ID && e.Detail != "" {
					told = true
					return errSeen
				}
				return nil
			})
			if !told {
				t.Error("no event tells of the kill")
			}
			// Once more, by the command line.
			if cli := l.cli(t, "exec", sb.ID, "--", "inside", "hog", "192"); cli.code != 137 {
				t.Errorf("warren exec: exit %d, %s", cli.code, cli.stderr)
			}
		} else {
			wantError(t, err, sandbox.CodeUnavailable, "ended under the command", "oom_killed")
			l.waitEnded(t, sb.ID, sandbox.Failed, sandbox.ReasonOOM)
			_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
			wantError(t, err, sandbox.CodeConflict, "oom_killed")
			other := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: limit})
			cli := l.cli(t, "exec", other.ID, "--", "inside", "hog", "192")
			if cli.code != 125 || !strings.Contains(string(cli.stderr), "oom_killed") {
				t.Errorf("warren exec: exit %d, %s", cli.code, cli.stderr)
			}
		}
		// Within the limit it fits.
		fits := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 256}})
		if out := l.run(t, fits.ID, "inside", "hog", "32"); out != "fitted 32" {
			t.Errorf("within the limit: %q", out)
		}
		l.sh(t, beside.ID, "true")
		if !strings.Contains(l.run(t, beside.ID, "ps"), "sleep 1000") {
			t.Error("a command of the sandbox beside is gone")
		}
		must(t, counter.Signal(t.Context(), 15))
		if end, err := counter.Wait(t.Context()); err != nil || end.Code != 143 {
			t.Errorf("it ended with %+v, %v", end, err)
		}
		l.verify(t)
	})
}

// TestLimits looks at what a sandbox sees of its limits, and runs into them.
func TestLimits(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{
			Runtime: runtime, Hostname: "little-box", Resources: wire.ResourceRequest{CPUs: 1, MemoryMiB: 200, PIDs: 64},
		})
		if out := l.run(t, sb.ID, "nproc"); out != "1" {
			t.Errorf("nproc says %s", out)
		}
		if out := l.run(t, sb.ID, "inside", "cpus"); out != "1" {
			t.Errorf("a program counts %s CPUs", out)
		}
		if out := l.sh(t, sb.ID, "awk '/^MemTotal/ {print int($2/1024)}' /proc/meminfo"); out != "200" {
			t.Errorf("/proc/meminfo says %s MiB", out)
		}
		if out := l.sh(t, sb.ID, "hostname; cat /etc/hostname; grep -c little-box /etc/hosts"); out != "little-box\nlittle-box\n1" {
			t.Errorf("its name is %q", out)
		}
		if st, err := l.cl.Stats(t.Context(), sb.ID); err != nil || st.MemoryLimit < 200<<20 || st.MemoryLimit > 400<<20 || st.WorkingSet <= 0 || st.CPUSeconds <= 0 {
			t.Errorf("its stats are %+v, %v", st, err)
		}
		t.Run("processes", func(t *testing.T) {
			beside := l.create(t, wire.CreateSandbox{Runtime: runtime})
			// At most 200 of them, in a sandbox that may have 64.
			_, err := l.cl.Exec(t.Context(), sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"sh", "-c",
				`i=0; while [ $i -lt 200 ]; do sleep 30 & i=$((i+1)); done; echo all`}}, Timeout: 60})
			if runtime == "gvisor" && err != nil {
				// The limit holds for the Sentry's own threads: it ends, and its sandbox alone.
				l.waitEnded(t, sb.ID, sandbox.Failed, sandbox.ReasonRuntimeCrashed)
			} else if err != nil {
				t.Errorf("exec: %v", err)
			} else if made := strings.Count(l.psOrNothing(sb.ID), "sleep 30"); made > 64 && runtime == "container" {
				t.Errorf("it has %d processes", made)
			}
			l.sh(t, beside.ID, "true")
		})
	})
}

// psOrNothing lists the processes inside; "" where it has no room for one more.
func (l *lab) psOrNothing(id string) string {
	res, err := l.cl.Exec(context.Background(), id, wire.Exec{Cmd: wire.Command{Argv: []string{"ps"}}, Timeout: 30})
	if err != nil {
		return ""
	}
	return string(res.OutBytes())
}
