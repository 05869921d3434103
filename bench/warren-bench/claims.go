package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/warrenhq/warren/bench/internal/report"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

const (
	claimsAtOnce = 30
	claimP50     = 10.0 // ms
	claimP99     = 50.0
)

// claims measures creates that a pool serves, to the first exec answered, one
// after the other and many at once, beside a bare run of the same bundle and,
// with the pool empty, a restore from its warm capture.
func claims(ctx context.Context, l *lab, r *report.Report) error {
	for _, rt := range l.runtimes {
		bare, err := newBare(ctx, l, rt, "")
		if err != nil {
			return fmt.Errorf("bare %s: %w", rt, err)
		}
		err = claimsOf(ctx, l, r, rt, bare)
		if err := errors.Join(err, bare.close()); err != nil {
			return err
		}
		fmt.Fprintf(os.Stderr, "claims: %s done\n", rt)
	}
	r.Note("a claim is POST /v1/sandboxes with an environment variable, and POST …/exec of /bin/true, over the daemon's unix socket; the pool is whole and at rest before each, and each is ended, untimed, before the next")
	r.Note("the bare run is of the bundle that the driver writes, with /bin/true as its program")
	r.Note("the samples of a claim with another network take what an ordinary one does, and one nftables transaction")
	return nil
}

func claimsOf(ctx context.Context, l *lab, r *report.Report, rt string, bare *bare) (err error) {
	const ready = 5
	defer func() {
		if e := l.RemovePool(context.WithoutCancel(ctx), l.template); e != nil && sandbox.CodeOf(e) != sandbox.CodeNotFound {
			err = errors.Join(err, e)
		}
	}()
	if err := l.fill(ctx, rt, ready); err != nil {
		return err
	}
	plain := r.Figure(rt+": bare "+bare.tool+" run /bin/true", "ms")
	claim := r.Figure(rt+": claim", "ms")
	first := r.Figure(rt+": claim to first exec answered", "ms")
	other := r.Figure(rt+": claim with --net none to first exec answered", "ms")
	for i := range l.n + 2 {
		start := time.Now()
		bareErr := bare.run(ctx)
		bareTime := time.Since(start)
		created, answered, claimErr := l.claim(ctx, rt, sandbox.NetworkEgress, sandbox.StartPool)
		if err := l.fill(ctx, rt, ready); err != nil {
			return err
		}
		_, none, noneErr := l.claim(ctx, rt, sandbox.NetworkNone, sandbox.StartPool)
		if err := l.fill(ctx, rt, ready); err != nil {
			return err
		}
		if i < 2 {
			continue // the page cache, the slot pool
		}
		plain.Add(millis(bareTime), bareErr)
		claim.Add(millis(created), claimErr)
		first.Add(millis(answered), claimErr)
		other.Add(millis(none), noneErr)
	}
	r.AtMost(rt+": claim to first exec (p50)", first.P50, claimP50, "ms")
	r.AtMost(rt+": claim to first exec (p99)", first.P99, claimP99, "ms")
	if plain.P50 > 0 {
		r.AtMost(rt+": claim to first exec, against the bare run (p50)", first.P50/plain.P50, 1, "×")
	}
	if err := claimsTogether(ctx, l, r, rt); err != nil {
		return err
	}
	return restores(ctx, l, r, rt)
}

// claimsTogether makes as many claims at once as the pool has members.
func claimsTogether(ctx context.Context, l *lab, r *report.Report, rt string) error {
	if err := l.fill(ctx, rt, claimsAtOnce); err != nil {
		return err
	}
	each := r.Figure(fmt.Sprintf("%s: one of %d claims at once, to first exec answered", rt, claimsAtOnce), "ms")
	whole := r.Figure(fmt.Sprintf("%s: %d claims at once, to the last exec answered", rt, claimsAtOnce), "ms")
	var all sync.WaitGroup
	took, errs := make([]time.Duration, claimsAtOnce), make([]error, claimsAtOnce)
	start := time.Now()
	ids := make([]string, claimsAtOnce)
	for i := range claimsAtOnce {
		all.Go(func() {
			begin := time.Now()
			ids[i], _, errs[i] = l.claimOne(ctx, rt, sandbox.NetworkEgress, sandbox.StartPool)
			took[i] = time.Since(begin)
		})
	}
	all.Wait()
	whole.AddMillis(start, errors.Join(errs...))
	for i := range took {
		each.Add(millis(took[i]), errs[i])
		if ids[i] != "" {
			if err := l.Kill(ctx, ids[i]); err != nil {
				return err
			}
		}
	}
	r.AtMost(fmt.Sprintf("%s: failures of %d claims at once", rt, claimsAtOnce), float64(each.Failures), 0, "")
	return ctx.Err()
}

// restores makes creates that find the pool empty: more at once, one after the
// other, than it has members and than are made meanwhile.
func restores(ctx context.Context, l *lab, r *report.Report, rt string) error {
	p, err := l.SetPool(ctx, wire.SetPool{Template: l.template, Runtime: rt, Ready: 1})
	if err != nil || p.Capture == nil {
		return err
	}
	f := r.Figure(rt+": restore from the warm capture to first exec answered", "ms")
	// A create right after another finds no member: none is made before it is calm.
	for range l.n {
		if err := l.fill(ctx, rt, 1); err != nil {
			return err
		}
		id, _, err := l.claimOne(ctx, rt, sandbox.NetworkEgress, sandbox.StartPool)
		if err != nil {
			return err
		}
		_, answered, err := l.claim(ctx, rt, sandbox.NetworkEgress, sandbox.StartRestore)
		f.Add(millis(answered), err)
		if err := l.Kill(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

// fill waits until the pool of the template has ready members, and a moment
// more.
func (l *lab) fill(ctx context.Context, rt string, ready int) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	p, err := l.SetPool(ctx, wire.SetPool{Template: l.template, Runtime: rt, Ready: ready})
	for err == nil && (p.Available != ready || p.Making+p.Ending > 0) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the pool of %d has %d members; its last error is %v: %w", ready, p.Available, p.Error, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
		p, err = l.Pool(ctx, p.ID)
	}
	time.Sleep(100 * time.Millisecond)
	return err
}

// claim makes a sandbox, which is to start in one way, runs a command in it,
// and ends it.
func (l *lab) claim(ctx context.Context, rt string, net sandbox.NetworkMode, how sandbox.StartKind) (created, answered time.Duration, err error) {
	start := time.Now()
	id, created, err := l.claimOne(ctx, rt, net, how)
	answered = time.Since(start)
	if id != "" {
		err = errors.Join(err, l.Kill(context.WithoutCancel(ctx), id))
	}
	return created, answered, err
}

func (l *lab) claimOne(ctx context.Context, rt string, net sandbox.NetworkMode, how sandbox.StartKind) (id string, created time.Duration, err error) {
	start := time.Now()
	s, err := l.CreateSandbox(ctx, wire.CreateSandbox{
		Template: l.template, Runtime: rt, Network: wire.Network{Mode: net}, Env: map[string]string{"CLAIM": "yes"},
	})
	created = time.Since(start)
	if err != nil {
		return "", created, err
	}
	if s.Start != string(how) {
		return s.ID, created, fmt.Errorf("it started by %s, not %s", s.Start, how)
	}
	return s.ID, created, l.runTrue(ctx, s.ID)
}
