package template

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/dockerfile"
	"github.com/warrenhq/warren/internal/template/layer"
)

// instruction does one instruction of a stage.
func (d *dockerBuild) instruction(s *stage, c instructions.Command, line int) error {
	if err := d.ctx.Err(); err != nil {
		return layer.Error("build the Dockerfile", err)
	}
	name := fmt.Sprint(c)
	d.next(line, name)
	if err := d.expand(s, c); err != nil {
		return dockerfile.At(line, err)
	}
	var err error
	switch c := c.(type) {
	case *instructions.RunCommand:
		err = d.run(s, c, line, name)
	case *instructions.CopyCommand:
		err = d.copy(s, copyStep{line: line, name: name, SourcesAndDest: c.SourcesAndDest, from: c.From, chown: c.Chown, chmod: c.Chmod, exclude: c.ExcludePatterns})
	case *instructions.AddCommand:
		unpack := c.Unpack == nil || *c.Unpack
		err = d.copy(s, copyStep{line: line, name: name, SourcesAndDest: c.SourcesAndDest, chown: c.Chown, chmod: c.Chmod, exclude: c.ExcludePatterns, unpack: unpack})
	case *instructions.WorkdirCommand:
		err = d.workdir(s, c.Path, line, name)
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			s.scope.Env[kv.Key] = kv.Value
		}
	case *instructions.ArgCommand:
		s.scope.Declare(c)
	case *instructions.UserCommand:
		s.config.User = c.User
	case *instructions.LabelCommand:
		s.label(c.Labels...)
	case *instructions.MaintainerCommand:
		d.warn(line, "MAINTAINER is deprecated: use LABEL maintainer=…")
		s.label(instructions.KeyValuePair{Key: "maintainer", Value: c.Maintainer})
	case *instructions.CmdCommand:
		s.config.Cmd, s.ownCmd = s.commandLine(c.ShellDependantCmdLine), true
	case *instructions.EntrypointCommand:
		s.config.Entrypoint = s.commandLine(c.ShellDependantCmdLine)
		if !s.ownCmd {
			s.config.Cmd = nil // the base's was meant for the base's entry point
		}
	case *instructions.ShellCommand:
		s.config.Shell = slices.Clone(c.Shell)
	case *instructions.ExposeCommand:
		err = d.expose(s, c)
	case *instructions.OnbuildCommand:
		s.config.OnBuild = append(s.config.OnBuild, c.Expression)
	case *instructions.VolumeCommand:
		d.warn(line, "VOLUME has no effect: what is written there is on the sandbox's own disk")
	case *instructions.StopSignalCommand:
		d.warn(line, "STOPSIGNAL has no effect: a sandbox is not stopped by a signal to its command")
	case *instructions.HealthCheckCommand:
		d.warn(line, "HEALTHCHECK has no effect: give the template a ready command")
	default:
		err = sandbox.Errorf(sandbox.CodeUnsupported, "%s is not supported", strings.ToUpper(c.Name()))
	}
	return dockerfile.At(line, err)
}

// expand puts the variables into an instruction's words. RUN, CMD, ENTRYPOINT
// and SHELL have theirs expanded by the shell that runs them.
func (d *dockerBuild) expand(s *stage, c instructions.Command) error {
	env := s.scope.Variables()
	word := func(w string) (string, error) {
		out, _, err := d.file.Lex().ProcessWord(w, env)
		return out, err
	}
	if e, ok := c.(instructions.SupportsSingleWordExpansion); ok {
		if err := e.Expand(word); err != nil {
			return err
		}
	}
	if e, ok := c.(instructions.SupportsSingleWordExpansionRaw); ok {
		lex := d.file.Lex()
		lex.RawQuotes, lex.RawEscapes = true, true // of a here-document
		return e.ExpandRaw(func(w string) (string, error) {
			out, _, err := lex.ProcessWord(w, env)
			return out, err
		})
	}
	return nil
}

// maxLabels bounds what goes into every record of the template.
const maxLabels = 10_000

func (s *stage) label(kvs ...instructions.KeyValuePair) {
	if s.config.Labels == nil {
		s.config.Labels = map[string]string{}
	}
	for _, kv := range kvs {
		if len(s.config.Labels) < maxLabels {
			s.config.Labels[kv.Key] = kv.Value
		}
	}
}

// defaultShell runs shell-form instructions where no SHELL says otherwise.
var defaultShell = []string{"/bin/sh", "-c"}

func (s *stage) shell() []string {
	if len(s.config.Shell) > 0 {
		return s.config.Shell
	}
	return defaultShell
}

func (s *stage) commandLine(c instructions.ShellDependantCmdLine) []string {
	if len(c.CmdLine) == 0 {
		return nil
	}
	if c.PrependShell {
		return append(slices.Clone(s.shell()), strings.Join(c.CmdLine, " "))
	}
	return slices.Clone(c.CmdLine)
}

func (d *dockerBuild) expose(s *stage, c *instructions.ExposeCommand) error {
	for _, p := range c.Ports {
		words, err := d.file.Lex().ProcessWords(p, s.scope.Variables())
		if err != nil {
			return err
		}
		for _, w := range words {
			ports, err := parsePorts(w)
			if err != nil {
				return err
			}
			for _, port := range ports {
				if !slices.Contains(s.config.ExposedPorts, port) {
					s.config.ExposedPorts = append(s.config.ExposedPorts, port)
				}
			}
		}
	}
	slices.Sort(s.config.ExposedPorts)
	return nil
}

// parsePorts reads "80", "80/udp" or "8000-8010/tcp".
func parsePorts(s string) ([]string, error) {
	bad := sandbox.Errorf(sandbox.CodeInvalid, "EXPOSE %s is not a port: give 1 to 65535, a range, and /tcp, /udp or /sctp after it", layer.Quote(s))
	ports, proto, ok := strings.Cut(strings.ToLower(s), "/")
	if !ok {
		proto = "tcp"
	}
	if proto != "tcp" && proto != "udp" && proto != "sctp" {
		return nil, bad
	}
	from, to, ranged := strings.Cut(ports, "-")
	if !ranged {
		to = from
	}
	lo, err := strconv.ParseUint(from, 10, 16)
	hi, err2 := strconv.ParseUint(to, 10, 16)
	if err != nil || err2 != nil || lo == 0 || hi < lo || hi-lo > 1000 {
		return nil, bad
	}
	var out []string
	for p := lo; p <= hi; p++ {
		out = append(out, fmt.Sprintf("%d/%s", p, proto))
	}
	return out, nil
}
