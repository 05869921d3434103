package container

import (
	"context"
	"os"
	"path/filepath"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/fstree"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Instance is one running container.
type Instance struct{ *oci.Instance }

// Suspend implements sandbox.Suspender by the cgroup freezer.
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

// CaptureDisk implements sandbox.DiskCapturer: it freezes the container,
// copies its overlay's upper, and thaws it again unless it was suspended
// before. What Warren itself put there is left out.
func (i *Instance) CaptureDisk(ctx context.Context, dir string) error {
	id := i.Spec().ID
	suspended, err := i.Cgroup().Frozen()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "capture sandbox %s: %w", id, err)
	}
	if !suspended {
		// A daemon that finds it knows that it has to go on: see Adopt.
		if err := os.WriteFile(capturing(i.Spec()), nil, 0o600); err != nil {
			return sandbox.Errorf(sandbox.CodeUnavailable, "capture sandbox %s: %w", id, err)
		}
		defer func() {
			if i.Unsuspend(context.WithoutCancel(ctx)) == nil {
				os.Remove(capturing(i.Spec()))
			}
		}()
		if err := i.Suspend(ctx); err != nil {
			return err
		}
		pointDiskFrozen.Hit()
	}
	upper := filepath.Join(rwDir(i.Spec().Dir), "upper")
	err = fstree.Copy(ctx, upper, dir, fstree.Options{Skip: func(path string) bool { return path == ".warren" }})
	if err != nil {
		return fstree.Error(err, "capture the disk of sandbox %s", id)
	}
	return nil
}

// capturing is the file that is there while a sandbox is suspended for a
// capture of its disk and nothing else.
func capturing(spec sandbox.Spec) string { return filepath.Join(spec.Dir, "capturing") }

var pointDiskFrozen = fault.Register("container.disk.frozen")

// WatchOOM implements sandbox.OOMWatcher.
func (i *Instance) WatchOOM(ctx context.Context, f func(total int64)) error {
	return i.Cgroup().WatchOOM(ctx, i.Done(), f)
}
