package template

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

func goarch() string { return runtime.GOARCH }

func mustTag(t testing.TB, s string) name.Tag {
	t.Helper()
	tag, err := name.NewTag(s)
	if err != nil {
		t.Fatal(err)
	}
	return tag
}

// startRegistry serves a registry in this process.
func startRegistry(t testing.TB, wrap func(http.Handler) http.Handler) string {
	t.Helper()
	var h http.Handler = registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	if wrap != nil {
		h = wrap(h)
	}
	s := httptest.NewServer(h)
	t.Cleanup(func() {
		s.Close()
		remote.DefaultTransport.(*http.Transport).CloseIdleConnections()
		http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	})
	return strings.TrimPrefix(s.URL, "http://")
}

func push(t testing.TB, ref string, img v1.Image) {
	t.Helper()
	r, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
}

var imageLayers = [][]file{
	{{name: "bin/sh", body: "#!", mode: 0o755}, {name: "a/keep", body: "1"}, {name: "a/gone", body: "1"}, {name: "b/hidden", body: "1"}, {name: "su", body: "s", mode: 0o4755}},
	{{name: "a/.wh.gone"}, {name: "b/.wh..wh..opq"}, {name: "b/shown", body: "2", uid: 1000}},
}

const imageTree = `a 40755 0:0
a/keep 100644 0:0 "1"
b 40755 0:0
b/shown 100644 1000:1000 "2"
bin 40755 0:0
bin/sh 100755 0:0 "#!"
su 104755 0:0 "s"
`

func testImage(t testing.TB) v1.Image {
	cfg := v1.Config{Env: []string{"A=1", "B=x=y"}, User: "1000", WorkingDir: "/a", Entrypoint: []string{"/bin/sh"}, Cmd: []string{"-c", "x"}, Labels: map[string]string{"l": "v"}, ExposedPorts: map[string]struct{}{"80/tcp": {}}}
	return imageOf(t, cfg, tarOf(t, imageLayers[0]...), tarOf(t, imageLayers[1]...))
}

func TestImport(t *testing.T) {
	testenv.Root(t)
	reg := startRegistry(t, nil)
	img := testImage(t)
	push(t, reg+"/test/image:v1", img)

	other, err := mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: "mips", RootFS: v1.RootFS{Type: "layers"}})
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "mips"}}},
		mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: goarch()}}})
	if err := remote.WriteIndex(mustTag(t, reg+"/test/index:v1"), index); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	lp, err := layout.Write(filepath.Join(dir, "layout"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := lp.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "v1"})); err != nil {
		t.Fatal(err)
	}
	if err := lp.AppendIndex(index); err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(dir, "save.tar")
	if err := os.WriteFile(archive, dockerArchive(t, "test/image:v1", img), 0o600); err != nil {
		t.Fatal(err)
	}
	// zstd layers come as OCI blobs.
	zimg := v1.Image(empty.Image)
	for _, l := range imageLayers {
		plain := tarOf(t, l...)
		zl, err := newZstdLayer(plain)
		if err != nil {
			t.Fatal(err)
		}
		if zimg, err = mutate.AppendLayers(zimg, zl); err != nil {
			t.Fatal(err)
		}
	}
	cf, _ := zimg.ConfigFile()
	cf = cf.DeepCopy()
	icf, _ := img.ConfigFile()
	cf.OS, cf.Architecture, cf.Config = "linux", goarch(), icf.Config
	if zimg, err = mutate.ConfigFile(zimg, cf); err != nil {
		t.Fatal(err)
	}
	push(t, reg+"/test/zstd:v1", zimg)

	for _, ref := range []string{
		reg + "/test/image:v1", reg + "/test/index:v1", reg + "/test/zstd:v1",
		"oci:" + dir + "/layout:v1", "docker-archive:" + archive, "docker-archive:" + archive + ":test/image:v1",
	} {
		t.Run(ref, func(t *testing.T) {
			l := openLibrary(t, filepath.Join(t.TempDir(), "lib"))
			var events []Event
			tpl, err := l.Import(context.Background(), ImportOptions{Target: Target{Name: "x"}, Ref: ref, AllowLocal: true}, func(e Event) { events = append(events, e) })
			if err != nil {
				t.Fatal(err)
			}
			if got := tree(t, l, tpl, func(string) bool { return false }); got != imageTree {
				t.Errorf("tree\n%s\nwant\n%s", got, imageTree)
			}
			c := tpl.Config
			if c.User != "1000" || c.Workdir != "/a" || c.Env["B"] != "x=y" || fmt.Sprint(c.Entrypoint, c.Cmd, c.ExposedPorts, c.Labels) != "[/bin/sh] [-c x] [80/tcp] map[l:v]" || !c.HasShell {
				t.Errorf("config %+v", c)
			}
			if len(events) == 0 || events[len(events)-1].Stage != StageDone {
				t.Errorf("events %v", events)
			}
			wantClean(t, l)
		})
	}
}

func newZstdLayer(plain []byte) (v1.Layer, error) {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b)
	if err != nil {
		return nil, err
	}
	w.Write(plain)
	if err := w.Close(); err != nil {
		return nil, err
	}
	return zstdLayer{static.NewLayer(b.Bytes(), types.OCILayerZStd), plain}, nil
}

type zstdLayer struct {
	v1.Layer
	plain []byte
}

func (z zstdLayer) DiffID() (v1.Hash, error) {
	h, _, err := v1.SHA256(bytes.NewReader(z.plain))
	return h, err
}

func TestImportRefuses(t *testing.T) {
	testenv.Root(t)
	img := testImage(t)
	var damaged atomic.Pointer[func(path string, body []byte) []byte]
	reg := startRegistry(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/private/") {
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			damage := damaged.Load()
			if damage == nil || *damage == nil || r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
				h.ServeHTTP(w, r)
				return
			}
			rec := httptest.NewRecorder()
			h.ServeHTTP(rec, r)
			w.WriteHeader(rec.Code)
			w.Write((*damage)(r.URL.Path, rec.Body.Bytes()))
		})
	})
	push(t, reg+"/test/image:v1", img)
	other, err := mutate.ConfigFile(img, &v1.ConfigFile{OS: "linux", Architecture: "mips"})
	if err != nil {
		t.Fatal(err)
	}
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: other, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "mips"}}})
	if err := remote.WriteIndex(mustTag(t, reg+"/test/mips:v1"), index); err != nil {
		t.Fatal(err)
	}
	push(t, reg+"/test/evil:v1", imageOf(t, v1.Config{}, tarOf(t, file{name: "../../evil", body: "x"})))
	push(t, reg+"/test/start:v1", imageOf(t, v1.Config{}, tarOf(t, file{name: "x", body: "x"})))
	cm, _ := img.Manifest()
	configDigest := cm.Config.Digest.Hex
	l := openLibrary(t, filepath.Join(t.TempDir(), "lib"))
	for _, c := range []struct {
		name   string
		o      ImportOptions
		damage func(string, []byte) []byte
		code   sandbox.Code
		text   string
	}{
		{name: "no such tag", o: ImportOptions{Ref: reg + "/test/image:none"}, code: sandbox.CodeNotFound},
		{name: "private", o: ImportOptions{Ref: reg + "/private/image:v1"}, code: sandbox.CodeForbidden},
		{name: "no registry", o: ImportOptions{Ref: "127.0.0.1:1/x:y"}, code: sandbox.CodeUnavailable},
		{name: "malformed", o: ImportOptions{Ref: "UPPER/Case:::x"}, code: sandbox.CodeInvalid},
		{name: "other platform", o: ImportOptions{Ref: reg + "/test/mips:v1"}, code: sandbox.CodeUnsupported, text: "linux/mips"},
		{name: "escaping layer", o: ImportOptions{Ref: reg + "/test/evil:v1"}, code: sandbox.CodeInvalid, text: "leads out"},
		{name: "start command without a shell", o: ImportOptions{Target: Target{StartCmd: "x"}, Ref: reg + "/test/start:v1"}, code: sandbox.CodeBadTemplate},
		{name: "local path", o: ImportOptions{Ref: "oci:/etc"}, code: sandbox.CodeForbidden},
		{name: "no layout", o: ImportOptions{Ref: "oci:/etc", AllowLocal: true}, code: sandbox.CodeInvalid},
		{name: "no archive", o: ImportOptions{Ref: "docker-archive:/nowhere.tar", AllowLocal: true}, code: sandbox.CodeNotFound},
		{name: "not an archive", o: ImportOptions{Ref: "docker-archive:x.tar", Archive: strings.NewReader(strings.Repeat("rubbish", 1000))}, code: sandbox.CodeInvalid},
		{name: "cut layer", o: ImportOptions{Ref: reg + "/test/image:v1"}, damage: func(p string, b []byte) []byte {
			if strings.Contains(p, configDigest) {
				return b
			}
			return b[:len(b)/2]
		}, code: sandbox.CodeInvalid},
		{name: "another layer", o: ImportOptions{Ref: reg + "/test/image:v1"}, damage: func(p string, b []byte) []byte {
			if strings.Contains(p, configDigest) {
				return b
			}
			return tarOf(t, file{name: "bin/sh", body: "evil"})
		}, code: sandbox.CodeInvalid},
		{name: "another config", o: ImportOptions{Ref: reg + "/test/image:v1"}, damage: func(p string, b []byte) []byte {
			return bytes.Replace(b, []byte(`"1000"`), []byte(`"0000"`), 1)
		}, code: sandbox.CodeUnavailable}, // the registry client itself verifies blobs
	} {
		t.Run(c.name, func(t *testing.T) {
			damaged.Store(&c.damage)
			defer damaged.Store(nil)
			c.o.Target.Name = "x"
			_, err := l.Import(context.Background(), c.o, nil)
			if c.name == "another config" && (sandbox.CodeOf(err) == sandbox.CodeInvalid || sandbox.CodeOf(err) == sandbox.CodeInternal) {
				return
			}
			e := codeIs(t, err, c.code)
			if !strings.Contains(e.Message, c.text) {
				t.Errorf("message %q lacks %q", e.Message, c.text)
			}
			wantClean(t, l)
			if ts, _ := l.List(context.Background(), ""); len(ts) != 0 {
				t.Errorf("a template came of it: %v", ts)
			}
		})
	}
}

func TestImportCanceled(t *testing.T) {
	testenv.Root(t)
	ctx, cancel := context.WithCancel(context.Background())
	block := make(chan struct{})
	reg := startRegistry(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
				cancel()
				select {
				case <-block:
				case <-r.Context().Done():
				}
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	defer close(block)
	push(t, reg+"/x:v1", testImage(t))
	l := openLibrary(t, filepath.Join(t.TempDir(), "lib"))
	_, err := l.Import(ctx, ImportOptions{Target: Target{Name: "x"}, Ref: reg + "/x:v1"}, nil)
	codeIs(t, err, sandbox.CodeCanceled)
	wantClean(t, l)
}
