package layer

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// overlayNotes are attributes that the kernel leaves in an upper directory for
// itself. They mean nothing in a lower one: origin and impure tell where a
// copy came from, nlink and uuid belong to an index. Source: the kernel's
// fs/overlayfs/overlayfs.h.
var overlayNotes = map[string]bool{
	"trusted.overlay.origin": true, "trusted.overlay.impure": true,
	"trusted.overlay.nlink": true, "trusted.overlay.uuid": true, "trusted.overlay.upper": true,
}

func isOverlayNote(name string) bool { return overlayNotes[name] }

func hasOverlayPrefix(name string) bool {
	return strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.")
}

func isUserXattr(name string) bool {
	return strings.HasPrefix(name, "user.") && !hasOverlayPrefix(name)
}

// copiedXattr tells whether a copy of a file keeps the attribute.
func copiedXattr(name string) bool { return name == "security.capability" || isUserXattr(name) }

// readXattrs reads all of f's attributes. A filesystem without any has none.
func readXattrs(f *os.File) (map[string]string, error) {
	fd := int(f.Fd())
	buf := make([]byte, 1024)
	n, err := unix.Flistxattr(fd, buf)
	if errors.Is(err, unix.ERANGE) {
		buf = make([]byte, 64<<10) // XATTR_LIST_MAX
		n, err = unix.Flistxattr(fd, buf)
	}
	if errors.Is(err, unix.EOPNOTSUPP) || (err == nil && n == 0) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00") {
		v, err := readXattr(f, name)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all[name] = v
	}
	return all, nil
}

func readXattr(f *os.File, name string) (string, error) {
	buf := make([]byte, 256)
	n, err := unix.Fgetxattr(int(f.Fd()), name, buf)
	if errors.Is(err, unix.ERANGE) {
		buf = make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err = unix.Fgetxattr(int(f.Fd()), name, buf)
	}
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}
