package main

import (
	"context"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
)

// How many idle sandboxes are held at once, and the marks of each.
var densities = map[string]struct {
	n         int
	memoryMiB int
	pssMiB    float64
}{
	"container": {100, 256, 8},
	"gvisor":    {50, 256, 48},
}

func density(ctx context.Context, l *lab, r *report.Report) error {
	rss := r.Figure("daemon: resident memory with all of them", "MiB")
	for _, rt := range l.runtimes {
		d := densities[rt]
		if err := dense(ctx, l, r, rt, d.n, d.memoryMiB, d.pssMiB, rss); err != nil {
			return err
		}
	}
	r.AtMost("daemon: resident memory", rss.Max, 80, "MiB")
	return nil
}

func dense(ctx context.Context, l *lab, r *report.Report, rt string, n, memoryMiB int, mark float64, rss *report.Figure) (err error) {
	made := r.Figure(rt+": creates on the way", "ms")
	pss := r.Figure(rt+": PSS of one idle sandbox, its agent included", "MiB")
	answered := r.Figure(rt+": exec once all are there", "ms")
	var ids []string
	defer func() {
		for _, id := range ids {
			if e := l.Kill(context.WithoutCancel(ctx), id); err == nil {
				err = e
			}
		}
	}()
	for range n {
		start := time.Now()
		s, err := l.create(ctx, rt, memoryMiB)
		made.AddMillis(start, err)
		if err == nil {
			ids = append(ids, s.ID)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	time.Sleep(5 * time.Second) // what starting took is given back
	for _, id := range ids {
		pss.Add(l.pssMiB(id))
	}
	kib, err := procKiB(l.daemon.Process.Pid, "status", "VmRSS")
	rss.Add(float64(kib)/1024, err)
	for _, id := range ids {
		start := time.Now()
		answered.AddMillis(start, l.runTrue(ctx, id))
	}
	r.AtLeast(rt+": idle sandboxes at once", float64(len(ids)), float64(n), "sandboxes")
	r.AtMost(rt+": PSS of one idle sandbox (p50)", pss.P50, mark, "MiB")
	return nil
}
