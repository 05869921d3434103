package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

func (a *app) lsCmd() *cobra.Command {
	var all, quiet bool
	var labels []string
	var f client.Filter
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list", "ps"},
		Short:   "List sandboxes",
		Args:    cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			f.Live = !all
			var err error
			if f.Metadata, err = parsePairs("label", labels); err != nil {
				return err
			}
			out := []wire.Sandbox{}
			for sb, err := range c.Sandboxes(ctx, f) {
				if err != nil {
					return err
				}
				out = append(out, sb)
			}
			switch {
			case a.json:
				return a.printJSON(out)
			case quiet:
				for _, sb := range out {
					fmt.Fprintln(a.out, sb.ID)
				}
				return nil
			}
			rows := make([][]string, 0, len(out))
			for _, sb := range out {
				state := string(sb.State)
				if sb.Reason != "" {
					state += " (" + string(sb.Reason) + ")"
				}
				ends := until(sb.ExpiresAt)
				if sb.State.Ended() {
					ends = "-"
				} else if sb.ExpiresAt != nil && sb.OnTimeout == sandbox.OnTimeoutHibernate {
					ends += " (hibernates)"
				}
				template := sb.Template
				if sb.Snapshot != "" {
					template += " (" + sb.Snapshot + ")"
				}
				rows = append(rows, []string{
					sb.ID, state, sb.Runtime, template,
					number(sb.Resources.CPUs), size(int64(sb.Resources.MemoryMiB) << 20), ago(sb.CreatedAt), ends, pairs(sb.Metadata),
				})
			}
			return a.table(a.out, []string{"ID", "STATE", "RUNTIME", "TEMPLATE", "CPUS", "MEMORY", "CREATED", "ENDS IN", "LABELS"}, rows)
		}),
	}
	fl := cmd.Flags()
	fl.BoolVarP(&all, "all", "a", false, "those that have ended, too")
	fl.BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	fl.StringArrayVarP(&labels, "label", "l", nil, "only those with label KEY=VALUE (repeatable)")
	fl.StringVar(&f.Template, "template", "", "only those of this template")
	fl.StringVar(&f.Runtime, "runtime", "", "only those of this runtime")
	cmd.RegisterFlagCompletionFunc("template", a.completeTemplates)
	cmd.RegisterFlagCompletionFunc("runtime", a.completeRuntimes)
	return cmd
}

func pairs(m map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		out = append(out, k+"="+m[k])
	}
	return strings.Join(out, " ")
}

func (a *app) inspectCmd() *cobra.Command {
	return &cobra.Command{
		Use:               "inspect ID...",
		Short:             "Show all about sandboxes, ended ones too",
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			out := []wire.Sandbox{}
			for _, id := range args {
				sb, err := c.Sandbox(ctx, id)
				if err != nil {
					return err
				}
				out = append(out, sb)
			}
			if a.json {
				if len(out) == 1 {
					return a.printJSON(out[0])
				}
				return a.printJSON(out)
			}
			for i, sb := range out {
				if i > 0 {
					fmt.Fprintln(a.out)
				}
				a.describe(sb)
			}
			return nil
		}),
	}
}

func (a *app) describe(sb wire.Sandbox) {
	line := func(name, format string, args ...any) {
		fmt.Fprintf(a.out, "%-12s %s\n", name, clean(fmt.Sprintf(format, args...)))
	}
	line("id", "%s", sb.ID)
	color := green
	if sb.State == sandbox.Failed {
		color = red
	} else if sb.State != sandbox.Running {
		color = yellow
	}
	fmt.Fprintf(a.out, "%-12s %s\n", "state", a.paint(a.out, color, string(sb.State)))
	if sb.Reason != "" {
		line("reason", "%s", sb.Reason)
	}
	if sb.Detail != "" {
		line("detail", "%s", sb.Detail)
	}
	line("runtime", "%s", sb.Runtime)
	line("template", "%s (%s)", sb.Template, sb.TemplateID)
	if sb.Snapshot != "" {
		line("snapshot", "%s", sb.Snapshot)
	}
	if sb.Parent != "" {
		line("fork of", "%s", sb.Parent)
	}
	limits := fmt.Sprintf("%s CPUs, %s memory, %d processes", number(sb.Resources.CPUs), size(int64(sb.Resources.MemoryMiB)<<20), sb.Resources.PIDs)
	if sb.Resources.DiskMiB > 0 {
		limits += ", " + size(int64(sb.Resources.DiskMiB)<<20) + " disk"
	}
	line("limits", "%s", limits)
	line("network", "%s", describeNetwork(sb.Network))
	if sb.Address != "" {
		line("address", "%s", sb.Address)
	}
	if sb.User != "" {
		line("user", "%s", sb.User)
	}
	if sb.Workdir != "" {
		line("workdir", "%s", sb.Workdir)
	}
	line("hostname", "%s", sb.Hostname)
	if len(sb.EnvNames) > 0 {
		line("environment", "%s", strings.Join(sb.EnvNames, " "))
	}
	if len(sb.Metadata) > 0 {
		line("labels", "%s", pairs(sb.Metadata))
	}
	if sb.OOMKills > 0 {
		line("oom kills", "%d", sb.OOMKills)
	}
	line("created", "%s (%s)", sb.CreatedAt.Local().Format("2006-01-02 15:04:05"), ago(sb.CreatedAt))
	if sb.StartedAt != nil {
		line("start", "%s, in %s", sb.Start, shortDuration(sb.StartedAt.Sub(sb.CreatedAt)))
	}
	if sb.SuspendedAt != nil {
		line("suspended", "%s (%s)", sb.SuspendedAt.Local().Format("2006-01-02 15:04:05"), ago(*sb.SuspendedAt))
	}
	if sb.HibernatedAt != nil {
		line("hibernated", "%s (%s)", sb.HibernatedAt.Local().Format("2006-01-02 15:04:05"), ago(*sb.HibernatedAt))
	}
	if sb.IdleTimeout > 0 && !sb.State.Ended() {
		line("idle", "hibernates after %s", shortDuration(time.Duration(sb.IdleTimeout*float64(time.Second))))
	}
	switch {
	case sb.EndedAt != nil:
		line("ended", "%s (%s)", sb.EndedAt.Local().Format("2006-01-02 15:04:05"), ago(*sb.EndedAt))
	case sb.ExpiresAt != nil:
		what := "ends in"
		if sb.OnTimeout == sandbox.OnTimeoutHibernate {
			what = "sleeps in"
		}
		line(what, "%s", until(sb.ExpiresAt))
	}
}

func (a *app) logsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:               "logs ID",
		Short:             "Print what a sandbox's agent and start command wrote",
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r, err := c.Logs(ctx, args[0], follow)
			if err != nil {
				return err
			}
			defer r.Close()
			_, err = io.Copy(a.out, r)
			if follow && ctx.Err() != nil {
				return exitError{code: exitAfterBreak}
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "stay until the sandbox ends")
	return cmd
}

func (a *app) eventsCmd() *cobra.Command {
	var after int64
	cmd := &cobra.Command{
		Use:               "events [ID]",
		Short:             "Follow what happens to sandboxes",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			id := ""
			if len(args) == 1 {
				id = args[0]
			}
			err := c.Events(ctx, id, after, func(e client.Event) error {
				if a.json {
					return a.printJSON(e)
				}
				what := fmt.Sprintf("%s → %s", e.From, e.To)
				switch {
				case e.Type != sandbox.EventState:
					what = string(e.Type)
				case e.From == "":
					what = string(e.To)
				}
				if e.Reason != "" {
					what += " (" + string(e.Reason) + ")"
				}
				if e.Detail != "" {
					what += ": " + e.Detail
				}
				_, err := fmt.Fprintf(a.out, "%s  %s  %s\n", e.At.Local().Format("15:04:05.000"), e.Sandbox, clean(what))
				return err
			})
			if ctx.Err() != nil {
				return exitError{code: exitAfterBreak}
			}
			return err
		}),
	}
	cmd.Flags().Int64Var(&after, "after", -1, "begin after the event of this number; 0 is from the oldest kept")
	return cmd
}
