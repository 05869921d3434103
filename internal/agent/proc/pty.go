package proc

import (
	"fmt"
	"os"
	"syscall"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/proto/process"
)

// The size of a terminal that is asked for without one.
const (
	defaultCols = 80
	defaultRows = 24
)

func winsize(s *process.PTY_Size) *pty.Winsize {
	w := &pty.Winsize{Cols: uint16(min(s.GetCols(), 65535)), Rows: uint16(min(s.GetRows(), 65535))}
	if w.Cols == 0 {
		w.Cols = defaultCols
	}
	if w.Rows == 0 {
		w.Rows = defaultRows
	}
	return w
}

// openPTY makes a terminal that belongs to the command's user. The master is
// for the poller; the slave is a blocking fd for the child.
func openPTY(sp *spec) (master *os.File, slave int, err error) {
	m, s, err := pty.Open()
	if err != nil {
		return nil, -1, err
	}
	// The library's own files block in reads; take the descriptors out of them.
	defer m.Close()
	defer s.Close()
	if err := pty.Setsize(m, winsize(sp.pty)); err != nil {
		return nil, -1, err
	}
	if sp.cred != nil {
		// As grantpt(3) would: programs reopen /dev/tty and the slave's path.
		if err := s.Chown(sp.uid, -1); err != nil {
			return nil, -1, err
		}
	}
	mfd, err := unix.FcntlInt(m.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, -1, err
	}
	if err := syscall.SetNonblock(mfd, true); err != nil {
		syscall.Close(mfd)
		return nil, -1, err
	}
	sfd, err := unix.FcntlInt(s.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err == nil {
		err = syscall.SetNonblock(sfd, false)
	}
	if err != nil {
		syscall.Close(mfd)
		return nil, -1, err
	}
	return os.NewFile(uintptr(mfd), "ptmx"), sfd, nil
}

// resize sets the terminal's size; the kernel tells the foreground process
// group by SIGWINCH.
func (c *command) resize(s *process.PTY_Size) error {
	if c.pty == nil {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d has no terminal to resize", c.pid))
	}
	rc, err := c.pty.SyscallConn()
	if err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	w := winsize(s)
	var ierr error
	err = rc.Control(func(fd uintptr) {
		ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: w.Rows, Col: w.Cols})
	})
	if err == nil {
		err = ierr
	}
	if err != nil {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("resize the terminal of process %d: %w", c.pid, err))
	}
	return nil
}
