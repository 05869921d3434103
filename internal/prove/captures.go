package prove

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/prove/forkproof"
	"github.com/warrenhq/warren/internal/sandbox"
)

// captures tells which captures work and what they preserve, by the suite
// that the tests run, too.
func (m *measurement) captures(ctx context.Context) ([]Row, error) {
	children := 3
	if m.o.Quick {
		children = 2
	}
	results, err := forkproof.Run(ctx, m, forkproof.Options{
		Children: children, Progress: func(line string) { m.progress("%s: %s", m.runtime, line) },
	})
	var rows []Row
	for _, r := range results {
		row := Row{ID: r.ID, Name: r.Name, Detail: oneLine(r.Evidence), TookMS: millis(r.Took)}
		switch r.Verdict {
		case forkproof.Yes:
			row.Verdict = Yes
		case forkproof.No:
			row.Verdict = No
		default:
			row.Verdict = Skip
		}
		rows = append(rows, row)
	}
	return rows, err
}

var (
	_ forkproof.Platform = (*measurement)(nil)
	_ forkproof.Sandbox  = (*subject)(nil)
)

// Create is of forkproof.Platform.
func (m *measurement) Create(ctx context.Context, env map[string]string, ephemeral []string) (forkproof.Sandbox, error) {
	sb, err := m.create(ctx, wire.CreateSandbox{Env: env, EphemeralEnv: ephemeral})
	if err != nil {
		return nil, err
	}
	return &subject{m, sb.ID}, nil
}

// FromSnapshot is of forkproof.Platform.
func (m *measurement) FromSnapshot(ctx context.Context, snapshot string) (forkproof.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	sb, err := m.o.Client.CreateSandbox(ctx, wire.CreateSandbox{
		Snapshot: snapshot, Timeout: lifetime.Seconds(), Metadata: map[string]string{Label: m.run},
	})
	if err != nil {
		return nil, err
	}
	return &subject{m, sb.ID}, nil
}

// RemoveSnapshot is of forkproof.Platform.
func (m *measurement) RemoveSnapshot(ctx context.Context, snapshot string) error {
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	return m.o.Client.RemoveSnapshot(ctx, snapshot)
}

// subject is one sandbox by the daemon's API.
type subject struct {
	m  *measurement
	id string
}

func (s *subject) ID() string { return s.id }

func (s *subject) Exec(ctx context.Context, line string, limit time.Duration) (forkproof.Output, error) {
	res, err := s.m.exec(ctx, s.id, wire.Exec{
		Cmd: wire.Command{Argv: []string{"/bin/sh", "-c", line}}, User: "root", Cwd: "/", Timeout: limit.Seconds(),
	})
	if err == nil && res.TimedOut {
		err = fmt.Errorf("a command was not done after %s", limit)
	}
	return forkproof.Output{Stdout: string(res.OutBytes()), Stderr: string(res.ErrBytes()), Code: res.ExitCode}, err
}

func (s *subject) WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	return s.m.o.Client.WriteFile(ctx, s.id, path, "root", bytes.NewReader(data), int64(len(data)), mode)
}

func (s *subject) Dial(ctx context.Context, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	return s.m.o.Client.Tunnel(ctx, s.id, port)
}

// one calls a call about the sandbox that has no result.
func (s *subject) one(ctx context.Context, f func(context.Context, string) error) error {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	return f(ctx, s.id)
}

func (s *subject) Suspend(ctx context.Context) error   { return s.one(ctx, s.m.o.Client.Suspend) }
func (s *subject) Unsuspend(ctx context.Context) error { return s.one(ctx, s.m.o.Client.Unsuspend) }
func (s *subject) Hibernate(ctx context.Context) error { return s.one(ctx, s.m.o.Client.Hibernate) }
func (s *subject) Wake(ctx context.Context) error      { return s.one(ctx, s.m.o.Client.Wake) }

func (s *subject) Kill(ctx context.Context) error {
	s.m.kill(ctx, s.id)
	return nil
}

func (s *subject) Snapshot(ctx context.Context, kind string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	snap, err := s.m.o.Client.CreateSnapshot(ctx, s.id, wire.CreateSnapshot{Kind: sandbox.SnapshotKind(kind)})
	return snap.ID, err
}

func (s *subject) Fork(ctx context.Context, n int) (forkproof.Forked, error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	list, err := s.m.o.Client.Fork(ctx, s.id, wire.Fork{
		Count: n, Timeout: lifetime.Seconds(), Metadata: map[string]string{Label: s.m.run},
	})
	out := forkproof.Forked{Kind: string(list.Kind)}
	for _, f := range list.Forks {
		switch {
		case f.Sandbox != nil:
			out.Sandboxes = append(out.Sandboxes, &subject{s.m, f.Sandbox.ID})
		case f.Error != nil:
			out.Errors = append(out.Errors, f.Error.Err())
		}
	}
	return out, err
}

func (s *subject) OpenTerminal(ctx context.Context, argv ...string) (forkproof.Terminal, error) {
	// The stream outlives the call's ctx: it ends with Close.
	w := newWatched()
	streams, cancel := context.WithCancel(context.WithoutCancel(ctx))
	run, err := s.m.o.Client.Start(streams, s.id, client.Command{Args: argv, User: "root", TTY: &client.Size{Cols: 200, Rows: 50}, Stdout: w})
	return s.terminal(run, err, w, streams, cancel)
}

// scrollback is how many bytes of a terminal's past are asked for.
const scrollback = 64 << 10

func (s *subject) AttachTerminal(ctx context.Context, pid uint32) (forkproof.Terminal, error) {
	w := newWatched()
	streams, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel) // an attach that is not answered ends with ctx
	run, err := s.m.o.Client.Attach(streams, s.id, pid, scrollback, w)
	stop()
	return s.terminal(run, err, w, streams, cancel)
}

func (s *subject) terminal(run *client.Running, err error, w *watched, ctx context.Context, cancel func()) (forkproof.Terminal, error) {
	if err != nil {
		cancel()
		return nil, err
	}
	t := &terminal{run: run, out: w, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(t.done)
		_, err := run.Wait(ctx)
		if err == nil {
			err = io.EOF
		}
		w.end(err)
	}()
	return t, nil
}

// terminal is a stream of a command's terminal by the daemon's API.
type terminal struct {
	run    *client.Running
	out    *watched
	cancel func()
	done   chan struct{}
}

func (t *terminal) PID() uint32 { return t.run.PID }

func (t *terminal) Send(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	return t.run.Type(ctx, []byte(text))
}

func (t *terminal) ReadUntil(ctx context.Context, want string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, execLimit)
	defer cancel()
	return t.out.until(ctx, want)
}

// Close detaches.
func (t *terminal) Close() {
	t.cancel()
	<-t.done
}

// watched keeps what was written to it, up to a bound, for one who waits.
type watched struct {
	mu   sync.Mutex
	text bytes.Buffer
	err  error
	more chan struct{} // closed and made anew with each change
}

func newWatched() *watched { return &watched{more: make(chan struct{})} }

const maxWatched = 1 << 20

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.text.Len()+len(p) > maxWatched {
		return 0, errors.New("the terminal wrote more than 1 MiB")
	}
	w.text.Write(p)
	close(w.more)
	w.more = make(chan struct{})
	return len(p), nil
}

func (w *watched) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
	close(w.more)
	w.more = make(chan struct{})
}

func (w *watched) until(ctx context.Context, want string) (string, error) {
	for {
		w.mu.Lock()
		text, err, more := w.text.String(), w.err, w.more
		w.mu.Unlock()
		switch {
		case strings.Contains(text, want):
			return text, nil
		case err != nil:
			return text, fmt.Errorf("the terminal ended: %w", err)
		}
		select {
		case <-ctx.Done():
			return text, fmt.Errorf("%q was not written in time", want)
		case <-more:
		}
	}
}
