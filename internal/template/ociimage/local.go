package ociimage

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// files is a tree of named files: a directory or an archive's index.
type files interface {
	// open gives a file's content; fs.ErrNotExist where there is none.
	open(name string) (io.ReadCloser, error)
}

// layoutBlobs reads the blobs of an OCI layout. Source: image-spec,
// image-layout.md.
type layoutBlobs struct{ f files }

func (b layoutBlobs) manifest(ctx context.Context, digest string) (io.ReadCloser, error) {
	return b.blob(ctx, digest)
}

func (b layoutBlobs) blob(_ context.Context, digest string) (io.ReadCloser, error) {
	if err := CheckDigest(digest); err != nil {
		return nil, err
	}
	r, err := b.f.open("blobs/sha256/" + digest[len("sha256:"):])
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the image lacks its blob %s: it is not whole", digest)
	}
	return r, layer.Error("read the image", err)
}

// dirFiles is a directory of this host.
type dirFiles struct{ root *os.Root }

func (d dirFiles) open(name string) (io.ReadCloser, error) {
	f, err := d.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // not blocking: it could be a fifo
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = sandbox.Errorf(sandbox.CodeInvalid, "%s of the image is not a regular file", layer.Quote(name))
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// FromLayout finds an image in an OCI layout directory. The caller closes it
// when the layers are read.
func FromLayout(ctx context.Context, ref Ref) (*Image, io.Closer, error) {
	root, err := os.OpenRoot(ref.Path)
	if err != nil {
		return nil, nil, openError(ref, err)
	}
	img, err := fromLayout(ctx, dirFiles{root}, ref)
	if err != nil {
		root.Close()
		return nil, nil, err
	}
	return img, root, nil
}

func openError(ref Ref, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.Errorf(sandbox.CodeNotFound, "there is nothing at %s on the daemon's host", layer.Quote(ref.Path))
	case errors.Is(err, fs.ErrPermission):
		return sandbox.Errorf(sandbox.CodeForbidden, "the daemon may not read %s", layer.Quote(ref.Path))
	}
	return sandbox.Errorf(sandbox.CodeInvalid, "%s cannot be opened: %w", layer.Quote(ref.Path), err)
}

func fromLayout(ctx context.Context, f files, ref Ref) (*Image, error) {
	data, err := readFile(f, "index.json", maxManifest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is not an OCI layout: it has no index.json", layer.Quote(ref.Path))
	}
	if err != nil {
		return nil, err
	}
	var index v1.IndexManifest
	if err := decode(data, &index, "index"); err != nil {
		return nil, err
	}
	d, err := pick(&index, ref)
	if err != nil {
		return nil, err
	}
	return resolve(ctx, layoutBlobs{f}, d.Digest.String(), ref.String(), 0)
}

// refName is the annotation that names an image in a layout. Source:
// image-spec, annotations.md.
const refName = "org.opencontainers.image.ref.name"

// pick finds the image that ref means among a layout's.
func pick(index *v1.IndexManifest, ref Ref) (v1.Descriptor, error) {
	if ref.Tag == "" {
		if len(index.Manifests) == 1 {
			return index.Manifests[0], nil
		}
		return choose(index, ref.String())
	}
	var tags []string
	for _, m := range index.Manifests {
		tag := m.Annotations[refName]
		// Tools write the tag alone or the whole reference.
		if tag == ref.Tag || strings.HasSuffix(tag, ":"+ref.Tag) || m.Annotations["io.containerd.image.name"] == ref.Tag {
			return m, nil
		}
		if tag != "" && len(tags) < 16 {
			tags = append(tags, layer.Quote(tag))
		}
	}
	return v1.Descriptor{}, sandbox.Errorf(sandbox.CodeNotFound, "%s has no image %s; it has: %s", layer.Quote(ref.Path), layer.Quote(ref.Tag), strings.Join(tags, ", "))
}

func readFile(f files, name string, most int64) ([]byte, error) {
	r, err := f.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(r, most+1))
	if err != nil {
		return nil, layer.Error("read "+name+" of the image", err)
	}
	if int64(len(data)) > most {
		return nil, sandbox.Errorf(sandbox.CodeTooLarge, "%s of the image has more than %d bytes", name, most).With("limit", "manifest_bytes")
	}
	return data, nil
}

// Limits of an archive's own index.
const (
	maxArchiveEntries = 100_000
	maxArchiveNames   = 32 << 20 // bytes of names together
	maxArchiveLinks   = 16       // symlinks followed for one file
)

// archiveFiles is a tar archive that can be read at any place: where each
// file is, without unpacking it.
type archiveFiles struct {
	r     io.ReaderAt
	where map[string]section
}

type section struct {
	off, size int64
	link      string // a symlink's or hard link's target, as a name in the archive
}

// indexArchive reads an archive's headers. r is seekable, so that contents
// are skipped.
func indexArchive(ctx context.Context, f io.ReadSeeker, at io.ReaderAt) (*archiveFiles, error) {
	a := &archiveFiles{r: at, where: map[string]section{}}
	tr := tar.NewReader(struct {
		io.Reader
		io.Seeker
	}{layer.WithContext(ctx, f), f})
	names := 0
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return a, nil
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil, layer.Error("read the archive", ctx.Err())
			}
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive is not a valid tar file; docker save's is not compressed: %w", err)
		}
		name := path.Clean("/" + h.Name)[1:]
		if names += len(name); len(a.where) >= maxArchiveEntries || names > maxArchiveNames {
			return nil, sandbox.Errorf(sandbox.CodeTooLarge, "the archive has more than %d entries, or longer names: it is no image", maxArchiveEntries).With("limit", "entries")
		}
		switch h.Typeflag {
		case tar.TypeReg:
			off, err := f.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, layer.Error("read the archive", err)
			}
			a.where[name] = section{off: off, size: h.Size}
		case tar.TypeSymlink: // older docker saves share layers so
			a.where[name] = section{link: path.Clean("/" + path.Join(path.Dir(name), h.Linkname))[1:]}
		case tar.TypeLink:
			a.where[name] = section{link: path.Clean("/" + h.Linkname)[1:]}
		}
	}
}

func (a *archiveFiles) open(name string) (io.ReadCloser, error) {
	name = path.Clean("/" + name)[1:]
	for range maxArchiveLinks {
		s, ok := a.where[name]
		if !ok {
			return nil, fs.ErrNotExist
		}
		if s.link == "" {
			return io.NopCloser(io.NewSectionReader(a.r, s.off, s.size)), nil
		}
		name = s.link
	}
	return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive's entry %s goes round in links", layer.Quote(name))
}

// FromArchive finds an image in an archive made by docker save, or a tar of
// an OCI layout. The caller closes it when the layers are read.
func FromArchive(ctx context.Context, ref Ref) (*Image, io.Closer, error) {
	f, err := os.OpenFile(ref.Path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, openError(ref, err)
	}
	if st, err := f.Stat(); err == nil && !st.Mode().IsRegular() {
		f.Close()
		return nil, nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a regular file: a directory is given as oci:DIR", layer.Quote(ref.Path))
	}
	img, err := readArchive(ctx, f, f, ref)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return img, f, nil
}

func readArchive(ctx context.Context, f io.ReadSeeker, at io.ReaderAt, ref Ref) (*Image, error) {
	a, err := indexArchive(ctx, f, at)
	if err != nil {
		return nil, err
	}
	data, err := readFile(a, "manifest.json", maxManifest)
	if errors.Is(err, fs.ErrNotExist) {
		if _, ok := a.where["index.json"]; ok {
			return fromLayout(ctx, a, ref)
		}
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is no image archive: it has neither manifest.json (docker save) nor index.json (OCI layout)", layer.Quote(ref.Path))
	}
	if err != nil {
		return nil, err
	}
	return fromDockerSave(a, data, ref)
}

// saved is one image of docker save's manifest.json. Source: moby,
// image/tarexport.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func fromDockerSave(a *archiveFiles, manifest []byte, ref Ref) (*Image, error) {
	var images []saved
	if err := json.Unmarshal(manifest, &images); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive's manifest.json is not valid: %w", err)
	}
	s, err := pickSaved(images, ref)
	if err != nil {
		return nil, err
	}
	img := &Image{Source: ref.String()}
	raw, err := readFile(a, s.Config, maxConfig)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive lacks the image's config %s: it is not whole", layer.Quote(s.Config))
	}
	if err != nil {
		return nil, err
	}
	if err := img.config(raw); err != nil {
		return nil, err
	}
	if len(s.Layers) != len(img.Config.RootFS.DiffIDs) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive has %d layers but its config names %d: it is damaged", len(s.Layers), len(img.Config.RootFS.DiffIDs))
	}
	for i, name := range s.Layers {
		if _, ok := a.where[path.Clean("/" + name)[1:]]; !ok {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the archive lacks the layer %s: it is not whole", layer.Quote(name))
		}
		img.Layers = append(img.Layers, Layer{
			DiffID: img.Config.RootFS.DiffIDs[i].String(), Size: -1,
			Open: func(context.Context) (io.ReadCloser, error) {
				r, err := a.open(name)
				return r, layer.Error("read the archive", err)
			},
		})
	}
	return img, nil
}

func pickSaved(images []saved, ref Ref) (saved, error) {
	var tags []string
	for _, s := range images {
		for _, t := range s.RepoTags {
			if t == ref.Tag || t == ref.Tag+":latest" || strings.HasSuffix(t, "/"+ref.Tag) {
				return s, nil
			}
			if len(tags) < 16 {
				tags = append(tags, layer.Quote(t))
			}
		}
	}
	if ref.Tag == "" && len(images) == 1 {
		return images[0], nil
	}
	if ref.Tag == "" {
		return saved{}, sandbox.Errorf(sandbox.CodeInvalid, "the archive has %d images: name one after the file, docker-archive:FILE:REF, of %s", len(images), strings.Join(tags, ", "))
	}
	return saved{}, sandbox.Errorf(sandbox.CodeNotFound, "the archive has no image %s; it has: %s", layer.Quote(ref.Tag), strings.Join(tags, ", "))
}
