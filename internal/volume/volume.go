// Package volume reads and changes the content of volumes: directories that
// outlive sandboxes and are mounted into them.
//
// Whoever has a volume mounted can make anything in it, symlinks foremost, at
// any moment. Every path is resolved beneath the volume by os.Root (openat and
// O_NOFOLLOW, component by component), and nothing is opened but regular files
// and directories.
package volume

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Bounds of what one call may ask for.
const (
	maxPath  = 4096 // PATH_MAX of linux/limits.h
	maxDepth = 64
	maxList  = 100_000 // entries
)

// tempPrefix begins the names of files that are being written.
const tempPrefix = ".warren-put-"

// Dir is the open directory of one volume.
type Dir struct{ root *os.Root }

// Open opens the directory of a volume.
func Open(dir string) (*Dir, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "open the volume: %w", err)
	}
	return &Dir{root}, nil
}

// Close closes it.
func (d *Dir) Close() error { return d.root.Close() }

// The types of entries.
const (
	TypeFile      = "file"
	TypeDirectory = "directory"
	TypeSymlink   = "symlink"
	TypeUnknown   = "unknown" // a device, a FIFO or a socket
)

// Entry is what is at a path.
type Entry struct {
	Name   string    `json:"name"`
	Type   string    `json:"type"`
	Path   string    `json:"path"` // absolute in the volume
	Size   int64     `json:"size"` // bytes
	Mode   uint32    `json:"mode"` // permissions, with the set-id and sticky bits
	UID    uint32    `json:"uid"`
	GID    uint32    `json:"gid"`
	ATime  time.Time `json:"atime"`
	MTime  time.Time `json:"mtime"`
	CTime  time.Time `json:"ctime"`
	Target string    `json:"target,omitempty"` // a symlink's
}

// Attributes are what of an entry can be set; nil leaves it, or the default of
// a new one (root's, 0644 or 0755).
type Attributes struct {
	UID, GID, Mode *uint32
}

// clean makes the path within the volume that os.Root takes.
func clean(p string) (string, error) {
	if p == "" || len(p) > maxPath || strings.ContainsRune(p, 0) {
		return "", sandbox.Errorf(sandbox.CodeInvalid, "the path is empty, longer than %d bytes, or has a NUL in it", maxPath)
	}
	rel := strings.TrimPrefix(path.Clean("/"+p), "/")
	if rel == "" {
		rel = "."
	}
	return rel, nil
}

// fault gives an error of the filesystem its code.
func fault(p string, err error) error {
	shown := strings.ToValidUTF8(p, "?")
	var known *sandbox.Error
	switch {
	case err == nil, errors.As(err, &known):
		return err
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return sandbox.Errorf(sandbox.CodeNotFound, "there is nothing at %q in the volume", shown)
	case errors.Is(err, fs.ErrExist), errors.Is(err, syscall.ENOTEMPTY):
		return sandbox.Errorf(sandbox.CodeExists, "%q is there already", shown)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Errorf(sandbox.CodeDiskFull, "the host's disk is full: free some space under the state directory")
	case errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP):
		return sandbox.Errorf(sandbox.CodeInvalid, "%q: %w", shown, err)
	}
	// os.Root's refusal of what leads out has no error of its own.
	if strings.Contains(err.Error(), "path escapes") {
		return sandbox.Errorf(sandbox.CodeNotFound, "%q leads out of the volume", shown)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%q in the volume: %w", shown, err)
}

// Stat tells of a path, of a symlink itself.
func (d *Dir) Stat(p string) (Entry, error) {
	rel, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	e, err := d.stat(rel)
	return e, fault(p, err)
}

func (d *Dir) stat(rel string) (Entry, error) {
	st, err := d.root.Lstat(rel)
	if err != nil {
		return Entry{}, err
	}
	sys := st.Sys().(*syscall.Stat_t)
	e := Entry{
		Name: path.Base("/" + rel), Type: TypeUnknown, Path: path.Join("/", rel), Size: st.Size(), Mode: sys.Mode & 0o7777, UID: sys.Uid, GID: sys.Gid,
		ATime: at(sys.Atim), MTime: at(sys.Mtim), CTime: at(sys.Ctim),
	}
	switch st.Mode().Type() {
	case 0:
		e.Type = TypeFile
	case fs.ModeDir:
		e.Type = TypeDirectory
	case fs.ModeSymlink:
		e.Type = TypeSymlink
		if e.Target, err = d.root.Readlink(rel); err != nil {
			return e, err
		}
	}
	return e, nil
}

func at(t syscall.Timespec) time.Time { return time.Unix(t.Unix()).UTC() }

// List gives what is in a directory, depth levels deep, by path.
func (d *Dir) List(ctx context.Context, p string, depth int) ([]Entry, error) {
	rel, err := clean(p)
	if err != nil {
		return nil, err
	}
	if depth < 1 || depth > maxDepth {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "depth is %d: give 1 to %d", depth, maxDepth)
	}
	out := []Entry{}
	err = d.list(ctx, rel, depth, &out)
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(a.Path, b.Path) })
	return out, fault(p, err)
}

func (d *Dir) list(ctx context.Context, rel string, depth int, out *[]Entry) error {
	f, err := d.root.OpenFile(rel, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		names, err := f.Readdirnames(1000)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if strings.HasPrefix(name, tempPrefix) {
				continue
			}
			e, err := d.stat(path.Join(rel, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue // gone meanwhile
			}
			if err != nil {
				return err
			}
			if len(*out) >= maxList {
				return sandbox.Errorf(sandbox.CodeTooLarge, "the directory has more than %d entries: list its subdirectories one by one", maxList)
			}
			*out = append(*out, e)
			if e.Type == TypeDirectory && depth > 1 {
				if err := d.list(ctx, path.Join(rel, name), depth-1, out); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
			}
		}
	}
}

// MakeDir makes a directory. force makes those above it, too, and takes one
// that is there.
func (d *Dir) MakeDir(p string, a Attributes, force bool) (Entry, error) {
	rel, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if force {
		err = d.root.MkdirAll(rel, 0o755)
	} else {
		err = d.root.Mkdir(rel, 0o755)
	}
	if err == nil {
		err = d.set(rel, a)
	}
	if err != nil {
		return Entry{}, fault(p, err)
	}
	return d.Stat(p)
}

// Set changes an entry's owner and mode, of a symlink its owner alone.
func (d *Dir) Set(p string, a Attributes) (Entry, error) {
	rel, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if err := d.set(rel, a); err != nil {
		return Entry{}, fault(p, err)
	}
	return d.Stat(p)
}

func (d *Dir) set(rel string, a Attributes) error {
	if a.UID != nil || a.GID != nil {
		uid, gid := -1, -1
		if a.UID != nil {
			uid = int(*a.UID)
		}
		if a.GID != nil {
			gid = int(*a.GID)
		}
		if err := d.root.Lchown(rel, uid, gid); err != nil {
			return err
		}
	}
	if a.Mode == nil {
		return nil
	}
	st, err := d.root.Lstat(rel)
	if err != nil || st.Mode().Type() == fs.ModeSymlink {
		return err
	}
	return d.root.Chmod(rel, fileMode(*a.Mode))
}

// fileMode makes Go's mode of chmod(2)'s.
func fileMode(m uint32) fs.FileMode {
	mode := fs.FileMode(m & 0o777)
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&bit != 0 {
			mode |= flag
		}
	}
	return mode
}

// Remove removes a path with all that is below it.
func (d *Dir) Remove(p string) error {
	rel, err := clean(p)
	if err != nil {
		return err
	}
	if rel == "." {
		return sandbox.Errorf(sandbox.CodeInvalid, "the volume's root cannot be removed: remove the volume")
	}
	if _, err := d.root.Lstat(rel); err != nil {
		return fault(p, err)
	}
	return fault(p, d.root.RemoveAll(rel))
}

// Read opens a regular file; the caller closes it. A symlink is followed
// within the volume.
func (d *Dir) Read(p string) (f *os.File, size int64, err error) {
	rel, err := clean(p)
	if err != nil {
		return nil, 0, err
	}
	// Not to wait for a FIFO's writer.
	if f, err = d.root.OpenFile(rel, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0); err != nil {
		return nil, 0, fault(p, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = sandbox.Errorf(sandbox.CodeInvalid, "%q is not a regular file", strings.ToValidUTF8(p, "?"))
	}
	if err != nil {
		f.Close()
		return nil, 0, fault(p, err)
	}
	return f, st.Size(), nil
}

// Write puts r at a path, whole or not at all; force makes the directories
// above it. It replaces what is there, but a directory.
func (d *Dir) Write(p string, r io.Reader, a Attributes, force bool) (_ Entry, err error) {
	rel, err := clean(p)
	if err != nil {
		return Entry{}, err
	}
	if rel == "." {
		return Entry{}, sandbox.Errorf(sandbox.CodeInvalid, "%q is a directory", strings.ToValidUTF8(p, "?"))
	}
	if force {
		if err := d.root.MkdirAll(path.Dir(rel), 0o755); err != nil {
			return Entry{}, fault(p, err)
		}
	}
	tmp := path.Join(path.Dir(rel), tempPrefix+rand.Text())
	f, err := d.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return Entry{}, fault(p, err)
	}
	defer func() {
		if err != nil {
			d.root.Remove(tmp)
		}
	}()
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = d.set(tmp, a)
	}
	if err == nil {
		err = d.root.Rename(tmp, rel)
	}
	if err != nil {
		return Entry{}, fault(p, err)
	}
	return d.Stat(p)
}
