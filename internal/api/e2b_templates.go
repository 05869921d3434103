package api

import (
	"net/http"

	"github.com/warrenhq/warren/internal/api/e2b"
)

// registerE2BTemplates adds the template routes that E2B's SDKs call.
func (a *API) registerE2BTemplates() {
	t := &e2b.Templates{
		Back:   a.back,
		Tenant: func(r *http.Request) string { return tenantOf(r.Context()) },
		Fail:   a.failE2B,
	}
	t.Register(a.mux)
	t.RegisterPublic(a.mux)
}

// failE2B is fail with the body that E2B's SDKs read.
func (a *API) failE2B(w http.ResponseWriter, r *http.Request, err error) {
	e := a.toError(r.Context(), err)
	writeJSON(w, e.status, map[string]any{"code": e.status, "message": e.body.Message, "error_code": e.body.Code})
}
