package cli

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/prove"
)

func (a *app) adviseCmd() *cobra.Command {
	var answers prove.Answers
	var report string
	cmd := &cobra.Command{
		Use:   "advise",
		Short: "Pick a runtime from five questions and what was measured",
		Long: "Asks five questions and names a runtime, with the reasons and what the last\n" +
			"'warren prove' measured on this host. With the answers as flags it asks nothing.\n" +
			"It works without a daemon, by the last report alone.",
		Example: "  warren advise\n  warren advise --emits any --trust strangers --state fork --where cloud --abuse limits",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.ask(&answers); err != nil {
				return err
			}
			if err := answers.Check(); err != nil {
				return usageError{err}
			}
			facts := prove.Facts{}
			var path string
			var err error
			if report != "" {
				path = report
				facts.Report, err = prove.Load(report)
			} else if dir, derr := prove.Dir(a.getenv); derr == nil {
				facts.Report, path, err = prove.Latest(dir)
			}
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			known, err := c.Runtimes(cmd.Context())
			switch {
			case err == nil:
				facts.Runtimes = []prove.Fact{}
				for _, k := range known {
					f := prove.Fact{Name: k.Name, Available: k.Available}
					if k.Error != nil {
						f.Why = k.Error.Message
					}
					facts.Runtimes = append(facts.Runtimes, f)
				}
			case !noDaemon(err):
				return err
			}
			advice, err := prove.Advise(answers, facts)
			if err != nil {
				return usageError{err}
			}
			if a.json {
				return a.printJSON(advice)
			}
			a.printAdvice(advice, facts.Report, path)
			return nil
		},
	}
	for _, q := range prove.Questions {
		var ids []string
		for _, ch := range q.Choices {
			ids = append(ids, ch.ID)
		}
		cmd.Flags().StringVar(answers.Field(q.ID), q.ID, "", strings.ToLower(q.Text[:1])+strings.TrimSuffix(q.Text[1:], "?")+": "+strings.Join(ids, ", "))
		cmd.RegisterFlagCompletionFunc(q.ID, cobra.FixedCompletions(ids, cobra.ShellCompDirectiveNoFileComp))
	}
	cmd.Flags().StringVar(&report, "report", "", "go by this report of warren prove (default: the last one)")
	return cmd
}

// ask asks what no flag answered. Questions go to stderr, so that --json has
// stdout for itself.
func (a *app) ask(answers *prove.Answers) error {
	in := bufio.NewReader(io.LimitReader(a.in, 64<<10))
	for _, q := range prove.Questions {
		field := answers.Field(q.ID)
		if *field != "" {
			continue
		}
		fmt.Fprintln(a.err, q.Text)
		for i, c := range q.Choices {
			fmt.Fprintf(a.err, "  %d  %s\n", i+1, c.Text)
		}
		for *field == "" {
			fmt.Fprintf(a.err, "1-%d: ", len(q.Choices))
			line, err := in.ReadString('\n')
			line = strings.TrimSpace(line)
			for i, c := range q.Choices {
				if line == strconv.Itoa(i+1) || line == c.ID {
					*field = c.ID
				}
			}
			if *field == "" && err != nil {
				fmt.Fprintln(a.err)
				if errors.Is(err, io.EOF) {
					return usagef("there is no answer to %q: give it by --%s", q.Text, q.ID)
				}
				return err
			}
		}
	}
	return nil
}

func (a *app) printAdvice(ad prove.Advice, r *prove.Report, path string) {
	list := func(title string, lines []string) {
		if len(lines) == 0 {
			return
		}
		fmt.Fprintf(a.out, "\n%s\n", title)
		for _, l := range lines {
			fmt.Fprintf(a.out, "  - %s\n", clean(l))
		}
	}
	name := ad.Runtime
	if name == "" {
		name = "none"
	}
	fmt.Fprintf(a.out, "runtime: %s\n", a.paint(a.out, bold, name))
	list("Why", ad.Reasons)
	list("How", ad.Settings)
	list("Measured on this host", ad.Measured)
	if r != nil {
		fmt.Fprintf(a.out, "  (%s, of %s)\n", path, ago(r.At))
	}
	if ad.IfBuilt != "" {
		list(fmt.Sprintf("If every runtime were built and ran here: %s", ad.IfBuilt), ad.IfBuiltReasons)
	}
	var others []string
	for _, o := range ad.Others {
		others = append(others, o.Runtime+": "+o.Why)
	}
	list("Why not the others", others)
}
