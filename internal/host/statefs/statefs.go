// Package statefs keeps a daemon's state directory on an XFS of its own, where
// the host's filesystem has no reflinks: a sparse image file beside the
// directory, on a loop device, mounted over it. Copies of a disk then cost what
// changes (FICLONE, ioctl_ficlone(2)).
//
// The loop device goes by itself when the filesystem is unmounted
// (LO_FLAGS_AUTOCLEAR), or when whoever was about to mount it ends. The mount
// stays when a daemon ends by a signal that it cannot catch; the next one finds
// it by the image's inode, as it finds a loop device that sandboxes of a mount
// gone by still hold.
package statefs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// XFS is the one kind of filesystem that is made.
const XFS = "xfs"

const (
	// minSize is what mkfs.xfs makes at the least (300 MiB), with some room.
	minSize = 512 << 20
	// defaultSize is the most that an image gets without being asked for.
	defaultSize = 64 << 30
)

// The fault points of the mount.
var (
	pointMade     = fault.Register("statefs.made")
	pointAttached = fault.Register("statefs.attached")
	pointMounted  = fault.Register("statefs.mounted")
)

// Config says what to keep where.
type Config struct {
	State string // the state directory, which exists
	// Kind is XFS, or "": then an image that is there is mounted, and none is
	// made.
	Kind string
	// Size is the image's, in bytes. One that is there grows to it. 0 is 64 GiB
	// or four fifths of the free space, whichever is less.
	Size int64
	Log  *slog.Logger
}

// Image is where the image of a state directory is.
func Image(state string) string {
	if real, err := filepath.EvalSymlinks(state); err == nil {
		state = real
	}
	return state + "." + XFS
}

// FS is a mounted image.
type FS struct {
	// Found is that an earlier daemon had mounted it.
	Found bool

	state string
	log   *slog.Logger
}

// Open mounts the image of a state directory over it, and makes it where there
// is none and cfg says so. It gives nil where there is none to mount: also where
// the directory's filesystem has reflinks.
//
// Errors: CodeUnavailable where this host cannot do it, with the remedy;
// CodeConflict where the mount would hide what is in the directory; CodeInvalid;
// CodeDiskFull.
func Open(ctx context.Context, cfg Config) (*FS, error) {
	if cfg.Kind != "" && cfg.Kind != XFS {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%.40q is no filesystem for the state directory: give %q, or leave it out", cfg.Kind, XFS)
	}
	if cfg.Size != 0 && cfg.Size < minSize {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "a filesystem of %d MiB for the state directory: give at least %d", cfg.Size>>20, minSize>>20)
	}
	state, err := filepath.EvalSymlinks(cfg.State)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the state directory: %w", err)
	}
	image := Image(state)
	made, err := exists(image)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the image of the state directory: %w", err)
	}
	if !made {
		if cfg.Kind == "" {
			return nil, nil
		}
		if host.Reflinks(state) == nil {
			cfg.Log.Info("the state directory's filesystem has reflinks: no image is made", "state", state)
			return nil, nil
		}
	}
	// Daemons that start at one time take turns: the lock of the state
	// directory lies within the mount.
	unlock, err := lock(image + ".lock")
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "lock the image of the state directory: %w", err)
	}
	defer unlock()
	f := &FS{state: state, log: cfg.Log}
	if dev := mounted(state); dev != "" {
		if same, err := backs(dev, image); err != nil || !same {
			return nil, sandbox.Errorf(sandbox.CodeConflict, "%s is mounted already, and not from %s: unmount it, or do without --state-fs (%v)", state, image, err)
		}
		f.Found = true
		if err := f.grow(ctx, dev, image, cfg.Size); err != nil {
			return nil, err
		}
		return f, nil
	}
	if left, err := os.ReadDir(state); err != nil || len(left) > 0 {
		if err == nil {
			err = fmt.Errorf("it has %s", left[0].Name())
		}
		return nil, sandbox.Errorf(sandbox.CodeConflict,
			"the state directory %s is not empty, and %s would hide what it has (%w): move that elsewhere and copy it into the mounted directory later, or give another --state", state, image, err)
	}
	if !made {
		if err := makeImage(ctx, image, cfg.Size); err != nil {
			return nil, err
		}
		pointMade.Hit()
	}
	dev, err := f.mount(image)
	if err != nil {
		return nil, err
	}
	pointMounted.Hit()
	if err := f.grow(ctx, dev, image, cfg.Size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Close unmounts the filesystem. What is in use stays mounted, for the next
// daemon to find.
func (f *FS) Close() error {
	err := unix.Unmount(f.state, 0)
	if errors.Is(err, unix.EBUSY) {
		f.log.Info("the state directory stays mounted: it is in use", "state", f.state)
		return nil
	}
	if err != nil {
		return fmt.Errorf("unmount %s: %w", f.state, err)
	}
	return nil
}

func exists(path string) (bool, error) {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file: remove it", path)
	}
	return err == nil, err
}

func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	// It goes with the file's last descriptor, so also when the daemon is killed.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}

// makeImage makes an image under another name, and gives it its own when it is
// whole.
func makeImage(ctx context.Context, image string, size int64) error {
	mkfs, err := exec.LookPath("mkfs.xfs")
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "an XFS for the state directory needs mkfs.xfs: apt-get install xfsprogs")
	}
	disk, err := host.ReadDisk(filepath.Dir(image))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "%w", err)
	}
	if size == 0 {
		size = min(defaultSize, disk.Free/5*4)
	}
	if size < minSize {
		return sandbox.Errorf(sandbox.CodeDiskFull, "%d MiB are free for the state directory's filesystem, which needs %d: free some, or give another --state", disk.Free>>20, minSize*5/4>>20)
	}
	tmp := image + ".tmp"
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "make the state directory's filesystem: %w", err)
	}
	err = f.Truncate(size)
	if err == nil {
		var out []byte
		if out, err = exec.CommandContext(ctx, mkfs, "-q", "-f", "-m", "reflink=1", "-L", "warren", tmp).CombinedOutput(); err != nil {
			err = fmt.Errorf("mkfs.xfs: %w: %.500q", err, out)
		}
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, image)
	}
	if err != nil {
		code := sandbox.CodeUnavailable
		if errors.Is(err, unix.ENOSPC) {
			code = sandbox.CodeDiskFull
		}
		return sandbox.Errorf(code, "make the state directory's filesystem: %w", errors.Join(err, os.Remove(tmp)))
	}
	return nil
}

// mount mounts image, and tells by which loop device.
func (f *FS) mount(image string) (string, error) {
	no := func(err error) (string, error) {
		return "", sandbox.Errorf(sandbox.CodeUnavailable, "mount %s at %s: %w: as root, on a kernel with loop devices and XFS (modprobe loop xfs)", image, f.state, err)
	}
	dev, loop, err := attach(image)
	if err != nil {
		return no(err)
	}
	defer loop.Close()
	pointAttached.Hit()
	// discard: what is freed in the filesystem is freed in the image's too.
	if err := unix.Mount(dev, f.state, XFS, unix.MS_NOATIME|unix.MS_NODEV, "discard"); err != nil {
		return no(err)
	}
	if err := os.Chmod(f.state, 0o700); err != nil {
		return no(errors.Join(err, unix.Unmount(f.state, 0)))
	}
	return dev, nil
}

// attach gives a loop device of image, open, so that it stays until it is
// mounted: one that is there already, or a new one.
func attach(image string) (string, *os.File, error) {
	if dev, f := attached(image); f != nil {
		return dev, f, nil
	}
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return "", nil, err
	}
	defer file.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", nil, err
	}
	defer ctl.Close()
	var last error
	for try := range 50 { // others may take the free one first
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", nil, fmt.Errorf("no free loop device: %w", err)
		}
		dev := "/dev/loop" + strconv.Itoa(n)
		loop, err := os.OpenFile(dev, os.O_RDWR, 0)
		if err == nil {
			conf := unix.LoopConfig{Fd: uint32(file.Fd())}
			conf.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO // not cached twice
			copy(conf.Info.File_name[:len(conf.Info.File_name)-1], image)
			err = unix.IoctlLoopConfigure(int(loop.Fd()), &conf)
			if errors.Is(err, unix.EINVAL) { // a disk that does no direct I/O
				conf.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
				err = unix.IoctlLoopConfigure(int(loop.Fd()), &conf)
			}
			if err == nil {
				return dev, loop, nil
			}
			loop.Close()
		}
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, os.ErrNotExist) {
			return "", nil, fmt.Errorf("%s: %w", dev, err)
		}
		last = err
		time.Sleep(time.Duration(try) * time.Millisecond)
	}
	return "", nil, fmt.Errorf("no loop device could be had: %w", last)
}

// attached finds a loop device of image.
func attached(image string) (string, *os.File) {
	for _, dev := range Devices(image) {
		if same, err := backs(dev, image); err != nil || !same {
			continue
		}
		if f, err := os.OpenFile(dev, os.O_RDWR, 0); err == nil {
			if same, err := backs(dev, image); err == nil && same { // still
				return dev, f
			}
			f.Close()
		}
	}
	return "", nil
}

// Leaked are the loop devices of an image that would stay for ever: those that
// do not go with their last user. One that does can outlive the mount in a copy
// that another process's mount namespace has of it, and goes with that.
func Leaked(image string) []string {
	var all []string
	for _, dev := range Devices(image) {
		flag, err := os.ReadFile("/sys/block/" + filepath.Base(dev) + "/loop/autoclear")
		if err == nil && strings.TrimSpace(string(flag)) == "0" {
			all = append(all, dev)
		}
	}
	return all
}

// Devices are the loop devices of an image, by its name.
func Devices(image string) []string {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	var all []string
	for _, f := range files {
		data, err := os.ReadFile(f)
		if name := strings.TrimSuffix(string(data), "\n"); err == nil && (name == image || name == image+" (deleted)") {
			all = append(all, "/dev/"+filepath.Base(filepath.Dir(filepath.Dir(f))))
		}
	}
	return all
}

// backs tells whether a loop device is of image: by its inode, as its name may
// have gone over to another file.
func backs(dev, image string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil {
		return false, err
	}
	f, err := os.Open(dev)
	if err != nil {
		return false, err
	}
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if err != nil {
		return false, fmt.Errorf("%s: %w", dev, err)
	}
	return info.Inode == st.Ino && info.Device == uint64(st.Dev), nil
}

// mounted gives the device that is mounted at dir, "" where there is none. Of
// several mounts the last counts.
func mounted(dir string) string {
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != dir, false })
	if err != nil || len(all) == 0 {
		return ""
	}
	return all[len(all)-1].Source
}

// Mounted tells whether the image of state is mounted at it.
func Mounted(state string) bool {
	if real, err := filepath.EvalSymlinks(state); err == nil {
		state = real
	}
	dev := mounted(state)
	if !strings.HasPrefix(dev, "/dev/loop") {
		return false
	}
	same, err := backs(dev, Image(state))
	return err == nil && same
}

// grow makes a mounted image as large as size, if it is smaller.
func (f *FS) grow(ctx context.Context, dev, image string, size int64) error {
	st, err := os.Stat(image)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the image of the state directory: %w", err)
	}
	if size != 0 && size < st.Size() {
		f.log.Warn("the state directory's filesystem is larger than asked for, and does not shrink", "bytes", st.Size(), "asked", size)
	}
	if size == 0 || size < st.Size() {
		return nil
	}
	// Also where it has the size: growing may have been cut short.
	no := func(err error) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, "grow the state directory's filesystem to %d MiB: %w", size>>20, err)
	}
	tool, err := exec.LookPath("xfs_growfs")
	if err != nil {
		return no(errors.New("apt-get install xfsprogs"))
	}
	if err := os.Truncate(image, size); err != nil {
		return no(err)
	}
	loop, err := os.OpenFile(dev, os.O_RDWR, 0)
	if err != nil {
		return no(err)
	}
	defer loop.Close()
	if err := unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return no(err)
	}
	if out, err := exec.CommandContext(ctx, tool, "-d", f.state).CombinedOutput(); err != nil {
		return no(fmt.Errorf("xfs_growfs: %w: %.500q", err, out))
	}
	return nil
}
