package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/prove/forkproof"
	"github.com/warrenhq/warren/internal/sandbox"
)

// lines is the output of a command that runs, as far as it has come.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) write(p []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf.Write(p)
	return nil
}

func (l *lines) all() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSpace(l.buf.String()), "\n")
}

// with are the lines that begin with prefix.
func (l *lines) with(prefix string) (out []string) {
	for _, s := range l.all() {
		if strings.HasPrefix(s, prefix) {
			out = append(out, s)
		}
	}
	return out
}

// background starts a command and waits until it has told want lines "up".
func background(t *testing.T, c *agentclient.Client, want int, cmd agentclient.Command) *lines {
	t.Helper()
	l := &lines{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	cmd.User = "root"
	go func() {
		defer close(done)
		c.Exec(ctx, cmd, agentclient.Output{Stdout: l.write, Stderr: l.write})
	}()
	t.Cleanup(func() { cancel(); <-done })
	eventually(t, 20*time.Second, func() error {
		if n := len(l.with("up")); n < want {
			return fmt.Errorf("%q: %d are up of %d: %q", cmd.Args, n, want, l.all())
		}
		return nil
	})
	return l
}

// testLimit is how long anything may take on a loaded machine.
const testLimit = 30 * time.Second

func eventually(t *testing.T, limit time.Duration, f func() error) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

// part is the test binary in one of its parts. It is at the same path inside.
func part(name string, n int) agentclient.Command {
	return agentclient.Command{Path: os.Args[0], Args: []string{strconv.Itoa(n)}, Env: map[string]string{helperEnv: name}}
}

func sh(t *testing.T, c *agentclient.Client, script string) string {
	t.Helper()
	r, err := c.Run(t.Context(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", script}, User: "root"})
	if err != nil || r.ExitCode != 0 {
		t.Fatalf("%s: %+v %v", script, r, err)
	}
	return strings.TrimSpace(string(r.Stdout))
}

// still checks that each of the names did not run from begin to end.
func still(t *testing.T, l *lines, names []string, begin, end time.Time) {
	t.Helper()
	eventually(t, 20*time.Second, func() error {
	next:
		for _, name := range names {
			for _, s := range l.with("gap " + name + " ") {
				var from, to int64
				fmt.Sscanf(strings.TrimPrefix(s, "gap "+name), "%d %d", &from, &to)
				if from <= begin.UnixNano() && to >= end.UnixNano() {
					continue next
				}
			}
			return fmt.Errorf("%s ran between %d and %d: %q", name, begin.UnixNano(), end.UnixNano(), l.with("gap "+name))
		}
		return nil
	})
}

func names(prefix string, n int) (out []string) {
	for i := range n {
		out = append(out, prefix+strconv.Itoa(i))
	}
	return out
}

// testFreeze is what freezing must do, on every kernel.
func testFreeze(t *testing.T, c *agentclient.Client) {
	frozen := func(d time.Duration, between func()) (time.Time, time.Time) {
		t.Helper()
		if err := c.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if between != nil {
			between()
		}
		time.Sleep(d)
		end := time.Now()
		if err := c.Thaw(t.Context()); err != nil {
			t.Fatal(err)
		}
		return begin, end
	}

	t.Run("calls", func(t *testing.T) {
		frozen(0, func() {
			if err := c.Freeze(t.Context()); err != nil {
				t.Error("again:", err)
			}
			if err := c.WaitReady(t.Context()); err != nil {
				t.Error("health:", err)
			}
			if _, err := c.Run(t.Context(), agentclient.Command{Path: "true", User: "root"}); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
				t.Errorf("a command: %v", err)
			}
			if err := c.WriteFile(t.Context(), "/tmp/x", "root", strings.NewReader("x"), 0); sandbox.CodeOf(err) != sandbox.CodeUnavailable {
				t.Errorf("a file: %v", err)
			}
		})
		if err := c.Thaw(t.Context()); err != nil {
			t.Error("again:", err)
		}
		if got := sh(t, c, "echo on"); got != "on" {
			t.Error(got)
		}
	})

	t.Run("threads and births", func(t *testing.T) {
		spin := background(t, c, 8, part("spin", 8))
		fork := background(t, c, 4, part("fork", 4))
		for range 5 {
			begin, end := frozen(400*time.Millisecond, nil)
			still(t, spin, names("spin", 8), begin, end)
			still(t, fork, names("fork", 4), begin, end)
		}
		for range 30 { // quickly, to meet every state
			frozen(0, nil)
		}
		if f := fork.with("FAIL"); f != nil {
			t.Error(f)
		}
	})

	t.Run("parents see nothing", func(t *testing.T) {
		l := background(t, c, 1, part("wait", 1))
		var sleeper, stopped int
		fmt.Sscanf(l.with("up")[0], "up wait %d %d", &sleeper, &stopped)
		for range 5 {
			frozen(50*time.Millisecond, nil)
		}
		state := func(pid int) string {
			return sh(t, c, fmt.Sprintf("sed -n 's/^State:[ \t]*\\(.\\).*/\\1/p' /proc/%d/status", pid))
		}
		for pid, want := range map[int]string{stopped: "T", sleeper: "S"} { // each returns to it by itself, and runs meanwhile
			eventually(t, 5*time.Second, func() error {
				if s := state(pid); s != want {
					return fmt.Errorf("process %d is %s, want %s", pid, s, want)
				}
				return nil
			})
		}
		if saw := l.with("saw"); saw != nil {
			t.Errorf("the parent saw %q", saw)
		}
		sh(t, c, fmt.Sprintf("kill -CONT %d", stopped))
		eventually(t, 5*time.Second, func() error {
			if saw := l.with(fmt.Sprintf("saw %d 0xffff", stopped)); len(saw) != 1 {
				return fmt.Errorf("after SIGCONT: %q", l.all())
			}
			return nil
		})
		sh(t, c, fmt.Sprintf("kill %d %d", sleeper, stopped))
		eventually(t, 5*time.Second, func() error {
			if saw := l.with("saw"); len(saw) < 3 {
				return fmt.Errorf("after the kills: %q", saw)
			}
			return nil
		})
	})

	t.Run("signals are not lost", func(t *testing.T) {
		needs(t, c, "python3")
		const script = `
import os, signal, sys, time, threading
r, w = os.pipe2(os.O_NONBLOCK)
os.set_blocking(r, True)
signal.set_wakeup_fd(w, warn_on_full_buffer=False)
signal.signal(signal.SIGRTMIN, lambda *a: None)
pid = os.fork()
if pid == 0:
    sent = 0
    while sent < 3000:
        try:
            os.kill(os.getppid(), signal.SIGRTMIN)
            sent += 1
        except BlockingIOError: # the queue is full: gVisor's holds 32
            pass
        time.sleep(0.0003)
    os._exit(7)
print("up", flush=True)
n = 0
while n < 3000:
    n += len(os.read(r, 4096))
print("got", n, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
`
		l := background(t, c, 1, agentclient.Command{Path: "python3", Args: []string{"-c", script}})
		for range 25 {
			frozen(time.Millisecond, nil)
		}
		eventually(t, 30*time.Second, func() error {
			if got := l.with("got"); len(got) != 1 || got[0] != "got 3000 7" {
				return fmt.Errorf("%q", l.all())
			}
			return nil
		})
	})

	t.Run("calls are not interrupted", func(t *testing.T) {
		needs(t, c, "python3")
		const script = `
import ctypes, os, select, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
ep = select.epoll()
buf = ctypes.create_string_buffer(64)
print("up", flush=True)
for i in range(3):
    t = time.monotonic()
    n = libc.epoll_wait(ep.fileno(), buf, 1, 700)
    print("epoll", n, ctypes.get_errno() if n < 0 else 0, flush=True)
ss = (ctypes.c_ulong * 16)()
libc.sigemptyset(ss); libc.sigaddset(ss, int(signal.SIGUSR2))
class ts(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]
n = libc.sigtimedwait(ss, None, ctypes.byref(ts(0, 500000000)))
print("sigtimedwait", n, ctypes.get_errno(), flush=True)
n = libc.nanosleep(ctypes.byref(ts(0, 300000000)), None)
print("nanosleep", n, flush=True)
`
		l := background(t, c, 1, agentclient.Command{Path: "python3", Args: []string{"-c", script}})
		for range 40 {
			frozen(5*time.Millisecond, nil)
			time.Sleep(30 * time.Millisecond)
			if len(l.with("nanosleep")) > 0 {
				break
			}
		}
		eventually(t, 20*time.Second, func() error {
			want := "epoll 0 0,epoll 0 0,epoll 0 0,sigtimedwait -1 11,nanosleep 0"
			if got := strings.Join(l.all()[1:], ","); got != want {
				return fmt.Errorf("%s, want %s", got, want)
			}
			return nil
		})
	})

	t.Run("every call goes on waiting", func(t *testing.T) {
		dir := startCalls(t, c)
		for range 5 {
			frozen(20*time.Millisecond, nil)
			time.Sleep(20 * time.Millisecond)
		}
		checkCalls(t, c, dir)
	})

	t.Run("traced by others", func(t *testing.T) {
		needs(t, c, "strace")
		cmd := part("spin", 2)
		cmd.Args = append([]string{"-f", "-o", "/dev/null", cmd.Path}, cmd.Args...)
		cmd.Path = "strace"
		spin := background(t, c, 2, cmd)
		begin, end := frozen(400*time.Millisecond, nil)
		still(t, spin, names("spin", 2), begin, end)
		begin, end = frozen(400*time.Millisecond, nil)
		still(t, spin, names("spin", 2), begin, end)
	})

	t.Run("time", func(t *testing.T) {
		for _, n := range []int{1, 10, 200} {
			background(t, c, 1, agentclient.Command{Path: "/bin/sh", Args: []string{"-c", fmt.Sprintf("i=0; while [ $i -lt %d ]; do sleep 1000 & i=$((i+1)); done; echo up; wait", n-1)}})
			var freeze, thaw time.Duration
			const rounds = 5
			for range rounds {
				began := time.Now()
				if err := c.Freeze(t.Context()); err != nil {
					t.Fatal(err)
				}
				freeze += time.Since(began)
				began = time.Now()
				if err := c.Thaw(t.Context()); err != nil {
					t.Fatal(err)
				}
				thaw += time.Since(began)
			}
			t.Logf("%d processes more: freeze %s, thaw %s", n, freeze/rounds, thaw/rounds)
			sh(t, c, "pkill -x sleep || killall sleep || true")
		}
	})
}

// startCalls starts a process for each system call that waits, and tells where.
func startCalls(t *testing.T, c *agentclient.Client) string {
	t.Helper()
	needs(t, c, "python3")
	dir := sh(t, c, "mktemp -d")
	background(t, c, 1, agentclient.Command{Path: "python3", Args: []string{"-c", string(forkproof.CallsPython), dir}})
	return dir
}

// checkCalls gives each call what it waits for, and wants it to have waited
// until then.
func checkCalls(t *testing.T, c *agentclient.Client, dir string) {
	t.Helper()
	sh(t, c, "touch "+dir+"/release")
	var result string
	eventually(t, 2*testLimit, func() error {
		if result = sh(t, c, "cat "+dir+"/result 2>/dev/null || true"); result == "" {
			return errors.New("the calls do not come to an end")
		}
		return nil
	})
	seen, err := forkproof.JudgeCalls(result)
	if err != nil {
		t.Error(err)
	}
	t.Log(seen)
}

// needs skips where the sandbox has no such program.
func needs(t *testing.T, c *agentclient.Client, program string) {
	t.Helper()
	r, err := c.Run(t.Context(), agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "command -v " + program}, User: "root"})
	if err != nil {
		t.Fatal(err)
	}
	if r.ExitCode != 0 {
		t.Skipf("needs %s: install it", program)
	}
}

func TestFreeze(t *testing.T) {
	_, c := startPID1(t)
	testFreeze(t, c)
	// The reaper still reaps.
	eventually(t, 10*time.Second, func() error {
		if out := sh(t, c, "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true"); out != "0" {
			return fmt.Errorf("%s zombies", out)
		}
		return nil
	})
}
