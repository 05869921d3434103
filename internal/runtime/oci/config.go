// Package oci is what the runtimes that are driven through an OCI runtime's
// command line (container, gvisor) share: bundles, private mount namespaces to
// start in, control groups, the record of what runs, and its end.
//
// No process of Warren's stays between the daemon and a sandbox: the OCI
// runtime starts the sandbox's first process and exits, and the daemon watches
// that process by a pidfd. So a daemon that is killed leaves its sandboxes
// running, and the next one adopts them from their records under
// Config.RunDir.
package oci

import (
	"os/exec"
	"path/filepath"

	"github.com/warrenhq/warren/internal/sandbox"
)

// AgentMount is where a sandbox has the agent's binary.
const AgentMount = "/.warren/agent"

// Config is what a driver needs of its daemon.
type Config struct {
	Instance  string // host.Instance of the state directory: goes into names on the host
	RunDir    string // absolute, gone after a reboot: /run/warren/<instance>
	AgentPath string // the static agent binary
	// Binary is the OCI runtime: a name to look up in PATH or a path. Empty
	// picks the driver's default.
	Binary string
	// MemoryBudget bounds the memory of all of the daemon's sandboxes
	// together, in bytes; 0 is no bound. The drivers of one daemon share it.
	MemoryBudget int64
}

// Validate checks c. The error has CodeInvalid.
func (c Config) Validate() error {
	switch {
	case c.Instance == "":
		return sandbox.Errorf(sandbox.CodeInvalid, "the runtime's config has no instance name")
	case !filepath.IsAbs(c.RunDir):
		return sandbox.Errorf(sandbox.CodeInvalid, "the run directory %q is not absolute", c.RunDir)
	case !filepath.IsAbs(c.AgentPath):
		return sandbox.Errorf(sandbox.CodeInvalid, "the agent's path %q is not absolute", c.AgentPath)
	case c.MemoryBudget < 0:
		return sandbox.Errorf(sandbox.CodeInvalid, "the memory budget is %d bytes: give 0 (none) or more", c.MemoryBudget)
	}
	return nil
}

// FindBinary gives the path of the first of names that can be executed; ""
// where none can.
func FindBinary(names ...string) string {
	for _, name := range names {
		if name == "" {
			continue
		}
		if path, err := exec.LookPath(name); err == nil {
			if abs, err := filepath.Abs(path); err == nil {
				return abs
			}
		}
		// Debian has runc in /usr/sbin, which is not in every PATH.
		if !filepath.IsAbs(name) {
			for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"} {
				if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
					return path
				}
			}
		}
	}
	return ""
}
