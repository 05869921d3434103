// Package api serves Warren's native HTTP API under /v1, its OpenAPI 3.1
// document, the daemon's health and metrics, and hands client traffic for
// sandboxes to the proxy.
//
// It has no logic of a sandbox's life: it reads a request, asks the manager,
// and writes the answer. Every error is {code, message, details} with a code
// of the domain (sandbox.Code).
//
// There are two ways in. On the daemon's unix socket, a peer that is root or
// the daemon's own user may do everything, for the tenant in X-Warren-Tenant
// ("default" where there is none). On TCP, every call but /healthz and /readyz
// needs an API key, which also says the tenant. Another tenant's things are
// not_found.
//
// Browsers: there is no CORS, and no credential that a browser sends by itself
// (no cookies, no client certificates), so neither a foreign page nor a
// rebound DNS name gets further than "unauthenticated".
package api
