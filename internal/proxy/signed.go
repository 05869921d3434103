package proxy

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Bounds of what is hashed for a stranger. The kernel takes no longer path
// (PATH_MAX of limits.h), and useradd no longer name by far.
const (
	maxSignedPath = 4096
	maxSignedUser = 256
)

// signed tells whether r is for the signed URL of a file, as E2B's SDKs make
// it where all sandboxes are behind one URL: it names no sandbox.
func signed(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost:
		return r.URL.Path == control.PathFiles && r.URL.Query().Get("signature") != ""
	}
	return false
}

// serveSigned carries r to the agent of the sandbox whose token made its
// signature. One that nobody's made, and one of a sandbox that has ended, get
// the same answer, which is the agent's own.
func (p *Proxy) serveSigned(w http.ResponseWriter, r *http.Request) {
	f, err := parseSigned(r)
	if err != nil {
		refuseAgent(w, err.Error())
		return
	}
	given, ok := f.Sum()
	if !ok {
		refuseAgent(w, control.InvalidSignature)
		return
	}
	sum := f.Summer()
	sb, ok := p.cfg.Sandboxes.ByToken(func(token string) bool {
		made := sum(token)
		return subtle.ConstantTimeCompare(made[:], given[:]) == 1
	})
	switch {
	case !ok:
		refuseAgent(w, control.InvalidSignature)
	case f.Expired(time.Now().Unix()): // the agent says so, too, but need not be woken for it
		refuseAgent(w, control.ExpiredSignature)
	default:
		p.traffic(w, r, sb, sandbox.AgentPort)
	}
}

var errTooLong = errors.New(control.InvalidSignature)

func parseSigned(r *http.Request) (control.SignedFile, error) {
	operation := control.OperationRead
	if r.Method == http.MethodPost {
		operation = control.OperationWrite
	}
	f, err := control.ParseSignedFile(r.URL.Query(), operation)
	if err == nil && (len(f.Path) > maxSignedPath || len(f.User) > maxSignedUser) {
		err = errTooLong
	}
	return f, err
}

// refuseAgent answers in the agent's place, as it does.
func refuseAgent(w http.ResponseWriter, msg string) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusUnauthorized)
	json.NewEncoder(w).Encode(control.Error{Code: http.StatusUnauthorized, Message: msg})
}
