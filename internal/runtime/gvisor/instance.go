package gvisor

import (
	"context"
	"strings"

	"github.com/warrenhq/warren/internal/runtime/oci"
)

// Instance is one running gVisor sandbox.
type Instance struct {
	*oci.Instance
	d *Driver
}

// Suspend implements sandbox.Suspender by the Sentry, which stops its tasks.
// The cgroup freezer would stop it from without, but it interrupts the system
// calls of systrap's stub threads in a way that they do not survive: after a
// thaw, now and then, a process of the sandbox is killed or faults.
func (i *Instance) Suspend(ctx context.Context) error { return i.stop(ctx, "pause", "paused") }

// Unsuspend implements sandbox.Suspender.
func (i *Instance) Unsuspend(ctx context.Context) error { return i.stop(ctx, "resume", "running") }

// stop runs runsc's pause or resume; that a sandbox is in the state already is
// no error.
func (i *Instance) stop(ctx context.Context, verb, state string) error {
	id := i.Spec().ID
	err := i.d.eng.Run(ctx, oci.Command{ID: id, Argv: append(i.d.argv(), verb), Env: runscEnv})
	if err == nil {
		return nil
	}
	said := i.d.eng.Said(id)
	if ctx.Err() == nil && strings.Contains(said, "in state "+state) {
		return nil
	}
	return runError(ctx, verb, id, err, said)
}

// WatchOOM implements sandbox.OOMWatcher. At the limit the kernel ends the
// process with the most memory. That is mostly the host process which stands
// for the guest's largest, and the Sentry ends that one and goes on; it is the
// Sentry, and so the sandbox, when the memory is in files of a tmpfs.
func (i *Instance) WatchOOM(ctx context.Context, f func(total int64)) error {
	return i.Cgroup().WatchOOM(ctx, i.Done(), f)
}
