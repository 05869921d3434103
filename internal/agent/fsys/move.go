package fsys

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// move renames src to dst. Where they are on different filesystems (which for
// overlayfs is so for every directory of the template), it copies src beside
// dst, renames that, and removes src.
func move(src, dst string) error {
	err := os.Rename(src, dst)
	if !errors.Is(err, syscall.EXDEV) {
		return err
	}
	if dst == src || strings.HasPrefix(dst, src+"/") {
		return &fs.PathError{Op: "move", Path: dst, Err: syscall.EINVAL}
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dst), UploadPrefix+"n-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	copied := filepath.Join(tmp, "x")
	if err := copyTree(src, copied); err != nil {
		return err
	}
	if err := os.Rename(copied, dst); err != nil {
		return err
	}
	return os.RemoveAll(src)
}

// copyTree copies src to dst, which does not exist, with owners, modes, times
// and user attributes. It refuses what is neither file, directory, link nor
// pipe.
func copyTree(src, dst string) error {
	st, err := os.Lstat(src)
	if err != nil {
		return err
	}
	sys, _ := st.Sys().(*syscall.Stat_t)
	switch m := st.Mode(); {
	case m.IsRegular():
		err = copyFile(src, dst)
	case m.IsDir():
		err = copyDir(src, dst)
	case m&fs.ModeSymlink != 0:
		var target string
		if target, err = os.Readlink(src); err == nil {
			err = os.Symlink(target, dst)
		}
	case m&fs.ModeNamedPipe != 0:
		err = unix.Mkfifo(dst, 0o600)
	default:
		return fmt.Errorf("cannot move %s to another filesystem: it is a device or a socket", src)
	}
	if err != nil {
		return err
	}
	if err := Own(dst, int(sys.Uid), int(sys.Gid)); err != nil {
		return err
	}
	if st.Mode()&fs.ModeSymlink == 0 {
		copyAttrs(src, dst)
		if err := unix.Chmod(dst, sys.Mode&0o7777); err != nil {
			return &fs.PathError{Op: "chmod", Path: dst, Err: err}
		}
	}
	times := []unix.Timespec{unix.Timespec(sys.Atim), unix.Timespec(sys.Mtim)}
	return unix.UtimesNanoAt(unix.AT_FDCWD, dst, times, unix.AT_SYMLINK_NOFOLLOW)
}

func copyFile(src, dst string) error {
	in, err := os.OpenFile(src, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

func copyDir(src, dst string) error {
	if err := os.Mkdir(dst, 0o700); err != nil {
		return err
	}
	d, err := os.Open(src)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(512)
		for _, name := range names {
			if err := copyTree(filepath.Join(src, name), filepath.Join(dst, name)); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// copyAttrs copies the user.* attributes as far as dst's filesystem takes them.
func copyAttrs(src, dst string) {
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(src, names)
	if err != nil {
		return
	}
	value := make([]byte, 64<<10)
	for _, name := range strings.Split(string(names[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		if vn, err := unix.Lgetxattr(src, name, value); err == nil {
			unix.Lsetxattr(dst, name, value[:vn], 0)
		}
	}
}
