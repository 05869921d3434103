package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// bindSuffix makes the directory in which a socket is bound out of its path.
const bindSuffix = ".d"

// maxSocket is the longest path of a socket. The address of a unix socket has
// 108 bytes with its NUL (unix(7)), of which binding it needs a few more.
const maxSocket = 107 - len(bindSuffix+"/s")

// lockState takes the state directory for this process. The lock goes with
// the process, however it ends.
func lockState(state string) (unlock func() error, err error) {
	path := filepath.Join(state, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "open the state directory's lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := make([]byte, 32)
		n, _ := f.Read(holder)
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, sandbox.Errorf(sandbox.CodeConflict, "another daemon (pid %s) runs on the state directory %s: stop it, or give this one its own by --state", holder[:n], state)
		}
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "lock %s: %w", path, err)
	}
	// For people; nothing goes by it.
	if err := f.Truncate(0); err == nil {
		fmt.Fprint(f, os.Getpid())
	}
	return f.Close, nil
}

// listenUnix listens on the socket, which root alone may use. One that a
// daemon left behind is replaced, one that answers is not.
func listenUnix(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the socket's directory cannot be made: %w", err)
	}
	// Two daemons that find the same stale socket must not both replace it.
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "lock the socket: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, sandbox.Errorf(sandbox.CodeConflict, "another daemon serves on %s: stop it, or give this one its own by --socket", path)
	}
	l, err := bindUnix(path)
	if err != nil {
		lock.Close()
		return nil, err
	}
	return &lockedListener{l, lock}, nil
}

func bindUnix(path string) (net.Listener, error) {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the socket: %w", err)
	case fi.Mode()&os.ModeSocket == 0:
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%s exists and is no socket: give another path by --socket", path)
	default:
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			c.Close()
			return nil, sandbox.Errorf(sandbox.CodeConflict, "another program serves on %s: stop it, or give another path by --socket", path)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, sandbox.Errorf(sandbox.CodeUnavailable, "replace the stale socket: %w", err)
		}
	}
	// Bound in a directory of root's own, and moved into place with its mode
	// right: there is no moment in which others could connect. The name is
	// fixed, so that nothing piles up; the lock is held.
	tmp := path + bindSuffix
	os.RemoveAll(tmp)
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the socket: %w", err)
	}
	defer os.RemoveAll(tmp)
	bound := filepath.Join(tmp, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: bound, Net: "unix"})
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err = os.Chmod(bound, 0o600); err == nil {
		err = os.Rename(bound, path)
	}
	if err != nil {
		l.Close()
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "listen on %s: %w", path, err)
	}
	return &unixListener{l, path}, nil
}

// unixListener removes its path when it is closed.
type unixListener struct {
	*net.UnixListener
	path string
}

func (l *unixListener) Close() error {
	os.Remove(l.path)
	return l.UnixListener.Close()
}

func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// lockedListener gives the socket's lock back when it is closed.
type lockedListener struct {
	net.Listener
	lock *os.File
}

func (l *lockedListener) Close() error {
	err := l.Listener.Close()
	l.lock.Close()
	return err
}
