package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
	"github.com/warrenhq/warren/internal/api/wire"
)

const (
	transferBytes   = 1 << 30
	transferSamples = 5
	transferPath    = "/tmp/bench"
)

func transfer(ctx context.Context, l *lab, r *report.Report) error {
	for _, rt := range l.runtimes {
		if err := transferIn(ctx, l, r, rt); err != nil {
			return fmt.Errorf("%s: %w", rt, err)
		}
	}
	r.Note("the sandboxes have 4096 MiB, so that the file fits their page cache: what is measured is the way through the daemon and the agent, not the disk")
	return nil
}

func transferIn(ctx context.Context, l *lab, r *report.Report, rt string) (err error) {
	s, err := l.create(ctx, rt, 4096)
	if err != nil {
		return err
	}
	defer func() {
		if e := l.Kill(context.WithoutCancel(ctx), s.ID); err == nil {
			err = e
		}
	}()
	up, down, err := l.measureTransfers(ctx, r, rt, s.ID, transferSamples, transferBytes,
		func() error {
			return l.WriteFile(ctx, s.ID, transferPath, "root", io.LimitReader(pattern{}, transferBytes), transferBytes, 0)
		},
		func() error { return download(ctx, l, s.ID) })
	if err != nil {
		return err
	}
	r.AtLeast(rt+": upload (p50)", up.P50, 500, "MB/s")
	r.AtLeast(rt+": download (p50)", down.P50, 500, "MB/s")
	return nil
}

// measureTransfers sends size bytes up and down by turns, and measures what
// that costs the daemon and the sandbox's agent in memory.
func (l *lab) measureTransfers(ctx context.Context, r *report.Report, rt, id string, samples int, size int64, send, fetch func() error) (up, down *report.Figure, err error) {
	up, down = r.Figure(rt+": upload", "MB/s"), r.Figure(rt+": download", "MB/s")
	daemonGrew := r.Figure(rt+": daemon's memory grew by", "MiB")
	agentGrew := r.Figure(rt+": agent's memory grew by", "MiB")
	for range samples {
		for _, dir := range []struct {
			f  *report.Figure
			do func() error
		}{{up, send}, {down, fetch}} {
			w, err := l.watchMemory(ctx, id)
			if err != nil {
				return nil, nil, err
			}
			start := time.Now()
			err = dir.do()
			took := time.Since(start)
			dir.f.Add(float64(size)/1e6/took.Seconds(), err)
			d, a, err := w.stop()
			daemonGrew.Add(d, err)
			agentGrew.Add(a, err)
		}
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
	}
	r.AtMost(rt+": daemon's memory grew by at most", daemonGrew.Max, 32, "MiB")
	r.AtMost(rt+": agent's memory grew by at most", agentGrew.Max, 32, "MiB")
	return up, down, nil
}

func download(ctx context.Context, l *lab, id string) error {
	f, size, err := l.ReadFile(ctx, id, transferPath, "root")
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.Copy(io.Discard, f)
	if err == nil && (n != transferBytes || size != transferBytes) {
		err = fmt.Errorf("got %d bytes of %d, want %d", n, size, transferBytes)
	}
	return err
}

// pattern is an endless stream that costs nothing to make.
type pattern struct{}

func (pattern) Read(p []byte) (int, error) { return len(p), nil }

// memoryWatch samples the daemon's and the agent's resident memory.
type memoryWatch struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error
	base   [2]float64
	most   [2]float64
}

func (l *lab) watchMemory(ctx context.Context, id string) (*memoryWatch, error) {
	base, err := l.memory(ctx, id)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &memoryWatch{cancel: cancel, done: make(chan struct{}), base: base, most: base}
	go func() {
		defer close(w.done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
			m, err := l.memory(ctx, id)
			if err != nil {
				if !errors.Is(ctx.Err(), context.Canceled) {
					w.err = err
				}
				return
			}
			for i := range m {
				w.most[i] = max(w.most[i], m[i])
			}
		}
	}()
	return w, nil
}

func (w *memoryWatch) stop() (daemon, agent float64, err error) {
	w.cancel()
	<-w.done
	return w.most[0] - w.base[0], w.most[1] - w.base[1], w.err
}

// memory reads the daemon's memory, and the agent's as it is seen inside: it is
// process 1 there, on every runtime. File pages that are mapped are not its own.
func (l *lab) memory(ctx context.Context, id string) ([2]float64, error) {
	kib, err := procKiB(l.daemon.Process.Pid, "status", "RssAnon")
	if err != nil {
		return [2]float64{}, err
	}
	res, err := l.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Argv: []string{"cat", "/proc/1/status"}}, User: "root"})
	if err != nil {
		return [2]float64{}, err
	}
	for line := range strings.Lines(string(res.OutBytes())) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			agent, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return [2]float64{float64(kib) / 1024, float64(agent) / 1024}, err
		}
	}
	return [2]float64{}, errors.New("the sandbox's /proc/1/status has no VmRSS")
}
