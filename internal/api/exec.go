package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// exitTimedOut is coreutils timeout(1)'s exit code for a command that it ended.
const exitTimedOut = 124

// killWait bounds how long we try to end a command that nobody waits for.
const killWait = 5 * time.Second

func (a *API) registerExec() {
	register(a, huma.Operation{
		OperationID: "exec", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/exec", Tags: []string{"inside"},
		Summary: "Run a command to its end",
		Description: "Collects what it writes. A command that fails is no error: see exit_code. If the client goes away the command is killed. " +
			"For live output and input use the agent's process service under /v1/sandboxes/{id}/agent/.",
		MaxBodyBytes: maxExecJSON,
	}, a.exec)
}

type execInput struct {
	ByID
	Body wire.Exec
}

func (a *API) exec(ctx context.Context, in *execInput) (*body[wire.ExecResult], error) {
	id, err := sandbox.ParseID(in.ID)
	if err != nil {
		return nil, err
	}
	cmd, err := toCommand(in.Body)
	if err != nil {
		return nil, err
	}
	timeout, err := seconds(in.Body.Timeout)
	if err != nil {
		return nil, err
	}
	agent, leave, err := a.enter(ctx, id)
	if err != nil {
		return nil, err
	}
	defer leave()
	before := a.oomKills(ctx, id, false)
	cmd.Tag = "warren.exec." + rand.Text()

	// What ends the command early: its timeout, or the client's going away.
	// The agent only hears of the first, so the second is ours to pass on.
	runCtx, cancel := context.WithCancel(ctx)
	if timeout > 0 {
		runCtx, cancel = context.WithTimeout(ctx, timeout)
	}
	defer cancel()
	start := time.Now()
	res, err := agent.Run(runCtx, cmd)
	took := time.Since(start)
	out := wire.ExecResult{DurationMS: float64(took.Microseconds()) / 1000, Truncated: res.StdoutTruncated || res.StderrTruncated}
	if err != nil {
		if runCtx.Err() != nil {
			abandon(ctx, agent, cmd.Tag, res.PID != 0)
		}
		// The agent counts, too, and may say so a little before our own clock does.
		if ctx.Err() != nil || timeout == 0 || (runCtx.Err() == nil && sandbox.CodeOf(err) != sandbox.CodeTimeout) {
			return nil, a.whyCut(ctx, id, ofUser(err))
		}
		out.TimedOut, out.ExitCode = true, exitTimedOut
	} else {
		out.ExitCode, out.Signal = wire.ExitStatus(res.ExitCode, res.Exited, res.Status)
		if out.Signal == "SIGKILL" && timeout > 0 && took >= timeout {
			out.TimedOut, out.ExitCode, out.Signal = true, exitTimedOut, ""
		}
	}
	if out.Signal == "SIGKILL" || out.ExitCode == 137 {
		out.OOM = a.oomKills(ctx, id, true) > before
	}
	out.Stdout, out.StdoutBase64 = textOrBytes(res.Stdout)
	out.Stderr, out.StderrBase64 = textOrBytes(res.Stderr)
	return &body[wire.ExecResult]{out}, nil
}

// abandon ends the command of that tag, which nobody waits for any more. Where
// its start was not told yet, it may be on its way to the agent, and is looked
// for a few times.
func abandon(ctx context.Context, agent *agentclient.Client, tag string, started bool) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), killWait)
	defer stop()
	for range 10 {
		err := agent.KillTagged(ctx, tag)
		if started || sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return // not_found once it started: the agent was faster
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// ofUser makes the agent's "unauthenticated" what it is to our client: the
// agent says so of a user that it does not know, as E2B's does. The daemon's
// own token is always right.
func ofUser(err error) error {
	var e *sandbox.Error
	if errors.As(err, &e) && e.Code == sandbox.CodeUnauthenticated {
		return sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
	}
	return err
}

// endWait is how long the end of a sandbox may take to be on record after its
// connections broke off.
const endWait = 2 * time.Second

// whyCut makes of an agent that cannot be reached the end of its sandbox, where
// that is why.
func (a *API) whyCut(ctx context.Context, id sandbox.ID, err error) error {
	if code := sandbox.CodeOf(err); code != sandbox.CodeUnavailable && code != sandbox.CodeConflict {
		return err
	}
	for end := time.Now().Add(endWait); ; {
		sb, gerr := a.back.Get(ctx, tenantOf(ctx), id)
		switch {
		case gerr != nil:
			return err
		case sb.Reason != "":
			detail := ""
			if sb.Detail != "" {
				detail = " (" + sb.Detail + ")"
			}
			return sandbox.Errorf(sandbox.CodeUnavailable, "the sandbox ended under the command: %s%s", sb.Reason, detail).With("reason", string(sb.Reason))
		case time.Now().After(end):
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// oomKills gives how many OOM kills the sandbox has had: as recorded, or, where
// fresh, as the kernel counts them now.
func (a *API) oomKills(ctx context.Context, id sandbox.ID, fresh bool) int64 {
	if fresh {
		if st, err := a.back.Stats(ctx, tenantOf(ctx), id); err == nil {
			return st.OOMKills
		}
	}
	sb, err := a.back.Get(ctx, tenantOf(ctx), id)
	if err != nil {
		return 0
	}
	if sb.Reason == sandbox.ReasonOOM {
		return sb.OOMKills + 1
	}
	return sb.OOMKills
}

func toCommand(e wire.Exec) (agentclient.Command, error) {
	argv := e.Cmd.Args()
	switch {
	case len(argv) == 0 || argv[0] == "":
		return agentclient.Command{}, sandbox.Errorf(sandbox.CodeInvalid, "cmd is empty: give a list of strings, or a command line as one string")
	case e.Stdin != "" && e.StdinBase64 != nil:
		return agentclient.Command{}, sandbox.Errorf(sandbox.CodeInvalid, "give one of stdin and stdin_base64")
	}
	cmd := agentclient.Command{
		Path: argv[0], Args: argv[1:], Env: e.Env, Cwd: e.Cwd, User: e.User, MaxOutput: int(e.MaxOutput),
	}
	switch {
	case e.Stdin != "":
		cmd.Stdin = strings.NewReader(e.Stdin)
	case e.StdinBase64 != nil:
		cmd.Stdin = bytes.NewReader(e.StdinBase64)
	}
	return cmd, nil
}

// textOrBytes gives p in the one of the two forms that can carry it. A
// character that was cut by max_output makes it bytes, too: nothing is lost.
func textOrBytes(p []byte) (*string, []byte) {
	if utf8.Valid(p) {
		s := string(p)
		return &s, nil
	}
	return nil, p
}
