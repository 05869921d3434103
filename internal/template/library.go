package template

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

var (
	pointRetired    = fault.Register("template.retired")
	pointRecorded   = fault.Register("template.recorded")
	pointRemoved    = fault.Register("template.removed")
	pointRecordTemp = fault.Register("template.record.written")
)

// Library is all templates, layers and build-cache entries of one daemon. It
// is safe for concurrent use.
type Library struct {
	dir        string
	limits     layer.Limits
	cacheMax   int64 // bytes of layers that only the build cache keeps
	archiveMax int64 // bytes of an uploaded archive or build context
	lock       *os.File

	// commit orders what changes records and layers on disk with what changes
	// the maps: it is held over renames and small records only, and readers
	// never wait for it. It is taken before mu.
	commit sync.Mutex

	mu       sync.Mutex
	layers   map[string]layer.Stats // by digest
	pins     map[string]int         // builds that need a layer
	live     map[string]Template    // by tenant/name
	retired  map[string]Template    // by id: replaced or removed, still held
	holders  map[string]string      // holder → id
	cache    map[string]cacheEntry  // by key
	problems []error
	adopted  bool // Collect was called: the holders are known
	closed   bool
	builds   sync.WaitGroup
}

// Option changes a Library's defaults.
type Option func(*Library)

// WithLimits bounds every layer that is imported or built.
func WithLimits(l layer.Limits) Option { return func(lib *Library) { lib.limits = l } }

// WithCacheSize bounds the bytes of layers that only the build cache keeps;
// the least recently used go first. The default is 10 GiB.
func WithCacheSize(bytes int64) Option { return func(lib *Library) { lib.cacheMax = bytes } }

// WithArchiveSize bounds an uploaded archive or build context. The default is
// 16 GiB.
func WithArchiveSize(bytes int64) Option { return func(lib *Library) { lib.archiveMax = bytes } }

// Open opens the library in dir, and makes it where there is none. It removes
// what a crash left half made, and keeps everything that a template, a
// retired template or the build cache refers to. The caller then repeats Hold
// for every live sandbox and calls Collect; nothing is garbage before that.
//
// Only one process can have a library open: another gets CodeConflict.
func Open(dir string, opts ...Option) (*Library, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "template directory %q: %w", dir, err)
	}
	l := &Library{
		dir: abs, cacheMax: 10 << 30, archiveMax: 16 << 30,
		layers: map[string]layer.Stats{}, pins: map[string]int{},
		live: map[string]Template{}, retired: map[string]Template{},
		holders: map[string]string{}, cache: map[string]cacheEntry{},
	}
	for _, o := range opts {
		o(l)
	}
	for _, d := range []string{"", "layers", "meta", "templates", "retired", "cache", "tmp"} {
		if err := os.MkdirAll(filepath.Join(abs, d), 0o700); err != nil {
			return nil, layer.Error("make the template directory", err)
		}
	}
	// Layers hold setuid files: nobody but root may come near them, whatever
	// made the directory.
	if err := os.Chmod(abs, 0o700); err != nil {
		return nil, layer.Error("close the template directory to others", err)
	}
	if l.lock, err = os.OpenFile(l.path("lock"), os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, layer.Error("lock the template directory", err)
	}
	if err := unix.Flock(int(l.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		l.lock.Close()
		return nil, sandbox.Errorf(sandbox.CodeConflict, "the template directory %s is in use by another process: stop it, or use another state directory: %w", abs, err)
	}
	if err := l.load(); err != nil {
		l.lock.Close()
		return nil, err
	}
	return l, nil
}

// Close waits for running builds, which the caller ends by their contexts,
// and lets go of the directory. Templates and holds stay.
func (l *Library) Close() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.builds.Wait()
	return l.lock.Close()
}

// Problems are the records that Open could not use, and why. They are on disk
// still, under a name that ends in ".broken".
func (l *Library) Problems() []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.problems)
}

func (l *Library) path(parts ...string) string {
	return filepath.Join(append([]string{l.dir}, parts...)...)
}

func (l *Library) layerDir(digest string) string { return l.path("layers", dirName(digest)) }

func key(tenant, name string) string { return tenant + "/" + name }

// find looks a name or id up as tenant sees it. l.mu is held.
func (l *Library) find(tenant, nameOrID string) (Template, error) {
	if t, ok := l.live[key(tenant, nameOrID)]; ok {
		return t, nil
	}
	if t, ok := l.live[key(SharedTenant, nameOrID)]; ok && t.Shared {
		return t, nil
	}
	if IsID(nameOrID) {
		if t, ok := l.byID(nameOrID); ok && (t.Tenant == tenant || t.Shared) {
			return t, nil
		}
	}
	return Template{}, sandbox.Errorf(sandbox.CodeNotFound, "there is no template %s: `warren template ls` lists them, `warren template build` and `import` make one", layer.Quote(nameOrID))
}

func (l *Library) byID(id string) (Template, bool) {
	if t, ok := l.retired[id]; ok {
		return t, true
	}
	for _, t := range l.live {
		if t.ID == id {
			return t, true
		}
	}
	return Template{}, false
}

// Tag makes tenant's own template that nameOrID means also the template
// name:tag, and gives that. What had the tag before is replaced.
func (l *Library) Tag(_ context.Context, tenant, nameOrID, name, tag string) (Template, error) {
	if tenant == "" {
		tenant = SharedTenant
	}
	if err := CheckName(name); err != nil {
		return Template{}, err
	}
	if err := CheckTag(tag); err != nil {
		return Template{}, err
	}
	l.mu.Lock()
	t, err := l.find(tenant, nameOrID)
	if err == nil && t.Tenant != tenant {
		err = sandbox.Errorf(sandbox.CodeForbidden, "the template %s is shared by the tenant %q: only it can tag it", layer.Quote(nameOrID), t.Tenant)
	}
	if err != nil {
		l.mu.Unlock()
		return t, err
	}
	// Its layers must not be collected before the new record has them.
	for _, d := range t.Layers {
		l.pins[d]++
	}
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, d := range t.Layers {
			if l.pins[d]--; l.pins[d] == 0 {
				delete(l.pins, d)
			}
		}
	}()
	t.ID, t.Name, t.CreatedAt = NewID(), Tagged(name, tag), time.Now().UTC().Truncate(time.Millisecond)
	return t, l.record(t)
}

// Get gives the template that tenant means by a name or an id: its own first,
// then a shared one. Replaced templates that a sandbox still holds are found
// by id. The error has CodeNotFound.
func (l *Library) Get(_ context.Context, tenant, nameOrID string) (Template, error) {
	if tenant == "" {
		tenant = SharedTenant
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.find(tenant, nameOrID)
}

// Resolve is Get, and gives the layers' directories, topmost first, to start a
// sandbox with. They stay until the template is gone and no holder is left:
// Hold the template before relying on them, and give up where Hold says that
// it went meanwhile. CodeBadTemplate: a layer is missing on disk.
func (l *Library) Resolve(_ context.Context, tenant, nameOrID string) (Template, []string, error) {
	if tenant == "" {
		tenant = SharedTenant
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	t, err := l.find(tenant, nameOrID)
	if err != nil {
		return t, nil, err
	}
	dirs := make([]string, 0, len(t.Layers))
	for _, d := range t.Layers {
		if _, ok := l.layers[d]; !ok {
			return t, nil, sandbox.Errorf(sandbox.CodeBadTemplate, "the template %s lacks the layer %s on disk: build it again", layer.Quote(t.Name), d)
		}
		dirs = append(dirs, l.layerDir(d))
	}
	return t, dirs, nil
}

// List gives the templates that tenant can use, by name: its own, and the
// shared ones whose names it does not use itself.
func (l *Library) List(_ context.Context, tenant string) ([]Template, error) {
	if tenant == "" {
		tenant = SharedTenant
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []Template
	for _, t := range l.live {
		if t.Tenant == tenant {
			out = append(out, t)
		} else if _, own := l.live[key(tenant, t.Name)]; t.Shared && !own {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b Template) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Hold keeps the template's layers on disk for holder (a sandbox's id) until
// Drop, also when the template is replaced or removed. A holder has one
// template; holding the same again is nil. Holds are not on disk: after Open
// they are made again from what the caller knows. CodeNotFound: the template
// is gone.
func (l *Library) Hold(_ context.Context, id, holder string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if was, ok := l.holders[holder]; ok && was != id {
		return sandbox.Errorf(sandbox.CodeConflict, "%s already holds the template %s", layer.Quote(holder), was)
	}
	if _, ok := l.byID(id); !ok {
		return sandbox.Errorf(sandbox.CodeNotFound, "the template %s is gone: it was replaced or removed; ask for it by its name", layer.Quote(id))
	}
	l.holders[holder] = id
	return nil
}

// Drop ends holder's hold, and gives the disk space back where it was the
// last of a template that is gone. Dropping nothing is nil.
func (l *Library) Drop(ctx context.Context, holder string) error {
	l.mu.Lock()
	id, ok := l.holders[holder]
	delete(l.holders, holder)
	_, old := l.retired[id]
	old = old && !l.held(id)
	l.mu.Unlock()
	if !ok || !old {
		return nil
	}
	return l.collect(ctx)
}

// held tells whether id has a holder. l.mu is held.
func (l *Library) held(id string) bool {
	for _, h := range l.holders {
		if h == id {
			return true
		}
	}
	return false
}

// Holders lists who holds the template, sorted.
func (l *Library) Holders(id string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for holder, h := range l.holders {
		if h == id {
			out = append(out, holder)
		}
	}
	slices.Sort(out)
	return out
}

// Remove removes tenant's own template by name or id and gives it as it was.
// Sandboxes that hold it go on; its layers go with the last of them. Another
// tenant's shared template is CodeForbidden.
func (l *Library) Remove(ctx context.Context, tenant, nameOrID string) (Template, error) {
	if tenant == "" {
		tenant = SharedTenant
	}
	t, err := l.unrecord(tenant, nameOrID)
	if err != nil {
		return t, err
	}
	return t, l.collect(ctx)
}

func (l *Library) unrecord(tenant, nameOrID string) (Template, error) {
	l.commit.Lock()
	defer l.commit.Unlock()
	l.mu.Lock()
	t, err := l.find(tenant, nameOrID)
	if err == nil && t.Tenant != tenant {
		err = sandbox.Errorf(sandbox.CodeForbidden, "the template %s is shared by the tenant %q: only it can remove it", layer.Quote(nameOrID), t.Tenant)
	}
	if _, old := l.retired[t.ID]; err == nil && old {
		err = sandbox.Errorf(sandbox.CodeConflict, "the template %s was replaced or removed already: it goes when the last sandbox of it ends", layer.Quote(nameOrID))
	}
	l.mu.Unlock()
	if err != nil {
		return t, err
	}
	if err := l.retire(t); err != nil {
		return t, err
	}
	if err := os.Remove(l.recordPath(t)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return t, layer.Error("remove the template's record", err)
	}
	pointRemoved.Hit()
	if err := syncDir(filepath.Dir(l.recordPath(t))); err != nil {
		return t, layer.Error("remove the template's record", err)
	}
	l.mu.Lock()
	delete(l.live, key(t.Tenant, t.Name))
	l.retired[t.ID] = t
	l.mu.Unlock()
	return t, nil
}

// record makes t the template of its name. l.commit is not held.
func (l *Library) record(t Template) error {
	l.commit.Lock()
	defer l.commit.Unlock()
	l.mu.Lock()
	old, replaces := l.live[key(t.Tenant, t.Name)]
	l.mu.Unlock()
	if replaces {
		if err := l.retire(old); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(l.recordPath(t)), 0o700); err != nil {
		return layer.Error("record the template", err)
	}
	if err := l.writeRecord(l.recordPath(t), t); err != nil {
		return err
	}
	pointRecorded.Hit()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live[key(t.Tenant, t.Name)] = t
	if replaces {
		l.retired[old.ID] = old
	}
	return nil
}

// retire records that t is about to go while a sandbox may hold it: after a
// crash the holder must find it by id. collect removes it when nobody does.
func (l *Library) retire(t Template) error {
	if err := l.writeRecord(l.path("retired", t.ID+".json"), t); err != nil {
		return err
	}
	pointRetired.Hit()
	return nil
}

func (l *Library) recordPath(t Template) string {
	return l.path("templates", t.Tenant, t.Name+".json")
}
