package fstree

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// copyXattrs copies all extended attributes. Paths through /proc/self/fd are
// followed to the open file; a last component beside it is not.
func copyXattrs(from, to string) error {
	list, get, set := unix.Llistxattr, unix.Lgetxattr, unix.Lsetxattr
	if opened(from) {
		list, get, set = unix.Listxattr, unix.Getxattr, unix.Setxattr
	}
	names, err := grow(func(buf []byte) (int, error) { return list(from, buf) })
	if errors.Is(err, unix.ENOTSUP) || len(names) == 0 && err == nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list extended attributes: %w", err)
	}
	for _, n := range bytes.Split(bytes.TrimSuffix(names, []byte{0}), []byte{0}) {
		name := string(n)
		if private(name) {
			continue
		}
		value, err := grow(func(buf []byte) (int, error) { return get(from, name, buf) })
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read extended attribute %q: %w", name, err)
		}
		if err := set(to, name, value, 0); err != nil {
			return fmt.Errorf("set extended attribute %q: %w", name, err)
		}
	}
	return nil
}

// private attributes tie a file to its place and would be wrong on a copy: the
// host's SELinux label, and overlayfs's notes of where a copy-up came from.
func private(name string) bool {
	switch name {
	case "security.selinux", "trusted.overlay.origin", "trusted.overlay.impure", "trusted.overlay.uuid", "trusted.overlay.nlink":
		return true
	}
	return false
}

func opened(path string) bool {
	rest, ok := strings.CutPrefix(path, "/proc/self/fd/")
	return ok && !strings.Contains(rest, "/")
}

// grow calls read with the size that it asks for.
func grow(read func(buf []byte) (int, error)) ([]byte, error) {
	for {
		n, err := read(nil)
		if err != nil || n == 0 {
			return nil, err
		}
		buf := make([]byte, n)
		n, err = read(buf)
		if errors.Is(err, unix.ERANGE) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}
