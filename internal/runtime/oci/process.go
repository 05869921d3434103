package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// A Process is one process of the host, watched by a pidfd: it need not be a
// child, and its pid's reuse for another does not confuse.
type Process struct {
	PID   int
	Start uint64 // clock ticks from the host's boot to its start
	fd    *os.File
}

// errGone says that there is no such process.
var errGone = errors.New("the process does not run")

// openProcess finds the process of a pid. start guards against reuse of the
// pid; 0 takes whichever process has it now.
func openProcess(pid int, start uint64) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, errGone
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	p := &Process{PID: pid, fd: os.NewFile(uintptr(fd), fmt.Sprintf("pidfd of %d", pid))}
	// Read after the open: if it is the right one now, so is the pidfd's.
	p.Start, err = startTime(pid)
	if err != nil || (start != 0 && p.Start != start) {
		p.fd.Close()
		return nil, errGone
	}
	return p, nil
}

// startTime reads field 22 of /proc/<pid>/stat (proc(5)).
func startTime(pid int) (uint64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	return parseStartTime(data)
}

func parseStartTime(stat []byte) (uint64, error) {
	// The name, field 2, stands in parentheses and may have anything in it.
	i := bytes.LastIndexByte(stat, ')')
	if i < 0 {
		return 0, errors.New("/proc/<pid>/stat has no name")
	}
	f := bytes.Fields(stat[i+1:])
	if len(f) < 20 {
		return 0, errors.New("/proc/<pid>/stat is too short")
	}
	if f[0][0] == 'Z' || f[0][0] == 'X' {
		return 0, errGone
	}
	return strconv.ParseUint(string(f[19]), 10, 64)
}

// Wait blocks until the process has ended, or ctx is done. Only one call at a
// time: it uses the pidfd's read deadline.
func (p *Process) Wait(ctx context.Context) error {
	p.fd.SetReadDeadline(time.Time{}) // of an earlier call
	stop := context.AfterFunc(ctx, func() { p.fd.SetReadDeadline(time.Now().Add(-time.Second)) })
	defer stop()
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	err = raw.Read(func(fd uintptr) bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		return err == nil && n > 0
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// SpareFromOOM sets the process's oom_score_adj (proc(5)), -1000 to 1000: the
// kernel chooses it for its memory only when nothing of a higher score is left.
// Without CAP_SYS_RESOURCE a score cannot go down, and stays.
func (p *Process) SpareFromOOM(adj int) error {
	err := writeFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID), strconv.Itoa(adj))
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, os.ErrNotExist) {
		return nil // ErrNotExist: it ended, which the wait for its answer tells
	}
	return err
}

// exitStatus is how the process ended, where the kernel tells it to others
// than the parent (Linux 6.15), and only after the parent took note: wait is
// to wait a moment for that.
func (p *Process) exitStatus(wait bool) (unix.WaitStatus, bool) {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return 0, false
	}
	info := unix.PidfdInfo{}
	for range 20 {
		var err error
		raw.Control(func(fd uintptr) {
			info.Mask = unix.PIDFD_INFO_EXIT
			err = unix.IoctlPidfdInfo(int(fd), &info)
		})
		if err == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0 {
			return unix.WaitStatus(info.Exit_code), true
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return 0, false // ENOTTY, EINVAL: an older kernel
		}
		if !wait {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return 0, false
}

// Close lets go of the process; it is not ended by this.
func (p *Process) Close() error { return p.fd.Close() }

// kill ends the process; it is not an error when it has ended already.
func (p *Process) kill() error {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	var errno error
	if err := raw.Control(func(fd uintptr) {
		errno = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0)
	}); err != nil {
		return err
	}
	if errno != nil && !errors.Is(errno, unix.ESRCH) {
		return fmt.Errorf("kill %d: %w", p.PID, errno)
	}
	return nil
}
