package template

import (
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/buildctx"
	"github.com/warrenhq/warren/internal/template/layer"
)

// copyStep is a COPY or ADD with its variables put in.
type copyStep struct {
	instructions.SourcesAndDest
	line         int
	name         string
	from         string
	chown, chmod string
	exclude      []string
	unpack       bool // ADD: archives are unpacked
	keepLinks    bool // a source that is a symlink is copied as one
}

// source is one thing that a step copies.
type source struct {
	Name   string // what it is called at the destination
	Digest string
	entry  layer.Entry
}

// copy does a COPY or ADD.
func (d *dockerBuild) copy(s *stage, c copyStep) error {
	view, where := d.context, "the build context"
	if c.from != "" {
		index, ok := d.file.Source(c.from, s.index)
		if !ok {
			// A number is a stage's, never an image's.
			if _, err := strconv.Atoi(c.from); err == nil {
				return sandbox.Errorf(sandbox.CodeInvalid, "--from=%s: there is no stage of this number before this one", c.from)
			}
			index = -1
		}
		from, err := d.from(index, c.from)
		if err != nil {
			return err
		}
		if view, err = layer.OpenView(d.dirs(from.layers)); err != nil {
			return err
		}
		defer view.Close()
		where = layer.Quote(c.from)
	}
	o, err := d.copyOptions(s, c)
	if err != nil {
		return err
	}
	sources, wild, err := d.sources(view, c, where, o)
	if err != nil {
		return err
	}
	dest := s.absolute(c.DestPath)
	dir, err := d.isDir(s, dest)
	if err != nil {
		return err
	}
	dir = dir || strings.HasSuffix(c.DestPath, "/") || c.DestPath == "." || strings.HasSuffix(c.DestPath, "/.")
	if n := len(c.SourcePaths) + len(c.SourceContents); !dir && (n > 1 || wild && len(sources) > 1) {
		return sandbox.Errorf(sandbox.CodeInvalid, "several sources need a directory as destination: end %s with a /", layer.Quote(c.DestPath))
	}
	key := cacheKey("copy", d.target.Tenant, s.layers, dest, dir, sources, c.SourceContents, o.Owner, o.Mode, c.exclude, c.unpack)
	return d.layered(s, c.line, c.name, key, func() (string, error) {
		return d.assemble(s, func(nb *layer.Builder) error {
			return d.copyInto(nb, view, sources, dest, dir, c, o)
		})
	})
}

func (d *dockerBuild) copyInto(nb *layer.Builder, view *layer.View, sources []source, dest string, dir bool, c copyStep, o layer.CopyOptions) error {
	target := func(name string) string {
		if dir {
			return path.Join(dest, name)
		}
		return dest
	}
	for _, src := range sources {
		if c.unpack && src.entry.IsRegular() {
			done, err := d.unpackInto(nb, view, src, dest, o)
			if err != nil {
				return err
			}
			if done {
				continue
			}
		}
		to := dest // a directory's content goes into the destination
		if !src.entry.IsDir() {
			to = target(src.Name)
		}
		if err := nb.Copy(view, src.entry, to, skipping(o, src.entry)); err != nil {
			return err
		}
	}
	owner, mode := layer.Owner{}, uint32(0o644)
	if o.Owner != nil {
		owner = *o.Owner
	}
	if o.Mode != nil {
		mode = *o.Mode
	}
	for _, f := range c.SourceContents {
		if err := nb.WriteFile(target(path.Base(path.Clean("/"+f.Path))), strings.NewReader(f.Data), mode, owner); err != nil {
			return err
		}
	}
	return nil
}

// skipping makes COPY --exclude's patterns relative to the source.
func skipping(o layer.CopyOptions, e layer.Entry) layer.CopyOptions {
	if o.Skip == nil {
		return o
	}
	skip, prefix := o.Skip, e.Path
	o.Skip = func(p string, isDir bool) bool {
		return skip(strings.TrimPrefix(strings.TrimPrefix(p, prefix), "/"), isDir)
	}
	return o
}

// unpackInto does what ADD does with a local archive; false: it is none.
func (d *dockerBuild) unpackInto(nb *layer.Builder, view *layer.View, src source, dest string, o layer.CopyOptions) (bool, error) {
	f, err := view.Open(src.entry)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head := make([]byte, 512)
	n, err := io.ReadFull(f, head)
	if err != nil && err != io.ErrUnexpectedEOF && err != io.EOF {
		return false, layer.Error("read "+layer.Quote(src.Name), err)
	}
	if !layer.IsArchive(head[:n]) {
		return false, nil
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, layer.Error("read "+layer.Quote(src.Name), err)
	}
	plain, err := layer.Decompress(layer.WithContext(d.ctx, f), d.l.limits)
	if err != nil {
		return false, layer.Error("unpack "+layer.Quote(src.Name), err)
	}
	defer plain.Close()
	// Unpacked on its own first: what is in it cannot meet the image's
	// symlinks, nor the image's its.
	dir := d.temp("add")
	defer layer.RemoveTree(dir) // the build's end removes what is left
	_, err = layer.Extract(d.ctx, plain, dir, layer.ExtractOptions{Limits: d.l.limits, Warn: func(m string) { d.warn(0, "%s: %s", src.Name, m) }})
	if err != nil {
		if sandbox.CodeOf(err) == sandbox.CodeInvalid && notTar(err) {
			return false, nil // a compressed file that is no archive is copied as it is
		}
		return false, err
	}
	av, err := layer.OpenView([]string{dir})
	if err != nil {
		return false, err
	}
	defer av.Close()
	root, err := av.Lookup("/", true)
	if err != nil {
		return false, err
	}
	return true, nb.Copy(av, root, dest, o)
}

// notTar tells a file that is no archive from an archive with a bad entry.
func notTar(err error) bool { return strings.Contains(err.Error(), layer.NotTar) }

// copyOptions resolves --chown, --chmod and --exclude.
func (d *dockerBuild) copyOptions(s *stage, c copyStep) (o layer.CopyOptions, err error) {
	if c.chown != "" {
		owner, err := d.owner(s, c.chown, "--chown")
		if err != nil {
			return o, err
		}
		o.Owner = &owner
	}
	if c.chmod != "" {
		m, err := strconv.ParseUint(c.chmod, 8, 32)
		if err != nil || m > 0o7777 {
			return o, sandbox.Errorf(sandbox.CodeInvalid, "--chmod=%s is not a mode: give octal digits, 755 or 0644", layer.Quote(c.chmod))
		}
		mode := uint32(m)
		o.Mode = &mode
	}
	if len(c.exclude) > 0 {
		ig, err := buildctx.Patterns(c.exclude)
		if err != nil {
			return o, err
		}
		o.Skip = func(rel string, _ bool) bool {
			ok, err := ig.Match(rel)
			return err == nil && ok
		}
	}
	return o, nil
}

// sources finds what the step's source words mean in view; wild: one has a
// wildcard.
func (d *dockerBuild) sources(view *layer.View, c copyStep, where string, o layer.CopyOptions) (out []source, wild bool, err error) {
	for _, p := range c.SourcePaths {
		names := []string{path.Clean("/" + p)}
		if strings.ContainsAny(p, "*?[") {
			wild = true
			if names, err = glob(view, p); err != nil {
				return nil, wild, err
			}
			if len(names) == 0 {
				return nil, wild, sandbox.Errorf(sandbox.CodeInvalid, "nothing in %s matches %s", where, layer.Quote(p))
			}
		}
		for _, name := range names {
			e, err := view.Lookup(name, !c.keepLinks)
			if sandbox.CodeOf(err) == sandbox.CodeNotFound {
				hint := ""
				if c.from == "" {
					hint = ": check the name, and that .dockerignore does not leave it out"
				}
				return nil, wild, sandbox.Errorf(sandbox.CodeInvalid, "%s is not in %s%s", layer.Quote(p), where, hint)
			}
			if err != nil {
				return nil, wild, err
			}
			digest, err := view.Digest(d.ctx, e, skipping(o, e))
			if err != nil {
				return nil, wild, err
			}
			out = append(out, source{Name: layer.Base(name), Digest: digest, entry: e})
		}
	}
	return out, wild, nil
}

// maxMatches bounds what one wildcard gives.
const maxMatches = 100_000

// glob finds the names that a pattern of path.Match, per component, gives.
func glob(v *layer.View, pattern string) ([]string, error) {
	names := []string{"/"}
	for part := range strings.SplitSeq(strings.Trim(path.Clean("/"+pattern), "/"), "/") {
		if _, err := path.Match(part, ""); err != nil {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the pattern %s is malformed", layer.Quote(pattern))
		}
		var next []string
		for _, dir := range names {
			e, err := v.Lookup(dir, true)
			if err != nil {
				return nil, err
			}
			if !e.IsDir() {
				continue
			}
			children, err := v.ReadDir(e)
			if err != nil {
				return nil, err
			}
			for _, c := range children {
				if ok, _ := path.Match(part, c); ok {
					next = append(next, path.Join(dir, c))
				}
			}
		}
		if len(next) > maxMatches {
			return nil, sandbox.Errorf(sandbox.CodeTooLarge, "the pattern %s matches more than %d files", layer.Quote(pattern), maxMatches).With("limit", "matches")
		}
		names = next
	}
	slices.Sort(names)
	return names, nil
}

// isDir tells whether p is a directory in what s has so far.
func (d *dockerBuild) isDir(s *stage, p string) (bool, error) {
	v, err := layer.OpenView(d.dirs(s.layers))
	if err != nil {
		return false, err
	}
	defer v.Close()
	e, err := v.Lookup(p, true)
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		return false, nil
	}
	return err == nil && e.IsDir(), err
}

// workdir does a WORKDIR.
func (d *dockerBuild) workdir(s *stage, p string, line int, name string) error {
	if p == "" {
		return sandbox.Errorf(sandbox.CodeInvalid, "WORKDIR is empty once its variables are put in")
	}
	s.config.Workdir = s.absolute(p)
	return d.makeWorkdir(s, line, name)
}

// ensureWorkdir makes the working directory that a base image names but does
// not have.
func (d *dockerBuild) ensureWorkdir(s *stage, line int) error {
	return d.makeWorkdir(s, line, "WORKDIR "+s.absolute("."))
}

func (d *dockerBuild) makeWorkdir(s *stage, line int, name string) error {
	dir := s.absolute(".")
	there, err := d.isDir(s, dir)
	if err != nil || there {
		return err
	}
	var owner layer.Owner
	if s.config.User != "" {
		if owner, err = d.owner(s, s.config.User, "USER"); err != nil {
			return err
		}
	}
	key := cacheKey("workdir", d.target.Tenant, s.layers, dir, owner)
	return d.layered(s, line, name, key, func() (string, error) {
		return d.assemble(s, func(nb *layer.Builder) error {
			_, err := nb.MkdirAll(dir, owner)
			return err
		})
	})
}
