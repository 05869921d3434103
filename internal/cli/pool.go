package cli

import (
	"context"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
)

func (a *app) poolCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "pool", Aliases: []string{"pools"}, Short: "Sandboxes that wait, ready, to be claimed by create and run"}
	cmd.AddCommand(a.poolSetCmd(), a.poolLsCmd(), a.poolInspectCmd(), a.poolRmCmd())
	return cmd
}

func (a *app) poolSetCmd() *cobra.Command {
	var runtime, mem, disk string
	var cpus float64
	var pids, ready int
	cmd := &cobra.Command{
		Use:   "set [flags] TEMPLATE",
		Short: "Keep sandboxes of a template ready, and print the pool's id",
		Long: "Keeps sandboxes of a template ready: their agent answers, their start command is up.\n" +
			"A create or run that comes to the same template, runtime and limits gets one of\n" +
			"them at once, and another is made in the background.",
		Args:              cobra.ExactArgs(1),
		Example:           "  warren pool set base --runtime gvisor --ready 5\n  warren pool set base --ready 0",
		ValidArgsFunction: a.completeTemplates,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if ready < 0 || ready > 1000 {
				return usagef("give --ready, 0 to 1000")
			}
			r := wire.SetPool{Template: args[0], Runtime: runtime, Ready: ready}
			r.Resources.CPUs, r.Resources.PIDs = cpus, pids
			for _, f := range []struct {
				value string
				mib   *int
			}{{mem, &r.Resources.MemoryMiB}, {disk, &r.Resources.DiskMiB}} {
				if f.value == "" {
					continue
				}
				var err error
				if *f.mib, err = parseMemory(f.value); err != nil {
					return err
				}
			}
			p, err := c.SetPool(ctx, r)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			fmt.Fprintln(a.out, p.ID)
			return nil
		}),
	}
	fl := cmd.Flags()
	fl.IntVar(&ready, "ready", -1, "how many to keep ready, 0 to 1000; 0 ends those that there are")
	fl.StringVar(&runtime, "runtime", "", "container or gvisor (default: gvisor where it can run)")
	fl.StringVarP(&mem, "mem", "m", "", "memory limit of each, such as 512M or 2G")
	fl.StringVar(&mem, "memory", "", "the same as --mem")
	fl.Float64Var(&cpus, "cpus", 0, "CPU limit of each, such as 0.5 or 2")
	fl.IntVar(&pids, "pids", 0, "limit of processes and threads of each")
	fl.StringVar(&disk, "disk", "", "limit of what each may write to its root filesystem, such as 2G")
	fl.MarkHidden("memory")
	cmd.RegisterFlagCompletionFunc("runtime", a.completeRuntimes)
	return cmd
}

func (a *app) poolLsCmd() *cobra.Command {
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List pools", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.Pools(ctx)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return a.printJSON(all)
			case quiet:
				for _, p := range all {
					fmt.Fprintln(a.out, p.ID)
				}
				return nil
			}
			rows := make([][]string, 0, len(all))
			for _, p := range all {
				rows = append(rows, []string{
					p.ID, p.Template, p.Runtime, limits(p.Resources),
					fmt.Sprintf("%d/%d", p.Available, p.Ready), poolState(p), ago(p.CreatedAt),
				})
			}
			return a.table(a.out, []string{"ID", "TEMPLATE", "RUNTIME", "LIMITS", "READY", "STATE", "CREATED"}, rows)
		}),
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	return cmd
}

func limits(r wire.Resources) string {
	return strconv.FormatFloat(r.CPUs, 'g', -1, 64) + " CPU, " + size(int64(r.MemoryMiB)<<20)
}

// poolState says in a few words what a pool does.
func poolState(p wire.Pool) string {
	switch {
	case p.Error != nil:
		return p.Error.Message
	case p.Ending > 0:
		return fmt.Sprintf("ending %d", p.Ending)
	case p.Available < p.Ready:
		return "filling"
	case p.Ready == 0:
		return "off"
	}
	return "ready"
}

func (a *app) poolInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect POOL", Short: "Show all about a pool, by id or template, as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completePools,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			p, err := c.Pool(ctx, args[0])
			if err != nil {
				return err
			}
			return a.printJSON(p)
		}),
	}
}

func (a *app) poolRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm POOL...", Short: "Remove pools, by id or template, and their members; what was claimed goes on",
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completePools,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			return a.each(ctx, args, c.RemovePool)
		}),
	}
}
