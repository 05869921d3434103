package prove

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// How often each thing is measured.
const (
	starts, startsQuick = 20, 3
	execs, execsQuick   = 200, 20
	idles, idlesQuick   = 5, 2
	forks, forksQuick   = 10, 2                        // and hibernations
	settle, settleQuick = 3 * time.Second, time.Second // an idle sandbox is looked at so long after its start
)

func (m *measurement) pick(whole, quick int) int {
	if m.o.Quick {
		return quick
	}
	return whole
}

// timings measures starts, one after the other, and round trips of an exec.
func (m *measurement) timings(ctx context.Context) ([]Timing, error) {
	byStart := map[string]*[2]Timing{}
	for _, how := range []string{"cold", "restore", "pool"} {
		byStart[how] = &[2]Timing{
			{ID: "create_" + how, Name: "create answered (" + how + ")"},
			{ID: "start_" + how, Name: "create and first exec answered (" + how + ")"},
		}
	}
	// The caller kills what it made.
	one := func(r wire.CreateSandbox) (id string, err error) {
		start := time.Now()
		sb, err := m.create(ctx, r)
		if err != nil {
			if ctx.Err() == nil {
				byStart["cold"][1].add(0, err)
			}
			return "", err
		}
		created := time.Since(start)
		err = m.trivial(ctx, sb.ID)
		answered := time.Since(start)
		how := sb.Start
		if byStart[how] == nil {
			how = "cold"
		}
		byStart[how][0].add(created, nil)
		byStart[how][1].add(answered, err)
		return sb.ID, nil
	}
	n := m.pick(starts, startsQuick)
	for i := range n {
		m.progress("%s: start %d of %d", m.runtime, i+1, n)
		id, err := one(wire.CreateSandbox{})
		if id != "" {
			m.kill(ctx, id)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil && i == 0 {
			return nil, err // it cannot be started at all
		}
	}
	out := []Timing{byStart["cold"][0], byStart["cold"][1]}
	captures, err := m.warmStarts(ctx, one)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	for _, how := range []string{"restore", "pool"} {
		t := byStart[how][1]
		switch {
		case t.N > 0 || t.Failures > 0:
		case err != nil:
			t.Note = "no create was answered so: " + err.Error()
		case how == "restore" && !captures:
			t.Note = "it cannot capture memory: templates have no warm capture to restore"
		default:
			t.Note = "no create was answered so"
		}
		out = append(out, t)
	}

	rt := Timing{ID: "exec", Name: "exec round trip"}
	sb, err := m.create(ctx, wire.CreateSandbox{})
	if err != nil {
		return out, err
	}
	defer m.kill(ctx, sb.ID)
	if err := m.trivial(ctx, sb.ID); err != nil { // connections are made, pages are read
		return out, err
	}
	for range m.pick(execs, execsQuick) {
		start := time.Now()
		err := m.trivial(ctx, sb.ID)
		rt.add(time.Since(start), err)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	return append(out, rt), nil
}

// poolLimits are those of the sandboxes in the pool of a run, one process off
// the default: no pool of somebody else's has them.
var poolLimits = wire.ResourceRequest{PIDs: sandbox.DefaultResources().PIDs - 1}

// poolWait bounds the wait for a pool of one to be full.
const poolWait = 2 * time.Minute

// warmStarts measures, with one, claims from a pool of one member and, where
// the pool has a warm capture, creates that find it empty.
func (m *measurement) warmStarts(ctx context.Context, one func(wire.CreateSandbox) (string, error)) (captures bool, err error) {
	p, err := m.o.Client.SetPool(ctx, wire.SetPool{Template: m.o.Template, Runtime: m.runtime, Resources: poolLimits, Ready: 1})
	if err != nil {
		return false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), createLimit)
		defer cancel()
		if e := m.o.Client.RemovePool(ctx, p.ID); err == nil {
			err = e
		}
	}()
	n := m.pick(starts, startsQuick)
	for i := range n {
		m.progress("%s: claim %d of %d", m.runtime, i+1, n)
		if p, err = m.fullPool(ctx, p.ID); err != nil {
			return captures, err
		}
		captures = p.Capture != nil
		creates := 1
		if captures {
			creates = 2 // the next member is not made before it is calm: the second finds none
		}
		var ids []string
		for range creates {
			var id string
			if id, err = one(wire.CreateSandbox{Resources: poolLimits}); err != nil {
				break
			}
			ids = append(ids, id)
		}
		for _, id := range ids {
			m.kill(ctx, id)
		}
		if err != nil {
			return captures, err
		}
	}
	return captures, nil
}

// fullPool waits until a pool is full and at rest.
func (m *measurement) fullPool(ctx context.Context, id string) (wire.Pool, error) {
	ctx, cancel := context.WithTimeout(ctx, poolWait)
	defer cancel()
	for {
		p, err := m.o.Client.Pool(ctx, id)
		switch {
		case err != nil || p.Available == p.Ready && p.Making+p.Ending == 0:
			return p, err
		case p.Error != nil:
			return p, p.Error.Err()
		}
		select {
		case <-ctx.Done():
			return p, fmt.Errorf("the pool was not full after %v", poolWait)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// trivial runs the smallest command that there is.
func (m *measurement) trivial(ctx context.Context, id string) error {
	res, err := m.exec(ctx, id, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}})
	if err == nil && res.ExitCode != 0 {
		err = fmt.Errorf("true exited with %d: %s", res.ExitCode, lastLine(string(res.ErrBytes())))
	}
	return err
}

// captureTimings measures forks of one child and hibernations, of a sandbox in
// which nothing but the agent runs. What a runtime cannot do is a series with
// the refusal for a note.
func (m *measurement) captureTimings(ctx context.Context) ([]Timing, error) {
	fork := Timing{ID: "fork", Name: "fork and the child's first exec answered"}
	hibernate := Timing{ID: "hibernate", Name: "hibernate answered"}
	wake := Timing{ID: "wake", Name: "wake by an exec, which is answered"}
	sb, err := m.create(ctx, wire.CreateSandbox{})
	if err != nil {
		return nil, err
	}
	defer m.kill(ctx, sb.ID)
	if err := m.trivial(ctx, sb.ID); err != nil {
		return nil, err
	}
	source := &subject{m, sb.ID}
	for i := range m.pick(forks, forksQuick) {
		m.progress("%s: fork %d", m.runtime, i+1)
		start := time.Now()
		forked, err := source.Fork(ctx, 1)
		if err == nil {
			err = errors.Join(forked.Errors...)
		}
		for _, child := range forked.Sandboxes {
			err = errors.Join(err, m.trivial(ctx, child.ID()))
		}
		fork.add(time.Since(start), err)
		for _, child := range forked.Sandboxes {
			child.Kill(ctx)
		}
		if err != nil {
			break
		}
	}
	for i := range m.pick(forks, forksQuick) {
		m.progress("%s: hibernation %d", m.runtime, i+1)
		start := time.Now()
		err := source.Hibernate(ctx)
		hibernate.add(time.Since(start), err)
		if err != nil {
			wake.Note = "it does not hibernate"
			break
		}
		if err := m.o.Client.WaitDeparted(ctx); err != nil {
			return nil, err
		}
		start = time.Now()
		err = m.trivial(ctx, sb.ID)
		wake.add(time.Since(start), err)
		if err != nil {
			break
		}
	}
	return []Timing{fork, hibernate, wake}, ctx.Err()
}

// memory measures what idle sandboxes cost, several side by side.
func (m *measurement) memory(ctx context.Context) (*Memory, error) {
	out := &Memory{}
	var ids []string
	for range m.pick(idles, idlesQuick) {
		sb, err := m.create(ctx, wire.CreateSandbox{})
		if err != nil {
			return nil, err
		}
		defer m.kill(ctx, sb.ID)
		ids = append(ids, sb.ID)
	}
	wait := settle
	if m.o.Quick {
		wait = settleQuick
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(wait):
	}
	out.N = len(ids)
	for _, id := range ids {
		st, err := m.o.Client.Stats(ctx, id)
		if err != nil {
			return nil, err
		}
		out.WorkingSet += st.WorkingSet / int64(len(ids))
	}
	out.Source = "working set, as the daemon's stats have it"
	switch {
	case !m.host.Local:
		out.Source += ": PSS is read on the daemon's machine"
	case os.Geteuid() != 0:
		out.Source += ": PSS needs root"
	default:
		var pss int64
		procs := 0
		for _, id := range ids {
			bytes, n, err := readPSS("/proc", id)
			if err != nil {
				return nil, fmt.Errorf("PSS of %s: %w", id, err)
			}
			pss += bytes
			procs += n
		}
		if procs > 0 {
			out.PSS, out.Processes = pss/int64(len(ids)), procs/len(ids)
			out.Source = "PSS of its processes on the host (smaps_rollup of those in its cgroup)"
		} else {
			out.Source += ": its processes are not seen from here"
		}
	}
	return out, nil
}

var validID = regexp.MustCompile(`^[a-z0-9]+$`)

// readPSS adds up the proportional set size, in bytes, of the processes that
// are in the cgroup of a sandbox, whatever the hierarchy, or whose command line
// names it (gVisor's gofer).
func readPSS(proc, id string) (bytes int64, processes int, err error) {
	if !validID.MatchString(id) {
		return 0, 0, sandbox.Errorf(sandbox.CodeInternal, "the daemon told of a sandbox %q", id)
	}
	entries, err := os.ReadDir(proc)
	if err != nil {
		return 0, 0, err
	}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		dir := filepath.Join(proc, e.Name())
		cg, _ := os.ReadFile(filepath.Join(dir, "cgroup"))
		if !inCgroup(string(cg), id) {
			cmd, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
			if !strings.Contains(string(cmd), id) {
				continue
			}
		}
		data, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
		if err != nil {
			continue // it has ended
		}
		w := strings.Fields(status(string(data))["Pss"])
		if len(w) == 0 {
			continue
		}
		kib, err := strconv.ParseInt(w[0], 10, 64)
		if err != nil {
			return 0, 0, fmt.Errorf("smaps_rollup of %s: %w", e.Name(), err)
		}
		bytes += kib << 10
		processes++
	}
	return bytes, processes, nil
}

// inCgroup tells whether a /proc/PID/cgroup has a path with the element id.
func inCgroup(cgroup, id string) bool {
	for line := range strings.Lines(cgroup) {
		_, path, _ := strings.Cut(strings.TrimSpace(line), ":/")
		for p := range strings.SplitSeq(path, "/") {
			if p == id {
				return true
			}
		}
	}
	return false
}
