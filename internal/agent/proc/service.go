package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/reaper"
	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/proto/process"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// Service is the process service over a Manager.
type Service struct{ M *Manager }

var _ processconnect.ProcessHandler = Service{}

// List tells the commands that run.
func (s Service) List(ctx context.Context, _ *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	return connect.NewResponse(&process.ListResponse{Processes: s.M.list()}), nil
}

// Start runs a command and streams its output. A client that goes away leaves
// it running; the call's deadline (Connect-Timeout-Ms) ends it.
func (s Service) Start(ctx context.Context, req *connect.Request[process.StartRequest], stream *connect.ServerStream[process.StartResponse]) error {
	u, err := s.M.session.RPCUser(req.Header())
	if err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	c, rd, err := s.M.start(u, req.Msg, deadline)
	if err != nil {
		return err
	}
	return follow(ctx, c.pid, rd, req.Header(), func(ev *process.ProcessEvent) error {
		return stream.Send(&process.StartResponse{Event: ev})
	})
}

// Connect attaches to a command: first what nobody took of its output, then
// what comes. With control.ScrollbackHeader it gets more of a terminal's.
func (s Service) Connect(ctx context.Context, req *connect.Request[process.ConnectRequest], stream *connect.ServerStream[process.ConnectResponse]) error {
	scroll := 0
	if text := req.Header().Get(control.ScrollbackHeader); text != "" {
		var err error
		if scroll, err = strconv.Atoi(text); err != nil || scroll < 0 {
			return invalid("%s is not a number of bytes", control.ScrollbackHeader)
		}
	}
	pid, rd, err := s.M.attach(req.Msg.GetProcess(), scroll)
	if err != nil {
		return err
	}
	return follow(ctx, pid, rd, req.Header(), func(ev *process.ProcessEvent) error {
		return stream.Send(&process.ConnectResponse{Event: ev})
	})
}

// follow sends what a reader gets until the command's end.
func follow(ctx context.Context, pid uint32, rd *reader, header http.Header, send func(*process.ProcessEvent) error) error {
	defer rd.detach()
	if err := send(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: pid}}}); err != nil {
		return err
	}
	every := session.Keepalive(header)
	quiet := time.NewTicker(every)
	defer quiet.Stop()
	for {
		c, end, err := rd.next(ctx, quiet.C)
		var ev *process.ProcessEvent
		switch {
		case errors.Is(err, context.DeadlineExceeded):
			return connect.NewError(connect.CodeDeadlineExceeded, err)
		case err != nil:
			return connect.NewError(connect.CodeCanceled, err)
		case end != nil:
			return send(&process.ProcessEvent{Event: &process.ProcessEvent_End{End: &process.ProcessEvent_EndEvent{
				ExitCode: end.code, Exited: end.exited, Status: end.status, Error: endError(end),
			}}})
		case c != nil:
			ev = dataEvent(c)
			quiet.Reset(every)
		default:
			ev = &process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}}
		}
		if err := send(ev); err != nil {
			return err
		}
	}
}

// endError is the end event's error: the status of an end that is not a
// success, as envd gives it.
func endError(e *ending) *string {
	if e.exited && e.code == 0 {
		return nil
	}
	return &e.status
}

func dataEvent(c *chunk) *process.ProcessEvent {
	d := &process.ProcessEvent_DataEvent{}
	switch c.of {
	case stdout:
		d.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: c.data}
	case stderr:
		d.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: c.data}
	case terminal:
		d.Output = &process.ProcessEvent_DataEvent_Pty{Pty: c.data}
	}
	return &process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: d}}
}

// Update resizes a command's terminal.
func (s Service) Update(ctx context.Context, req *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	c, err := s.M.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if size := req.Msg.GetPty().GetSize(); size != nil {
		if err := c.resize(size); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&process.UpdateResponse{}), nil
}

// StreamInput writes a stream of input to one command, in order.
func (s Service) StreamInput(ctx context.Context, stream *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	var c *command
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			var err error
			if c, err = s.M.find(ev.Start.GetProcess()); err != nil {
				return nil, err
			}
		case *process.StreamInputRequest_Data:
			if c == nil {
				return nil, invalid("input came before the start message that selects the process")
			}
			if err := input(ctx, c, ev.Data.GetInput()); err != nil {
				return nil, err
			}
		case *process.StreamInputRequest_Keepalive:
		default:
			return nil, invalid("a message of the input stream is neither start, data nor keepalive")
		}
	}
	if err := stream.Err(); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return connect.NewResponse(&process.StreamInputResponse{}), nil
}

// SendInput writes once to a command.
func (s Service) SendInput(ctx context.Context, req *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	c, err := s.M.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := input(ctx, c, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.SendInputResponse{}), nil
}

func input(ctx context.Context, c *command, in *process.ProcessInput) error {
	switch in := in.GetInput().(type) {
	case *process.ProcessInput_Stdin:
		return c.write(ctx, in.Stdin, false)
	case *process.ProcessInput_Pty:
		return c.write(ctx, in.Pty, true)
	}
	return invalid("the input is neither stdin nor pty")
}

// maxSignal is Linux's last (SIGRTMAX, signal(7)).
const maxSignal = 64

// SendSignal signals a command's process group.
func (s Service) SendSignal(ctx context.Context, req *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	c, err := s.M.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	// The interface names two signals; its field carries any number of Linux's.
	sig := syscall.Signal(req.Msg.GetSignal())
	if sig < 1 || sig > maxSignal {
		return nil, invalid("there is no signal %d: give 1 to %d, such as SIGTERM (15) or SIGKILL (9)", sig, maxSignal)
	}
	switch err := c.child.Signal(sig); {
	case errors.Is(err, reaper.ErrEnded):
		return nil, noProcess(req.Msg.GetProcess())
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("signal process %d: %w", c.pid, err))
	}
	return connect.NewResponse(&process.SendSignalResponse{}), nil
}

// CloseStdin closes a command's standard input.
func (s Service) CloseStdin(ctx context.Context, req *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	c, err := s.M.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := c.closeStdin(ctx); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), nil
}
