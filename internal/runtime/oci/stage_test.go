package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestCheckRoot(t *testing.T) {
	testenv.Root(t) // whiteouts are device nodes
	layer := func(make func(path func(string) string) error) string {
		dir := t.TempDir()
		if err := make(func(name string) string { return filepath.Join(dir, name) }); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	empty := layer(func(func(string) string) error { return nil })
	dirs := layer(func(p func(string) string) error { return os.MkdirAll(p("proc"), 0o755) })
	link := layer(func(p func(string) string) error { return os.Symlink("/etc", p("proc")) })
	file := layer(func(p func(string) string) error { return os.WriteFile(p(".warren"), nil, 0o644) })
	gone := layer(func(p func(string) string) error { return unix.Mknod(p("proc"), unix.S_IFCHR, 0) })
	for _, c := range []struct {
		name   string
		layers []string
		bad    string
	}{
		{"empty", []string{empty}, ""},
		{"directories", []string{empty, dirs}, ""},
		{"symlink", []string{link}, "/proc"},
		{"file", []string{dirs, file}, "/.warren"},
		{"symlink below a directory", []string{dirs, link}, ""},
		{"symlink over a directory", []string{link, dirs}, "/proc"},
		{"symlink that was removed", []string{gone, link}, ""},
	} {
		err := checkRoot(c.layers)
		switch {
		case c.bad == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.bad != "" && (sandbox.CodeOf(err) != sandbox.CodeBadTemplate || !strings.Contains(err.Error(), c.bad+" ")):
			t.Errorf("%s: %v (%s)", c.name, err, sandbox.CodeOf(err))
		}
	}
}
