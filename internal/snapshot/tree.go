package snapshot

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// entry is one file of a data directory as it is on the disk now.
type entry struct {
	File
	ino     uint64
	changed syscall.Timespec // ctime: no program can set it
}

// scan lists all below dir, in order, without following a symbolic link. It
// reads no file.
func scan(ctx context.Context, dir string) ([]entry, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	var all []entry
	var walk func(rel string) error
	walk = func(rel string) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		d, err := root.Open(rel)
		if err != nil {
			return err
		}
		names, err := d.Readdirnames(-1)
		d.Close()
		if err != nil {
			return err
		}
		slices.Sort(names)
		for _, name := range names {
			path := filepath.Join(rel, name)
			fi, err := root.Lstat(path)
			if err != nil {
				return err
			}
			e := entry{File: File{Path: Name(path), Type: fi.Mode().Type()}}
			if st, ok := fi.Sys().(*syscall.Stat_t); ok {
				e.ino, e.changed = st.Ino, st.Ctim
			}
			if fi.Mode().IsRegular() {
				e.Size = fi.Size()
			}
			all = append(all, e)
			if fi.IsDir() {
				if err := walk(path); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return all, walk(".")
}

// sum reads the files of dir and gives their checksums to entries. Those that
// did not change since known were read then.
func sum(ctx context.Context, dir string, entries, known []entry) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	before := make(map[Name]entry, len(known))
	for _, e := range known {
		before[e.Path] = e
	}
	buf := make([]byte, 1<<20)
	for i := range entries {
		e := &entries[i]
		if b, ok := before[e.Path]; ok && unchanged(b, *e) {
			e.Sum = b.Sum
			continue
		}
		switch e.Type {
		case 0:
			if e.Sum, err = sumFile(ctx, root, string(e.Path), buf); err != nil {
				return err
			}
		case fs.ModeSymlink:
			to, err := root.Readlink(string(e.Path))
			if err != nil {
				return err
			}
			e.Sum = Sum(crc32.Checksum([]byte(to), castagnoli))
		}
	}
	return nil
}

func sumFile(ctx context.Context, root *os.Root, path string, buf []byte) (Sum, error) {
	f, err := root.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	var crc uint32
	for at, size := int64(0), st.Size(); at < size; {
		start, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			start, err = size, nil // a hole to the end
		}
		if err != nil {
			return 0, err
		}
		crc = zeros(crc, min(start, size)-at)
		if start >= size {
			break
		}
		end, err := f.Seek(start, unix.SEEK_HOLE)
		if err != nil {
			return 0, err
		}
		for end, at = min(end, size), start; at < end; {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			n, err := f.ReadAt(buf[:min(int64(len(buf)), end-at)], at)
			crc = crc32.Update(crc, castagnoli, buf[:n])
			at += int64(n)
			if err != nil && (n == 0 || !errors.Is(err, io.EOF)) {
				return 0, err
			}
		}
	}
	return Sum(crc), nil
}

// compare tells the first way in which have differs from what m lists. Sums
// are compared where summed.
func compare(m Manifest, have []entry, summed bool) error {
	want := make(map[Name]File, len(m.Files))
	for _, f := range m.Files {
		want[f.Path] = f
	}
	for _, e := range have {
		f, ok := want[e.Path]
		if !ok {
			return fmt.Errorf("there is a file %.80q that was not captured", string(e.Path))
		}
		delete(want, e.Path)
		switch {
		case e.Type != f.Type:
			return fmt.Errorf("file %.80q is of type %v, not %v", string(e.Path), e.Type, f.Type)
		case e.Size != f.Size:
			return fmt.Errorf("file %.80q has %d bytes, not %d", string(e.Path), e.Size, f.Size)
		case summed && e.Sum != f.Sum:
			return fmt.Errorf("the content of file %.80q is not what was captured (CRC-32C %08x, not %08x)", string(e.Path), uint32(e.Sum), uint32(f.Sum))
		}
	}
	for name := range want {
		return fmt.Errorf("file %.80q is missing", string(name))
	}
	return nil
}

// same tells whether nothing changed from a to b.
func same(a, b []entry) bool {
	return slices.EqualFunc(a, b, unchanged)
}

func unchanged(x, y entry) bool {
	return x.Path == y.Path && x.Type == y.Type && x.Size == y.Size && x.ino == y.ino && x.changed == y.changed
}
