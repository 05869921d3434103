package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// removeWait bounds the removal of run's sandbox after its command.
const removeWait = 30 * time.Second

// execFlags are how a command is run.
type execFlags struct {
	interactive, tty, noStdin bool
	env, envFile              []string
	user, workdir             string
}

func (f *execFlags) registerIO(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVarP(&f.interactive, "interactive", "i", false, "give it our input even where that is a terminal")
	fl.BoolVarP(&f.tty, "tty", "t", false, "give it a terminal")
	fl.BoolVarP(&f.noStdin, "no-stdin", "n", false, "give it an empty input")
	fl.SetInterspersed(false) // what follows the command is the command's
}

func (a *app) runCmd() *cobra.Command {
	var cf createFlags
	var ef execFlags
	var rm bool
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Make a sandbox, run a command in it, remove it",
		Long: "Makes a sandbox, runs a command in it with live input and output, and removes it.\n" +
			"Exits with the command's own code; 125 where Warren failed.",
		Example: "  warren run -- python3 -c 'print(6*7)'\n" +
			"  echo 'SELECT 1' | warren run --net none -- sqlite3\n" +
			"  warren run -it -- bash",
		Args: needCommand(0),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			r, err := cf.request(a)
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			sb, err := c.CreateSandbox(ctx, r)
			if err != nil {
				return own(err)
			}
			if !rm {
				fmt.Fprintf(a.err, "sandbox %s\n", sb.ID)
			}
			err = a.exec(ctx, c, sb.ID, ef, args, nil)
			if rm {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeWait)
				defer cancel()
				if kerr := c.Kill(ctx, sb.ID); kerr != nil && sandbox.CodeOf(kerr) != sandbox.CodeNotFound {
					fmt.Fprintf(a.err, "warren: sandbox %s could not be removed: %s\n", sb.ID, clean(kerr.Error()))
					if err == nil {
						err = exitError{code: exitOwn}
					}
				}
			}
			return err
		},
	}
	cf.register(a, cmd)
	ef.registerIO(cmd)
	cmd.Flags().BoolVar(&rm, "rm", true, "remove the sandbox afterwards")
	return cmd
}

func (a *app) execCmd() *cobra.Command {
	var ef execFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] ID -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: "Runs a command in a sandbox with live input and output, and exits with its code;\n" +
			"125 where Warren failed, 126 and 127 where the command could not be run or found.",
		Example:           "  warren exec $id -- ls -la /\n  warren exec -it $id -- bash\n  warren exec --json $id -- uname -a",
		Args:              needCommand(1),
		ValidArgsFunction: a.completeID,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			env, err := a.environment(ef.envFile, ef.env)
			if err != nil {
				return err
			}
			if a.json {
				return a.execJSON(ctx, c, args[0], ef, args[1:], env)
			}
			return a.exec(ctx, c, args[0], ef, args[1:], env)
		}),
	}
	ef.registerIO(cmd)
	fl := cmd.Flags()
	fl.StringArrayVarP(&ef.env, "env", "e", nil, "environment: NAME=VALUE, or NAME for the value that it has here (repeatable)")
	fl.StringArrayVar(&ef.envFile, "env-file", nil, "read environment from a file of NAME=VALUE lines (repeatable)")
	fl.StringVarP(&ef.user, "user", "u", "", "as this user")
	fl.StringVarP(&ef.workdir, "workdir", "w", "", "in this directory")
	return cmd
}

func (a *app) shellCmd() *cobra.Command {
	var ef execFlags
	cmd := &cobra.Command{
		Use:               "shell ID",
		Short:             "Open a shell in a sandbox",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			ef.tty = tty(a.in)
			ef.interactive = true
			// A login shell where there is one; a template without bash has sh.
			return a.exec(ctx, c, args[0], ef, []string{"/bin/sh", "-c", `if command -v bash >/dev/null 2>&1; then exec bash -l; else exec sh -l; fi`}, nil)
		}),
	}
	cmd.Flags().StringVarP(&ef.user, "user", "u", "", "as this user")
	cmd.Flags().StringVarP(&ef.workdir, "workdir", "w", "", "in this directory")
	return cmd
}

func needCommand(before int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		// SetInterspersed(false) stops at the first argument, so that a "--"
		// behind the id is still there.
		if len(args) < before {
			return errors.New("the sandbox's id and a command are missing")
		}
		if len(stripDashes(args[before:])) == 0 {
			return errors.New("the command is missing: write it behind --")
		}
		return nil
	}
}

func stripDashes(args []string) []string {
	if len(args) > 0 && args[0] == "--" {
		return args[1:]
	}
	return args
}

// own marks a failure of Warren's own in run and exec.
func own(err error) error { return exitError{code: exitOwn, err: err} }

// exec runs a command with our input, output, signals and terminal, and leaves
// its exit code in a.code.
func (a *app) exec(ctx context.Context, c *client.Client, id string, f execFlags, args []string, env map[string]string) error {
	args = stripDashes(args)
	cmd := client.Command{Args: args, Env: env, Cwd: f.workdir, User: f.user, Stdout: a.out, Stderr: a.err}
	if !f.noStdin && (f.interactive || f.tty || !tty(a.in)) {
		cmd.Stdin = a.in
	}
	if f.tty {
		if !tty(a.in) {
			return own(errors.New("-t needs a terminal as input, and ours is none"))
		}
		cols, rows, err := term.GetSize(int(a.in.Fd()))
		if err != nil {
			cols, rows = 80, 24
		}
		cmd.TTY = &client.Size{Cols: cols, Rows: rows}
		if cmd.Env == nil {
			cmd.Env = map[string]string{}
		}
		if _, ok := cmd.Env["TERM"]; !ok && a.getenv("TERM") != "" {
			cmd.Env["TERM"] = a.getenv("TERM")
		}
	}
	// From here on signals are the command's; they must not end our streams.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	started := make(chan struct{})
	go func() { // until it runs, a signal is for us
		select {
		case <-signals:
			cancel()
		case <-started:
		case <-ctx.Done():
		}
	}()
	run, err := c.Start(ctx, id, cmd)
	close(started)
	if err != nil {
		return startError(err, args[0])
	}
	if f.tty {
		state, err := term.MakeRaw(int(a.in.Fd()))
		if err != nil {
			return own(fmt.Errorf("set the terminal to raw mode: %w", err))
		}
		defer term.Restore(int(a.in.Fd()), state)
		resized := make(chan os.Signal, 1)
		signal.Notify(resized, syscall.SIGWINCH)
		defer signal.Stop(resized)
		go a.followSize(ctx, run, resized)
	}
	go forward(ctx, run, signals)
	end, err := run.Wait(ctx)
	if err != nil {
		if errors.Is(err, syscall.EPIPE) {
			// Who read our output has gone: the command gets to know.
			run.Signal(context.WithoutCancel(ctx), int(syscall.SIGKILL))
			return exitError{code: 128 + int(syscall.SIGPIPE)}
		}
		return own(a.whyEnded(id, c, err))
	}
	a.code = end.Code
	return nil
}

// startError sorts out why a command did not start.
func startError(err error, name string) error {
	msg := err.Error()
	switch sandbox.CodeOf(err) {
	case sandbox.CodeNotFound, sandbox.CodeInvalid:
		switch {
		case strings.Contains(msg, "executable file not found"), strings.Contains(msg, "no such file or directory"):
			return exitError{code: exitNoSuch, err: err}
		case strings.Contains(msg, "permission denied"), strings.Contains(msg, "exec format error"), strings.Contains(msg, "is a directory"):
			return exitError{code: exitCannotRun, err: err}
		}
	case sandbox.CodeForbidden:
		return exitError{code: exitCannotRun, err: err}
	}
	return own(err)
}

// whyEnded finds out whether the sandbox's end is why the command's stream
// broke off.
func (a *app) whyEnded(id string, c *client.Client, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for range 10 { // its end may not be on record yet
		sb, gerr := c.Sandbox(ctx, id)
		if gerr != nil {
			return err
		}
		if sb.Reason != "" {
			msg := fmt.Sprintf("the sandbox ended under the command: %s", sb.Reason)
			if sb.Detail != "" {
				msg += " (" + sb.Detail + ")"
			}
			return sandbox.Errorf(sandbox.CodeUnavailable, "%s", msg)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
	return err
}

// forward passes signals on. A second interrupt kills.
func forward(ctx context.Context, run *client.Running, signals <-chan os.Signal) {
	interrupts := 0
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-signals:
			n := int(s.(syscall.Signal))
			if s == os.Interrupt {
				if interrupts++; interrupts > 1 {
					n = int(syscall.SIGKILL)
				}
			}
			run.Signal(ctx, n) // the command may have ended: nothing to tell
		}
	}
}

func (a *app) followSize(ctx context.Context, run *client.Running, resized <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-resized:
			if cols, rows, err := term.GetSize(int(a.in.Fd())); err == nil {
				run.Resize(ctx, client.Size{Cols: cols, Rows: rows})
			}
		}
	}
}

// maxJSONInput bounds what exec --json sends as the command's input.
const maxJSONInput = 16 << 20

// execJSON runs a command to its end and prints its result as one object.
func (a *app) execJSON(ctx context.Context, c *client.Client, id string, f execFlags, args []string, env map[string]string) error {
	if f.tty {
		return usagef("--json and -t do not go together")
	}
	r := wire.Exec{Cmd: wire.Command{Argv: stripDashes(args)}, Env: env, Cwd: f.workdir, User: f.user}
	if !f.noStdin && (f.interactive || !tty(a.in)) {
		data, err := io.ReadAll(io.LimitReader(a.in, maxJSONInput+1))
		if err != nil {
			return own(err)
		}
		if len(data) > maxJSONInput {
			return own(errors.New("the input is larger than 16 MiB: run it without --json"))
		}
		r.StdinBase64 = data
		if len(data) == 0 {
			r.StdinBase64 = nil
		}
	}
	res, err := c.Exec(ctx, id, r)
	if err != nil {
		return startError(err, r.Cmd.Argv[0])
	}
	a.code = res.ExitCode
	return a.printJSON(res)
}
