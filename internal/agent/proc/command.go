package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/reaper"
	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/proto/process"
)

// How a command's end is told. A command has ended when its process did and
// its output was read. All that the process wrote itself is in the pipe by
// then and is always read; but its own children may hold the pipe open, like a
// server that it left in the background. They get exitGrace to write more or to
// end; after that what stands in the pipe is read, and the end told. What they
// write later is read and dropped, so that they do not die of it.
const (
	exitGrace  = 250 * time.Millisecond
	drainPause = 20 * time.Millisecond // an output silent for so long after the grace is complete
	drainMax   = 1 << 20               // bytes read after the grace, where the pipe tells no capacity
)

// command is one running command.
type command struct {
	pid    uint32
	config *process.ProcessConfig
	tag    *string
	hub    *hub
	child  *reaper.Child
	life   context.Context // the manager's
	ended  chan struct{}   // the end is told

	input chan struct{} // holds one token: the right to write, or to close, stdin
	stdin *os.File      // write end of the pipe, or the terminal; nil is none
	isPTY bool
	pty   *os.File
}

// spec is a StartRequest that was checked.
type spec struct {
	path  string
	argv  []string
	env   []string
	dir   string
	cred  *syscall.Credential
	uid   int
	gid   int
	pty   *process.PTY_Size
	stdin bool
}

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// check makes a spec of a request. Its errors are Connect's.
func check(s *session.State, u users.User, req *process.StartRequest) (*spec, error) {
	cfg := req.GetProcess()
	if cfg.GetCmd() == "" {
		return nil, invalid("the request names no command")
	}
	for _, a := range append([]string{cfg.GetCmd()}, cfg.GetArgs()...) {
		if strings.ContainsRune(a, 0) {
			return nil, invalid("an argument has a NUL byte")
		}
	}
	if err := session.CheckEnv(cfg.GetEnvs()); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	dir, err := workdir(s, u, cfg.GetCwd())
	if err != nil {
		return nil, err
	}
	sp := &spec{
		argv:  append([]string{cfg.GetCmd()}, cfg.GetArgs()...),
		dir:   dir,
		uid:   u.UID,
		gid:   u.GID,
		stdin: req.Stdin == nil || req.GetStdin(),
	}
	envs := cfg.GetEnvs()
	if req.Pty != nil {
		sp.pty = req.Pty.GetSize()
		if sp.pty == nil {
			sp.pty = &process.PTY_Size{}
		}
		if _, ok := envs["TERM"]; !ok {
			if _, ok := s.Env()["TERM"]; !ok {
				withTerm := map[string]string{"TERM": "xterm-256color"}
				for k, v := range envs {
					withTerm[k] = v
				}
				envs = withTerm
			}
		}
	}
	var pathEnv string
	sp.env, pathEnv = s.Environ(u, envs)
	if sp.path, err = findProgram(cfg.GetCmd(), pathEnv, dir); err != nil {
		return nil, err
	}
	switch self := os.Getuid(); {
	case self == 0:
		groups := []uint32{uint32(u.GID)}
		for _, g := range u.Groups {
			groups = append(groups, uint32(g))
		}
		sp.cred = &syscall.Credential{Uid: uint32(u.UID), Gid: uint32(u.GID), Groups: groups}
	case self != u.UID:
		return nil, connect.NewError(connect.CodePermissionDenied, fmt.Errorf("cannot run a command as user %q: the agent does not run as root", u.Name))
	}
	return sp, nil
}

// workdir resolves a command's directory. One that was asked for must be
// there; of the defaults, the first that is there is taken.
func workdir(s *session.State, u users.User, cwd string) (string, error) {
	if cwd != "" {
		dir, err := users.Resolve(cwd, u)
		if err != nil {
			return "", connect.NewError(connect.CodeInvalidArgument, err)
		}
		st, err := os.Stat(dir)
		switch {
		case err != nil:
			return "", invalid("cwd '%s' does not exist", dir)
		case !st.IsDir():
			return "", invalid("cwd '%s' is not a directory", dir)
		}
		return dir, nil
	}
	for _, d := range []string{s.Workdir(), u.Home} {
		if d == "" {
			continue
		}
		dir, err := users.Resolve(d, u)
		if err != nil {
			continue
		}
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			return dir, nil
		}
	}
	return "/", nil
}

// findProgram finds cmd as execvp would, but from dir and with the command's
// own PATH.
func findProgram(cmd, pathEnv, dir string) (string, error) {
	if strings.Contains(cmd, "/") {
		if !filepath.IsAbs(cmd) {
			cmd = filepath.Join(dir, cmd)
		}
		return cmd, nil // the exec tells what is wrong with it
	}
	for _, d := range filepath.SplitList(pathEnv) {
		if d == "" {
			d = "."
		}
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		p := filepath.Join(d, cmd)
		if st, err := os.Stat(p); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return p, nil
		}
	}
	return "", invalid("%q: executable file not found in $PATH", cmd)
}

// startError tells a failed fork or exec.
func startError(sp *spec, err error) error {
	name := sp.argv[0]
	switch {
	case errors.Is(err, reaper.ErrPaused):
		return connect.NewError(connect.CodeUnavailable, err)
	case errors.Is(err, syscall.EAGAIN), errors.Is(err, syscall.ENOMEM), errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("cannot start %q: %w: the sandbox is at its limit of processes, memory or open files", name, err))
	case errors.Is(err, syscall.ENOENT):
		if _, serr := os.Stat(sp.path); serr == nil {
			return invalid("cannot start %q: %s is there, but the interpreter or loader that it names is not", name, sp.path)
		}
	case errors.Is(err, syscall.EACCES):
		return invalid("cannot start %q in %s: %w: the user may not execute it, or not enter the directory", name, sp.dir, err)
	case errors.Is(err, syscall.E2BIG):
		return invalid("cannot start %q: its arguments and environment are too long: %w", name, err)
	}
	return invalid("cannot start %q: %w", name, err)
}

// start runs sp. The command's output goes to h; life ends what goes on after
// the command's end.
func start(life context.Context, r *reaper.Reaper, sp *spec, h *hub) (*command, error) {
	c := &command{life: life, hub: h, ended: make(chan struct{}), input: make(chan struct{}, 1)}
	c.input <- struct{}{}
	var theirs []int // fds of the child, closed here after the fork
	var ours []*os.File
	defer func() {
		for _, fd := range theirs {
			syscall.Close(fd)
		}
	}()
	fail := func(err error) (*command, error) {
		for _, f := range ours {
			f.Close()
		}
		return nil, startError(sp, err)
	}
	attr := &syscall.ProcAttr{Dir: sp.dir, Env: sp.env, Sys: &syscall.SysProcAttr{Credential: sp.cred}}
	outputs := map[stream]*os.File{}
	if sp.pty != nil {
		master, slave, err := openPTY(sp)
		if err != nil {
			return fail(fmt.Errorf("open a terminal: %w", err))
		}
		theirs, ours = append(theirs, slave), append(ours, master)
		attr.Files = []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
		attr.Sys.Setctty = true // of fd 0, in the new session
		outputs[terminal] = master
		c.isPTY, c.stdin, c.pty = true, master, master
	} else {
		in, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if sp.stdin {
			if err == nil {
				syscall.Close(in)
			}
			in, c.stdin, err = pipe(false)
			if err == nil {
				ours = append(ours, c.stdin)
			}
		}
		if err != nil {
			return fail(err)
		}
		theirs = append(theirs, in)
		attr.Files = []uintptr{uintptr(in)}
		for _, of := range []stream{stdout, stderr} {
			w, f, err := pipe(true)
			if err != nil {
				return fail(err)
			}
			theirs, ours = append(theirs, w), append(ours, f)
			attr.Files = append(attr.Files, uintptr(w))
			outputs[of] = f
		}
	}
	child, err := r.Start(sp.path, sp.argv, attr)
	if err != nil {
		return fail(err)
	}
	c.child, c.pid = child, uint32(child.Pid)
	go c.follow(outputs)
	return c, nil
}

// pipe makes a pipe of which the child gets one end, a blocking fd, and the
// agent the other; read tells that the agent reads.
func pipe(read bool) (theirs int, ours *os.File, err error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return -1, nil, err
	}
	our, their := p[0], p[1]
	if !read {
		our, their = their, our
	}
	if err := syscall.SetNonblock(our, true); err != nil {
		syscall.Close(our)
		syscall.Close(their)
		return -1, nil, err
	}
	return their, os.NewFile(uintptr(our), "pipe"), nil
}

// follow reads the outputs until their end, and then tells the command's.
func (c *command) follow(outputs map[stream]*os.File) {
	var reading sync.WaitGroup
	for of, f := range outputs {
		reading.Add(1)
		go c.pump(of, f, &reading)
	}
	<-c.child.Done()
	grace := time.Now().Add(exitGrace)
	for _, f := range outputs {
		f.SetReadDeadline(grace)
	}
	if c.stdin != nil && !c.isPTY {
		c.stdin.Close()
	}
	reading.Wait()
	c.hub.finish(describe(c.child.Status()))
	close(c.ended)
}

// describe is how the interface tells an exit: the words are those of Go's
// os.ProcessState.
func describe(ws syscall.WaitStatus) ending {
	switch {
	case ws.Exited():
		return ending{code: int32(ws.ExitStatus()), exited: true, status: fmt.Sprintf("exit status %d", ws.ExitStatus())}
	case ws.CoreDump():
		return ending{code: -1, status: "signal: " + ws.Signal().String() + " (core dumped)"}
	case ws.Signaled():
		return ending{code: -1, status: "signal: " + ws.Signal().String()}
	}
	return ending{code: -1, status: fmt.Sprintf("wait status %d", uint32(ws))}
}

// pump reads one output. When the output is complete it says so, and goes on
// to read and drop what others write to it.
func (c *command) pump(of stream, f *os.File, reading *sync.WaitGroup) {
	defer f.Close()
	over := c.read(of, f, -1)
	if !over {
		// The grace is over. The pipe's capacity is the most that the command
		// itself can have left in it.
		limit := drainMax
		if rc, err := f.SyscallConn(); err == nil && of != terminal {
			rc.Control(func(fd uintptr) {
				if n, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil {
					limit = n
				}
			})
		}
		over = c.read(of, f, limit)
	}
	reading.Done()
	if !over {
		f.SetReadDeadline(time.Time{})
		defer context.AfterFunc(c.life, func() { f.Close() })()
		for {
			if _, err := readChunk(f, func([]byte) {}); err != nil {
				return
			}
		}
	}
}

// read publishes what f gives, and tells whether it came to its end. Without a
// limit (-1) it stops at f's deadline; with one, when f is silent for
// drainPause or limit bytes were read.
func (c *command) read(of stream, f *os.File, limit int) (over bool) {
	for limit != 0 {
		if limit > 0 {
			f.SetReadDeadline(time.Now().Add(drainPause))
		}
		n, err := readChunk(f, func(data []byte) { c.hub.publish(of, data) })
		if err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
		if limit > 0 {
			limit = max(0, limit-n)
		}
	}
	return false
}

var buffers = sync.Pool{New: func() any { b := make([]byte, chunkBytes); return &b }}

// readChunk reads once and gives what it got to use, which may keep it. No
// buffer is held while it waits. Its error at the end is io.EOF; a terminal
// whose other side is closed gives EIO.
func readChunk(f *os.File, use func([]byte)) (int, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var data []byte
	var n int
	var rerr error
	err = rc.Read(func(fd uintptr) bool {
		buf := buffers.Get().(*[]byte)
		for {
			n, rerr = syscall.Read(int(fd), *buf)
			if rerr != syscall.EINTR {
				break
			}
		}
		if n > chunkBytes/2 {
			data = (*buf)[:n] // given away
			return true
		}
		if n > 0 {
			data = bytes.Clone((*buf)[:n])
		}
		buffers.Put(buf)
		return rerr != syscall.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case rerr != nil:
		return 0, rerr
	case n == 0:
		return 0, io.EOF
	}
	use(data)
	return n, nil
}

// write gives data to the command's standard input or terminal, whole and in
// order of the calls. It waits for the command to read, until ctx is done.
func (c *command) write(ctx context.Context, data []byte, toPTY bool) error {
	if toPTY != c.isPTY {
		if toPTY {
			return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d has no terminal: send stdin", c.pid))
		}
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d has a terminal: send pty input", c.pid))
	}
	release, err := c.takeInput(ctx)
	if err != nil {
		return err
	}
	defer release()
	if c.stdin == nil {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d was started without stdin, or its stdin is closed", c.pid))
	}
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		c.stdin.SetWriteDeadline(time.Unix(1, 0))
		close(cut)
	})
	_, err = c.stdin.Write(data)
	if !stop() {
		<-cut
		c.stdin.SetWriteDeadline(time.Time{})
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	}
	return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d does not read its input any more: %w", c.pid, err))
}

func (c *command) takeInput(ctx context.Context) (release func(), err error) {
	select {
	case <-c.input:
		return func() { c.input <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// closeStdin closes the command's standard input, after what was written
// before. It is idempotent.
func (c *command) closeStdin(ctx context.Context) error {
	if c.isPTY {
		return connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("process %d has a terminal: send it Ctrl+D (byte 4) instead", c.pid))
	}
	release, err := c.takeInput(ctx)
	if err != nil {
		return err
	}
	defer release()
	if c.stdin != nil {
		c.stdin.Close()
	}
	return nil
}
