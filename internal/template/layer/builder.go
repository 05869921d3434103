package layer

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// A Builder makes one new layer on top of others, as COPY and WORKDIR do. It
// resolves every destination in the merged tree of all of them, so that a
// symlink in a base image leads to where it would lead in the sandbox, and
// never anywhere on the host.
type Builder struct {
	ctx   context.Context
	lim   Limits
	top   *os.File // the new layer; view.layers[0] too
	view  *View
	stats Stats
	buf   []byte
	dirs  []dirTime
}

// Owner is who files belong to.
type Owner struct{ UID, GID int }

// NewBuilder makes dir, which must not exist, the new layer. lowers are
// topmost first. On error, and after, removing dir is the caller's.
func NewBuilder(ctx context.Context, dir string, lowers []string, l Limits) (*Builder, error) {
	lower, err := OpenView(lowers)
	if err != nil {
		return nil, err
	}
	defer lower.Close()
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, Error("make the layer's directory", err)
	}
	view, err := OpenView(append([]string{dir}, lowers...))
	if err != nil {
		return nil, err
	}
	b := &Builder{ctx: ctx, lim: l.filled(), top: view.layers[0], view: view, buf: make([]byte, 256<<10)}
	// The topmost root directory's attributes are the merged one's.
	m := meta{mode: 0o755}
	if len(lower.layers) > 0 {
		e, err := lower.root()
		if err == nil {
			m, err = lower.metaOf(e)
		}
		if err != nil {
			view.Close()
			return nil, Error("read the lower layers", err)
		}
	}
	if err := m.apply(b.top); err != nil {
		view.Close()
		return nil, Error("make the layer's root directory", err)
	}
	return b, nil
}

// View is the merged tree, the new layer included.
func (b *Builder) View() *View { return b.view }

// Close sets the times that copied directories have and closes the builder's
// descriptors.
func (b *Builder) Close() error {
	defer b.view.Close()
	for i := len(b.dirs) - 1; i >= 0; i-- {
		d := b.dirs[i]
		parent, err := strict(b.top, path.Dir(d.name), unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			continue // a later copy took its place
		}
		err = setTimes(parent, path.Base(d.name), d.mtime)
		parent.Close()
		if err != nil && !isNotExist(err) {
			return Error("set a directory's time", err)
		}
	}
	return nil
}

// metaOf reads an entry's attributes, extended ones that a copy keeps
// included.
func (v *View) metaOf(e Entry) (meta, error) {
	m := metaOf(e.Stat)
	if !e.IsDir() && !e.IsRegular() {
		return m, nil
	}
	f, err := strict(v.layers[e.at], e.Path, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return m, err
	}
	defer f.Close()
	all, err := readXattrs(f)
	if err != nil {
		return m, err
	}
	for k, val := range all {
		if copiedXattr(k) {
			if m.xattrs == nil {
				m.xattrs = map[string]string{}
			}
			m.xattrs[k] = val
		}
	}
	return m, nil
}

// MkdirAll makes p a directory, with owner and mode 0755 for what is new. It
// gives the path without symlinks.
func (b *Builder) MkdirAll(p string, owner Owner) (string, error) {
	e, rest, err := b.view.walk(p, true)
	if err != nil {
		return "", err
	}
	if !e.IsDir() {
		return "", sandbox.Errorf(sandbox.CodeInvalid, "%s is not a directory", Quote(p))
	}
	d, err := b.openDir(e.Path)
	if err != nil {
		return "", Error("make the directory "+Quote(p), err)
	}
	d.Close()
	at := e.Path
	for _, name := range rest {
		at = path.Join(at, name)
		if err := b.mkdir(at, meta{mode: 0o755, uid: owner.UID, gid: owner.GID, mtime: time.Now()}); err != nil {
			return "", err
		}
	}
	return at, nil
}

// openDir opens the new layer's directory at p, a path without symlinks that
// is a directory in the merged tree, and makes it and its parents in the new
// layer first, with the attributes that they have below.
func (b *Builder) openDir(p string) (*os.File, error) {
	if p == "." {
		p = ""
	}
	f, err := strict(b.top, p, unix.O_RDONLY|unix.O_DIRECTORY)
	if !isNotExist(err) {
		return f, err
	}
	parent, err := b.openDir(path.Dir(p))
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	e, err := b.view.Lookup(p, false)
	if err != nil {
		return nil, err
	}
	m, err := b.view.metaOf(e)
	if err != nil {
		return nil, err
	}
	if err := unix.Mkdirat(int(parent.Fd()), path.Base(p), 0o700); err != nil {
		return nil, err
	}
	f, err = strict(b.top, p, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	b.dirs = append(b.dirs, dirTime{p, m.mtime})
	return f, m.apply(f)
}

// mkdir makes the directory p in the new layer; its parent is there in the
// merged tree and p is not.
func (b *Builder) mkdir(p string, m meta) error {
	parent, err := b.openDir(path.Dir(p))
	if err != nil {
		return b.failed(p, err)
	}
	defer parent.Close()
	if err := b.count(p); err != nil {
		return err
	}
	if err := unix.Mkdirat(int(parent.Fd()), path.Base(p), 0o700); err != nil {
		return b.failed(p, err)
	}
	d, err := strict(parent, path.Base(p), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return b.failed(p, err)
	}
	defer d.Close()
	b.dirs = append(b.dirs, dirTime{p, m.mtime})
	return b.failed(p, m.apply(d))
}

func (b *Builder) failed(p string, err error) error { return Error("write "+Quote("/"+p), err) }

func (b *Builder) count(p string) error {
	if err := b.ctx.Err(); err != nil {
		return b.failed(p, err)
	}
	if b.stats.Entries++; b.stats.Entries > b.lim.MaxEntries {
		return tooLarge("entries", "the step makes more than %d entries", b.lim.MaxEntries)
	}
	return nil
}

// place prepares p, a path without symlinks whose parent is a directory, for
// a new entry that is no directory: what the new layer has there goes.
func (b *Builder) place(p string) (*os.File, string, error) {
	if e, err := b.view.Lookup(p, false); err == nil && e.IsDir() {
		return nil, "", sandbox.Errorf(sandbox.CodeInvalid, "%s is a directory: a file cannot take its place", Quote("/"+p))
	} else if err != nil && !isNotExist(err) {
		return nil, "", err
	}
	if err := b.count(p); err != nil {
		return nil, "", err
	}
	parent, err := b.openDir(path.Dir(p))
	if err != nil {
		return nil, "", b.failed(p, err)
	}
	base := path.Base(p)
	if err := removeAt(parent, base); err != nil {
		parent.Close()
		return nil, "", b.failed(p, err)
	}
	return parent, base, nil
}

// resolveFile resolves where a file written to p ends up: parents are made,
// and where p is a symlink, it is its target.
func (b *Builder) resolveFile(p string, owner Owner) (string, error) {
	e, rest, err := b.view.walk(p, true)
	if err != nil {
		return "", err
	}
	if len(rest) == 0 {
		return e.Path, nil
	}
	dir, err := b.MkdirAll(path.Join("/", e.Path, path.Join(rest[:len(rest)-1]...)), owner)
	return path.Join(dir, rest[len(rest)-1]), err
}

// WriteFile makes p a file with that content.
func (b *Builder) WriteFile(p string, content io.Reader, mode uint32, owner Owner) error {
	at, err := b.resolveFile(p, owner)
	if err != nil {
		return err
	}
	return b.write(at, content, meta{mode: mode, uid: owner.UID, gid: owner.GID, mtime: time.Now()}, -1)
}

func (b *Builder) write(p string, content io.Reader, m meta, size int64) error {
	parent, base, err := b.place(p)
	if err != nil {
		return err
	}
	defer parent.Close()
	f, err := create(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW)
	if err != nil {
		return b.failed(p, err)
	}
	defer f.Close()
	left := min(b.lim.MaxFileBytes, b.lim.MaxBytes-b.stats.Bytes)
	n, err := io.CopyBuffer(onlyWriter{f}, io.LimitReader(WithContext(b.ctx, content), left+1), b.buf)
	b.stats.Bytes += n
	switch {
	case err != nil:
		return b.failed(p, err)
	case n > left:
		return tooLarge("bytes", "the step's files are more than %d bytes together, or one more than %d", b.lim.MaxBytes, b.lim.MaxFileBytes)
	case size >= 0 && n != size:
		return sandbox.Errorf(sandbox.CodeConflict, "%s changed while it was copied", Quote(p))
	}
	if err := m.apply(f); err != nil {
		return b.failed(p, err)
	}
	return b.failed(p, f.Close())
}

// CopyOptions say how Copy takes files over.
type CopyOptions struct {
	Owner *Owner                            // of everything copied and made; nil keeps each file's own
	Mode  *uint32                           // of files and directories copied; nil keeps
	Skip  func(rel string, isDir bool) bool // paths relative to the source's root, to leave out; nil takes all
	links map[inode]string                  // hard links within one copy
}

func (o *CopyOptions) meta(m meta) meta {
	if o.Owner != nil {
		m.uid, m.gid = o.Owner.UID, o.Owner.GID
	}
	if o.Mode != nil {
		m.mode = *o.Mode
	}
	return m
}

func (o *CopyOptions) parents() Owner {
	if o.Owner != nil {
		return *o.Owner
	}
	return Owner{}
}

// Copy puts src's entry e at dst. A directory's content goes into dst, which
// becomes a directory; anything else becomes dst itself.
func (b *Builder) Copy(src *View, e Entry, dst string, o CopyOptions) error {
	o.links = map[inode]string{}
	if !e.IsDir() {
		at, err := b.resolveFile(dst, o.parents())
		if err != nil {
			return err
		}
		return b.copyEntry(src, e, at, &o, 0)
	}
	_, err := b.view.Lookup(dst, true)
	fresh := isNotExist(err)
	at, err := b.MkdirAll(dst, o.parents())
	if err != nil {
		return err
	}
	if fresh {
		if err := b.setDir(src, e, at, &o); err != nil {
			return err
		}
	}
	return b.copyDir(src, e, at, &o, 0)
}

func (b *Builder) copyDir(src *View, e Entry, at string, o *CopyOptions, depth int) error {
	if depth > b.lim.MaxDepth {
		return tooLarge("depth", "%s is more than %d directories deep", Quote(e.Path), b.lim.MaxDepth)
	}
	names, err := src.ReadDir(e)
	if err != nil {
		return err
	}
	for _, name := range names {
		c, err := src.Child(e, name)
		if err != nil {
			return err
		}
		if o.Skip != nil && o.Skip(c.Path, c.IsDir()) {
			continue
		}
		if err := b.copyEntry(src, c, path.Join(at, name), o, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// copyEntry copies one entry to at, a path without symlinks but for its last
// component, which is not followed.
func (b *Builder) copyEntry(src *View, e Entry, at string, o *CopyOptions, depth int) error {
	if len(at) > b.lim.MaxPathBytes {
		return tooLarge("path_bytes", "a path of %d bytes would come of the copy; the most is %d", len(at), b.lim.MaxPathBytes)
	}
	switch e.Stat.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		there, err := b.view.Lookup(at, false)
		switch {
		case isNotExist(err):
			if err := b.mkdir(at, meta{mode: 0o700}); err != nil {
				return err
			}
		case err != nil:
			return err
		case !there.IsDir():
			return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a directory: the directory %s cannot take its place", Quote("/"+at), Quote(e.Path))
		}
		if err := b.setDir(src, e, at, o); err != nil {
			return err
		}
		return b.copyDir(src, e, at, o, depth)
	case unix.S_IFREG:
		return b.copyFile(src, e, at, o)
	case unix.S_IFLNK:
		target, err := src.Readlink(e)
		if err != nil {
			return err
		}
		parent, base, err := b.place(at)
		if err != nil {
			return err
		}
		defer parent.Close()
		if err := unix.Symlinkat(target, int(parent.Fd()), base); err != nil {
			return b.failed(at, err)
		}
		return b.failed(at, o.meta(metaOf(e.Stat)).applyAt(parent, base, true))
	case unix.S_IFIFO:
		parent, base, err := b.place(at)
		if err != nil {
			return err
		}
		defer parent.Close()
		if err := unix.Mkfifoat(int(parent.Fd()), base, 0o600); err != nil {
			return b.failed(at, err)
		}
		return b.failed(at, o.meta(metaOf(e.Stat)).applyAt(parent, base, false))
	}
	return nil // sockets and devices have no content to copy
}

func (b *Builder) setDir(src *View, e Entry, at string, o *CopyOptions) error {
	m, err := src.metaOf(e)
	if err != nil {
		return b.failed(at, err)
	}
	d, err := b.openDir(at)
	if err != nil {
		return b.failed(at, err)
	}
	defer d.Close()
	m = o.meta(m)
	b.dirs = append(b.dirs, dirTime{at, m.mtime})
	return b.failed(at, m.apply(d))
}

func (b *Builder) copyFile(src *View, e Entry, at string, o *CopyOptions) error {
	id := inode{uint64(e.Stat.Dev), e.Stat.Ino}
	if e.Stat.Nlink > 1 {
		if first, ok := o.links[id]; ok {
			return b.link(first, at)
		}
	}
	m, err := src.metaOf(e)
	if err != nil {
		return b.failed(at, err)
	}
	f, err := src.Open(e)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := b.write(at, f, o.meta(m), e.Stat.Size); err != nil {
		return err
	}
	if e.Stat.Nlink > 1 {
		o.links[id] = at
	}
	return nil
}

func (b *Builder) link(from, at string) error {
	parent, base, err := b.place(at)
	if err != nil {
		return err
	}
	defer parent.Close()
	old, err := strict(b.top, path.Dir(from), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return b.failed(at, err)
	}
	defer old.Close()
	err = unix.Linkat(int(old.Fd()), path.Base(from), int(parent.Fd()), base, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EMLINK) {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s and %s are one file, and the copy overwrote it", Quote(from), Quote(at))
	}
	return b.failed(at, err)
}

// Base names the last component of a source path, as COPY does.
func Base(p string) string { return path.Base(path.Clean("/" + strings.TrimSuffix(p, "/"))) }
