package cli

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
)

func (a *app) runCodeCmd() *cobra.Command {
	var r wire.RunCode
	var out string
	var env []string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "run-code [flags] ID FILE|-",
		Short: "Run code in a sandbox's code interpreter",
		Long: "Runs a file's code, or our input's, in a context that keeps its variables. Text is\n" +
			"printed, rich results (pictures, HTML, chart data) are saved to files. Exits with 1\n" +
			"where the code raised an error. The sandbox needs a template with the code\n" +
			"interpreter: warren template build --code-interpreter.",
		Example:           "  echo 'x = 6 * 7; x' | warren run-code $id -\n  warren run-code -l bash --out results $id script.sh",
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeID,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			var data []byte
			var err error
			if args[1] == "-" {
				data, err = io.ReadAll(a.in)
			} else {
				data, err = os.ReadFile(args[1])
			}
			if err != nil {
				return err
			}
			r.Code = string(data)
			if r.EnvVars, err = parsePairs("env", env); err != nil {
				return err
			}
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			failed, results := false, 0
			err = c.RunCode(ctx, args[0], r, func(e wire.CodeEvent) error {
				failed = failed || e.Type == wire.CodeError || e.Type == wire.CodeUnexpectedEnd
				if a.json {
					return json.NewEncoder(a.out).Encode(e)
				}
				switch e.Type {
				case wire.CodeStdout:
					fmt.Fprint(a.out, e.Text)
				case wire.CodeStderr:
					fmt.Fprint(a.err, e.Text)
				case wire.CodeError:
					if e.Traceback == "" {
						e.Traceback = e.Name + ": " + e.Value
					}
					fmt.Fprintln(a.err, clean(e.Traceback))
				case wire.CodeUnexpectedEnd:
					fmt.Fprintln(a.err, "warren: the kernel died and was started anew: the context's variables are lost")
				case wire.CodeResult:
					results++
					if e.Text != "" {
						fmt.Fprintln(a.out, e.Text)
					}
					return a.saveResult(filepath.Join(out, fmt.Sprintf("result-%d", results)), e)
				}
				return nil
			})
			if err == nil && failed {
				return exitError{code: 1}
			}
			return err
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&r.ContextID, "context", "", "run it in this context (default: the language's own)")
	fl.StringVarP(&r.Language, "language", "l", "", "python (the default), javascript, bash, or another whose kernel is installed")
	fl.StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE in this execution's environment (repeatable)")
	fl.StringVarP(&out, "out", "o", ".", "directory for rich results")
	fl.DurationVar(&timeout, "timeout", 0, "interrupt the code after this time, such as 60s")
	return cmd
}

// saveResult writes the forms of a result that are not text to files whose
// names begin with stem, and tells of each.
func (a *app) saveResult(stem string, e wire.CodeEvent) error {
	for _, f := range []struct {
		ext, data string
		binary    bool
	}{
		{"html", e.HTML, false}, {"md", e.Markdown, false}, {"svg", e.SVG, false}, {"tex", e.LaTeX, false}, {"js", e.JavaScript, false},
		{"png", e.PNG, true}, {"jpeg", e.JPEG, true}, {"pdf", e.PDF, true},
	} {
		if f.data == "" {
			continue
		}
		data := []byte(f.data)
		if f.binary {
			var err error
			if data, err = base64.StdEncoding.DecodeString(f.data); err != nil {
				return fmt.Errorf("a result's %s is not base64: %w", f.ext, err)
			}
		}
		if err := a.saveFile(stem+"."+f.ext, data); err != nil {
			return err
		}
	}
	for _, f := range []struct {
		ext  string
		data any
	}{{"json", e.JSON}, {"chart.json", e.Chart}, {"data.json", e.Data}} {
		if f.data == nil {
			continue
		}
		data, err := json.MarshalIndent(f.data, "", "  ")
		if err != nil {
			return err
		}
		if err := a.saveFile(stem+"."+f.ext, data); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) saveFile(name string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(name, data, 0o644); err != nil {
		return err
	}
	fmt.Fprintf(a.err, "saved %s\n", name)
	return nil
}
