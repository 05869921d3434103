package gvisor

import (
	"context"
	"fmt"
	"os/exec"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Instance is one running gVisor sandbox.
type Instance struct {
	*oci.Instance
	drv *Driver
}

// Suspend implements sandbox.Suspender: the Sentry stops all tasks, and the
// freezer then the Sentry itself, whose timers would go on using CPU.
func (i *Instance) Suspend(ctx context.Context) error {
	if err := i.Cgroup().Freeze(ctx); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "suspend sandbox %s: %w", i.Spec().ID, err)
	}
	return nil
}

// Unsuspend implements sandbox.Suspender.
func (i *Instance) Unsuspend(context.Context) error {
	if err := i.Cgroup().Thaw(); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "unsuspend sandbox %s: %w", i.Spec().ID, err)
	}
	return nil
}

func (i *Instance) runsc(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, i.drv.binary, append([]string{"--root=" + i.drv.eng.StateDir()}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("runsc %s: %w: %s", args[0], err, out)
	}
	return nil
}
