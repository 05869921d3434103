package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/warrenhq/warren/bench/internal/report"
	"github.com/warrenhq/warren/internal/api/wire"
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
	r.Note("bare is runsc checkpoint --leave-running, N runsc restore -detach side by side, and runsc exec in every child; the API's fork also stops the source's processes, makes network slots, records, and gives each child its identity before its first instruction")
	r.Note("the daemon keeps up to %d sandboxes prepared (serve --spares), and each sample waits, untimed, until there are enough; \"again at once\" is the fork right after, with none waiting, as far as they were all taken", benchSpares)
	r.Note("the bare runsc is the one that Warren builds, with its system call filter compiled beforehand as in gVisor's releases: built from the module alone it takes about 35 ms longer for each restore")
	r.Note("the floor, by the Sentry's own CPU profile on this host: a save is 43 to 50 ms of CPU time on two threads, a restore into a prepared Sentry about 65 ms, so that a fork's first child cannot answer sooner than about 30 + 60 ms, and ten on two cores than 10 x 65 / 2 after the capture; a hibernation adds to the bare checkpoint its checksums and its way to the disk, and the end of the Sentry, in which the kernel takes down its memory and stubs for 25 to 30 ms")
	r.Note("bare and Warren take turns; every child is removed, untimed, before the next sample")
	return nil
}

func capturesOf(ctx context.Context, l *lab, r *report.Report, mib int) (err error) {
	b, err := newBareSource(ctx, l, mib)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	s, err := l.create(ctx, "gvisor", 512)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Kill(context.WithoutCancel(ctx), s.ID)) }()
	start := fmt.Sprintf("cat >/tmp/hold.py <<'EOF'\n%s\nEOF\nnohup python3 /tmp/hold.py %d >/tmp/up 2>&1 & until grep -q up /tmp/up 2>/dev/null; do sleep 0.05; done", holder, mib)
	if err := l.sh(ctx, s.ID, start); err != nil {
		return err
	}
	name := func(what string) string { return fmt.Sprintf("%d MiB: %s", mib, what) }
	pause := r.Figure(name("the source's pause in a fork"), "ms")
	for _, n := range []int{1, 4, 10} {
		plain := r.Figure(name(fmt.Sprintf("bare fork into %d, to the last exec answered", n)), "ms")
		fork := r.Figure(name(fmt.Sprintf("fork into %d, to the last exec answered", n)), "ms")
		again := r.Figure(name(fmt.Sprintf("fork into %d again at once, to the last exec answered", n)), "ms")
		for i := range captureSamples + 1 {
			t := time.Now()
			bareErr := b.fork(ctx, n)
			bareTime := time.Since(t)
			if err := b.removeForks(ctx, n); err != nil {
				return err
			}
			if i > 0 { // the first fork tells the daemon to have spares
				if err := l.waitSpares(ctx, n); err != nil {
					return err
				}
			}
			warren, gap, forkErr := l.forkAndExec(ctx, s.ID, n)
			next, _, nextErr := l.forkAndExec(ctx, s.ID, n)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if i > 0 { // the first warms both up
				plain.Add(millis(bareTime), bareErr)
				fork.Add(millis(warren), forkErr)
				again.Add(millis(next), nextErr)
				pause.Add(gap, forkErr)
			}
		}
		bound := 0.7
		if n == 1 {
			bound = 0.6
		}
		if plain.P50 > 0 {
			r.AtMost(name(fmt.Sprintf("fork into %d, against the bare commands (p50)", n)), fork.P50/plain.P50, bound, "×")
		}
	}
	return sleepAndWake(ctx, l, r, b, s.ID, name)
}

func sleepAndWake(ctx context.Context, l *lab, r *report.Report, b *bareSource, id string, name func(string) string) error {
	check := r.Figure(name("bare runsc checkpoint --leave-running"), "ms")
	restore := r.Figure(name("bare runsc restore and exec"), "ms")
	sleep := r.Figure(name("hibernate"), "ms")
	wake := r.Figure(name("wake to the first exec answered"), "ms")
	for range captureSamples {
		t := time.Now()
		err := b.checkpoint(ctx)
		check.AddMillis(t, err)
		t = time.Now()
		if err == nil {
			err = b.restore(ctx, 0)
		}
		restore.AddMillis(t, err)
		if err := b.removeForks(ctx, 1); err != nil {
			return err
		}
		if err := l.waitSpares(ctx, 1); err != nil {
			return err
		}
		t = time.Now()
		sleep.AddMillis(t, l.Hibernate(ctx, id))
		t = time.Now()
		wake.AddMillis(t, l.runTrue(ctx, id))
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	if check.P50 > 0 && restore.P50 > 0 {
		r.AtMost(name("hibernate, against the bare checkpoint (p50)"), sleep.P50/check.P50, 1.1, "×")
		r.AtMost(name("wake to first exec, against the bare restore and exec (p50)"), wake.P50/restore.P50, 0.7, "×")
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

// bareSource is a sandbox that runsc itself runs, with the holder in it.
type bareSource struct {
	*bare
	image string
}

func newBareSource(ctx context.Context, l *lab, mib int) (*bareSource, error) {
	b, err := newBare(ctx, l, "gvisor")
	if err != nil {
		return nil, err
	}
	s := &bareSource{bare: b, image: filepath.Join(b.dir, "image")}
	path := filepath.Join(b.dir, "config.json")
	data, err := os.ReadFile(path)
	var spec specs.Spec
	if err == nil {
		err = json.Unmarshal(data, &spec)
	}
	if err == nil {
		spec.Process.Args = []string{"python3", "-c", holder, strconv.Itoa(mib)}
		spec.Linux.CgroupsPath, spec.Linux.Resources = "", nil // all the forks would share one group and its limits
		data, err = json.Marshal(&spec)
	}
	if err == nil {
		err = os.WriteFile(path, data, 0o644)
	}
	if err == nil {
		err = s.tool(ctx, "run", "--detach", "--bundle="+b.dir, "source")
	}
	if err != nil {
		return nil, errors.Join(err, b.close())
	}
	time.Sleep(3 * time.Second) // until it holds its memory
	return s, nil
}

// tool runs runsc once. Its processes go on with the streams that they were
// given, so these are files.
func (s *bareSource) tool(ctx context.Context, args ...string) error {
	out, err := os.CreateTemp(s.dir, "out")
	if err != nil {
		return err
	}
	defer os.Remove(out.Name())
	defer out.Close()
	cmd := exec.CommandContext(ctx, s.argv[0], append(s.argv[1:len(s.argv):len(s.argv)], args...)...)
	cmd.Stdout, cmd.Stderr = out, out
	done := make(chan error, 1)
	s.jobs <- func() {
		if err := cmd.Start(); err != nil {
			done <- err
			return
		}
		go func() { done <- cmd.Wait() }()
	}
	if err := <-done; err != nil {
		said, _ := os.ReadFile(out.Name())
		return fmt.Errorf("runsc %s: %w: %s", args[0], err, bytes.TrimSpace(said))
	}
	return nil
}

func (s *bareSource) checkpoint(ctx context.Context) error {
	if err := os.RemoveAll(s.image); err != nil {
		return err
	}
	return s.tool(ctx, "checkpoint", "--leave-running", "--image-path="+s.image, "source")
}

func (s *bareSource) restore(ctx context.Context, i int) error {
	id := "fork" + strconv.Itoa(i)
	if err := s.tool(ctx, "restore", "--detach", "--bundle="+s.dir, "--image-path="+s.image, id); err != nil {
		return err
	}
	return s.tool(ctx, "exec", id, "/bin/true")
}

func (s *bareSource) fork(ctx context.Context, n int) error {
	if err := s.checkpoint(ctx); err != nil {
		return err
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { errs[i] = s.restore(ctx, i) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (s *bareSource) removeForks(ctx context.Context, n int) error {
	var errs []error
	for i := range n {
		errs = append(errs, s.tool(ctx, "delete", "--force", "fork"+strconv.Itoa(i)))
	}
	return errors.Join(errs...)
}

func (s *bareSource) close() error {
	err := s.tool(context.Background(), "delete", "--force", "source")
	return errors.Join(err, s.bare.close())
}
