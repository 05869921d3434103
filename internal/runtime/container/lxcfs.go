package container

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/runtime/oci"
)

// lxcfsFiles are the files of /proc that lxcfs answers by the reader's limits.
var lxcfsFiles = []string{"cpuinfo", "diskstats", "loadavg", "meminfo", "stat", "swaps", "uptime"}

// lxcfs keeps one lxcfs process per daemon instance: a FUSE filesystem whose
// /proc/meminfo and its like show a container its limits and not the host. It
// outlives the daemon, since live sandboxes have its files mounted. Containers
// run without it too, and then see the host's figures.
type lxcfs struct {
	binary string // "" where it is not installed
	dir    string // its mount point
	pid    string // its pid file

	mu    sync.Mutex
	files map[string]*os.File // O_PATH; looking a path up costs FUSE a round trip for each part
}

// cpuDir is lxcfs's view of the CPUs.
const cpuDir = "sys/devices/system/cpu"

func newLXCFS(runDir string) *lxcfs {
	dir := filepath.Join(runDir, "lxcfs")
	return &lxcfs{binary: oci.FindBinary("lxcfs"), dir: dir, pid: dir + ".pid"}
}

// available tells whether containers will see their limits.
func (l *lxcfs) available() bool {
	return l.binary != "" && unix.Access("/dev/fuse", unix.R_OK|unix.W_OK) == nil
}

// start sees to it that lxcfs serves, and returns paths of its files by their
// names ("proc/meminfo"); nil where it does not and cannot.
func (l *lxcfs) start(ctx context.Context) map[string]string {
	if !l.available() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.serves() {
		l.forget()
		if l.launch(ctx) != nil {
			return nil
		}
	}
	if l.files == nil && l.open() != nil {
		l.forget()
		return nil
	}
	paths := make(map[string]string, len(l.files))
	for name, f := range l.files {
		paths[name] = fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	}
	return paths
}

func (l *lxcfs) open() error {
	l.files = map[string]*os.File{}
	names := []string{cpuDir}
	for _, name := range lxcfsFiles {
		names = append(names, "proc/"+name)
	}
	for _, name := range names {
		fd, err := unix.Open(filepath.Join(l.dir, name), unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		l.files[name] = os.NewFile(uintptr(fd), name)
	}
	return nil
}

func (l *lxcfs) forget() {
	for _, f := range l.files {
		f.Close()
	}
	l.files = nil
}

// serves tells whether the mount point answers.
func (l *lxcfs) serves() bool {
	var st unix.Statfs_t
	return unix.Statfs(l.dir, &st) == nil && st.Type == unix.FUSE_SUPER_MAGIC
}

func (l *lxcfs) launch(ctx context.Context) error {
	// What a dead one left: ENOTCONN, not an empty directory.
	unix.Unmount(l.dir, unix.MNT_DETACH)
	if err := os.MkdirAll(l.dir, 0o755); err != nil {
		return err
	}
	cmd := exec.Command(l.binary, "--enable-loadavg", "--enable-cfs", "--pidfile="+l.pid, l.dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // also reaps it, should it end before the daemon
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for wait := time.Millisecond; !l.serves(); wait = min(2*wait, 20*time.Millisecond) {
		select {
		case err := <-ended:
			return fmt.Errorf("lxcfs ended at its start: %w", errors.Join(err))
		case <-ctx.Done():
			cmd.Process.Kill()
			return ctx.Err()
		case <-time.After(wait):
		}
	}
	return nil
}

// stop ends lxcfs. Nothing may use it any more.
func (l *lxcfs) stop(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget()
	if pid := l.running(); pid != 0 {
		fd, err := unix.PidfdOpen(pid, 0)
		if err == nil {
			defer unix.Close(fd)
			if l.running() == pid { // still the same one
				// It has nothing to tidy but its mount, and on SIGTERM sleeps
				// for up to 5 s in its load average's thread.
				unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
			}
			waitPidfd(ctx, fd, 5*time.Second)
		}
	}
	if err := unix.Unmount(l.dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", l.dir, err)
	}
	os.Remove(l.pid)
	if err := os.Remove(l.dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func waitPidfd(ctx context.Context, fd int, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 50)
		if err == nil && n > 0 {
			return
		}
	}
}

// running is the pid of this instance's lxcfs; 0 where there is none. The pid
// file alone proves nothing: the process must have our mount point as its
// argument.
func (l *lxcfs) running() int {
	data, err := os.ReadFile(l.pid)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 1 {
		return 0
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil || !bytes.Contains(args, []byte("\x00"+l.dir+"\x00")) {
		return 0
	}
	return pid
}
