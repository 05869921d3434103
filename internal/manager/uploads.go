package manager

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
)

var pointUploadWhole = fault.Register("manager.upload.whole")

// Bounds of what is uploaded for builds.
const (
	uploadLinkLife = time.Hour
	maxUpload      = 4 << 30  // bytes of one upload
	maxUploads     = 16 << 30 // bytes of one tenant's uploads; the oldest go first
	uploadKeep     = 7 * 24 * time.Hour
)

var hashPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (m *Manager) uploadsDir() string { return filepath.Join(m.cfg.StateDir, "uploads") }

// uploadPath is where an upload is, one directory for each tenant. Tenants'
// names are file names; templates' IDs and hashes have only letters and digits.
func (m *Manager) uploadPath(tenant, templateID, hash string) string {
	return filepath.Join(m.uploadsDir(), tenant, templateID+"-"+hash)
}

// Upload tells whether the files of a hash are there, and gives a token for
// PutUpload.
func (m *Manager) Upload(ctx context.Context, tenant, templateID, hash string) (present bool, token string, err error) {
	if !hashPattern.MatchString(hash) {
		return false, "", invalid("the files' hash is not 64 hexadecimal digits")
	}
	n, err := m.store.FindNamed(ctx, tenant, templateID)
	if err != nil {
		return false, "", err
	}
	if _, err := os.Stat(m.uploadPath(tenant, n.ID, hash)); err == nil {
		present = true
	}
	claim := strings.Join([]string{tenant, n.ID, hash, strconv.FormatInt(m.clock.Now().Add(uploadLinkLife).Unix(), 10)}, "/")
	return present, base64.RawURLEncoding.EncodeToString(append(m.builds.sign(claim), claim...)), nil
}

func (b *builds) sign(claim string) []byte {
	h := hmac.New(sha256.New, b.key[:])
	h.Write([]byte(claim))
	return h.Sum(nil)
}

// PutUpload stores the archive of a token of Upload: size bytes, all or none.
// What is in it is looked at when a build unpacks it.
func (m *Manager) PutUpload(ctx context.Context, token string, body io.Reader, size int64) error {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) < sha256.Size || !hmac.Equal(raw[:sha256.Size], m.builds.sign(string(raw[sha256.Size:]))) {
		return sandbox.Errorf(sandbox.CodeForbidden, "the upload link is not valid: ask for a new one")
	}
	part := strings.Split(string(raw[sha256.Size:]), "/")
	tenant, templateID, hash := part[0], part[1], part[2]
	if until, err := strconv.ParseInt(part[3], 10, 64); err != nil || m.clock.Now().Unix() > until {
		return sandbox.Errorf(sandbox.CodeForbidden, "the upload link has expired: ask for a new one")
	}
	switch {
	case size < 0:
		return invalid("an upload needs its exact Content-Length")
	case size > maxUpload:
		return sandbox.Errorf(sandbox.CodeTooLarge, "the upload has %d bytes: the most is %d", size, int64(maxUpload)).With("limit", "upload_bytes")
	}
	if disk, err := m.cfg.Host.Disk(); err != nil {
		return diskError("look for room for the upload", err)
	} else if disk.Free-m.cfg.Budget.DiskReserve < size {
		return sandbox.Errorf(sandbox.CodeDiskFull, "the host has no room for an upload of %d bytes: remove sandboxes and templates", size)
	}
	path := m.uploadPath(tenant, templateID, hash)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return diskError("store the upload", err)
	}
	f, err := os.CreateTemp(m.uploadsDir(), ".new-")
	if err != nil {
		return diskError("store the upload", err)
	}
	defer os.Remove(f.Name()) // of no effect once it is renamed
	defer f.Close()
	n, err := io.Copy(f, io.LimitReader(ctxReader{ctx, body}, size+1))
	switch {
	case err != nil:
		return diskError("store the upload", err)
	case n != size:
		return invalid("the upload has %d bytes of the %d that its Content-Length says", n, size)
	}
	if err := f.Sync(); err != nil {
		return diskError("store the upload", err)
	}
	pointUploadWhole.Hit()
	if err := os.Rename(f.Name(), path); err != nil {
		return diskError("store the upload", err)
	}
	return m.trimUploads(tenant, path)
}

// ctxReader ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

func (m *Manager) openUpload(tenant, templateID, hash string) (io.ReadCloser, error) {
	if !hashPattern.MatchString(hash) {
		return nil, invalid("the files' hash is not 64 hexadecimal digits")
	}
	path := m.uploadPath(tenant, templateID, hash)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, invalid("the files of the step were not uploaded, or are gone: upload them again")
	}
	if err != nil {
		return nil, diskError("open the upload", err)
	}
	now := m.clock.Now()
	os.Chtimes(path, now, now) // what is used stays longest; no harm where it fails
	return f, nil
}

// trimUploads removes a tenant's oldest uploads, but keep, where they are too
// many or too old.
func (m *Manager) trimUploads(tenant, keep string) error {
	dir := filepath.Join(m.uploadsDir(), tenant)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return diskError("look through the uploads", err)
	}
	var all []os.FileInfo
	var sum int64
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			all = append(all, fi)
			sum += fi.Size()
		}
	}
	slices.SortFunc(all, func(a, b os.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, fi := range all {
		p := filepath.Join(dir, fi.Name())
		if p == keep || sum <= maxUploads && m.clock.Now().Sub(fi.ModTime()) < uploadKeep {
			continue
		}
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return diskError("remove an old upload", err)
		}
		sum -= fi.Size()
	}
	return nil
}

// sweepUploads removes what a crash left half written, and what is too old.
func (m *Manager) sweepUploads(context.Context) error {
	entries, err := os.ReadDir(m.uploadsDir())
	if err != nil {
		return diskError("look through the uploads", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			err = m.trimUploads(e.Name(), "")
		} else {
			err = os.Remove(filepath.Join(m.uploadsDir(), e.Name()))
		}
		if err != nil {
			return diskError("remove old uploads", err)
		}
	}
	return nil
}
