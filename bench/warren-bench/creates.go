package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
)

func creates(ctx context.Context, l *lab, r *report.Report) error {
	for _, rt := range l.runtimes {
		for _, p := range []struct {
			name string
			gap  time.Duration // between starts; 0 is all at once, -1 is one after another
		}{
			{"sequential", -1}, {"staggered, one each 100 ms", 100 * time.Millisecond}, {"burst, all at once", 0},
		} {
			f := r.Figure(rt+": "+p.name, "ms")
			if err := createMany(ctx, l, rt, l.n, p.gap, f); err != nil {
				return err
			}
			r.AtLeast(fmt.Sprintf("%s: %s: creates that succeeded", rt, p.name), 100*float64(f.N-f.Failures)/float64(f.N), 100, "%")
		}
	}
	return nil
}

// createMany creates n sandboxes, runs a command in each, and removes them.
func createMany(ctx context.Context, l *lab, rt string, n int, gap time.Duration, f *report.Figure) error {
	var (
		mu  sync.Mutex
		wg  sync.WaitGroup
		ids []string
	)
	one := func() {
		start := time.Now()
		s, err := l.create(ctx, rt, 256)
		if err == nil {
			err = l.runTrue(ctx, s.ID)
		}
		mu.Lock()
		defer mu.Unlock()
		f.AddMillis(start, err)
		if s.ID != "" {
			ids = append(ids, s.ID)
		}
	}
	for range n {
		if gap < 0 {
			one()
			continue
		}
		wg.Go(one)
		time.Sleep(gap)
	}
	wg.Wait()
	for _, id := range ids {
		if err := l.Kill(context.WithoutCancel(ctx), id); err != nil {
			return err
		}
	}
	return ctx.Err()
}
