// Package ociimage finds a container image in a registry, an OCI layout or a
// docker-save archive, and gives its configuration and layers for this host's
// platform.
//
// Whatever is read is checked against its digest and has a limit: neither a
// registry nor an archive is trusted with more than the bytes it is asked
// for.
package ociimage

import (
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// Kind is where an image is.
type Kind string

// The kinds.
const (
	Registry Kind = "registry"
	Layout   Kind = "oci"            // a directory, as image-spec's image-layout.md has it
	Archive  Kind = "docker-archive" // a file made by docker save; a tar of an OCI layout too
)

// Ref is a parsed image reference.
type Ref struct {
	Kind Kind
	Name string // Registry: the reference as it was given
	Path string // Layout, Archive
	Tag  string // Layout, Archive: which image of several; "" where there is one
}

// maxRef bounds a reference: a path and a name.
const maxRef = 4096 + 512

// Parse reads "HOST/NAME:TAG", "NAME@DIGEST", "oci:DIR[:TAG]" or
// "docker-archive:FILE[:REF]". The error has CodeInvalid.
func Parse(s string) (Ref, error) {
	if len(s) > maxRef || strings.ContainsAny(s, "\x00\n") {
		return Ref{}, sandbox.Errorf(sandbox.CodeInvalid, "%s is not an image reference", layer.Quote(s))
	}
	if rest, ok := strings.CutPrefix(s, string(Layout)+":"); ok {
		// The tag is what follows the last colon, unless a slash does: then the
		// colon is part of the path.
		r := Ref{Kind: Layout, Path: rest}
		if i := strings.LastIndexByte(rest, ':'); i >= 0 && !strings.Contains(rest[i:], "/") {
			r.Path, r.Tag = rest[:i], rest[i+1:]
		}
		return r, r.check(s)
	}
	if rest, ok := strings.CutPrefix(s, string(Archive)+":"); ok {
		// The path has no colon, as skopeo and podman read it too; the
		// reference after it can.
		r := Ref{Kind: Archive}
		r.Path, r.Tag, _ = strings.Cut(rest, ":")
		return r, r.check(s)
	}
	if _, err := name.ParseReference(s); err != nil {
		return Ref{}, sandbox.Errorf(sandbox.CodeInvalid, "%s is not an image reference: give HOST/NAME:TAG, oci:DIR[:TAG] or docker-archive:FILE[:REF]", layer.Quote(s))
	}
	return Ref{Kind: Registry, Name: s}, nil
}

func (r Ref) check(s string) error {
	if r.Path == "" {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s names no path: give %s:PATH", layer.Quote(s), r.Kind)
	}
	return nil
}

// String gives the reference for people.
func (r Ref) String() string {
	if r.Kind == Registry {
		return r.Name
	}
	s := string(r.Kind) + ":" + r.Path
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	return s
}
