// Package reseed holds what a template gets so that random number generators
// in user space differ between the forks of a sandbox. The kernel's own
// (getrandom, /dev/urandom) do so by themselves.
package reseed

import _ "embed"

// Paths in a root filesystem.
const (
	// PythonPath is a module; Debian's Python, and virtual environments that
	// see the system's packages, load it by PythonStart.
	PythonPath  = "/usr/lib/python3/dist-packages/warren_reseed.py"
	PythonStart = "/usr/lib/python3/dist-packages/warren_reseed.pth"
	// NodePath is loaded by NodeOptions.
	NodePath = "/usr/local/lib/warren/reseed.js"
	// NodeOptions is the value of NODE_OPTIONS in the template's environment.
	NodeOptions = "--require=" + NodePath
)

//go:embed files/warren_reseed.py
var python []byte

//go:embed files/warren-reseed.js
var node []byte

// Files are the files by their paths, for root, with mode 0644.
func Files() map[string][]byte {
	return map[string][]byte{
		PythonPath:  python,
		PythonStart: []byte("import warren_reseed\n"),
		NodePath:    node,
	}
}
