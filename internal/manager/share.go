package manager

import (
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

// shareAfter leaves a fork's copies the time to do what they were made for.
const shareAfter = time.Second

// sharing lets one fork of the process at a time read its disks through.
var sharing = make(chan struct{}, 1)

// shareDisks has the copies of a full capture keep equal blocks of their disks
// once, in the background: with their source where it runs, else with the first
// of them.
func (m *Manager) shareDisks(source sandbox.ID, n store.Snapshot, results []ForkResult) {
	if n.Kind != sandbox.SnapshotFull {
		return
	}
	ids := []sandbox.ID{source}
	for _, r := range results {
		if r.Err == nil {
			ids = append(ids, r.Sandbox.ID)
		}
	}
	dir := m.snaps.Path(n.ID)
	m.tasks.run(func() {
		ctx := m.watching
		select {
		case <-time.After(shareAfter):
		case <-ctx.Done():
			return
		}
		select {
		case sharing <- struct{}{}:
			defer func() { <-sharing }()
		case <-ctx.Done():
			return
		}
		var first sandbox.DiskSharer
		for _, id := range ids {
			s, ok := m.sharer(id)
			if !ok {
				continue
			}
			var err error
			if first == nil {
				first = s
				err = s.ShareCapture(ctx, dir)
			} else {
				err = s.ShareDisk(ctx, first.(sandbox.Instance))
			}
			if err != nil && ctx.Err() == nil {
				// It has ended, mostly; what it has is then gone anyway.
				m.log.DebugContext(ctx, "share a fork's disk", "sandbox", id, "error", err)
			}
		}
	})
}

// sharer gives what can share the disk of a live sandbox.
func (m *Manager) sharer(id sandbox.ID) (sandbox.DiskSharer, bool) {
	l := m.find(id)
	if l == nil {
		return nil, false
	}
	inst := l.instance()
	if inst == nil {
		return nil, false
	}
	s, ok := inst.(sandbox.DiskSharer)
	return s, ok
}
