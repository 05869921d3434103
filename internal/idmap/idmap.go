// Package idmap gives user namespaces and idmapped mounts, so that files are
// kept on the disk with the ids that a sandbox sees (root is 0), while its
// processes run as ids of their own on the host.
package idmap

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Size is the number of ids that one sandbox has: 0 to 65535 inside.
const Size = 65536

// firstBase is the first slot's base. It is above the ids of the host's users
// and of the usual /etc/subuid ranges' beginning at 100000, and leaves room
// for 2^14 slots below 2^31, which some filesystems and tools take for the
// highest id.
const firstBase = 1 << 24

// A Range is the host ids that a sandbox's ids 0 … Size-1 stand for.
type Range struct{ Base uint32 }

// ForSlot is the range of a network slot. Slots are 0 … 16383.
func ForSlot(slot int) (Range, error) {
	if slot < 0 || slot >= 1<<14 {
		return Range{}, fmt.Errorf("slot %d has no id range: slots are 0 to %d", slot, 1<<14-1)
	}
	return Range{Base: firstBase + uint32(slot)*Size}, nil
}

// kept holds user namespaces for their next use: slots are used again and
// again, and to make one takes a process. Which one goes when there are too
// many does not matter.
var (
	keptMu sync.Mutex
	kept   = map[Range]*os.File{}
)

const maxKept = 64

// UserNS gives a user namespace that maps r, uids and gids alike. The caller
// closes it.
func (r Range) UserNS() (*os.File, error) {
	keptMu.Lock()
	f := kept[r]
	if f != nil {
		f, err := dup(f)
		keptMu.Unlock()
		return f, err
	}
	keptMu.Unlock()
	f, err := r.newUserNS()
	if err != nil {
		return nil, err
	}
	keptMu.Lock()
	defer keptMu.Unlock()
	if kept[r] == nil {
		if len(kept) >= maxKept {
			for old, f := range kept {
				f.Close()
				delete(kept, old)
				break
			}
		}
		if own, err := dup(f); err == nil {
			kept[r] = own
		}
	}
	return f, nil
}

func dup(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// newUserNS makes a user namespace. It is that of a child which the kernel
// stops at its exec, before it runs one instruction, and which is killed as
// soon as the namespace's file is open.
func (r Range) newUserNS() (*os.File, error) {
	var ns *os.File
	var err error
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		runtime.LockOSThread() // a tracer is a thread
		defer runtime.UnlockOSThread()
		ns, err = r.userNS()
	}()
	wg.Wait()
	if err != nil {
		return nil, fmt.Errorf("user namespace for ids %d+%d: %w", r.Base, Size, err)
	}
	return ns, nil
}

func (r Range) userNS() (*os.File, error) {
	m := []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(r.Base), Size: Size}}
	p, err := os.StartProcess("/proc/self/exe", []string{"userns"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER,
			UidMappings: m,
			GidMappings: m,
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		if errors.Is(err, unix.ENOSPC) {
			err = fmt.Errorf("%w: raise the sysctl user.max_user_namespaces", err)
		}
		return nil, err
	}
	defer func() {
		p.Kill()
		p.Wait()
	}()
	return os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
}

// OpenTree clones the mount at path (its directory or file, without the mounts
// below it) as a detached mount. With a user namespace, ids on it are mapped
// through it; without (nil) they are as they are. attrs are the mount's, of
// MOUNT_ATTR_RDONLY, _NOSUID and _NODEV (mount_setattr(2)).
// Attach the result with Move, or close it to be rid of it.
func OpenTree(path string, userns *os.File, attrs uint64) (*os.File, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("open_tree %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	attr := unix.MountAttr{Propagation: unix.MS_PRIVATE, Attr_set: attrs}
	if userns != nil {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(userns.Fd())
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		f.Close()
		if userns != nil && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP)) {
			err = fmt.Errorf("%w: its filesystem or this kernel has no idmapped mounts", err)
		}
		return nil, fmt.Errorf("mount_setattr %s: %w", path, err)
	}
	return f, nil
}

// Move attaches a detached mount at target and closes it.
func Move(tree *os.File, target string) error {
	defer tree.Close()
	err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
	runtime.KeepAlive(tree)
	if err != nil {
		return fmt.Errorf("move_mount %s to %s: %w", tree.Name(), target, err)
	}
	return nil
}

// Supported tells whether dir's filesystem and this kernel have idmapped
// mounts: nil, or why not.
func Supported(dir string) error {
	r, err := ForSlot(0)
	if err != nil {
		return err
	}
	ns, err := r.UserNS()
	if err != nil {
		return err
	}
	defer ns.Close()
	t, err := OpenTree(dir, ns, 0)
	if err != nil {
		return err
	}
	return t.Close()
}
