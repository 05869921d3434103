package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The fault points of a sandbox's start.
var (
	pointRan     = fault.Register("oci.create.ran")
	pointStarted = fault.Register("oci.create.recorded")
	pointReady   = fault.Register("oci.create.ready")
)

// A Start is all that Engine.Start needs beside the sandbox's Spec. The bundle
// is written already.
type Start struct {
	Spec    sandbox.Spec
	CPUs    []int
	Stage   *Stage   // where the bundle's root and mounts are; Start closes it
	Argv    []string // the OCI runtime and its arguments, without those of run
	Env     []string
	NoUnify bool // hide the v2 tree of a hybrid host, which crun refuses
	// Before runs in the private mount namespace right before the runtime.
	Before func() error
	// After runs once the sandbox runs and before its agent is waited for.
	After func(g *Cgroup, first *Process) error
}

// Start runs the OCI runtime once, detached, and returns when the agent
// answers. On error the caller calls Clean.
func (e *Engine) Start(ctx context.Context, s Start) (*Instance, error) {
	i, err := e.launch(ctx, s, "run", "--detach")
	if err != nil {
		return nil, err
	}
	if err := i.ready(ctx, s.Argv[0]); err != nil {
		return nil, err
	}
	return i, nil
}

// Prepare makes a sandbox by the OCI runtime's create command, in which
// nothing runs yet. Adopt does not find one; Complete makes it a sandbox like
// others. On error the caller calls Clean.
func (e *Engine) Prepare(ctx context.Context, s Start) (*Instance, error) {
	return e.launch(ctx, s, "create")
}

// Complete lets a sandbox of Prepare run by f, with the limits of its CPUs
// from then on, and returns when its agent answers. On error the sandbox is
// not watched any more, and the caller calls Clean.
func (i *Instance) Complete(ctx context.Context, binary string, f func(context.Context) error) error {
	e, id := i.eng, i.spec.ID
	err := i.Boost()
	if err == nil {
		err = f(ctx)
	}
	if err == nil {
		err = i.Unboost()
	}
	if err != nil {
		i.stop()
		return e.startError(ctx, i.spec, binary, err)
	}
	if err := i.ready(ctx, binary); err != nil {
		return err
	}
	if err := e.started(id, i.proc, i.cpus, false); err != nil {
		i.stop()
		return sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	return nil
}

// launch runs the OCI runtime's command verb on a new bundle, which makes the
// sandbox's first process.
func (e *Engine) launch(ctx context.Context, s Start, verb ...string) (*Instance, error) {
	defer s.Stage.Close()
	rec, err := console.Record(s.Spec.Dir)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	keep := false
	defer func() {
		if !keep {
			rec.Close()
		}
	}()
	tty, err := rec.Writer()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	defer tty.Close()

	bundle := e.BundleDir(s.Spec.ID)
	pidFile := filepath.Join(bundle, "pid")
	argv := append(s.Argv[:len(s.Argv):len(s.Argv)], "--log="+e.logFile(s.Spec.ID))
	argv = append(argv, verb...)
	argv = append(argv, e.bundleArg(s.Spec.ID), "--pid-file="+pidFile, string(s.Spec.ID))
	err = inPrivateMounts(func() error {
		if s.NoUnify && host.Cgroups() == host.CgroupHybrid {
			if err := unix.Unmount("/sys/fs/cgroup/unified", unix.MNT_DETACH); err != nil {
				return fmt.Errorf("hide the cgroup v2 tree: %w", err)
			}
		}
		if err := s.Stage.mount(); err != nil {
			return err
		}
		if s.Before != nil {
			if err := s.Before(); err != nil {
				return err
			}
		}
		return runCLI(ctx, argv, s.Env, tty)
	})
	pointRan.Hit()
	if err != nil {
		rec.Close()
		return nil, e.startError(ctx, s.Spec, argv[0], err)
	}

	pid, err := readPID(pidFile)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "start sandbox %s: %w", s.Spec.ID, err)
	}
	p, err := openProcess(pid, 0)
	if err != nil {
		rec.Close()
		return nil, e.startError(ctx, s.Spec, argv[0], fmt.Errorf("the first process, the agent, ended at once: %w", err))
	}
	if err := e.started(s.Spec.ID, p, s.CPUs, verb[0] == "create"); err != nil {
		p.Close()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	pointStarted.Hit()
	g, err := e.Cgroup(s.Spec.ID)
	if err == nil && s.After != nil {
		err = s.After(g, p)
	}
	if err != nil {
		p.Close()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "start sandbox %s: %w", s.Spec.ID, err)
	}
	keep = true
	return newInstance(e, s.Spec, p, g, rec, s.CPUs), nil
}

// ready waits until the agent answers; else it stops watching the sandbox.
func (i *Instance) ready(ctx context.Context, binary string) error {
	if err := i.waitReady(ctx); err != nil {
		i.stop()
		return i.eng.startError(ctx, i.spec, binary, err)
	}
	pointReady.Hit()
	return nil
}

// A Command is one command of an OCI runtime about a sandbox that there is.
type Command struct {
	ID   sandbox.ID
	Argv []string // the OCI runtime and its arguments, without the sandbox's ID
	Args []string // what follows the ID
	Env  []string
	Out  *os.File // takes its standard output and error; nil drops them
}

// Run runs c. The error has the last words of the OCI runtime's log.
func (e *Engine) Run(ctx context.Context, c Command) error {
	log := e.logFile(c.ID)
	if err := os.Remove(log); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	argv := append([]string{c.Argv[0], "--log=" + log}, c.Argv[1:]...)
	done := make(chan error, 1)
	// The command ends with the thread that starts it (PR_SET_PDEATHSIG): one
	// that nobody else can end meanwhile.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		done <- runCLI(ctx, append(append(argv, string(c.ID)), c.Args...), c.Env, c.Out)
	}()
	return <-done
}

// Said is what the OCI runtime's last command about a sandbox had to say.
func (e *Engine) Said(id sandbox.ID) string { return lastLines(e.logFile(id)) }

func (e *Engine) logFile(id sandbox.ID) string { return filepath.Join(e.BundleDir(id), "log") }

// runCLI runs an OCI runtime's command on the calling thread, whose namespaces
// it takes. It ends with the daemon, so that a command in flight cannot make
// things behind the back of the next daemon's Clean.
func runCLI(ctx context.Context, argv, env []string, out *os.File) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = env
	cmd.Dir = "/"
	if out != nil {
		cmd.Stdout, cmd.Stderr = out, out
	}
	cmd.WaitDelay = time.Second
	// Its children with it, and with no gap for one to be born in: they are a
	// process group, since Setsid makes it the leader of one.
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setsid: true}
	return cmd.Run()
}

func readPID(path string) (int, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%s has no pid: %q", path, data)
	}
	return pid, nil
}

// startError tells why a sandbox did not come to run, with the last words of
// the OCI runtime and of the console.
func (e *Engine) startError(ctx context.Context, spec sandbox.Spec, binary string, err error) error {
	if ctx.Err() != nil {
		code := sandbox.CodeCanceled
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			code = sandbox.CodeTimeout
		}
		return sandbox.Errorf(code, "start sandbox %s: %w", spec.ID, ctx.Err())
	}
	code := sandbox.CodeInternal
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled() {
		code = sandbox.CodeUnavailable // somebody killed it: it is no fault of the sandbox's
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		code = sandbox.CodeDiskFull
	}
	var said []string
	if log := e.Said(spec.ID); log != "" {
		said = append(said, filepath.Base(binary)+" said: "+log)
	}
	if tail := printable(console.Tail(spec.Dir, 2000)); tail != "" {
		said = append(said, "console: "+tail)
	}
	if strings.Contains(strings.Join(said, " "), "no space left on device") {
		code = sandbox.CodeDiskFull
	}
	out := sandbox.Errorf(code, "start sandbox %s: %w", spec.ID, err)
	if len(said) > 0 {
		out.Message += "; " + strings.Join(said, "; ")
	}
	return out
}

// lastLines gives the end of a log file in one line.
func lastLines(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	if len(data) > 1500 {
		data = data[len(data)-1500:]
	}
	return printable(data)
}

// printable makes text from a sandbox safe to stand in an error.
func printable(data []byte) string {
	data = bytes.ToValidUTF8(bytes.TrimSpace(data), []byte("?"))
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case r < ' ' || r == 0x7f:
			return -1
		}
		return r
	}, string(data))
}
