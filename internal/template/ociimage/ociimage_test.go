package ociimage

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

func TestParse(t *testing.T) {
	for s, want := range map[string]Ref{
		"debian":                              {Kind: Registry, Name: "debian"},
		"localhost:5000/a/b:c":                {Kind: Registry, Name: "localhost:5000/a/b:c"},
		"oci:/a/b":                            {Kind: Layout, Path: "/a/b"},
		"oci:/a/b:tag":                        {Kind: Layout, Path: "/a/b", Tag: "tag"},
		"oci:/a:x/b":                          {Kind: Layout, Path: "/a:x/b"},
		"docker-archive:f.tar":                {Kind: Archive, Path: "f.tar"},
		"docker-archive:f.tar:a/b:1":          {Kind: Archive, Path: "f.tar", Tag: "a/b:1"},
		"x@sha256:" + strings.Repeat("a", 64): {Kind: Registry, Name: "x@sha256:" + strings.Repeat("a", 64)},
	} {
		got, err := Parse(s)
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
		if got.String() != s {
			t.Errorf("%s becomes %s", s, got)
		}
	}
	for _, s := range []string{"", "oci:", "docker-archive:", "A B", "x:y:z:", "a\x00", strings.Repeat("x", 10000)} {
		if r, err := Parse(s); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%q: %+v, %v", s, r, err)
		}
	}
}

func archiveOf(t testing.TB, headers ...tar.Header) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		body := h.Uname // carried there for brevity
		h.Uname = ""
		h.Size = int64(len(body))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, body)
	}
	w.Close()
	return b.Bytes()
}

func TestArchiveHostile(t *testing.T) {
	config := `{"os":"linux","rootfs":{"type":"layers","diff_ids":[%s]}}`
	digest := "sha256:" + strings.Repeat("a", 64)
	many := strings.TrimSuffix(strings.Repeat(`"`+digest+`",`, maxLayers+1), ",")
	for name, c := range map[string]struct {
		data []byte
		code sandbox.Code
	}{
		"empty":         {nil, sandbox.CodeInvalid},
		"link to self":  {archiveOf(t, tar.Header{Name: "manifest.json", Typeflag: tar.TypeSymlink, Linkname: "manifest.json"}), sandbox.CodeInvalid},
		"link round":    {archiveOf(t, tar.Header{Name: "manifest.json", Typeflag: tar.TypeSymlink, Linkname: "b"}, tar.Header{Name: "b", Typeflag: tar.TypeLink, Linkname: "manifest.json"}), sandbox.CodeInvalid},
		"link out":      {archiveOf(t, tar.Header{Name: "manifest.json", Typeflag: tar.TypeSymlink, Linkname: "../../../etc/passwd"}), sandbox.CodeInvalid},
		"huge manifest": {archiveOf(t, tar.Header{Name: "manifest.json", Uname: strings.Repeat(" ", maxManifest+1)}), sandbox.CodeTooLarge},
		"no JSON":       {archiveOf(t, tar.Header{Name: "manifest.json", Uname: "[{"}), sandbox.CodeInvalid},
		"no image":      {archiveOf(t, tar.Header{Name: "manifest.json", Uname: "[]"}), sandbox.CodeInvalid},
		"no config":     {archiveOf(t, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c"}]`}), sandbox.CodeInvalid},
		"layers differ": {archiveOf(t, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c","Layers":[]}]`}, tar.Header{Name: "c", Uname: fmt.Sprintf(config, `"`+digest+`"`)}), sandbox.CodeInvalid},
		"no layer":      {archiveOf(t, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c","Layers":["l"]}]`}, tar.Header{Name: "c", Uname: fmt.Sprintf(config, `"`+digest+`"`)}), sandbox.CodeInvalid},
		"odd digest":    {archiveOf(t, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c","Layers":["l"]}]`}, tar.Header{Name: "c", Uname: fmt.Sprintf(config, `"sha256:../../../x"`)}), sandbox.CodeInvalid},
		"many layers":   {archiveOf(t, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c","Layers":["l"]}]`}, tar.Header{Name: "c", Uname: fmt.Sprintf(config, many)}), sandbox.CodeTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			r := bytes.NewReader(c.data)
			img, err := readArchive(context.Background(), r, r, Ref{Kind: Archive, Path: "x"})
			if sandbox.CodeOf(err) != c.code {
				t.Errorf("%v, %v (%s)", img, err, sandbox.CodeOf(err))
			}
		})
	}
}

func TestLayoutHostile(t *testing.T) {
	write := func(dir, name, body string) {
		p := filepath.Join(dir, name)
		os.MkdirAll(filepath.Dir(p), 0o755)
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	digest := "sha256:" + strings.Repeat("a", 64)
	secret := filepath.Join(t.TempDir(), "secret")
	os.WriteFile(secret, []byte(`{"manifests":[]}`), 0o600)
	for name, make := range map[string]func(dir string){
		"wrong digest": func(d string) {
			write(d, "index.json", `{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"`+digest+`","size":2}]}`)
			write(d, "blobs/sha256/"+strings.Repeat("a", 64), "{}")
		},
		"missing blob": func(d string) {
			write(d, "index.json", `{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"`+digest+`","size":2}]}`)
		},
		"symlink out": func(d string) { os.Symlink(secret, filepath.Join(d, "index.json")) },
		"directory":   func(d string) { os.Mkdir(filepath.Join(d, "index.json"), 0o755) },
		"digest with a path": func(d string) {
			write(d, "index.json", `{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"sha256:../../x","size":2}]}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			make(dir)
			img, c, err := FromLayout(context.Background(), Ref{Kind: Layout, Path: dir})
			if err == nil {
				c.Close()
				t.Fatalf("it was taken: %v", img)
			}
			t.Log(err)
		})
	}
}

func FuzzRef(f *testing.F) {
	for _, s := range []string{"a:b", "oci:x:y", "docker-archive:a:b/c:d", "x@sha256:0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse(s)
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeInvalid {
				t.Error(err)
			}
			return
		}
		if again, err := Parse(r.String()); err == nil && again.Kind != r.Kind {
			t.Errorf("%q becomes %q", s, r)
		}
	})
}

func FuzzArchive(f *testing.F) {
	digest := "sha256:" + strings.Repeat("a", 64)
	f.Add(archiveOf(f, tar.Header{Name: "manifest.json", Uname: `[{"Config":"c","RepoTags":["a:b"],"Layers":["l"]}]`}, tar.Header{Name: "c", Uname: `{"rootfs":{"diff_ids":["` + digest + `"]}}`}, tar.Header{Name: "l", Uname: "x"}))
	f.Add(archiveOf(f, tar.Header{Name: "index.json", Uname: `{"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"` + digest + `"}]}`}))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		img, err := readArchive(context.Background(), r, r, Ref{Kind: Archive, Path: "x"})
		if err != nil {
			if sandbox.CodeOf(err) == sandbox.CodeInternal {
				t.Error(err)
			}
			return
		}
		for i, l := range img.Layers {
			if i > 3 {
				break
			}
			dir := filepath.Join(t.TempDir(), "l")
			l.Pull(context.Background(), dir, layer.ExtractOptions{Limits: layer.Limits{MaxBytes: 1 << 20, MaxEntries: 100}}, nil)
			layer.RemoveTree(dir)
		}
	})
}
