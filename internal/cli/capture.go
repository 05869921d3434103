package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// eachCmd is a command that does one thing to each sandbox that it is given.
func (a *app) eachCmd(name, short, long string, do func(c *client.Client) func(context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use:               name + " ID...",
		Short:             short,
		Long:              long,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeIDs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			return a.each(ctx, args, do(c))
		}),
	}
}

func (a *app) suspendCmd() *cobra.Command {
	return a.eachCmd("suspend", "Freeze sandboxes in RAM: they keep their memory and get no CPU time", "",
		func(c *client.Client) func(context.Context, string) error { return c.Suspend })
}

func (a *app) unsuspendCmd() *cobra.Command {
	return a.eachCmd("unsuspend", "Let suspended sandboxes go on", "",
		func(c *client.Client) func(context.Context, string) error { return c.Unsuspend })
}

func (a *app) hibernateCmd() *cobra.Command {
	var kind string
	cmd := a.eachCmd("hibernate", "Put sandboxes on storage: they hold no memory and no processes",
		"Puts the memory and disk of sandboxes on storage. A hibernated sandbox holds no\n"+
			"memory, no processes and no network slot; the next request to it wakes it. One\n"+
			"that keeps its disk alone (--kind disk) boots then. The command is done when what\n"+
			"is kept is safe; the host has its memory back a moment later.",
		func(c *client.Client) func(context.Context, string) error {
			return func(ctx context.Context, id string) error {
				k, err := parseKind(kind)
				if err != nil {
					return err
				}
				return c.HibernateAs(ctx, id, k)
			}
		})
	cmd.Flags().StringVar(&kind, "kind", "", "what they keep: full (memory and disk) or disk (default: what they were made for, else full)")
	return cmd
}

func (a *app) wakeCmd() *cobra.Command {
	return a.eachCmd("wake", "Wake hibernated sandboxes",
		"Wakes hibernated sandboxes. Any other request to one does so as well.",
		func(c *client.Client) func(context.Context, string) error { return c.Wake })
}

// parseKind reads a --kind flag.
func parseKind(s string) (sandbox.SnapshotKind, error) {
	switch k := sandbox.SnapshotKind(s); k {
	case "", sandbox.SnapshotDisk, sandbox.SnapshotFull:
		return k, nil
	}
	return "", usagef("--kind %q: give full or disk", s)
}

func kindFlag(cmd *cobra.Command, kind *string) {
	cmd.Flags().StringVar(kind, "kind", "", "full: memory and processes, too; disk: the root filesystem (default: full where the runtime can)")
	cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions([]string{string(sandbox.SnapshotFull), string(sandbox.SnapshotDisk)}, cobra.ShellCompDirectiveNoFileComp))
}

func (a *app) snapshotCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "snapshot", Aliases: []string{"snapshots"}, Short: "Captures of sandboxes to start others from"}
	cmd.AddCommand(a.snapshotCreateCmd(), a.snapshotLsCmd(), a.snapshotInspectCmd(), a.snapshotRmCmd())
	return cmd
}

func (a *app) snapshotCreateCmd() *cobra.Command {
	var name, kind string
	var labels []string
	cmd := &cobra.Command{
		Use:   "create [flags] ID",
		Short: "Take a snapshot of a sandbox, which goes on, and print its id",
		Args:  cobra.ExactArgs(1),
		Example: "  warren snapshot create --name ready $id\n" +
			"  warren run --snapshot ready -- ./test.sh",
		ValidArgsFunction: a.completeID,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r := wire.CreateSnapshot{Name: name}
			var err error
			if r.Kind, err = parseKind(kind); err != nil {
				return err
			}
			if r.Metadata, err = parsePairs("label", labels); err != nil {
				return err
			}
			s, err := c.CreateSnapshot(ctx, args[0], r)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(s)
			}
			fmt.Fprintln(a.out, s.ID)
			return nil
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&name, "name", "", "name to find it by, unique among the tenant's snapshots")
	fl.StringArrayVarP(&labels, "label", "l", nil, "label KEY=VALUE (repeatable)")
	kindFlag(cmd, &kind)
	return cmd
}

// nameOf gives what a snapshot goes by.
func nameOf(s wire.Snapshot) string {
	if s.Name != "" {
		return s.Name
	}
	return s.ID
}

func (a *app) snapshotLsCmd() *cobra.Command {
	var quiet bool
	var source string
	cmd := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List snapshots", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			out := []wire.Snapshot{}
			for s, err := range c.Snapshots(ctx, source) {
				if err != nil {
					return err
				}
				out = append(out, s)
			}
			switch {
			case a.json:
				return a.printJSON(out)
			case quiet:
				for _, s := range out {
					fmt.Fprintln(a.out, s.ID)
				}
				return nil
			}
			rows := make([][]string, 0, len(out))
			for _, s := range out {
				rows = append(rows, []string{s.Name, s.ID, string(s.Kind), s.Source, s.Runtime, s.Template, size(s.SizeBytes), ago(s.CreatedAt), pairs(s.Metadata)})
			}
			return a.table(a.out, []string{"NAME", "ID", "KIND", "SOURCE", "RUNTIME", "TEMPLATE", "SIZE", "CREATED", "LABELS"}, rows)
		}),
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print ids only")
	cmd.Flags().StringVar(&source, "source", "", "only those of this sandbox")
	cmd.RegisterFlagCompletionFunc("source", a.completeIDs)
	return cmd
}

func (a *app) snapshotInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show all about a snapshot, as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeSnapshots,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			s, err := c.Snapshot(ctx, args[0])
			if err != nil {
				return err
			}
			return a.printJSON(s)
		}),
	}
}

func (a *app) snapshotRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove snapshots that nothing needs any more", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeSnapshots,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			return a.each(ctx, args, c.RemoveSnapshot)
		}),
	}
}

func (a *app) forkCmd() *cobra.Command {
	var count int
	var kind, timeout string
	var env, envFile, labels []string
	cmd := &cobra.Command{
		Use:   "fork [flags] ID",
		Short: "Make copies of a sandbox, which goes on, and print their ids",
		Long: "Makes copies of a sandbox, all from one capture, and prints their ids; the sandbox\n" +
			"goes on. Where some could not be made, their errors are printed and the exit code\n" +
			"is 1; the others stay.",
		Args:              cobra.ExactArgs(1),
		Example:           "  warren fork $id\n  warren fork -n 10 --env SEED --label try=2 $id",
		ValidArgsFunction: a.completeID,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if count < 1 || count > 100 {
				return usagef("-n %d: give 1 to 100", count)
			}
			r := wire.Fork{Count: count}
			var err error
			if r.Kind, err = parseKind(kind); err != nil {
				return err
			}
			if r.Env, err = a.environment(envFile, env); err != nil {
				return err
			}
			if r.Metadata, err = parsePairs("label", labels); err != nil {
				return err
			}
			if timeout != "" {
				d, err := parseTimeout(timeout)
				if err != nil {
					return err
				}
				r.Timeout = d.Seconds()
			}
			out, err := c.Fork(ctx, args[0], r)
			if err != nil {
				return err
			}
			var failed error
			for _, f := range out.Forks {
				switch {
				case f.Error != nil:
					a.printError(nil, f.Error.Err())
					failed = exitError{code: exitFailure}
				case f.Sandbox != nil && !a.json:
					fmt.Fprintln(a.out, f.Sandbox.ID)
				}
			}
			if a.json {
				if err := a.printJSON(out); err != nil {
					return err
				}
			}
			return failed
		}),
	}
	fl := cmd.Flags()
	fl.IntVarP(&count, "count", "n", 1, "how many, 1 to 100")
	fl.StringArrayVarP(&env, "env", "e", nil, "environment beside the sandbox's: NAME=VALUE, or NAME for the value that it has here (repeatable)")
	fl.StringArrayVar(&envFile, "env-file", nil, "read environment from a file of NAME=VALUE lines (repeatable)")
	fl.StringArrayVarP(&labels, "label", "l", nil, "label KEY=VALUE of theirs, instead of the sandbox's (repeatable)")
	fl.StringVar(&timeout, "timeout", "", "end them after this time, such as 90s or 1h (default: never)")
	kindFlag(cmd, &kind)
	return cmd
}

func (a *app) treeCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "tree [ID]",
		Short: "Draw what came from what: sandboxes and snapshots, their state, age, own disk and memory",
		Args:  cobra.MaximumNArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, s string) ([]string, cobra.ShellCompDirective) {
			return a.completeID(cmd, args, s)
		},
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			root := ""
			if len(args) == 1 {
				root = args[0]
			}
			nodes, err := c.Tree(ctx, root)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(wire.Tree{Nodes: nodes})
			}
			return a.drawTree(a.out, nodes, time.Now())
		}),
	}
}

// drawTree draws nodes, of which a parent stands before its children.
func (a *app) drawTree(w io.Writer, nodes []wire.TreeNode, now time.Time) error {
	children := map[string][]wire.TreeNode{}
	for _, n := range nodes {
		children[n.Parent] = append(children[n.Parent], n)
	}
	// A fan or a fork of a fork of a fork may be deep: no recursion.
	type place struct {
		node     wire.TreeNode
		branch   string // what leads to it
		trunk    string // what leads to its children
		children []wire.TreeNode
	}
	var rows [][]string
	var todo []place
	push := func(kids []wire.TreeNode, trunk string, top bool) {
		for i := len(kids) - 1; i >= 0; i-- {
			p := place{node: kids[i], children: children[kids[i].ID]}
			switch {
			case top:
			case i == len(kids)-1:
				p.branch, p.trunk = trunk+"└─ ", trunk+"   "
			default:
				p.branch, p.trunk = trunk+"├─ ", trunk+"│  "
			}
			todo = append(todo, p)
		}
	}
	push(children[""], "", true)
	for len(todo) > 0 {
		p := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		rows = append(rows, treeRow(p.branch, p.node, now))
		push(p.children, p.trunk, false)
	}
	return a.table(w, []string{"TREE", "STATE", "AGE", "DISK", "MEMORY"}, rows)
}

func treeRow(branch string, n wire.TreeNode, now time.Time) []string {
	label, state, memory := n.ID, string(n.State), "-"
	if n.Kind == wire.TreeSnapshot {
		state = string(n.SnapshotKind)
		if n.Name != "" {
			label = n.Name + " (" + n.ID + ")"
		}
	}
	if n.MemoryBytes > 0 {
		memory = size(n.MemoryBytes)
	}
	return []string{branch + label, state, shortDuration(max(now.Sub(n.CreatedAt), 0)), size(n.DiskBytes), memory}
}
