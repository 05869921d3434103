package main

import (
	"context"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
)

const execSamples = 1000

func execs(ctx context.Context, l *lab, r *report.Report) error {
	for _, rt := range l.runtimes {
		s, err := l.create(ctx, rt, 512)
		if err != nil {
			return err
		}
		f := r.Figure(rt+": exec /bin/true", "ms")
		for i := range execSamples + 20 {
			start := time.Now()
			err := l.runTrue(ctx, s.ID)
			if i >= 20 { // connections and page cache are warm
				f.AddMillis(start, err)
			}
			if ctx.Err() != nil {
				break
			}
		}
		if err := l.Kill(context.WithoutCancel(ctx), s.ID); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if rt == "container" {
			r.AtMost("container: exec p50", f.P50, 3, "ms")
			r.AtMost("container: exec p99", f.P99, 15, "ms")
		}
	}
	return nil
}
