package buildctx

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// Pack gives the directory dir as a tar stream, without what its ignore file
// leaves out. The Dockerfile and the ignore file are always in it: the build
// needs them. Owners are left out, as Docker does. Reading fails where a file
// changes or cannot be read; closing early ends the packing.
func Pack(ctx context.Context, dir, dockerfile string) (io.ReadCloser, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, sandbox.Errorf(sandbox.CodeNotFound, "the build context %s does not exist", layer.Quote(dir))
		default:
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the build context %s cannot be read: %w", layer.Quote(dir), err)
		}
	}
	if dockerfile, err = Clean(dockerfile); err != nil {
		root.Close()
		return nil, err
	}
	ig, err := Load(root, dockerfile)
	if err != nil {
		root.Close()
		return nil, err
	}
	if ig != nil {
		ig.keep = []string{dockerfile, dockerfile + IgnoreFile, IgnoreFile}
	}
	r, w := io.Pipe()
	go func() { // ends when all is written, or the reader closes
		defer root.Close()
		w.CloseWithError(pack(ctx, root, ig, w))
	}()
	return r, nil
}

func pack(ctx context.Context, root *os.Root, ig *Ignore, w io.Writer) error {
	tw := tar.NewWriter(w)
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		ignored, err := ig.Match(name)
		if err != nil {
			return err
		}
		if ignored && d.IsDir() && ig.whole(name) {
			return fs.SkipDir
		}
		if ignored {
			return nil
		}
		return add(ctx, root, tw, name)
	})
	if err != nil {
		var e *sandbox.Error
		if errors.As(err, &e) || ctx.Err() != nil {
			return layer.Error("pack the build context", err)
		}
		return sandbox.Errorf(sandbox.CodeInvalid, "the build context cannot be read: %w; keep unreadable files out by %s", err, IgnoreFile)
	}
	return tw.Close()
}

func add(ctx context.Context, root *os.Root, tw *tar.Writer, name string) error {
	st, err := root.Lstat(name)
	if err != nil {
		return err
	}
	h := &tar.Header{Name: name, Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX}
	for bit, mode := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if st.Mode()&bit != 0 {
			h.Mode |= mode
		}
	}
	switch {
	case st.IsDir():
		h.Typeflag = tar.TypeDir
		h.Name += "/"
		return tw.WriteHeader(h)
	case st.Mode()&fs.ModeSymlink != 0:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = root.Readlink(name); err != nil {
			return err
		}
		return tw.WriteHeader(h)
	case !st.Mode().IsRegular():
		return nil // sockets, fifos and devices have no content to build with
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if st, err = f.Stat(); err != nil {
		return err
	}
	h.Typeflag, h.Size = tar.TypeReg, st.Size()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(tw, io.LimitReader(layer.WithContext(ctx, f), h.Size))
	if err == nil && n != h.Size {
		err = sandbox.Errorf(sandbox.CodeConflict, "%s changed while it was read: try again", layer.Quote(name))
	}
	return err
}
