package buildctx

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func fill(t testing.TB, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, body := range files {
		p := filepath.Join(dir, name)
		os.MkdirAll(filepath.Dir(p), 0o755)
		if err := os.WriteFile(p, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func names(t testing.TB, r io.Reader) (out []string) {
	t.Helper()
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			slices.Sort(out)
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Uname != "" {
			t.Errorf("%s tells an owner", h.Name)
		}
		out = append(out, h.Name)
	}
}

func TestPack(t *testing.T) {
	for _, c := range []struct{ ignore, dockerfile, want string }{
		{"", "", ".dockerignore Dockerfile a/ a/b.log a/k sub/ sub/Dockerfile x.log"},
		{"*.log\nDockerfile\n.dockerignore", "", ".dockerignore Dockerfile a/ a/b.log a/k sub/ sub/Dockerfile"},
		{"*\n", "", ".dockerignore Dockerfile"},
		{"*\n", "sub/Dockerfile", ".dockerignore sub/Dockerfile"},
		{"**\n!a/k", "", ".dockerignore Dockerfile a/k"},
		{"a", "", ".dockerignore Dockerfile sub/ sub/Dockerfile x.log"},
		{"**/*.log", "", ".dockerignore Dockerfile a/ a/k sub/ sub/Dockerfile"},
	} {
		dir := fill(t, map[string]string{".dockerignore": c.ignore, "Dockerfile": "", "a/b.log": "", "a/k": "", "x.log": "", "sub/Dockerfile": ""})
		r, err := Pack(context.Background(), dir, c.dockerfile)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(names(t, r), " "); got != c.want {
			t.Errorf("%q packs\n%s, want\n%s", c.ignore, got, c.want)
		}
		r.Close()
	}
}

func TestPackOddFiles(t *testing.T) {
	dir := fill(t, map[string]string{"Dockerfile": "x"})
	os.Symlink("/etc/passwd", filepath.Join(dir, "link"))
	os.Symlink("/etc", filepath.Join(dir, "dirlink"))
	unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600)
	r, err := Pack(context.Background(), dir, "")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got := strings.Join(names(t, r), " "); got != "Dockerfile dirlink link" {
		t.Errorf("packed %s", got)
	}
}

func TestPackEnds(t *testing.T) {
	dir := fill(t, map[string]string{"a": strings.Repeat("x", 1<<20), "b": strings.Repeat("x", 1<<20)})
	r, err := Pack(context.Background(), dir, "")
	if err != nil {
		t.Fatal(err)
	}
	io.CopyN(io.Discard, r, 1000)
	r.Close() // goleak tells whether the packer is gone
	ctx, cancel := context.WithCancel(context.Background())
	r, err = Pack(ctx, dir, "")
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, r); sandbox.CodeOf(err) != sandbox.CodeCanceled {
		t.Errorf("err = %v", err)
	}
	if _, err := Pack(context.Background(), dir+"/none", ""); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("err = %v", err)
	}
	for _, name := range []string{"../x", "/etc/passwd", "a/../../x", "."} {
		if _, err := Pack(context.Background(), dir, name); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestPruneAndFifo(t *testing.T) {
	dir := fill(t, map[string]string{"keep": "", "drop/a": "", "part/keep": "", "part/x/y": "", ".dockerignore": "drop\npart\n!part/keep\n"})
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	ig, err := Load(root, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := Prune(root, ig); err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]bool{"keep": true, "drop": false, "part/keep": true, "part/x": false} {
		if _, err := root.Lstat(p); (err == nil) != want {
			t.Errorf("%s: %v", p, err)
		}
	}
	unix.Mkfifo(filepath.Join(dir, "Dockerfile"), 0o600)
	if _, err := ReadFile(root, "Dockerfile", 10); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("a fifo: %v", err)
	}
}

func FuzzIgnore(f *testing.F) {
	f.Add([]byte("*\n!a/**\n# c\n[a-"), "a/b")
	f.Fuzz(func(t *testing.T, data []byte, name string) {
		ig, err := ParseIgnore(data)
		if err != nil {
			if c := sandbox.CodeOf(err); c != sandbox.CodeInvalid && c != sandbox.CodeTooLarge {
				t.Error(err)
			}
			return
		}
		if _, err := ig.Match(name); err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Error(err)
		}
	})
}
