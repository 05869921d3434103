package api

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/proxy"
	"github.com/warrenhq/warren/internal/sandbox"
)

// agentServices are the Connect services of the agent that clients may use.
var agentServices = []string{"/process.Process/", "/filesystem.Filesystem/"}

// agentPaths are its plain HTTP calls that clients may use. Its private ones
// (init and what else the daemon needs) are not among them.
var agentPaths = map[string]bool{
	control.PathHealth: true, control.PathEnvs: true, control.PathMetrics: true, control.PathFiles: true,
	control.PathCompose: true, control.PathTar: true, control.PathStats: true,
}

func agentPathOpen(path string) bool {
	for _, s := range agentServices {
		if rest, ok := strings.CutPrefix(path, s); ok && rest != "" && !strings.Contains(rest, "/") {
			return true
		}
	}
	return agentPaths[path]
}

func (a *API) registerAgent() {
	rp := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			rt := pr.In.Context().Value(agentKey{}).(agentRoute)
			pr.Out.URL.Path, pr.Out.URL.RawPath = rt.path, ""
			pr.Out.Host = "agent"
			for _, name := range []string{"X-Api-Key", HeaderTenant} {
				pr.Out.Header.Del(name)
			}
			// The agent reads a user from Basic; a bearer token is our key.
			if scheme, _, _ := strings.Cut(pr.In.Header.Get("Authorization"), " "); !strings.EqualFold(scheme, "Basic") {
				pr.Out.Header.Del("Authorization")
			}
			pr.Out.Header.Set(control.TokenHeader, rt.token)
		},
		Transport:     agentTransport{},
		FlushInterval: -1,
		BufferPool:    &streamBuffers,
		ErrorLog:      slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			a.fail(w, r, agentclient.Error(err))
		},
	}
	a.stream(huma.Operation{
		OperationID: "agent", Method: anyMethod, Path: "/v1/sandboxes/{id}/agent/{path}", Tags: []string{"inside"},
		Summary: "Call the sandbox's agent",
		Description: "The agent's own interface: the Connect services process.Process and filesystem.Filesystem (JSON and binary codecs, streams), " +
			"and its plain calls health, files, files/compose, tar, metrics, envs and stats. The daemon adds the agent's token. Any method.",
		Parameters: []*huma.Param{idParam(), pathParam("path", "Path of the agent's, such as process.Process/Start")},
		Responses:  bytesResponse("200", "*/*", "What the agent answers"),
	}, func(w http.ResponseWriter, r *http.Request) error {
		id, err := sandbox.ParseID(r.PathValue("id"))
		if err != nil {
			return err
		}
		path := "/" + r.PathValue("path")
		if !agentPathOpen(path) {
			return sandbox.Errorf(sandbox.CodeNotFound, "the agent has no call %q for clients", shortPath(path))
		}
		agent, leave, err := a.enter(r.Context(), id)
		if err != nil {
			return err
		}
		defer leave()
		sb, err := a.back.Get(r.Context(), tenantOf(r.Context()), id)
		if err != nil {
			return err
		}
		proxy.FullDuplex(w)
		ctx := context.WithValue(r.Context(), agentKey{}, agentRoute{agent.Transport(), path, sb.Token})
		rp.ServeHTTP(w, r.WithContext(ctx))
		return nil
	})
}

// enter gives the agent of a sandbox, which is woken where it is hibernated and
// not idle until leave is called.
func (a *API) enter(ctx context.Context, id sandbox.ID) (agent *agentclient.Client, leave func(), err error) {
	leave, err = a.back.Use(ctx, tenantOf(ctx), id)
	if err != nil {
		return nil, nil, err
	}
	if agent, err = a.back.Agent(ctx, tenantOf(ctx), id); err != nil {
		leave()
		return nil, nil, err
	}
	return agent, leave, nil
}

type agentKey struct{}

// agentRoute travels with a request from the handler to the transport.
type agentRoute struct {
	transport http.RoundTripper
	path      string
	token     string
}

type agentTransport struct{}

func (agentTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	return r.Context().Value(agentKey{}).(agentRoute).transport.RoundTrip(r)
}

// streamBuffers lends the buffers of the agent's streams.
var streamBuffers bufferPool

type bufferPool struct{ pool sync.Pool }

func (b *bufferPool) Get() []byte {
	if v, ok := b.pool.Get().(*[]byte); ok {
		return *v
	}
	return make([]byte, 64<<10)
}

func (b *bufferPool) Put(buf []byte) { b.pool.Put(&buf) }
