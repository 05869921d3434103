// Package fsys looks at and changes the sandbox's file tree for the filesystem
// service and the file calls: entries, directories, moves and watches.
//
// The agent works as root and gives what it makes to the user of the call.
// Paths are resolved by the kernel in the sandbox's own root, so symbolic links
// lead where they lead for everybody inside.
package fsys

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/proto/filesystem"
)

// UploadPrefix begins the names of the files that uploads are written to before
// they are renamed. Watches do not tell of them. The letter after it is
// 'n' where the target is new, and 'o' where one is replaced.
const UploadPrefix = ".warren-upload-"

// MetadataPrefix is the namespace of a file's metadata among its extended
// attributes; the interface's.
const MetadataPrefix = "user.e2b."

// EnsureDirs makes the directory path and its parents as far as they are
// missing, 0755, and gives what it makes to uid and gid.
func EnsureDirs(path string, uid, gid int) error {
	if st, err := os.Stat(path); err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: path, Err: syscall.ENOTDIR}
		}
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if parent := filepath.Dir(path); parent != path {
		if err := EnsureDirs(parent, uid, gid); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			if st, serr := os.Stat(path); serr == nil && st.IsDir() {
				return nil // made by somebody else meanwhile
			}
		}
		return err
	}
	return Own(path, uid, gid)
}

// Own gives path itself (not what it links to) to uid and gid. An agent that
// is not root can own only for itself, and leaves it so.
func Own(path string, uid, gid int) error {
	if os.Getuid() != 0 {
		return nil
	}
	return os.Lchown(path, uid, gid)
}

// Metadata reads the metadata of a file; none where its filesystem keeps none.
func Metadata(path string) map[string]string {
	names := make([]byte, 4096)
	n, err := unix.Listxattr(path, names)
	if errors.Is(err, unix.ERANGE) {
		if n, err = unix.Listxattr(path, nil); err != nil || n > 64<<10 {
			return nil
		}
		names = make([]byte, n)
		n, err = unix.Listxattr(path, names)
	}
	if err != nil || n == 0 {
		return nil
	}
	var m map[string]string
	for _, name := range strings.Split(string(names[:n]), "\x00") {
		key, ok := strings.CutPrefix(name, MetadataPrefix)
		if !ok || key == "" {
			continue
		}
		value := make([]byte, 8192)
		vn, err := unix.Getxattr(path, name, value)
		if err != nil {
			continue
		}
		if m == nil {
			m = map[string]string{}
		}
		m[valid(key)] = valid(string(value[:vn]))
	}
	return m
}

// valid makes s fit for a protobuf string; names on a disk need not be UTF-8.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// Entry describes path; of a symbolic link, with the type and mode of what it
// leads to. The error is the file system's.
func Entry(db *users.DB, path string) (*filesystem.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	return entry(db, path, st), nil
}

func entry(db *users.DB, path string, st fs.FileInfo) *filesystem.EntryInfo {
	e := &filesystem.EntryInfo{
		Name:         valid(filepath.Base(path)),
		Type:         fileType(st.Mode()),
		Path:         valid(path),
		Size:         st.Size(),
		Mode:         uint32(st.Mode().Perm()),
		Permissions:  st.Mode().String(),
		ModifiedTime: timestamppb.New(st.ModTime()),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = valid(db.UserName(int(sys.Uid))), valid(db.GroupName(int(sys.Gid)))
	}
	if st.Mode()&fs.ModeSymlink != 0 {
		target, err := filepath.EvalSymlinks(path)
		if err == nil {
			if tst, terr := os.Stat(target); terr == nil {
				e.Type, e.Mode = fileType(tst.Mode()), uint32(tst.Mode().Perm())
			}
		} else { // a broken link: as it is written
			target, _ = os.Readlink(path)
		}
		target = valid(target)
		e.SymlinkTarget = &target
	}
	if st.Mode().IsRegular() || st.IsDir() {
		e.Metadata = Metadata(path)
	}
	return e
}

func fileType(m fs.FileMode) filesystem.FileType {
	switch {
	case m.IsRegular():
		return filesystem.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}

// rpcError makes a Connect error of a file system's.
func rpcError(what string, err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = connect.CodeNotFound
	case errors.Is(err, fs.ErrExist), errors.Is(err, syscall.ENOTEMPTY):
		code = connect.CodeAlreadyExists
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		code = connect.CodePermissionDenied
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.EINVAL),
		errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.ENAMETOOLONG):
		code = connect.CodeInvalidArgument
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		code = connect.CodeResourceExhausted
	case errors.Is(err, syscall.EBUSY):
		code = connect.CodeFailedPrecondition
	}
	return connect.NewError(code, fmt.Errorf("%s: %w", what, err))
}
