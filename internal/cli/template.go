package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/template"
)

func (a *app) templateCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "template", Aliases: []string{"templates"}, Short: "Root filesystems to make sandboxes from"}
	cmd.AddCommand(a.templateBuildCmd(), a.templateImportCmd(), a.templateLsCmd(), a.templateInspectCmd(), a.templateRmCmd())
	return cmd
}

// targetFlags are what every build asks of its result.
type targetFlags struct {
	name, mem, disk, start, ready string
	cpus                          float64
	pids                          int
	shared, plain                 bool
}

func (f *targetFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.name, "name", "", "name of the template")
	fl.StringVar(&f.mem, "mem", "", "default memory limit of its sandboxes, such as 1G")
	fl.Float64Var(&f.cpus, "cpus", 0, "default CPU limit of its sandboxes")
	fl.IntVar(&f.pids, "pids", 0, "default limit of processes and threads of its sandboxes")
	fl.StringVar(&f.disk, "disk", "", "default disk limit of its sandboxes, such as 2G")
	fl.StringVar(&f.start, "start-cmd", "", "command line to run when a sandbox starts")
	fl.StringVar(&f.ready, "ready-cmd", "", "command line that exits with 0 once a sandbox is ready")
	fl.BoolVar(&f.shared, "shared", false, "let every tenant use it (only the tenant default can)")
	fl.BoolVar(&f.plain, "plain", false, "print progress as plain lines")
}

func (f *targetFlags) into(r *wire.BuildTemplate) (err error) {
	r.Name, r.Shared, r.StartCmd, r.ReadyCmd = f.name, f.shared, f.start, f.ready
	r.Resources.CPUs, r.Resources.PIDs = f.cpus, f.pids
	if f.mem != "" {
		if r.Resources.MemoryMiB, err = parseMemory(f.mem); err != nil {
			return err
		}
	}
	if f.disk != "" {
		r.Resources.DiskMiB, err = parseMemory(f.disk)
	}
	return err
}

func (a *app) templateBuildCmd() *cobra.Command {
	var t targetFlags
	var debian, file, stage, mirror, user, variant string
	var reseed bool
	var packages, args, env []string
	var base, codeInterpreter, noCache, insecure bool
	cmd := &cobra.Command{
		Use:   "build [flags] [CONTEXT]",
		Short: "Build a template: of a Dockerfile, of Debian packages, or the default one",
		Long: "With a CONTEXT directory (or - for a tar archive on standard input), runs its\n" +
			"Dockerfile. With --debian, installs packages of a Debian suite. With --base,\n" +
			"builds the default template \"base\"; with --code-interpreter, base with the service\n" +
			"that runs code in Jupyter kernels.",
		Example: "  warren template build --base\n" +
			"  warren template build --name py --debian bookworm --packages python3,git\n" +
			"  warren template build --name app .",
		Args: cobra.MaximumNArgs(1),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, ctxArg []string) error {
			var r wire.BuildTemplate
			if err := t.into(&r); err != nil {
				return err
			}
			pairs, err := parsePairs("env", env)
			if err != nil {
				return err
			}
			var archive io.ReadCloser
			switch {
			case len(ctxArg) == 1 && (base || codeInterpreter || debian != ""), base && debian != "", codeInterpreter && (base || debian != ""):
				return usagef("give one of CONTEXT, --debian, --base and --code-interpreter")
			case base, codeInterpreter:
				o := template.Base()
				if codeInterpreter {
					o = template.CodeInterpreter()
				}
				if r.Name == "" {
					r.Name = o.Name
				}
				r.Shared = true
				r.Debian = debianOf(o)
				r.Debian.Packages, r.Debian.Mirror = append(r.Debian.Packages, packages...), mirror
				for k, v := range pairs {
					r.Debian.Env[k] = v
				}
			case debian != "":
				r.Debian = &wire.BuildDebian{Suite: debian, Packages: packages, Mirror: mirror, User: user, Env: pairs, Variant: variant, Reseed: reseed}
			case len(ctxArg) == 1:
				r.Dockerfile = &wire.BuildDockerfile{Stage: stage, NoCache: noCache, Insecure: insecure}
				if r.Dockerfile.BuildArgs, err = parsePairs("build-arg", args); err != nil {
					return err
				}
				if archive, err = a.buildContext(ctx, ctxArg[0], file, r.Dockerfile); err != nil {
					return err
				}
				defer archive.Close()
			default:
				return usagef("give a CONTEXT directory, --debian SUITE, --base, or --code-interpreter")
			}
			if r.Name == "" {
				return usagef("--name is missing")
			}
			return a.build(ctx, c, r, archive, t.plain)
		}),
	}
	t.register(cmd)
	fl := cmd.Flags()
	fl.BoolVar(&base, "base", false, "build the default template")
	fl.BoolVar(&codeInterpreter, "code-interpreter", false, "build the template that runs code in Jupyter kernels, code-interpreter-v1")
	fl.StringVar(&debian, "debian", "", "Debian suite, such as bookworm")
	fl.StringSliceVar(&packages, "packages", nil, "Debian packages to install, comma-separated (repeatable)")
	fl.StringVar(&mirror, "mirror", "", "Debian mirror (default: the daemon's host's own)")
	fl.StringVar(&user, "user", "", "login user to make, with --debian")
	fl.StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE in its sandboxes' environment, with --debian, --base or --code-interpreter (repeatable)")
	fl.BoolVar(&reseed, "reseed", false, "with --debian: make random numbers of Python, Node.js and OpenSSL differ between forks, as in base")
	fl.StringVar(&variant, "variant", "", "mmdebstrap's variant: minbase, essential, apt or custom")
	fl.StringVarP(&file, "file", "f", "", "the Dockerfile (default: CONTEXT/Dockerfile)")
	fl.StringArrayVar(&args, "build-arg", nil, "NAME=VALUE for an ARG of the Dockerfile (repeatable)")
	fl.StringVar(&stage, "target", "", "stage of the Dockerfile to build (default: the last)")
	fl.BoolVar(&noCache, "no-cache", false, "run every step anew")
	fl.BoolVar(&insecure, "insecure", false, "allow plain HTTP and unverified TLS to the registry of FROM")
	return cmd
}

// debianOf is the request that builds o.
func debianOf(o template.DebianOptions) *wire.BuildDebian {
	return &wire.BuildDebian{
		Suite: o.Suite, Packages: o.Packages, Mirror: o.Mirror, User: o.User, Env: o.Env,
		Slim: o.Slim, Prune: o.Prune, Variant: o.Variant, Reseed: o.Reseed, Interpreter: o.Interpreter,
	}
}

// buildContext opens a Dockerfile's context and says in o where in it, or
// beside it, the Dockerfile is.
func (a *app) buildContext(ctx context.Context, dir, file string, o *wire.BuildDockerfile) (io.ReadCloser, error) {
	if dir == "-" {
		o.Dockerfile = file
		return io.NopCloser(a.in), nil
	}
	if st, err := os.Stat(dir); err != nil {
		return nil, err
	} else if !st.IsDir() {
		return nil, usagef("%s is no directory", dir)
	}
	if file != "" {
		rel, err := relativeTo(dir, file)
		if err != nil {
			return nil, err
		}
		if rel == "" {
			data, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			o.Content = string(data)
		}
		o.Dockerfile = rel
	} else if _, err := os.Stat(filepath.Join(dir, "Dockerfile")); err != nil {
		return nil, usagef("%s has no Dockerfile: name another by --file", dir)
	}
	return template.PackContext(ctx, dir, o.Dockerfile)
}

// relativeTo gives file's path in dir, "" where it is not in it.
func relativeTo(dir, file string) (string, error) {
	absDir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	absFile, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	if rel, err := filepath.Rel(absDir, absFile); err == nil && filepath.IsLocal(rel) {
		if _, err := os.Stat(absFile); err != nil {
			return "", err
		}
		return filepath.ToSlash(rel), nil
	}
	return "", nil
}

func (a *app) templateImportCmd() *cobra.Command {
	var t targetFlags
	var insecure bool
	cmd := &cobra.Command{
		Use:   "import [flags] IMAGE",
		Short: "Make a template of an OCI image",
		Long: "IMAGE is a registry reference (HOST/NAME:TAG), docker-archive:FILE[:REF] for what\n" +
			"`docker save` wrote, or oci:DIR[:TAG] for an OCI layout.",
		Example: "  warren template import --name web registry.example.com/web:1\n" +
			"  docker save app | warren template import --name app docker-archive:-",
		Args: cobra.ExactArgs(1),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r := wire.BuildTemplate{Import: &wire.BuildImport{Ref: args[0], Insecure: insecure}}
			if err := t.into(&r); err != nil {
				return err
			}
			if r.Name == "" {
				return usagef("--name is missing")
			}
			archive, err := a.image(c, r.Import)
			if err != nil {
				return err
			}
			if archive != nil {
				defer archive.Close()
				return a.build(ctx, c, r, archive, t.plain)
			}
			return a.build(ctx, c, r, nil, t.plain)
		}),
	}
	t.register(cmd)
	cmd.Flags().BoolVar(&insecure, "insecure", false, "allow plain HTTP and unverified TLS to the registry")
	return cmd
}

// image makes the paths of o ones that the daemon can read, or opens what has
// to be sent to it.
func (a *app) image(c *client.Client, o *wire.BuildImport) (io.ReadCloser, error) {
	kind, rest, ok := strings.Cut(o.Ref, ":")
	switch {
	case !ok || (kind != "oci" && kind != "docker-archive"):
		return nil, nil
	case kind == "docker-archive" && (rest == "-" || strings.HasPrefix(rest, "-:")):
		return io.NopCloser(a.in), nil
	case c.Local():
		if !filepath.IsAbs(rest) {
			wd, err := os.Getwd()
			if err != nil {
				return nil, err
			}
			o.Ref = kind + ":" + filepath.Join(wd, rest)
		}
		return nil, nil
	case kind == "oci":
		return nil, usagef("an OCI layout is only read on the daemon's own host: make it one file (tar c -C DIR . > FILE) and import docker-archive:FILE")
	}
	name := rest
	if _, err := os.Stat(name); err != nil { // FILE:REF
		if file, _, ok := strings.Cut(rest, ":"); ok {
			name = file
		}
	}
	return os.Open(name)
}

func (a *app) build(ctx context.Context, c *client.Client, r wire.BuildTemplate, archive io.Reader, plain bool) error {
	bp := a.newBuildProgress(plain)
	var body io.Reader
	if archive != nil {
		body = archive
	}
	t, err := c.BuildTemplate(ctx, r, body, bp.event)
	bp.done()
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(t)
	}
	fmt.Fprintf(a.out, "%s %s %s\n", t.Name, t.ID, size(t.SizeBytes))
	return nil
}

func (a *app) templateLsCmd() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List templates", Args: cobra.NoArgs,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			ts, err := c.Templates(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(ts)
			}
			rows := make([][]string, 0, len(ts))
			for _, t := range ts {
				rows = append(rows, []string{t.Name, t.ID, size(t.SizeBytes), fmt.Sprint(len(t.Layers)), ago(t.CreatedAt), yesNo(t.Shared), t.Source})
			}
			return a.table(a.out, []string{"NAME", "ID", "SIZE", "LAYERS", "CREATED", "SHARED", "SOURCE"}, rows)
		}),
	}
}

func (a *app) templateInspectCmd() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Show all about a template, as JSON", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeTemplates,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			t, err := c.Template(ctx, args[0])
			if err != nil {
				return err
			}
			return a.printJSON(t)
		}),
	}
}

func (a *app) templateRmCmd() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Remove templates that no live sandbox uses", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeTemplates,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, name := range args {
				if err := c.RemoveTemplate(ctx, name); err != nil {
					return err
				}
				if !a.json {
					fmt.Fprintln(a.out, name)
				}
			}
			if a.json {
				return a.printJSON(args)
			}
			return nil
		}),
	}
}
