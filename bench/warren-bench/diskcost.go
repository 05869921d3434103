package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/bench/internal/report"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

const (
	diskForks  = 10
	diskMiB    = 500 // written by the source
	changedMiB = 1   // written by each copy, and then overwritten in the source's file
	// What one copy may cost on a filesystem with reflinks: what it changes, and
	// as much for its directories, its console and the filesystem's own notes.
	diskMark = 4
)

// diskCost measures what forks take of the filesystem with the state
// directory: on the host's own, and on an XFS that the daemon makes.
func diskCost(ctx context.Context, l *lab, r *report.Report) error {
	here := "reflinks"
	if host.Reflinks(l.state) != nil {
		here = "no reflinks"
	}
	if err := l.diskCost(ctx, r, "the host's filesystem ("+here+")", here == "reflinks"); err != nil {
		return err
	}
	o := l.options
	o.state += "-xfs"
	o.serve = append(o.serve, "--state-fs", "xfs")
	x, err := newLab(ctx, o)
	if err != nil {
		return err
	}
	defer x.close()
	if err := x.diskCost(ctx, r, "--state-fs xfs", true); err != nil {
		return err
	}
	r.Note("the source wrote a file of %d MiB; each of its %d copies writes %d MiB to a file of its own, and in the end overwrites as much within the large one", diskMiB, diskForks, changedMiB)
	r.Note("the figures are what the filesystem holds more after a sync than before the fork, the one capture included, over the copies")
	r.Note("a write within a file of a lower layer copies the whole of it first: the kernel's overlayfs does that by reflink, gVisor's does not, so that a copy of kind disk costs the file there; one of kind full has it in its own layer already, shared after the fork")
	return nil
}

func (l *lab) diskCost(ctx context.Context, r *report.Report, where string, reflinks bool) error {
	for _, x := range []struct {
		runtime string
		kind    sandbox.SnapshotKind
	}{{"container", sandbox.SnapshotDisk}, {"gvisor", sandbox.SnapshotDisk}, {"gvisor", sandbox.SnapshotFull}} {
		name := fmt.Sprintf("%s, kind %s, on %s", x.runtime, x.kind, where)
		cost := r.Figure(name+": disk of each copy", "MiB")
		within := r.Figure(name+": disk of each copy, once it wrote within the large file", "MiB")
		took := r.Figure(name+": the fork", "ms")
		if err := l.diskCostOf(ctx, x.runtime, x.kind, cost, within, took); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if reflinks {
			r.AtMost(name+": disk of each copy", cost.P50, diskMark, "MiB")
		}
	}
	return nil
}

func (l *lab) diskCostOf(ctx context.Context, runtime string, kind sandbox.SnapshotKind, cost, within, took *report.Figure) (err error) {
	s, err := l.create(ctx, runtime, 512)
	if err != nil {
		return err
	}
	ids := []string{s.ID}
	defer func() {
		for _, id := range ids {
			err = errors.Join(err, l.Kill(context.WithoutCancel(ctx), id))
		}
	}()
	if err := l.sh(ctx, s.ID, fmt.Sprintf("dd if=/dev/urandom of=/root/bulk bs=1M count=%d 2>/dev/null; sync", diskMiB)); err != nil {
		return err
	}
	before, err := l.used()
	if err != nil {
		return err
	}
	start := time.Now()
	all, err := l.Fork(ctx, s.ID, wire.Fork{Count: diskForks, Kind: kind})
	took.AddMillis(start, err)
	if err != nil {
		return err
	}
	for _, f := range all.Forks {
		if f.Error != nil {
			return f.Error.Err()
		}
		ids = append(ids, f.Sandbox.ID)
	}
	for _, x := range []struct {
		to  string
		fig *report.Figure
	}{{"of=/root/own", cost}, {"of=/root/bulk seek=100 conv=notrunc", within}} {
		for _, id := range ids[1:] {
			change := fmt.Sprintf("dd if=/dev/urandom bs=1M count=%d %s 2>/dev/null; sync", changedMiB, x.to)
			if err := l.sh(ctx, id, change); err != nil {
				return err
			}
		}
		after, err := l.settled(ctx)
		if err != nil {
			return err
		}
		x.fig.Add(float64(after-before)/diskForks/(1<<20), nil)
	}
	return nil
}

// settled is used, once what shares blocks by and by has come to its end.
func (l *lab) settled(ctx context.Context) (int64, error) {
	last := int64(-1)
	for {
		now, err := l.used()
		if err != nil || last >= 0 && now >= last {
			return now, err
		}
		last = now
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(4 * time.Second):
		}
	}
}

// used are the bytes that the filesystem of the state directory holds.
func (l *lab) used() (int64, error) {
	unix.Sync()
	d, err := host.ReadDisk(l.state)
	return d.Total - d.Free, err
}
