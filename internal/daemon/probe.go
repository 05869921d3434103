package daemon

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Probed is what Probe found of one runtime.
type Probed struct {
	Name  string
	Error error // why this host cannot run it, with the remedy; nil: it can
}

// Probe tells without a daemon which runtimes a daemon of cfg could run here.
// It leaves nothing on the host that was not there before.
func Probe(ctx context.Context, cfg Config) ([]Probed, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	instance, err := host.Instance(cfg.State)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the state directory: %w", err)
	}
	runDir := filepath.Join(runRoot, instance)
	if _, err := os.Stat(runDir); errors.Is(err, os.ErrNotExist) {
		// A probe prepares the places that a daemon would; empty ones go again.
		defer removeEmpty(runDir)
		groups, err := filepath.Glob("/sys/fs/cgroup/*/warren-" + instance)
		if one := "/sys/fs/cgroup/warren-" + instance; err == nil && len(groups) == 0 {
			if _, err := os.Stat(one); errors.Is(err, os.ErrNotExist) {
				defer func() {
					made, _ := filepath.Glob("/sys/fs/cgroup/*/warren-" + instance)
					for _, g := range append(made, one) {
						os.Remove(g) // rmdir(2): one that holds anything stays
					}
				}()
			}
		}
	}
	var all []Probed
	for _, r := range runtimes {
		rt, err := r.open(oci.Config{Instance: instance, RunDir: runDir, AgentPath: cfg.Agent, Binary: r.binary(cfg)})
		if err != nil {
			return all, err
		}
		all = append(all, Probed{Name: rt.Name(), Error: rt.Probe(ctx)})
		if c, ok := rt.(interface{ Close(context.Context) error }); ok {
			c.Close(context.WithoutCancel(ctx))
		}
	}
	return all, nil
}

// removeEmpty removes the directories under dir, and dir, that hold no files.
func removeEmpty(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if e.IsDir() {
			removeEmpty(filepath.Join(dir, e.Name()))
		}
	}
	os.Remove(dir)
}
