package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/process"
)

const (
	// detachKey is Ctrl-].
	detachKey = 0x1d
	// attachScrollback is what is asked for of a terminal's past, in bytes.
	attachScrollback = 64 << 10
)

func (a *app) attachCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "attach ID [PID]",
		Short: "Attach to a command that runs in a sandbox",
		Long: "Attaches to a command that was left running, also over a hibernation or in a fork.\n" +
			"Shows what it has written and nobody has read, and goes on with what it writes; of\n" +
			"a command with a terminal it shows the last 64 KiB first, read or not, and what is\n" +
			"typed goes to it. Ctrl-] detaches. Without PID the sandbox must have one command.\n" +
			"Exits with the command's code where it ends.",
		Example:           "  warren attach $id\n  warren attach $id 57",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			var pid uint32
			if len(args) == 2 {
				n, err := strconv.ParseUint(args[1], 10, 32)
				if err != nil || n == 0 {
					return usagef("%q is not a process id", args[1])
				}
				pid = uint32(n)
			} else {
				var err error
				if pid, err = onlyCommand(ctx, c, args[0]); err != nil {
					return own(err)
				}
			}
			return a.attach(ctx, c, args[0], pid)
		}),
	}
}

// onlyCommand finds the one command that runs.
func onlyCommand(ctx context.Context, c *client.Client, id string) (uint32, error) {
	res, err := c.Process(id).List(ctx, connect.NewRequest(&process.ListRequest{}))
	if err != nil {
		return 0, c.Error(err)
	}
	all := res.Msg.GetProcesses()
	switch len(all) {
	case 0:
		return 0, sandbox.Errorf(sandbox.CodeNotFound, "no command runs in the sandbox that could be attached to")
	case 1:
		return all[0].GetPid(), nil
	}
	var b strings.Builder
	for _, p := range all {
		line := strings.Join(append([]string{p.GetConfig().GetCmd()}, p.GetConfig().GetArgs()...), " ")
		if r := []rune(line); len(r) > 60 {
			line = string(r[:60]) + "…"
		}
		fmt.Fprintf(&b, "\n  %d  %s", p.GetPid(), clean(line))
	}
	return 0, usagef("%d commands run: give the PID of one\n%s", len(all), strings.TrimPrefix(b.String(), "\n"))
}

// attach shows a command's output and types into its terminal, until it ends or
// the user detaches.
func (a *app) attach(ctx context.Context, c *client.Client, id string, pid uint32) error {
	ctx, detach := context.WithCancel(ctx)
	defer detach()
	run, err := c.Attach(ctx, id, pid, attachScrollback, a.out)
	if err != nil {
		return own(err)
	}
	if tty(a.in) {
		restore, err := a.typeInto(ctx, run, detach)
		if err != nil {
			return own(err)
		}
		defer restore()
	}
	end, err := run.Wait(ctx)
	switch {
	case ctx.Err() != nil:
		return nil // the command goes on
	case errors.Is(err, syscall.EPIPE):
		return exitError{code: 128 + int(syscall.SIGPIPE)}
	case err != nil:
		return own(a.whyEnded(id, c, err))
	}
	a.code = end.Code
	return nil
}

// typeInto makes our terminal the command's, where that has one.
func (a *app) typeInto(ctx context.Context, run *client.Running, detach func()) (restore func(), err error) {
	cols, rows, err := term.GetSize(int(a.in.Fd()))
	if err != nil {
		cols, rows = 80, 24
	}
	if run.Resize(ctx, client.Size{Cols: cols, Rows: rows}) != nil {
		return func() {}, nil // it has none: Ctrl-C ends us, and not it
	}
	state, err := term.MakeRaw(int(a.in.Fd()))
	if err != nil {
		return nil, fmt.Errorf("set the terminal to raw mode: %w", err)
	}
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	go a.followSize(ctx, run, resized)
	go feedAttached(ctx, a.in, run.Type, detach)
	return func() {
		signal.Stop(resized)
		term.Restore(int(a.in.Fd()), state)
	}, nil
}

// feedAttached sends what is typed, up to the key that detaches.
func feedAttached(ctx context.Context, in io.Reader, send func(context.Context, []byte) error, detach func()) {
	buf := make([]byte, 4<<10)
	for {
		n, err := in.Read(buf)
		text, _, leave := bytes.Cut(buf[:n], []byte{detachKey})
		if len(text) > 0 && send(ctx, text) != nil {
			return
		}
		if leave {
			detach()
			return
		}
		if err != nil {
			return
		}
	}
}
