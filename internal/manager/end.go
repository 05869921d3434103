package manager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointEndRecorded = fault.Register("manager.end.recorded")
	pointEndInstance = fault.Register("manager.end.instance")
	pointEndConsole  = fault.Register("manager.end.console")
	pointEndSlot     = fault.Register("manager.end.slot")
	pointEndDir      = fault.Register("manager.end.dir")
	pointEndDone     = fault.Register("manager.end.done")
)

const (
	// consoleTail is how many bytes of the console an ended sandbox keeps.
	consoleTail = 256 << 10
	// retryEnd is the first wait before an end that failed is tried again; it
	// doubles up to retryEndMost.
	retryEnd     = time.Second
	retryEndMost = time.Minute
)

// requestEnd asks for l's end and returns what will be done: e, or the end
// that was asked for before, which stands.
func (m *Manager) requestEnd(l *live, reason sandbox.Reason, detail string) *ending {
	e := &ending{reason: reason, detail: detail, at: m.now(), tried: make(chan struct{})}
	return m.requestEndIf(l, e, func(store.Record) bool { return true })
}

// requestEndIf does so if cond still holds; nil where it does not.
func (m *Manager) requestEndIf(l *live, e *ending, cond func(store.Record) bool) *ending {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending != nil {
		return l.ending
	}
	if l.rec.State.Ended() || !cond(l.rec) {
		return nil
	}
	l.ending = e
	if l.abort != nil {
		l.abort(errKilled) // whoever makes it undoes it
		return e
	}
	if l.interrupt != nil {
		l.interrupt(errKilled)
	}
	m.tasks.run(func() { m.finish(m.working, l) })
	return e
}

// Kill ends a sandbox and returns when nothing of it is left on the host. It
// is nil for one that has ended already. A create under way is given up. When
// ctx ends first, the end goes on without the caller.
func (m *Manager) Kill(ctx context.Context, tenant string, id sandbox.ID) error {
	l, err := m.of(ctx, tenant, id)
	if errors.Is(err, &sandbox.Error{Code: sandbox.CodeConflict}) {
		return nil
	}
	if err != nil {
		return err
	}
	return m.endAndWait(ctx, l, sandbox.ReasonKilledByUser, "")
}

func (m *Manager) endAndWait(ctx context.Context, l *live, reason sandbox.Reason, detail string) error {
	e := m.requestEnd(l, reason, detail)
	if e == nil {
		return nil
	}
	select {
	case <-l.ended:
		return nil
	case <-e.tried:
		select {
		case <-l.ended:
			return nil
		default:
			return e.err
		}
	case <-ctx.Done():
		return ctxError(ctx, "wait for the sandbox's end")
	}
}

// finish carries l.ending out, trying again until it is done or ctx ends; then
// the next daemon does it.
func (m *Manager) finish(ctx context.Context, l *live) {
	wait := retryEnd
	for {
		err := m.tryEnd(ctx, l)
		if err == nil {
			return
		}
		l.mu.Lock()
		e := l.ending
		l.mu.Unlock()
		select {
		case <-e.tried:
		default:
			e.err = describe(err, fmt.Sprintf("sandbox %s is being ended, but not gone yet; it is tried again", l.id))
			close(e.tried)
		}
		m.log.ErrorContext(ctx, "end a sandbox", "sandbox", l.id, "reason", e.reason, "error", err)
		// The host's time: this wait is not part of any sandbox's life.
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, retryEndMost)
	}
}

// tryEnd does every step of l.ending that is not done yet. Each can be
// repeated.
func (m *Manager) tryEnd(ctx context.Context, l *live) error {
	if err := l.take(ctx); err != nil {
		return err
	}
	defer l.give()
	l.mu.Lock()
	e, inst, rec, conns := l.ending, l.inst, l.rec, l.conns
	if inst == nil {
		inst = l.corpse
	}
	l.mu.Unlock()
	l.cease()
	if rec.Op != store.OpEnd {
		err := m.update(ctx, l, func(r *store.Record) { r.Op, r.EndReason, r.EndDetail = store.OpEnd, e.reason, e.detail })
		// A full disk must not keep a sandbox from being ended: that is what
		// makes room. If the daemon ends before the end is recorded, the next
		// one finds it gone and says that it crashed.
		if err != nil && sandbox.CodeOf(err) != sandbox.CodeDiskFull {
			return err
		}
	}
	pointEndRecorded.Hit()
	l.dropAgent()
	if err := m.endInstance(ctx, rec, inst); err != nil {
		return err
	}
	conns.hangUp()
	pointEndInstance.Hit()
	if tail := console.Tail(m.dir(rec.HostID()), consoleTail); len(tail) > 0 && !rec.Internal {
		if err := m.store.SetConsole(ctx, l.id, tail); err != nil {
			m.log.WarnContext(ctx, "keep the end of a console", "sandbox", l.id, "error", err)
		}
	}
	pointEndConsole.Hit()
	if err := m.disconnect(ctx, l); err != nil {
		return err
	}
	pointEndSlot.Hit()
	for _, id := range []sandbox.ID{rec.HostID(), l.id} {
		if err := m.removeDir(id); err != nil {
			return err
		}
	}
	pointEndDir.Hit()
	final := e.reason.FinalState()
	event := m.stateEvents(rec, rec.State, final)
	for i := range event {
		event[i].Reason, event[i].Detail = e.reason, e.detail
	}
	err := m.update(ctx, l, func(r *store.Record) {
		r.State, r.Reason, r.Detail, r.EndedAt = final, e.reason, e.detail, e.at
		r.Op, r.EndReason, r.EndDetail = store.OpNone, "", ""
		r.Env, r.Token, r.TrafficToken, r.Layers = nil, "", "", nil // secrets have no use any more
		r.Link, r.Instance = sandbox.Link{}, ""
		r.Capture, r.SuspendedAt, r.HibernatedAt = "", time.Time{}, time.Time{}
	}, event...)
	if err != nil {
		return err
	}
	pointEndDone.Hit()
	m.unhold(string(l.id))
	m.leave(l)
	return nil
}

// disconnect gives l's slot back, unless it is another's by now: the record of
// a slot that a daemon gave back right before its end is older than that.
func (m *Manager) disconnect(ctx context.Context, l *live) error {
	rec := l.record()
	link := rec.Link
	if link.NetNS == "" {
		return nil
	}
	spare, taken := m.spares.slots()[link.Slot]
	taken = taken && spare != rec.HostID()
	m.mu.Lock()
	for _, other := range m.live {
		if r := other.record(); other != l && r.State != sandbox.Hibernated && r.Link.NetNS != "" && r.Link.Slot == link.Slot {
			taken = true
		}
	}
	m.mu.Unlock()
	if !taken {
		if err := m.cfg.Network.Release(ctx, link); err != nil {
			return err
		}
	}
	l.mu.Lock()
	l.rec.Link = sandbox.Link{}
	l.mu.Unlock()
	return nil
}

// endInstance removes what the runtime has on the host.
func (m *Manager) endInstance(ctx context.Context, rec store.Record, inst sandbox.Instance) error {
	if inst != nil {
		return inst.Kill(ctx)
	}
	rt := m.runtimes[rec.Runtime]
	if rt == nil {
		return sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q is not in this build: run the Warren that made sandbox %s to end it", rec.Runtime, rec.ID)
	}
	return rt.Clean(ctx, rec.HostID())
}

// dir is the directory of what the host has under id.
func (m *Manager) dir(id sandbox.ID) string { return filepath.Join(m.sandboxes(), string(id)) }

func (m *Manager) sandboxes() string { return filepath.Join(m.cfg.StateDir, "sandboxes") }

// removeDir removes the sandbox's directory. It refuses while anything is
// mounted there: removing would go through the mount.
func (m *Manager) removeDir(id sandbox.ID) error {
	dir := m.dir(id)
	if _, err := os.Lstat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "read the mounts: %w", err)
	}
	if len(mounts) > 0 {
		return sandbox.Errorf(sandbox.CodeInternal, "%s is still mounted", mounts[0].Mountpoint)
	}
	if err := os.RemoveAll(dir); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "remove the sandbox's directory: %w", err)
	}
	return nil
}

// stateEvents is the event of one transition; none for Warren's own.
func (m *Manager) stateEvents(r store.Record, from, to sandbox.State) []sandbox.Event {
	if r.Internal {
		return nil
	}
	return []sandbox.Event{{At: m.now(), Sandbox: r.ID, Tenant: r.Tenant, Type: sandbox.EventState, From: from, To: to}}
}

// oneLine is err's message for a record: one line, not endless.
func oneLine(err error) string {
	s := strings.Join(strings.Fields(strings.ToValidUTF8(err.Error(), "?")), " ")
	if len(s) > 1000 {
		s = strings.ToValidUTF8(s[:1000], "") + "…"
	}
	return s
}

func diskError(what string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.Errorf(sandbox.CodeDiskFull, "%s: no space left on the state directory's filesystem: free some, or remove sandboxes and templates (%w)", what, err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", what, err)
}
