package layer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// removeDepth is how deep RemoveTree goes with open descriptors before it
// moves what lies deeper up to the top.
const removeDepth = 64

// RemoveTree removes dir and all in it. Unlike os.RemoveAll it needs a bounded
// number of descriptors and no path, so that a tree which a hostile sandbox
// made a million levels deep goes away too. Symlinks are not followed. It is
// nil where dir does not exist.
func RemoveTree(dir string) error {
	parent, err := openDir(filepath.Dir(dir))
	if isNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := removeAt(parent, filepath.Base(dir)); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// removeAt removes name in parent and all below it.
func removeAt(parent *os.File, name string) error {
	st, err := lstatat(parent, name)
	switch {
	case isNotExist(err):
		return nil
	case err != nil:
		return err
	case !isDir(st):
		return unix.Unlinkat(int(parent.Fd()), name, 0)
	}
	r := remover{}
	if r.top, err = strict(parent, name, unix.O_RDONLY|unix.O_DIRECTORY); err != nil {
		return err
	}
	defer r.top.Close()
	// Each pass may lift deeper parts to the top; it ends when one lifts none.
	for again := true; again; {
		lifted := r.lifted
		if err := r.empty(r.top, 0); err != nil {
			return err
		}
		again = r.lifted != lifted
	}
	return unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR)
}

type remover struct {
	top    *os.File
	lifted int
}

// empty removes all in dir.
func (r *remover) empty(dir *os.File, depth int) error {
	for {
		// From the start each time: removing moves a directory's cursor on
		// some filesystems.
		if _, err := dir.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := dir.Readdirnames(1024)
		if errors.Is(err, io.EOF) || (err == nil && len(names) == 0) {
			return nil
		}
		if err != nil {
			return err
		}
		removed := 0
		for _, name := range names {
			ok, err := r.entry(dir, name, depth)
			if err != nil {
				return err
			}
			if ok {
				removed++
			}
		}
		if removed == 0 { // only lifted parts at the top are left for the next pass
			return nil
		}
	}
}

// entry removes one name; false: it was just lifted here.
func (r *remover) entry(dir *os.File, name string, depth int) (bool, error) {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return true, nil
	}
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return false, err
	}
	if unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR) == nil {
		return true, nil
	}
	if depth >= removeDepth {
		r.lifted++
		to := fmt.Sprintf(".warren-removing-%d-%d", os.Getpid(), r.lifted)
		return true, unix.Renameat(int(dir.Fd()), name, int(r.top.Fd()), to)
	}
	sub, err := strict(dir, name, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return false, err
	}
	defer sub.Close()
	if err := r.empty(sub, depth+1); err != nil {
		return false, err
	}
	return true, unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
}
