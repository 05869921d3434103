package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// WatchOOM calls f with the count of OOM kills in the group after each rise,
// until ctx is done (its error) or ended is closed (nil). It sleeps in the
// kernel: v2 tells a change of memory.events by inotify, v1 the state "under
// OOM" by an eventfd.
func (g *Cgroup) WatchOOM(ctx context.Context, ended <-chan struct{}, f func(total int64)) error {
	last, err := g.OOMKills()
	if err != nil {
		return g.oomError(err)
	}
	if last > 0 {
		f(last)
	}
	events, err := g.oomEvents()
	if err != nil {
		return g.oomError(err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	closed := make(chan struct{})
	defer func() { <-closed }()
	defer cancel(nil)
	go func() {
		defer close(closed)
		select {
		case <-ctx.Done():
		case <-ended:
			cancel(errGone)
		}
		events.Close()
	}()
	buf := make([]byte, 4096)
	for {
		n, err := events.Read(buf)
		if n <= 0 || err != nil {
			if errors.Is(context.Cause(ctx), errGone) {
				return nil
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return g.oomError(err)
		}
		// v1 tells before the kill. One kill per event is not promised either:
		// look until the count has risen, or for a second.
		for wait := time.Millisecond; ; wait *= 2 {
			total, err := g.OOMKills()
			if err != nil || ctx.Err() != nil {
				break // removed: the next read ends this
			}
			if total > last {
				last = total
				f(total)
				break
			}
			if g.h.mode == host.CgroupV2 || wait > 512*time.Millisecond {
				break
			}
			select {
			case <-ctx.Done():
			case <-time.After(wait):
			}
		}
	}
}

func (g *Cgroup) oomError(err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil // it ended
	}
	return sandbox.Errorf(sandbox.CodeInternal, "watch %s for OOM kills: %w", g.path, err)
}

// oomEvents is a file that can be read once for each event.
func (g *Cgroup) oomEvents() (*os.File, error) {
	if g.h.mode == host.CgroupV2 {
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return nil, fmt.Errorf("inotify: %w", err)
		}
		if _, err := unix.InotifyAddWatch(fd, filepath.Join(g.dir(""), "memory.events"), unix.IN_MODIFY); err != nil {
			unix.Close(fd)
			return nil, err
		}
		return os.NewFile(uintptr(fd), "memory.events"), nil
	}
	ctl, err := os.Open(filepath.Join(g.dir("memory"), "memory.oom_control"))
	if err != nil {
		return nil, err
	}
	defer ctl.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if err := writeFile(filepath.Join(g.dir("memory"), "cgroup.event_control"), fmt.Sprintf("%d %d", fd, ctl.Fd())); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "memory.oom_control"), nil
}
