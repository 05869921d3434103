package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// ExtractOptions say how Extract reads an archive.
type ExtractOptions struct {
	Limits Limits
	// Whiteouts makes .wh. entries what they mean in an OCI layer. Without it
	// they are files like others.
	Whiteouts bool
	// Root gives every entry to uid and gid 0 (a build context).
	Root bool
	// Warn takes what was left out and why, once per kind. nil drops it.
	Warn func(string)
}

// OCI layers' marks. Source: image-spec, layer.md, "Whiteouts".
const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	whiteoutMeta   = ".wh..wh." // aufs's own files: never content
)

const paxXattr = "SCHILY.xattr."

// extractor writes one archive below root. Only it writes there.
type extractor struct {
	ctx   context.Context
	root  *os.File
	o     ExtractOptions
	lim   Limits
	stats Stats
	buf   []byte

	// The last parent directory used: archives list a directory's entries
	// together. Anything but a new file in it drops it.
	parentPath string
	parent     *os.File

	dirs      []dirTime // times to set at the end: later entries change them
	nameBytes int64
	warned    map[string]bool
}

type dirTime struct {
	name  string
	mtime time.Time
}

// Extract reads an uncompressed tar stream to its end and makes it a layer in
// dir, which must not exist. On error dir may be half made; the caller removes
// it.
//
// Nothing is written outside dir: a name with "..", and a link out of it, is
// refused (CodeInvalid); a symlink inside is followed as a process with dir as
// its root directory would. Devices are left out with a warning, and
// trusted.* attributes are refused: they would speak for overlayfs. Exceeding
// a limit is CodeTooLarge with the limit's name in Details["limit"].
func Extract(ctx context.Context, r io.Reader, dir string, o ExtractOptions) (Stats, error) {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return Stats{}, Error("make the layer's directory", err)
	}
	root, err := openDir(dir)
	if err != nil {
		return Stats{}, Error("open the layer's directory", err)
	}
	defer root.Close()
	if err := root.Chmod(0o755); err != nil { // whatever the umask is
		return Stats{}, Error("make the layer's directory", err)
	}
	x := &extractor{ctx: ctx, root: root, o: o, lim: o.Limits.filled(), buf: make([]byte, 256<<10), warned: map[string]bool{}}
	defer x.dropParent()
	tr := tar.NewReader(WithContext(ctx, r))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.Is(err, io.ErrUnexpectedEOF) && x.stats.Entries == 0 {
			err = tar.ErrHeader // shorter than any archive
		}
		if err != nil {
			return x.stats, readError(err)
		}
		if err := x.entry(h, tr); err != nil {
			return x.stats, err
		}
	}
	for i := len(x.dirs) - 1; i >= 0; i-- {
		if err := x.setDirTime(x.dirs[i]); err != nil {
			return x.stats, Error("set a directory's time", err)
		}
	}
	// What follows the archive's end is padding; it counts for the digests
	// that the caller takes of the stream.
	n, err := io.Copy(io.Discard, io.LimitReader(WithContext(ctx, r), maxTrailer+1))
	if err != nil {
		return x.stats, readError(err)
	}
	if n > maxTrailer {
		return x.stats, tooLarge("trailer", "the archive goes on for more than %d bytes after its end", maxTrailer)
	}
	return x.stats, nil
}

// maxTrailer is how much may follow an archive's end: tar pads to its record
// size, which is 10 KiB by default and up to 1 MiB in use.
const maxTrailer = 16 << 20

// NotTar is in the message of the error for a stream that is no archive at
// all.
const NotTar = "not a valid tar stream"

func readError(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return Error("read the archive", err)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the archive ends early: it is cut off, give the whole of it: %w", err)
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the archive is "+NotTar+": %w", err)
}

func invalid(name, format string, args ...any) error {
	return sandbox.Errorf(sandbox.CodeInvalid, "archive entry %s: "+format, append([]any{Quote(name)}, args...)...).With("entry", strings.ToValidUTF8(name, "\uFFFD"))
}

// clean makes an archive's name relative to the root, without symlinks being
// looked at. "" is the root itself.
func (x *extractor) clean(entry, name string) (string, error) {
	switch {
	case strings.IndexByte(name, 0) >= 0:
		return "", invalid(entry, "its name has a NUL byte")
	case len(name) > x.lim.MaxPathBytes:
		return "", tooLarge("path_bytes", "archive entry %s: a name of %d bytes; the most is %d", Quote(entry), len(name), x.lim.MaxPathBytes)
	}
	n := 0
	for c := range strings.SplitSeq(name, "/") {
		switch {
		case c == "..":
			return "", invalid(entry, "%s leads out of the archive: names with .. are refused", Quote(name))
		case len(c) > 255:
			return "", tooLarge("name_bytes", "archive entry %s: a name of %d bytes; the most is 255", Quote(entry), len(c))
		case c != "" && c != ".":
			n++
		}
	}
	if n > x.lim.MaxDepth {
		return "", tooLarge("depth", "archive entry %s: %d directories deep; the most is %d", Quote(entry), n, x.lim.MaxDepth)
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

func (x *extractor) entry(h *tar.Header, content io.Reader) error {
	if err := x.ctx.Err(); err != nil {
		return Error("extract the archive", err)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if x.stats.Entries++; x.stats.Entries > x.lim.MaxEntries {
		return tooLarge("entries", "the archive has more than %d entries", x.lim.MaxEntries)
	}
	name, err := x.clean(h.Name, h.Name)
	if err != nil {
		return err
	}
	m, err := x.meta(h)
	if err != nil {
		return err
	}
	if name == "" {
		if h.Typeflag != tar.TypeDir {
			return invalid(h.Name, "it names the root directory but is none")
		}
		return Error("set the root directory's attributes", m.apply(x.root))
	}
	parent, err := x.openParent(h.Name, path.Dir(name))
	if err != nil {
		return err
	}
	base := path.Base(name)
	if x.o.Whiteouts && strings.HasPrefix(base, whiteoutPrefix) {
		return x.whiteout(h.Name, parent, base)
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return x.dir(h.Name, name, parent, base, m)
	case tar.TypeReg, tar.TypeRegA, tar.TypeGNUSparse: //nolint:staticcheck // old archives have TypeRegA
		return x.file(h, parent, base, m, content)
	case tar.TypeSymlink:
		return x.symlink(h, parent, base, m)
	case tar.TypeLink:
		return x.link(h, parent, base)
	case tar.TypeFifo:
		if err := x.clear(h.Name, parent, base); err != nil {
			return err
		}
		if err := unix.Mkfifoat(int(parent.Fd()), base, 0o600); err != nil {
			return x.failed(h.Name, err)
		}
		return x.failed(h.Name, m.applyAt(parent, base, false))
	case tar.TypeChar, tar.TypeBlock:
		x.warn("device", fmt.Sprintf("device nodes are left out (%s): a sandbox gets its own /dev", Quote(h.Name)))
		return nil
	}
	return invalid(h.Name, "its type %s is not known", Quote(string(h.Typeflag)))
}

func (x *extractor) failed(entry string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.E2BIG) {
		return sandbox.Errorf(sandbox.CodeInvalid, "archive entry %s: the filesystem refuses it: %w", Quote(entry), err)
	}
	return Error("extract "+Quote(entry), err)
}

func (x *extractor) warn(kind, message string) {
	if x.o.Warn != nil && !x.warned[kind] {
		x.warned[kind] = true
		x.o.Warn(message)
	}
}

// meta takes over what of an entry's attributes a layer may have.
func (x *extractor) meta(h *tar.Header) (meta, error) {
	m := meta{mode: uint32(h.Mode & 0o7777), uid: h.Uid, gid: h.Gid, mtime: h.ModTime}
	if x.o.Root {
		m.uid, m.gid = 0, 0
	}
	if m.uid < 0 || m.uid > maxID || m.gid < 0 || m.gid > maxID {
		x.warn("id", fmt.Sprintf("files of users or groups above %d now belong to nobody (%s): a sandbox has no such ids", maxID, Quote(h.Name)))
		if m.uid < 0 || m.uid > maxID {
			m.uid = nobody
		}
		if m.gid < 0 || m.gid > maxID {
			m.gid = nobody
		}
	}
	for k, v := range h.PAXRecords {
		key, ok := strings.CutPrefix(k, paxXattr)
		if !ok {
			continue
		}
		switch {
		case strings.HasPrefix(key, "trusted."), strings.HasPrefix(key, "user.overlay."):
			return m, invalid(h.Name, "it sets the extended attribute %s, which would steer the host's overlayfs", Quote(key))
		case key == "security.capability", strings.HasPrefix(key, "user."):
			if len(key) > 255 || len(v) > 64<<10 { // XATTR_NAME_MAX, XATTR_SIZE_MAX
				return m, tooLarge("xattr_bytes", "archive entry %s: an extended attribute of %d bytes (name %d); the most is 65536 (255)", Quote(h.Name), len(v), len(key))
			}
			if m.xattrs == nil {
				m.xattrs = map[string]string{}
			}
			m.xattrs[key] = v
		default:
			x.warn("xattr", fmt.Sprintf("the extended attribute %s is left out (%s): a sandbox does not use it", Quote(key), Quote(h.Name)))
		}
	}
	return m, nil
}

// openParent gives the directory that name leads to, and makes what is
// missing of it. The descriptor is the extractor's.
func (x *extractor) openParent(entry, name string) (*os.File, error) {
	if name == "." {
		name = ""
	}
	if x.parent != nil && x.parentPath == name {
		return x.parent, nil
	}
	f, err := x.openOrMake(entry, name)
	if err != nil {
		return nil, err
	}
	x.dropParent()
	x.parent, x.parentPath = f, name
	return f, nil
}

func (x *extractor) dropParent() {
	if x.parent != nil {
		x.parent.Close()
		x.parent = nil
	}
}

func (x *extractor) openOrMake(entry, name string) (*os.File, error) {
	f, err := inRoot(x.root, name)
	switch {
	case err == nil:
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			f.Close()
			return nil, Error("extract "+Quote(entry), err)
		}
		if isDir(st) {
			return f, nil
		}
		f.Close()
		if !isWhiteout(st) {
			return nil, invalid(entry, "%s is not a directory", Quote(name))
		}
	case errors.Is(err, unix.ELOOP):
		return nil, invalid(entry, "%s goes round in symlinks", Quote(name))
	case errors.Is(err, unix.ENOTDIR):
		// A component before the last is none; it may be a whiteout.
	case !isNotExist(err):
		return nil, Error("extract "+Quote(entry), err)
	}
	dir := path.Dir(name)
	if dir == "." {
		dir = ""
	}
	parent, err := x.openOrMake(entry, dir)
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	base := path.Base(name)
	if err := x.makeDir(entry, parent, base, meta{mode: 0o755}, true); err != nil {
		return nil, err
	}
	return openat2(parent, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_BENEATH)
}

// makeDir makes base a directory of parent with m; one that is there keeps its
// content. What else is there is replaced by an entry that says so, and
// refused where the directory is only implied by what lies below it.
func (x *extractor) makeDir(entry string, parent *os.File, base string, m meta, implied bool) error {
	opaque := false
	st, err := lstatat(parent, base)
	switch {
	case err == nil && isDir(st):
	case err == nil && !isWhiteout(st) && implied:
		return invalid(entry, "%s is not a directory, or a symlink that leads nowhere", Quote(base))
	case err == nil:
		// Removed and made anew: what lower layers have in it is gone.
		opaque = isWhiteout(st)
		if err := unix.Unlinkat(int(parent.Fd()), base, 0); err != nil {
			return x.failed(entry, err)
		}
		if err := unix.Mkdirat(int(parent.Fd()), base, 0o700); err != nil {
			return x.failed(entry, err)
		}
	case isNotExist(err):
		if err := unix.Mkdirat(int(parent.Fd()), base, 0o700); err != nil {
			return x.failed(entry, err)
		}
	default:
		return x.failed(entry, err)
	}
	f, err := openat2(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_BENEATH)
	if err != nil {
		return x.failed(entry, err)
	}
	defer f.Close()
	if opaque {
		if err := unix.Fsetxattr(int(f.Fd()), opaqueXattr, []byte("y"), 0); err != nil {
			return x.failed(entry, err)
		}
	}
	return x.failed(entry, m.apply(f))
}
