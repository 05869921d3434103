package freeze

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// options make what the traced give birth to traced from its first instruction
// on.
const options = unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK

// holdAfter is how long a thread may take to stop before it is looked at: one
// that waits in the kernel, where it cannot be interrupted, counts as stopped,
// as it stops before its next instruction.
const holdAfter = 10 * time.Millisecond

// foreignWait is how long a thread that another process traces may take.
const foreignWait = 2 * time.Second

// task is one traced thread.
type task struct {
	stopped bool
	held    bool // waits in the kernel, and stops when it comes out
	signal  int  // what was about to be delivered to it when it stopped
}

// tracer is the state of the tracing thread. Only that thread uses it.
type tracer struct {
	pid, tid int
	tasks    map[int]*task
	frozen   bool
}

// pending is how many threads have not stopped.
func (t *tracer) pending() int {
	n := 0
	for _, k := range t.tasks {
		if !k.stopped {
			n++
		}
	}
	return n
}

// freeze stops everything: it looks for threads, stops those it finds, and
// begins anew until it finds none that it does not know.
func (t *tracer) freeze(ctx context.Context) error {
	err := t.stopAll(ctx)
	if err != nil {
		t.thaw(ctx)
		return err
	}
	t.frozen = true
	return nil
}

func (t *tracer) stopAll(ctx context.Context) error {
	for tid, k := range t.tasks { // what a thaw before this left
		if !k.stopped {
			ptrace(unix.PTRACE_INTERRUPT, tid, 0)
		}
	}
	nudged := map[int]bool{} // threads that others trace
	for quiet := 0; quiet < 2; {
		fresh, foreign, err := t.scan()
		if err != nil {
			return err
		}
		if err := t.settle(ctx); err != nil {
			return err
		}
		if fresh > 0 {
			quiet = 0
			continue
		}
		// Those who trace others are stopped by now, so these do not go on
		// behind our back.
		for _, tid := range foreign {
			fresh, err := t.stopForeign(ctx, tid, nudged)
			if err != nil {
				return err
			}
			if fresh {
				quiet = -1
			}
		}
		if !t.verify() {
			quiet = -1
		}
		quiet++
	}
	return nil
}

// verify tells whether all that are said to be stopped are. A thread that
// executes a program takes the number of its process's first one.
func (t *tracer) verify() bool {
	ok := true
	for tid, k := range t.tasks {
		var info siginfo
		if k.stopped && ptraceInto(unix.PTRACE_GETSIGINFO, tid, unsafe.Pointer(&info)) == unix.ESRCH {
			if dead(tid) {
				delete(t.tasks, tid)
				continue
			}
			k.stopped, ok = false, false
		}
	}
	return ok
}

// scan seizes every thread that it does not know: fresh is how many these were.
// foreign are those that others trace.
func (t *tracer) scan() (fresh int, foreign []int, err error) {
	pids, err := numbers("/proc")
	if err != nil {
		return 0, nil, err
	}
	for _, pid := range pids {
		if pid == t.pid {
			continue
		}
		tids, err := numbers("/proc/" + strconv.Itoa(pid) + "/task")
		if err != nil {
			continue // it has ended
		}
		for _, tid := range tids {
			if t.tasks[tid] != nil {
				continue
			}
			isForeign, isFresh, err := t.seize(tid)
			switch {
			case err != nil:
				return fresh, foreign, err
			case isForeign:
				foreign = append(foreign, tid)
			case isFresh:
				fresh++
			}
		}
	}
	return fresh, foreign, nil
}

func (t *tracer) seize(tid int) (foreign, fresh bool, err error) {
	e := ptrace(unix.PTRACE_SEIZE, tid, options)
	switch {
	case e == 0:
		t.tasks[tid] = &task{}
		ptrace(unix.PTRACE_INTERRUPT, tid, 0) // fails only for one that has ended
		return false, true, nil
	case e == unix.ESRCH:
		return false, false, nil
	}
	s, err := readStatus(tid)
	switch {
	case err != nil || s.dead():
		return false, false, nil
	case s.tracer == t.tid || s.tracer == t.pid: // born of one that is traced
		t.tasks[tid] = &task{}
		return false, true, nil
	case s.tracer != 0:
		return true, false, nil
	case kernelThread(tid):
		return false, false, nil
	}
	if e == unix.EPERM || e == unix.EACCES || e == unix.ENOSYS {
		return false, false, fmt.Errorf("process %d: %w", tid, ErrNotPermitted)
	}
	return false, false, fmt.Errorf("process %d: %w", tid, e)
}

// settle waits until all are stopped, or held in the kernel.
func (t *tracer) settle(ctx context.Context) error {
	began := time.Now()
	for wait := 20 * time.Microsecond; ; wait = min(2*wait, time.Millisecond) {
		t.poll()
		left, look := 0, time.Since(began) > holdAfter
		var last int
		for tid, k := range t.tasks {
			if k.stopped || k.held {
				continue
			}
			if look {
				s, err := readStatus(tid)
				if err != nil || s.dead() {
					delete(t.tasks, tid) // the reaper takes what is left of it
					continue
				}
				if s.state == 'D' {
					k.held = true
					continue
				}
			}
			left, last = left+1, tid
		}
		if left == 0 {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("process %d did not stop: %w", last, ctx.Err())
		}
		time.Sleep(wait)
	}
}

// poll takes in what stopped. It asks for each thread by its number, and for
// stops alone: ends are the reaper's.
func (t *tracer) poll() {
	var born []int
	for tid, k := range t.tasks {
		if k.stopped {
			continue
		}
		var info siginfo
		_, _, e := unix.Syscall6(unix.SYS_WAITID, unix.P_PID, uintptr(tid), uintptr(unsafe.Pointer(&info)),
			unix.WSTOPPED|unix.WNOHANG|unix.WALL|unix.WNOTHREAD, 0, 0)
		if e == unix.ECHILD {
			if dead(tid) {
				delete(t.tasks, tid)
			}
			continue
		}
		if e != 0 || info.pid() != tid {
			continue
		}
		if e := ptraceInto(unix.PTRACE_GETSIGINFO, tid, unsafe.Pointer(&info)); e != 0 {
			continue // it was killed
		}
		k.stopped, k.held, k.signal = true, false, 0
		switch event := int(info.code) >> 8; {
		case info.code > 0xff && (event == unix.PTRACE_EVENT_CLONE || event == unix.PTRACE_EVENT_FORK || event == unix.PTRACE_EVENT_VFORK):
			var child uintptr
			if ptraceInto(unix.PTRACE_GETEVENTMSG, tid, unsafe.Pointer(&child)) == 0 {
				born = append(born, int(child))
			}
		case info.code > 0xff && event == unix.PTRACE_EVENT_STOP:
			restart(tid)
		default: // about to get a signal: it gets it when it goes on
			k.signal = int(info.signo)
			restart(tid)
		}
	}
	for _, tid := range born {
		if t.tasks[tid] == nil {
			t.tasks[tid] = &task{}
		}
	}
}

// stopForeign stops a thread that another process, which is stopped itself,
// traces: any signal, also one that it ignores, makes it stop for its tracer.
// SIGURG is one that debuggers pass on without a word, and that does nothing.
func (t *tracer) stopForeign(ctx context.Context, tid int, nudged map[int]bool) (fresh bool, err error) {
	for began := time.Now(); ; time.Sleep(200 * time.Microsecond) {
		s, err := readStatus(tid)
		if err != nil || s.dead() || s.state == 't' || s.state == 'T' || s.state == 'D' {
			return fresh, nil
		}
		if s.tracer == 0 || s.tracer == t.tid {
			return true, nil // its tracer has let it go: the next scan has it
		}
		if !nudged[tid] {
			nudged[tid], fresh = true, true
			unix.Tgkill(s.tgid, tid, unix.SIGURG)
		}
		if ctx.Err() != nil || time.Since(began) > foreignWait {
			return fresh, fmt.Errorf("process %d %w", tid, ErrForeign)
		}
	}
}

// thaw lets all go on that are stopped. Those that are held in the kernel
// follow when they come out: see trace.
func (t *tracer) thaw(context.Context) error {
	t.frozen = false
	t.poll()
	t.release()
	return nil
}

func (t *tracer) release() {
	for tid, k := range t.tasks {
		if !k.stopped {
			if dead(tid) {
				delete(t.tasks, tid)
			}
			continue
		}
		ptrace(unix.PTRACE_DETACH, tid, uintptr(k.signal)) // fails only for one that was killed
		delete(t.tasks, tid)
	}
}

// siginfo is the part of siginfo_t that is used, on 64-bit Linux.
type siginfo struct {
	signo, errno, code int32
	_                  int32
	first              int32
	_                  [108]byte
}

func (s *siginfo) pid() int { return int(s.first) }

func ptrace(request, tid int, data uintptr) unix.Errno {
	_, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), 0, data, 0, 0)
	return e
}

// ptraceInto is a request whose answer goes to p.
func ptraceInto(request, tid int, p unsafe.Pointer) unix.Errno {
	_, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), 0, uintptr(p), 0, 0)
	return e
}

// numbers are the names in a directory of /proc that are numbers.
func numbers(dir string) ([]int, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil && len(names) == 0 {
		return nil, err
	}
	out := make([]int, 0, len(names))
	for _, n := range names {
		if n[0] < '0' || n[0] > '9' {
			continue
		}
		if i, err := strconv.Atoi(n); err == nil {
			out = append(out, i)
		}
	}
	return out, nil
}

// status is what /proc/TID/status tells.
type status struct {
	state        byte
	tgid, tracer int
}

func (s status) dead() bool { return s.state == 'Z' || s.state == 'X' || s.state == 'x' }

func readStatus(tid int) (status, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/status")
	if err != nil {
		return status{}, err
	}
	var s status
	for line := range bytes.Lines(data) {
		key, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch string(key) {
		case "State":
			if len(value) > 0 {
				s.state = value[0]
			}
		case "Tgid":
			s.tgid, _ = strconv.Atoi(string(value))
		case "TracerPid":
			s.tracer, _ = strconv.Atoi(string(value))
			if s.state != 0 {
				return s, nil
			}
		}
	}
	if s.state == 0 {
		return s, errors.New("no state")
	}
	return s, nil
}

// dead tells whether a thread has ended, reaped or not.
func dead(tid int) bool {
	s, err := readStatus(tid)
	return err != nil || s.dead()
}

// kernelThread tells whether a thread is the kernel's own, as a virtual
// machine's /proc shows them: PF_KTHREAD of linux/sched.h.
func kernelThread(tid int) bool {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(tid) + "/stat")
	if err != nil {
		return false
	}
	// The name, in parentheses, may hold anything.
	f := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(f) < 7 {
		return false
	}
	flags, _ := strconv.ParseUint(string(f[6]), 10, 64)
	return flags&0x00200000 != 0
}
