package runtimetest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

// BenchCapture measures what each step of a live fork, a hibernation and a
// wake costs, for a sandbox with a process that holds mib MiB, forked into n
// prepared ones. It reports medians in milliseconds.
func BenchCapture(b *testing.B, f Factory, mib string, n int) {
	e := New(b, f)
	source := e.Create(b, e.SpecAt(b, e.Link(b)))
	p, ok := e.Driver.(sandbox.Preparer)
	if !ok {
		b.Skip("this runtime prepares nothing")
	}
	hold := "(head -c " + mib + "m /dev/urandom; echo >/tmp/up; sleep 99999) | busybox tail -c " + mib + "m & until test -e /tmp/up; do sleep 0.1; done; sleep 1"
	if _, _, err := Exec(b.Context(), source, hold); err != nil {
		b.Fatal(err)
	}
	links := make([]sandbox.Link, n)
	for k := range links {
		links[k] = e.Link(b)
	}
	took := map[string][]time.Duration{}
	var mu sync.Mutex
	lap := func(what string, since *time.Time) {
		now := time.Now()
		mu.Lock()
		took[what] = append(took[what], now.Sub(*since))
		mu.Unlock()
		*since = now
	}
	used := func(i sandbox.Instance) time.Time {
		s, err := i.Stats(b.Context())
		if err != nil {
			return time.Time{}
		}
		return time.Time{}.Add(s.CPUTime)
	}
	cpu := func(what string, i sandbox.Instance, since time.Time) {
		now := used(i)
		mu.Lock()
		took[what] = append(took[what], now.Sub(since))
		mu.Unlock()
	}
	c := agentclient.New(source.Dial, "")
	defer c.Close()
	check := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	for n0 := 0; b.Loop(); n0++ {
		if n0 == 1 {
			clear(took) // the first warms up
		}
		dir := filepath.Join(b.TempDir(), "capture")
		ready, specs := make([]sandbox.Prepared, n), make([]sandbox.Spec, n)
		t := time.Now()
		for k := range ready {
			var err error
			specs[k] = e.SpecAt(b, links[k])
			ready[k], err = p.Prepare(b.Context(), specs[k])
			check(err)
			lap("prepare", &t)
		}
		began := time.Now()
		t = began
		check(c.Freeze(b.Context()))
		lap("freeze", &t)
		u := used(source)
		check(source.(sandbox.Checkpointer).Checkpoint(b.Context(), dir, sandbox.CheckpointOptions{LeaveRunning: true}))
		lap("checkpoint", &t)
		cpu("checkpoint cpu", source, u)
		check(c.Thaw(b.Context()))
		lap("thaw", &t)
		made := make([]sandbox.Instance, n)
		errs := make([]error, n)
		var all sync.WaitGroup
		for k := range ready {
			all.Go(func() {
				t := t
				if made[k], errs[k] = ready[k].Restore(b.Context(), dir, specs[k].Hostname); errs[k] != nil {
					return
				}
				lap("restore", &t)
				cpu("create to restore cpu", made[k], time.Time{})
				c := agentclient.New(made[k].Dial, "")
				defer c.Close()
				if errs[k] = c.Restored(b.Context(), agentclient.RestoredRequest{}); errs[k] != nil {
					return
				}
				lap("restored", &t)
				_, errs[k] = c.Run(b.Context(), agentclient.Command{Path: "/bin/true", User: "root", Cwd: "/"})
				lap("exec", &t)
				cpu("create to exec cpu", made[k], time.Time{})
			})
		}
		all.Wait()
		check(errors.Join(errs...))
		lap("fork", &began)
		t = began
		for k, i := range made {
			if k == 0 {
				ended := filepath.Join(b.TempDir(), "ended")
				ic := agentclient.New(i.Dial, "")
				check(ic.Freeze(b.Context()))
				t = time.Now()
				check(i.(sandbox.Checkpointer).Checkpoint(b.Context(), ended, sandbox.CheckpointOptions{}))
				lap("checkpoint and end", &t)
				ic.Close()
			}
			check(i.Kill(context.Background()))
			lap("kill", &t)
		}
		check(os.RemoveAll(dir))
	}
	for what, d := range took {
		m := median(d) // sorts
		b.ReportMetric(m, strings.ReplaceAll(what, " ", "-")+"-ms")
		b.ReportMetric(float64(d[0].Microseconds())/1000, "least-"+strings.ReplaceAll(what, " ", "-")+"-ms")
	}
	b.ReportMetric(0, "ns/op")
}
