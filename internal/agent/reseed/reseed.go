// Package reseed holds what a template gets so that random number generators
// in user space differ between the forks of a sandbox. The kernel's own
// (getrandom, /dev/urandom) do so by themselves.
package reseed

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"syscall"
	"time"
)

// Paths in a root filesystem.
const (
	// NodePath is loaded by NodeOptions.
	NodePath = "/usr/local/lib/warren/reseed.js"
	// AddonPath is what NodePath loads where it is there: it has OpenSSL's own
	// generator seeded anew. AddonSource is what Compile makes it of.
	AddonPath   = "/usr/local/lib/warren/reseed.node"
	AddonSource = "/usr/local/lib/warren/reseed.c"
	// NodeOptions is the value of NODE_OPTIONS in the template's environment.
	NodeOptions = "--require=" + NodePath
	// PythonModule is in the directory of each Python's own library, which
	// virtual environments see too, and is imported by its sitecustomize.
	PythonModule = "warren_reseed.py"
)

// Python is the module.
//
//go:embed files/warren_reseed.py
var Python []byte

// Node is the module.
//
//go:embed files/warren-reseed.js
var Node []byte

// Addon is the source of the native part of Node's.
//
//go:embed files/warren_reseed.c
var Addon []byte

const start = "\n# Random numbers that differ between the forks of a sandbox.\ntry:\n    import warren_reseed\nexcept ImportError:\n    pass\n"

// Install writes the files to a root filesystem of Debian. Nodes load theirs
// with NodeOptions in their environment, Pythons by themselves.
func Install(root *os.Root) error {
	if err := root.MkdirAll(path.Dir(NodePath)[1:], 0o755); err != nil {
		return err
	}
	for path, data := range map[string][]byte{NodePath: Node, AddonSource: Addon} {
		if err := root.WriteFile(path[1:], data, 0o644); err != nil {
			return err
		}
	}
	libs, err := fs.Glob(root.FS(), "usr/lib/python3.*/os.py")
	if err != nil {
		return err
	}
	for _, lib := range libs {
		dir := path.Dir(lib)
		if err := root.WriteFile(path.Join(dir, PythonModule), Python, 0o644); err != nil {
			return err
		}
		// Debian's is a file of /etc, to which the library has a link.
		site := path.Join("etc", path.Base(dir), "sitecustomize.py")
		if _, err := root.Lstat(site); errors.Is(err, fs.ErrNotExist) {
			site = path.Join(dir, "sitecustomize.py")
		}
		f, err := root.OpenFile(site, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
		if err != nil {
			return fmt.Errorf("%s: %w", site, err)
		}
		_, err = f.WriteString(start)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("%s: %w", site, err)
		}
	}
	return nil
}

// compileLimit bounds Compile.
const compileLimit = time.Minute

// Compile makes the addon with the compiler of the root filesystem in dir, run
// there as root. Without one it does nothing: then Node's OpenSSL follows only
// where it has the RDRAND engine.
func Compile(ctx context.Context, dir string) error {
	const compiler = "/usr/bin/gcc"
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	_, err = root.Stat(compiler[1:])
	root.Close()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, compileLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, compiler, "-shared", "-fPIC", "-O2", "-s", "-o", AddonPath, AddonSource)
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "TMPDIR=/tmp"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: dir, Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("compile %s: %w: %s", AddonSource, err, bytes.TrimSpace(out))
	}
	return nil
}
