// Package layer makes, reads and removes root filesystem layers: directories
// that overlayfs takes as lowers, with its whiteouts (character devices 0:0)
// and opaque directories (the xattr trusted.overlay.opaque).
//
// What it reads comes from images, archives and sandboxes that nobody vouches
// for. Every path is resolved by the kernel inside a directory's descriptor
// (openat2), never by string, and every size has a limit.
package layer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Limits bound one layer. Zero fields take DefaultLimits' values.
type Limits struct {
	MaxBytes     int64 // file contents together
	MaxFileBytes int64 // one file's content
	MaxEntries   int64 // files, directories, links and whiteouts
	MaxNameBytes int64 // directories' paths together: they are kept in memory until the end
	MaxPathBytes int   // one path, or one link's target
	MaxDepth     int   // components of one path
	MaxRatio     int64 // bytes out per byte in, once RatioFrom bytes came out
	RatioFrom    int64
}

// DefaultLimits fits any image in common use and a small host's disk.
func DefaultLimits() Limits {
	return Limits{
		MaxBytes:     32 << 30,
		MaxFileBytes: 16 << 30,
		MaxEntries:   2_000_000,
		MaxNameBytes: 64 << 20,
		MaxPathBytes: 4095, // PATH_MAX less its NUL
		MaxDepth:     256,
		MaxRatio:     200,
		RatioFrom:    128 << 20,
	}
}

func (l Limits) filled() Limits {
	d := DefaultLimits()
	or(&l.MaxBytes, d.MaxBytes)
	or(&l.MaxFileBytes, d.MaxFileBytes)
	or(&l.MaxEntries, d.MaxEntries)
	or(&l.MaxNameBytes, d.MaxNameBytes)
	or(&l.MaxPathBytes, d.MaxPathBytes)
	or(&l.MaxDepth, d.MaxDepth)
	or(&l.MaxRatio, d.MaxRatio)
	or(&l.RatioFrom, d.RatioFrom)
	return l
}

func or[T int | int64](p *T, d T) {
	if *p == 0 {
		*p = d
	}
}

// maxID is the greatest user or group id that a sandbox can have: its user
// namespace maps 65536.
const maxID = 65535

// nobody takes the place of ids above maxID, as the kernel does where a
// namespace maps none.
const nobody = 65534

// Stats tell what a layer holds.
type Stats struct {
	Bytes   int64 `json:"bytes"` // file contents; hard links count once
	Entries int64 `json:"entries"`
}

func tooLarge(limit string, format string, args ...any) error {
	return sandbox.Errorf(sandbox.CodeTooLarge, format, args...).With("limit", limit)
}

// Quote shows an untrusted name: valid UTF-8, no control characters, and not
// more than a line's worth.
func Quote(s string) string {
	const most = 120
	if len(s) > most {
		cut := most
		for cut > 0 && !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = s[:cut] + "…"
	}
	return fmt.Sprintf("%q", strings.ToValidUTF8(s, "\uFFFD"))
}

// Error gives err of doing something a code: a full disk, an end by ctx and a
// name that the filesystem cannot hold have their own. nil stays nil, and an
// Error stays as it is.
func Error(doing string, err error) error {
	var e *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return err
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return sandbox.Errorf(sandbox.CodeDiskFull, "%s: the disk that holds the templates is full: free space on it or remove templates: %w", doing, err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.CodeCanceled, "%s: canceled: %w", doing, err)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "%s: it took longer than allowed: %w", doing, err)
	case errors.Is(err, unix.ENAMETOOLONG):
		return sandbox.Errorf(sandbox.CodeTooLarge, "%s: a name is longer than the filesystem can hold (255 bytes a component, 4095 a path): %w", doing, err)
	case errors.Is(err, unix.ENOSYS):
		return sandbox.Errorf(sandbox.CodeUnavailable, "%s: the kernel lacks a system call that this needs (openat2, Linux 5.6): %w", doing, err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", doing, err)
}

// reader makes reads end with ctx.
type reader struct {
	ctx context.Context
	r   io.Reader
}

// WithContext gives r, whose reads fail once ctx is done. It does not
// interrupt a read that blocks.
func WithContext(ctx context.Context, r io.Reader) io.Reader { return &reader{ctx, r} }

func (r *reader) Read(p []byte) (int, error) {
	if err := context.Cause(r.ctx); err != nil {
		return 0, r.ctx.Err()
	}
	return r.r.Read(p)
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
