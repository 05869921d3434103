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

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/version"
)

// The exit codes that are Warren's own.
const (
	exitFailure    = 1
	exitUsage      = 2
	exitOwn        = 125 // run, exec: Warren failed, not the command
	exitCannotRun  = 126
	exitNoSuch     = 127
	exitAfterBreak = 130 // 128 + SIGINT
)

// app is one run of the command line.
type app struct {
	in       *os.File
	out, err io.Writer
	host     string
	tenant   string
	json     bool
	getenv   func(string) string

	code int // what to exit with where the command itself succeeded
}

// Main runs the command line of the process and gives its exit code.
func Main() int {
	a := &app{in: os.Stdin, out: os.Stdout, err: os.Stderr, getenv: os.Getenv}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	return a.main(ctx, os.Args[1:])
}

func (a *app) main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return a.code
	}
	var exit exitError
	if errors.As(err, &exit) && exit.err == nil {
		return exit.code
	}
	a.printError(cmd, err)
	switch {
	case errors.As(err, &exit):
		return exit.code
	case errors.As(err, new(usageError)):
		return exitUsage
	case sandbox.CodeOf(err) == sandbox.CodeCanceled && ctx.Err() != nil:
		return exitAfterBreak
	}
	return exitFailure
}

// exitError ends the process with a code; err, where set, is printed.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err != nil {
		return e.err.Error()
	}
	return fmt.Sprintf("exit code %d", e.code)
}
func (e exitError) Unwrap() error { return e.err }

// usageError is a command line that makes no sense.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

func (a *app) printError(cmd *cobra.Command, err error) {
	fmt.Fprintf(a.err, "warren: %s\n", clean(err.Error()))
	var e *sandbox.Error
	switch {
	case errors.As(err, new(usageError)):
		if cmd != nil {
			fmt.Fprintf(a.err, "Try '%s --help'.\n", cmd.CommandPath())
		}
	case errors.As(err, &e):
		if h := a.hint(e); h != "" {
			fmt.Fprintln(a.err, h)
		}
	}
}

// hint says what to do next about an error, where more can be said than the
// daemon knew.
func (a *app) hint(e *sandbox.Error) string {
	switch e.Details[client.DetailNoDaemon] {
	case "missing", "refused":
		if strings.HasPrefix(a.host, "http") {
			return "Start one there with 'sudo warren serve --listen ADDR:PORT', or name another by --host or WARREN_HOST."
		}
		return "Start one with 'sudo warren serve', or name another by --host or WARREN_HOST."
	case "denied":
		return "The socket is for root: use sudo, or set WARREN_HOST=http://127.0.0.1:7070 and WARREN_API_KEY (sudo warren key create)."
	}
	switch {
	case e.Code == sandbox.CodeUnauthenticated:
		return "Set WARREN_API_KEY to a key of this daemon; 'sudo warren key create' on its host makes one."
	case e.Code == sandbox.CodeNotFound && e.Details["template"] == "base", e.Code == sandbox.CodeNotFound && strings.Contains(e.Message, `template "base"`):
		return "Build the default template with 'sudo warren template build --base'."
	case e.Code == sandbox.CodeNoCapacity:
		return "See 'warren top' for what uses the host, and 'warren rm' what is not needed."
	}
	return ""
}

// clean keeps control characters of what others wrote off the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return r
		}
		if r < 0x20 || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "warren",
		Short: "Sandboxes for what an agent wrote",
		Long: "Warren runs programs in sandboxes, by containers or gVisor.\n\n" +
			"It needs a daemon: start one with 'sudo warren serve'.",
		Version:       version.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRun: func(cmd *cobra.Command, _ []string) {
			if a.host == "" {
				a.host = a.getenv("WARREN_HOST")
			}
		},
	}
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetIn(a.in)
	root.SetVersionTemplate("warren {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := root.PersistentFlags()
	f.StringVarP(&a.host, "host", "H", "", "the daemon: unix:///PATH or http://HOST:PORT (default $WARREN_HOST, else "+client.DefaultHost+")")
	f.StringVar(&a.tenant, "tenant", "", "whose things to work with, on the unix socket (default \"default\")")
	f.BoolVar(&a.json, "json", false, "print data as JSON")
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Sandboxes:"},
		&cobra.Group{ID: "capture", Title: "Sleep, snapshots, forks and pools:"},
		&cobra.Group{ID: "inside", Title: "Inside a sandbox:"},
		&cobra.Group{ID: "host", Title: "Templates and the host:"},
	)
	add := func(group string, cmds ...*cobra.Command) {
		for _, c := range cmds {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", a.runCmd(), a.createCmd(), a.lsCmd(), a.inspectCmd(), a.rmCmd(), a.topCmd(), a.eventsCmd(), a.logsCmd(), a.timeoutCmd(), a.networkCmd())
	add("capture", a.suspendCmd(), a.unsuspendCmd(), a.hibernateCmd(), a.wakeCmd(), a.snapshotCmd(), a.forkCmd(), a.treeCmd(), a.poolCmd(), a.volumeCmd())
	add("inside", a.execCmd(), a.runCodeCmd(), a.shellCmd(), a.attachCmd(), a.cpCmd(), a.portCmd())
	add("host", a.templateCmd(), a.runtimesCmd(), a.keyCmd(), a.serveCmd(), a.tlsCmd(), a.doctorCmd(), a.proveCmd(), a.adviseCmd(), a.versionCmd())
	setArgErrors(root)
	return root
}

// setArgErrors makes a wrong number of arguments a usage error everywhere.
func setArgErrors(c *cobra.Command) {
	if check := c.Args; check != nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if err := check(cmd, args); err != nil {
				return usageError{err}
			}
			return nil
		}
	}
	for _, sub := range c.Commands() {
		setArgErrors(sub)
	}
	if c.HasSubCommands() && c.RunE == nil {
		c.Args = func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q for %q", args[0], cmd.CommandPath())
			}
			return nil
		}
		c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
}

// client makes the client of the daemon that the command line names.
func (a *app) client() (*client.Client, error) {
	if a.host == "" {
		a.host = a.getenv("WARREN_HOST") // completion runs without PersistentPreRun
	}
	key := a.getenv("WARREN_API_KEY")
	if key == "" {
		key = a.getenv("E2B_API_KEY")
	}
	c, err := client.New(a.host, client.Options{APIKey: key, Tenant: a.tenant, UserAgent: "warren/" + version.Version})
	if err != nil {
		return nil, usageError{err}
	}
	return c, nil
}

// withClient gives a command's body its client.
func (a *app) withClient(f func(ctx context.Context, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return f(cmd.Context(), c, args)
	}
}

// tty tells whether w is a terminal.
func tty(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
