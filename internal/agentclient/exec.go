package agentclient

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/process"
)

// DefaultMaxOutput is how many bytes of each stream Run keeps.
const DefaultMaxOutput = 1 << 20

// stdinChunk is how many bytes of input go in one message.
const stdinChunk = 32 << 10

// Size is a terminal's, in characters.
type Size struct{ Cols, Rows uint32 }

// Command is what to run.
type Command struct {
	Path string   // a program's path, or a name to find in PATH
	Args []string // without the program itself
	Env  map[string]string
	Cwd  string // "" is the default; relative to the user's home
	User string // "" is the default
	Tag  string // a name to find it by later
	PTY  *Size  // a terminal instead of pipes

	// Stdin is what the command reads; nil is an empty input (for a PTY: input
	// comes by SendInput alone). It is read until its end, after which the
	// command's input is closed, or until the command ends.
	Stdin io.Reader

	MaxOutput int // Run only: bytes kept of each stream; 0 is DefaultMaxOutput
}

// Result is how a command ended, and what it wrote.
type Result struct {
	PID             uint32
	ExitCode        int    // -1 where a signal ended it
	Exited          bool   // false where a signal ended it
	Status          string // "exit status 1", "signal: killed"
	Stdout, Stderr  []byte // Run only; a PTY's output is in Stdout
	StdoutTruncated bool   // there was more than MaxOutput
	StderrTruncated bool
}

// Output takes what a command writes, as it comes. A nil function drops it.
// A function that blocks holds the command up; one that returns an error ends
// Exec with it, and leaves the command running.
type Output struct {
	Start  func(pid uint32) error // the command runs
	Stdout func([]byte) error     // the slice is the callee's
	Stderr func([]byte) error
	PTY    func([]byte) error
}

// Run runs cmd to its end and gives its output. If ctx has a deadline, the
// agent ends the command (and its process group) when it passes.
func (c *Client) Run(ctx context.Context, cmd Command) (Result, error) {
	limit := cmd.MaxOutput
	if limit <= 0 {
		limit = DefaultMaxOutput
	}
	var out, errs []byte
	var outCut, errCut bool
	keep := func(buf *[]byte, cut *bool) func([]byte) error {
		return func(p []byte) error {
			if room := limit - len(*buf); len(p) > room {
				p, *cut = p[:room], true
			}
			*buf = append(*buf, p...)
			return nil
		}
	}
	r, err := c.Exec(ctx, cmd, Output{
		Stdout: keep(&out, &outCut),
		Stderr: keep(&errs, &errCut),
		PTY:    keep(&out, &outCut),
	})
	r.Stdout, r.Stderr, r.StdoutTruncated, r.StderrTruncated = out, errs, outCut, errCut
	return r, err
}

// Exec runs cmd, gives its output to out in order, and returns at its end.
//
// When ctx is cancelled Exec returns and the command goes on; when ctx's
// deadline passes the agent ends the command.
func (c *Client) Exec(ctx context.Context, cmd Command, out Output) (Result, error) {
	req := connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: cmd.Path, Args: cmd.Args, Envs: cmd.Env},
	})
	hasStdin := cmd.Stdin != nil
	req.Msg.Stdin = &hasStdin
	if cmd.Cwd != "" {
		req.Msg.Process.Cwd = &cmd.Cwd
	}
	if cmd.Tag != "" {
		req.Msg.Tag = &cmd.Tag
	}
	if cmd.PTY != nil {
		req.Msg.Pty = &process.PTY{Size: &process.PTY_Size{Cols: cmd.PTY.Cols, Rows: cmd.PTY.Rows}}
	}
	asUser(req.Header(), cmd.User)
	stream, err := c.process.Start(ctx, req)
	if err != nil {
		return Result{}, Error(err)
	}
	defer stream.Close()
	next := func() (*process.ProcessEvent, error) {
		if stream.Receive() {
			return stream.Msg().GetEvent(), nil
		}
		return nil, streamEnd(stream.Err())
	}
	return c.follow(ctx, next, out, cmd.Stdin, cmd.PTY != nil)
}

// Attach follows a command that runs already, by pid: it gives out what no
// client was there to take (at most the agent's backlog), then what comes, and
// returns at its end. CodeNotFound: no such command, or it ended a while ago.
func (c *Client) Attach(ctx context.Context, pid uint32, out Output) (Result, error) {
	stream, err := c.process.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
	if err != nil {
		return Result{}, Error(err)
	}
	defer stream.Close()
	next := func() (*process.ProcessEvent, error) {
		if stream.Receive() {
			return stream.Msg().GetEvent(), nil
		}
		return nil, streamEnd(stream.Err())
	}
	return c.follow(ctx, next, out, nil, false)
}

func streamEnd(err error) error {
	if err == nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the sandbox's agent closed the stream before the command's end: the sandbox was probably ended")
	}
	return Error(err)
}

// follow handles the events of one command.
func (c *Client) follow(ctx context.Context, next func() (*process.ProcessEvent, error), out Output, stdin io.Reader, isPTY bool) (Result, error) {
	inputCtx, stopInput := context.WithCancel(ctx)
	defer stopInput()
	var r Result
	give := func(f func([]byte) error, data []byte) error {
		if f == nil {
			return nil
		}
		return f(data)
	}
	for {
		ev, err := next()
		if err != nil {
			return r, err
		}
		switch ev := ev.GetEvent().(type) {
		case *process.ProcessEvent_Start:
			r.PID = ev.Start.GetPid()
			if out.Start != nil {
				if err := out.Start(r.PID); err != nil {
					return r, err
				}
			}
			if stdin != nil {
				// It ends with stdin or with the command: an error of it shows in
				// the command's own end. The reader itself cannot be interrupted.
				go c.feed(inputCtx, r.PID, stdin, isPTY)
			}
		case *process.ProcessEvent_Data:
			switch o := ev.Data.GetOutput().(type) {
			case *process.ProcessEvent_DataEvent_Stdout:
				err = give(out.Stdout, o.Stdout)
			case *process.ProcessEvent_DataEvent_Stderr:
				err = give(out.Stderr, o.Stderr)
			case *process.ProcessEvent_DataEvent_Pty:
				err = give(out.PTY, o.Pty)
			}
			if err != nil {
				return r, err
			}
		case *process.ProcessEvent_End:
			r.ExitCode, r.Exited, r.Status = int(ev.End.GetExitCode()), ev.End.GetExited(), ev.End.GetStatus()
			return r, nil
		}
	}
}

// feed copies stdin to the command in order and closes its input at the end.
func (c *Client) feed(ctx context.Context, pid uint32, stdin io.Reader, isPTY bool) error {
	buf := make([]byte, stdinChunk)
	for {
		n, err := stdin.Read(buf)
		if n > 0 {
			if err := c.SendInput(ctx, pid, buf[:n], isPTY); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) && !isPTY {
			return c.CloseStdin(ctx, pid)
		}
		if err != nil {
			return err
		}
	}
}

func byPID(pid uint32) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
}

// SendInput writes data to a command's standard input, or to its terminal. It
// returns when the command's pipe took it.
func (c *Client) SendInput(ctx context.Context, pid uint32, data []byte, isPTY bool) error {
	in := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: data}}
	if isPTY {
		in.Input = &process.ProcessInput_Pty{Pty: data}
	}
	_, err := c.process.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: in}))
	return Error(err)
}

// CloseStdin closes a command's standard input: it reads end of file.
func (c *Client) CloseStdin(ctx context.Context, pid uint32) error {
	_, err := c.process.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: byPID(pid)}))
	return Error(err)
}

// Signal sends SIGTERM, or SIGKILL if kill, to a command and its process
// group. CodeNotFound: it does not run any more.
func (c *Client) Signal(ctx context.Context, pid uint32, kill bool) error {
	sig := process.Signal_SIGNAL_SIGTERM
	if kill {
		sig = process.Signal_SIGNAL_SIGKILL
	}
	_, err := c.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: sig}))
	return Error(err)
}

// KillTagged sends SIGKILL to the command of that tag and its process group.
// CodeNotFound: it does not run any more, or not yet.
func (c *Client) KillTagged(ctx context.Context, tag string) error {
	_, err := c.process.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{
		Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}},
		Signal:  process.Signal_SIGNAL_SIGKILL,
	}))
	return Error(err)
}

// Resize changes the size of a command's terminal.
func (c *Client) Resize(ctx context.Context, pid uint32, s Size) error {
	_, err := c.process.Update(ctx, connect.NewRequest(&process.UpdateRequest{
		Process: byPID(pid),
		Pty:     &process.PTY{Size: &process.PTY_Size{Cols: s.Cols, Rows: s.Rows}},
	}))
	return Error(err)
}

// Processes lists the commands that run.
func (c *Client) Processes(ctx context.Context) ([]*process.ProcessInfo, error) {
	resp, err := c.process.List(ctx, connect.NewRequest(&process.ListRequest{}))
	if err != nil {
		return nil, Error(err)
	}
	return resp.Msg.GetProcesses(), nil
}
