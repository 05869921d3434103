// Package dockerfile reads Dockerfiles: their stages, what a target needs of
// them, and how their variables expand. It runs nothing.
//
// Parsing is buildkit's, so that a file means here what it means to Docker.
package dockerfile

import (
	"bytes"
	"errors"
	"fmt"
	"path"
	"runtime"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// Limits of one Dockerfile.
const (
	MaxBytes        = 1 << 20
	maxInstructions = 5000
	maxStages       = 200
)

// Warning is something a Dockerfile says that is not done as it may expect.
type Warning struct {
	Line    int
	Message string
}

// File is a parsed Dockerfile.
type File struct {
	Stages   []instructions.Stage
	Warnings []Warning
	meta     []instructions.ArgCommand // before the first FROM
	escape   rune
}

// Errorf makes a CodeInvalid error about a line: Details["line"] has its
// number.
func Errorf(line int, format string, args ...any) error {
	return At(line, sandbox.Errorf(sandbox.CodeInvalid, format, args...))
}

// At says that err is about a line. It keeps err's code and details.
func At(line int, err error) error {
	var e *sandbox.Error
	if err == nil {
		return nil
	}
	if !errors.As(err, &e) {
		e = sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
	}
	if line < 1 || e.Details["line"] != "" {
		return e
	}
	at := sandbox.Errorf(e.Code, "Dockerfile line %d: %w", line, e)
	for k, v := range e.Details {
		at = at.With(k, v)
	}
	return at.With("line", strconv.Itoa(line))
}

// Line gives the number of an instruction's first line.
func Line(c interface{ Location() []parser.Range }) int { return first(c.Location()) }

func first(r []parser.Range) int {
	if len(r) == 0 {
		return 0
	}
	return r[0].Start.Line
}

// Parse reads a Dockerfile. Errors have CodeInvalid, the line and the reason.
func Parse(data []byte) (f *File, err error) {
	// The parser is not ours and the bytes are not trusted: a panic of it must
	// not take the daemon with it.
	defer func() {
		if r := recover(); r != nil {
			f, err = nil, sandbox.Errorf(sandbox.CodeInvalid, "the Dockerfile cannot be parsed: %v", r)
		}
	}()
	if len(data) > MaxBytes {
		return nil, sandbox.Errorf(sandbox.CodeTooLarge, "the Dockerfile has %d bytes: the most is %d", len(data), MaxBytes).With("limit", "dockerfile_bytes")
	}
	if i := bytes.IndexByte(data, 0); i >= 0 {
		return nil, Errorf(1+bytes.Count(data[:i], []byte("\n")), "it has a NUL byte: a Dockerfile is text")
	}
	ast, err := parser.Parse(bytes.NewReader(data))
	if err != nil {
		return nil, located(0, err)
	}
	f = &File{escape: ast.EscapeToken}
	if syntax, _, at, ok := parser.DetectSyntax(data); ok {
		f.warn(first(at), "the directive syntax=%s is ignored: Warren reads Dockerfiles itself", layer.Quote(syntax))
	}
	for _, w := range ast.Warnings {
		line := 0
		if w.Location != nil {
			line = w.Location.Start.Line
		}
		f.warn(line, "%s", w.Short)
	}
	if len(ast.AST.Children) > maxInstructions {
		return nil, sandbox.Errorf(sandbox.CodeTooLarge, "the Dockerfile has %d instructions: the most is %d", len(ast.AST.Children), maxInstructions).With("limit", "instructions")
	}
	for _, n := range ast.AST.Children {
		if err := f.instruction(n); err != nil {
			return nil, err
		}
	}
	if len(f.Stages) == 0 {
		return nil, Errorf(1, "it has no FROM: every Dockerfile starts from something, `FROM base` or `FROM scratch`")
	}
	return f, nil
}

func (f *File) instruction(n *parser.Node) error {
	cmd, err := instructions.ParseInstruction(n)
	if err != nil {
		return located(n.StartLine, err)
	}
	switch c := cmd.(type) {
	case *instructions.Stage:
		if len(f.Stages) >= maxStages {
			return Errorf(n.StartLine, "it has more than %d stages", maxStages)
		}
		f.Stages = append(f.Stages, *c)
		return nil
	case *instructions.ArgCommand:
		if len(f.Stages) == 0 {
			f.meta = append(f.meta, *c)
			return nil
		}
	}
	c, ok := cmd.(instructions.Command)
	if !ok {
		return Errorf(n.StartLine, "%s is not an instruction", layer.Quote(n.Value))
	}
	if len(f.Stages) == 0 {
		return Errorf(n.StartLine, "%s comes before the first FROM: only ARG may", strings.ToUpper(n.Value))
	}
	if err := supported(c); err != nil {
		return At(n.StartLine, err)
	}
	f.Stages[len(f.Stages)-1].AddCommand(c)
	return nil
}

func (f *File) warn(line int, format string, args ...any) {
	f.Warnings = append(f.Warnings, Warning{line, fmt.Sprintf(format, args...)})
}

// located makes the parser's error one of ours.
func located(line int, err error) error {
	var unknown *instructions.UnknownInstructionError
	if errors.As(err, &unknown) {
		return Errorf(max(line, unknown.Line), "%s is not an instruction%s", layer.Quote(strings.ToUpper(unknown.Instruction)), hint(err))
	}
	var le *parser.LocationError
	if errors.As(err, &le) && len(le.Locations) > 0 && line == 0 {
		line = first(le.Locations[0])
	}
	text := err.Error()
	if line == 0 {
		line = 1
	}
	return Errorf(line, "%s", strings.ToValidUTF8(text, "\uFFFD"))
}

// hint keeps buildkit's "did you mean".
func hint(err error) string {
	if _, h, ok := strings.Cut(err.Error(), "(did you mean"); ok {
		return " (did you mean" + h
	}
	return ""
}

// supported refuses what cannot be done, with what to do instead.
func supported(c instructions.Command) error {
	refuse := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeUnsupported, format, args...)
	}
	switch c := c.(type) {
	case *instructions.RunCommand:
		for _, flag := range c.FlagsUsed {
			switch flag {
			case "mount":
				return refuse("RUN --mount is not supported: COPY what the step reads, and let it remove what it must not leave behind")
			case "network":
				if instructions.GetNetwork(c) == instructions.NetworkHost {
					return refuse("RUN --network=host is not supported: a build step never has the host's network")
				}
			case "security":
				if instructions.GetSecurity(c) != instructions.SecuritySandbox {
					return refuse("RUN --security=insecure is not supported: every step runs in a sandbox")
				}
			default:
				return refuse("RUN --%s is not supported", flag)
			}
		}
	case *instructions.AddCommand:
		if c.KeepGitDir != nil || c.Checksum != "" {
			return refuse("ADD --checksum and --keep-git-dir are for URLs, which are not supported: use RUN curl or RUN git")
		}
		for _, s := range c.SourcePaths {
			if isURL(s) {
				return refuse("ADD of a URL is not supported: use RUN curl -fsSLO %s", layer.Quote(s))
			}
		}
	case *instructions.CopyCommand:
		if c.Parents {
			return refuse("COPY --parents is not supported: name the destination of each directory")
		}
		if strings.Contains(c.From, "$") {
			return refuse("COPY --from takes no variables: name a stage by FROM … AS, and copy from it")
		}
	}
	return nil
}

func isURL(s string) bool {
	for _, p := range []string{"http://", "https://", "git://", "ssh://", "git@"} {
		if strings.HasPrefix(strings.ToLower(s), p) {
			return true
		}
	}
	return false
}

// ParseOnBuild reads the instructions that a base image has for what is built
// from it.
func (f *File) ParseOnBuild(triggers []string) ([]instructions.Command, error) {
	if len(triggers) == 0 {
		return nil, nil
	}
	of, err := Parse([]byte("FROM scratch\n" + strings.Join(triggers, "\n")))
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeBadTemplate, "the base image's ONBUILD instructions cannot be used: %s", err)
	}
	if len(of.Stages) != 1 {
		return nil, sandbox.Errorf(sandbox.CodeBadTemplate, "the base image has an ONBUILD FROM, which is not allowed")
	}
	return of.Stages[0].Commands, nil
}

// Lex gives an expander of words with the file's escape character.
func (f *File) Lex() *shell.Lex { return shell.NewLex(f.escape) }

// Plan is what building a target takes.
type Plan struct {
	Stages []PlannedStage // in the order in which they are built; the target is the last
	Steps  int            // instructions of them all, FROM included
	Meta   map[string]string
}

// PlannedStage is one stage that the target needs.
type PlannedStage struct {
	Index int // in File.Stages
	Stage *instructions.Stage
	Base  string // expanded; "scratch", an image or a template, where From is -1
	From  int    // the index of the stage it starts from, or -1
	Line  int
}

// Plan finds the stages that target ("" is the last; a name or a number)
// needs, with args for ARG before the first FROM.
func (f *File) Plan(target string, args map[string]string) (*Plan, error) {
	p := &Plan{Meta: map[string]string{}}
	if err := f.expandMeta(p.Meta, args); err != nil {
		return nil, err
	}
	last := len(f.Stages) - 1
	if target != "" {
		i, ok := f.find(target, len(f.Stages))
		if !ok {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "the Dockerfile has no stage %s: it has %s", layer.Quote(target), f.names())
		}
		last = i
	}
	needed := make([]bool, len(f.Stages))
	stages := make([]PlannedStage, len(f.Stages))
	needed[last] = true
	for i := last; i >= 0; i-- { // a stage needs earlier ones only
		if !needed[i] {
			continue
		}
		s, err := f.planStage(i, p.Meta)
		if err != nil {
			return nil, At(first(f.Stages[i].Location), err)
		}
		stages[i] = s
		if s.From >= 0 {
			needed[s.From] = true
		}
		for _, c := range s.Stage.Commands {
			if cp, ok := c.(*instructions.CopyCommand); ok && cp.From != "" {
				if from, ok := f.find(cp.From, i); ok {
					needed[from] = true
				}
			}
		}
	}
	for i, s := range stages {
		if needed[i] {
			p.Stages = append(p.Stages, s)
			p.Steps += 1 + len(s.Stage.Commands)
		}
	}
	return p, nil
}

func (f *File) planStage(i int, meta map[string]string) (PlannedStage, error) {
	st := &f.Stages[i]
	s := PlannedStage{Index: i, Stage: st, From: -1, Line: first(st.Location)}
	env := Env(meta)
	base, _, err := f.Lex().ProcessWord(st.BaseName, env)
	if err != nil {
		return s, Errorf(s.Line, "FROM %s: %v", layer.Quote(st.BaseName), err)
	}
	if base == "" {
		return s, Errorf(s.Line, "FROM %s is empty once its ARGs are put in: give them by ARG before it, or as build arguments", layer.Quote(st.BaseName))
	}
	s.Base = base
	if from, ok := f.named(base, i); ok {
		s.From = from
	}
	if st.Platform != "" {
		platform, _, err := f.Lex().ProcessWord(st.Platform, env)
		if err != nil {
			return s, Errorf(s.Line, "FROM --platform=%s: %v", layer.Quote(st.Platform), err)
		}
		if path.Clean(platform) != Platform() {
			return s, At(s.Line, sandbox.Errorf(sandbox.CodeUnsupported, "FROM --platform=%s: this host builds for %s only", layer.Quote(platform), Platform()))
		}
	}
	return s, nil
}

// Platform is what this host builds for.
func Platform() string { return "linux/" + runtime.GOARCH }

// named finds an earlier stage by its name.
func (f *File) named(name string, before int) (int, bool) {
	for i := before - 1; i >= 0; i-- {
		if f.Stages[i].Name != "" && strings.EqualFold(f.Stages[i].Name, name) {
			return i, true
		}
	}
	return 0, false
}

// find finds a stage before the given one by name or number.
func (f *File) find(name string, before int) (int, bool) {
	if i, ok := f.named(name, before); ok {
		return i, true
	}
	if i, err := strconv.Atoi(name); err == nil && i >= 0 && i < before {
		return i, true
	}
	return 0, false
}

// Source finds the stage that COPY --from=name of stage i means; false: it is
// an image or a template.
func (f *File) Source(name string, i int) (int, bool) { return f.find(name, i) }

func (f *File) names() string {
	var names []string
	for i, s := range f.Stages {
		if s.Name != "" {
			names = append(names, layer.Quote(s.Name))
		} else {
			names = append(names, strconv.Itoa(i))
		}
		if len(names) == 20 {
			break
		}
	}
	return strings.Join(names, ", ")
}
