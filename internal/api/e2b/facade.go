// Package e2b serves the control plane of E2B's API, as its unchanged SDKs
// call it, over the manager. It translates and holds no state of its own.
//
// Its routes stand at the root of the API's address beside the native /v1;
// traffic into sandboxes (E2B's data plane) is the proxy's and the agent's.
// Names, statuses and bodies are those of E2B's OpenAPI document and of what
// its SDKs 2.45 to 2.63 send and read. What Warren does not offer is refused
// with 501 and a reason: an option is never dropped silently.
package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Backend is what the façade needs below it: the manager.
type Backend interface {
	SandboxesBackend
	TemplatesBackend
	VolumesBackend
}

// SandboxesBackend is what the routes of sandboxes and snapshots need.
type SandboxesBackend interface {
	Create(ctx context.Context, tenant string, r manager.CreateRequest) (sandbox.Sandbox, error)
	Get(ctx context.Context, tenant string, id sandbox.ID) (sandbox.Sandbox, error)
	List(ctx context.Context, tenant string, f manager.ListFilter) (page []sandbox.Sandbox, next string, err error)
	Kill(ctx context.Context, tenant string, id sandbox.ID) error
	SetTimeout(ctx context.Context, tenant string, id sandbox.ID, d time.Duration) (sandbox.Sandbox, error)
	SetNetwork(ctx context.Context, tenant string, id sandbox.ID, p sandbox.NetworkPolicy) error
	Unsuspend(ctx context.Context, tenant string, id sandbox.ID) error
	Hibernate(ctx context.Context, tenant string, id sandbox.ID, kind sandbox.SnapshotKind) error
	Wake(ctx context.Context, tenant string, id sandbox.ID) error
	Fork(ctx context.Context, tenant string, id sandbox.ID, r manager.ForkRequest) ([]manager.ForkResult, error)
	Snapshot(ctx context.Context, tenant string, id sandbox.ID, r manager.SnapshotRequest) (sandbox.Snapshot, error)
	Snapshots(ctx context.Context, tenant string, f manager.SnapshotFilter) (page []sandbox.Snapshot, next string, err error)
	SnapshotByName(ctx context.Context, tenant, nameOrID string) (sandbox.Snapshot, error)
	RemoveSnapshot(ctx context.Context, tenant, nameOrID string) error
	Agent(ctx context.Context, tenant string, id sandbox.ID) (*agentclient.Client, error)
	Logs(ctx context.Context, tenant string, id sandbox.ID, follow bool) (io.ReadCloser, error)
}

var _ Backend = (*manager.Manager)(nil)

// Config is what the façade works with. All of it but Domain is needed.
type Config struct {
	Back Backend
	// Domain is what getHost() of the SDKs is to put behind `<port>-<id>.`; ""
	// leaves the client its own.
	Domain string
	// Tenant gives whose request it is.
	Tenant func(*http.Request) string
	// Fail answers with an error, by WriteError.
	Fail func(http.ResponseWriter, *http.Request, error)
	// TimeBody bounds how slowly a request's body may come: all of it soon, or
	// as a stream some of it now and then.
	TimeBody func(w http.ResponseWriter, r *http.Request, stream bool)
	// Created is told of every create, for the metrics.
	Created func(runtime string, sb sandbox.Sandbox, err error, took time.Duration)
	// Ended is told of a sandbox that was killed.
	Ended func(sandbox.ID)
}

type facade struct {
	Config
	mux *http.ServeMux
}

// Register adds the façade's routes to mux.
func Register(mux *http.ServeMux, c Config) {
	f := &facade{c, mux}
	f.registerSandboxes()
	f.registerLives()
	f.registerSnapshots()
	f.registerTemplates()
	for _, p := range []string{"/secrets", "/secrets/{id}"} {
		f.refuse(p, "secrets that are kept apart from sandboxes are not supported: give them as envVars when the sandbox is made")
	}
	f.registerVolumes()
	for _, p := range []string{"/teams", "/teams/{rest...}", "/api-keys", "/api-keys/{id}", "/access-tokens", "/access-tokens/{id}", "/nodes", "/nodes/{rest...}", "/admin/{rest...}"} {
		f.refuse(p, "accounts and nodes are not managed by this API: see `warren key` and `warren host`")
	}
}

// Error is the body of every error.
type Error struct {
	Code      int          `json:"code"` // the status
	Message   string       `json:"message"`
	ErrorCode sandbox.Code `json:"error_code,omitempty"`
}

// WriteError answers with an error as E2B's clients read it.
func WriteError(w http.ResponseWriter, status int, code sandbox.Code, message string) {
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	writeJSON(w, status, Error{status, message, code})
}

type handler func(w http.ResponseWriter, r *http.Request, tenant string) error

func (f *facade) add(pattern string, h handler) {
	f.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		f.TimeBody(w, r, false)
		if err := h(w, r, f.Tenant(r)); err != nil {
			f.Fail(w, r, err)
		}
	})
}

// refuse adds a route that tells that Warren does not offer something.
func (f *facade) refuse(pattern, why string) {
	f.add(pattern, func(http.ResponseWriter, *http.Request, string) error {
		return sandbox.Errorf(sandbox.CodeUnsupported, "%s", why)
	})
}

// maxBody bounds a request's JSON; a template's build steps are the largest.
const maxBody = 4 << 20

// readJSON reads r's body into v. An empty one leaves v as it is.
func readJSON(r *http.Request, v any) error {
	data, err := io.ReadAll(io.LimitReader(r.Body, maxBody+1))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "read the body: %w", err)
	}
	if len(data) > maxBody {
		return sandbox.Errorf(sandbox.CodeTooLarge, "the body is larger than %d bytes", maxBody)
	}
	if len(bytes.TrimSpace(data)) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, v); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body is not the JSON that this route takes: %w", err)
	}
	return nil
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "write the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	w.Write(data) // a client that went away is no error of ours
	return nil
}

// number reads a query parameter that is def where it is missing, and at most
// most.
func number(r *http.Request, name string, def, most int) (int, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return def, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a number from 0", name)
	}
	return min(n, most), nil
}

const maxOffset = 1 << 30

// pageLimit reads the limit of a listing, 1 to 100 by E2B's document.
func pageLimit(r *http.Request) (int, error) {
	n, err := number(r, "limit", 100, 1000)
	if err == nil && (n < 1 || n > 100) {
		err = sandbox.Errorf(sandbox.CodeInvalid, "limit is %d: give 1 to 100", n)
	}
	return n, err
}

// setNext tells where the next page of a listing begins.
func setNext(w http.ResponseWriter, next string) {
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
}

// baseURL is under what URL this client reaches the API.
func (f *facade) baseURL(r *http.Request) string {
	if r.TLS != nil {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}
