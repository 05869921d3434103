package layer

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// clear removes what an earlier entry put at base.
func (x *extractor) clear(entry string, parent *os.File, base string) error {
	return x.failed(entry, removeAt(parent, base))
}

func (x *extractor) dir(entry, name string, parent *os.File, base string, m meta) error {
	mtime := m.mtime
	if x.nameBytes += int64(len(name)); x.nameBytes > x.lim.MaxNameBytes {
		return tooLarge("name_bytes", "the archive's directory names are longer than %d bytes together", x.lim.MaxNameBytes)
	}
	err := x.makeDir(entry, parent, base, m, false)
	x.dropParent() // it may have taken a symlink's place
	if err != nil {
		return err
	}
	x.dirs = append(x.dirs, dirTime{name, mtime})
	return nil
}

func (x *extractor) setDirTime(d dirTime) error {
	parent, err := inRoot(x.root, path.Dir(d.name))
	if isNotExist(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil // a later entry took its place
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := setTimes(parent, path.Base(d.name), d.mtime); err != nil && !isNotExist(err) {
		return err
	}
	return nil
}

func (x *extractor) file(h *tar.Header, parent *os.File, base string, m meta, content io.Reader) error {
	switch {
	case h.Size < 0:
		return invalid(h.Name, "its size is %d", h.Size)
	case h.Size > x.lim.MaxFileBytes:
		return tooLarge("file_bytes", "archive entry %s: a file of %d bytes; the most is %d", Quote(h.Name), h.Size, x.lim.MaxFileBytes)
	case h.Size > x.lim.MaxBytes-x.stats.Bytes:
		return tooLarge("bytes", "the archive's files are more than %d bytes together", x.lim.MaxBytes)
	}
	flags := uint64(unix.O_WRONLY | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW)
	f, err := create(parent, base, flags)
	if errors.Is(err, unix.EEXIST) {
		if err := x.clear(h.Name, parent, base); err != nil {
			return err
		}
		f, err = create(parent, base, flags)
	}
	if err != nil {
		return x.failed(h.Name, err)
	}
	defer f.Close()
	n, err := io.CopyBuffer(onlyWriter{f}, content, x.buf)
	x.stats.Bytes += n
	if err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			return x.failed(h.Name, err)
		}
		return readError(err)
	}
	if err := m.apply(f); err != nil {
		return x.failed(h.Name, err)
	}
	return x.failed(h.Name, f.Close())
}

// onlyWriter hides ReadFrom, which would not use the buffer.
type onlyWriter struct{ io.Writer }

func create(parent *os.File, base string, flags uint64) (*os.File, error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Mode: 0o600, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
	for {
		fd, err := unix.Openat2(int(parent.Fd()), base, &how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "create", Path: Quote(base), Err: err}
		}
		return os.NewFile(uintptr(fd), base), nil
	}
}

func (x *extractor) symlink(h *tar.Header, parent *os.File, base string, m meta) error {
	switch {
	case h.Linkname == "" || strings.IndexByte(h.Linkname, 0) >= 0:
		return invalid(h.Name, "it is a symlink to %s", Quote(h.Linkname))
	case len(h.Linkname) > x.lim.MaxPathBytes:
		return tooLarge("path_bytes", "archive entry %s: a symlink to a name of %d bytes; the most is %d", Quote(h.Name), len(h.Linkname), x.lim.MaxPathBytes)
	}
	if err := x.clear(h.Name, parent, base); err != nil {
		return err
	}
	// Where it leads is not looked at: nothing here follows it but in the
	// layer's own scope.
	if err := unix.Symlinkat(h.Linkname, int(parent.Fd()), base); err != nil {
		return x.failed(h.Name, err)
	}
	err := x.failed(h.Name, m.applyAt(parent, base, true))
	x.dropParent()
	return err
}

func (x *extractor) link(h *tar.Header, parent *os.File, base string) error {
	target, err := x.clean(h.Name, h.Linkname)
	if err != nil {
		return err
	}
	if target == "" {
		return invalid(h.Name, "it is a hard link to the root directory")
	}
	from, err := inRoot(x.root, path.Dir(target))
	if err != nil {
		if isNotExist(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
			return invalid(h.Name, "it is a hard link to %s, which this archive does not have before it", Quote(h.Linkname))
		}
		return x.failed(h.Name, err)
	}
	defer from.Close()
	st, err := lstatat(from, path.Base(target))
	switch {
	case isNotExist(err):
		return invalid(h.Name, "it is a hard link to %s, which this archive does not have before it", Quote(h.Linkname))
	case err != nil:
		return x.failed(h.Name, err)
	case isDir(st) || isWhiteout(st):
		return invalid(h.Name, "it is a hard link to %s, which is no file", Quote(h.Linkname))
	}
	if old, err := lstatat(parent, base); err == nil {
		if old.Ino == st.Ino && old.Dev == st.Dev {
			return nil // to itself
		}
		if isDir(old) {
			// Removing it could take the link's target with it.
			return invalid(h.Name, "it is a hard link in the place of a directory")
		}
		if err := x.clear(h.Name, parent, base); err != nil {
			return err
		}
	}
	return x.failed(h.Name, unix.Linkat(int(from.Fd()), path.Base(target), int(parent.Fd()), base, 0))
}

// whiteout converts an OCI layer's mark into overlayfs's.
func (x *extractor) whiteout(entry string, parent *os.File, base string) error {
	if base == whiteoutOpaque {
		dir, err := openat2(parent, ".", unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_BENEATH)
		if err != nil {
			return x.failed(entry, err)
		}
		defer dir.Close()
		return x.failed(entry, unix.Fsetxattr(int(dir.Fd()), opaqueXattr, []byte("y"), 0))
	}
	if strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	name := strings.TrimPrefix(base, whiteoutPrefix)
	if name == "" || name == "." || name == ".." {
		return invalid(entry, "it marks %s as removed, which is no file's name", Quote(name))
	}
	st, err := lstatat(parent, name)
	switch {
	case isNotExist(err):
		// The mark is 0:0, which the kernel lets anybody make.
		return x.failed(entry, unix.Mknodat(int(parent.Fd()), name, unix.S_IFCHR, 0))
	case err != nil:
		return x.failed(entry, err)
	case !isDir(st):
		return nil // what this layer has hides the lower ones' anyway
	}
	// A mark counts for lower layers only: this layer's own directory stays.
	dir, err := openat2(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_BENEATH)
	if err != nil {
		return x.failed(entry, err)
	}
	defer dir.Close()
	return x.failed(entry, unix.Fsetxattr(int(dir.Fd()), opaqueXattr, []byte("y"), 0))
}
