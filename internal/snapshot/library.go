package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	pointBegun    = fault.Register("snapshot.begun")
	pointManifest = fault.Register("snapshot.manifest")
	pointRenamed  = fault.Register("snapshot.renamed")
	pointDetached = fault.Register("snapshot.detached")
)

const (
	dataName     = "data"
	manifestName = "manifest.json"
	tmpName      = "tmp"
)

// Library is all captures of one daemon. It is safe for concurrent use. The
// caller has the state directory to itself.
type Library struct {
	dir string

	mu      sync.Mutex
	whole   map[string]bool                // captures that can be held
	users   map[string]map[string]struct{} // capture → holders
	uses    map[string]map[string]struct{} // holder → captures
	checked map[string][]entry             // as Check found them good
}

// Open opens the library in dir, and makes it where there is none. What was
// being made or removed when the last daemon ended is gone then.
func Open(dir string) (*Library, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "snapshot directory %q: %w", dir, err)
	}
	l := &Library{
		dir: abs, whole: map[string]bool{}, users: map[string]map[string]struct{}{},
		uses: map[string]map[string]struct{}{}, checked: map[string][]entry{},
	}
	if err := os.MkdirAll(l.path(tmpName), 0o700); err != nil {
		return nil, diskError("make the snapshot directory", err)
	}
	// Layers hold setuid files, and memory images secrets: nobody but root may
	// come near them, whatever made the directory.
	if err := os.Chmod(abs, 0o700); err != nil {
		return nil, diskError("close the snapshot directory to others", err)
	}
	half, err := os.ReadDir(l.path(tmpName))
	if err != nil {
		return nil, diskError("sweep the snapshot directory", err)
	}
	for _, e := range half {
		if err := os.RemoveAll(l.path(tmpName, e.Name())); err != nil {
			return nil, diskError("sweep the snapshot directory", err)
		}
	}
	all, err := os.ReadDir(abs)
	if err != nil {
		return nil, diskError("read the snapshot directory", err)
	}
	for _, e := range all {
		if sandbox.IsSnapshotID(e.Name()) && e.IsDir() {
			l.whole[e.Name()] = true
		}
	}
	return l, nil
}

func (l *Library) path(parts ...string) string {
	return filepath.Join(append([]string{l.dir}, parts...)...)
}

// Path is where a capture's data is: what the runtime wrote.
func (l *Library) Path(id string) string { return l.path(id, dataName) }

// Owner gives the capture whose data path is; "" where it is none's.
func (l *Library) Owner(path string) string {
	rel, ok := strings.CutPrefix(path, l.dir+"/")
	if !ok {
		return ""
	}
	id, rest, _ := strings.Cut(rel, "/")
	if rest != dataName || !sandbox.IsSnapshotID(id) {
		return ""
	}
	return id
}

// Sweep removes every capture that keep does not want: what a daemon wrote
// and did not come to record.
func (l *Library) Sweep(keep func(id string) bool) error {
	l.mu.Lock()
	var gone []string
	for id := range l.whole {
		if !keep(id) {
			gone = append(gone, id)
		}
	}
	l.mu.Unlock()
	var errs []error
	for _, id := range gone {
		errs = append(errs, l.Remove(id))
	}
	return errors.Join(errs...)
}

// Draft is a capture being written.
type Draft struct {
	l    *Library
	id   string
	Data string // where the runtime writes; it does not exist yet
}

// Begin starts a capture. Each is ended by Commit or Abort.
func (l *Library) Begin(id string) (*Draft, error) {
	if !sandbox.IsSnapshotID(id) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%.40q is not a snapshot's id", id)
	}
	if err := os.Mkdir(l.path(tmpName, id), 0o700); err != nil {
		return nil, diskError("begin a capture", err)
	}
	pointBegun.Hit()
	return &Draft{l: l, id: id, Data: l.path(tmpName, id, dataName)}, nil
}

// Abort removes what was written. It is of no effect after a Commit that
// worked.
func (d *Draft) Abort() error {
	return diskError("remove a capture that failed", os.RemoveAll(d.l.path(tmpName, d.id)))
}

// Commit makes the capture whole and visible; m says what it is, less its
// files. A transient one has no checksums and need not survive the host: its
// users do not either. It gives the manifest with the files.
func (d *Draft) Commit(ctx context.Context, m Manifest, transient bool) (Manifest, error) {
	m.Version, m.ID, m.Summed = manifestVersion, d.id, !transient
	entries, err := scan(ctx, d.Data)
	if err != nil {
		return m, diskError("read the capture back", err)
	}
	durable := make(chan error, 1)
	if transient {
		durable <- nil
	} else {
		// The disk is at work while the processor is.
		files := slices.Clone(entries)
		go func() { durable <- syncData(d.Data, files) }()
		if err := sum(ctx, d.Data, entries, nil); err != nil {
			return m, errors.Join(diskError("checksum the capture", err), <-durable)
		}
	}
	m.Files = make([]File, len(entries))
	for i, e := range entries {
		m.Files[i] = e.File
	}
	if err := writeManifest(d.l.path(tmpName, d.id, manifestName), m); err != nil {
		return m, err
	}
	if err := <-durable; err != nil {
		return m, diskError("make the capture durable", err)
	}
	if !transient {
		for _, name := range []string{manifestName, "."} {
			if err := syncFile(d.l.path(tmpName, d.id, name)); err != nil {
				return m, diskError("make the capture durable", err)
			}
		}
	}
	pointManifest.Hit()
	if err := os.Rename(d.l.path(tmpName, d.id), d.l.path(d.id)); err != nil {
		return m, diskError("keep the capture", err)
	}
	pointRenamed.Hit()
	if !transient {
		if err := syncFile(d.l.dir); err != nil {
			return m, errors.Join(diskError("make the capture durable", err), d.l.Remove(d.id))
		}
	}
	d.l.mu.Lock()
	defer d.l.mu.Unlock()
	d.l.whole[d.id] = true
	d.l.checked[d.id] = entries
	return m, nil
}

func writeManifest(path string, m Manifest) error {
	data, err := json.Marshal(m)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "write the capture's manifest: %w", err)
	}
	if len(data) > maxManifest {
		return sandbox.Errorf(sandbox.CodeTooLarge, "the capture has %d files: fewer must have changed in one sandbox", len(m.Files))
	}
	return diskError("write the capture's manifest", os.WriteFile(path, append(data, '\n'), 0o600))
}

// fewFiles is up to how many files an fsync of each costs less than a syncfs,
// which waits for what others write too.
const fewFiles = 32

// syncData makes a capture's data in dir durable.
func syncData(dir string, entries []entry) error {
	if len(entries) > fewFiles {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Syncfs(int(f.Fd()))
	}
	var group errgroup.Group // side by side they share a commit of the journal
	for _, e := range entries {
		if e.Type == 0 || e.Type == fs.ModeDir {
			group.Go(func() error { return syncFile(filepath.Join(dir, string(e.Path))) })
		}
	}
	group.Go(func() error { return syncFile(dir) })
	return group.Wait()
}

func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Copy makes the capture to from another one's files, which are shared on the
// disk: neither ever changes. With it, a capture gets a life of its own.
func (l *Library) Copy(ctx context.Context, from, to string) (Manifest, error) {
	m, err := readManifest(l.path(from, manifestName))
	if err != nil {
		return m, corrupt(from, err)
	}
	// What is missing or of another type cannot be linked, and is not for the
	// filesystem to tell of.
	have, err := scan(ctx, l.Path(from))
	if err == nil {
		err = compare(m, have, false)
	}
	if err != nil {
		return m, orCtx(ctx, corrupt(from, err))
	}
	d, err := l.Begin(to)
	if err != nil {
		return m, err
	}
	if err := d.link(ctx, from, m); err != nil {
		return m, errors.Join(diskError("copy a capture", err), d.Abort())
	}
	// Its own checksums: what was corrupt before the copy must not become
	// good by it.
	got, err := d.Commit(ctx, m, false)
	if err != nil {
		return m, errors.Join(err, d.Abort())
	}
	if m.Summed {
		entries := make([]entry, len(got.Files))
		for i, f := range got.Files {
			entries[i].File = f
		}
		if err := compare(m, entries, true); err != nil {
			return m, errors.Join(corrupt(from, err), l.Remove(to))
		}
	}
	return got, nil
}

// link makes hard links of all files, which a checkpoint has in directories.
func (d *Draft) link(ctx context.Context, from string, m Manifest) error {
	if err := os.Mkdir(d.Data, 0o700); err != nil {
		return err
	}
	for _, f := range m.Files {
		if err := ctx.Err(); err != nil {
			return err
		}
		target := filepath.Join(d.Data, string(f.Path))
		var err error
		switch f.Type {
		case fs.ModeDir:
			err = os.Mkdir(target, 0o700)
		case 0:
			err = os.Link(d.l.path(from, dataName, string(f.Path)), target)
		default:
			err = fmt.Errorf("file %.80q is of type %v", string(f.Path), f.Type)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Check tells whether a capture is what was written: CodeCorruptCapture where
// files are missing, cut or changed. Files that did not change since the last
// Check are not read again.
func (l *Library) Check(ctx context.Context, id string) error {
	m, err := readManifest(l.path(id, manifestName))
	if err != nil {
		return corrupt(id, err)
	}
	if m.ID != id {
		return corrupt(id, fmt.Errorf("its manifest is of %s", m.ID))
	}
	have, err := scan(ctx, l.Path(id))
	if err != nil {
		return orCtx(ctx, corrupt(id, err))
	}
	l.mu.Lock()
	good := l.checked[id]
	l.mu.Unlock()
	if good != nil && same(good, have) {
		return nil
	}
	if m.Summed {
		// The sizes first: a cut file need not be read.
		if err := compare(m, have, false); err != nil {
			return corrupt(id, err)
		}
		if err := sum(ctx, l.Path(id), have, good); err != nil {
			return orCtx(ctx, corrupt(id, err))
		}
	}
	if err := compare(m, have, m.Summed); err != nil {
		return corrupt(id, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.whole[id] {
		l.checked[id] = have
	}
	return nil
}

func orCtx(ctx context.Context, err error) error {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "check a capture: %w", ctx.Err())
	case ctx.Err() != nil:
		return sandbox.Errorf(sandbox.CodeCanceled, "check a capture: %w", ctx.Err())
	}
	return err
}

func corrupt(id string, err error) error {
	if sandbox.CodeOf(err) == sandbox.CodeUnsupported {
		return sandbox.Errorf(sandbox.CodeUnsupported, "the capture %s cannot be used: %w", id, err).With("capture", id)
	}
	return sandbox.Errorf(sandbox.CodeCorruptCapture, "the capture %s cannot be used, its files are not what was written: %w: restore them from a backup, or remove what was made of it", id, err).
		With("capture", id)
}

// Remove takes a capture away, at once for who looks and then on the disk. It
// is nil where there is none.
func (l *Library) Remove(id string) error {
	l.mu.Lock()
	delete(l.whole, id)
	delete(l.checked, id)
	l.mu.Unlock()
	gone := l.path(tmpName, "gone-"+id)
	err := os.Rename(l.path(id), gone)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return diskError("remove a capture", err)
	}
	pointDetached.Hit()
	return diskError("remove a capture", os.RemoveAll(gone))
}

// Hold keeps a capture for holder, a sandbox's or a snapshot's id, until Drop.
// Holds are not on disk: after Open they are made again from what the caller
// knows. CodeNotFound: the capture is gone.
func (l *Library) Hold(id, holder string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.whole[id] {
		return sandbox.Errorf(sandbox.CodeNotFound, "the snapshot %.40s is gone: `warren snapshot ls` shows what there is", id)
	}
	put(l.users, id, holder)
	put(l.uses, holder, id)
	return nil
}

func put(m map[string]map[string]struct{}, key, value string) {
	if m[key] == nil {
		m[key] = map[string]struct{}{}
	}
	m[key][value] = struct{}{}
}

func take(m map[string]map[string]struct{}, key, value string) {
	delete(m[key], value)
	if len(m[key]) == 0 {
		delete(m, key)
	}
}

// Drop ends all of holder's holds but those of keep, and gives the captures
// that nobody holds any more.
func (l *Library) Drop(holder string, keep ...string) (free []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.uses[holder] {
		if slices.Contains(keep, id) {
			continue
		}
		take(l.users, id, holder)
		take(l.uses, holder, id)
		if len(l.users[id]) == 0 {
			free = append(free, id)
		}
	}
	slices.Sort(free)
	return free
}

// Release ends one of holder's holds, and gives the capture where nobody holds
// it any more.
func (l *Library) Release(id, holder string) (free []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.users[id][holder]; !ok {
		return nil
	}
	take(l.users, id, holder)
	take(l.uses, holder, id)
	if len(l.users[id]) == 0 {
		free = append(free, id)
	}
	return free
}

// Users lists who holds a capture, sorted.
func (l *Library) Users(id string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.usersLocked(id)
}

func (l *Library) usersLocked(id string) []string {
	all := make([]string, 0, len(l.users[id]))
	for u := range l.users[id] {
		all = append(all, u)
	}
	slices.Sort(all)
	return all
}

// Retire keeps a capture from being held any more, if nobody holds it; else it
// gives who does. Remove follows, or Restore, which takes it back.
func (l *Library) Retire(id string) (users []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if users := l.usersLocked(id); len(users) > 0 {
		return users
	}
	delete(l.whole, id)
	return nil
}

// Restore takes a Retire back.
func (l *Library) Restore(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.whole[id] = true
}

// diskError makes an *sandbox.Error of a failed file operation; nil stays nil.
func diskError(what string, err error) error {
	var known *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return sandbox.Errorf(sandbox.CodeDiskFull, "%s: no space left on the state directory's filesystem: free some, or remove sandboxes and snapshots (%w)", what, err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.CodeCanceled, "%s: %w", what, err)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "%s: %w", what, err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", what, err)
}
