package cli

import (
	"archive/tar"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

func setUser(h http.Header, user string) {
	if user != "" {
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
}

// umask reads the process's file mode creation mask.
var umask = sync.OnceValue(func() fs.FileMode {
	m := syscall.Umask(0)
	syscall.Umask(m)
	return fs.FileMode(m)
})

// pack writes the directory dir as a tar archive in which it is called name.
// Symlinks stay symlinks; sockets, pipes and devices are left out.
func (p *copier) pack(ctx context.Context, w io.Writer, dir, name string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(rel string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		link := ""
		switch {
		case st.Mode()&fs.ModeSymlink != 0:
			if link, err = root.Readlink(rel); err != nil {
				return err
			}
		case !st.Mode().IsRegular() && !st.IsDir():
			fmt.Fprintf(p.a.err, "warren: %s is left out: it is neither file, directory nor symlink\n", clean(filepath.Join(dir, rel)))
			return nil
		}
		h, err := tar.FileInfoHeader(st, link)
		if err != nil {
			return err
		}
		h.Name = path.Join(name, rel)
		if st.IsDir() {
			h.Name += "/"
		}
		h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", "" // all of it becomes the user's
		h.Format = tar.FormatPAX                      // long names, large files
		h.AccessTime, h.ChangeTime = time.Time{}, time.Time{}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if !st.Mode().IsRegular() {
			return nil
		}
		f, err := root.Open(rel)
		if err != nil {
			return err
		}
		defer f.Close()
		n, err := io.CopyBuffer(struct{ io.Writer }{tw}, io.LimitReader(f, h.Size), make([]byte, 256<<10))
		p.copied += n
		if err == nil && n < h.Size {
			return fmt.Errorf("%s shrank while it was read", filepath.Join(dir, rel))
		}
		return err
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

// unpack extracts a tar archive out of a sandbox into the directory into,
// calling its one top element as. The archive is hostile: nothing of it may
// land elsewhere, so that every step goes through os.Root, and only files,
// directories and links are made, without set-id bits.
func (p *copier) unpack(ctx context.Context, r io.Reader, into, as string) error {
	if err := os.MkdirAll(into, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(into)
	if err != nil {
		return err
	}
	defer root.Close()
	tr := tar.NewReader(r)
	type dirMeta struct {
		name string
		mode fs.FileMode
		mod  time.Time
	}
	var dirs []dirMeta // their modes and times are set last: files are still to go in
	buf := make([]byte, 256<<10)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("the sandbox's archive: %w", err)
		}
		name, ok := rename(h.Name, as)
		if !ok {
			return fmt.Errorf("the sandbox's archive has the unsafe name %q", clean(h.Name))
		}
		mode := fs.FileMode(h.Mode).Perm()
		if name != as {
			if err := root.MkdirAll(path.Dir(name), 0o777); err != nil {
				return err
			}
		}
		switch h.Typeflag {
		case tar.TypeDir:
			if err := root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			if st, err := root.Lstat(name); err != nil || !st.IsDir() {
				return fmt.Errorf("%s is there and no directory", filepath.Join(into, name))
			}
			if len(dirs) < 1<<20 {
				dirs = append(dirs, dirMeta{name, mode, h.ModTime})
			}
		case tar.TypeReg:
			n, err := p.unpackFile(root, name, mode, h.ModTime, tr, buf)
			p.copied += n
			if err != nil {
				return err
			}
		case tar.TypeSymlink:
			root.Remove(name)
			if err := root.Symlink(h.Linkname, name); err != nil {
				return err
			}
		case tar.TypeLink:
			target, ok := rename(h.Linkname, as)
			if !ok {
				return fmt.Errorf("the sandbox's archive links to the unsafe name %q", clean(h.Linkname))
			}
			root.Remove(name)
			if err := root.Link(target, name); err != nil {
				return err
			}
		case tar.TypeXGlobalHeader:
		default:
			fmt.Fprintf(p.a.err, "warren: %s is left out: it is neither file, directory nor link\n", clean(h.Name))
		}
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		d := dirs[i]
		// What a later entry put in a directory's place is none of ours.
		if st, err := root.Lstat(d.name); err == nil && st.IsDir() {
			root.Chmod(d.name, (d.mode|0o700)&^umask())
			root.Chtimes(d.name, time.Time{}, d.mod)
		}
	}
	return nil
}

func (p *copier) unpackFile(root *os.Root, name string, mode fs.FileMode, mod time.Time, r io.Reader, buf []byte) (int64, error) {
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err // a directory that is not empty, say
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	n, err := io.CopyBuffer(struct{ io.Writer }{f}, struct{ io.Reader }{r}, buf)
	if err != nil {
		return n, err
	}
	if err := f.Chmod(mode &^ umask()); err != nil {
		return n, err
	}
	if err := f.Close(); err != nil {
		return n, err
	}
	return n, root.Chtimes(name, time.Time{}, mod)
}

// rename gives an archive's entry the name that it has here: its first element
// becomes as. ok is false where the name leads out of the archive.
func rename(name, as string) (string, bool) {
	if strings.ContainsRune(name, 0) || strings.HasPrefix(name, "/") {
		return "", false
	}
	clean := path.Clean(name)
	if !filepath.IsLocal(clean) {
		return "", false
	}
	if clean == "." {
		return as, true
	}
	_, rest, _ := strings.Cut(clean, "/")
	return path.Join(as, rest), true
}
