package api

import (
	"net/http"
	"strings"

	"github.com/warrenhq/warren/internal/api/e2b"
)

// registerE2B adds the routes that E2B's SDKs call.
func (a *API) registerE2B() {
	e2b.Register(a.mux, e2b.Config{
		Back:     a.back,
		Domain:   a.o.TLS.Authority(),
		Tenant:   func(r *http.Request) string { return tenantOf(r.Context()) },
		Fail:     a.failE2B,
		TimeBody: timeBody,
		Created:  a.metrics.created,
		Ended:    a.proxy.Forget,
	})
}

// nativePath tells whether a path is of the native API; the others are E2B's.
func nativePath(p string) bool {
	return p == "/v1" || strings.HasPrefix(p, "/v1/") || p == "/metrics"
}

// failE2B is fail with the body that E2B's SDKs read.
func (a *API) failE2B(w http.ResponseWriter, r *http.Request, err error) {
	e := a.toError(r.Context(), err)
	e2b.WriteError(w, e.status, e.body.Code, e.body.Message)
}

// failAs is fail in the form of the API that the request's path is of.
func (a *API) failAs(w http.ResponseWriter, r *http.Request, err error) {
	if nativePath(r.URL.Path) {
		a.fail(w, r, err)
	} else {
		a.failE2B(w, r, err)
	}
}
