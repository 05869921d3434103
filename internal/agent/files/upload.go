package files

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/fsys"
	"github.com/warrenhq/warren/internal/agent/users"
)

// Bounds of one upload.
const (
	maxFiles         = 10_000                         // of one multipart upload
	maxMetadata      = 4096                           // bytes of names with prefix, and values; what ext4 keeps of an inode
	maxMetadataKey   = 255 - len(fsys.MetadataPrefix) // the kernel's limit on an attribute's name
	maxComposeBody   = 4 << 20
	defaultFileMode  = 0o644
	maxSymlinkFollow = 40
)

// Upload serves POST /files?path=&username=: a body of
// application/octet-stream, or multipart with fields "file" (or "files") whose
// file names are the paths if the query has none. Each file appears whole or
// not at all; see Target.
func (h *Handler) Upload(w http.ResponseWriter, r *http.Request) {
	if err := h.Session.CheckFile(r, control.OperationWrite); err != nil {
		WriteStatus(w, http.StatusUnauthorized, err.Error())
		return
	}
	entries, err := h.upload(r)
	if err != nil {
		WriteError(w, err)
		return
	}
	WriteJSON(w, entries)
}

func (h *Handler) upload(r *http.Request) ([]control.FileEntry, error) {
	u, err := h.user(r.URL.Query().Get("username"))
	if err != nil {
		return nil, err
	}
	meta, err := metadata(r.Header)
	if err != nil {
		return nil, err
	}
	var mode fs.FileMode
	if m := r.Header.Get(control.ModeHeader); m != "" {
		n, err := strconv.ParseUint(m, 8, 32)
		if err != nil || n > 0o777 {
			return nil, statusf(http.StatusBadRequest, "%s: %.20q is not octal permission bits", control.ModeHeader, m)
		}
		mode = fs.FileMode(n)
	}
	var body io.Reader = r.Body
	switch enc := strings.ToLower(r.Header.Get("Content-Encoding")); enc {
	case "", "identity":
	case "gzip", "x-gzip":
		zr, err := gzip.NewReader(bufio.NewReaderSize(r.Body, 64<<10))
		if err != nil {
			return nil, statusf(http.StatusBadRequest, "the body is not gzip: %w", err)
		}
		body = zr
	default:
		return nil, statusf(http.StatusBadRequest, "unsupported Content-Encoding %.40q: send gzip or none", enc)
	}
	put := func(path string, src io.Reader) (control.FileEntry, error) {
		return h.put(path, u, src, mode, meta)
	}
	name := r.URL.Query().Get("path")
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err == nil && kind == "application/octet-stream":
		path, err := resolve(name, u)
		if err != nil {
			return nil, err
		}
		e, err := put(path, body)
		return []control.FileEntry{e}, err
	case err == nil && strings.HasPrefix(kind, "multipart/"):
		return parts(body, params["boundary"], name, u, put)
	}
	return nil, statusf(http.StatusBadRequest, "unsupported content type %.60q: send multipart/form-data or application/octet-stream", r.Header.Get("Content-Type"))
}

// parts stores the files of a multipart body.
func parts(body io.Reader, boundary, name string, u users.User, put func(string, io.Reader) (control.FileEntry, error)) ([]control.FileEntry, error) {
	if boundary == "" {
		return nil, statusf(http.StatusBadRequest, "the multipart body has no boundary")
	}
	entries := []control.FileEntry{}
	tail := &tailReader{r: bufio.NewReaderSize(body, copyBytes)}
	mr := multipart.NewReader(tail, boundary)
	for {
		part, err := mr.NextRawPart()
		if err == io.EOF {
			// Go also says so of a body that ends in the middle of a part's header.
			if !bytes.Contains(tail.last, []byte("--"+boundary+"--")) {
				return nil, statusf(http.StatusBadRequest, "the multipart body is broken: it ends before its last boundary")
			}
			return entries, nil
		}
		if err != nil {
			return nil, statusf(http.StatusBadRequest, "the multipart body is broken: %w", err)
		}
		if f := part.FormName(); f != "file" && f != "files" {
			continue
		}
		if len(entries) == maxFiles {
			return nil, statusf(http.StatusRequestEntityTooLarge, "more than %d files in one upload", maxFiles)
		}
		given := name
		if given == "" {
			if given, err = partPath(part.Header.Get("Content-Disposition")); err != nil {
				return nil, err
			}
		}
		path, err := resolve(given, u)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(entries, func(e control.FileEntry) bool { return e.Path == path }) {
			return nil, statusf(http.StatusBadRequest, "you cannot upload multiple files to the same path '%s' in one upload request, only the first specified file was uploaded", path)
		}
		e, err := put(path, part)
		if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
}

// tailBytes is more than multipart.Reader reads ahead of what it has parsed.
const tailBytes = 16 << 10

// tailReader keeps the last bytes that went through it.
type tailReader struct {
	r    io.Reader
	last []byte
}

func (t *tailReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if len(t.last)+n > 2*tailBytes {
		t.last = append(t.last[:0], t.last[max(0, len(t.last)-tailBytes):]...)
	}
	t.last = append(t.last, p[max(0, n-tailBytes):n]...)
	return n, err
}

// partPath takes the whole path out of a part's header; Go's own FileName
// gives its last element alone.
func partPath(disposition string) (string, error) {
	_, params, err := mime.ParseMediaType(disposition)
	if err != nil {
		return "", statusf(http.StatusBadRequest, "a part's Content-Disposition is broken: %w", err)
	}
	if params["filename"] == "" {
		return "", statusf(http.StatusBadRequest, "a part has no file name, and the query no path")
	}
	return params["filename"], nil
}

// metadata takes a file's metadata out of the request's headers.
func metadata(h http.Header) (map[string]string, error) {
	var m map[string]string
	total := 0
	for name, values := range h {
		if len(name) <= len(control.MetadataPrefix) || !strings.EqualFold(name[:len(control.MetadataPrefix)], control.MetadataPrefix) || len(values) == 0 {
			continue
		}
		key, value := strings.ToLower(name[len(control.MetadataPrefix):]), values[0]
		if len(key) > maxMetadataKey {
			return nil, statusf(http.StatusBadRequest, "a metadata key is %d bytes long: the most is %d", len(key), maxMetadataKey)
		}
		for _, s := range []string{key, value} {
			for i := range len(s) {
				if s[i] < 0x20 || s[i] > 0x7e {
					return nil, statusf(http.StatusBadRequest, "metadata %q has a byte that is not printable ASCII", key)
				}
			}
		}
		if total += len(fsys.MetadataPrefix) + len(key) + len(value); total > maxMetadata {
			return nil, statusf(http.StatusBadRequest, "the metadata is more than %d bytes", maxMetadata)
		}
		if m == nil {
			m = map[string]string{}
		}
		m[key] = value
	}
	return m, nil
}

// put stores one file.
func (h *Handler) put(path string, u users.User, src io.Reader, mode fs.FileMode, meta map[string]string) (control.FileEntry, error) {
	t, err := NewTarget(path, u, mode)
	if err != nil {
		return control.FileEntry{}, err
	}
	defer t.Abort()
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	if _, err := io.CopyBuffer(struct{ io.Writer }{t.File}, struct{ io.Reader }{src}, *buf); err != nil {
		var pe *fs.PathError
		if !errors.As(err, &pe) { // the body's, not the file's
			err = statusf(http.StatusBadRequest, "the upload of '%s' broke off: %w", path, err)
		}
		return control.FileEntry{}, err
	}
	t.setMetadata(meta)
	if err := t.Commit(); err != nil {
		return control.FileEntry{}, err
	}
	return control.FileEntry{Name: filepath.Base(path), Type: "file", Path: path, Metadata: fsys.Metadata(path)}, nil
}

// Target is a file being written. It is written under another name in the
// same directory, and renamed when it is whole: a broken upload leaves what was
// there before, and nobody sees half a file. It takes room for both meanwhile.
//
// A symbolic link is written through, as a program's open would. A file that
// is there keeps its mode (without set-id bits, which the kernel clears on a
// write too) and its owner; a new one is the user's, and 0644. Its
// other hard links keep the old content. What cannot be replaced (a device, a
// pipe, a mount point) is written in place.
type Target struct {
	File    *os.File
	path    string // after links
	tmp     string // "" where it is written in place
	done    bool
	inPlace bool
}

// NewTarget makes the parents of path as far as they are missing, and opens a
// target. A mode that is not 0 is the file's whatever was there.
func NewTarget(path string, u users.User, mode fs.FileMode) (*Target, error) {
	if err := fsys.EnsureDirs(filepath.Dir(path), u.UID, u.GID); err != nil {
		return nil, fmt.Errorf("make the directory of '%s': %w", path, err)
	}
	path, st, err := follow(path)
	if err != nil {
		return nil, err
	}
	uid, gid, perm, kind := u.UID, u.GID, fs.FileMode(defaultFileMode), "n"
	if st != nil {
		if st.IsDir() {
			return nil, statusf(http.StatusBadRequest, "path is a directory: %s", path)
		}
		if !st.Mode().IsRegular() {
			return openInPlace(path)
		}
		sys := st.Sys().(*syscall.Stat_t)
		uid, gid, perm, kind = int(sys.Uid), int(sys.Gid), st.Mode().Perm(), "o"
	}
	if mode != 0 {
		perm = mode
	}
	tmp := filepath.Join(filepath.Dir(path), fsys.UploadPrefix+kind+rand.Text())
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	t := &Target{File: f, path: path, tmp: tmp}
	if os.Getuid() == 0 {
		err = f.Chown(uid, gid)
	}
	if err == nil {
		err = f.Chmod(perm)
	}
	if err != nil {
		t.Abort()
		return nil, err
	}
	return t, nil
}

func openInPlace(path string) (*Target, error) {
	// A pipe without a reader must not hang the upload: ENXIO.
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, statusf(http.StatusBadRequest, "path '%s' is not a regular file, and cannot be written: %w", path, err)
	}
	return &Target{File: f, path: path, inPlace: true}, nil
}

// follow resolves the links at the end of path, also to a file that is not
// there yet; st is nil then.
func follow(path string) (string, fs.FileInfo, error) {
	for range maxSymlinkFollow {
		st, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) {
			return path, nil, nil
		}
		if err != nil || st.Mode()&fs.ModeSymlink == 0 {
			return path, st, err
		}
		target, err := os.Readlink(path)
		if err != nil {
			return path, nil, err
		}
		if !filepath.IsAbs(target) {
			// Not by string: the directory may itself be behind a link.
			dir, err := filepath.EvalSymlinks(filepath.Dir(path))
			if err != nil {
				return path, nil, err
			}
			target = filepath.Join(dir, target)
		}
		path = target
	}
	return path, nil, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
}

// setMetadata stores metadata where the filesystem takes it.
func (t *Target) setMetadata(meta map[string]string) {
	if t.inPlace {
		return
	}
	for k, v := range meta {
		unix.Fsetxattr(int(t.File.Fd()), fsys.MetadataPrefix+k, []byte(v), 0)
	}
}

// Commit makes the file appear.
func (t *Target) Commit() error {
	if err := t.File.Close(); err != nil {
		return err
	}
	if t.inPlace {
		t.done = true
		return nil
	}
	err := os.Rename(t.tmp, t.path)
	if errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.EXDEV) {
		err = t.overwrite() // a mount point
	}
	t.done = err == nil
	return err
}

// overwrite copies the whole temporary file into the one that is there.
func (t *Target) overwrite() error {
	in, err := os.Open(t.tmp)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(t.path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Remove(t.tmp)
}

// Abort removes what was written, unless it was committed.
func (t *Target) Abort() {
	if t.done {
		return
	}
	t.done = true
	t.File.Close()
	if t.tmp != "" {
		os.Remove(t.tmp)
	}
}

// Compose serves POST /files/compose: it concatenates files into one, which
// appears whole, and removes them.
func (h *Handler) Compose(w http.ResponseWriter, r *http.Request) {
	var req control.ComposeRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxComposeBody)).Decode(&req); err != nil {
		WriteError(w, statusf(http.StatusBadRequest, "invalid request body: %w", err))
		return
	}
	path, err := h.compose(req)
	if err != nil {
		WriteError(w, err)
		return
	}
	WriteJSON(w, control.FileEntry{Name: filepath.Base(path), Type: "file", Path: path})
}

func (h *Handler) compose(req control.ComposeRequest) (string, error) {
	switch {
	case len(req.SourcePaths) == 0:
		return "", statusf(http.StatusBadRequest, "source_paths must not be empty")
	case req.Destination == "":
		return "", statusf(http.StatusBadRequest, "destination is required")
	}
	u, err := h.user(req.Username)
	if err != nil {
		return "", err
	}
	dst, err := resolve(req.Destination, u)
	if err != nil {
		return "", err
	}
	sources := make([]string, len(req.SourcePaths))
	for i, s := range req.SourcePaths {
		if sources[i], err = resolve(s, u); err != nil {
			return "", err
		}
		if sources[i] == dst {
			return "", statusf(http.StatusBadRequest, "source path %q cannot be the same as destination", s)
		}
		st, err := os.Stat(sources[i])
		if err != nil {
			return "", statusf(http.StatusNotFound, "source file not found: %s", s)
		}
		if !st.Mode().IsRegular() {
			return "", statusf(http.StatusBadRequest, "source path is not a regular file: %s", s)
		}
	}
	t, err := NewTarget(dst, u, 0)
	if err != nil {
		return "", err
	}
	defer t.Abort()
	for _, s := range sources {
		f, _, err := openRegular(s)
		if err != nil {
			return "", err
		}
		_, err = t.File.ReadFrom(f) // copy_file_range
		f.Close()
		if err != nil {
			return "", err
		}
	}
	if err := t.Commit(); err != nil {
		return "", err
	}
	for _, s := range sources {
		os.Remove(s)
	}
	return dst, nil
}
