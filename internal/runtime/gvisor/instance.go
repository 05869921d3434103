package gvisor

import (
	"context"
	"strings"
	"time"

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

// stopTimeout bounds one pause or resume of runsc's.
const stopTimeout = 30 * time.Second

// stop runs runsc's pause or resume; that a sandbox is in the state already is
// no error.
//
// A client's going away does not interrupt it: between the Sentry's answer and
// runsc's note of it, runsc would take a sandbox that runs for a paused one, and
// the Sentry ends itself when it is resumed once too often ("Invalid stopCount",
// pkg/sentry/kernel/task_stop.go).
func (i *Instance) stop(ctx context.Context, verb, state string) error {
	if err := ctx.Err(); err != nil {
		return runError(ctx, verb, i.Spec().ID, err, "")
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
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
