// Package forkproof is the suite of checks on what captures preserve and what
// forks must not share: clock, randomness, identity, secrets, connections,
// processes. It goes by an interface, so that the tests of every runtime and
// `warren prove` run the same checks. What a runtime cannot do is a measured No.
package forkproof

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"time"
)

// Platform makes sandboxes.
type Platform interface {
	// Create makes a sandbox with environment variables for its commands, of
	// which those named by ephemeral are for no fork or snapshot of it.
	Create(ctx context.Context, env map[string]string, ephemeral []string) (Sandbox, error)
	// FromSnapshot makes one from a snapshot.
	FromSnapshot(ctx context.Context, snapshot string) (Sandbox, error)
	RemoveSnapshot(ctx context.Context, snapshot string) error
}

// Kinds of capture.
const (
	Disk = "disk"
	Full = "full"
)

// Sandbox is one sandbox as its user has it.
type Sandbox interface {
	ID() string
	// Exec runs a command line by /bin/sh as root.
	Exec(ctx context.Context, line string, limit time.Duration) (Output, error)
	WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error
	// Dial connects to a TCP port inside.
	Dial(ctx context.Context, port int) (net.Conn, error)
	// OpenTerminal starts a command in a terminal, as root; AttachTerminal
	// attaches to one that runs, and gives what it wrote before first.
	OpenTerminal(ctx context.Context, argv ...string) (Terminal, error)
	AttachTerminal(ctx context.Context, pid uint32) (Terminal, error)
	Suspend(ctx context.Context) error
	Unsuspend(ctx context.Context) error
	Hibernate(ctx context.Context) error
	Wake(ctx context.Context) error
	// Snapshot gives the name to make sandboxes of it by.
	Snapshot(ctx context.Context, kind string) (string, error)
	// Fork makes n copies and tells the kind of capture that they are of. An
	// error of one copy is in Forked; the call's own is that there are none.
	Fork(ctx context.Context, n int) (Forked, error)
	// Kill ends it, also where ctx has ended.
	Kill(ctx context.Context) error
}

// Output is how a command ended.
type Output struct {
	Stdout, Stderr string
	Code           int
}

// Forked is what became of a fork.
type Forked struct {
	Kind      string
	Sandboxes []Sandbox
	Errors    []error
}

// Terminal is a stream of a command's terminal.
type Terminal interface {
	PID() uint32
	// Send types text.
	Send(ctx context.Context, text string) error
	// ReadUntil reads until what was read since the attach has want, and gives
	// it all.
	ReadUntil(ctx context.Context, want string) (string, error)
	// Close detaches; the command goes on.
	Close()
}

// Verdict is what a check found.
type Verdict string

// The verdicts.
const (
	Yes         Verdict = "yes"
	No          Verdict = "no"
	Unsupported Verdict = "unsupported" // it could not be tried: the evidence says why
)

// Result is one check's.
type Result struct {
	ID       string
	Name     string
	Verdict  Verdict
	Evidence string
	Took     time.Duration
}

// Options are what is asked of a run.
type Options struct {
	Children int               // 0: 3
	Progress func(line string) // nil: nobody wants to know
}

// suite is one run.
type suite struct {
	p       Platform
	o       Options
	results []Result
	made    []Sandbox
}

// Run runs every check. The error is of a platform on which not even a sandbox
// could be made, or of ctx; all else is in the results. Sandboxes that it made
// are ended when it returns.
func Run(ctx context.Context, p Platform, o Options) ([]Result, error) {
	if o.Children == 0 {
		o.Children = 3
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	s := &suite{p: p, o: o}
	defer func() {
		for _, sb := range s.made {
			sb.Kill(ctx)
		}
	}()
	for _, part := range []func(context.Context) error{s.suspend, s.disk, s.forks} {
		if err := part(ctx); err != nil {
			return s.results, err
		}
		if ctx.Err() != nil {
			return s.results, ctx.Err()
		}
	}
	return s.results, nil
}

// create makes a sandbox that the suite ends.
func (s *suite) create(ctx context.Context, env map[string]string, ephemeral []string) (Sandbox, error) {
	sb, err := s.p.Create(ctx, env, ephemeral)
	if err == nil {
		s.made = append(s.made, sb)
	}
	return sb, err
}

func (s *suite) add(id, name string, start time.Time, v Verdict, format string, args ...any) {
	s.results = append(s.results, Result{ID: id, Name: name, Verdict: v, Evidence: fmt.Sprintf(format, args...), Took: time.Since(start)})
}

// verdict adds Yes for a nil error, else No with what it says.
func (s *suite) verdict(id, name string, start time.Time, err error, format string, args ...any) {
	if err != nil {
		s.add(id, name, start, No, "%v", err)
		return
	}
	s.add(id, name, start, Yes, format, args...)
}

// Limits of one command inside, and of what is waited for.
const (
	execLimit = 30 * time.Second
	waitLimit = 40 * time.Second
)

// sh runs a command line that has to succeed and gives its trimmed output.
func sh(ctx context.Context, sb Sandbox, line string) (string, error) {
	out, err := sb.Exec(ctx, line, execLimit)
	if err != nil {
		return "", err
	}
	if out.Code != 0 {
		msg := strings.TrimSpace(out.Stderr + out.Stdout)
		if i := strings.LastIndexByte(msg, '\n'); i >= 0 {
			msg = msg[i+1:]
		}
		if msg == "" {
			msg = fmt.Sprintf("exit code %d", out.Code)
		}
		return "", fmt.Errorf("%s", msg)
	}
	return strings.TrimSpace(out.Stdout), nil
}

// pause waits for d or ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
