package ociimage

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"io"
	"regexp"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// Limits of what an image says about itself. Docker's own registry takes
// manifests of 4 MiB; layers are bounded by layer.Limits.
const (
	maxManifest = 4 << 20
	maxConfig   = 8 << 20
	maxLayers   = 512
	maxNesting  = 4 // indexes in indexes
)

// Image is one image of one platform.
type Image struct {
	Source string        // where it is, with the manifest's digest, for people
	Config v1.ConfigFile // untrusted
	Layers []Layer       // bottommost first
}

// Layer is one of an image's layers.
type Layer struct {
	Digest string // of what Open gives; "" where only DiffID is known (docker save)
	DiffID string // of the uncompressed tar stream
	Size   int64  // of what Open gives; -1 is not known
	Open   func(ctx context.Context) (io.ReadCloser, error)
}

var digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// CheckDigest tells whether s is a sha256 digest in canonical form: it becomes
// a file's name.
func CheckDigest(s string) error {
	if !digestPattern.MatchString(s) {
		return sandbox.Errorf(sandbox.CodeInvalid, "the image names a blob %s: only sha256 digests are supported", layer.Quote(s))
	}
	return nil
}

// blobs is where an image's parts are read from.
type blobs interface {
	// manifest opens the manifest or index of that digest.
	manifest(ctx context.Context, digest string) (io.ReadCloser, error)
	// blob opens the config or layer of that digest.
	blob(ctx context.Context, digest string) (io.ReadCloser, error)
}

// readSmall reads a manifest or config and verifies it.
func readSmall(ctx context.Context, open func(context.Context, string) (io.ReadCloser, error), digest string, most int64, what string) ([]byte, error) {
	if err := CheckDigest(digest); err != nil {
		return nil, err
	}
	r, err := open(ctx, digest)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	data, err := io.ReadAll(io.LimitReader(layer.WithContext(ctx, r), most+1))
	if err != nil {
		return nil, layer.Error("read the image's "+what, err)
	}
	if int64(len(data)) > most {
		return nil, sandbox.Errorf(sandbox.CodeTooLarge, "the image's %s has more than %d bytes", what, most).With("limit", what+"_bytes")
	}
	if sum := sha256.Sum256(data); "sha256:"+hex.EncodeToString(sum[:]) != digest {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the image's %s does not match its digest %s: it is damaged or was tampered with", what, digest)
	}
	return data, nil
}

func decode(data []byte, into any, what string) error {
	if err := json.NewDecoder(bytes.NewReader(data)).Decode(into); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the image's %s is not valid JSON: %w", what, err)
	}
	return nil
}

// platform is what images for this host say.
func platform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

func matches(p *v1.Platform) bool {
	want := platform()
	return p != nil && p.OS == want.OS && p.Architecture == want.Architecture
}

// choose picks the manifest for this host out of an index. A manifest that
// says no platform is taken where it is the only one.
func choose(index *v1.IndexManifest, source string) (v1.Descriptor, error) {
	var have []string
	var candidates []v1.Descriptor
	for _, m := range index.Manifests {
		if !m.MediaType.IsImage() && !m.MediaType.IsIndex() {
			continue
		}
		// buildkit's attestations sit in the index as images of no platform.
		if m.Annotations["vnd.docker.reference.type"] != "" {
			continue
		}
		if matches(m.Platform) {
			return m, nil
		}
		candidates = append(candidates, m)
		if m.Platform != nil && len(have) < 16 {
			have = append(have, layer.Quote(m.Platform.OS+"/"+m.Platform.Architecture))
		}
	}
	if len(candidates) == 1 && candidates[0].Platform == nil {
		return candidates[0], nil
	}
	slices.Sort(have)
	return v1.Descriptor{}, sandbox.Errorf(sandbox.CodeUnsupported, "the image %s is not there for %s/%s; it has: %s", layer.Quote(source), platform().OS, platform().Architecture, strings.Join(slices.Compact(have), ", "))
}

// resolve follows a descriptor to one image.
func resolve(ctx context.Context, b blobs, digest, source string, depth int) (*Image, error) {
	data, err := readSmall(ctx, b.manifest, digest, maxManifest, "manifest")
	if err != nil {
		return nil, err
	}
	var kind struct {
		MediaType types.MediaType `json:"mediaType"`
		Manifests json.RawMessage `json:"manifests"`
	}
	if err := decode(data, &kind, "manifest"); err != nil {
		return nil, err
	}
	if kind.MediaType.IsIndex() || (kind.MediaType == "" && kind.Manifests != nil) {
		if depth >= maxNesting {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the image %s nests indexes more than %d deep", layer.Quote(source), maxNesting)
		}
		var index v1.IndexManifest
		if err := decode(data, &index, "index"); err != nil {
			return nil, err
		}
		d, err := choose(&index, source)
		if err != nil {
			return nil, err
		}
		return resolve(ctx, b, d.Digest.String(), source, depth+1)
	}
	if kind.MediaType == types.DockerManifestSchema1 || kind.MediaType == types.DockerManifestSchema1Signed {
		return nil, sandbox.Errorf(sandbox.CodeUnsupported, "the image %s has a manifest of Docker's first schema, which registries gave up: push it again with a current tool", layer.Quote(source))
	}
	var m v1.Manifest
	if err := decode(data, &m, "manifest"); err != nil {
		return nil, err
	}
	return fromManifest(ctx, b, &m, source+"@"+digest)
}

func fromManifest(ctx context.Context, b blobs, m *v1.Manifest, source string) (*Image, error) {
	img := &Image{Source: source}
	raw, err := readSmall(ctx, b.blob, m.Config.Digest.String(), maxConfig, "config")
	if err != nil {
		return nil, err
	}
	if err := img.config(raw); err != nil {
		return nil, err
	}
	if len(m.Layers) != len(img.Config.RootFS.DiffIDs) {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the image %s has %d layers but names %d: it is not a container image, or damaged", layer.Quote(source), len(m.Layers), len(img.Config.RootFS.DiffIDs))
	}
	for i, d := range m.Layers {
		if !d.MediaType.IsLayer() || !d.MediaType.IsDistributable() || len(d.URLs) > 0 {
			return nil, sandbox.Errorf(sandbox.CodeUnsupported, "layer %d of the image %s has the type %s, which is not supported: give it as tar, gzip or zstd in the registry itself", i+1, layer.Quote(source), layer.Quote(string(d.MediaType)))
		}
		digest := d.Digest.String()
		if err := CheckDigest(digest); err != nil {
			return nil, err
		}
		if d.Size < 0 {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "layer %d of the image %s has the size %d", i+1, layer.Quote(source), d.Size)
		}
		img.Layers = append(img.Layers, Layer{
			Digest: digest, DiffID: img.Config.RootFS.DiffIDs[i].String(), Size: d.Size,
			Open: func(ctx context.Context) (io.ReadCloser, error) { return b.blob(ctx, digest) },
		})
	}
	return img, nil
}

// config reads and checks an image's configuration.
func (img *Image) config(raw []byte) error {
	if err := decode(raw, &img.Config, "config"); err != nil {
		return err
	}
	c := img.Config
	want := platform()
	if (c.OS != "" && c.OS != want.OS) || (c.Architecture != "" && c.Architecture != want.Architecture) {
		return sandbox.Errorf(sandbox.CodeUnsupported, "the image %s is for %s, this host is %s/%s", layer.Quote(img.Source), layer.Quote(c.OS+"/"+c.Architecture), want.OS, want.Architecture)
	}
	if n := len(c.RootFS.DiffIDs); n > maxLayers {
		return sandbox.Errorf(sandbox.CodeTooLarge, "the image %s has %d layers: the most is %d", layer.Quote(img.Source), n, maxLayers).With("limit", "layers")
	}
	for _, d := range c.RootFS.DiffIDs {
		if err := CheckDigest(d.String()); err != nil {
			return err
		}
	}
	return nil
}

// Pull extracts one layer into dir, which must not exist, and verifies what it
// read: neither more nor other bytes than the image's digests say. On error
// the caller removes dir. read takes the compressed bytes so far.
func (l Layer) Pull(ctx context.Context, dir string, o layer.ExtractOptions, read func(int64)) (layer.Stats, error) {
	r, err := l.Open(ctx)
	if err != nil {
		return layer.Stats{}, err
	}
	defer r.Close()
	in := &meter{r: layer.WithContext(ctx, r), sum: sha256.New(), left: l.Size, bounded: l.Size >= 0, read: read}
	plain, err := layer.Decompress(in, o.Limits)
	if err != nil {
		return layer.Stats{}, layer.Error("read the layer", err)
	}
	defer plain.Close()
	diff := sha256.New()
	stats, err := layer.Extract(ctx, io.TeeReader(plain, diff), dir, o)
	if err != nil {
		return stats, err
	}
	// The compressed stream may have a little after its end.
	if _, err := io.Copy(io.Discard, io.LimitReader(in, 1<<20)); err != nil {
		return stats, layer.Error("read the layer", err)
	}
	if got := digest(diff.Sum(nil)); got != l.DiffID {
		return stats, sandbox.Errorf(sandbox.CodeInvalid, "a layer does not match its digest %s: it is damaged or was tampered with", l.DiffID)
	}
	if got := digest(in.sum.Sum(nil)); l.Digest != "" && got != l.Digest {
		return stats, sandbox.Errorf(sandbox.CodeInvalid, "a layer does not match its digest %s: it is damaged or was tampered with", l.Digest)
	}
	return stats, nil
}

func digest(sum []byte) string { return "sha256:" + hex.EncodeToString(sum) }

// meter hashes, bounds and reports what is read.
type meter struct {
	r       io.Reader
	sum     hash.Hash
	left    int64
	bounded bool
	n       int64
	read    func(int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.n += int64(n)
	m.sum.Write(p[:n])
	if m.read != nil && n > 0 {
		m.read(m.n)
	}
	if m.bounded {
		if m.left -= int64(n); m.left < 0 {
			return n, sandbox.Errorf(sandbox.CodeInvalid, "a layer is larger than the image says")
		}
	}
	return n, err
}
