package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// createFlags are what create and run ask of a new sandbox.
type createFlags struct {
	template, runtime, mem, disk, timeout    string
	cpus                                     float64
	pids                                     int
	net                                      string
	allow, deny                              []string
	env, envFile, ephemeral, labels, volumes []string
	user, workdir, hostname                  string
	snapshot, onTimeout, hibernateKind, idle string
	public                                   bool
	manualWake                               bool
}

func (f *createFlags) register(a *app, cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.template, "template", "", "template to make it from (default \"base\")")
	fl.StringVar(&f.runtime, "runtime", "", "container or gvisor (default: gvisor where it can run)")
	fl.StringVarP(&f.mem, "mem", "m", "", "memory limit, such as 512M or 2G")
	fl.Float64Var(&f.cpus, "cpus", 0, "CPU limit, such as 0.5 or 2")
	fl.IntVar(&f.pids, "pids", 0, "limit of processes and threads")
	fl.StringVar(&f.disk, "disk", "", "limit of what it may write to its root filesystem, such as 2G")
	fl.StringVar(&f.timeout, "timeout", "", "end it after this time, such as 90s or 1h (default: never)")
	fl.StringVar(&f.onTimeout, "on-timeout", "", "what happens when --timeout runs out: kill (default) or hibernate")
	fl.StringVar(&f.hibernateKind, "hibernate-kind", "", "what it keeps when it hibernates by itself: full (memory and disk; default) or disk, of which it boots")
	fl.StringArrayVar(&f.volumes, "volume", nil, "mount a volume, NAME:/path or NAME:/path:ro (repeatable)")
	fl.BoolVar(&f.manualWake, "manual-wake", false, "traffic to its ports does not wake it: only wake, exec and files do")
	fl.StringVar(&f.idle, "idle-timeout", "", "hibernate it after this time without a request, a running command or an open stream (default: never)")
	fl.StringVar(&f.snapshot, "snapshot", "", "snapshot to start from, by name or id")
	fl.StringVar(&f.net, "net", "", "none, or egress: out to public addresses (default)")
	fl.StringArrayVar(&f.allow, "allow-net", nil, "let it reach a private ADDRESS, PREFIX or DOMAIN, with :PORT where only one is meant (repeatable)")
	fl.StringArrayVar(&f.deny, "deny-net", nil, "keep it from an ADDRESS, PREFIX or DOMAIN[:PORT] (repeatable)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment: NAME=VALUE, or NAME for the value that it has here (repeatable)")
	fl.StringArrayVar(&f.envFile, "env-file", nil, "read environment from a file of NAME=VALUE lines (repeatable)")
	fl.StringArrayVar(&f.ephemeral, "ephemeral-env", nil, "environment as of --env that no fork of it and no sandbox of a snapshot of it is given (repeatable)")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label KEY=VALUE to find it by (repeatable)")
	fl.StringVarP(&f.user, "user", "u", "", "user of its commands")
	fl.StringVarP(&f.workdir, "workdir", "w", "", "directory of its commands")
	fl.StringVar(&f.hostname, "hostname", "", "host name (default: its id)")
	fl.BoolVar(&f.public, "public", false, "open its ports to everybody who reaches the proxy (default: only with an API key or its traffic token)")
	cmd.RegisterFlagCompletionFunc("template", a.completeTemplates)
	cmd.RegisterFlagCompletionFunc("snapshot", a.completeSnapshots)
	cmd.RegisterFlagCompletionFunc("on-timeout", cobra.FixedCompletions([]string{string(sandbox.OnTimeoutKill), string(sandbox.OnTimeoutHibernate)}, cobra.ShellCompDirectiveNoFileComp))
	cmd.RegisterFlagCompletionFunc("runtime", a.completeRuntimes)
	cmd.RegisterFlagCompletionFunc("net", cobra.FixedCompletions([]string{"none", "egress"}, cobra.ShellCompDirectiveNoFileComp))
}

func (f *createFlags) request(a *app) (wire.CreateSandbox, error) {
	r := wire.CreateSandbox{
		Template: f.template, Runtime: f.runtime, User: f.user, Workdir: f.workdir, Hostname: f.hostname, Snapshot: f.snapshot,
		PublicTraffic: f.public, ManualWake: f.manualWake,
	}
	r.Resources.CPUs, r.Resources.PIDs = f.cpus, f.pids
	var err error
	if f.mem != "" {
		if r.Resources.MemoryMiB, err = parseMemory(f.mem); err != nil {
			return r, err
		}
	}
	if f.disk != "" {
		if r.Resources.DiskMiB, err = parseMemory(f.disk); err != nil {
			return r, err
		}
	}
	if f.timeout != "" {
		d, err := parseTimeout(f.timeout)
		if err != nil {
			return r, err
		}
		r.Timeout = d.Seconds()
	}
	for _, s := range f.volumes {
		v, err := parseVolume(s)
		if err != nil {
			return r, err
		}
		r.Volumes = append(r.Volumes, v)
	}
	if r.HibernateKind, err = parseKind(f.hibernateKind); err != nil {
		return r, usagef("--hibernate-kind %q: give full or disk", f.hibernateKind)
	}
	switch r.OnTimeout = sandbox.OnTimeout(f.onTimeout); r.OnTimeout {
	case "", sandbox.OnTimeoutKill, sandbox.OnTimeoutHibernate:
	default:
		return r, usagef("--on-timeout %q: give kill or hibernate", f.onTimeout)
	}
	if f.idle != "" {
		d, err := parseTimeout(f.idle)
		if err != nil {
			return r, err
		}
		r.IdleTimeout = d.Seconds()
	}
	if r.Network, err = networkOf(f.net, f.allow, f.deny); err != nil {
		return r, err
	}
	if r.Env, err = a.environment(f.envFile, f.env); err != nil {
		return r, err
	}
	ephemeral := map[string]string{}
	if err := parseEnv(f.ephemeral, os.LookupEnv, ephemeral); err != nil {
		return r, err
	}
	maps.Copy(r.Env, ephemeral)
	r.EphemeralEnv = slices.Sorted(maps.Keys(ephemeral))
	r.Metadata, err = parsePairs("label", f.labels)
	return r, err
}

func networkOf(mode string, allow, deny []string) (n wire.Network, err error) {
	switch mode {
	case "", string(sandbox.NetworkEgress), string(sandbox.NetworkNone):
		n.Mode = sandbox.NetworkMode(mode)
	default:
		return n, usagef("--net %q: give none or egress", mode)
	}
	if n.Allow, err = parseRules(allow); err == nil {
		n.Deny, err = parseRules(deny)
	}
	return n, err
}

func (a *app) createCmd() *cobra.Command {
	var f createFlags
	cmd := &cobra.Command{
		Use:   "create [flags]",
		Short: "Make a sandbox and print its id",
		Args:  cobra.NoArgs,
		Example: "  warren create --runtime container --mem 512M --timeout 1h\n" +
			"  id=$(warren create) && warren exec $id -- python3 -c 'print(6*7)'",
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			r, err := f.request(a)
			if err != nil {
				return err
			}
			sb, err := c.CreateSandbox(ctx, r)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(sb)
			}
			fmt.Fprintln(a.out, sb.ID)
			return nil
		}),
	}
	f.register(a, cmd)
	return cmd
}

func (a *app) rmCmd() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:               "rm ID...",
		Aliases:           []string{"kill"},
		Short:             "End sandboxes and remove all that they hold",
		ValidArgsFunction: a.completeIDs,
		Args: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return fmt.Errorf("give ids, or --all")
			}
			return nil
		},
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if all {
				for sb, err := range c.Sandboxes(ctx, client.Filter{Live: true}) {
					if err != nil {
						return err
					}
					args = append(args, sb.ID)
				}
			}
			return a.each(ctx, args, c.Kill)
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "every live sandbox of the tenant")
	return cmd
}

// each does f to every one of ids and prints those that it was done to. An
// error of one is printed and does not keep the rest from it.
func (a *app) each(ctx context.Context, ids []string, f func(ctx context.Context, id string) error) error {
	var failed error
	done := make([]string, 0, len(ids))
	for _, id := range ids {
		if err := f(ctx, id); err != nil {
			if ctx.Err() != nil || noDaemon(err) {
				return err
			}
			a.printError(nil, err)
			failed = exitError{code: exitFailure}
			continue
		}
		done = append(done, id)
		if !a.json {
			fmt.Fprintln(a.out, id)
		}
	}
	if a.json {
		if err := a.printJSON(done); err != nil {
			return err
		}
	}
	return failed
}

func noDaemon(err error) bool {
	var e *sandbox.Error
	return errors.As(err, &e) && e.Details[client.DetailNoDaemon] != ""
}

func (a *app) timeoutCmd() *cobra.Command {
	return &cobra.Command{
		Use:               "timeout ID TIME",
		Short:             "Set a sandbox's time to live anew, from now; 0 is no end",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			d, err := parseTimeout(args[1])
			if err != nil {
				return err
			}
			sb, err := c.SetTimeout(ctx, args[0], d)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(sb)
			}
			fmt.Fprintf(a.out, "%s ends in %s\n", sb.ID, until(sb.ExpiresAt))
			return nil
		}),
	}
}

func (a *app) networkCmd() *cobra.Command {
	var allow, deny []string
	cmd := &cobra.Command{
		Use:   "network ID none|egress",
		Short: "Replace what a sandbox may reach",
		Args:  cobra.ExactArgs(2),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, s string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return []string{"none", "egress"}, cobra.ShellCompDirectiveNoFileComp
			}
			return a.completeIDs(cmd, args, s)
		},
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			n, err := networkOf(args[1], allow, deny)
			if err != nil {
				return err
			}
			sb, err := c.SetNetwork(ctx, args[0], n)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(sb)
			}
			fmt.Fprintf(a.out, "%s: %s\n", sb.ID, describeNetwork(sb.Network))
			return nil
		}),
	}
	cmd.Flags().StringArrayVar(&allow, "allow-net", nil, "let it reach a private ADDRESS, PREFIX or DOMAIN[:PORT] (repeatable)")
	cmd.Flags().StringArrayVar(&deny, "deny-net", nil, "keep it from an ADDRESS, PREFIX or DOMAIN[:PORT] (repeatable)")
	return cmd
}

func describeNetwork(n wire.Network) string {
	s := string(n.Mode)
	list := func(word string, rules []wire.EgressRule) {
		var out []string
		for _, r := range rules {
			d := r.CIDR + r.Domain
			if r.Port != 0 {
				d = fmt.Sprintf("%s:%d", d, r.Port)
			}
			out = append(out, d)
		}
		if out != nil {
			s += ", " + word + " " + strings.Join(out, " ")
		}
	}
	list("allow", n.Allow)
	list("deny", n.Deny)
	return s
}
