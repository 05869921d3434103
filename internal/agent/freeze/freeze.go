// Package freeze stops every process of a sandbox but the agent itself, so that
// none of them runs an instruction until it is let go, and neither they nor
// their parents can see it.
//
// It uses ptrace(2): every thread is seized (PTRACE_SEIZE) and interrupted
// (PTRACE_INTERRUPT). Unlike SIGSTOP that tells no parent anything and changes
// no job's state, and a thread that is stopped for job control stays so. New
// threads and processes of those that are seized are born stopped. The relation
// of tracer and traced lives in the kernel, and gVisor's checkpoint saves it: a
// restored sandbox begins with its processes stopped. docs/decisions/0002-freeze.md has
// the measurements and what was decided against.
package freeze

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ErrForeign is that a process is traced by another, gdb for example, and could
// not be stopped.
var ErrForeign = errors.New("is traced by another process and does not stop")

// ErrNotPermitted is that the agent may not trace a process.
var ErrNotPermitted = errors.New("the agent may not stop it: it needs CAP_SYS_PTRACE, or a kernel and seccomp filter that allow ptrace")

// timeout bounds Freeze where its context does not.
const timeout = 10 * time.Second

// Freezer freezes and thaws. The zero value is ready; it is for PID 1 alone,
// as it stops everything that /proc shows.
type Freezer struct {
	mu     sync.Mutex // one call at a time
	calls  chan call  // to the thread that traces; nil before the first Freeze
	done   chan struct{}
	frozen atomic.Bool
}

type call struct {
	ctx   context.Context
	do    func(*tracer, context.Context) error
	reply chan error
}

// Frozen tells whether the processes are stopped.
func (f *Freezer) Frozen() bool { return f.frozen.Load() }

// Freeze stops every process. It is idempotent. On an error all of them go on.
func (f *Freezer) Freeze(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen.Load() {
		return nil
	}
	if os.Getpid() != 1 {
		return errors.New("freeze: this agent is not PID 1, and would stop processes that are not its sandbox's")
	}
	if f.calls == nil {
		f.calls, f.done = make(chan call), make(chan struct{})
		go trace(f.calls, f.done)
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := f.call(ctx, (*tracer).freeze); err != nil {
		return fmt.Errorf("freeze: %w", err)
	}
	f.frozen.Store(true)
	return nil
}

// Thaw lets the processes go on. It is idempotent.
func (f *Freezer) Thaw() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.frozen.Load() {
		f.call(context.Background(), (*tracer).thaw)
		f.frozen.Store(false)
	}
}

// SignalAll sends a signal to every process but the agent. One that is frozen
// gets it when it goes on, before anything else.
func (f *Freezer) SignalAll(sig unix.Signal) error {
	if os.Getpid() != 1 {
		return errors.New("signal all: this agent is not PID 1")
	}
	if err := unix.Kill(-1, sig); err != nil && err != unix.ESRCH {
		return fmt.Errorf("signal all processes: %w", err)
	}
	return nil
}

// Close thaws and ends the thread that traces.
func (f *Freezer) Close() {
	f.Thaw()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.calls != nil {
		close(f.calls)
		<-f.done
		f.calls = nil
	}
}

func (f *Freezer) call(ctx context.Context, do func(*tracer, context.Context) error) error {
	c := call{ctx: ctx, do: do, reply: make(chan error, 1)}
	f.calls <- c
	return <-c.reply
}

// trace runs the calls in the one OS thread that traces, as the kernel ties the
// traced to the thread and not to its process.
func trace(calls <-chan call, done chan<- struct{}) {
	defer close(done)
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	t := &tracer{pid: os.Getpid(), tid: unix.Gettid(), tasks: map[int]*task{}}
	idle := time.NewTimer(time.Hour)
	defer idle.Stop()
	for since := time.Now(); ; {
		// Those that could not stop yet, since they wait in the kernel (the parent
		// of a vfork does), do so as soon as they come out of it. They are
		// looked after then: let go after a thaw, noted while frozen.
		if t.pending() > 0 {
			idle.Reset(min(20*time.Millisecond, max(500*time.Microsecond, time.Since(since)/16)))
		}
		select {
		case c, ok := <-calls:
			if !ok {
				return
			}
			c.reply <- c.do(t, c.ctx)
			since = time.Now()
		case <-idle.C:
			t.poll()
			if !t.frozen {
				t.release()
			}
		}
	}
}
