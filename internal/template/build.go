package template

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

var (
	pointBegun       = fault.Register("template.build.begun")
	pointLayerMade   = fault.Register("template.layer.extracted")
	pointLayerMeta   = fault.Register("template.layer.recorded")
	pointLayerMoved  = fault.Register("template.layer.renamed")
	pointCacheStored = fault.Register("template.cache.recorded")
	pointGarbage     = fault.Register("template.garbage.renamed")
	pointGarbageGone = fault.Register("template.garbage.removed")
)

// maxLayers is the most layers that a template can have. overlayfs takes 500
// lowers (OVL_MAX_STACK); this leaves room for a step's own and keeps lookups
// fast.
const maxLayers = 128

// build is one template being made.
type build struct {
	l      *Library
	ctx    context.Context
	target Target
	tmp    string // its own directory under tmp
	seq    atomic.Int64

	pinned []string // of l.mu

	mu       sync.Mutex // one event at a time
	progress Progress
}

// begin starts a build; end must be called.
func (l *Library) begin(ctx context.Context, t Target, p Progress) (*build, error) {
	if err := t.check(); err != nil {
		return nil, err
	}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the daemon is stopping: build the template when it runs again")
	}
	l.builds.Add(1)
	l.mu.Unlock()
	tmp, err := os.MkdirTemp(l.path("tmp"), "build-")
	if err != nil {
		l.builds.Done()
		return nil, layer.Error("begin the build", err)
	}
	pointBegun.Hit()
	return &build{l: l, ctx: ctx, target: t, tmp: tmp, progress: p}, nil
}

// end removes what the build did not turn into a template, and collects what
// it made useless. Its error adds to the build's own only where there is none.
func (b *build) end(err *error) {
	defer b.l.builds.Done()
	rm := layer.RemoveTree(b.tmp)
	b.l.mu.Lock()
	for _, d := range b.pinned {
		if b.l.pins[d]--; b.l.pins[d] == 0 {
			delete(b.l.pins, d)
		}
	}
	b.l.mu.Unlock()
	// A canceled build cleans up all the same.
	gc := b.l.collect(context.WithoutCancel(b.ctx))
	if *err == nil && rm != nil {
		*err = layer.Error("clean up after the build", rm)
	}
	if *err == nil {
		*err = gc
	}
}

func (b *build) emit(e Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.progress != nil {
		b.progress(e)
	}
}

func (b *build) warn(line int, format string, args ...any) {
	b.emit(Event{Stage: StageWarning, Line: line, Message: fmt.Sprintf(format, args...)})
}

// temp gives a path in the build's own directory that does not exist.
func (b *build) temp(kind string) string {
	return filepath.Join(b.tmp, fmt.Sprintf("%s-%d", kind, b.seq.Add(1)))
}

// pin keeps a layer for the build's life; false: there is none such.
func (b *build) pin(digest string) bool {
	b.l.mu.Lock()
	defer b.l.mu.Unlock()
	if _, ok := b.l.layers[digest]; !ok {
		return false
	}
	b.l.pins[digest]++
	b.pinned = append(b.pinned, digest)
	return true
}

// dirs gives layers' directories.
func (b *build) dirs(digests []string) []string {
	out := make([]string, len(digests))
	for i, d := range digests {
		out[i] = b.l.layerDir(d)
	}
	return out
}

// commitTree makes the tree in dir, which was made here, a layer.
func (b *build) commitTree(dir string, o layer.HashOptions) (string, error) {
	b.emit(Event{Stage: StageCommit, Message: "hashing the layer"})
	o.Limits = b.l.limits
	digest, stats, err := layer.HashTree(b.ctx, dir, o)
	if err != nil {
		return "", err
	}
	return digest, b.commitLayer(dir, digest, stats)
}

// commitLayer makes the whole tree in dir the layer of that digest, and pins
// it. dir is gone afterwards: a layer that is there already stays as it is.
func (b *build) commitLayer(dir, digest string, stats layer.Stats) error {
	pointLayerMade.Hit()
	if b.pin(digest) {
		return layer.Error("drop a layer that is there already", layer.RemoveTree(dir))
	}
	if err := syncTree(dir); err != nil {
		return layer.Error("write the layer to the disk", err)
	}
	if err := b.ctx.Err(); err != nil {
		return layer.Error("store the layer", err)
	}
	l := b.l
	l.commit.Lock()
	defer l.commit.Unlock()
	if b.pin(digest) { // another build was faster; end removes ours
		return nil
	}
	meta := l.path("meta", dirName(digest)+".json")
	if err := l.writeRecord(meta, layerMeta{stats, time.Now().UTC()}); err != nil {
		return err
	}
	pointLayerMeta.Hit()
	if err := os.Rename(dir, l.layerDir(digest)); err != nil {
		return layer.Error("store the layer", err)
	}
	pointLayerMoved.Hit()
	if err := syncDir(l.path("layers")); err != nil {
		return layer.Error("store the layer", err)
	}
	l.mu.Lock()
	l.layers[digest] = stats
	l.mu.Unlock()
	b.pin(digest)
	return nil
}

// finish records the template.
func (b *build) finish(layers []string, c Config, source string) (Template, error) {
	if len(layers) > maxLayers {
		return Template{}, sandbox.Errorf(sandbox.CodeTooLarge, "the template has %d layers; the most is %d: join RUN and COPY steps", len(layers), maxLayers).With("limit", "layers")
	}
	if len(layers) == 0 { // FROM scratch and nothing else
		dir := b.temp("layer")
		nb, err := layer.NewBuilder(b.ctx, dir, nil, b.l.limits)
		if err != nil {
			return Template{}, err
		}
		if err := nb.Close(); err != nil {
			return Template{}, err
		}
		if err := os.Chtimes(dir, time.Unix(0, 0), time.Unix(0, 0)); err != nil {
			return Template{}, layer.Error("make an empty layer", err)
		}
		digest, err := b.commitTree(dir, layer.HashOptions{})
		if err != nil {
			return Template{}, err
		}
		layers = []string{digest}
	}
	shell, err := b.hasShell(layers, "/bin/sh")
	if err != nil {
		return Template{}, err
	}
	c.HasShell = shell
	c.StartCmd, c.ReadyCmd = b.target.StartCmd, b.target.ReadyCmd
	if !shell && (c.StartCmd != "" || c.ReadyCmd != "") {
		return Template{}, sandbox.Errorf(sandbox.CodeBadTemplate, "the template has no /bin/sh, which its start and ready commands need: leave them out, or use an image with a shell")
	}
	t := Template{
		ID: NewID(), Name: b.target.Name, Tenant: b.target.Tenant, Shared: b.target.Shared,
		Layers: slices.Clone(layers), Config: c, Resources: b.target.Resources,
		CreatedAt: time.Now().UTC().Truncate(time.Millisecond), Source: source, BuildID: b.target.BuildID,
	}
	b.l.mu.Lock()
	for _, d := range layers {
		t.SizeBytes += b.l.layers[d].Bytes
	}
	b.l.mu.Unlock()
	if err := b.ctx.Err(); err != nil {
		return Template{}, layer.Error("record the template", err)
	}
	for i, name := range b.target.names() {
		if i > 0 {
			t.ID = NewID()
		}
		t.Name = name
		if err := b.l.record(t); err != nil {
			return Template{}, err
		}
	}
	b.emit(Event{Stage: StageDone, Message: fmt.Sprintf("template %s (%s)", t.Name, t.ID), Current: t.SizeBytes, Total: t.SizeBytes, Unit: UnitBytes})
	return t, nil
}

// hasShell tells whether the stack has the program at path.
func (b *build) hasShell(layers []string, path string) (bool, error) {
	v, err := layer.OpenView(b.dirs(layers))
	if err != nil {
		return false, err
	}
	defer v.Close()
	return v.Executable(path), nil
}
