package cli

import (
	"context"
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/version"
)

func (a *app) runtimesCmd() *cobra.Command {
	return &cobra.Command{
		Use: "runtimes", Short: "Tell which runtimes this host can run, and why not", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			rs, err := c.Runtimes(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(rs)
			}
			rows := make([][]string, 0, len(rs))
			for _, r := range rs {
				name := r.Name
				if r.Default {
					name += " (default)"
				}
				rows = append(rows, []string{name, yesNo(r.Available), abilities(r), r.Capabilities.Boundary})
			}
			if err := a.table(a.out, []string{"RUNTIME", "RUNS HERE", "CAN", "BOUNDARY"}, rows); err != nil {
				return err
			}
			for _, r := range rs {
				if r.Error != nil {
					fmt.Fprintf(a.out, "\n%s: %s\n", r.Name, clean(r.Error.Message))
				}
			}
			return nil
		}),
	}
}

func abilities(r wire.Runtime) string {
	var out []string
	c := r.Capabilities
	for _, ab := range []struct {
		has  bool
		name string
	}{
		{c.ArbitraryELF, "any program"}, {c.Suspend, "suspend"}, {c.DiskCapture, "disk capture"}, {c.FullCapture, "full capture"},
		{c.DiskLimit, "disk limit"}, {c.HidesHost, "hides host"},
	} {
		if ab.has {
			out = append(out, ab.name)
		}
	}
	return strings.Join(out, ", ")
}

func (a *app) keyCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "key", Aliases: []string{"keys"}, Short: "API keys for the TCP address"}
	cmd.AddCommand(
		&cobra.Command{
			Use: "create [NAME]", Short: "Make a key and print it: it is told this once", Args: cobra.MaximumNArgs(1),
			RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
				k, err := c.CreateKey(ctx, strings.Join(args, ""))
				if err != nil {
					return err
				}
				if a.json {
					return a.printJSON(k)
				}
				fmt.Fprintln(a.out, k.Key)
				return nil
			}),
		},
		&cobra.Command{
			Use: "ls", Aliases: []string{"list"}, Short: "List keys", Args: cobra.NoArgs,
			RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
				ks, err := c.Keys(ctx)
				if err != nil {
					return err
				}
				if a.json {
					return a.printJSON(ks)
				}
				rows := make([][]string, 0, len(ks))
				for _, k := range ks {
					used := "never"
					if k.LastUsedAt != nil {
						used = ago(*k.LastUsedAt)
					}
					rows = append(rows, []string{k.ID, k.Name, k.Tenant, k.Prefix + "…", ago(k.CreatedAt), used})
				}
				return a.table(a.out, []string{"ID", "NAME", "TENANT", "KEY", "CREATED", "LAST USED"}, rows)
			}),
		},
		&cobra.Command{
			Use: "rm ID...", Short: "Revoke keys", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeKeys,
			RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
				for _, id := range args {
					if err := c.RemoveKey(ctx, id); err != nil {
						return err
					}
					if !a.json {
						fmt.Fprintln(a.out, id)
					}
				}
				if a.json {
					return a.printJSON(args)
				}
				return nil
			}),
		},
	)
	return cmd
}

// versions is what version prints.
type versions struct {
	Version string        `json:"version"`
	Go      string        `json:"go"`
	OS      string        `json:"os"`
	Arch    string        `json:"arch"`
	Host    string        `json:"host"`
	Daemon  *wire.Version `json:"daemon,omitempty"` // absent: none answers
}

func (a *app) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version of the program, and of the daemon if it answers", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			v := versions{Version: version.Version, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH, Host: c.Host()}
			d, err := c.Version(ctx)
			if err == nil {
				v.Daemon = &d
			}
			if a.json {
				return a.printJSON(v)
			}
			fmt.Fprintf(a.out, "warren %s (%s, %s/%s)\n", v.Version, v.Go, v.OS, v.Arch)
			if err != nil {
				fmt.Fprintf(a.out, "daemon: %s\n", clean(err.Error()))
				return nil
			}
			fmt.Fprintf(a.out, "daemon %s at %s\n", d.Version, v.Host)
			return nil
		}),
	}
}
