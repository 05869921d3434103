package gvisor

import (
	"archive/tar"
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/attrs"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/fstree"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The fault points of a capture of the disk.
var (
	pointDiskAsked = fault.Register("gvisor.disk.asked")
	pointDiskRead  = fault.Register("gvisor.disk.read")
)

// CaptureDisk implements sandbox.DiskCapturer. The Sentry alone knows what is
// where in the file that holds a sandbox's changes, and tells it by the index
// of its filesystem checkpoint: an archive which has, instead of each file's
// content, the places of its pages in that file. They are cloned from there
// where the filesystem can do that, and copied else. (`runsc tar rootfs-upper`
// reads every file into the Sentry's memory, which counts as the sandbox's.)
//
// The Sentry stops its tasks for the index alone: what writes afterwards can
// be half in the capture, so the caller stops the commands. A suspended
// sandbox is captured as it is. Unix sockets are left out; they mean nothing
// without the process that listens. Times are those of the index, in whole
// seconds.
func (i *Instance) CaptureDisk(ctx context.Context, dir string) error {
	id := i.Spec().ID
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fstree.Error(err, "capture the disk of sandbox %s", id)
	}
	err := i.captureDisk(ctx, dir)
	if err != nil {
		if rmErr := os.RemoveAll(dir); rmErr != nil {
			err = errors.Join(err, rmErr)
		}
	}
	return err
}

func (i *Instance) captureDisk(ctx context.Context, dir string) error {
	id := i.Spec().ID
	store, err := i.filestore()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "capture the disk of sandbox %s: %w", id, err)
	}
	defer store.Close()
	r, files, err := indexFiles()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "capture the disk of sandbox %s: %w", id, err)
	}
	closeFiles := func() {
		for _, f := range files {
			f.Close()
		}
	}
	defer closeFiles()
	defer r.Close()
	defer context.AfterFunc(ctx, func() { r.SetReadDeadline(time.Unix(1, 0)) })()
	pointDiskAsked.Hit()

	said := make(chan error, 1)
	go func() {
		said <- i.d.call(ctx, id, "containerManager.FSSave", map[string]any{
			"paths": []map[string]string{{"path": "/"}},
		}, nil, files, closeFiles)
	}()
	u, readErr := newUpper(ctx, store, dir)
	if readErr == nil {
		defer u.root.Close()
		readErr = u.extract(r)
	}
	if readErr == nil {
		var n int64
		if n, readErr = io.Copy(io.Discard, io.LimitReader(r, maxTrailer+1)); n > maxTrailer {
			readErr = errUpper
		}
	}
	r.Close() // after an error the Sentry must not wait for a reader
	err = <-said
	pointDiskRead.Hit()
	switch {
	case ctx.Err() != nil:
		return runError(ctx, "capture the disk of", id, ctx.Err(), "")
	case err != nil && (readErr == nil || errors.Is(readErr, io.EOF) || errors.Is(readErr, io.ErrUnexpectedEOF)):
		return runError(ctx, "capture the disk of", id, err, "")
	case readErr != nil:
		return fstree.Error(readErr, "capture the disk of sandbox %s", id)
	}
	state, err := i.d.runscState(id)
	if err == nil && state.Status != statusPaused {
		err = i.exact(ctx, u)
	}
	if err == nil {
		err = u.finish()
	}
	if err != nil {
		return fstree.Error(err, "capture the disk of sandbox %s", id)
	}
	return nil
}

// maxTrailer is how much may follow the archive's end, and be its padding.
const maxTrailer = 1 << 20

// filestore opens the file that holds the sandbox's changes. It has no name:
// runsc removes that as soon as the Sentry has the file.
func (i *Instance) filestore() (*os.File, error) {
	var own unix.Stat_t
	if err := unix.Stat(rwDir(i.Spec().Dir), &own); err != nil {
		return nil, err
	}
	dir := filepath.Join("/proc", strconv.Itoa(i.PID()), "fd")
	fds, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, fd := range fds {
		name := filepath.Join(dir, fd.Name())
		to, err := os.Readlink(name)
		if err != nil || !strings.HasPrefix(filepath.Base(to), "runsc-filestore-") || !strings.HasSuffix(to, " (deleted)") {
			continue
		}
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		var st unix.Stat_t
		if unix.Fstat(int(f.Fd()), &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink == 0 && st.Dev == own.Dev {
			return f, nil
		}
		f.Close()
	}
	return nil, errors.New("its kernel has no file for the changes of its root filesystem")
}

// indexFiles makes the files of a filesystem checkpoint (gVisor's
// runsc/boot.FSSaveArgs): manifest, index, and the pages with what is said of
// them. Only the index is wanted; what is read of it comes from r.
func indexFiles() (r *os.File, files []*os.File, err error) {
	r, w, err := pipe(false)
	if err != nil {
		return nil, nil, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		r.Close()
		w.Close()
		return nil, nil, err
	}
	return r, []*os.File{null, w, null, null}, nil
}

// errUpper is of an index as no Sentry makes it.
var errUpper = errors.New("the sandbox's kernel gave an index that is not one of an upper layer")

const (
	paxXattr    = "SCHILY.xattr."
	opaqueXattr = "trusted.overlay.opaque"

	pageSize     = 4096 // the Sentry's, the same on all architectures
	maxNames     = 256 << 20
	maxEntries   = 4 << 20
	maxDepth     = 1024
	maxXattrSize = 64 << 10 // XATTR_SIZE_MAX (linux/limits.h)
)

// upper makes a layer of a Sentry's index. What the index says is not trusted:
// a name is of one entry only and lies in a directory that an earlier entry
// made, so that no link can be in the way of anything; and no page is copied
// more often than the store has pages.
type upper struct {
	ctx   context.Context
	root  *os.Root
	store *os.File
	left  int64           // bytes of the store that files can still be made of
	names int64           // bytes of all names
	seen  map[string]byte // the type of each entry
	files []madeFile      // in the order in which they were made
	buf   []byte
}

// madeFile is a file of the layer that is no whiteout; of several links, one.
type madeFile struct {
	name string
	kind byte
	time time.Time // it is set in the end
}

func newUpper(ctx context.Context, store *os.File, dir string) (*upper, error) {
	fi, err := store.Stat()
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &upper{ctx: ctx, root: root, store: store, left: fi.Size(), seen: map[string]byte{}, buf: make([]byte, 256<<10)}, nil
}

// extract makes the files of the index r.
func (u *upper) extract(r io.Reader) error {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) && n > 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read the index: %w", err)
		}
		if u.names += int64(len(h.Name)); n >= maxEntries || u.names > maxNames {
			return sandbox.Errorf(sandbox.CodeTooLarge, "it has more than %d changed files, or names of more than %d MiB: build a template of it", maxEntries, maxNames>>20)
		}
		if err := u.entry(h, tr); err != nil {
			return fmt.Errorf("%.200q: %w", h.Name, err)
		}
	}
}

// finish sets the times, a directory's after those of what is in it, and
// flushes the layer to the disk.
func (u *upper) finish() error {
	for n := len(u.files) - 1; n >= 0; n-- {
		f := u.files[n]
		err := u.at(f.name, func(dir int, base string) error { return setTime(dir, base, f.time) })
		if err != nil {
			return fmt.Errorf("%.200q: %w", f.name, err)
		}
	}
	d, err := u.root.Open(".")
	if err != nil {
		return err
	}
	defer d.Close()
	return unix.Syncfs(int(d.Fd()))
}

// attributesWithin bounds the wait for the next attributes of a sandbox.
const attributesWithin = 30 * time.Second

// tracked are how many answers are read between two looks at the clock.
const tracked = 256

// exact takes the times and extended attributes of u's files from a program
// that runs in the sandbox.
func (i *Instance) exact(ctx context.Context, u *upper) error {
	namesR, names, err := pipe(true)
	if err != nil {
		return err
	}
	defer names.Close()
	defer namesR.Close()
	answers, answersW, err := pipe(false)
	if err != nil {
		return err
	}
	defer answers.Close()
	defer answersW.Close()
	defer context.AfterFunc(ctx, func() {
		names.SetWriteDeadline(time.Unix(1, 0))
		answers.SetReadDeadline(time.Unix(1, 0))
	})()

	id := i.Spec().ID
	pid, err := i.d.runInside(ctx, id, inside{
		args: []string{attrs.Mode}, caps: capDACOverride | capDACReadSearch, stdin: namesR, stdout: answersW,
		begun: func() {
			namesR.Close()
			answersW.Close()
		},
	})
	if err != nil {
		return err
	}
	asked := make(chan error, 1)
	go func() {
		w := bufio.NewWriterSize(names, 64<<10)
		var err error
		for n := range u.files {
			if _, err = w.WriteString(u.files[n].name + "\x00"); err != nil {
				break
			}
		}
		asked <- errors.Join(err, w.Flush(), names.Close())
	}()
	err = u.take(answers)
	answers.Close() // after an error the program ends by it, and the asking with it
	if err := errors.Join(ctx.Err(), err, <-asked); err != nil {
		return fmt.Errorf("the times and attributes of its files: %w", err)
	}
	_, err = i.d.waitInside(ctx, id, pid)
	return err
}

// take reads the answers about u's files.
func (u *upper) take(answers *os.File) error {
	r := bufio.NewReaderSize(answers, 64<<10)
	for n := range u.files {
		if n%tracked == 0 && u.ctx.Err() == nil {
			answers.SetReadDeadline(time.Now().Add(attributesWithin))
		}
		a, err := attrs.Read(r)
		if err != nil {
			return err
		}
		f := &u.files[n]
		if !a.Found {
			continue
		}
		if d := a.Time.Sub(f.time); d < time.Second && d > -time.Second {
			f.time = a.Time
		}
		if len(a.Attrs) == 0 || (f.kind != tar.TypeReg && f.kind != tar.TypeDir) {
			continue
		}
		err = u.open(f.name, os.O_RDONLY, func(file *os.File) error {
			for k, v := range a.Attrs {
				if err := unix.Fsetxattr(int(file.Fd()), k, []byte(v), 0); err != nil {
					return fmt.Errorf("extended attribute %.100q: %w", k, err)
				}
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("%.200q: %w", f.name, err)
		}
	}
	return nil
}

// pipe makes a pipe of which one end blocks, the Sentry's, and the other ends
// with its deadline: what the host writes, or reads.
func pipe(hostWrites bool) (r, w *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	own := fds[0]
	if hostWrites {
		own = fds[1]
	}
	if err := unix.SetNonblock(own, true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

func (u *upper) entry(h *tar.Header, content io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if name == ".warren" || strings.HasPrefix(name, ".warren/") || name == "tmp/.warren" {
		return nil // Warren's own mount points
	}
	if _, dup := u.seen[name]; dup || (name != "." && u.seen[path.Dir(name)] != tar.TypeDir) {
		return errUpper
	}
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > 1<<32-2 || int64(h.Gid) > 1<<32-2 {
		return errUpper
	}
	u.seen[name] = h.Typeflag
	h.Name = name
	made := madeFile{name: name, kind: h.Typeflag, time: h.ModTime}
	switch h.Typeflag {
	case tar.TypeDir:
		if name != "." {
			if err := u.root.Mkdir(name, 0o700); err != nil {
				return err
			}
		}
		u.files = append(u.files, made)
		return u.open(name, os.O_RDONLY, func(f *os.File) error { return attributes(f, h) })
	case tar.TypeReg:
		u.files = append(u.files, made)
		return u.open(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, func(f *os.File) error {
			if err := u.content(f, h.Size, content); err != nil {
				return err
			}
			return attributes(f, h)
		})
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) >= unix.PathMax || strings.IndexByte(h.Linkname, 0) >= 0 {
			return errUpper
		}
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		u.files = append(u.files, made)
		return u.at(name, func(dir int, base string) error {
			return unix.Fchownat(dir, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW)
		})
	case tar.TypeLink:
		target, err := cleanName(h.Linkname)
		if err != nil {
			return err
		}
		kind := u.seen[target]
		if kind == 0 || kind == tar.TypeDir {
			return errUpper
		}
		u.seen[name] = kind
		return u.root.Link(target, name)
	case tar.TypeFifo:
		u.files = append(u.files, made)
		return u.node(h, unix.S_IFIFO)
	case tar.TypeChar, tar.TypeBlock:
		// 0:0, a whiteout. The sandbox's kernel lets its root make any other
		// device, which would be a real one on the host: none gets there, and
		// nothing of a lower layer shows in its place either.
		return u.node(h, unix.S_IFCHR)
	}
	return errUpper
}

// cleanName makes an entry's name relative to the layer's root, which is ".".
func cleanName(name string) (string, error) {
	clean := path.Clean(name)
	if !strings.HasPrefix(name, ".") || path.IsAbs(clean) || clean == ".." || strings.HasPrefix(clean, "../") ||
		strings.IndexByte(name, 0) >= 0 || strings.Count(clean, "/") > maxDepth {
		return "", errUpper
	}
	return clean, nil
}

func (u *upper) open(name string, flags int, f func(*os.File) error) error {
	file, err := u.root.OpenFile(name, flags|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f(file), file.Close())
}

// at gives the directory of an entry and its name there.
func (u *upper) at(name string, f func(dir int, base string) error) error {
	d, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer d.Close()
	return f(int(d.Fd()), path.Base(name))
}

func (u *upper) node(h *tar.Header, kind uint32) error {
	return u.at(h.Name, func(dir int, base string) error {
		if err := unix.Mknodat(dir, base, kind|0o600, 0); err != nil {
			return err
		}
		if err := unix.Fchownat(dir, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		// It was made just now, in a directory that nobody else has.
		return unix.Fchmodat(dir, base, uint32(h.Mode)&0o7777, 0)
	})
}

// content makes a file's content of its entry in the index: the size, and for
// each part that is no hole its start and end in the file and its start in the
// store (tmpfs.fsckptRegularFile), all in little-endian 64 bits.
func (u *upper) content(f *os.File, entry int64, index io.Reader) error {
	var word [24]byte
	if entry < 8 || (entry-8)%24 != 0 {
		return errUpper
	}
	if _, err := io.ReadFull(index, word[:8]); err != nil {
		return err
	}
	size := binary.LittleEndian.Uint64(word[:])
	if size > 1<<62 {
		return errUpper
	}
	if err := f.Truncate(int64(size)); err != nil {
		return err
	}
	end := uint64(0)
	for range (entry - 8) / 24 {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		if _, err := io.ReadFull(index, word[:]); err != nil {
			return err
		}
		from, to, at := binary.LittleEndian.Uint64(word[:]), binary.LittleEndian.Uint64(word[8:]), binary.LittleEndian.Uint64(word[16:])
		if from < end || to <= from || (from|to|at)%pageSize != 0 || to-from > uint64(u.left) || at > 1<<62 {
			return errUpper
		}
		end = to
		u.left -= int64(to - from)
		if from >= size { // pages that were allocated beyond the end
			continue
		}
		if err := u.part(f, int64(at), int64(from), int64(min(to, size)-from)); err != nil {
			return err
		}
	}
	return nil
}

// part makes n bytes of f at to, of those of the store at from: both are at a
// page's start.
func (u *upper) part(f *os.File, from, to, n int64) error {
	whole := n &^ (pageSize - 1)
	if whole > 0 {
		err := unix.IoctlFileCloneRange(int(f.Fd()), &unix.FileCloneRange{
			Src_fd: int64(u.store.Fd()), Src_offset: uint64(from), Src_length: uint64(whole), Dest_offset: uint64(to),
		})
		if err == nil {
			from, to, n = from+whole, to+whole, n-whole
		}
	}
	for n > 0 {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		buf := u.buf[:min(n, int64(len(u.buf)))]
		got, err := u.store.ReadAt(buf, from)
		if got == 0 {
			if errors.Is(err, io.EOF) {
				return nil // never written: a hole
			}
			return err
		}
		if buf = buf[:got]; !zero(buf) {
			if _, err := f.WriteAt(buf, to); err != nil {
				return err
			}
		}
		from, to, n = from+int64(got), to+int64(got), n-int64(got)
	}
	return nil
}

func zero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// attributes sets owner, mode and extended attributes, in the order in which
// none undoes another.
func attributes(f *os.File, h *tar.Header) error {
	fd := int(f.Fd())
	if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
		return err
	}
	if err := unix.Fchmod(fd, uint32(h.Mode)&0o7777); err != nil {
		return err
	}
	for k, v := range h.PAXRecords {
		key, ok := strings.CutPrefix(k, paxXattr)
		if !ok || !keepsXattr(key, v) {
			continue // nothing else has a meaning in a layer
		}
		if err := unix.Fsetxattr(fd, key, []byte(v), 0); err != nil {
			return fmt.Errorf("extended attribute %.100q: %w", key, err)
		}
	}
	return nil
}

func keepsXattr(key, value string) bool {
	switch {
	case key == opaqueXattr:
		return value == "y"
	case len(value) > maxXattrSize:
		return false
	}
	return attrs.Kept(key)
}

// setTime sets both times of what is not followed. Those that a filesystem may
// not hold are brought into 1970 … 2242.
func setTime(dir int, name string, t time.Time) error {
	ts := unix.Timespec{Sec: min(max(t.Unix(), 0), 1<<33), Nsec: int64(t.Nanosecond())}
	return unix.UtimesNanoAt(dir, name, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}
