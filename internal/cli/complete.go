package cli

import (
	"context"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/client"
)

// completeWait bounds what a press of the tab key may cost.
const completeWait = 2 * time.Second

// complete asks the daemon; one that does not answer completes nothing.
func (a *app) complete(f func(ctx context.Context, c *client.Client) []string) ([]string, cobra.ShellCompDirective) {
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), completeWait)
	defer cancel()
	return f(ctx, c), cobra.ShellCompDirectiveNoFileComp
}

// completeIDs completes sandboxes that are not named yet.
func (a *app) completeIDs(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string { return liveIDs(ctx, c, args, "") })
}

// completeID completes the first argument only.
func (a *app) completeID(cmd *cobra.Command, args []string, s string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeIDs(cmd, args, s)
}

// completePlaces completes ID: and local files.
func (a *app) completePlaces(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	ids, _ := a.complete(func(ctx context.Context, c *client.Client) []string { return liveIDs(ctx, c, nil, ":") })
	return ids, cobra.ShellCompDirectiveNoSpace
}

func liveIDs(ctx context.Context, c *client.Client, but []string, suffix string) []string {
	var out []string
	for sb, err := range c.Sandboxes(ctx, client.Filter{Live: true}) {
		if err != nil {
			break
		}
		if !slices.Contains(but, sb.ID) {
			out = append(out, cobra.CompletionWithDesc(sb.ID+suffix, string(sb.State)+" "+sb.Runtime+" "+sb.Template))
		}
	}
	return out
}

func (a *app) completeTemplates(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string {
		ts, err := c.Templates(ctx)
		if err != nil {
			return nil
		}
		var out []string
		for _, t := range ts {
			if !slices.Contains(args, t.Name) {
				out = append(out, cobra.CompletionWithDesc(t.Name, t.Source))
			}
		}
		return out
	})
}

func (a *app) completeSnapshots(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string {
		var out []string
		for s, err := range c.Snapshots(ctx, "") {
			if err != nil {
				break
			}
			if !slices.Contains(args, s.ID) && !slices.Contains(args, s.Name) {
				out = append(out, cobra.CompletionWithDesc(nameOf(s), string(s.Kind)+" of "+s.Source))
			}
		}
		return out
	})
}

func (a *app) completeRuntimes(_ *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string {
		rs, err := c.Runtimes(ctx)
		if err != nil {
			return nil
		}
		var out []string
		for _, r := range rs {
			if r.Available {
				out = append(out, cobra.CompletionWithDesc(r.Name, r.Capabilities.Boundary))
			}
		}
		return out
	})
}

func (a *app) completeKeys(_ *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string {
		ks, err := c.Keys(ctx)
		if err != nil {
			return nil
		}
		var out []string
		for _, k := range ks {
			out = append(out, cobra.CompletionWithDesc(k.ID, k.Name))
		}
		return out
	})
}

func (a *app) completePools(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.complete(func(ctx context.Context, c *client.Client) []string {
		all, err := c.Pools(ctx)
		if err != nil {
			return nil
		}
		var out []string
		for _, p := range all {
			if !slices.Contains(args, p.ID) {
				out = append(out, cobra.CompletionWithDesc(p.ID, p.Template+" on "+p.Runtime))
			}
		}
		return out
	})
}
