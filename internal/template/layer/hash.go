package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"os"
	"path"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Digest is a layer's name: "sha256:" and 64 hex digits. It is the digest of
// the tar stream that a layer was extracted from, or HashTree's of a layer
// that was made here.
type Digest = string

// treeMagic begins what HashTree hashes. A tar header never looks like this
// (its checksum field is no number), so that no archive can be made whose
// digest is a tree's.
var treeMagic = append(bytes.Repeat([]byte{0xff}, 512), "warren layer 1\n"...)

// HashOptions say what HashTree takes.
type HashOptions struct {
	Limits Limits
	// Strip are paths at fixed places ("etc/hosts") that HashTree removes
	// before it looks: files that the platform writes into every sandbox.
	Strip []string
}

// HashTree walks the layer in dir in a fixed order and hashes all that a
// sandbox would see of it: names, kinds, modes, owners, times, attributes,
// link targets, content and which names are one file. It checks on the way
// that the tree may be a layer: no devices but whiteouts, no attributes that
// steer overlayfs but the opaque mark, depth and sizes within the limits.
func HashTree(ctx context.Context, dir string, o HashOptions) (Digest, Stats, error) {
	root, err := openDir(dir)
	if err != nil {
		return "", Stats{}, Error("read the layer", err)
	}
	defer root.Close()
	for _, name := range o.Strip {
		if err := strip(root, name); err != nil {
			return "", Stats{}, Error("strip the layer", err)
		}
	}
	w := &treeHasher{ctx: ctx, h: sha256.New(), lim: o.Limits.filled(), inodes: map[inode]uint64{}, buf: make([]byte, 256<<10), times: true}
	w.h.Write(treeMagic)
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return "", Stats{}, Error("read the layer", err)
	}
	if err := w.dir(root, "", st, 0); err != nil {
		return "", w.stats, Error("read the layer", err)
	}
	return "sha256:" + hex.EncodeToString(w.h.Sum(nil)), w.stats, nil
}

func strip(root *os.File, name string) error {
	dir, err := strict(root, path.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY)
	if isNotExist(err) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return removeAt(dir, path.Base(name))
}

type inode struct{ dev, ino uint64 }

type treeHasher struct {
	ctx    context.Context
	h      hash.Hash
	lim    Limits
	stats  Stats
	inodes map[inode]uint64 // files of several names → the entry that had it first
	buf    []byte
	times  bool
}

func (w *treeHasher) dir(d *os.File, name string, st unix.Stat_t, depth int) error {
	if depth > w.lim.MaxDepth {
		return tooLarge("depth", "the layer is more than %d directories deep", w.lim.MaxDepth)
	}
	if err := w.head(name, st); err != nil {
		return err
	}
	if err := w.xattrs(d); err != nil {
		return err
	}
	names, err := w.names(d)
	if err != nil {
		return err
	}
	w.number(uint64(len(names)))
	for _, n := range names {
		if err := w.entry(d, n, depth); err != nil {
			return err
		}
	}
	return nil
}

// names lists d, sorted, within what MaxEntries leaves.
func (w *treeHasher) names(d *os.File) ([]string, error) {
	var names []string
	for {
		more, err := d.Readdirnames(4096)
		names = append(names, more...)
		if w.stats.Entries+int64(len(names)) > w.lim.MaxEntries {
			return nil, tooLarge("entries", "the layer has more than %d entries", w.lim.MaxEntries)
		}
		if errors.Is(err, io.EOF) {
			slices.Sort(names)
			return names, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (w *treeHasher) entry(d *os.File, name string, depth int) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	st, err := lstatat(d, name)
	if err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		sub, err := strict(d, name, unix.O_RDONLY|unix.O_DIRECTORY)
		if err != nil {
			return err
		}
		defer sub.Close()
		return w.dir(sub, name, st, depth+1)
	case unix.S_IFREG:
		return w.file(d, name, st)
	case unix.S_IFLNK:
		if err := w.head(name, st); err != nil {
			return err
		}
		target, err := readlinkat(d, name)
		if err != nil {
			return err
		}
		w.string(target)
		return nil
	case unix.S_IFIFO, unix.S_IFSOCK:
		return w.head(name, st)
	case unix.S_IFCHR:
		if isWhiteout(st) {
			return w.head(name, st)
		}
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "the layer has a device node (%s): a template cannot have any", Quote(name))
}

// head writes what every entry has. The size goes with the content.
func (w *treeHasher) head(name string, st unix.Stat_t) error {
	if w.stats.Entries++; w.stats.Entries > w.lim.MaxEntries {
		return tooLarge("entries", "the layer has more than %d entries", w.lim.MaxEntries)
	}
	w.string(name)
	w.number(uint64(st.Mode))
	w.number(uint64(st.Uid))
	w.number(uint64(st.Gid))
	if w.times {
		w.number(uint64(st.Mtim.Sec))
		w.number(uint64(st.Mtim.Nsec))
	}
	return nil
}

func (w *treeHasher) file(d *os.File, name string, st unix.Stat_t) error {
	if err := w.head(name, st); err != nil {
		return err
	}
	if st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino}
		if first, ok := w.inodes[id]; ok {
			w.number(first)
			return nil
		}
		w.inodes[id] = uint64(w.stats.Entries)
		w.number(0)
	}
	switch {
	case st.Size > w.lim.MaxFileBytes:
		return tooLarge("file_bytes", "the layer has a file of %d bytes (%s); the most is %d", st.Size, Quote(name), w.lim.MaxFileBytes)
	case st.Size > w.lim.MaxBytes-w.stats.Bytes:
		return tooLarge("bytes", "the layer's files are more than %d bytes together", w.lim.MaxBytes)
	}
	f, err := strict(d, name, unix.O_RDONLY|unix.O_NONBLOCK)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.xattrs(f); err != nil {
		return err
	}
	w.number(uint64(st.Size))
	n, err := io.CopyBuffer(w.h, io.LimitReader(WithContext(w.ctx, f), st.Size), w.buf)
	w.stats.Bytes += n
	if err == nil && n != st.Size {
		err = sandbox.Errorf(sandbox.CodeConflict, "the file %s changed while it was read", Quote(name))
	}
	return err
}

// xattrs writes f's attributes, and refuses those that a layer must not have.
func (w *treeHasher) xattrs(f *os.File) error {
	all, err := readXattrs(f)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(all))
	for k := range all {
		switch {
		case k == opaqueXattr && all[k] == "y", k == "security.capability", isUserXattr(k):
			names = append(names, k)
		case isOverlayNote(k):
		case hasOverlayPrefix(k):
			return sandbox.Errorf(sandbox.CodeInvalid, "the layer has the extended attribute %s, which would steer the host's overlayfs", Quote(k))
		}
	}
	slices.Sort(names)
	w.number(uint64(len(names)))
	for _, k := range names {
		w.string(k)
		w.string(all[k])
	}
	return nil
}

func (w *treeHasher) string(s string) {
	w.number(uint64(len(s)))
	io.WriteString(w.h, s)
}

func (w *treeHasher) number(n uint64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	w.h.Write(b[:])
}

func readlinkat(d *os.File, name string) (string, error) {
	for size := 256; ; size *= 4 {
		b := make([]byte, size)
		n, err := unix.Readlinkat(int(d.Fd()), name, b)
		if err != nil {
			return "", err
		}
		if n < size {
			return string(b[:n]), nil
		}
	}
}
