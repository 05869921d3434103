// Package beneath works on files under a directory without ever leaving it,
// whatever symbolic links are there.
//
// It is what os.Root is, for inside a sandbox: os.Root opens each element of a
// path with O_NOFOLLOW|O_DIRECTORY and trusts that a link is refused, but
// gVisor follows it then, and so out of the root (seen with release 20260905).
// Here each element is opened with O_PATH|O_NOFOLLOW, and fstat tells whether
// it is a directory or a link; the two kernels agree on that.
package beneath

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrEscapes is that a path, or a link in it, leads out of the root.
var ErrEscapes = errors.New("the path leads out of the directory")

const (
	maxLinks = 40   // followed in one path, as by the kernel
	maxSteps = 4096 // elements looked at in one path
)

// Root is a directory. Names are relative to it, with slashes. Links in the
// middle of a name are followed while they stay beneath the root (absolute
// ones do so only beneath "/"); the last element's own is never followed. It is
// not safe for concurrent use.
type Root struct {
	fd    int
	slash bool // it is "/"

	lastDir string // the parent that was opened last, which the next name often has too
	lastFD  int
}

// Open opens the directory dir itself, through links. Close it.
func Open(dir string) (*Root, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	return &Root{fd: fd, slash: path.Clean(dir) == "/", lastFD: -1}, nil
}

// Close closes the root.
func (r *Root) Close() error {
	r.forget()
	return unix.Close(r.fd)
}

func (r *Root) forget() {
	if r.lastFD >= 0 {
		unix.Close(r.lastFD)
		r.lastFD = -1
	}
}

func fail(op, name string, err error) error {
	return &fs.PathError{Op: op, Path: name, Err: err}
}

// parent gives a descriptor of the directory that name is in, which stays the
// root's, and name's last element.
func (r *Root) parent(name string) (int, string, error) {
	name = path.Clean(name)
	if name == "." {
		return r.fd, ".", nil
	}
	dir, base := path.Split(name)
	dir = strings.TrimSuffix(dir, "/")
	if base == ".." || path.IsAbs(name) {
		return -1, "", ErrEscapes
	}
	if dir == "" {
		return r.fd, base, nil
	}
	if r.lastFD >= 0 && r.lastDir == dir {
		return r.lastFD, base, nil
	}
	fd, err := r.walk(dir)
	if err != nil {
		return -1, "", err
	}
	r.forget()
	r.lastDir, r.lastFD = dir, fd
	return fd, base, nil
}

// walk opens a directory beneath the root with O_PATH.
func (r *Root) walk(dir string) (int, error) {
	todo := strings.Split(dir, "/")
	stack := []int{r.fd} // the directories from the root on
	pop := func() {
		unix.Close(stack[len(stack)-1])
		stack = stack[:len(stack)-1]
	}
	fail := func(err error) (int, error) {
		for len(stack) > 1 {
			pop()
		}
		return -1, err
	}
	links := 0
	for steps := 0; len(todo) > 0; steps++ {
		name := todo[0]
		todo = todo[1:]
		if steps >= maxSteps {
			return fail(unix.ENAMETOOLONG)
		}
		switch name {
		case "", ".":
			continue
		case "..":
			switch {
			case len(stack) > 1:
				pop()
			case !r.slash:
				return fail(ErrEscapes)
			}
			continue
		}
		at := stack[len(stack)-1]
		fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fail(err)
		}
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			unix.Close(fd)
			return fail(err)
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
			stack = append(stack, fd)
			continue
		case unix.S_IFLNK:
			unix.Close(fd)
		default:
			unix.Close(fd)
			return fail(unix.ENOTDIR)
		}
		if links++; links > maxLinks {
			return fail(unix.ELOOP)
		}
		target, err := readlinkat(at, name)
		if err != nil {
			return fail(err)
		}
		if path.IsAbs(target) {
			if !r.slash {
				return fail(ErrEscapes)
			}
			for len(stack) > 1 {
				pop()
			}
		}
		todo = append(strings.Split(target, "/"), todo...)
	}
	if len(stack) == 1 {
		return unix.FcntlInt(uintptr(r.fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	for _, fd := range stack[1 : len(stack)-1] {
		unix.Close(fd)
	}
	return stack[len(stack)-1], nil
}

func readlinkat(at int, name string) (string, error) {
	buf := make([]byte, 4097)
	n, err := unix.Readlinkat(at, name, buf)
	if err == nil && n == len(buf) {
		err = unix.ENAMETOOLONG
	}
	return string(buf[:max(n, 0)]), err
}

// at calls f with name's parent and last element.
func (r *Root) at(op, name string, f func(fd int, base string) error) error {
	fd, base, err := r.parent(name)
	if err == nil {
		err = f(fd, base)
	}
	if err != nil {
		return fail(op, name, err)
	}
	return nil
}

// Lstat describes name itself.
func (r *Root) Lstat(name string) (st unix.Stat_t, err error) {
	err = r.at("lstat", name, func(fd int, base string) error {
		return unix.Fstatat(fd, base, &st, unix.AT_SYMLINK_NOFOLLOW)
	})
	return st, err
}

// IsDir tells whether name is a directory, or a link to one beneath the root.
// The error is that of looking.
func (r *Root) IsDir(name string) (bool, error) {
	fd, err := r.walk(path.Clean(name))
	if err == nil {
		unix.Close(fd)
		return true, nil
	}
	if err == unix.ENOTDIR {
		return false, nil
	}
	return false, fail("stat", name, err)
}

// Open opens name for reading. It does not wait, as opening a pipe would, and
// says ELOOP of a link.
func (r *Root) Open(name string) (f *os.File, err error) {
	return r.openFile(name, unix.O_RDONLY|unix.O_NONBLOCK, 0)
}

// Create makes the file name, which must not be there, for writing.
func (r *Root) Create(name string, mode uint32) (*os.File, error) {
	return r.openFile(name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, mode)
}

func (r *Root) openFile(name string, flags int, mode uint32) (f *os.File, err error) {
	err = r.at("open", name, func(fd int, base string) error {
		// Never with O_DIRECTORY: see the package's comment.
		got, err := unix.Openat(fd, base, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, mode)
		if err == nil {
			f = os.NewFile(uintptr(got), name)
		}
		return err
	})
	return f, err
}

// Readlink reads the link name.
func (r *Root) Readlink(name string) (target string, err error) {
	err = r.at("readlink", name, func(fd int, base string) error {
		target, err = readlinkat(fd, base)
		return err
	})
	return target, err
}

// Mkdir makes a directory.
func (r *Root) Mkdir(name string, mode uint32) error {
	return r.at("mkdir", name, func(fd int, base string) error { return unix.Mkdirat(fd, base, mode) })
}

// Symlink makes a link to target, which may be anything.
func (r *Root) Symlink(target, name string) error {
	return r.at("symlink", name, func(fd int, base string) error { return unix.Symlinkat(target, fd, base) })
}

// Link makes name another name of the file old, which is not followed.
func (r *Root) Link(old, name string) error {
	ofd, obase, err := r.parent(old)
	if err != nil {
		return fail("link", old, err)
	}
	if ofd == r.lastFD { // the next parent may close it
		if ofd, err = unix.FcntlInt(uintptr(ofd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
			return fail("link", old, err)
		}
		defer unix.Close(ofd)
	}
	return r.at("link", name, func(fd int, base string) error { return unix.Linkat(ofd, obase, fd, base, 0) })
}

// Remove removes what is not a directory.
func (r *Root) Remove(name string) error {
	return r.at("remove", name, func(fd int, base string) error { return unix.Unlinkat(fd, base, 0) })
}

// Lchown gives name itself to uid and gid.
func (r *Root) Lchown(name string, uid, gid int) error {
	return r.at("chown", name, func(fd int, base string) error {
		return unix.Fchownat(fd, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW)
	})
}

// ChmodDir changes the mode of the directory name.
func (r *Root) ChmodDir(name string, mode uint32) error {
	f, err := r.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fail("chmod", name, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return fail("chmod", name, unix.ENOTDIR)
	}
	if err := unix.Fchmod(int(f.Fd()), mode); err != nil {
		return fail("chmod", name, err)
	}
	return nil
}

// SetModTime sets the time of the last change of name itself.
func (r *Root) SetModTime(name string, t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return fail("chtimes", name, syscall.EINVAL)
	}
	return r.at("chtimes", name, func(fd int, base string) error {
		return unix.UtimesNanoAt(fd, base, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, ts}, unix.AT_SYMLINK_NOFOLLOW)
	})
}
