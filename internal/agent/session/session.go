// Package session holds what POST /init gave to the agent: the access token,
// the default user and directory, and the environment of commands.
package session

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/users"
)

// DefaultPath is PATH where neither the agent's own environment nor init's has
// one.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// DefaultKeepalive is the time between keepalive events on a quiet stream
// where the client asks for none (envd's default).
const DefaultKeepalive = 90 * time.Second

// State is the session. It is safe for concurrent use.
type State struct {
	Users *users.DB

	mu        sync.RWMutex
	token     string
	user      string
	workdir   string
	env       map[string]string
	sandboxID string
	stamp     time.Time
}

// New makes an empty session: no token, so every call is allowed.
func New(db *users.DB) *State { return &State{Users: db} }

// Allowed tells whether token is the one in force, or there is none yet. The
// comparison takes the same time whatever token is.
func (s *State) Allowed(token string) bool {
	s.mu.RLock()
	want := s.token
	s.mu.RUnlock()
	if want == "" {
		return true
	}
	return equal(token, want)
}

func equal(a, b string) bool {
	// Hashed, so that the lengths do not show either.
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// CheckFile tells why a call of GET or POST /files (operation "read" or
// "write") is not allowed: it needs the token's header or a valid signature.
func (s *State) CheckFile(r *http.Request, operation string) error {
	s.mu.RLock()
	token := s.token
	s.mu.RUnlock()
	if token == "" {
		return nil
	}
	if given := r.Header.Get(control.TokenHeader); given != "" {
		if !equal(given, token) {
			return errors.New("the access token in the " + control.TokenHeader + " header is not this sandbox's")
		}
		return nil
	}
	q := r.URL.Query()
	if q.Get("signature") == "" {
		return errors.New("missing signature query parameter, or access token in the " + control.TokenHeader + " header")
	}
	f, err := control.ParseSignedFile(q, operation)
	if err != nil {
		return err
	}
	if !equal(f.Given, f.Signature(token)) {
		return errors.New(control.InvalidSignature)
	}
	if f.Expired(time.Now().Unix()) {
		return errors.New(control.ExpiredSignature)
	}
	return nil
}

// Update takes a POST /init. fresh tells that it names another sandbox than
// before: the caller then renews the machine's identity. late tells that a
// newer one was taken already, and this one changed nothing.
func (s *State) Update(r control.InitRequest) (fresh, late bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !r.Timestamp.IsZero() {
		if r.Timestamp.Before(s.stamp) {
			return false, true
		}
		s.stamp = r.Timestamp
	}
	return s.update(r), false
}

// Restored takes a POST /restored, whatever was taken before it: the variables
// of DropEnv go, then it is an Update.
func (s *State) Restored(r control.RestoredRequest) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stamp = r.Timestamp
	env := make(map[string]string, len(s.env))
	for k, v := range s.env {
		if !slices.Contains(r.DropEnv, k) {
			env[k] = v
		}
	}
	s.env = env
	s.update(r.InitRequest)
}

// update is Update without the question of order. The caller holds mu.
func (s *State) update(r control.InitRequest) (fresh bool) {
	if r.AccessToken != "" {
		s.token = r.AccessToken
	}
	if r.DefaultUser != "" {
		s.user = r.DefaultUser
	}
	if r.DefaultWorkdir != "" {
		s.workdir = r.DefaultWorkdir
	}
	// The map is replaced, never changed: readers hold the old one.
	env := make(map[string]string, len(r.EnvVars)+3)
	old := s.env
	if r.EnvVars != nil {
		old = map[string]string{}
		for _, k := range []string{"E2B_SANDBOX_ID", "E2B_TEMPLATE_ID"} {
			if v, ok := s.env[k]; ok {
				old[k] = v
			}
		}
	}
	for k, v := range old {
		env[k] = v
	}
	for k, v := range r.EnvVars {
		env[k] = v
	}
	env["E2B_SANDBOX"] = "true"
	if r.SandboxID != "" {
		fresh = r.SandboxID != s.sandboxID
		s.sandboxID = r.SandboxID
		env["E2B_SANDBOX_ID"] = r.SandboxID
	}
	if r.TemplateID != "" {
		env["E2B_TEMPLATE_ID"] = r.TemplateID
	}
	s.env = env
	return fresh
}

// Env is the environment of commands, beside what depends on their user. The
// caller must not change it.
func (s *State) Env() map[string]string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.env
}

// Workdir is the directory of commands that name none; "" is the user's home.
func (s *State) Workdir() string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.workdir
}

// User finds the user of a call: name, or the default where it is "". Without
// a default from init that is "user" where there is one, and else root.
func (s *State) User(name string) (users.User, error) {
	if name != "" {
		return s.Users.Lookup(name)
	}
	s.mu.RLock()
	name = s.user
	s.mu.RUnlock()
	if name != "" {
		return s.Users.Lookup(name)
	}
	u, err := s.Users.Lookup("user")
	if errors.Is(err, users.ErrUnknown) {
		return s.Users.Lookup("root")
	}
	return u, err
}

// RPCUser finds the user of a Connect call, whom the Authorization header
// names as the user of HTTP Basic authentication (its password is ignored: the
// token is what authenticates). The error is Connect's unauthenticated.
func (s *State) RPCUser(h http.Header) (users.User, error) {
	name, err := basicName(h.Get("Authorization"))
	if err != nil {
		return users.User{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	u, err := s.User(name)
	switch {
	case errors.Is(err, users.ErrUnknown) && name == "":
		s.mu.RLock()
		name = s.user
		s.mu.RUnlock()
		fallthrough
	case errors.Is(err, users.ErrUnknown):
		return u, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("invalid username: '%s'", printable(name)))
	case err != nil:
		return u, connect.NewError(connect.CodeInternal, err)
	}
	return u, nil
}

// basicName takes the user out of an Authorization header; "" is none.
func basicName(header string) (string, error) {
	scheme, value, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Basic") {
		return "", nil
	}
	data, err := base64.StdEncoding.DecodeString(strings.TrimSpace(value))
	if err != nil {
		return "", errors.New("the Authorization header is not valid Basic authentication")
	}
	name, _, _ := strings.Cut(string(data), ":")
	return name, nil
}

// printable makes a client's string fit for a message.
func printable(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

// Environ is the environment of a command of u: PATH of the agent's own, then
// what u brings, then init's, then extra; later ones win.
func (s *State) Environ(u users.User, extra map[string]string) ([]string, string) {
	path := os.Getenv("PATH")
	if path == "" {
		path = DefaultPath
	}
	base := s.Env()
	env := make(map[string]string, len(base)+len(extra)+5)
	env["PATH"], env["HOME"], env["USER"], env["LOGNAME"], env["SHELL"] = path, u.Home, u.Name, u.Name, u.Shell
	for k, v := range base {
		env[k] = v
	}
	for k, v := range extra {
		env[k] = v
	}
	list := make([]string, 0, len(env))
	for k, v := range env {
		list = append(list, k+"="+v)
	}
	return list, env["PATH"]
}

// Keepalive is the time between keepalive events that a client asks for, in
// whole seconds of at least 1.
func Keepalive(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get(control.KeepaliveHeader))
	if err != nil || n < 1 || n > 1<<20 {
		return DefaultKeepalive
	}
	return time.Duration(n) * time.Second
}

// CheckEnv tells what is wrong with environment variables.
func CheckEnv(env map[string]string) error {
	for k, v := range env {
		switch {
		case k == "" || strings.ContainsAny(k, "=\x00"):
			return fmt.Errorf("%q cannot be the name of an environment variable", printable(k))
		case strings.ContainsRune(v, 0):
			return fmt.Errorf("the value of environment variable %q has a NUL byte", printable(k))
		}
	}
	return nil
}
