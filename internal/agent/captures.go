package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/files"
	"github.com/warrenhq/warren/internal/agent/session"
)

// What a hook may take, and what all together and the SSH keys may.
const (
	hookTimeout   = 10 * time.Second
	hooksTimeout  = 30 * time.Second
	maxHookOutput = 4 << 10 // of its last output, in an error
)

// whileFrozen are the calls that are answered while the processes are stopped.
func whileFrozen(path string) bool {
	switch path {
	case control.PathHealth, control.PathInit, control.PathFreeze, control.PathThaw, control.PathRestore:
		return true
	}
	return false
}

// handleFreeze serves POST /freeze.
func (a *Agent) handleFreeze(w http.ResponseWriter, r *http.Request) {
	if !a.turn(r.Context()) {
		return
	}
	defer a.endTurn()
	if err := a.freeze(r.Context()); err != nil {
		files.WriteStatus(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// freeze stops everything. The caller has the turn.
func (a *Agent) freeze(ctx context.Context) error {
	if a.freezer.Frozen() {
		return nil
	}
	a.reaper.Pause()
	a.answers.hold()
	if err := a.freezer.Freeze(ctx); err != nil {
		a.answers.release()
		a.reaper.Resume()
		return err
	}
	return nil
}

// thaw lets everything go on that freeze stopped. The caller has the turn.
func (a *Agent) thaw() {
	if a.freezer.Frozen() {
		a.freezer.Thaw()
		a.reaper.Resume()
		a.answers.release()
	}
}

// handleThaw serves POST /thaw.
func (a *Agent) handleThaw(w http.ResponseWriter, r *http.Request) {
	if !a.turn(r.Context()) {
		return
	}
	defer a.endTurn()
	a.thaw()
	w.WriteHeader(http.StatusNoContent)
}

// handleRestored serves POST /restored: everything that has to be new in a
// restored sandbox is made new while its processes are stopped, and then they
// go on. If anything fails they stay stopped, and the capture's token is still
// the one in force: the call can be repeated.
func (a *Agent) handleRestored(w http.ResponseWriter, r *http.Request) {
	var req control.RestoredRequest
	err := parseBody(http.MaxBytesReader(w, r.Body, maxInit), &req)
	if err == nil {
		err = checkInit(req.InitRequest)
	}
	if err == nil {
		err = a.checkUser(req.DefaultUser)
	}
	if err != nil {
		refuse(w, err)
		return
	}
	if !a.turn(r.Context()) {
		return
	}
	defer a.endTurn()
	// Under the turn: another restored may have changed the token.
	if !a.session.Allowed(r.Header.Get(control.TokenHeader)) {
		files.WriteStatus(w, http.StatusUnauthorized, "this sandbox was restored before: give its access token in the "+control.TokenHeader+" header")
		return
	}
	if err := a.restored(r.Context(), req); err != nil {
		files.WriteError(w, fmt.Errorf("the sandbox stays frozen: %w", err))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *Agent) restored(ctx context.Context, req control.RestoredRequest) error {
	// A capture of a sandbox that was not frozen: too late for what ran in the
	// meantime, not for what follows.
	if err := a.freeze(ctx); err != nil {
		return err
	}
	// Connections of the old life: the daemon's of then, whose ends are the
	// source's now.
	a.conns.dropOthers(ctx)
	a.tunnels.Drop()
	if err := a.host.Apply(req.InitRequest, !req.Wake); err != nil {
		return err
	}
	if err := a.host.Verify(req.InitRequest); err != nil {
		return err
	}
	if err := a.renew(ctx, req.InitRequest, req.Wake); err != nil {
		return err
	}
	// What processes that run do with it is theirs: see docs/decisions/0002-freeze.md.
	if err := a.freezer.SignalAll(syscall.SIGURG); err != nil {
		return err
	}
	a.session.Restored(req)
	a.thaw()
	return nil
}

// renew makes what is a sandbox's own beside its name: SSH host keys, a
// generation, and what the hooks make.
func (a *Agent) renew(ctx context.Context, req control.InitRequest, wake bool) error {
	ctx, cancel := context.WithTimeout(ctx, hooksTimeout)
	defer cancel()
	if !wake {
		if err := a.newHostKeys(ctx); err != nil {
			return fmt.Errorf("new SSH host keys: %w", err)
		}
	}
	generation, err := a.host.Generation()
	if err != nil {
		return fmt.Errorf("a new generation: %w", err)
	}
	return a.runHooks(ctx, req, wake, generation)
}

// newHostKeys makes the SSH server's keys anew, if it has any, and tells the
// server that runs.
func (a *Agent) newHostKeys(ctx context.Context) error {
	keys, err := a.host.HostKeys()
	if err != nil || len(keys) == 0 {
		return err
	}
	keygen, err := exec.LookPath("ssh-keygen")
	if err != nil {
		return fmt.Errorf("the sandbox has keys but no ssh-keygen to make new ones: install openssh-client, or remove %s", keys[0].Path)
	}
	for _, k := range keys {
		tmp := k.Path + ".new"
		os.Remove(tmp)
		if err := a.run(ctx, hooksTimeout, []string{keygen, "-q", "-t", k.Type, "-N", "", "-f", tmp}, nil); err != nil {
			return err
		}
		if err := errors.Join(os.Rename(tmp+".pub", k.Path+".pub"), os.Rename(tmp, k.Path)); err != nil {
			return err
		}
	}
	data, err := os.ReadFile(a.host.Run + "/sshd.pid")
	if err != nil {
		return nil
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil || pid < 2 {
		return nil
	}
	if comm, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm"); string(bytes.TrimSpace(comm)) == "sshd" {
		syscall.Kill(pid, syscall.SIGHUP) // it reads its keys again, when it goes on
	}
	return nil
}

// runHooks runs the programs of /etc/warren/restored.d, one after the other. A
// hook must not wait for a process of the sandbox: these are still stopped.
func (a *Agent) runHooks(ctx context.Context, req control.InitRequest, wake bool, generation string) error {
	hooks, err := a.host.Hooks()
	if err != nil {
		return err
	}
	for _, hook := range hooks {
		err := a.run(ctx, hookTimeout, []string{hook}, []string{
			"WARREN_SANDBOX_ID=" + req.SandboxID,
			"WARREN_HOSTNAME=" + req.Hostname,
			"WARREN_GENERATION=" + generation,
			"WARREN_WAKE=" + strconv.FormatBool(wake),
		})
		if err != nil {
			return fmt.Errorf("hook %w", err)
		}
	}
	return nil
}

// run runs a program as the agent's user, while everything else is frozen. One
// that takes too long is ended, with its process group.
func (a *Agent) run(ctx context.Context, limit time.Duration, argv, env []string) error {
	path := os.Getenv("PATH")
	if path == "" {
		path = session.DefaultPath
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	child, err := a.reaper.StartPaused(argv[0], argv, &syscall.ProcAttr{
		Dir:   "/",
		Env:   append([]string{"PATH=" + path, "HOME=/root", "USER=root", "LOGNAME=root"}, env...),
		Files: []uintptr{null.Fd(), in.Fd(), in.Fd()},
	})
	in.Close()
	if err != nil {
		return fmt.Errorf("%s: %w", argv[0], err)
	}
	var last tail
	read := make(chan struct{})
	go func() {
		defer close(read)
		io.Copy(&last, out)
	}()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case <-child.Done():
	case <-ctx.Done():
		child.Signal(syscall.SIGKILL)
		<-child.Done()
		err = fmt.Errorf("%s: took too long: %w", argv[0], ctx.Err())
	}
	out.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // a child of its may hold the pipe
	<-read
	if ws := child.Status(); err == nil && (!ws.Exited() || ws.ExitStatus() != 0) {
		err = fmt.Errorf("%s: failed (exit status %d, signal %d): %s", argv[0], ws.ExitStatus(), ws.Signal(), bytes.TrimSpace(last.b))
	}
	return err
}

// tail keeps the last bytes that are written to it.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if n := len(t.b) - maxHookOutput; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}

// connections are the server's, but for those that were hijacked.
type connections struct {
	mu  sync.Mutex
	all map[net.Conn]struct{}
}

type connKey struct{}

// withConn lets a call know its connection.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

func (c *connections) note(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s {
	case http.StateNew:
		if c.all == nil {
			c.all = map[net.Conn]struct{}{}
		}
		c.all[conn] = struct{}{}
	case http.StateClosed, http.StateHijacked:
		delete(c.all, conn)
	}
}

// dropOthers closes all connections but the one of ctx's call. Commands whose
// streams they carry go on.
func (c *connections) dropOthers(ctx context.Context) {
	mine := ctx.Value(connKey{})
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.all {
		if any(conn) != mine {
			conn.Close()
		}
	}
}
