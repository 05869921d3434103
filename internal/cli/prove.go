package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/prove"
)

func (a *app) proveCmd() *cobra.Command {
	var o prove.Options
	var html, out string
	cmd := &cobra.Command{
		Use:   "prove",
		Short: "Measure what each runtime really does on this host",
		Long: "Makes sandboxes with every runtime that runs here and measures, through the API:\n" +
			"what of the host is seen and reached from inside, what real work succeeds, how\n" +
			"long a start and an exec take, what an idle sandbox costs, and what a capture\n" +
			"preserves. Takes some minutes; its sandboxes are removed, also after an interrupt.\n\n" +
			"As root on the daemon's machine it reads memory as PSS, else as working set.\n" +
			"The raw report is kept for 'warren advise'; its path is printed.",
		Example: "  sudo warren prove\n  sudo warren prove --runtime gvisor --html gvisor.html\n  warren prove --quick --json | jq '.runtimes[].timings'",
		Args:    cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			o.Client = c
			show, done := a.status()
			o.Progress = show
			r, err := prove.Run(ctx, o)
			done()
			if err != nil {
				return err
			}
			var path string
			if out != "" {
				err = writeReport(out, r, prove.JSON)
				path = out
			} else {
				var dir string
				if dir, err = prove.Dir(a.getenv); err == nil {
					path, err = prove.Save(dir, r)
				}
			}
			// A measurement of minutes is shown also where it cannot be kept.
			if err != nil {
				fmt.Fprintf(a.err, "warren: the report could not be kept: %s\n", clean(err.Error()))
				a.code = exitFailure
			}
			if html != "" {
				if err := writeReport(html, r, prove.HTML); err != nil {
					return err
				}
			}
			if a.json {
				return a.printJSON(r)
			}
			if err := prove.Text(a.out, r, a.paintVerdict); err != nil {
				return err
			}
			if path != "" {
				fmt.Fprintf(a.out, "\nraw report: %s\n", path)
			}
			if html != "" {
				fmt.Fprintf(a.out, "page: %s\n", html)
			}
			return nil
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&o.Runtime, "runtime", "", "measure this runtime alone")
	fl.StringVar(&o.Template, "template", "base", "template of the sandboxes")
	fl.BoolVar(&o.Quick, "quick", false, "few samples and no slow work")
	fl.StringVar(&html, "html", "", "write the report as one self-contained page to this file")
	fl.StringVarP(&out, "output", "o", "", "keep the raw report in this file instead")
	cmd.RegisterFlagCompletionFunc("template", a.completeTemplates)
	cmd.RegisterFlagCompletionFunc("runtime", a.completeRuntimes)
	return cmd
}

func (a *app) paintVerdict(v prove.Verdict, s string) string {
	switch v {
	case prove.Yes:
		return a.paint(a.out, green, s)
	case prove.No:
		return a.paint(a.out, red, s)
	case prove.Skip:
		return a.paint(a.out, faint, s)
	}
	return a.paint(a.out, yellow, s)
}

// status shows one line of what goes on: on a terminal in place, elsewhere a
// line each.
func (a *app) status() (show func(string), done func()) {
	if !tty(a.err) {
		return func(s string) { fmt.Fprintln(a.err, clean(s)) }, func() {}
	}
	const clear = "\r\x1b[K" // ECMA-48: erase to the end of the line
	return func(s string) { fmt.Fprint(a.err, clear+clean(s)) }, func() { fmt.Fprint(a.err, clear) }
}

// writeReport writes a file whole or not at all.
func writeReport(path string, r *prove.Report, write prove.Writer) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".warren-prove-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	err = write(f, r)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
