package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/files"
	"github.com/warrenhq/warren/internal/agent/identity"
	"github.com/warrenhq/warren/internal/agent/session"
)

// maxInit bounds the body of POST /init, in bytes: thousands of variables fit.
const maxInit = 16 << 20

// parseInit reads and checks the body of POST /init; none at all changes
// nothing.
func parseInit(body io.Reader) (control.InitRequest, error) {
	var r control.InitRequest
	if err := parseBody(body, &r); err != nil {
		return r, err
	}
	return r, checkInit(r)
}

// parseBody reads a JSON body into v; none at all changes nothing.
func parseBody(body io.Reader, v any) error {
	data, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fmt.Errorf("the body is not valid: %w", err)
	}
	return nil
}

// checkInit tells what is wrong with a request.
func checkInit(r control.InitRequest) error {
	if err := session.CheckEnv(r.EnvVars); err != nil {
		return err
	}
	for name, v := range map[string]string{"accessToken": r.AccessToken, "defaultUser": r.DefaultUser, "defaultWorkdir": r.DefaultWorkdir, "sandboxID": r.SandboxID, "templateID": r.TemplateID} {
		if strings.ContainsAny(v, "\x00\r\n") {
			return fmt.Errorf("%s has a control character", name)
		}
	}
	return identity.Check(r)
}

// handleInit serves POST /init. The first one needs no token, as there is none
// yet; it is the daemon's, before anything of the sandbox's owner runs.
func (a *Agent) handleInit(w http.ResponseWriter, r *http.Request) {
	req, err := parseInit(http.MaxBytesReader(w, r.Body, maxInit))
	if err != nil {
		refuse(w, err)
		return
	}
	if !a.turn(r.Context()) {
		return
	}
	defer a.endTurn()
	// Under the turn: of two first inits at once, one is the second.
	if !a.session.Allowed(r.Header.Get(control.TokenHeader)) {
		files.WriteStatus(w, http.StatusUnauthorized, "this sandbox was initialized before: give its access token in the "+control.TokenHeader+" header")
		return
	}
	// At once, and not with the first command: a sandbox in which every command
	// would fail is of no use to anybody.
	if err := a.checkUser(req.DefaultUser); err != nil {
		refuse(w, err)
		return
	}
	fresh, late := a.session.Update(req)
	if !late {
		err := a.host.Apply(req, fresh && !req.Rebooted)
		if err == nil && req.Copied {
			err = a.renew(r.Context(), req, false)
		}
		if err != nil {
			files.WriteError(w, err)
			return
		}
	}
	if fresh && !req.Copied || !a.host.HasGeneration() { // the disk may have an ancestor's
		a.host.Generation() // a root filesystem that cannot be written to has none
	}
	w.WriteHeader(http.StatusNoContent)
}

// refuse answers that a request is wrong.
func refuse(w http.ResponseWriter, err error) {
	status := http.StatusBadRequest
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		status = http.StatusRequestEntityTooLarge
	}
	files.WriteStatus(w, status, err.Error())
}

// turn waits until no other init, freeze, thaw or restored is under way.
func (a *Agent) turn(ctx context.Context) bool {
	select {
	case <-a.initMu:
		return true
	case <-ctx.Done():
		return false
	}
}

func (a *Agent) endTurn() { a.initMu <- struct{}{} }

func (a *Agent) checkUser(name string) error {
	if name == "" {
		return nil
	}
	if _, err := a.session.Users.Lookup(name); err != nil {
		return fmt.Errorf("there is no user %.64q in the sandbox: give one of its /etc/passwd, or UID[:GID]", name)
	}
	return nil
}

func (a *Agent) handleEnvs(w http.ResponseWriter, r *http.Request) {
	env := a.session.Env()
	if env == nil {
		env = map[string]string{}
	}
	files.WriteJSON(w, env)
}

func (a *Agent) handleMetrics(w http.ResponseWriter, r *http.Request) {
	m, err := a.metrics()
	if err != nil {
		files.WriteError(w, err)
		return
	}
	files.WriteJSON(w, m)
}

func (a *Agent) handleStats(w http.ResponseWriter, r *http.Request) {
	var ms runtime.MemStats
	runtime.ReadMemStats(&ms)
	files.WriteJSON(w, control.Stats{
		Version:    EnvdVersion,
		PID:        os.Getpid(),
		UptimeSec:  time.Since(a.started).Seconds(),
		RSSBytes:   residentBytes(),
		HeapBytes:  int64(ms.HeapAlloc),
		Goroutines: runtime.NumGoroutine(),
		Processes:  a.commands.Running(),
		Started:    a.commands.Started(),
		Reaped:     a.reaper.Reaped(),
		Watchers:   a.fs.Watchers(),
		Tunnels:    a.tunnels.Open(),
	})
}

// residentBytes is the agent's resident memory, by /proc/self/statm.
func residentBytes() int64 {
	data, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	f := strings.Fields(string(data))
	if len(f) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(f[1], 10, 64)
	return pages * int64(os.Getpagesize())
}
