package cli

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
)

func (a *app) volumeCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "volume", Aliases: []string{"volumes"}, Short: "Directories that outlive sandboxes: see create --volume"}
	cmd.AddCommand(&cobra.Command{
		Use: "create NAME", Short: "Make an empty volume, and print its id", Args: cobra.ExactArgs(1),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			v, err := c.CreateVolume(ctx, args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(v)
			}
			fmt.Fprintln(a.out, v.ID)
			return nil
		}),
	}, &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List volumes", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.Volumes(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(all)
			}
			rows := make([][]string, 0, len(all))
			for _, v := range all {
				rows = append(rows, []string{v.Name, v.ID, ago(v.CreatedAt)})
			}
			return a.table(a.out, []string{"NAME", "ID", "CREATED"}, rows)
		}),
	}, &cobra.Command{
		Use: "rm NAME|ID...", Aliases: []string{"remove"}, Short: "Remove volumes with all that is in them", Args: cobra.MinimumNArgs(1),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			return a.each(ctx, args, c.RemoveVolume)
		}),
	})
	return cmd
}

// parseVolume reads NAME:/path or NAME:/path:ro.
func parseVolume(s string) (wire.VolumeMount, error) {
	name, at, ok := strings.Cut(s, ":")
	at, readOnly := strings.CutSuffix(at, ":ro")
	if !ok || name == "" || !path.IsAbs(at) {
		return wire.VolumeMount{}, usagef("--volume %q: give NAME:/path, or NAME:/path:ro", s)
	}
	return wire.VolumeMount{Volume: name, Path: path.Clean(at), ReadOnly: readOnly}, nil
}
