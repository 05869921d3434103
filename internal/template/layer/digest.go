package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"

	"golang.org/x/sys/unix"
)

// Digest hashes e and all below it, as a copy of it would take it: names,
// kinds, modes, owners, link targets, kept attributes and content, but not
// times, so that a fresh checkout of the same files has the same digest.
func (v *View) Digest(ctx context.Context, e Entry, o CopyOptions) (string, error) {
	w := &treeHasher{ctx: ctx, h: sha256.New(), lim: DefaultLimits(), buf: make([]byte, 256<<10)}
	if err := w.view(v, e, "", &o, 0); err != nil {
		return "", Error("hash "+Quote(e.Path), err)
	}
	return hex.EncodeToString(w.h.Sum(nil)), nil
}

func (w *treeHasher) view(v *View, e Entry, name string, o *CopyOptions, depth int) error {
	if depth > w.lim.MaxDepth {
		return tooLarge("depth", "%s is more than %d directories deep", Quote(e.Path), w.lim.MaxDepth)
	}
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := w.head(name, e.Stat); err != nil {
		return err
	}
	switch e.Stat.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := v.Readlink(e)
		if err != nil {
			return err
		}
		w.string(target)
		return nil
	case unix.S_IFREG:
		f, err := v.Open(e)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := w.xattrs(f); err != nil {
			return err
		}
		w.number(uint64(e.Stat.Size))
		_, err = io.CopyBuffer(w.h, WithContext(w.ctx, f), w.buf)
		return err
	case unix.S_IFDIR:
		names, err := v.ReadDir(e)
		if err != nil {
			return err
		}
		for _, n := range names {
			c, err := v.Child(e, n)
			if err != nil {
				return err
			}
			if o.Skip != nil && o.Skip(c.Path, c.IsDir()) {
				continue
			}
			if err := w.view(v, c, n, o, depth+1); err != nil {
				return err
			}
		}
		w.string("")
	}
	return nil
}
