package template

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/testenv"
)

// stepEnv makes the test binary the first process of a build step.
const stepEnv = "WARREN_TEST_STEP"

func TestMain(m *testing.M) {
	if s := os.Getenv(stepEnv); s != "" {
		os.Unsetenv(stepEnv)
		fmt.Fprintln(os.Stderr, "step:", stepMain(s))
		os.Exit(126)
	}
	goleak.VerifyTestMain(m)
}

type stepFiles struct {
	Lower, Upper, Work, Merged string
	Step                       Step
	UID, GID                   int
}

// stepMain runs in a mount namespace of its own: the overlay goes with it.
func stepMain(s string) error {
	var f stepFiles
	if err := json.Unmarshal([]byte(s), &f); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("overlay", f.Merged, "overlay", 0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,redirect_dir=off,metacopy=off", f.Lower, f.Upper, f.Work)); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	if err := unix.Chroot(f.Merged); err != nil {
		return err
	}
	if err := os.Chdir(f.Step.Workdir); err != nil {
		return err
	}
	os.Clearenv()
	env := []string{}
	for k, v := range f.Step.Env {
		env = append(env, k+"="+v)
		os.Setenv(k, v)
	}
	program, err := exec.LookPath(f.Step.Argv[0])
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return err
	}
	if err := syscall.Setgid(f.GID); err != nil {
		return err
	}
	if err := syscall.Setuid(f.UID); err != nil {
		return err
	}
	return unix.Exec(program, f.Step.Argv, env)
}

// chrootRunner runs steps in a chroot on a kernel overlay: not a sandbox, but
// what it captures is what a kernel leaves in an upper directory.
type chrootRunner struct {
	mu    sync.Mutex
	steps []Step
}

func (r *chrootRunner) RunStep(ctx context.Context, s Step) (StepResult, error) {
	r.mu.Lock()
	r.steps = append(r.steps, s)
	r.mu.Unlock()
	tmp := s.LayerDir + ".run"
	defer layer.RemoveTree(tmp)
	f := stepFiles{Lower: strings.Join(s.Layers, ":"), Upper: s.LayerDir, Work: tmp + "/work", Merged: tmp + "/merged"}
	for _, d := range []string{f.Upper, tmp, f.Work, f.Merged} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return StepResult{}, err
		}
	}
	if s.User != "" {
		if _, err := fmt.Sscanf(s.User, "%d", &f.UID); err != nil {
			return StepResult{}, err
		}
		f.GID = f.UID
	}
	out := s.Output
	s.Output = nil
	f.Step = s
	data, err := json.Marshal(f)
	if err != nil {
		return StepResult{}, err
	}
	exe, err := os.Executable()
	if err != nil {
		return StepResult{}, err
	}
	cmd := exec.CommandContext(ctx, exe)
	cmd.Env = []string{stepEnv + "=" + string(data)}
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	cmd.WaitDelay = 5 * time.Second
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		return StepResult{ExitCode: exit.ExitCode()}, nil
	}
	return StepResult{}, err
}

type file struct {
	name, body string
	mode       int64
	link       string
	uid        int
}

func tarOf(t testing.TB, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: f.mode, Size: int64(len(f.body)), Uid: f.uid, Gid: f.uid, ModTime: time.Unix(1700000000, 0)}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		switch {
		case f.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		case strings.HasSuffix(f.name, "/"):
			h.Typeflag = tar.TypeDir
			if f.mode == 0 {
				h.Mode = 0o755
			}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, f.body)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var busybox = sync.OnceValues(func() ([]byte, error) {
	p, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	return os.ReadFile(p)
})

// boxFiles is a small root filesystem with a shell.
func boxFiles(t testing.TB) []file {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "busybox", "apt install busybox-static")
	bin, err := busybox()
	if err != nil {
		t.Fatal(err)
	}
	files := []file{
		{name: "bin/busybox", body: string(bin), mode: 0o755},
		{name: "etc/passwd", body: "root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home/app:/bin/sh\n"},
		{name: "etc/group", body: "root:x:0:\napp:x:1001:\nweb:x:33:\n"},
		{name: "tmp/", mode: 0o1777},
	}
	for _, a := range []string{"sh", "cat", "echo", "ls", "mkdir", "rm", "mv", "chmod", "id", "env", "sleep", "pwd", "ln", "touch", "test", "dd"} {
		files = append(files, file{name: "bin/" + a, link: "busybox"})
	}
	return files
}

func imageOf(t testing.TB, cfg v1.Config, layers ...[]byte) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	var err error
	for _, l := range layers {
		one, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(l)), nil })
		if err != nil {
			t.Fatal(err)
		}
		if img, err = mutate.AppendLayers(img, one); err != nil {
			t.Fatal(err)
		}
	}
	f, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	f = f.DeepCopy()
	f.OS, f.Architecture, f.Config = "linux", goarch(), cfg
	if img, err = mutate.ConfigFile(img, f); err != nil {
		t.Fatal(err)
	}
	return img
}

func openLibrary(t testing.TB, dir string, opts ...Option) *Library {
	t.Helper()
	l, err := Open(dir, opts...)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Collect(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Problems() {
		t.Error(p)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// dockerArchive is what docker save gives of one image.
func dockerArchive(t testing.TB, tag string, img v1.Image) []byte {
	t.Helper()
	ref := mustTag(t, tag)
	var b bytes.Buffer
	if err := tarball.Write(ref, img, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// withBox opens a library that has the template "box".
func withBox(t testing.TB, opts ...Option) *Library {
	t.Helper()
	files := boxFiles(t)
	l := openLibrary(t, filepath.Join(t.TempDir(), "templates"), opts...)
	img := imageOf(t, v1.Config{Env: []string{"PATH=/bin", "FROM_BOX=yes"}}, tarOf(t, files...))
	_, err := l.Import(context.Background(), ImportOptions{
		Target: Target{Name: "box", Shared: true}, Ref: "docker-archive:box.tar", Archive: bytes.NewReader(dockerArchive(t, "box:1", img)),
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// tree dumps what a template's merged layers have, but for names in skip.
func tree(t testing.TB, l *Library, tpl Template, skip func(string) bool) string {
	t.Helper()
	_, dirs, err := l.Resolve(context.Background(), tpl.Tenant, tpl.ID)
	if err != nil {
		t.Fatal(err)
	}
	v, err := layer.OpenView(dirs)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	var b strings.Builder
	var walk func(e layer.Entry)
	walk = func(e layer.Entry) {
		if e.Path != "" && !skip(e.Path) {
			fmt.Fprintf(&b, "%s %o %d:%d", e.Path, e.Stat.Mode, e.Stat.Uid, e.Stat.Gid)
			switch {
			case e.IsRegular():
				data, err := v.ReadFile(e.Path, 1<<20)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&b, " %q", data)
			case !e.IsDir():
				to, _ := v.Readlink(e)
				fmt.Fprintf(&b, " -> %s", to)
			}
			b.WriteByte('\n')
		}
		if !e.IsDir() {
			return
		}
		names, err := v.ReadDir(e)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			c, err := v.Child(e, n)
			if err != nil {
				t.Fatal(err)
			}
			walk(c)
		}
	}
	root, err := v.Lookup("/", true)
	if err != nil {
		t.Fatal(err)
	}
	walk(root)
	return b.String()
}

func inBox(p string) bool {
	first, _, _ := strings.Cut(p, "/")
	return first == "bin" || p == "etc" || p == "etc/passwd" || p == "etc/group" || p == "tmp"
}

// wantClean fails where the library holds anything that no template or cache
// entry explains.
func wantClean(t testing.TB, l *Library) {
	t.Helper()
	names, err := os.ReadDir(l.path("tmp"))
	if err != nil || len(names) != 0 {
		t.Errorf("tmp has %v, %v", names, err)
	}
	want := map[string]bool{}
	l.mu.Lock()
	for _, m := range []map[string]Template{l.live, l.retired} {
		for _, tpl := range m {
			for _, d := range tpl.Layers {
				want[dirName(d)] = true
			}
		}
	}
	for _, c := range l.cache {
		want[dirName(c.Layer)] = true
	}
	l.mu.Unlock()
	for _, dir := range []string{"layers", "meta"} {
		got, err := os.ReadDir(l.path(dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range got {
			if !want[strings.TrimSuffix(g.Name(), ".json")] {
				t.Errorf("%s is of no use to anything", path.Join(dir, g.Name()))
			}
		}
		if len(got) != len(want) {
			t.Errorf("%s has %d, want %d", dir, len(got), len(want))
		}
	}
}

func codeIs(t testing.TB, err error, code sandbox.Code) *sandbox.Error {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Fatalf("err = %v (%s), want %s", err, sandbox.CodeOf(err), code)
	}
	return e
}
