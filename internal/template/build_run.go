package template

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

var pointStepRun = fault.Register("template.step.run")

// platformFiles are what the agent writes into every sandbox: as with Docker,
// a step's changes to them are not kept.
var platformFiles = []string{"etc/hostname", "etc/hosts", "etc/resolv.conf"}

// scriptPath is where a here-document that begins with #! is put for its step.
const scriptPath = "/.warren-step"

// run does a RUN instruction.
func (d *dockerBuild) run(s *stage, c *instructions.RunCommand, line int, name string) error {
	argv, script, err := s.runLine(c)
	if err != nil {
		return err
	}
	network := sandbox.NetworkEgress
	if instructions.GetNetwork(c) == instructions.NetworkNone {
		network = sandbox.NetworkNone
	}
	return d.runArgv(s, runStep{argv: argv, script: script, shell: c.PrependShell && script == "", user: s.config.User, network: network, line: line, name: name})
}

// runStep is a RUN ready to be run in s.
type runStep struct {
	argv    []string
	script  string // a here-document with an interpreter of its own
	shell   bool   // argv[0] is a shell that was put before what the user wrote
	user    string
	network sandbox.NetworkMode
	line    int
	name    string
}

func (d *dockerBuild) runArgv(s *stage, r runStep) error {
	if d.runner == nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the build has RUN steps, and no runtime on this host can run them: see `warren runtimes`")
	}
	line, name, argv, script := r.line, r.name, r.argv, r.script
	if err := d.ensureWorkdir(s, line); err != nil {
		return err
	}
	env, keyed := s.scope.RunEnv()
	if _, ok := env["PATH"]; !ok {
		env["PATH"] = defaultPath
	}
	if err := d.checkProgram(s, argv[0], env["PATH"], r.shell); err != nil {
		return err
	}
	step := Step{
		Number: d.step, Total: d.plan.Steps, Line: line, Name: shorten(name), Tenant: d.target.Tenant,
		Layers: d.dirs(s.layers), Argv: argv, Env: env, User: r.user, Workdir: s.absolute("."),
		Network: r.network, Resources: d.o.StepResources,
	}
	key := cacheKey("run", step.Tenant, s.layers, argv, script, keyed, step.User, step.Workdir, string(step.Network))
	return d.layered(s, line, name, key, func() (string, error) { return d.runStep(s, step, script) })
}

// defaultPath is Docker's for Linux images that set none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// runLine is the command of a RUN. script is set where it is a here-document
// with an interpreter of its own.
func (s *stage) runLine(c *instructions.RunCommand) (argv []string, script string, err error) {
	args := slices.Clone(c.CmdLine)
	if len(args) == 0 || args[0] == "" {
		return nil, "", sandbox.Errorf(sandbox.CodeInvalid, "RUN has no command")
	}
	if len(c.Files) > 0 {
		if len(args) != 1 || !c.PrependShell {
			return nil, "", sandbox.Errorf(sandbox.CodeInvalid, "RUN with a here-document takes one command in shell form")
		}
		only, err := parser.ParseHeredoc(args[0])
		if err != nil {
			return nil, "", sandbox.Errorf(sandbox.CodeInvalid, "the here-document cannot be read: %w", err)
		}
		if only == nil { // a command that reads it: the shell understands it as it stands
			full := args[0]
			for _, f := range c.Files {
				full += "\n" + f.Data + f.Name
			}
			args = []string{full}
		} else {
			data := c.Files[0].Data
			if c.Files[0].Chomp {
				data = parser.ChompHeredocContent(data)
			}
			if strings.HasPrefix(data, "#!") {
				return []string{path.Join(scriptPath, "script")}, data, nil
			}
			args = []string{data}
		}
	}
	if c.PrependShell {
		return append(slices.Clone(s.shell()), strings.Join(args, " ")), "", nil
	}
	return args, "", nil
}

// checkProgram finds out before a sandbox is started that the image cannot
// run the command.
func (d *dockerBuild) checkProgram(s *stage, program, searchPath string, shell bool) error {
	if strings.HasPrefix(program, scriptPath+"/") {
		return nil
	}
	v, err := layer.OpenView(d.dirs(s.layers))
	if err != nil {
		return err
	}
	defer v.Close()
	var at []string
	switch {
	case strings.HasPrefix(program, "/"):
		at = []string{program}
	case strings.Contains(program, "/"):
		at = []string{s.absolute(program)}
	default:
		for dir := range strings.SplitSeq(searchPath, ":") {
			at = append(at, path.Join(s.absolute(dir), program))
		}
	}
	if slices.ContainsFunc(at, v.Executable) {
		return nil
	}
	if shell {
		return sandbox.Errorf(sandbox.CodeBadTemplate, "RUN needs the shell %s, which the image does not have: use the exec form, RUN [\"/program\", \"argument\"], or another base", layer.Quote(program))
	}
	return sandbox.Errorf(sandbox.CodeBadTemplate, "the image has no program %s to run: install or COPY it first", layer.Quote(program))
}

func (d *dockerBuild) runStep(s *stage, step Step, script string) (string, error) {
	step.LayerDir = d.temp("layer")
	if script != "" {
		// A layer below the step's own: the script is there to run, and not in
		// what is captured.
		dir := d.temp("script")
		nb, err := layer.NewBuilder(d.ctx, dir, step.Layers, d.l.limits)
		if err != nil {
			return "", err
		}
		err = nb.WriteFile(path.Join(scriptPath, "script"), strings.NewReader(script), 0o755, layer.Owner{})
		if e := nb.Close(); err == nil {
			err = e
		}
		if err != nil {
			return "", err
		}
		step.Layers = append([]string{dir}, step.Layers...)
	}
	out := &stepOutput{emit: func(l string) { d.emit(Event{Stage: StageLog, Message: l, Line: step.Line}) }}
	step.Output = out
	res, err := d.runner.RunStep(d.ctx, step)
	out.flush()
	if err != nil {
		if d.ctx.Err() != nil {
			return "", layer.Error("run the step", d.ctx.Err())
		}
		return "", stepError(step, err, out)
	}
	if res.ExitCode != 0 {
		return "", stepFailed(step, res.ExitCode, out)
	}
	pointStepRun.Hit()
	return d.commitTree(step.LayerDir, layer.HashOptions{Strip: platformFiles})
}

func stepFailed(step Step, exit int, out *stepOutput) error {
	why := fmt.Sprintf("exit code %d", exit)
	switch {
	case exit == 137:
		why += ", killed: it may have run out of memory"
	case exit == 127:
		why += ", a command was not found"
	}
	return sandbox.Errorf(sandbox.CodeBuildFailed, "step %d of %d failed (%s): %s", step.Number, step.Total, why, step.Name).
		With("step", strconv.Itoa(step.Number)).With("exit_code", strconv.Itoa(exit)).With("output", out.tail())
}

// stepError says that a step could not be run at all; the code is the
// runner's.
func stepError(step Step, err error, out *stepOutput) error {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		e = sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	made := sandbox.Errorf(e.Code, "step %d of %d could not be run: %w", step.Number, step.Total, err)
	for k, v := range e.Details {
		made = made.With(k, v)
	}
	return made.With("step", strconv.Itoa(step.Number)).With("output", out.tail())
}

// Limits of a step's output: of one line told as an event, and of the end that
// an error keeps.
const (
	maxLine = 4096
	maxTail = 8192
)

// stepOutput splits a command's output into lines.
type stepOutput struct {
	emit func(string)
	mu   sync.Mutex
	line []byte
	last []byte
}

// Write takes output; it never fails.
func (o *stepOutput) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := len(p)
	o.last = append(o.last, p[max(0, n-maxTail):]...)
	if len(o.last) > 2*maxTail {
		o.last = append(o.last[:0], o.last[len(o.last)-maxTail:]...)
	}
	for len(p) > 0 {
		i := bytes.IndexByte(p, '\n')
		part := p
		if i >= 0 {
			part = p[:i]
		}
		room := min(maxLine-len(o.line), len(part))
		o.line = append(o.line, part[:room]...)
		switch {
		case room < len(part): // too long: told in pieces
			p = p[room:]
		case i >= 0:
			p = p[i+1:]
		default:
			return n, nil
		}
		o.send()
	}
	return n, nil
}

func (o *stepOutput) send() {
	o.emit(strings.TrimRight(strings.ToValidUTF8(string(o.line), "\uFFFD"), "\r"))
	o.line = o.line[:0]
}

func (o *stepOutput) flush() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.line) > 0 {
		o.send()
	}
}

func (o *stepOutput) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.ToValidUTF8(string(o.last[max(0, len(o.last)-maxTail):]), "\uFFFD")
}
