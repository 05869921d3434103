package manager

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/snapshot"
	"github.com/warrenhq/warren/internal/store"
)

var (
	pointCaptureFrozen   = fault.Register("manager.capture.frozen")
	pointCaptureTaken    = fault.Register("manager.capture.taken")
	pointCaptureWhole    = fault.Register("manager.capture.whole")
	pointCaptureRecorded = fault.Register("manager.capture.recorded")
	pointDiscardUnlisted = fault.Register("manager.discard.unlisted")
)

// maxLayers bounds the layers of one root filesystem. overlayfs takes 500
// lower ones (OVL_MAX_STACK, fs/overlayfs/params.h), of which a runtime needs a
// few for itself.
const maxLayers = 480

// namePattern is what a snapshot may be called.
var namePattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}$`)

// Snapshot captures a sandbox that runs, is suspended or, of kind full, is
// hibernated; it goes on as it was.
//
// Errors: CodeInvalid, CodeConflict (its state), CodeExists (the name),
// CodeUnsupported (its runtime cannot make the kind), CodeTooLarge (it has as
// many layers as there can be), CodeDiskFull.
func (m *Manager) Snapshot(ctx context.Context, tenant string, id sandbox.ID, r SnapshotRequest) (sandbox.Snapshot, error) {
	if err := validateSnapshot(r); err != nil {
		return sandbox.Snapshot{}, err
	}
	if err := m.ready(); err != nil {
		return sandbox.Snapshot{}, err
	}
	if r.Name != "" {
		// The record has the last word; this spares the capture.
		if _, err := m.store.SnapshotNamed(ctx, tenant, r.Name); err == nil {
			return sandbox.Snapshot{}, sandbox.Errorf(sandbox.CodeExists, "there is a snapshot %q already: remove it, or choose another name", r.Name)
		} else if sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return sandbox.Snapshot{}, err
		}
	}
	ctx, stop := m.bound(ctx)
	defer stop()
	l, done, err := m.change(ctx, tenant, id)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	defer done()
	kind, err := m.kindFor(ctx, l, r.Kind)
	if err != nil {
		return sandbox.Snapshot{}, err
	}
	n := m.newSnapshot(l.record(), kind)
	n.Name, n.Metadata = r.Name, r.Metadata
	if l.record().State == sandbox.Hibernated {
		n, err = m.copyCapture(ctx, l, n)
	} else {
		var goneOn func()
		n, goneOn, err = m.captureAndGoOn(ctx, l, n)
		goneOn()
	}
	return n.Snapshot, err
}

func validateSnapshot(r SnapshotRequest) error {
	if err := validateKind(r.Kind); err != nil {
		return err
	}
	if r.Name != "" && (!namePattern.MatchString(r.Name) || sandbox.IsSnapshotID(r.Name)) {
		return invalid("%q is no name for a snapshot: give up to 128 letters, digits, and . _ - between, and nothing of the form of an id", short(r.Name))
	}
	return validateMetadata(r.Metadata)
}

func validateKind(k sandbox.SnapshotKind) error {
	switch k {
	case "", sandbox.SnapshotDisk, sandbox.SnapshotFull:
		return nil
	}
	return invalid("%q is not a kind of snapshot: give %q or %q", short(string(k)), sandbox.SnapshotFull, sandbox.SnapshotDisk)
}

// kindFor tells of which kind a capture of l will be, or why there can be
// none. The caller has the turn.
func (m *Manager) kindFor(ctx context.Context, l *live, asked sandbox.SnapshotKind) (sandbox.SnapshotKind, error) {
	rec := l.record()
	if err := l.notEnding(); err != nil {
		return "", err
	}
	_, full := m.runtimes[rec.Runtime].(sandbox.Restorer)
	switch rec.State {
	case sandbox.Hibernated:
		n, err := m.store.GetSnapshot(ctx, rec.Capture)
		if err != nil {
			return "", err
		}
		if asked != "" && asked != n.Kind {
			return "", sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is hibernated, and what it keeps is of kind %s: ask for that, or wake it", rec.ID, n.Kind).
				With("state", string(rec.State))
		}
		return n.Kind, nil
	case sandbox.Running, sandbox.Suspended:
	default:
		return "", l.mustRun()
	}
	inst := l.instance()
	_, can := inst.(sandbox.Checkpointer)
	full = full && can
	_, disk := inst.(sandbox.DiskCapturer)
	if asked == "" && full {
		asked = sandbox.SnapshotFull
	} else if asked == "" {
		asked = sandbox.SnapshotDisk
	}
	switch {
	case asked == sandbox.SnapshotFull && !full:
		return "", cannot(rec.Runtime, "capture memory", "ask for kind disk, or use gvisor")
	case asked == sandbox.SnapshotDisk && !disk:
		return "", cannot(rec.Runtime, "capture disks", "ask for kind full")
	case asked == sandbox.SnapshotDisk && len(rec.Layers) >= maxLayers:
		return "", sandbox.Errorf(sandbox.CodeTooLarge, "sandbox %s stands on %d layers, the most there can be: build a template of what it has, and go on from that", rec.ID, len(rec.Layers))
	}
	return asked, nil
}

// newSnapshot is the record of a capture of rec that is about to be made.
func (m *Manager) newSnapshot(rec store.Record, kind sandbox.SnapshotKind) store.Snapshot {
	n := store.Snapshot{
		Snapshot: sandbox.Snapshot{
			ID: sandbox.NewSnapshotID(), Tenant: rec.Tenant, Kind: kind, Source: rec.ID, Parent: rec.Snapshot,
			Runtime: rec.Runtime, Template: rec.Template, TemplateID: rec.TemplateID, Resources: rec.Resources,
			Network: rec.Network, User: rec.User, Workdir: rec.Workdir, Volumes: rec.Volumes, CreatedAt: m.now(),
		},
		Layers: slices.Clone(rec.Layers),
	}
	if kind == sandbox.SnapshotFull {
		n.Token, n.EphemeralEnv = rec.Token, rec.EphemeralEnv
		n.Env = inherited(rec)
		n.RuntimeVersion = m.runtimes[rec.Runtime].(sandbox.Restorer).CaptureVersion()
	} else {
		n.Layers = append([]string{m.snaps.Path(n.ID)}, n.Layers...)
	}
	return n
}

// inherited is the environment that rec's children get of it.
func inherited(rec store.Record) map[string]string {
	env := maps.Clone(rec.Env)
	for _, k := range rec.EphemeralEnv {
		delete(env, k)
	}
	return env
}

// captureAndGoOn makes the capture n of l, which then goes on, by when goneOn
// returns, whatever became
// of it. The caller has the turn.
func (m *Manager) captureAndGoOn(ctx context.Context, l *live, n store.Snapshot) (_ store.Snapshot, goneOn func(), _ error) {
	suspended := l.record().State == sandbox.Suspended
	thaw := func() {}
	if !suspended { // its commands are stopped already
		var err error
		if thaw, err = m.freeze(ctx, l); err != nil {
			return n, func() {}, err
		}
	}
	gone := make(chan struct{})
	n, err := m.capture(ctx, l, n, func() {
		go func() { // what follows need not wait for it
			defer close(gone)
			thaw()
		}()
	})
	return n, func() { <-gone }, err
}

// capture writes and records the capture n of l, whose commands are stopped.
// taken, which may be nil, is called as soon as l may go on, also on error.
// The caller has the turn, and sees to a holder of a hidden capture.
func (m *Manager) capture(ctx context.Context, l *live, n store.Snapshot, taken func()) (store.Snapshot, error) {
	pointCaptureFrozen.Hit()
	d, err := m.snaps.Begin(n.ID)
	if err == nil {
		err = m.write(ctx, l, n, d.Data)
	}
	pointCaptureTaken.Hit()
	if taken != nil {
		taken()
	}
	if d == nil {
		return n, err
	}
	if err == nil {
		var man snapshot.Manifest
		man, err = d.Commit(ctx, snapshot.Manifest{
			Kind: n.Kind, Runtime: n.Runtime, RuntimeVersion: n.RuntimeVersion, CreatedAt: n.CreatedAt,
		}, n.Transient)
		n.SizeBytes = man.Size()
	}
	if err != nil {
		return n, errors.Join(orCtx(ctx, "capture the sandbox", err), d.Abort())
	}
	pointCaptureWhole.Hit()
	return n, m.recordSnapshot(ctx, n)
}

// write has the runtime write the capture n of l into dir.
func (m *Manager) write(ctx context.Context, l *live, n store.Snapshot, dir string) error {
	inst := l.instance()
	c, memory := inst.(sandbox.Checkpointer)
	if memory && l.record().State == sandbox.Suspended {
		// Its commands are stopped by the agent, too: none runs meanwhile.
		s := inst.(sandbox.Suspender)
		if err := s.Unsuspend(ctx); err != nil {
			return err
		}
		defer func() {
			if err := s.Suspend(context.WithoutCancel(ctx)); err != nil {
				m.log.ErrorContext(ctx, "suspend a sandbox again after its capture", "sandbox", l.id, "error", err)
			}
		}()
	}
	if n.Kind == sandbox.SnapshotDisk {
		return inst.(sandbox.DiskCapturer).CaptureDisk(ctx, dir)
	}
	// The source goes on even where it is not to: until the capture is whole
	// and on record it is all that there is of the sandbox.
	if err := c.Checkpoint(ctx, dir, sandbox.CheckpointOptions{LeaveRunning: true, Durable: !n.Transient}); err != nil {
		return err
	}
	return m.outlived(ctx, l)
}

// outlived tells whether l lived through its capture. One whose gofer or agent
// had just died is captured as it is, and nothing could wake from that.
func (m *Manager) outlived(ctx context.Context, l *live) error {
	l.mu.Lock()
	inst, agent := l.inst, l.agent
	l.mu.Unlock()
	if agent == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	ctx, stop := whileRuns(ctx, inst)
	defer stop()
	return orNil(ctx, "look whether the sandbox lived through its capture", agent.WaitReady(ctx))
}

// recordSnapshot records a whole capture, with holds on what it stands on; or
// removes it.
func (m *Manager) recordSnapshot(ctx context.Context, n store.Snapshot) error {
	err := m.holdSnapshot(ctx, n)
	if err == nil {
		err = m.store.InsertSnapshot(ctx, n)
	}
	if err != nil {
		m.unhold(n.ID)
		return errors.Join(err, m.snaps.Remove(n.ID))
	}
	pointCaptureRecorded.Hit()
	return nil
}

// holdSnapshot keeps what a snapshot stands on.
func (m *Manager) holdSnapshot(ctx context.Context, n store.Snapshot) error {
	if n.TemplateID != "" {
		if err := m.cfg.Templates.Hold(ctx, n.TemplateID, n.ID); err != nil {
			return err
		}
	}
	return m.holdLayers(n.ID, n.Layers)
}

// holdLayers keeps the captures that layers are of for holder.
func (m *Manager) holdLayers(holder string, layers []string) error {
	for _, layer := range layers {
		if id := m.snaps.Owner(layer); id != "" && id != holder {
			if err := m.snaps.Hold(id, holder); err != nil {
				return err
			}
		}
	}
	return nil
}

// holdSandbox keeps all that a sandbox stands on.
func (m *Manager) holdSandbox(ctx context.Context, rec store.Record) error {
	holder := string(rec.ID)
	if rec.TemplateID != "" {
		if err := m.cfg.Templates.Hold(ctx, rec.TemplateID, holder); err != nil {
			return err
		}
	}
	for _, id := range []string{rec.Snapshot, rec.Capture} {
		if id == "" {
			continue
		}
		err := m.snaps.Hold(id, holder)
		if sandbox.CodeOf(err) == sandbox.CodeNotFound && id == rec.Snapshot && rec.State != sandbox.Creating && rec.Start == sandbox.StartRestore {
			continue // it has all of it in memory: see loaded
		}
		if err != nil {
			return err
		}
	}
	return m.holdLayers(holder, rec.Layers)
}

// unhold drops all holds of a sandbox or a snapshot, and with them the hidden
// captures that nobody needs any more.
func (m *Manager) unhold(holder string) {
	ctx := context.WithoutCancel(m.working)
	if err := m.cfg.Templates.Drop(ctx, holder); err != nil {
		m.log.Warn("give a template's layers back", "holder", holder, "error", err)
	}
	m.discard(ctx, m.snaps.Drop(holder))
}

// loaded ends l's hold of a capture once all of it is in l's memory.
func (m *Manager) loaded(l *live, inst sandbox.Instance, capture string) {
	release := func() { m.discard(context.WithoutCancel(m.working), m.snaps.Release(capture, string(l.id))) }
	i, ok := inst.(sandbox.Loading)
	if !ok {
		release()
		return
	}
	m.tasks.run(func() {
		err := i.Loaded(l.ctx)
		if err == nil {
			release()
		} else if l.ctx.Err() == nil { // it goes with the sandbox
			m.log.Error("read what a sandbox goes on from", "sandbox", l.id, "capture", capture, "error", err)
		}
	})
}

// discard removes those of free that are hidden and that nobody holds. Others
// stay until a user removes them.
func (m *Manager) discard(ctx context.Context, free []string) {
	for _, id := range free {
		n, err := m.store.GetSnapshot(ctx, id)
		if err == nil && n.Hidden {
			if users := m.snaps.Retire(id); len(users) > 0 {
				continue
			}
			err = m.removeRetired(ctx, n)
		}
		if err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			m.log.Warn("remove a capture that nobody needs; the next daemon does", "capture", id, "error", err)
		}
	}
}

// removeRetired removes a snapshot that cannot be held any more.
func (m *Manager) removeRetired(ctx context.Context, n store.Snapshot) error {
	if err := m.store.DeleteSnapshot(ctx, n.ID); err != nil {
		m.snaps.Restore(n.ID)
		return err
	}
	pointDiscardUnlisted.Hit()
	err := m.snaps.Remove(n.ID)
	m.unhold(n.ID)
	return err
}

// copyCapture makes n of the capture that the hibernated l wakes from.
func (m *Manager) copyCapture(ctx context.Context, l *live, n store.Snapshot) (store.Snapshot, error) {
	from, err := m.store.GetSnapshot(ctx, l.record().Capture)
	if err != nil {
		return n, err
	}
	copy := m.snaps.Copy
	if from.Kind == sandbox.SnapshotDisk {
		copy = m.snaps.Above // the sandbox's layers have it: see newSnapshot
	}
	man, err := copy(ctx, from.ID, n.ID)
	if err != nil {
		return n, err
	}
	n.RuntimeVersion, n.SizeBytes = from.RuntimeVersion, man.Size()
	return n, m.recordSnapshot(ctx, n)
}

// Snapshots gives a page of a tenant's snapshots, the newest first, and the
// token of the next page, "" after the last.
func (m *Manager) Snapshots(ctx context.Context, tenant string, f SnapshotFilter) (page []sandbox.Snapshot, next string, err error) {
	if f.Limit < 0 || f.Limit > maxPage {
		return nil, "", invalid("a page of %d: give 1 to %d, or 0 for %d", f.Limit, maxPage, defaultPage)
	}
	if f.Limit == 0 {
		f.Limit = defaultPage
	}
	all, next, err := m.store.ListSnapshots(ctx, store.SnapshotFilter{
		Tenant: tenant, Source: f.Source, Name: f.Name, Limit: f.Limit, Token: f.Token,
	})
	if err != nil {
		return nil, "", err
	}
	page = make([]sandbox.Snapshot, len(all))
	for i, n := range all {
		page[i] = n.Snapshot
	}
	return page, next, nil
}

// SnapshotByName gives a tenant's snapshot by name or ID, a hidden one by its
// ID alone. CodeNotFound: the tenant has no such one.
func (m *Manager) SnapshotByName(ctx context.Context, tenant, nameOrID string) (sandbox.Snapshot, error) {
	if sandbox.IsSnapshotID(nameOrID) {
		if n, err := m.store.GetSnapshot(ctx, nameOrID); err == nil && n.Hidden && n.Tenant == tenant {
			return n.Snapshot, nil
		}
	}
	n, err := m.snapshotOf(ctx, tenant, nameOrID)
	return n.Snapshot, err
}

// snapshotOf gives a snapshot that the tenant may use and remove.
func (m *Manager) snapshotOf(ctx context.Context, tenant, nameOrID string) (store.Snapshot, error) {
	missing := sandbox.Errorf(sandbox.CodeNotFound, "no snapshot %q: `warren snapshot ls` shows what there is", short(nameOrID))
	if !sandbox.IsSnapshotID(nameOrID) {
		if nameOrID == "" {
			return store.Snapshot{}, missing
		}
		return m.store.SnapshotNamed(ctx, tenant, nameOrID)
	}
	n, err := m.store.GetSnapshot(ctx, nameOrID)
	if err == nil && (n.Tenant != tenant || n.Hidden) {
		return store.Snapshot{}, missing
	}
	return n, err
}

// RemoveSnapshot removes a tenant's snapshot. CodeConflict: a sandbox or
// another snapshot that was made from it still needs it.
func (m *Manager) RemoveSnapshot(ctx context.Context, tenant, nameOrID string) error {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return err
	}
	n, err := m.snapshotOf(ctx, tenant, nameOrID)
	if err != nil {
		return err
	}
	if users := m.snaps.Retire(n.ID); len(users) > 0 {
		return sandbox.Errorf(sandbox.CodeConflict, "snapshot %q is needed by %d others that came of it (%s): end or remove them first", nameOrID, len(users), users[0]).
			With("user", users[0])
	}
	return m.removeRetired(context.WithoutCancel(ctx), n)
}

// usable tells whether sandboxes can be made from n now: its files are what was
// written, and this build reads them.
func (m *Manager) usable(ctx context.Context, n store.Snapshot) error {
	if n.Kind == sandbox.SnapshotFull {
		r, ok := m.runtimes[n.Runtime].(sandbox.Restorer)
		if !ok {
			return cannot(n.Runtime, "restore memory", "run the Warren that took the capture")
		}
		if v := r.CaptureVersion(); v != n.RuntimeVersion {
			return sandbox.Errorf(sandbox.CodeUnsupported, "the capture %s was taken by %s %q, and this host runs %q, which cannot read it: run the version that took it, or take it anew from a sandbox that runs",
				n.ID, n.Runtime, n.RuntimeVersion, v).With("capture_version", n.RuntimeVersion).With("version", v)
		}
	}
	return m.snaps.Check(ctx, n.ID)
}
