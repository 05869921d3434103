package template

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/dockerfile"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/template/ociimage"
)

// The account that a build of steps gives every image, and whose home is the
// working directory where the steps begin.
const (
	stepUser    = "user"
	stepUserID  = 1000
	stepHome    = "/home/user"
	maxSteps    = 1000
	maxStepArgs = 1000
)

// The kinds of BuildStep.
const (
	StepCopy    = "COPY"    // source, destination, and optionally owner and octal mode
	StepRun     = "RUN"     // a command for a login shell, and optionally its user
	StepWorkdir = "WORKDIR" // a directory
	StepUser    = "USER"    // an account; it is made where the image lacks it
	StepEnv     = "ENV"     // name, value, name, value, …
)

// Where a build of steps failed, in an error's Details["step"], beside the
// number of a step, from 1.
const (
	FailedBase     = "base"
	FailedFinalize = "finalize"
)

// BuildStep is one step of a template that is given as data, not as a
// Dockerfile.
type BuildStep struct {
	Type      string
	Args      []string
	FilesHash string // of StepCopy: the upload that holds the source
	Force     bool   // run this step and all after it anew
}

// StepsOptions describe a template built of steps.
type StepsOptions struct {
	Target
	FromTemplate string // a template, by name or id, or
	FromImage    string // an image in a registry
	Username     string // of the registry
	Password     string
	Insecure     bool // as ImportOptions.Insecure
	Steps        []BuildStep
	NoCache      bool // run every step anew
	// Files opens the upload of a hash, a tar archive, plain or compressed.
	Files func(hash string) (io.ReadCloser, error)
	// StepResources limit each RUN step; zero fields: the runner's defaults.
	StepResources sandbox.Resources
}

// BuildSteps makes a template of steps, as BuildDockerfile does of a
// Dockerfile, and with the same cache. An image gets an account "user" and the
// steps begin as it in its home; a template's own user and working directory
// stay where it has them.
//
// The error's Details["step"] says where: FailedBase, a step's number from 1,
// or FailedFinalize.
func (l *Library) BuildSteps(ctx context.Context, o StepsOptions, r StepRunner, p Progress) (t Template, err error) {
	if (o.FromTemplate == "") == (o.FromImage == "") {
		return t, atStep(FailedBase, sandbox.Errorf(sandbox.CodeInvalid, "give the build one base: a template or an image"))
	}
	if len(o.Steps) > maxSteps {
		return t, sandbox.Errorf(sandbox.CodeTooLarge, "%d steps: the most is %d", len(o.Steps), maxSteps).With("limit", "steps")
	}
	b, err := l.begin(ctx, o.Target, p)
	if err != nil {
		return t, err
	}
	defer b.end(&err)
	d := &dockerBuild{
		build: b, runner: r, done: map[int]*stage{}, images: map[string]*stage{}, used: map[string]bool{},
		o:     DockerfileOptions{NoCache: o.NoCache, StepResources: o.StepResources},
		plan:  &dockerfile.Plan{Steps: len(o.Steps) + 1},
		login: ociimage.Options{Insecure: o.Insecure, Username: o.Username, Password: o.Password},
	}
	s, err := d.stepsBase(o)
	if err != nil {
		return t, atStep(FailedBase, err)
	}
	for i, step := range o.Steps {
		if err := ctx.Err(); err != nil {
			return t, layer.Error("build the template", err)
		}
		if step.Force {
			d.o.NoCache = true
		}
		name := step.Type + " " + strings.Join(step.Args, " ")
		d.next(i+1, name)
		if err := d.buildStep(s, step, i+1, name, o.Files); err != nil {
			return t, atStep(strconv.Itoa(i+1), err)
		}
	}
	if err := d.tryStart(s, o.StartCmd, o.ReadyCmd); err != nil {
		return t, atStep(FailedFinalize, err)
	}
	t, err = b.finish(s.layers, s.config, "steps")
	return t, atStep(FailedFinalize, err)
}

// startTrial runs the start command until the ready command succeeds. The
// commands come by the environment: nothing quotes them.
const startTrial = `sh=/bin/sh
if [ -n "$WARREN_START_CMD" ]; then "$sh" -c "$WARREN_START_CMD" & fi
[ -n "$WARREN_READY_CMD" ] || exit 0
end=$(($(date +%s) + 120))
until "$sh" -c "$WARREN_READY_CMD"; do
	if [ "$(date +%s)" -ge "$end" ]; then echo "not ready after 120 seconds" >&2; exit 1; fi
	sleep 0.2
done`

// tryStart finds out that the template would start: what fails here would fail
// every create. Nothing of the trial is kept.
func (d *dockerBuild) tryStart(s *stage, start, ready string) error {
	if ready == "" || d.runner == nil { // without one nothing says that it works
		return nil
	}
	if err := d.ensureWorkdir(s, 0); err != nil {
		return err
	}
	if err := d.checkProgram(s, "/bin/sh", "", true); err != nil {
		return err
	}
	env, _ := s.scope.RunEnv()
	if _, ok := env["PATH"]; !ok {
		env["PATH"] = defaultPath
	}
	env["WARREN_START_CMD"], env["WARREN_READY_CMD"] = start, ready
	step := Step{
		Number: d.plan.Steps, Total: d.plan.Steps, Name: "the start and ready commands", Tenant: d.target.Tenant,
		Layers: d.dirs(s.layers), Argv: []string{"/bin/sh", "-c", startTrial}, Env: env, User: s.config.User, Workdir: s.absolute("."),
		Network: sandbox.NetworkEgress, Resources: d.o.StepResources, LayerDir: d.temp("layer"),
	}
	d.emit(Event{Stage: StageLog, Message: "running the start command until the ready command succeeds"})
	out := &stepOutput{emit: func(l string) { d.emit(Event{Stage: StageLog, Message: l}) }}
	step.Output = out
	res, err := d.runner.RunStep(d.ctx, step)
	out.flush()
	switch {
	case err != nil && d.ctx.Err() != nil:
		return layer.Error("try the start command", d.ctx.Err())
	case err != nil:
		return stepError(step, err, out)
	case res.ExitCode != 0:
		return stepFailed(step, res.ExitCode, out)
	}
	return layer.Error("clean up after the start command", layer.RemoveTree(step.LayerDir))
}

// atStep says where a build failed.
func atStep(step string, err error) error {
	var e *sandbox.Error
	if err == nil || !errors.As(err, &e) {
		return err
	}
	return e.With("step", step)
}

func (d *dockerBuild) stepsBase(o StepsOptions) (*stage, error) {
	var base *stage
	var err error
	if o.FromTemplate != "" {
		d.next(0, "FROM "+o.FromTemplate)
		base, err = d.fromTemplate(o.FromTemplate)
	} else {
		d.next(0, "FROM "+o.FromImage)
		if base, err = d.fromImage(o.FromImage); err != nil && d.ctx.Err() == nil {
			err = noImage(o.FromImage, err)
		}
	}
	if err != nil {
		return nil, err
	}
	s := &stage{layers: slices.Clone(base.layers), config: cloneConfig(base.config)}
	s.scope = dockerfile.NewScope(s.config.Env, nil, nil, d.used)
	s.config.Env = s.scope.Env
	// A start command is the new template's own affair.
	s.config.OnBuild = nil
	if o.FromImage != "" {
		if err := d.ensureUser(s, stepUser, 0); err != nil {
			return nil, err
		}
		s.config.User, s.config.Workdir = stepUser, stepHome
	}
	return s, nil
}

// noImage adds to a failed pull what helps where a registry is out of reach.
func noImage(image string, err error) error {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code == sandbox.CodeInvalid {
		return err
	}
	out := sandbox.Errorf(e.Code, "%w; let this host reach the registry, or have a template stand for the image: `warren serve --image-alias %s=TEMPLATE`", err, image)
	for k, v := range e.Details {
		out = out.With(k, v)
	}
	return out
}

func (d *dockerBuild) buildStep(s *stage, step BuildStep, n int, name string, files func(string) (io.ReadCloser, error)) error {
	bad := func(want string) error {
		return sandbox.Errorf(sandbox.CodeInvalid, "the step %s has %d arguments: give %s", step.Type, len(step.Args), want)
	}
	if len(step.Args) > maxStepArgs {
		return bad(fmt.Sprintf("at most %d", maxStepArgs))
	}
	for _, a := range step.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return sandbox.Errorf(sandbox.CodeInvalid, "an argument of the step %s has a NUL byte", step.Type)
		}
	}
	arg := func(i int) string {
		if i < len(step.Args) {
			return step.Args[i]
		}
		return ""
	}
	switch step.Type {
	case StepRun:
		if arg(0) == "" || len(step.Args) > 2 {
			return bad("a command, and optionally its user")
		}
		user := s.config.User
		if arg(1) != "" {
			user = arg(1)
		}
		if user != "" {
			// The wording is that of the SDKs' own service.
			if _, err := d.owner(s, user, "user"); sandbox.CodeOf(err) == sandbox.CodeInvalid {
				return sandbox.Errorf(sandbox.CodeInvalid, "failed to run command '%s': command failed: unauthenticated: invalid username: '%s'", shorten(arg(0)), shorten(user))
			}
		}
		sh, err := d.loginShell(s)
		if err != nil {
			return err
		}
		return d.runArgv(s, runStep{argv: []string{sh, "-l", "-c", arg(0)}, shell: true, user: user, network: sandbox.NetworkEgress, line: n, name: name})
	case StepCopy:
		if arg(0) == "" || arg(1) == "" || len(step.Args) > 4 {
			return bad("a source, a destination, and optionally owner and mode")
		}
		return d.stepCopy(s, step, n, name, files)
	case StepWorkdir:
		if len(step.Args) != 1 {
			return bad("a directory")
		}
		return d.workdir(s, arg(0), n, name)
	case StepUser:
		if len(step.Args) != 1 || arg(0) == "" {
			return bad("an account")
		}
		if err := d.ensureUser(s, arg(0), n); err != nil {
			return err
		}
		s.config.User = arg(0)
		return nil
	case StepEnv:
		if len(step.Args) == 0 || len(step.Args)%2 != 0 {
			return bad("names and values in pairs")
		}
		lex := shell.NewLex('\\')
		lex.RawQuotes, lex.RawEscapes = true, true
		for i := 0; i < len(step.Args); i += 2 {
			k := step.Args[i]
			if k == "" || strings.ContainsRune(k, '=') {
				return sandbox.Errorf(sandbox.CodeInvalid, "%s is not the name of a variable", layer.Quote(k))
			}
			v, _, err := lex.ProcessWord(step.Args[i+1], s.scope.Variables())
			if err != nil {
				v = step.Args[i+1] // not meant as a reference to a variable
			}
			s.scope.Env[k] = v
		}
		return nil
	}
	return sandbox.Errorf(sandbox.CodeUnsupported, "the step %s is not supported: use COPY, RUN, WORKDIR, USER and ENV", layer.Quote(step.Type))
}

// loginShell is the shell of RUN: bash where the image has it.
func (d *dockerBuild) loginShell(s *stage) (string, error) {
	for _, sh := range []string{"/bin/bash", "/usr/bin/bash"} {
		if ok, err := d.hasShell(s.layers, sh); ok || err != nil {
			return sh, err
		}
	}
	return "/bin/sh", nil
}

// stepCopy copies out of an upload. Its owner is the step's, else the current
// user; symlinks stay symlinks, and a wildcard's destination is a directory.
func (d *dockerBuild) stepCopy(s *stage, step BuildStep, n int, name string, files func(string) (io.ReadCloser, error)) error {
	if step.FilesHash == "" || files == nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the step COPY names no upload: its filesHash is missing")
	}
	f, err := files(step.FilesHash)
	if err != nil {
		return err
	}
	defer f.Close()
	dir := d.temp("files")
	defer layer.RemoveTree(dir) // the build's end removes what is left
	if err := d.unpackContext(f, dir); err != nil {
		return err
	}
	view, err := layer.OpenView([]string{dir})
	if err != nil {
		return err
	}
	defer view.Close()
	src, dest := step.Args[0], step.Args[1]
	if strings.ContainsAny(src, "*?[") && !strings.HasSuffix(dest, "/") {
		dest += "/"
	}
	owner := s.config.User
	if len(step.Args) > 2 && step.Args[2] != "" {
		owner = step.Args[2]
	}
	mode := ""
	if len(step.Args) > 3 {
		mode = step.Args[3]
	}
	old := d.context
	d.context = view
	defer func() { d.context = old }()
	return d.copy(s, copyStep{
		SourcesAndDest: instructions.SourcesAndDest{SourcePaths: []string{src}, DestPath: dest},
		line:           n, name: name, chown: owner, chmod: mode, keepLinks: true,
	})
}

// ensureUser makes the account that a step names, with a home and the image's
// best shell, where the image has none of the name. Numbers need no account.
func (d *dockerBuild) ensureUser(s *stage, spec string, n int) error {
	name, _, _ := strings.Cut(spec, ":")
	if _, ok := number(name); ok {
		return nil
	}
	if !userPattern.MatchString(name) {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not the name of an account", layer.Quote(name))
	}
	v, err := layer.OpenView(d.dirs(s.layers))
	if err != nil {
		return err
	}
	defer v.Close()
	passwd, err := accounts(v, "/etc/passwd")
	if err != nil {
		return err
	}
	group, err := accounts(v, "/etc/group")
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, file := range [][]byte{passwd, group} {
		for line := range strings.Lines(string(file)) {
			f := strings.Split(strings.TrimSpace(line), ":")
			if f[0] == name && len(f) >= 6 || name == "root" {
				return nil
			}
			if len(f) > 2 {
				used[f[2]] = true
			}
		}
	}
	id := stepUserID
	for used[strconv.Itoa(id)] {
		if id++; id > maxOwnerID {
			return sandbox.Errorf(sandbox.CodeInvalid, "the image has no number left for the account %s", layer.Quote(name))
		}
	}
	sh, err := d.loginShell(s)
	if err != nil {
		return err
	}
	home := path.Join("/home", name)
	key := cacheKey("account", d.target.Tenant, s.layers, name, id, sh)
	return d.layered(s, n, "USER "+name, key, func() (string, error) {
		return d.assemble(s, func(nb *layer.Builder) error {
			root, own := layer.Owner{}, layer.Owner{UID: id, GID: id}
			add := func(file string, was []byte, line string) error {
				if len(was) > 0 && was[len(was)-1] != '\n' {
					was = append(was, '\n')
				}
				return nb.WriteFile(file, strings.NewReader(string(was)+line), 0o644, root)
			}
			if len(passwd) == 0 {
				passwd = []byte("root:x:0:0:root:/root:" + sh + "\n")
			}
			if len(group) == 0 {
				group = []byte("root:x:0:\n")
			}
			if err := add("/etc/passwd", passwd, fmt.Sprintf("%s:x:%d:%d::%s:%s\n", name, id, id, home, sh)); err != nil {
				return err
			}
			if err := add("/etc/group", group, fmt.Sprintf("%s:x:%d:\n", name, id)); err != nil {
				return err
			}
			// "*" is no password: sudo and su ask the image's own rules.
			shadow, err := accounts(v, "/etc/shadow")
			if err != nil {
				return err
			}
			if len(shadow) > 0 {
				if err := nb.WriteFile("/etc/shadow", strings.NewReader(string(shadow)+name+":*:19000:0:99999:7:::\n"), 0o640, root); err != nil {
					return err
				}
			}
			if sudo, err := v.Lookup("/etc/sudoers.d", true); err == nil && sudo.IsDir() {
				if err := nb.WriteFile("/etc/sudoers.d/"+name, strings.NewReader(name+" ALL=(ALL) NOPASSWD:ALL\n"), 0o440, root); err != nil {
					return err
				}
			}
			_, err = nb.MkdirAll(home, own)
			return err
		})
	})
}
