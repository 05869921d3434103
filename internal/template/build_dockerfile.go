package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/buildctx"
	"github.com/warrenhq/warren/internal/template/dockerfile"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/template/ociimage"
)

// Limits of build arguments.
const (
	maxBuildArgs     = 1000
	maxBuildArgBytes = 1 << 20
)

// dockerBuild is one Dockerfile being built.
type dockerBuild struct {
	*build
	o       DockerfileOptions
	runner  StepRunner
	file    *dockerfile.File
	plan    *dockerfile.Plan
	context *layer.View
	done    map[int]*stage    // by index in the file
	images  map[string]*stage // FROM and COPY --from of things outside the file
	used    map[string]bool   // build arguments that an ARG declares
	step    int

	login ociimage.Options // to the registry of FROM
}

// stage is a stage's state while its instructions are gone through.
type stage struct {
	index  int
	layers []string // topmost first
	config Config
	scope  *dockerfile.Scope
	ownCmd bool // CMD came from this stage, not from its base
}

// BuildDockerfile makes a template from a Dockerfile. COPY, ADD and WORKDIR
// are done here, without the image having a say; RUN goes to the runner. Each
// step's layer is kept in the build cache under the layers below it, the
// instruction, the arguments that it uses and what it copies.
//
// A bad Dockerfile is CodeInvalid, and a step that fails CodeBuildFailed; both
// have the line in Details["line"], the latter also "step", "exit_code" and
// the end of its "output". RUN in shell form, where the image has no shell, is
// CodeBadTemplate.
func (l *Library) BuildDockerfile(ctx context.Context, o DockerfileOptions, r StepRunner, p Progress) (t Template, err error) {
	if err := checkArgs(o.BuildArgs); err != nil {
		return t, err
	}
	if o.ContextDir != "" && o.Context != nil {
		return t, sandbox.Errorf(sandbox.CodeInvalid, "the build context is given twice: as a directory and as a stream")
	}
	b, err := l.begin(ctx, o.Target, p)
	if err != nil {
		return t, err
	}
	defer b.end(&err)
	d := &dockerBuild{build: b, o: o, runner: r, done: map[int]*stage{}, images: map[string]*stage{}, used: map[string]bool{}, login: ociimage.Options{Insecure: o.Insecure}}
	src, err := d.openContext()
	if err != nil {
		return t, err
	}
	defer d.context.Close()
	if d.file, err = dockerfile.Parse(src); err != nil {
		return t, err
	}
	for _, w := range d.file.Warnings {
		b.warn(w.Line, "%s", w.Message)
	}
	if d.plan, err = d.file.Plan(o.Stage, o.BuildArgs); err != nil {
		return t, err
	}
	var last *stage
	for _, s := range d.plan.Stages {
		if last, err = d.buildStage(s); err != nil {
			return t, err
		}
		d.done[s.Index] = last
	}
	for _, k := range slices.Sorted(maps.Keys(o.BuildArgs)) {
		if !d.used[k] && !dockerfile.Predefined(k) && !d.file.MetaDeclares(k) {
			b.warn(0, "the build argument %s is used by no ARG", layer.Quote(k))
		}
	}
	return b.finish(last.layers, last.config, "dockerfile")
}

func checkArgs(args map[string]string) error {
	size := 0
	for k, v := range args {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return sandbox.Errorf(sandbox.CodeInvalid, "the build argument %s is malformed: give NAME=VALUE", layer.Quote(k))
		}
		size += len(k) + len(v)
	}
	if len(args) > maxBuildArgs || size > maxBuildArgBytes {
		return sandbox.Errorf(sandbox.CodeTooLarge, "%d build arguments of %d bytes: the most is %d and %d", len(args), size, maxBuildArgs, maxBuildArgBytes).With("limit", "build_args")
	}
	return nil
}

// openContext unpacks the build context, trims it by its ignore file, and
// gives the Dockerfile.
func (d *dockerBuild) openContext() ([]byte, error) {
	name, err := buildctx.Clean(d.o.Dockerfile)
	if err != nil {
		return nil, err
	}
	stream := d.o.Context
	if d.o.ContextDir != "" {
		r, err := buildctx.Pack(d.ctx, d.o.ContextDir, name)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		stream = r
	}
	dir := d.temp("context")
	if stream == nil {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, layer.Error("make an empty build context", err)
		}
	} else if err := d.unpackContext(stream, dir); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, layer.Error("open the build context", err)
	}
	defer root.Close()
	src := d.o.Content
	if src == nil {
		src, err = buildctx.ReadFile(root, name, dockerfile.MaxBytes+1)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the build context has no %s: name the Dockerfile, or put one there", layer.Quote(name))
		}
		if err != nil {
			return nil, err
		}
	}
	ig, err := buildctx.Load(root, name)
	if err != nil {
		return nil, err
	}
	if err := buildctx.Prune(root, ig); err != nil {
		return nil, err
	}
	d.context, err = layer.OpenView([]string{dir})
	return src, err
}

func (d *dockerBuild) unpackContext(stream io.Reader, dir string) error {
	t := &transfer{b: d.build, stage: StageContext}
	bounded := &boundedReader{r: layer.WithContext(d.ctx, stream), left: d.l.archiveMax, most: d.l.archiveMax}
	plain, err := layer.Decompress(io.TeeReader(bounded, t), d.l.limits)
	if err != nil {
		return layer.Error("read the build context", err)
	}
	defer plain.Close()
	_, err = layer.Extract(d.ctx, plain, dir, layer.ExtractOptions{Limits: d.l.limits, Root: true, Warn: func(m string) { d.warn(0, "build context: %s", m) }})
	return err
}

// boundedReader refuses a stream of more than it may have.
type boundedReader struct {
	r          io.Reader
	left, most int64
}

func (r *boundedReader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if r.left -= int64(n); r.left < 0 {
		return n, sandbox.Errorf(sandbox.CodeTooLarge, "the build context has more than %d bytes: keep files out by .dockerignore", r.most).With("limit", "context_bytes")
	}
	return n, err
}

// next tells that a step begins.
func (d *dockerBuild) next(line int, name string) {
	d.step++
	d.emit(Event{Stage: StageStep, Message: shorten(name), Current: int64(d.step), Total: int64(d.plan.Steps), Unit: UnitSteps, Line: line})
}

func (d *dockerBuild) cachedStep(line int, name string) {
	d.emit(Event{Stage: StageStep, Message: shorten(name), Current: int64(d.step), Total: int64(d.plan.Steps), Unit: UnitSteps, Line: line, Cached: true})
}

// shorten makes an instruction one line of a display.
func shorten(s string) string {
	s = strings.ToValidUTF8(strings.Join(strings.Fields(s), " "), "\uFFFD")
	if r := []rune(s); len(r) > 200 {
		s = string(r[:200]) + "…"
	}
	return s
}

func (d *dockerBuild) buildStage(p dockerfile.PlannedStage) (*stage, error) {
	d.next(p.Line, p.Stage.SourceCode)
	base, err := d.from(p.From, p.Base)
	if err != nil {
		return nil, dockerfile.At(p.Line, err)
	}
	s := &stage{index: p.Index, layers: slices.Clone(base.layers), config: cloneConfig(base.config)}
	s.scope = dockerfile.NewScope(s.config.Env, d.o.BuildArgs, d.plan.Meta, d.used)
	s.config.Env = s.scope.Env
	commands := p.Stage.Commands
	if p.From < 0 && len(s.config.OnBuild) > 0 {
		triggers, err := d.file.ParseOnBuild(s.config.OnBuild)
		if err != nil {
			return nil, dockerfile.At(p.Line, err)
		}
		d.plan.Steps += len(triggers)
		for _, c := range triggers {
			if err := d.instruction(s, c, p.Line); err != nil {
				return nil, err
			}
		}
		s.config.OnBuild = nil
	}
	for _, c := range commands {
		if err := d.instruction(s, c, dockerfile.Line(c)); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func cloneConfig(c Config) Config {
	c.Env, c.Labels = maps.Clone(c.Env), maps.Clone(c.Labels)
	c.ExposedPorts, c.OnBuild = slices.Clone(c.ExposedPorts), slices.Clone(c.OnBuild)
	return c
}

// from gives what a stage, or a COPY --from, starts with: an earlier stage
// where index is not negative, else nothing, a template or an image.
func (d *dockerBuild) from(index int, name string) (*stage, error) {
	if index >= 0 {
		return d.done[index], nil
	}
	if name == "scratch" {
		return &stage{}, nil
	}
	if s, ok := d.images[name]; ok {
		return s, nil
	}
	s, err := d.fromTemplate(name)
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		s, err = d.fromImage(name)
	}
	if err != nil {
		return nil, err
	}
	d.images[name] = s
	return s, nil
}

// fromTemplate finds one of Warren's own templates.
func (d *dockerBuild) fromTemplate(name string) (*stage, error) {
	t, _, err := d.l.Resolve(d.ctx, d.target.Tenant, name)
	if err != nil {
		return nil, err
	}
	for _, digest := range t.Layers {
		if !d.pin(digest) {
			return nil, sandbox.Errorf(sandbox.CodeConflict, "the template %s was replaced while the build began: build again", layer.Quote(name))
		}
	}
	return &stage{layers: t.Layers, config: t.Config}, nil
}

// fromImage pulls an image. Its layers stay in the build cache, so that a
// build that fails later need not pull them again.
func (d *dockerBuild) fromImage(name string) (*stage, error) {
	ref, err := ociimage.Parse(name)
	if err != nil || ref.Kind != ociimage.Registry {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s is neither a template nor an image: `warren template ls` lists the templates", layer.Quote(name))
	}
	img, closer, err := d.findImage(ref, nil, d.login)
	if err != nil {
		return nil, err
	}
	defer closer.Close()
	layers, err := d.pullImage(img)
	if err != nil {
		return nil, err
	}
	for _, digest := range layers {
		if err := d.remember(cacheKey("pulled", digest), digest, "FROM "+shorten(name)); err != nil {
			return nil, err
		}
	}
	return &stage{layers: layers, config: imageConfig(img.Config.Config)}, nil
}

// cacheKey names a step by all that its result hangs on.
func cacheKey(parts ...any) string {
	h := sha256.New()
	// JSON keeps the parts apart and orders maps; strings that are not UTF-8
	// come from a Dockerfile's bytes and are put as such.
	e := json.NewEncoder(h)
	for _, p := range parts {
		if s, ok := p.(string); ok {
			p = []byte(s)
		}
		if err := e.Encode(p); err != nil {
			panic(fmt.Sprintf("template: a cache key of %T: %v", p, err)) // no caller gives what JSON lacks
		}
	}
	return hex.EncodeToString(h.Sum(nil))
}

// layered runs a step whose result is a layer: from the cache, or by make.
func (d *dockerBuild) layered(s *stage, line int, name, key string, make func() (string, error)) error {
	if !d.o.NoCache {
		if digest, ok := d.cached(key); ok {
			d.cachedStep(line, name)
			s.layers = append([]string{digest}, s.layers...)
			return nil
		}
	}
	digest, err := make()
	if err != nil {
		if d.file == nil { // steps have numbers, not lines
			return err
		}
		return dockerfile.At(line, err)
	}
	if err := d.remember(key, digest, shorten(name)); err != nil {
		return err
	}
	s.layers = append([]string{digest}, s.layers...)
	return nil
}

// assemble makes a layer on top of s by f.
func (d *dockerBuild) assemble(s *stage, f func(*layer.Builder) error) (string, error) {
	dir := d.temp("layer")
	nb, err := layer.NewBuilder(d.ctx, dir, d.dirs(s.layers), d.l.limits)
	if err != nil {
		return "", err
	}
	err = f(nb)
	if e := nb.Close(); err == nil {
		err = e
	}
	if err != nil {
		return "", err
	}
	return d.commitTree(dir, layer.HashOptions{})
}

// absolute makes a path of the image absolute by its working directory.
func (s *stage) absolute(p string) string {
	if !strings.HasPrefix(p, "/") {
		p = path.Join("/", s.config.Workdir, p)
	}
	return path.Clean(p)
}
