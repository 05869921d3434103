package gvisor

import (
	"context"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Instance is one running gVisor sandbox.
type Instance struct {
	*oci.Instance
	d *Driver
}

// Suspend implements sandbox.Suspender by the cgroup freezer, which stops the
// Sentry and all it runs. `runsc pause` would ask the Sentry to stop its tasks,
// costs a process of 50 ms, and leaves the Sentry's own timers running.
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

// WatchOOM implements sandbox.OOMWatcher. At the limit the kernel ends the
// process with the most memory. That is mostly the host process which stands
// for the guest's largest, and the Sentry ends that one and goes on; it is the
// Sentry, and so the sandbox, when the memory is in files of a tmpfs.
func (i *Instance) WatchOOM(ctx context.Context, f func(total int64)) error {
	return i.Cgroup().WatchOOM(ctx, i.Done(), f)
}
