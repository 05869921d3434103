package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/template/ociimage"
)

// pulls is how many layers are fetched at once: a registry serves each by a
// stream of its own, and unpacking is what takes the CPU.
const pulls = 3

// progressEvery is the least time between two events of one transfer.
const progressEvery = 100 * time.Millisecond

// Import makes a template of an OCI image, for this host's architecture. An
// image without a shell is fine: commands that need none run in it, and
// Config.HasShell says so.
func (l *Library) Import(ctx context.Context, o ImportOptions, p Progress) (t Template, err error) {
	ref, err := ociimage.Parse(o.Ref)
	if err != nil {
		return t, err
	}
	switch {
	case o.Archive != nil && ref.Kind != ociimage.Archive:
		return t, sandbox.Errorf(sandbox.CodeInvalid, "an uploaded archive is named docker-archive:FILE[:REF], not %s", layer.Quote(o.Ref))
	case o.Archive == nil && ref.Kind != ociimage.Registry && !o.AllowLocal:
		return t, sandbox.Errorf(sandbox.CodeForbidden, "%s is a path on the daemon's host: only root there may name one; upload the archive instead", layer.Quote(o.Ref))
	}
	b, err := l.begin(ctx, o.Target, p)
	if err != nil {
		return t, err
	}
	defer b.end(&err)
	img, closer, err := b.findImage(ref, o.Archive, ociimage.Options{Insecure: o.Insecure})
	if err != nil {
		return t, err
	}
	defer closer.Close()
	layers, err := b.pullImage(img)
	if err != nil {
		return t, err
	}
	source := img.Source
	if o.Archive != nil {
		source = ref.String()
	}
	return b.finish(layers, imageConfig(img.Config.Config), source)
}

// findImage resolves ref. The closer is called when the layers are read.
func (b *build) findImage(ref ociimage.Ref, archive io.Reader, o ociimage.Options) (*ociimage.Image, io.Closer, error) {
	b.emit(Event{Stage: StageResolve, Message: ref.String()})
	switch ref.Kind {
	case ociimage.Registry:
		img, err := ociimage.FromRegistry(b.ctx, ref, o)
		return img, io.NopCloser(nil), err
	case ociimage.Layout:
		return ociimage.FromLayout(b.ctx, ref)
	}
	if archive != nil {
		path := b.temp("archive")
		if err := b.spool(archive, path, StageDownload); err != nil {
			return nil, nil, err
		}
		ref.Path = path
	}
	img, closer, err := ociimage.FromArchive(b.ctx, ref)
	return img, closer, err
}

// spool writes a stream to a file, within the library's limit.
func (b *build) spool(r io.Reader, path string, stage Stage) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return layer.Error("store the upload", err)
	}
	defer f.Close()
	m := &transfer{b: b, stage: stage}
	n, err := io.Copy(f, io.TeeReader(io.LimitReader(layer.WithContext(b.ctx, r), b.l.archiveMax+1), m))
	if err != nil {
		if b.ctx.Err() != nil {
			err = b.ctx.Err()
		} else if errors.Is(err, io.ErrUnexpectedEOF) {
			return sandbox.Errorf(sandbox.CodeInvalid, "the upload ended early: %w", err)
		}
		return layer.Error("store the upload", err)
	}
	if n > b.l.archiveMax {
		return sandbox.Errorf(sandbox.CodeTooLarge, "the upload has more than %d bytes", b.l.archiveMax).With("limit", "upload_bytes")
	}
	return layer.Error("store the upload", f.Close())
}

// transfer tells the progress of several streams together.
type transfer struct {
	b     *build
	stage Stage
	total int64
	done  atomic.Int64
	mu    sync.Mutex
	last  time.Time
}

// Write counts p.
func (t *transfer) Write(p []byte) (int, error) {
	t.add(int64(len(p)))
	return len(p), nil
}

func (t *transfer) add(n int64) {
	done := t.done.Add(n)
	t.mu.Lock()
	due := time.Since(t.last) >= progressEvery
	if due {
		t.last = time.Now()
	}
	t.mu.Unlock()
	if due {
		t.b.emit(Event{Stage: t.stage, Current: done, Total: t.total, Unit: UnitBytes})
	}
}

// pullImage makes every layer of img that is not there yet, and gives their
// digests, topmost first.
func (b *build) pullImage(img *ociimage.Image) ([]string, error) {
	t := &transfer{b: b, stage: StageDownload}
	var layers []string
	missing := map[string]ociimage.Layer{}
	for _, l := range img.Layers {
		layers = append(layers, l.DiffID)
		if _, ok := missing[l.DiffID]; ok || b.pin(l.DiffID) {
			continue
		}
		missing[l.DiffID] = l
		if l.Size > 0 {
			t.total += l.Size
		}
	}
	b.emit(Event{Stage: StageDownload, Message: fmt.Sprintf("%d of %d layers to fetch", len(missing), len(img.Layers)), Total: t.total, Unit: UnitBytes})
	limits := b.l.limits
	left := limits.MaxBytes
	if left == 0 {
		left = layer.DefaultLimits().MaxBytes
	}
	var used atomic.Int64
	g, ctx := errgroup.WithContext(b.ctx)
	g.SetLimit(pulls)
	for _, l := range missing {
		g.Go(func() error {
			lim := limits
			lim.MaxBytes = max(left-used.Load(), 1)
			stats, dir, err := b.pullLayer(ctx, l, lim, t)
			if err != nil {
				return err
			}
			if used.Add(stats.Bytes) > left {
				return sandbox.Errorf(sandbox.CodeTooLarge, "the image's files are more than %d bytes together", left).With("limit", "bytes")
			}
			return b.commitLayer(dir, l.DiffID, stats)
		})
	}
	if err := g.Wait(); err != nil {
		if b.ctx.Err() != nil {
			err = layer.Error("import the image", b.ctx.Err())
		}
		return nil, err
	}
	done := t.done.Load()
	b.emit(Event{Stage: StageDownload, Current: done, Total: done, Unit: UnitBytes})
	slices.Reverse(layers)
	return layers, nil
}

func (b *build) pullLayer(ctx context.Context, l ociimage.Layer, lim layer.Limits, t *transfer) (layer.Stats, string, error) {
	dir := b.temp("layer")
	last := int64(0)
	o := layer.ExtractOptions{Limits: lim, Whiteouts: true, Warn: func(m string) { b.warn(0, "%s", m) }}
	stats, err := l.Pull(ctx, dir, o, func(n int64) {
		t.add(n - last)
		last = n
	})
	return stats, dir, err
}

// imageConfig takes over what a sandbox uses of an image's configuration.
func imageConfig(c v1.Config) Config {
	out := Config{
		User: c.User, Workdir: c.WorkingDir, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Shell: c.Shell,
		Labels: c.Labels, OnBuild: c.OnBuild, Env: map[string]string{},
	}
	for _, kv := range c.Env {
		k, v, _ := strings.Cut(kv, "=")
		if k != "" {
			out.Env[k] = v
		}
	}
	for p := range c.ExposedPorts {
		out.ExposedPorts = append(out.ExposedPorts, p)
	}
	slices.Sort(out.ExposedPorts)
	return out
}
