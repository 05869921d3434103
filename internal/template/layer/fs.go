package layer

import (
	"errors"
	"os"
	"path"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// opaqueXattr marks a directory that hides its namesakes in lower layers.
// Source: the kernel's Documentation/filesystems/overlayfs.rst.
const opaqueXattr = "trusted.overlay.opaque"

// openDir opens a directory to list it and to resolve names in it.
func openDir(dir string) (*os.File, error) {
	return os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
}

// openat2 opens name under dir with the kernel's own scoping. It tries again
// where the kernel asks for that because something was renamed meanwhile.
func openat2(dir *os.File, name string, flags, resolve uint64) (*os.File, error) {
	if name == "" {
		name = "."
	}
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(int(dir.Fd()), name, &how)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), name), nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN) && try < 32:
			continue
		}
		return nil, &os.PathError{Op: "openat2", Path: Quote(name), Err: err}
	}
}

// inRoot resolves name as a process would whose root directory is dir:
// symlinks are followed, and none leads out.
func inRoot(dir *os.File, name string) (*os.File, error) {
	return openat2(dir, name, unix.O_PATH, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS)
}

// strict opens name under dir, where no component may be a symlink.
func strict(dir *os.File, name string, flags uint64) (*os.File, error) {
	return openat2(dir, name, flags|unix.O_NOFOLLOW, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_MAGICLINKS)
}

func lstatat(dir *os.File, name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	err := ignoringEINTR(func() error { return unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW) })
	return st, err
}

func ignoringEINTR(f func() error) error {
	for {
		if err := f(); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func isDir(st unix.Stat_t) bool     { return st.Mode&unix.S_IFMT == unix.S_IFDIR }
func isRegular(st unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFREG }
func isSymlink(st unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFLNK }

// isWhiteout tells whether st is overlayfs's mark of a name that lower layers
// no longer have.
func isWhiteout(st unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// meta is what a file has besides its content.
type meta struct {
	mode     uint32 // permission bits, setuid, setgid and sticky
	uid, gid int
	mtime    time.Time // zero leaves it
	xattrs   map[string]string
}

func metaOf(st unix.Stat_t) meta {
	return meta{mode: uint32(st.Mode & 0o7777), uid: int(st.Uid), gid: int(st.Gid), mtime: time.Unix(int64(st.Mtim.Sec), int64(st.Mtim.Nsec))}
}

// apply sets m on an open file or directory. The order matters: a change of
// owner clears the setuid bits and security.capability.
func (m meta) apply(f *os.File) error {
	fd := int(f.Fd())
	if err := unix.Fchown(fd, m.uid, m.gid); err != nil {
		return err
	}
	for k, v := range m.xattrs {
		if err := unix.Fsetxattr(fd, k, []byte(v), 0); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(fd, m.mode); err != nil {
		return err
	}
	if m.mtime.IsZero() {
		return nil
	}
	return setTimes(f, "", m.mtime)
}

// applyAt sets owner, mode and time on an entry that cannot be opened (a
// fifo) or has no mode (a symlink).
func (m meta) applyAt(dir *os.File, name string, symlink bool) error {
	if err := unix.Fchownat(int(dir.Fd()), name, m.uid, m.gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if !symlink {
		// The entry was made a moment ago in a directory that only this
		// process writes, so that following is not a danger.
		if err := unix.Fchmodat(int(dir.Fd()), name, m.mode, 0); err != nil {
			return err
		}
	}
	if m.mtime.IsZero() {
		return nil
	}
	return setTimes(dir, name, m.mtime)
}

// setTimes sets both times of name in dir, or of dir itself where name is "".
// Times that a filesystem may not be able to hold are brought into 1970 …
// 2242.
func setTimes(dir *os.File, name string, t time.Time) error {
	sec := min(max(t.Unix(), 0), 1<<33)
	ts := []unix.Timespec{{Sec: sec, Nsec: int64(t.Nanosecond())}, {Sec: sec, Nsec: int64(t.Nanosecond())}}
	if name == "" {
		return unix.UtimesNanoAt(unix.AT_FDCWD, procPath(dir), ts, 0)
	}
	return unix.UtimesNanoAt(int(dir.Fd()), name, ts, unix.AT_SYMLINK_NOFOLLOW)
}

// procPath names what f has open, for calls that take no descriptor.
func procPath(f *os.File) string { return path.Join("/proc/self/fd", strconv.Itoa(int(f.Fd()))) }
