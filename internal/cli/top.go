package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// usage is one line of top.
type usage struct {
	ID          string  `json:"id"`
	Runtime     string  `json:"runtime"`
	Template    string  `json:"template"`
	CPUPercent  float64 `json:"cpu_percent"` // of one CPU
	WorkingSet  int64   `json:"working_set_bytes"`
	MemoryLimit int64   `json:"memory_limit_bytes"`
	PIDs        int     `json:"pids"`
	OOMKills    int64   `json:"oom_kills"`
}

func (a *app) topCmd() *cobra.Command {
	var every time.Duration
	var once bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what live sandboxes use of the host",
		Args:  cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			if every < 100*time.Millisecond {
				return usagef("--interval is %s: give 100ms or more", every)
			}
			t := topper{c: c, before: map[string]wire.Stats{}}
			if _, err := t.sample(ctx); err != nil {
				return err
			}
			live := tty(a.out) && !a.json && !once
			for wait := min(every, time.Second); ; wait = every {
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(wait):
				}
				rows, err := t.sample(ctx)
				if err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
				if a.json {
					return a.printJSON(rows)
				}
				cap, err := c.Capacity(ctx)
				if err != nil {
					return err
				}
				var page bytes.Buffer
				if live {
					page.WriteString("\x1b[H\x1b[2J") // home and clear: one write, so that it does not flicker
				}
				a.topPage(&page, rows, cap)
				if _, err := a.out.Write(page.Bytes()); err != nil || !live {
					return err
				}
			}
		}),
	}
	cmd.Flags().DurationVar(&every, "interval", 2*time.Second, "time between two looks")
	cmd.Flags().BoolVar(&once, "once", false, "print one table and end")
	return cmd
}

func (a *app) topPage(w io.Writer, rows []usage, cap wire.Capacity) {
	fmt.Fprintf(w, "%d sandboxes; memory promised %s of %s, host has %s left; slots %d of %d; disk free %s\n\n",
		cap.Sandboxes, size(cap.MemoryPromised), size(cap.MemoryBudget), size(cap.MemoryAvailable), cap.SlotsUsed, cap.Slots, size(cap.DiskFree))
	lines := make([][]string, 0, len(rows))
	for _, r := range rows {
		percent := 0.0
		if r.MemoryLimit > 0 {
			percent = 100 * float64(r.WorkingSet) / float64(r.MemoryLimit)
		}
		lines = append(lines, []string{
			r.ID, r.Runtime, r.Template, fmt.Sprintf("%.1f%%", r.CPUPercent),
			size(r.WorkingSet), size(r.MemoryLimit), fmt.Sprintf("%.1f%%", percent), fmt.Sprint(r.PIDs), fmt.Sprint(r.OOMKills),
		})
	}
	a.table(w, []string{"ID", "RUNTIME", "TEMPLATE", "CPU", "MEMORY", "LIMIT", "MEM%", "PIDS", "OOM"}, lines)
}

// topper keeps the look before, to tell CPU use by the difference.
type topper struct {
	c      *client.Client
	before map[string]wire.Stats
}

// statsAtOnce bounds the requests at one time.
const statsAtOnce = 8

func (t *topper) sample(ctx context.Context) ([]usage, error) {
	var boxes []wire.Sandbox
	for sb, err := range t.c.Sandboxes(ctx, client.Filter{States: []sandbox.State{sandbox.Running, sandbox.Suspended}}) {
		if err != nil {
			return nil, err
		}
		boxes = append(boxes, sb)
	}
	stats := make([]*wire.Stats, len(boxes))
	var wg sync.WaitGroup
	turns := make(chan struct{}, statsAtOnce)
	for i, sb := range boxes {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			if st, err := t.c.Stats(ctx, sb.ID); err == nil { // one that ended meanwhile is left out
				stats[i] = &st
			}
		})
	}
	wg.Wait()
	rows := []usage{}
	now := map[string]wire.Stats{}
	for i, sb := range boxes {
		st := stats[i]
		if st == nil {
			continue
		}
		now[sb.ID] = *st
		u := usage{ID: sb.ID, Runtime: sb.Runtime, Template: sb.Template, WorkingSet: st.WorkingSet, MemoryLimit: st.MemoryLimit, PIDs: st.PIDs, OOMKills: st.OOMKills}
		if b, ok := t.before[sb.ID]; ok {
			if took := st.At.Sub(b.At).Seconds(); took > 0 {
				u.CPUPercent = max(0, 100*(st.CPUSeconds-b.CPUSeconds)/took)
			}
		}
		rows = append(rows, u)
	}
	t.before = now
	slices.SortStableFunc(rows, func(x, y usage) int {
		switch {
		case x.CPUPercent != y.CPUPercent:
			if x.CPUPercent > y.CPUPercent {
				return -1
			}
			return 1
		case x.WorkingSet > y.WorkingSet:
			return -1
		case x.WorkingSet < y.WorkingSet:
			return 1
		}
		return 0
	})
	return rows, ctx.Err()
}
