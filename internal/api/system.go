package api

import (
	"context"
	"net/http"
	"runtime"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/version"
)

func (a *API) registerSystem() {
	a.huma.UseMiddleware(func(ctx huma.Context, next func(huma.Context)) {
		r, w := humago.Unwrap(ctx)
		timeBody(w, r, false)
		// What `curl -d` says of a body when it is not told otherwise. No
		// browser's form gets here: it has no way to send a key.
		if r.Header.Get("Content-Type") == "application/x-www-form-urlencoded" {
			r.Header.Set("Content-Type", "application/json")
		}
		next(ctx)
	})
	register(a, huma.Operation{
		OperationID: "list-runtimes", Method: http.MethodGet, Path: "/v1/runtimes", Tags: []string{"system"},
		Summary: "Tell which runtimes this host can run", Description: "Those that it cannot, with the reason and the remedy.",
	}, func(ctx context.Context, _ *struct{}) (*body[wire.RuntimeList], error) {
		out := wire.RuntimeList{Runtimes: []wire.Runtime{}}
		for _, r := range a.back.Runtimes(ctx) {
			out.Runtimes = append(out.Runtimes, toRuntime(r))
		}
		return &body[wire.RuntimeList]{out}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-capacity", Method: http.MethodGet, Path: "/v1/capacity", Tags: []string{"system"},
		Summary: "Read the host's budget and what of it is in use",
	}, func(ctx context.Context, _ *struct{}) (*body[wire.Capacity], error) {
		return &body[wire.Capacity]{toCapacity(a.back.Capacity(ctx))}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-version", Method: http.MethodGet, Path: "/v1/version", Tags: []string{"system"},
		Summary: "Read the daemon's version",
	}, func(context.Context, *struct{}) (*body[wire.Version], error) {
		return &body[wire.Version]{wire.Version{
			Version: version.Version, API: "v1", Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH,
		}}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-tls", Method: http.MethodGet, Path: "/v1/tls", Tags: []string{"system"},
		Summary: "Read the TLS domain, and the certificate authority to trust",
	}, func(context.Context, *struct{}) (*body[wire.TLS], error) {
		if a.o.TLS == nil {
			return nil, sandbox.Errorf(sandbox.CodeNotFound, "this daemon serves no TLS: start it with --tls-listen and --tls-domain")
		}
		out := wire.TLS{Domain: a.o.TLS.Authority()}
		if a.o.TLS.CA != nil {
			out.CA = string(a.o.TLS.CA())
		}
		return &body[wire.TLS]{out}, nil
	})
	a.mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	a.mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if a.o.Ready != nil {
			if err := a.o.Ready(r.Context()); err != nil {
				if sandbox.CodeOf(err) == sandbox.CodeInternal {
					err = sandbox.Errorf(sandbox.CodeUnavailable, "the daemon is not ready: %w", err)
				}
				a.fail(w, r, err)
				return
			}
		}
		writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
	})
	a.mux.Handle("GET /metrics", a.metrics.handler())
}
