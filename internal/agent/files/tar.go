package files

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/beneath"
	"github.com/warrenhq/warren/internal/agent/fsys"
	"github.com/warrenhq/warren/internal/agent/users"
)

// defaultMaxEntries bounds an archive where the call does not.
const defaultMaxEntries = 1_000_000

// maxHardlinks bounds the memory in which an archive's hard links are known.
const maxHardlinks = 100_000

// GetTar serves GET /tar?path=&user=: a file or a directory as a tar archive
// (PAX), whose names begin with the path's last element. A link at the path
// itself is followed, others are kept. Sockets and devices are left out. If
// reading fails on the way the connection is broken off.
func (h *Handler) GetTar(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	u, err := h.user(q.Get("user"))
	if err != nil {
		WriteError(w, err)
		return
	}
	p, err := resolve(q.Get("path"), u)
	if err != nil {
		WriteError(w, err)
		return
	}
	real, err := filepath.EvalSymlinks(p)
	if err != nil {
		WriteError(w, err)
		return
	}
	st, err := os.Lstat(real)
	if err == nil && !st.IsDir() && !st.Mode().IsRegular() {
		err = statusf(http.StatusBadRequest, "path '%s' is neither a file nor a directory", p)
	}
	if err != nil {
		WriteError(w, err)
		return
	}
	// Held, so that one that is swapped for a link while it is read leads nowhere
	// else.
	dir, name := real, "."
	if !st.IsDir() {
		dir, name = filepath.Split(real)
	}
	root, err := beneath.Open(dir)
	if err != nil {
		WriteError(w, err)
		return
	}
	defer root.Close()
	base := path.Base(p)
	if base == "/" {
		base = "."
	}
	w.Header().Set("Content-Type", "application/x-tar")
	bw := bufio.NewWriterSize(w, 64<<10)
	a := &archiver{tw: tar.NewWriter(bw), root: root, users: h.Session.Users, links: map[inode]string{}}
	if err = a.add(name, base); err == nil {
		if err = a.tw.Close(); err == nil {
			err = bw.Flush()
		}
	}
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

type inode struct{ dev, ino uint64 }

// archiver writes a tree to an archive.
type archiver struct {
	tw    *tar.Writer
	root  *beneath.Root
	users *users.DB
	links map[inode]string // the name of the first of several hard links
}

func (a *archiver) add(rel, name string) error {
	st, err := a.root.Lstat(rel)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) && rel != "." {
			return nil // gone meanwhile
		}
		return err
	}
	kind := st.Mode & unix.S_IFMT
	hdr := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
		Uid: int(st.Uid), Gid: int(st.Gid), Uname: a.users.UserName(int(st.Uid)), Gname: a.users.GroupName(int(st.Gid)),
	}
	switch kind {
	case unix.S_IFDIR:
		hdr.Typeflag, hdr.Name = tar.TypeDir, name+"/"
		if err := a.tw.WriteHeader(hdr); err != nil {
			return err
		}
		return a.dir(rel, name)
	case unix.S_IFLNK:
		hdr.Typeflag = tar.TypeSymlink
		if hdr.Linkname, err = a.root.Readlink(rel); err != nil {
			return err
		}
	case unix.S_IFIFO:
		hdr.Typeflag = tar.TypeFifo
	case unix.S_IFREG:
		key := inode{uint64(st.Dev), st.Ino}
		if first, ok := a.links[key]; ok && st.Nlink > 1 {
			hdr.Typeflag, hdr.Linkname = tar.TypeLink, first
			break
		}
		if st.Nlink > 1 && len(a.links) < maxHardlinks {
			a.links[key] = name
		}
		return a.file(rel, hdr)
	default:
		return nil
	}
	return a.tw.WriteHeader(hdr)
}

func (a *archiver) dir(rel, name string) error {
	d, err := a.root.Open(rel)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(1024)
		for _, n := range names {
			if strings.HasPrefix(n, fsys.UploadPrefix) {
				continue
			}
			if err := a.add(path.Join(rel, n), path.Join(name, n)); err != nil {
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

// file writes a regular file, of the size that it has when it is opened: one
// that grows is cut, one that shrinks is filled with zeros.
func (a *archiver) file(rel string, hdr *tar.Header) error {
	f, err := a.root.Open(rel)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return nil // swapped meanwhile
	}
	hdr.Typeflag, hdr.Size = tar.TypeReg, st.Size()
	if err := a.tw.WriteHeader(hdr); err != nil {
		return err
	}
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	n, err := io.CopyBuffer(struct{ io.Writer }{a.tw}, io.LimitReader(f, hdr.Size), *buf)
	if err != nil {
		return err
	}
	if n < hdr.Size {
		_, err = io.CopyBuffer(struct{ io.Writer }{a.tw}, io.LimitReader(zeros{}, hdr.Size-n), *buf)
	}
	return err
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// PutTar serves PUT /tar?path=&user=[&max_bytes=][&max_entries=][&preserve=]:
// it extracts an archive (gzip by Content-Encoding) into the directory path,
// which is made if it is missing. All that it makes is user's, unless preserve
// keeps the archive's numeric owners. Set-id bits are dropped.
//
// Nothing lands outside of path: names with ".." are refused, and links that
// lead out of path (the archive's, or older ones) are made but not followed.
// What was extracted before an error stays.
func (h *Handler) PutTar(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	u, err := h.user(q.Get("user"))
	if err != nil {
		WriteError(w, err)
		return
	}
	dst, err := resolve(q.Get("path"), u)
	if err != nil {
		WriteError(w, err)
		return
	}
	x := &extractor{uid: u.UID, gid: u.GID, preserve: q.Get("preserve") == "true", bytes: math.MaxInt64, entries: defaultMaxEntries}
	for name, into := range map[string]*int64{"max_bytes": &x.bytes, "max_entries": &x.entries} {
		if v := q.Get(name); v != "" {
			if *into, err = strconv.ParseInt(v, 10, 64); err != nil || *into < 0 {
				WriteError(w, statusf(http.StatusBadRequest, "%s: %.40q is not a number of 0 or more", name, v))
				return
			}
		}
	}
	var body io.Reader = bufio.NewReaderSize(r.Body, copyBytes)
	if strings.EqualFold(r.Header.Get("Content-Encoding"), "gzip") {
		if body, err = gzip.NewReader(body); err != nil {
			WriteError(w, statusf(http.StatusBadRequest, "the body is not gzip: %w", err))
			return
		}
	}
	if err := fsys.EnsureDirs(dst, u.UID, u.GID); err != nil {
		WriteError(w, err)
		return
	}
	if err := x.extract(dst, body); err != nil {
		WriteError(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// extractor extracts one archive.
type extractor struct {
	root     *beneath.Root
	uid, gid int
	preserve bool
	bytes    int64 // what may still come
	entries  int64
	dirs     []dirTime
}

type dirTime struct {
	name string
	mode uint32
	time time.Time
}

func bad(format string, args ...any) error { return statusf(http.StatusBadRequest, format, args...) }

func (x *extractor) extract(dst string, body io.Reader) error {
	root, err := beneath.Open(dst)
	if err != nil {
		return err
	}
	defer root.Close()
	x.root = root
	tr := tar.NewReader(body)
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return bad("the archive is broken: %w", err)
		}
		if x.entries--; x.entries < 0 {
			return statusf(http.StatusRequestEntityTooLarge, "the archive has more entries than allowed")
		}
		name, err := entryName(hdr.Name)
		if err != nil {
			return err
		}
		if err := x.entry(hdr, name, tr); err != nil {
			var he *httpError
			if errors.As(err, &he) {
				return err
			}
			return fmt.Errorf("archive entry %.200q: %w", name, err)
		}
	}
	// Last, as a mode may forbid writing and every entry changes the time. In
	// reverse, so that a directory's own come after those of what is in it.
	for i := len(x.dirs) - 1; i >= 0; i-- {
		d := x.dirs[i]
		if err := root.ChmodDir(d.name, d.mode); err != nil {
			return err
		}
		root.SetModTime(d.name, d.time)
	}
	return nil
}

// entryName checks and cleans an entry's name.
func entryName(name string) (string, error) {
	if strings.ContainsRune(name, 0) {
		return "", bad("an archive entry's name has a NUL byte")
	}
	for _, part := range strings.Split(name, "/") {
		if part == ".." {
			return "", bad("archive entry %.200q leads out of the directory", name)
		}
	}
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" {
		clean = "."
	}
	return clean, nil
}

func (x *extractor) entry(hdr *tar.Header, name string, body io.Reader) error {
	mode := uint32(hdr.Mode & 0o1777)
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeDir:
		if err := x.mkdir(name); err != nil {
			return err
		}
		if name != "." {
			st, err := x.root.Lstat(name)
			if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
				return err // a link to a directory serves as one, and stays as it is
			}
			if len(x.dirs) < maxHardlinks {
				x.dirs = append(x.dirs, dirTime{name, mode, hdr.ModTime})
			} else if err := x.root.ChmodDir(name, mode); err != nil {
				return err
			}
			return x.own(name, hdr)
		}
		return nil
	case tar.TypeReg, tar.TypeGNUSparse: // the reader gives the old type \x00 as TypeReg
		return x.file(hdr, name, mode, body)
	case tar.TypeSymlink:
		if hdr.Linkname == "" || strings.ContainsRune(hdr.Linkname, 0) {
			return bad("archive entry %.200q is a link to nothing", name)
		}
		if err := x.clear(name); err != nil {
			return err
		}
		if err := x.root.Symlink(hdr.Linkname, name); err != nil {
			return err
		}
		return x.own(name, hdr)
	case tar.TypeLink:
		target, err := entryName(hdr.Linkname)
		if err != nil {
			return err
		}
		if target == name {
			return bad("archive entry %.200q is a hard link to itself", name)
		}
		if st, err := x.root.Lstat(target); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
			return bad("archive entry %.200q is a hard link to %.200q, which is not a file of the archive", name, target)
		}
		if err := x.clear(name); err != nil {
			return err
		}
		return x.root.Link(target, name)
	}
	return bad("archive entry %.200q is of type %q: only files, directories and links can be extracted", name, hdr.Typeflag)
}

// clear makes room for name: its parents are there, and it is not.
func (x *extractor) clear(name string) error {
	if name == "." {
		return bad("an archive entry that is not a directory has the directory's own name")
	}
	if err := x.mkdir(path.Dir(name)); err != nil {
		return err
	}
	st, err := x.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return bad("archive entry %.200q would replace a directory", name)
	}
	return x.root.Remove(name)
}

// mkdir makes the directory name and its parents. A link to a directory under
// the root serves as one; others are refused.
func (x *extractor) mkdir(name string) error {
	if name == "." {
		return nil
	}
	switch is, err := x.root.IsDir(name); {
	case is:
		return nil
	case err == nil:
		return bad("archive entry %.200q is under a file", name)
	}
	if err := x.mkdir(path.Dir(name)); err != nil {
		return err
	}
	if err := x.root.Mkdir(name, 0o755); err != nil {
		return err
	}
	return x.chown(name, x.uid, x.gid)
}

func (x *extractor) file(hdr *tar.Header, name string, mode uint32, body io.Reader) error {
	if hdr.Size > x.bytes {
		return statusf(http.StatusRequestEntityTooLarge, "the archive has more bytes than allowed")
	}
	x.bytes -= hdr.Size
	if err := x.clear(name); err != nil {
		return err
	}
	f, err := x.root.Create(name, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	if _, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{body}, *buf); err != nil {
		var pe *fs.PathError
		if !errors.As(err, &pe) {
			err = bad("the archive broke off: %w", err)
		}
		x.root.Remove(name) // rather none than a half
		return err
	}
	if os.Getuid() == 0 {
		uid, gid := x.owner(hdr)
		if err := f.Chown(uid, gid); err != nil {
			return err
		}
	}
	if err := unix.Fchmod(int(f.Fd()), mode); err != nil {
		return &fs.PathError{Op: "chmod", Path: name, Err: err}
	}
	if err := f.Close(); err != nil {
		return err
	}
	return x.root.SetModTime(name, hdr.ModTime)
}

func (x *extractor) owner(hdr *tar.Header) (uid, gid int) {
	if x.preserve && hdr.Uid >= 0 && hdr.Gid >= 0 {
		return hdr.Uid, hdr.Gid
	}
	return x.uid, x.gid
}

func (x *extractor) own(name string, hdr *tar.Header) error {
	uid, gid := x.owner(hdr)
	return x.chown(name, uid, gid)
}

func (x *extractor) chown(name string, uid, gid int) error {
	if os.Getuid() != 0 {
		return nil
	}
	return x.root.Lchown(name, uid, gid)
}
