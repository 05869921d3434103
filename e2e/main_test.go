// Package e2e tests Warren from outside: a real daemon from bin/, driven by
// its HTTP API and its command line, with real sandboxes of both runtimes.
//
// Each group of tests has a daemon of its own, with its own state directory,
// socket and TCP address, and ends with a count of what is left on the host
// (internal/host/census). Nothing needs the internet: the one image is made of
// busybox and of the program in e2e/inside.
package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/warrenhq/warren/internal/testenv"
)

var runtimes = []string{"container", "gvisor"}

// shared is what all groups use: made on first use, removed by TestMain.
var shared struct {
	once sync.Once
	dir  string
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	for _, dir := range []string{shared.dir, publishedJS.dir, publishedPython.dir, jsCode.dir, pythonCode.dir} {
		if dir != "" {
			os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}

// binDir is where bin/warren and its helpers are.
func binDir() string {
	if dir := os.Getenv("WARREN_BIN"); dir != "" {
		return dir
	}
	return filepath.Join("..", "bin")
}

// warrenBin gives the program's absolute path, or skips t.
func warrenBin(t testing.TB) string {
	t.Helper()
	testenv.Root(t)
	path, err := filepath.Abs(testenv.Command(t, filepath.Join(binDir(), "warren"), "run `make build`, or set WARREN_BIN to the directory that has it"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// image gives the docker archive of the image "tiny".
func image(t testing.TB) string {
	t.Helper()
	busybox := testenv.Command(t, "busybox", "apt-get install busybox-static")
	shared.once.Do(func() { shared.err = makeShared(busybox) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return filepath.Join(shared.dir, "tiny.tar")
}

func makeShared(busybox string) (err error) {
	if shared.dir, err = os.MkdirTemp("", "warren-e2e-"); err != nil {
		return err
	}
	inside := filepath.Join(shared.dir, "inside")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", inside, "./inside")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build e2e/inside: %w\n%s", err, out)
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list busybox's applets: %w", err)
	}
	var l layer
	for _, d := range []string{"bin/", "etc/", "proc/", "dev/", "sys/", "root/", "home/", "var/"} {
		l.dir(d, 0o755)
	}
	l.dir("tmp/", 0o1777)
	l.entry(tar.Header{Name: "home/user/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1000, Gid: 1000}, nil)
	for to, from := range map[string]string{"bin/busybox": busybox, "bin/inside": inside} {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		l.file(to, string(data), 0o755)
	}
	for applet := range strings.FieldsSeq(string(applets)) {
		if applet != "busybox" {
			l.symlink("bin/"+applet, "busybox")
		}
	}
	l.file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n", 0o644)
	l.file("etc/group", "root:x:0:\nuser:x:1000:\n", 0o644)
	return writeImage(filepath.Join(shared.dir, "tiny.tar"), v1.Config{Env: []string{"PATH=/bin"}}, l.bytes())
}

// layer is a tar archive that a test writes entry by entry.
type layer struct {
	b bytes.Buffer
	w *tar.Writer
}

func (l *layer) entry(h tar.Header, data []byte) {
	if l.w == nil {
		l.w = tar.NewWriter(&l.b)
	}
	if h.Typeflag == tar.TypeReg {
		h.Size = int64(len(data))
	}
	if err := l.w.WriteHeader(&h); err != nil {
		panic(err) // the test's own mistake
	}
	if _, err := l.w.Write(data); err != nil {
		panic(err)
	}
}

func (l *layer) dir(name string, mode int64) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode}, nil)
}

func (l *layer) file(name, data string, mode int64) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode}, []byte(data))
}

func (l *layer) symlink(name, to string) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, nil)
}

func (l *layer) hardlink(name, to string) {
	l.entry(tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to, Mode: 0o644}, nil)
}

func (l *layer) bytes() []byte {
	if l.w == nil {
		l.w = tar.NewWriter(&l.b)
	}
	if err := l.w.Close(); err != nil {
		panic(err)
	}
	return l.b.Bytes()
}

// writeImage writes an image of layers as `docker save` does.
func writeImage(path string, c v1.Config, layers ...[]byte) error {
	img := empty.Image
	for _, data := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
		if err != nil {
			return err
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			return err
		}
	}
	img, err := mutate.Config(img, c)
	if err != nil {
		return err
	}
	tag, err := name.NewTag("e2e:latest")
	return errors.Join(err, tarball.WriteToFile(path, tag, img))
}

// writeGzipImage writes an image of one layer that is gzipped already.
func writeGzipImage(path string, layer []byte) error {
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return err
	}
	tag, err := name.NewTag("e2e:bomb")
	return errors.Join(err, tarball.WriteToFile(path, tag, img))
}
