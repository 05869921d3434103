package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
)

// The marks of a cold start: how much longer than a bare run it may take.
var coldMarks = map[string]float64{"container": 1.5, "gvisor": 1.3}

func coldStart(ctx context.Context, l *lab, r *report.Report) error {
	for _, rt := range l.runtimes {
		bare, err := newBare(ctx, l, rt, "")
		if err != nil {
			return fmt.Errorf("bare %s: %w", rt, err)
		}
		if err := coldStarts(ctx, l, r, rt, bare); err != nil {
			bare.close()
			return err
		}
		if err := bare.close(); err != nil {
			return err
		}
	}
	r.Note("the bare run is of the bundle that the driver writes, with /bin/true as its program, on a plain copy of the root filesystem: no overlay, no agent, no interface to set up")
	return nil
}

func coldStarts(ctx context.Context, l *lab, r *report.Report, rt string, bare *bare) error {
	plain := r.Figure(rt+": bare "+bare.tool+" run /bin/true", "ms")
	created := r.Figure(rt+": create", "ms")
	first := r.Figure(rt+": create to first exec answered", "ms")
	removed := r.Figure(rt+": kill", "ms")
	for i := range l.n + 2 {
		start := time.Now()
		bareErr := bare.run(ctx)
		bareTime := time.Since(start)

		start = time.Now()
		s, err := l.create(ctx, rt, 512)
		createTime := time.Since(start)
		if err == nil {
			err = l.runTrue(ctx, s.ID)
		}
		total := time.Since(start)
		start = time.Now()
		var killErr error
		if s.ID != "" {
			killErr = l.Kill(ctx, s.ID)
		}
		kill := time.Since(start)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if i < 2 {
			continue // both warm up: the page cache, the slot pool, lxcfs
		}
		plain.Add(millis(bareTime), bareErr)
		created.Add(millis(createTime), err)
		first.Add(millis(total), err)
		removed.Add(millis(kill), killErr)
	}
	if plain.P50 > 0 {
		r.AtMost(rt+": cold create to first exec, against the bare run (p50)", first.P50/plain.P50, coldMarks[rt], "×")
	}
	fmt.Fprintf(os.Stderr, "coldstart: %s done\n", rt)
	return nil
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
