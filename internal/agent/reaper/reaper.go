// Package reaper starts the agent's commands and waits for them, and for the
// orphans that fall to it as PID 1 or as a child subreaper.
//
// There is one waiter. It peeks at the next dead child with
// waitid(P_ALL, WEXITED|WNOWAIT), which leaves the zombie in place, finds out
// whose it is, and only then reaps it. A command's exit status so can be taken
// by nobody but its owner, and a pid cannot be used anew between its owner's
// look at it and a signal: see Child.Signal.
//
// It gets along with a thread of the process that traces others (package
// freeze). The kernel tells of stops of the traced to every waiter of the
// process, asked for or not, so each peek is looked at before anything is
// reaped; and the traced that end are reaped here, upon which the kernel tells
// their parents.
package reaper

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Reaper starts and reaps. Use New.
type Reaper struct {
	orphans bool
	reaped  atomic.Int64

	// spawn is held shared by every fork, until its child is in children, and
	// alone by the waiter for the moment in which it decides whose a zombie is:
	// a child that ends before Start returns is not mistaken for an orphan.
	spawn    sync.RWMutex
	paused   sync.RWMutex // held shared by Start, alone from Pause to Resume
	mu       sync.Mutex   // guards children
	children map[int]*Child

	wake chan struct{} // there may be children again
	sigs chan os.Signal
	stop chan struct{}
	done chan struct{}
	oom  oomScore
}

// New makes a Reaper. With orphans it becomes the child subreaper of its
// process (which PID 1 is anyway) and reaps every child that the process has,
// so nothing else in the process may start or wait for children. Without, it
// waits for its own children only. Close ends it.
func New(orphans bool) (*Reaper, error) {
	r := &Reaper{
		orphans:  orphans,
		children: map[int]*Child{},
		wake:     make(chan struct{}, 1),
		stop:     make(chan struct{}),
		done:     make(chan struct{}),
	}
	r.oom.open()
	if !orphans {
		close(r.done)
		return r, nil
	}
	if os.Getpid() != 1 {
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			r.oom.close()
			return nil, fmt.Errorf("become the subreaper of orphans: %w", err)
		}
	}
	r.sigs = make(chan os.Signal, 1)
	signal.Notify(r.sigs, unix.SIGCHLD)
	go r.wait()
	return r, nil
}

// ErrPaused is that no command can be started now.
var ErrPaused = errors.New("the sandbox is frozen for a capture: try again")

// Pause waits for the starts under way, and lets Start fail with ErrPaused until
// Resume.
func (r *Reaper) Pause() { r.paused.Lock() }

// Resume ends a Pause.
func (r *Reaper) Resume() { r.paused.Unlock() }

// Close stops the waiter. It does not end children: the caller does, before.
func (r *Reaper) Close() {
	close(r.stop)
	if r.orphans {
		signal.Stop(r.sigs)
		// The waiter may sit in waitid with a child that never ends.
		r.poke()
		r.mu.Lock()
		live := len(r.children) > 0
		r.mu.Unlock()
		if !live {
			select {
			case <-r.done:
			case <-time.After(time.Second):
			}
		}
	}
	r.oom.close()
}

// Reaped is how many orphans were reaped so far.
func (r *Reaper) Reaped() int64 { return r.reaped.Load() }

// Child is one started command.
type Child struct {
	Pid  int
	done chan struct{}

	mu     sync.Mutex // held over wait4 and kill: a reaped pid is never signalled
	reaped bool
	status syscall.WaitStatus
}

// Done is closed when the command ended and was reaped.
func (c *Child) Done() <-chan struct{} { return c.done }

// Status is how it ended; call it after Done.
func (c *Child) Status() syscall.WaitStatus { return c.status }

// ErrEnded is that a command has ended already.
var ErrEnded = errors.New("the process has ended")

// Signal signals the command's process group, which begins as its own (every
// command is a session leader), or the command alone if its group is empty.
func (c *Child) Signal(sig syscall.Signal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped {
		return ErrEnded
	}
	err := syscall.Kill(-c.Pid, sig)
	if err == syscall.ESRCH {
		err = syscall.Kill(c.Pid, sig)
	}
	return err
}

// take reaps the child if it is dead.
func (c *Child) take(options int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reaped || options&syscall.WNOHANG != 0 && !isDead(c.Pid) {
		return false
	}
	var ws syscall.WaitStatus
	if pid := wait4(c.Pid, &ws, options); pid != c.Pid {
		return false
	}
	c.status, c.reaped = ws, true
	return true
}

func wait4(pid int, ws *syscall.WaitStatus, options int) int {
	for {
		got, err := syscall.Wait4(pid, ws, options, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return -1
		}
		return got
	}
}

// Start forks and executes argv[0] (a path) with attr, in a session of its
// own, with an oom_score_adj of commandScore. Between Pause and Resume it fails
// with ErrPaused.
func (r *Reaper) Start(path string, argv []string, attr *syscall.ProcAttr) (*Child, error) {
	if !r.paused.TryRLock() {
		return nil, ErrPaused
	}
	defer r.paused.RUnlock()
	return r.StartPaused(path, argv, attr)
}

// StartPaused is Start also between Pause and Resume.
func (r *Reaper) StartPaused(path string, argv []string, attr *syscall.ProcAttr) (*Child, error) {
	if attr.Sys == nil {
		attr.Sys = &syscall.SysProcAttr{}
	}
	attr.Sys.Setsid = true
	r.spawn.RLock()
	defer r.spawn.RUnlock()
	r.oom.raise()
	pid, err := syscall.ForkExec(path, argv, attr)
	r.oom.restore()
	if err != nil {
		return nil, err
	}
	c := &Child{Pid: pid, done: make(chan struct{})}
	if !r.orphans {
		go func() {
			peekPid(pid)
			c.take(0)
			close(c.done)
		}()
		return c, nil
	}
	r.mu.Lock()
	r.children[pid] = c
	r.mu.Unlock()
	r.poke()
	return c, nil
}

func (r *Reaper) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// wait is the one waiter.
func (r *Reaper) wait() {
	defer close(r.done)
	for {
		select {
		case <-r.stop:
			return
		default:
		}
		pid, err := peekAny()
		if err == unix.ECHILD {
			// No children: sleep until one is started, or an orphan falls to us
			// and dies, which the kernel tells by SIGCHLD.
			select {
			case <-r.wake:
			case <-r.sigs:
			case <-r.stop:
				return
			}
			continue
		}
		if err == errStopped {
			time.Sleep(stopPause)
			continue
		}
		if err != nil { // EINTR
			continue
		}
		r.reap(pid)
	}
}

func (r *Reaper) reap(pid int) {
	r.spawn.Lock() // waits for the forks under way to be entered, and holds off new ones
	r.mu.Lock()
	c := r.children[pid]
	r.mu.Unlock()
	if c == nil {
		// An orphan; or the child of a failed exec, which the fork took itself.
		var ws syscall.WaitStatus
		if isDead(pid) && wait4(pid, &ws, syscall.WNOHANG) == pid {
			r.reaped.Add(1)
		}
	}
	r.spawn.Unlock()
	// WNOHANG, as a child that was taken and whose number is now that of a new,
	// living one is possible too.
	if c == nil || !c.take(syscall.WNOHANG) {
		return
	}
	r.mu.Lock()
	if r.children[pid] == c {
		delete(r.children, pid)
	}
	r.mu.Unlock()
	close(c.done)
}

// siginfo is the part of siginfo_t that waitid fills, on 64-bit Linux.
type siginfo struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	uid                uint32
	status             int32
	_                  [100]byte
}

// errStopped is that what waitid told was not an end, but the stop of a child
// that a thread of this process traces.
var errStopped = errors.New("stopped, not dead")

// stopPause is the wait before the next look while the thread that traces has
// not taken such a stop yet.
const stopPause = 200 * time.Microsecond

// waitid peeks at a dead child. Its pid is 0 where options have WNOHANG and
// there is none.
func waitid(kind, id, options int) (int, error) {
	var info siginfo
	_, _, e := unix.Syscall6(unix.SYS_WAITID, uintptr(kind), uintptr(id), uintptr(unsafe.Pointer(&info)), uintptr(unix.WEXITED|unix.WNOWAIT|options), 0, 0)
	runtime.KeepAlive(&info)
	if e != 0 {
		return 0, e
	}
	if info.pid != 0 && info.code != cldExited && info.code != cldKilled && info.code != cldDumped {
		return 0, errStopped
	}
	return int(info.pid), nil
}

// The codes of siginfo that tell an end (asm-generic/siginfo.h).
const (
	cldExited = 1
	cldKilled = 2
	cldDumped = 3
)

// peekAny waits for any child to be dead and leaves it so.
func peekAny() (int, error) { return waitid(unix.P_ALL, 0, 0) }

// isDead tells whether a child is dead and not reaped.
func isDead(pid int) bool {
	got, err := waitid(unix.P_PID, pid, unix.WNOHANG)
	return err == nil && got == pid
}

// peekPid waits for one child to be dead and leaves it so.
func peekPid(pid int) {
	for {
		switch _, err := waitid(unix.P_PID, pid, 0); err {
		case errStopped:
			time.Sleep(stopPause)
		case unix.EINTR:
		default:
			return
		}
	}
}

// commandScore is the oom_score_adj of commands (proc(5)): where the kernel has
// to end something, of the sandbox or of the host, a command goes before the
// agent, whose own score the host may not have been allowed to lower, even where
// there are many small ones.
const commandScore = 500

// oomScore gives commands their score: the agent's is raised around each fork,
// and lowered again after it. The kernel lets a process lower it again to what a
// privileged one gave it before (oom_score_adj_min, else 0), so no capability is
// needed. Where the file cannot be written, nothing is done.
type oomScore struct {
	mu    sync.Mutex
	file  *os.File
	own   []byte // the agent's own score
	forks int
}

func (o *oomScore) open() {
	f, err := os.OpenFile("/proc/self/oom_score_adj", os.O_RDWR, 0)
	if err != nil {
		return
	}
	buf := make([]byte, 16)
	n, _ := f.Read(buf)
	score, err := strconv.Atoi(string(trimSpace(buf[:n])))
	if err != nil || score >= commandScore {
		f.Close()
		return
	}
	o.file, o.own = f, []byte(strconv.Itoa(score))
}

func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[len(b)-1] == '\n' || b[len(b)-1] == ' ') {
		b = b[:len(b)-1]
	}
	return b
}

func (o *oomScore) raise() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.forks++; o.forks == 1 && o.file != nil {
		o.file.WriteAt([]byte(strconv.Itoa(commandScore)), 0)
	}
}

func (o *oomScore) restore() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.forks--; o.forks == 0 && o.file != nil {
		o.file.WriteAt(o.own, 0)
	}
}

func (o *oomScore) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file != nil {
		o.file.Close()
		o.file = nil
	}
}
