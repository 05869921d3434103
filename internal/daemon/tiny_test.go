package daemon

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/warrenhq/warren/internal/template"
)

// importTiny puts busybox alone into the template library, as "tiny".
func importTiny(t *testing.T, state, busybox, archive string) {
	t.Helper()
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h tar.Header, data []byte) {
		h.Size = int64(len(data))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		w.Write(data)
	}
	for _, dir := range []string{"bin/", "etc/", "proc/", "dev/", "sys/", "root/"} {
		add(tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(tar.Header{Name: "tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, nil)
	add(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, program)
	for _, applet := range []string{"sh", "cat", "sleep", "echo", "ls", "mkdir", "true", "ps", "head", "nc", "id", "dd", "kill"} {
		add(tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
	}
	add(tar.Header{Name: "etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:0:root:/root:/bin/sh\n"))
	add(tar.Header{Name: "etc/group", Typeflag: tar.TypeReg, Mode: 0o644}, []byte("root:x:0:\n"))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	image, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	image, err = mutate.Config(image, v1.Config{Env: []string{"PATH=/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag("tiny:latest")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(archive, tag, image); err != nil {
		t.Fatal(err)
	}
	lib, err := template.Open(filepath.Join(state, "templates"))
	if err != nil {
		t.Fatal(err)
	}
	defer lib.Close()
	for _, target := range []template.Target{
		{Name: "tiny"},
		{
			Name:     "service",
			StartCmd: `echo serving; sleep 0.3; echo yes > /tmp/ready; i=0; while :; do echo tick $i; i=$((i+1)); sleep 0.1; done`,
			ReadyCmd: `[ -e /tmp/ready ]`,
		},
	} {
		if _, err := lib.Import(t.Context(), template.ImportOptions{
			Target: target, Ref: "docker-archive:" + archive, AllowLocal: true,
		}, nil); err != nil {
			t.Fatal(err)
		}
	}
}
