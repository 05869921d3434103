package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/filesystem"
)

func (a *app) cpCmd() *cobra.Command {
	var user string
	var quiet bool
	cmd := &cobra.Command{
		Use:   "cp SOURCE DEST",
		Short: "Copy files and directories into or out of a sandbox",
		Long: "One side is ID:PATH, the other a path here, or - for standard input or output.\n" +
			"Into a directory that is there, the copy keeps its name; else DEST is its name.\n" +
			"- carries a file's bytes; for a directory, a tar archive. A local name that looks\n" +
			"like ID:PATH is written ./ID:PATH.",
		Example: "  warren cp data.csv $id:/home/user/\n" +
			"  warren cp $id:/home/user/out ./results\n" +
			"  warren cp $id:/etc - | tar t\n" +
			"  tar c src | warren cp - $id:/work/",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completePlaces,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			src, err := parsePlace(args[0])
			if err != nil {
				return err
			}
			dst, err := parsePlace(args[1])
			if err != nil {
				return err
			}
			p := copier{a: a, c: c, user: user, quiet: quiet || a.json}
			switch {
			case src.id == "" && dst.id == "":
				return usagef("neither side is in a sandbox: write ID:PATH for one of them")
			case src.id != "" && dst.id != "":
				return usagef("both sides are in sandboxes: copy to here first")
			case src.id != "":
				err = p.download(ctx, src, dst)
			default:
				err = p.upload(ctx, src, dst)
			}
			if err == nil && a.json {
				return a.printJSON(map[string]any{"source": args[0], "dest": args[1], "bytes": p.copied})
			}
			return err
		}),
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "whose the copy is, and whose home relative paths begin at")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "show no progress")
	return cmd
}

// copier is one copy.
type copier struct {
	a      *app
	c      *client.Client
	user   string
	quiet  bool
	copied int64 // bytes of content
}

// stat looks at a path inside; nil where nothing is there.
func (p *copier) stat(ctx context.Context, at place) (*filesystem.EntryInfo, error) {
	req := connect.NewRequest(&filesystem.StatRequest{Path: at.path})
	setUser(req.Header(), p.user)
	res, err := p.c.Filesystem(at.id).Stat(ctx, req)
	if err != nil {
		err = p.c.Error(err)
		// The sandbox itself may be what is not found.
		if sandbox.CodeOf(err) == sandbox.CodeNotFound {
			if _, serr := p.c.Sandbox(ctx, at.id); serr != nil {
				return nil, serr
			}
			return nil, nil
		}
		return nil, err
	}
	return res.Msg.GetEntry(), nil
}

func isDir(e *filesystem.EntryInfo) bool {
	return e != nil && e.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY
}

// isDirBehindLink tells whether at is a directory, also by way of a symlink.
func (p *copier) isDirBehindLink(ctx context.Context, at place, e *filesystem.EntryInfo) (bool, error) {
	if e == nil || e.GetType() != filesystem.FileType_FILE_TYPE_SYMLINK {
		return isDir(e), nil
	}
	in, err := p.stat(ctx, place{id: at.id, path: at.path + "/."})
	if err != nil && sandbox.CodeOf(err) == sandbox.CodeInvalid {
		return false, nil // a link to a file
	}
	return isDir(in), err
}

func (p *copier) upload(ctx context.Context, src, dst place) error {
	there, err := p.stat(ctx, dst)
	if err != nil {
		return err
	}
	intoDir, err := p.isDirBehindLink(ctx, dst, there)
	if err != nil {
		return err
	}
	intoDir = intoDir || strings.HasSuffix(dst.path, "/")
	if src.std {
		if intoDir {
			return p.c.WriteTar(ctx, dst.id, dst.path, p.user, p.count(os.Stdin))
		}
		return p.c.WriteFile(ctx, dst.id, dst.path, p.user, p.count(p.a.in), -1, 0)
	}
	st, err := os.Stat(src.path)
	if err != nil {
		return err
	}
	name := baseName(src.path)
	switch {
	case st.IsDir():
		if there != nil && !intoDir {
			return sandbox.Errorf(sandbox.CodeConflict, "%s is a file: a directory cannot go there", dst.path)
		}
		target := dst.path
		if !intoDir || there == nil {
			// DEST is the copy's own name: its parent takes the archive.
			name, target = path.Base(path.Clean(dst.path)), path.Dir(path.Clean(dst.path))
			if name == "/" || name == "." || name == ".." {
				return usagef("%q is no name for the copy", dst.path)
			}
		}
		bar := p.bar(name, -1)
		defer bar.done()
		pr, pw := io.Pipe()
		defer pr.Close()
		go func() { pw.CloseWithError(p.pack(ctx, pw, src.path, name)) }()
		return bar.end(p.c.WriteTar(ctx, dst.id, target, p.user, bar.reader(pr)))
	case st.Mode().IsRegular():
		f, err := os.Open(src.path)
		if err != nil {
			return err
		}
		defer f.Close()
		target := dst.path
		if intoDir {
			target = path.Join(dst.path, name)
		}
		bar := p.bar(name, st.Size())
		defer bar.done()
		return bar.end(p.c.WriteFile(ctx, dst.id, target, p.user, p.count(bar.reader(f)), st.Size(), st.Mode().Perm()))
	}
	// A pipe or a device: its bytes, however many.
	f, err := os.Open(src.path)
	if err != nil {
		return err
	}
	defer f.Close()
	if intoDir {
		dst.path = path.Join(dst.path, name)
	}
	return p.c.WriteFile(ctx, dst.id, dst.path, p.user, p.count(f), -1, 0)
}

func baseName(local string) string {
	abs, err := filepath.Abs(local)
	if err != nil {
		return filepath.Base(local)
	}
	return filepath.Base(abs)
}

func (p *copier) download(ctx context.Context, src, dst place) error {
	there, err := p.stat(ctx, src)
	if err != nil {
		return err
	}
	if there == nil {
		return sandbox.Errorf(sandbox.CodeNotFound, "%s: no such file or directory in sandbox %s", src.path, src.id)
	}
	dir, err := p.isDirBehindLink(ctx, src, there)
	if err != nil {
		return err
	}
	if dst.std {
		if dir {
			return p.tarTo(ctx, src, p.a.out)
		}
		return p.fileTo(ctx, src, p.a.out, "")
	}
	name := path.Base(path.Clean("/" + src.path))
	local, err := os.Stat(dst.path)
	switch {
	case err == nil && local.IsDir():
	case err == nil && dir:
		return fmt.Errorf("%s is a file: a directory cannot go there", dst.path)
	case err == nil:
	case !errors.Is(err, fs.ErrNotExist):
		return err
	case strings.HasSuffix(dst.path, "/") && !dir:
		return fmt.Errorf("%s: no such directory", dst.path)
	}
	into, as := dst.path, name
	if local == nil || !local.IsDir() { // DEST is the copy's own name
		into, as = filepath.Split(filepath.Clean(dst.path))
		if into == "" {
			into = "."
		}
	}
	if as == "/" || as == "." || as == ".." {
		as = "rootfs" // the root itself has no name
	}
	if !dir {
		return p.fileTo(ctx, src, nil, filepath.Join(into, as))
	}
	r, err := p.c.ReadTar(ctx, src.id, src.path, p.user)
	if err != nil {
		return err
	}
	defer r.Close()
	bar := p.bar(as, -1)
	defer bar.done()
	return bar.end(p.unpack(ctx, bar.reader(r), into, as))
}

func (p *copier) tarTo(ctx context.Context, src place, w io.Writer) error {
	r, err := p.c.ReadTar(ctx, src.id, src.path, p.user)
	if err != nil {
		return err
	}
	defer r.Close()
	_, err = copyBig(w, p.count(r))
	return err
}

// fileTo copies a file inside to w, or to the local file name, which appears
// only when it is whole.
func (p *copier) fileTo(ctx context.Context, src place, w io.Writer, name string) error {
	r, n, err := p.c.ReadFile(ctx, src.id, src.path, p.user)
	if err != nil {
		return err
	}
	defer r.Close()
	if w != nil {
		_, err := copyBig(w, p.count(r))
		return err
	}
	if st, err := os.Lstat(name); err == nil && !st.Mode().IsRegular() && st.Mode()&fs.ModeSymlink == 0 {
		// A device or a pipe is written to, not replaced.
		f, err := os.OpenFile(name, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = copyBig(f, p.count(r))
		return errors.Join(err, f.Close())
	}
	tmp, err := os.CreateTemp(filepath.Dir(name), ".warren-cp-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	defer tmp.Close()
	bar := p.bar(filepath.Base(name), n)
	defer bar.done()
	if _, err := copyBig(tmp, p.count(bar.reader(r))); err != nil {
		return bar.end(err)
	}
	mode := fs.FileMode(0o644)
	if st, err := os.Stat(name); err == nil {
		mode = st.Mode().Perm()
	} else if e, err := p.stat(ctx, src); err == nil && e != nil {
		mode = fs.FileMode(e.GetMode()).Perm()
	}
	if err := tmp.Chmod(mode &^ umask()); err != nil {
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return bar.end(os.Rename(tmp.Name(), name))
}

// copyBig copies by large buffers.
func copyBig(dst io.Writer, src io.Reader) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, 256<<10))
}

// count counts what is read.
func (p *copier) count(r io.Reader) io.Reader { return &counter{r, &p.copied} }

type counter struct {
	r io.Reader
	n *int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	*c.n += int64(n)
	return n, err
}
