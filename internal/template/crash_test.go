package template

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

// crashEnv makes TestCrashChild do the work in that directory.
const crashEnv = "WARREN_TEST_CRASH_DIR"

// work passes every point of the library but Debian's.
func work(t *testing.T, l *Library) error {
	ctx := context.Background()
	for _, body := range []string{"1", "2"} {
		img := imageOf(t, v1.Config{}, tarOf(t, boxFiles(t)...), tarOf(t, file{name: "f", body: body}))
		if _, err := l.Import(ctx, ImportOptions{Target: Target{Name: "box"}, Ref: "docker-archive:x", Archive: bytes.NewReader(dockerArchive(t, "x:1", img))}, nil); err != nil {
			return err
		}
	}
	for i := range 2 {
		o := DockerfileOptions{Target: Target{Name: "built"}, Content: []byte(fmt.Sprintf("FROM box\nRUN echo %d > /n\nCOPY a /a\nRUN cat /a > /b", i)), Context: bytes.NewReader(tarOf(t, file{name: "a", body: "A"}))}
		if _, err := l.BuildDockerfile(ctx, o, &chrootRunner{}, nil); err != nil {
			return err
		}
	}
	if _, err := l.PruneCache(ctx); err != nil {
		return err
	}
	_, err := l.Remove(ctx, "", "built")
	return err
}

func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashEnv)
	if dir == "" {
		t.Skip("for TestCrash: it is the process that ends")
	}
	if err := work(t, openLibrary(t, dir)); err != nil {
		t.Fatal(err)
	}
}

// TestCrash ends a process at every point of a build, replacement and
// removal, and checks what the next one finds.
func TestCrash(t *testing.T) {
	boxFiles(t)
	for _, point := range fault.Points() {
		if !strings.HasPrefix(point, "template.") || strings.HasPrefix(point, "template.debian") {
			continue
		}
		hits := []int{1, 3}
		if testing.Short() {
			hits = hits[:1]
		}
		for _, hit := range hits {
			t.Run(fmt.Sprintf("%s:%d", point, hit), func(t *testing.T) { crashAt(t, point, hit) })
		}
	}
}

func crashAt(t *testing.T, point string, hit int) {
	dir := filepath.Join(t.TempDir(), "lib")
	cmd := exec.Command(os.Args[0], "-test.run=^TestCrashChild$")
	cmd.Env = append(os.Environ(), crashEnv+"="+dir, fmt.Sprintf("%s=%s:%d", fault.Env, point, hit))
	out, err := cmd.CombinedOutput()
	if err == nil && hit > 1 {
		return // it is not passed that often
	}
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("the child ended otherwise: %v\n%s", err, out)
	}
	l := openLibrary(t, dir)
	wantClean(t, l)
	ts, err := l.List(context.Background(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, tpl := range ts {
		got := tree(t, l, tpl, func(p string) bool { return p != "f" && p != "b" })
		want := []string{"f 100644 0:0 \"1\"\n", "f 100644 0:0 \"2\"\n"}
		if tpl.Name == "built" {
			want = []string{"b 100644 0:0 \"A\"\nf 100644 0:0 \"2\"\n"}
		}
		if !slices.Contains(want, got) {
			t.Errorf("the template %s has\n%s", tpl.Name, got)
		}
	}
	if err := work(t, l); err != nil {
		t.Errorf("afterwards it does not work: %v", err)
	}
	wantClean(t, l)
}

// fullEnv makes TestDiskFullChild work on the small filesystem there.
const fullEnv = "WARREN_TEST_FULL_DIR"

// TestDiskFull runs its child in a mount namespace with a small filesystem.
func TestDiskFull(t *testing.T) {
	boxFiles(t)
	testenv.Command(t, "unshare", "apt install util-linux")
	dir := t.TempDir()
	cmd := exec.Command("unshare", "--mount", "--", "sh", "-c", `mount -t tmpfs -o size=12m tmpfs "$0" && exec "$@"`, dir, os.Args[0], "-test.run=^TestDiskFullChild$", "-test.v")
	cmd.Env = append(os.Environ(), fullEnv+"="+dir)
	if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("PASS: TestDiskFullChild")) {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestDiskFullChild(t *testing.T) {
	dir := os.Getenv(fullEnv)
	if dir == "" {
		t.Skip("for TestDiskFull: it needs a filesystem of its own")
	}
	ctx := context.Background()
	l := openLibrary(t, filepath.Join(dir, "lib"))
	small := importFiles(t, l, Target{Name: "small"}, boxFiles(t)...)
	big := strings.Repeat("x", 11<<20)
	_, err := tryImport(t, l, Target{Name: "big"}, file{name: "big", body: big})
	codeIs(t, err, sandbox.CodeDiskFull)
	_, err = tryImport(t, l, Target{Name: "small"}, file{name: "big", body: big})
	codeIs(t, err, sandbox.CodeDiskFull)
	_, err = l.BuildDockerfile(ctx, DockerfileOptions{Target: Target{Name: "x"}, Content: []byte("FROM small\nCOPY big /\nCOPY big /big2"), Context: bytes.NewReader(tarOf(t, file{name: "big", body: big[:4<<20]}))}, nil, nil)
	codeIs(t, err, sandbox.CodeDiskFull)
	// The state is what it was, and works.
	if got, err := l.Get(ctx, "", "small"); err != nil || got.ID != small.ID {
		t.Fatalf("%v, %v", got, err)
	}
	if _, err := l.PruneCache(ctx); err != nil {
		t.Fatal(err)
	}
	wantClean(t, l)
	importFiles(t, l, Target{Name: "another"}, file{name: "f", body: "fits"})
}
