package gvisor

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

const (
	// shareLeast is the disk that is worth the looking.
	shareLeast = 16 << 20
	// shareStep is how much is compared in one call, in which the sandbox waits
	// for its disk.
	shareStep = 1 << 20
)

// ShareDisk implements sandbox.DiskSharer. A restored Sentry has the same pages
// at the same places of its file as the one that was captured; the kernel
// compares them and has the two files share the blocks of those that are equal
// (FIDEDUPERANGE, ioctl_fideduperange(2)). No byte of either changes, whatever
// the sandboxes write meanwhile.
func (i *Instance) ShareDisk(ctx context.Context, from sandbox.Instance) error {
	src, ok := from.(*Instance)
	if !ok {
		return sandbox.Errorf(sandbox.CodeInvalid, "share the disk of sandbox %s: the other is of another runtime", i.Spec().ID)
	}
	a, err := src.filestore()
	if err != nil {
		return i.notShared(ctx, err)
	}
	defer a.Close()
	b, err := i.filestore()
	if err != nil {
		return i.notShared(ctx, err)
	}
	defer b.Close()
	return i.notShared(ctx, shareFiles(ctx, a, b))
}

// ShareCapture implements sandbox.DiskSharer. A capture has the pages of the
// disk too, closed up; where they lie is found by their content.
func (i *Instance) ShareCapture(ctx context.Context, dir string) error {
	a, err := i.filestore()
	if err != nil {
		return i.notShared(ctx, err)
	}
	defer a.Close()
	// Of its own ctime: who checks captures goes by it, and the content is the
	// same.
	b, err := os.Open(filepath.Join(dir, pagesName))
	if err != nil {
		return i.notShared(ctx, err)
	}
	defer b.Close()
	return i.notShared(ctx, shareFound(ctx, a, b))
}

func (i *Instance) notShared(ctx context.Context, err error) error {
	switch {
	case err == nil, errors.Is(err, errNoSharing):
		return nil
	case ctx.Err() != nil:
		return sandbox.Errorf(sandbox.CodeCanceled, "share the disk of sandbox %s: %w", i.Spec().ID, ctx.Err())
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "share the disk of sandbox %s: %w", i.Spec().ID, err)
}

// errNoSharing is of a filesystem whose files cannot share blocks.
var errNoSharing = errors.New("the filesystem has no reflinks")

// shareFiles shares what is equal at equal places.
func shareFiles(ctx context.Context, src, dst *os.File) error {
	a, err := src.Stat()
	if err != nil {
		return err
	}
	b, err := dst.Stat()
	if err != nil {
		return err
	}
	size := min(a.Size(), b.Size())
	if size < shareLeast {
		return nil
	}
	for at := int64(0); at < size; {
		// Holes need no sharing.
		start, err := unix.Seek(int(dst.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		start &^= pageSize - 1
		end, err := unix.Seek(int(dst.Fd()), max(start, at), unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		end = min(end, size) &^ (pageSize - 1)
		for p := start; p < end; p += shareStep {
			if err := shareRange(ctx, src, dst, p, p, min(shareStep, end-p)); err != nil {
				return err
			}
		}
		at = max(end, at+pageSize)
	}
	return nil
}

// shareRange has dst share n bytes with src where both are equal. Where they
// are not it tries the halves, down to 64 KiB.
func shareRange(ctx context.Context, src, dst *os.File, from, to, n int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for n > 0 {
		r := unix.FileDedupeRange{
			Src_offset: uint64(from), Src_length: uint64(n),
			Info: []unix.FileDedupeRangeInfo{{Dest_fd: int64(dst.Fd()), Dest_offset: uint64(to)}},
		}
		err := unix.IoctlFileDedupeRange(int(src.Fd()), &r)
		if err == nil && r.Info[0].Status < 0 {
			err = unix.Errno(-r.Info[0].Status)
		}
		switch {
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTTY):
			return errNoSharing
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ETXTBSY):
			return nil // beyond an end that moved
		case err != nil:
			return fmt.Errorf("compare blocks: %w", err)
		case r.Info[0].Status == unix.FILE_DEDUPE_RANGE_DIFFERS:
			if half := n / 2 &^ (pageSize - 1); half >= 64<<10 {
				if err := shareRange(ctx, src, dst, from, to, half); err != nil {
					return err
				}
				return shareRange(ctx, src, dst, from+half, to+half, n-half)
			}
			return nil
		}
		done := int64(r.Info[0].Bytes_deduped)
		if done <= 0 {
			return nil
		}
		from, to, n = from+done, to+done, n-done
	}
	return nil
}

// shareFound shares runs of pages of dst that are in src at whatever place. It
// knows src by a page in every 256 KiB.
func shareFound(ctx context.Context, src, dst *os.File) error {
	const every = 256 << 10
	fi, err := src.Stat()
	if err != nil {
		return err
	}
	if fi.Size() < shareLeast {
		return nil
	}
	seed := maphash.MakeSeed()
	known := map[uint64]int64{}
	page := make([]byte, pageSize)
	for at := int64(0); at+pageSize <= fi.Size(); at += every {
		start, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return err
		}
		if start > at { // in a hole: the next mark within data
			at = start &^ (pageSize - 1)
		}
		if _, err := src.ReadAt(page, at); err != nil {
			break
		}
		if !zero(page) {
			known[maphash.Bytes(seed, page)] = at
		}
	}
	step := make([]byte, shareStep)
	for at := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := dst.ReadAt(step, at)
		n &^= pageSize - 1
		next := at + int64(n)
		for p := 0; p < n; p += pageSize {
			from, ok := known[maphash.Bytes(seed, step[p:p+pageSize])]
			if !ok {
				continue
			}
			to := at + int64(p)
			run, err := equalRun(src, dst, from, to, every)
			if err != nil {
				return err
			}
			if run < 64<<10 {
				continue
			}
			if err := shareRange(ctx, src, dst, from, to, run); err != nil {
				return err
			}
			if end := int(to + run - at); end < n {
				p = end - pageSize
				continue
			}
			next = max(next, to+run)
			break
		}
		if n == 0 {
			return nil
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		at = next
	}
}

// equalRun tells how many bytes, of most at the most and in whole pages, are
// equal in a at x and in b at y.
func equalRun(a, b *os.File, x, y, most int64) (int64, error) {
	p, q := make([]byte, most), make([]byte, most)
	n, err := a.ReadAt(p, x)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	m, err := b.ReadAt(q, y)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	n = min(n, m) &^ (pageSize - 1)
	for k := 0; k < n; k += pageSize {
		if string(p[k:k+pageSize]) != string(q[k:k+pageSize]) {
			return int64(k), nil
		}
	}
	return int64(n), nil
}
