// Package testenv tells a test whether this machine can run it, in words that
// `make test` collects into its list of what was skipped and why.
package testenv

import (
	"os"
	"os/exec"
	"testing"
)

// Root skips t unless it runs as root.
func Root(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: run `make test-root` as root")
	}
}

// Command skips t unless name is in PATH or is an executable file's path, and
// returns its path. remedy says how to get it.
func Command(t testing.TB, name, remedy string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s: %s", name, remedy)
	}
	return path
}
