// Package fstree copies directory trees as they are: overlayfs whiteouts,
// extended attributes, owners, times, hard links and holes included, and by
// reflink where the filesystem has them.
package fstree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Options of Copy.
type Options struct {
	// Skip leaves out what it is true for, with all below. Paths are relative
	// to the source, with slashes.
	Skip func(path string) bool
}

// Copy makes dst, which must not exist, a copy of the directory src, and
// flushes it to the disk. Nothing in src may change meanwhile, though nothing
// worse than a wrong copy comes of it: no link in src is ever followed. On
// error dst is removed again.
func Copy(ctx context.Context, src, dst string, o Options) error {
	if err := os.Mkdir(dst, 0o700); err != nil {
		return err
	}
	err := copyInto(ctx, src, dst, o)
	if err != nil {
		return errors.Join(err, os.RemoveAll(dst))
	}
	return nil
}

// Error makes an Error of a failed copy: CodeDiskFull where the disk is full.
func Error(err error, format string, args ...any) error {
	code := sandbox.CodeInternal
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code = sandbox.CodeDiskFull
	case errors.Is(err, context.Canceled):
		code = sandbox.CodeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		code = sandbox.CodeTimeout
	}
	return sandbox.Errorf(code, format+": %w", append(args, err)...)
}

func copyInto(ctx context.Context, src, dst string, o Options) error {
	c := &copier{ctx: ctx, o: o, links: map[inode]string{}, buf: make([]byte, 256<<10)}
	root, err := os.Open(src)
	if err != nil {
		return err
	}
	defer root.Close()
	out, err := os.Open(dst)
	if err != nil {
		return err
	}
	defer out.Close()
	c.top = out
	if err := c.dir(root, out, "."); err != nil {
		return err
	}
	// One flush of the whole filesystem is cheaper than one for each file, and
	// covers the directories and the links.
	if err := unix.Syncfs(int(out.Fd())); err != nil {
		return fmt.Errorf("flush %s: %w", dst, err)
	}
	return nil
}

type inode struct{ dev, ino uint64 }

type copier struct {
	ctx   context.Context
	o     Options
	top   *os.File         // the copy's root
	links map[inode]string // of several links: the first's path under top
	buf   []byte
}

// dir copies what is in the open directory from into the open directory to,
// and then its attributes.
func (c *copier) dir(from, to *os.File, rel string) error {
	for {
		names, err := from.Readdirnames(256)
		for _, name := range names {
			if err := c.ctx.Err(); err != nil {
				return err
			}
			p := path.Join(rel, name)
			if c.o.Skip != nil && c.o.Skip(p) {
				continue
			}
			if err := c.entry(from, to, name, p); err != nil {
				return fmt.Errorf("%s: %w", p, err)
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &st); err != nil {
		return err
	}
	return attributes(from, to, &st)
}

func (c *copier) entry(from, to *os.File, name, rel string) error {
	ffd, tfd := int(from.Fd()), int(to.Fd())
	var st unix.Stat_t
	if err := unix.Fstatat(ffd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	kind := st.Mode & unix.S_IFMT
	if kind != unix.S_IFDIR && st.Nlink > 1 {
		key := inode{uint64(st.Dev), st.Ino}
		if first, ok := c.links[key]; ok {
			return unix.Linkat(int(c.top.Fd()), first, tfd, name, 0)
		}
		c.links[key] = rel
	}
	switch kind {
	case unix.S_IFDIR:
		if err := unix.Mkdirat(tfd, name, 0o700); err != nil {
			return err
		}
		return c.both(ffd, tfd, name, unix.O_RDONLY|unix.O_DIRECTORY, unix.O_RDONLY|unix.O_DIRECTORY, func(a, b *os.File) error {
			return c.dir(a, b, rel)
		})
	case unix.S_IFREG:
		return c.both(ffd, tfd, name, unix.O_RDONLY|unix.O_NONBLOCK, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, func(a, b *os.File) error {
			if err := c.data(a, b, st.Size); err != nil {
				return err
			}
			return attributes(a, b, &st)
		})
	case unix.S_IFLNK:
		target := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(ffd, name, target)
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(string(target[:n]), tfd, name); err != nil {
			return err
		}
		return attributesAt(from, to, name, &st)
	case unix.S_IFCHR, unix.S_IFBLK, unix.S_IFIFO, unix.S_IFSOCK:
		// A whiteout is the character device 0/0; no other device can be made
		// inside, but copying one does no more than the source has.
		if err := unix.Mknodat(tfd, name, st.Mode, int(st.Rdev)); err != nil {
			return err
		}
		return attributesAt(from, to, name, &st)
	}
	return fmt.Errorf("file type %#o is not known", kind)
}

// both opens name in two directories, never through a link.
func (c *copier) both(ffd, tfd int, name string, fflags, tflags int, f func(a, b *os.File) error) error {
	a, err := unix.Openat(ffd, name, fflags|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if err != nil {
		return err
	}
	from := os.NewFile(uintptr(a), name)
	defer from.Close()
	b, err := unix.Openat(tfd, name, tflags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	to := os.NewFile(uintptr(b), name)
	err = f(from, to)
	return errors.Join(err, to.Close())
}

// data copies a file's content: by reflink, else its parts that are not holes.
func (c *copier) data(from, to *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	ffd, tfd := int(from.Fd()), int(to.Fd())
	if unix.IoctlFileClone(tfd, ffd) == nil {
		return nil
	}
	if err := to.Truncate(size); err != nil {
		return err
	}
	for at := int64(0); at < size; {
		start, err := unix.Seek(ffd, at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // holes to the end
		}
		if err != nil {
			return err
		}
		end, err := unix.Seek(ffd, start, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := c.extent(from, to, start, min(end, size)); err != nil {
			return err
		}
		at = end
	}
	return nil
}

func (c *copier) extent(from, to *os.File, at, end int64) error {
	for at < end {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		n, err := from.ReadAt(c.buf[:min(int64(len(c.buf)), end-at)], at)
		if n == 0 {
			if err == io.EOF {
				return nil // it shrank
			}
			return err
		}
		if _, err := to.WriteAt(c.buf[:n], at); err != nil {
			return err
		}
		at += int64(n)
	}
	return nil
}

// attributes gives to the owner, mode, extended attributes and times of from,
// in the order in which none undoes another: a change of owner clears the
// setuid bits and file capabilities.
func attributes(from, to *os.File, st *unix.Stat_t) error {
	tfd := int(to.Fd())
	if err := unix.Fchown(tfd, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Fchmod(tfd, st.Mode&0o7777); err != nil {
		return err
	}
	if err := copyXattrs(procPath(from), procPath(to)); err != nil {
		return err
	}
	return setTimes(unix.AT_FDCWD, procPath(to), st, 0)
}

// attributesAt does the same for what cannot be opened.
func attributesAt(from, to *os.File, name string, st *unix.Stat_t) error {
	tfd := int(to.Fd())
	if err := unix.Fchownat(tfd, name, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Fchmodat(tfd, name, st.Mode&0o7777, 0); err != nil {
			return err
		}
	}
	err := copyXattrs(filepath.Join(procPath(from), name), filepath.Join(procPath(to), name))
	if err != nil {
		return err
	}
	return setTimes(tfd, name, st, unix.AT_SYMLINK_NOFOLLOW)
}

func setTimes(dirfd int, path string, st *unix.Stat_t, flags int) error {
	return unix.UtimesNanoAt(dirfd, path, []unix.Timespec{st.Atim, st.Mtim}, flags)
}

func procPath(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }
