package client

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"strconv"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/process"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// Size is a terminal's, in characters.
type Size struct{ Cols, Rows int }

// Command is what to run with live input and output.
type Command struct {
	Args   []string // the program and its arguments
	Env    map[string]string
	Cwd    string
	User   string
	TTY    *Size     // a terminal of this size instead of pipes
	Stdin  io.Reader // nil: an empty input
	Stdout io.Writer // and a terminal's output; nil drops it
	Stderr io.Writer
}

// Exit is how a command ended.
type Exit struct {
	Code   int    // 128+n for signal n
	Signal string // "SIGKILL"; "" where it exited by itself
}

// Running is a command that runs in a sandbox.
type Running struct {
	PID    uint32
	c      *Client
	proc   processconnect.ProcessClient
	stream eventStream
	cmd    Command
	cancel context.CancelFunc
}

// eventStream is the events of a command, of the stream that started it or of
// one that was attached later.
type eventStream interface {
	Receive() bool
	Event() *process.ProcessEvent
	Err() error
	Close() error
}

type startStream struct {
	*connect.ServerStreamForClient[process.StartResponse]
}

func (s startStream) Event() *process.ProcessEvent { return s.Msg().GetEvent() }

type attachStream struct {
	*connect.ServerStreamForClient[process.ConnectResponse]
}

func (s attachStream) Event() *process.ProcessEvent { return s.Msg().GetEvent() }

// Start starts a command inside. The caller calls Wait.
func (c *Client) Start(ctx context.Context, id string, cmd Command) (*Running, error) {
	if len(cmd.Args) == 0 {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "no command was given")
	}
	hasStdin := cmd.Stdin != nil
	req := connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Cmd: cmd.Args[0], Args: cmd.Args[1:], Envs: cmd.Env},
		Stdin:   &hasStdin,
	})
	if cmd.Cwd != "" {
		req.Msg.Process.Cwd = &cmd.Cwd
	}
	if cmd.TTY != nil {
		req.Msg.Pty = ptySize(*cmd.TTY)
	}
	if cmd.User != "" {
		req.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(cmd.User+":")))
	}
	ctx, cancel := context.WithCancel(ctx)
	proc := c.Process(id)
	stream, err := proc.Start(ctx, req)
	if err != nil {
		cancel()
		return nil, c.Error(err)
	}
	return c.running(&Running{c: c, proc: proc, stream: startStream{stream}, cmd: cmd, cancel: cancel})
}

// Attach attaches to a command that runs inside, by its process id there, and
// writes to out what it writes from now on, and before that what nobody was
// attached to take, and before that up to scrollback bytes of what its terminal,
// if it has one, wrote (the agent keeps 64 KiB). The caller calls Wait, whose end by ctx leaves the command
// running.
func (c *Client) Attach(ctx context.Context, id string, pid uint32, scrollback int, out io.Writer) (*Running, error) {
	ctx, cancel := context.WithCancel(ctx)
	proc := c.Process(id)
	req := connect.NewRequest(&process.ConnectRequest{
		Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}},
	})
	if scrollback > 0 {
		req.Header().Set(control.ScrollbackHeader, strconv.Itoa(scrollback))
	}
	stream, err := proc.Connect(ctx, req)
	if err != nil {
		cancel()
		return nil, c.Error(err)
	}
	return c.running(&Running{c: c, proc: proc, stream: attachStream{stream}, cmd: Command{Stdout: out, Stderr: out}, cancel: cancel})
}

// running waits for a stream's first event.
func (c *Client) running(r *Running) (*Running, error) {
	var err error
	for r.stream.Receive() {
		switch e := r.stream.Event().GetEvent().(type) {
		case *process.ProcessEvent_Start:
			r.PID = e.Start.GetPid()
			return r, nil
		case *process.ProcessEvent_Keepalive:
		default:
			err = errors.New("the agent's first event is not the command's start")
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		err = r.streamError()
	}
	r.stream.Close()
	r.cancel()
	return nil, c.Error(err)
}

func ptySize(s Size) *process.PTY {
	return &process.PTY{Size: &process.PTY_Size{Cols: uint32(s.Cols), Rows: uint32(s.Rows)}}
}

func (r *Running) streamError() error {
	if err := r.stream.Err(); err != nil {
		return r.c.Error(err)
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "the connection to the command ended before the command did: its sandbox has probably ended")
}

// Wait carries input and output until the command's end. An error means that
// the end is not known. It does not wait for a read of Stdin that is under way.
func (r *Running) Wait(ctx context.Context) (Exit, error) {
	defer r.cancel()
	defer r.stream.Close()
	if r.cmd.Stdin != nil {
		feedCtx, stop := context.WithCancel(ctx)
		defer stop()
		go r.feed(feedCtx)
	}
	write := func(w io.Writer, p []byte) error {
		if w == nil || len(p) == 0 {
			return nil
		}
		_, err := w.Write(p)
		return err
	}
	for r.stream.Receive() {
		switch e := r.stream.Event().GetEvent().(type) {
		case *process.ProcessEvent_Data:
			var err error
			switch o := e.Data.GetOutput().(type) {
			case *process.ProcessEvent_DataEvent_Stdout:
				err = write(r.cmd.Stdout, o.Stdout)
			case *process.ProcessEvent_DataEvent_Stderr:
				err = write(r.cmd.Stderr, o.Stderr)
			case *process.ProcessEvent_DataEvent_Pty:
				err = write(r.cmd.Stdout, o.Pty)
			}
			if err != nil {
				return Exit{}, err
			}
		case *process.ProcessEvent_End:
			code, signal := wire.ExitStatus(int(e.End.GetExitCode()), e.End.GetExited(), e.End.GetStatus())
			return Exit{Code: code, Signal: signal}, nil
		}
	}
	return Exit{}, r.streamError()
}

// stdinChunk is how much input goes in one message.
const stdinChunk = 64 << 10

// feed copies Stdin to the command. Its errors show in the command's own end:
// one that has ended takes no more input.
func (r *Running) feed(ctx context.Context) {
	if r.cmd.TTY != nil {
		r.feedTTY(ctx)
		return
	}
	in := r.proc.StreamInput(ctx)
	err := in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start{
		Start: &process.StreamInputRequest_StartEvent{Process: r.selector()},
	}})
	buf := make([]byte, stdinChunk)
	for err == nil {
		var n int
		n, err = r.cmd.Stdin.Read(buf)
		if n > 0 {
			serr := in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Data{
				Data: &process.StreamInputRequest_DataEvent{Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: buf[:n]}}},
			}})
			if serr != nil {
				err = serr
			}
		}
	}
	if _, cerr := in.CloseAndReceive(); cerr != nil || ctx.Err() != nil {
		return
	}
	r.proc.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: r.selector()}))
}

// feedTTY sends what is typed at once.
func (r *Running) feedTTY(ctx context.Context) {
	buf := make([]byte, stdinChunk)
	for {
		n, err := r.cmd.Stdin.Read(buf)
		if n > 0 {
			if r.Type(ctx, buf[:n]) != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// Type sends text to the command's terminal.
func (r *Running) Type(ctx context.Context, text []byte) error {
	_, err := r.proc.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{
		Process: r.selector(), Input: &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: text}},
	}))
	return r.c.Error(err)
}

func (r *Running) selector() *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: r.PID}}
}

// Signal sends signal number n to the command's process group. An agent that
// does not know n refuses with CodeInvalid.
func (r *Running) Signal(ctx context.Context, n int) error {
	_, err := r.proc.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: r.selector(), Signal: process.Signal(n)}))
	return r.c.Error(err)
}

// Resize changes the size of the command's terminal.
func (r *Running) Resize(ctx context.Context, s Size) error {
	_, err := r.proc.Update(ctx, connect.NewRequest(&process.UpdateRequest{Process: r.selector(), Pty: ptySize(s)}))
	return r.c.Error(err)
}
