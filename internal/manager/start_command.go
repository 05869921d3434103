package manager

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// startTag names the start command among a sandbox's commands, so that the
// next daemon finds it.
const startTag = "warren.start"

// Bounds of the wait for a template to be ready.
const (
	readyTimeout  = 2 * time.Minute  // in all
	readyAttempt  = 20 * time.Second // one run of the ready command
	readyInterval = 100 * time.Millisecond
)

// startCommand runs the template's start command, which goes on while the
// sandbox lives, and waits until its ready command succeeds.
func (m *Manager) startCommand(ctx context.Context, l *live, agent *agentclient.Client, c template.Config) error {
	if c.StartCmd == "" && c.ReadyCmd == "" {
		return nil
	}
	if !c.HasShell {
		return sandbox.Errorf(sandbox.CodeBadTemplate, "the template has a start or ready command and no /bin/sh to run it: build it without them, or from an image with a shell")
	}
	var start *startRun
	if c.StartCmd != "" {
		var err error
		if start, err = m.beginStart(ctx, l, agent, c.StartCmd); err != nil {
			return err
		}
	}
	if c.ReadyCmd == "" {
		return nil
	}
	return waitReady(ctx, agent, c.ReadyCmd, start)
}

// startRun is a start command under way.
type startRun struct {
	started chan struct{} // closed when it runs
	ended   chan struct{} // closed when it ended or is not followed any more
	result  agentclient.Result
	err     error // read both after ended
}

func (m *Manager) beginStart(ctx context.Context, l *live, agent *agentclient.Client, command string) (*startRun, error) {
	s := &startRun{started: make(chan struct{}), ended: make(chan struct{})}
	out := m.consoleOutput(l)
	out.Start = func(uint32) error {
		close(s.started)
		return nil
	}
	m.tasks.run(func() {
		defer close(s.ended)
		// Not ctx: the command, and the reading of its output, outlive the create.
		s.result, s.err = agent.Exec(l.ctx, agentclient.Command{Path: "/bin/sh", Args: []string{"-c", command}, Tag: startTag}, out)
		m.tellStartEnd(l, s.result, s.err)
	})
	select {
	case <-s.started:
		return s, nil
	case <-s.ended:
		select {
		case <-s.started: // both at once: it ran and ended
			return s, nil
		default:
		}
		return nil, badStart(s.err)
	case <-ctx.Done():
		return nil, ctxError(ctx, "run the template's start command")
	}
}

func badStart(err error) error {
	return sandbox.Errorf(sandbox.CodeBadTemplate, "the template's start command could not be run: %w", err)
}

// waitReady runs the ready command until it exits with 0.
func waitReady(ctx context.Context, agent *agentclient.Client, command string, start *startRun) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	var last string // how the newest attempt ended
	for {
		attempt, cancel := context.WithTimeout(ctx, readyAttempt)
		r, err := agent.Run(attempt, agentclient.Command{Path: "/bin/sh", Args: []string{"-c", command}, MaxOutput: 4096})
		cancel()
		switch {
		case err == nil && r.Exited && r.ExitCode == 0:
			return nil
		case err == nil:
			last = r.Status
			if text := strings.TrimSpace(string(r.Stderr)); text != "" {
				last += ": " + short(text)
			}
		case sandbox.CodeOf(err) != sandbox.CodeTimeout && ctx.Err() == nil:
			return sandbox.Errorf(sandbox.CodeBadTemplate, "the template's ready command could not be run: %w", err)
		default:
			last = err.Error()
		}
		select {
		case <-time.After(readyInterval):
		case <-ctx.Done():
			if context.Cause(ctx) != context.DeadlineExceeded {
				return ctxError(ctx, "wait for the template to be ready")
			}
			how := "still runs"
			if start != nil {
				select {
				case <-start.ended:
					how = "ended (" + start.result.Status + ")"
				default:
				}
			}
			return sandbox.Errorf(sandbox.CodeBadTemplate, "the template was not ready after %v: its ready command's last result was %q, its start command %s", readyTimeout, last, how)
		}
	}
}

// consoleOutput sends a command's output to the sandbox's console. Writes that
// fail drop the output: the sandbox is going away, or its disk is full.
func (m *Manager) consoleOutput(l *live) agentclient.Output {
	c := &consoleWriter{ctx: l.ctx, dir: m.dir(l.record().HostID())}
	write := func(p []byte) error {
		c.Write(p)
		return nil
	}
	return agentclient.Output{Stdout: write, Stderr: write, PTY: write}
}

func (m *Manager) tellStartEnd(l *live, r agentclient.Result, err error) {
	if err != nil || l.ctx.Err() != nil {
		return // the sandbox ended, or the daemon does
	}
	c := &consoleWriter{ctx: l.ctx, dir: m.dir(l.record().HostID())}
	fmt.Fprintf(c, "warren: the start command ended: %s\n", r.Status)
}

// refollowStart goes on taking the output of a start command that an earlier
// daemon began.
func (m *Manager) refollowStart(ctx context.Context, l *live, agent *agentclient.Client) {
	all, err := agent.Processes(ctx)
	if err != nil {
		m.log.WarnContext(ctx, "look for the start command of an adopted sandbox", "sandbox", l.id, "error", err)
		return
	}
	for _, p := range all {
		if p.GetTag() != startTag {
			continue
		}
		pid := p.GetPid()
		m.tasks.run(func() {
			r, err := agent.Attach(l.ctx, pid, m.consoleOutput(l))
			m.tellStartEnd(l, r, err)
		})
	}
}
