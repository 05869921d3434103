package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

const captureSamples = 10

// holder holds argv[1] MiB that are not zero, and writes down when it did not
// run for over 10 ms, in milliseconds: the pause that a capture is to it.
const holder = `
import sys, time
held = bytearray(int(sys.argv[1]) << 20)
for i in range(0, len(held), 4096):
    held[i] = 1 + i % 255
print("up", flush=True)
last = time.monotonic()
while True:
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.010:
        with open("/tmp/gaps", "a") as f:
            print("%.1f" % ((now - last) * 1000), file=f)
    last = time.monotonic()
`

// captures measures live forks, hibernation and waking on gVisor, which can
// capture memory, beside the commands of runsc that a user would type.
func captures(ctx context.Context, l *lab, r *report.Report) error {
	for _, mib := range []int{34, 200} {
		if err := capturesOf(ctx, l, r, mib); err != nil {
			return fmt.Errorf("%d MiB: %w", mib, err)
		}
	}
	r.Note("a bare fork is runsc checkpoint --leave-running, N runsc restore -detach side by side, and runsc exec in every child; the API's fork also stops the source's processes, makes network slots, records, and gives each child its identity before its first instruction")
	r.Note("\"stock\" is gVisor's main package as its module builds it; \"own\" is Warren's build of the same, whose system call filter is compiled beforehand, as in gVisor's releases, and which has one Go thread more. The daemon runs the second")
	r.Note("source and bare source have all of the host's processors; bare and Warren take turns; every child is removed, untimed, before the next sample")
	r.Note("the daemon keeps up to %d sandboxes prepared (serve --spares), and each sample waits, untimed, until there are enough; \"again at once\" is the fork right after, with none waiting, as far as they were all taken", benchSpares)
	r.Note("a hibernation answers when its capture is checked, flushed and on record, what no bare command does; \"until it has left\" is to the end of what it had of the host, which a wake has to wait for: it is timed after that")
	r.Note("the floor, by the Sentry's own CPU profile on this host: a save is 43 to 50 ms of CPU time on two threads, a restore into a prepared Sentry about 65 ms, so that a fork's first child cannot answer sooner than about 30 + 60 ms, and ten on two cores than 10 x 65 / 2 after the capture; a hibernation adds to the bare checkpoint its checksums and its way to the disk")
	return nil
}

func capturesOf(ctx context.Context, l *lab, r *report.Report, mib int) (err error) {
	rivals, err := newRivals(ctx, l, r, mib)
	defer func() {
		for _, b := range rivals {
			err = errors.Join(err, b.close())
		}
	}()
	if err != nil {
		return err
	}
	s, err := l.CreateSandbox(ctx, wire.CreateSandbox{
		Template: l.template, Runtime: "gvisor", Network: wire.Network{Mode: sandbox.NetworkNone},
		Resources: wire.ResourceRequest{MemoryMiB: 512, CPUs: float64(runtime.NumCPU())},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Kill(context.WithoutCancel(ctx), s.ID)) }()
	start := fmt.Sprintf("cat >/tmp/hold.py <<'EOF'\n%s\nEOF\nnohup python3 /tmp/hold.py %d >/tmp/up 2>&1 & until grep -q up /tmp/up 2>/dev/null; do sleep 0.05; done", holder, mib)
	if err := l.sh(ctx, s.ID, start); err != nil {
		return err
	}
	name := func(format string, args ...any) string {
		return fmt.Sprintf("%d MiB: ", mib) + fmt.Sprintf(format, args...)
	}
	for _, n := range []int{1, 4, 10} {
		if err := forkInto(ctx, l, r, rivals, s.ID, n, name); err != nil {
			return err
		}
	}
	return sleepAndWake(ctx, l, r, rivals, s.ID, name)
}

// forkInto measures forks of id into n copies beside the rivals' commands.
func forkInto(ctx context.Context, l *lab, r *report.Report, rivals []rival, id string, n int, name func(string, ...any) string) error {
	pause := r.Figure(name("the source's pause in a fork into %d", n), "ms")
	fork := r.Figure(name("fork into %d, to the last exec answered", n), "ms")
	again := r.Figure(name("fork into %d again at once, to the last exec answered", n), "ms")
	plain := make([]*report.Figure, len(rivals))
	for i, b := range rivals {
		plain[i] = r.Figure(name("bare fork into %d (%s runsc), to the last exec answered", n, b.called), "ms")
	}
	for i := range captureSamples + 1 { // the first warms all up
		for j, b := range rivals {
			t := time.Now()
			err := b.fork(ctx, n)
			if i > 0 {
				plain[j].AddMillis(t, err)
			}
			if err := b.removeForks(ctx, n); err != nil {
				return err
			}
		}
		if i > 0 { // the first fork tells the daemon to have spares
			if err := l.waitSpares(ctx, n); err != nil {
				return err
			}
		}
		took, gap, forkErr := l.forkAndExec(ctx, id, n)
		next, _, nextErr := l.forkAndExec(ctx, id, n)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if i > 0 {
			fork.Add(millis(took), forkErr)
			again.Add(millis(next), nextErr)
			pause.Add(gap, forkErr)
		}
	}
	mark := 0.7
	if n == 1 {
		mark = 0.6
	}
	for i, b := range rivals {
		ratio(r, name("fork into %d, against the bare commands of the %s runsc (p50)", n, b.called), fork, plain[i], mark)
	}
	return nil
}

// ratio holds a figure's median against a bare one's.
func ratio(r *report.Report, name string, of, plain *report.Figure, mark float64) {
	if plain.P50 > 0 {
		r.AtMost(name, of.P50/plain.P50, mark, "×")
	}
}

func sleepAndWake(ctx context.Context, l *lab, r *report.Report, rivals []rival, id string, name func(string, ...any) string) error {
	plain := make([]bareSleep, len(rivals))
	for i, b := range rivals {
		plain[i] = bareSleep{
			leaving: r.Figure(name("bare checkpoint --leave-running (%s runsc)", b.called), "ms"),
			ending:  r.Figure(name("bare checkpoint, which ends it (%s runsc)", b.called), "ms"),
			restore: r.Figure(name("bare restore and exec (%s runsc)", b.called), "ms"),
		}
	}
	sleep := r.Figure(name("hibernate"), "ms")
	left := r.Figure(name("hibernate, until it has left"), "ms")
	wake := r.Figure(name("wake to the first exec answered"), "ms")
	for range captureSamples {
		for i, b := range rivals {
			if err := b.sleepAndWake(ctx, plain[i]); err != nil {
				return err
			}
		}
		if err := l.waitSpares(ctx, 1); err != nil {
			return err
		}
		t := time.Now()
		err := l.Hibernate(ctx, id)
		sleep.AddMillis(t, err)
		left.AddMillis(t, errors.Join(err, l.WaitDeparted(ctx)))
		t = time.Now()
		wake.AddMillis(t, l.runTrue(ctx, id))
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	for i, b := range rivals {
		ratio(r, name("hibernate, against the bare checkpoint --leave-running of the %s runsc (p50)", b.called), sleep, plain[i].leaving, 1.1)
		ratio(r, name("hibernate, against the bare checkpoint that ends it of the %s runsc (p50)", b.called), sleep, plain[i].ending, 1.1)
		ratio(r, name("wake to first exec, against the bare restore and exec of the %s runsc (p50)", b.called), wake, plain[i].restore, 0.7)
	}
	return nil
}

// forkAndExec forks id into n, runs a command in each copy at once, and gives
// the time to the last answer and the source's pause in milliseconds.
func (l *lab) forkAndExec(ctx context.Context, id string, n int) (took time.Duration, pause float64, err error) {
	if err := l.sh(ctx, id, "rm -f /tmp/gaps"); err != nil {
		return 0, 0, err
	}
	start := time.Now()
	forks, err := l.Fork(ctx, id, wire.Fork{Count: n})
	if err != nil {
		return 0, 0, err
	}
	errs := make([]error, len(forks.Forks))
	var all sync.WaitGroup
	for i, f := range forks.Forks {
		if f.Error != nil {
			errs[i] = f.Error.Err()
			continue
		}
		all.Go(func() { errs[i] = l.runTrue(ctx, f.Sandbox.ID) })
	}
	all.Wait()
	took = time.Since(start)
	for _, f := range forks.Forks {
		if f.Sandbox != nil {
			errs = append(errs, l.Kill(context.WithoutCancel(ctx), f.Sandbox.ID))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return 0, 0, err
	}
	res, err := l.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Shell: "sort -n /tmp/gaps 2>/dev/null | tail -n 1"}, User: "root"})
	if err != nil {
		return 0, 0, err
	}
	if gap := strings.TrimSpace(string(res.OutBytes())); gap != "" { // else under 10 ms
		pause, err = strconv.ParseFloat(gap, 64)
	}
	return took, pause, err
}

// waitSpares waits until the daemon has n sandboxes prepared, as it does in the
// quiet between an agent's forks, so that nothing is made beside what is timed.
func (l *lab) waitSpares(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		c, err := l.Capacity(ctx)
		if err != nil {
			return err
		}
		if len(c.Spares) >= n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d spares of %d came to be", len(c.Spares), n)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (l *lab) sh(ctx context.Context, id, script string) error {
	res, err := l.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Shell: script}, User: "root"})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("%.40q… exited with %d: %s", script, res.ExitCode, res.ErrBytes())
	}
	return err
}
