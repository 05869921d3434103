// Package buildctx packs, and trims, the directory that a Dockerfile is built
// with.
package buildctx

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// IgnoreFile is the name of the file whose patterns keep files out of the
// context. One beside the Dockerfile, <Dockerfile>.dockerignore, goes before
// it. Source: docs.docker.com, "Build context".
const IgnoreFile = ".dockerignore"

// maxIgnore bounds an ignore file.
const maxIgnore = 1 << 20

// Ignore is a parsed ignore file. nil ignores nothing.
type Ignore struct {
	m    *patternmatcher.PatternMatcher
	keep []string // whatever the patterns say
}

// ParseIgnore reads an ignore file's content. The error has CodeInvalid.
func ParseIgnore(data []byte) (*Ignore, error) {
	if len(data) > maxIgnore {
		return nil, sandbox.Errorf(sandbox.CodeTooLarge, "%s has %d bytes: the most is %d", IgnoreFile, len(data), maxIgnore).With("limit", "dockerignore_bytes")
	}
	patterns, err := ignorefile.ReadAll(bytes.NewReader(data))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s cannot be read: %w", IgnoreFile, err)
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s has a pattern that is malformed: %w", IgnoreFile, err)
	}
	return &Ignore{m: m}, nil
}

// Patterns compiles patterns as COPY --exclude gives them.
func Patterns(patterns []string) (*Ignore, error) {
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the pattern is malformed: %w", err)
	}
	return &Ignore{m: m}, nil
}

// Match tells whether the slash-separated relative path is ignored.
func (ig *Ignore) Match(name string) (bool, error) {
	if ig == nil || slices.Contains(ig.keep, name) {
		return false, nil
	}
	ok, err := ig.m.MatchesOrParentMatches(name)
	if err != nil {
		return false, sandbox.Errorf(sandbox.CodeInvalid, "%s has a pattern that cannot be matched: %w", IgnoreFile, err)
	}
	return ok, nil
}

// whole tells whether an ignored directory has nothing in it that a later
// pattern brings back.
func (ig *Ignore) whole(dir string) bool {
	if slices.ContainsFunc(ig.keep, func(k string) bool { return strings.HasPrefix(k, dir+"/") }) {
		return false
	}
	return !ig.m.Exclusions()
}

// Load reads the ignore file that goes with a Dockerfile of the context.
func Load(root *os.Root, dockerfile string) (*Ignore, error) {
	names := []string{IgnoreFile}
	if dockerfile != "" {
		names = []string{dockerfile + IgnoreFile, IgnoreFile}
	}
	for _, name := range names {
		data, err := ReadFile(root, name, maxIgnore+1)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return ParseIgnore(data)
	}
	return nil, nil
}

// Prune removes from root what ig ignores.
func Prune(root *os.Root, ig *Ignore) error {
	if ig == nil {
		return nil
	}
	var hollow []string // ignored directories that may have something kept in them
	err := fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		ignored, err := ig.Match(name)
		if err != nil || !ignored {
			return err
		}
		if !d.IsDir() {
			return root.Remove(name)
		}
		if !ig.whole(name) {
			hollow = append(hollow, name)
			return nil
		}
		if err := root.RemoveAll(name); err != nil {
			return err
		}
		return fs.SkipDir
	})
	if err != nil {
		return layer.Error("trim the build context", err)
	}
	for _, d := range slices.Backward(hollow) {
		root.Remove(d) // fails where something in it is kept
	}
	return nil
}

// Clean makes a Dockerfile's path relative to the context's root. The error
// has CodeInvalid.
func Clean(dockerfile string) (string, error) {
	if dockerfile == "" {
		dockerfile = "Dockerfile"
	}
	name := path.Clean(dockerfile)
	if !fs.ValidPath(name) || name == "." || strings.IndexByte(name, 0) >= 0 {
		return "", sandbox.Errorf(sandbox.CodeInvalid, "the Dockerfile %s is not in the build context: give a path relative to it", layer.Quote(dockerfile))
	}
	return name, nil
}

// ReadFile reads a regular file of the context, and at most limit bytes of it.
// fs.ErrNotExist is in the chain where there is none.
func ReadFile(root *os.Root, name string, limit int64) ([]byte, error) {
	// Not blocking: it could be a fifo.
	f, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s of the build context cannot be read: %w", layer.Quote(name), err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s of the build context is not a regular file", layer.Quote(name))
	}
	data, err := io.ReadAll(io.LimitReader(f, limit))
	return data, layer.Error("read "+layer.Quote(name), err)
}
