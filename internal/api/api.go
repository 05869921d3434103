package api

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/warrenhq/warren/internal/proxy"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/version"
)

// DefaultTenant is whose things a caller on the unix socket works with unless
// it names another tenant.
const DefaultTenant = "default"

// Options are the API's own settings.
type Options struct {
	// Domain is the one under which the proxy knows sandboxes' host names
	// (`<port>-<id>.<domain>`); "" is "localhost".
	Domain string
	// TLS tells of the address that is served by TLS; nil is none.
	TLS *TLS
	Log *slog.Logger
	// Ready tells whether the daemon can serve: nil, or why not. It is what
	// /readyz answers; a nil Ready is always ready.
	Ready func(context.Context) error
	// Heartbeat is how long a stream of events may be silent before a comment
	// is sent to keep the connection open; 0 is 15 s.
	Heartbeat time.Duration
}

// TLS is how clients reach sandboxes and the API by TLS.
type TLS struct {
	// Domain is another one than Options.Domain under which the proxy knows
	// sandboxes' host names.
	Domain string
	// Port of Domain's https URLs.
	Port int
	// CA gives the certificate, as PEM, that clients have to trust; nil where
	// theirs are to do.
	CA func() []byte
}

// Authority is what a client puts behind `<port>-<id>.` in an https URL: the
// domain, and the port where it is not the default one.
func (t *TLS) Authority() string {
	switch {
	case t == nil:
		return ""
	case t.Port == 0 || t.Port == httpsPort:
		return t.Domain
	}
	return net.JoinHostPort(t.Domain, strconv.Itoa(t.Port))
}

const httpsPort = 443 // RFC 9110, section 4.2.2

// API serves the native HTTP API of one manager. Its methods are safe for
// concurrent use.
type API struct {
	back    Backend
	o       Options
	log     *slog.Logger
	mux     *http.ServeMux
	huma    huma.API
	proxy   *proxy.Proxy
	metrics *metrics
	spec    []byte // the OpenAPI document
}

// New makes the API over back. Serve its Unix and TCP handlers with NewServer,
// run Run beside them, and Close it at the end.
func New(back Backend, o Options) *API {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = 15 * time.Second
	}
	setHumaErrors()
	a := &API{back: back, o: o, log: o.Log, mux: http.NewServeMux(), metrics: newMetrics(back)}
	domains := []string{o.Domain}
	if o.Domain == "" {
		domains[0] = "localhost"
	}
	if o.TLS != nil {
		domains = append(domains, o.TLS.Domain)
	}
	a.proxy = proxy.New(proxy.Config{
		Sandboxes: back, Authenticate: back.Authenticate, Domains: domains, Log: o.Log,
	})
	a.huma = humago.New(a.mux, humaConfig())
	a.registerSystem()
	a.registerSandboxes()
	a.registerCaptures()
	a.registerPools()
	a.registerVolumes()
	a.registerExec()
	a.registerCode()
	a.registerFiles()
	a.registerAgent()
	a.registerPorts()
	a.registerEvents()
	a.registerTemplates()
	a.registerKeys()
	a.registerE2B()
	spec, err := json.MarshalIndent(a.huma.OpenAPI(), "", "  ")
	if err != nil {
		panic("api: the OpenAPI document cannot be written: " + err.Error()) // no input has a part in it
	}
	a.spec = append(spec, '\n')
	a.mux.HandleFunc("GET /v1/openapi.json", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/openapi+json")
		w.Write(a.spec)
	})
	a.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		a.failAs(w, r, sandbox.Errorf(sandbox.CodeNotFound, "no route for %s %s: GET /v1/openapi.json lists them", r.Method, shortPath(r.URL.Path)))
	})
	return a
}

// NewHandler makes the API over back and gives its two handlers. It is New for
// who needs neither Run nor Close: connections into a sandbox that has ended
// are then dropped when it is next asked for, or when they are idle.
func NewHandler(back Backend, o Options) (unix, tcp http.Handler) {
	a := New(back, o)
	return a.Unix(), a.TCP()
}

// Unix is the handler for the daemon's unix socket: a peer that is root or the
// daemon's own user may do everything. It needs the context that NewServer's
// server makes.
func (a *API) Unix() http.Handler {
	return a.outer(a.peerOnly(a.proxy.Wrap(a.asTenant(a.route()), true)), "unix")
}

// TCP is the handler for TCP listeners: everything but health needs an API key
// or, for traffic into sandboxes, what the proxy asks for.
func (a *API) TCP() http.Handler {
	return a.outer(a.proxy.Wrap(a.withKey(a.route()), false), "tcp")
}

// OpenAPI gives the API's OpenAPI 3.1 document as JSON.
func (a *API) OpenAPI() []byte { return a.spec }

// Close drops all connections into sandboxes.
func (a *API) Close() { a.proxy.Close() }

// route is the mux, telling the access log which route was taken.
func (a *API) route() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, _, _, ok := portPath(r); ok {
			infoOf(r.Context()).route = portRoute
			if err := a.port(w, r); err != nil {
				a.fail(w, r, err)
			}
			return
		}
		defer func() { infoOf(r.Context()).route = r.Pattern }()
		a.mux.ServeHTTP(w, r)
	})
}

func humaConfig() huma.Config {
	c := huma.DefaultConfig("Warren", version.Version)
	c.Info.Description = "Sandboxes for what an agent wrote. Every error is {code, message, details}; codes are stable."
	c.Info.License = &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}
	c.OpenAPIPath, c.DocsPath, c.SchemasPath = "", "", "" // the document is served by us, the rest not at all
	c.CreateHooks = nil                                   // no $schema fields
	c.RejectUnknownQueryParameters = true
	// encoding/json takes bytes that are no UTF-8 and changes them: a command
	// would run with other arguments than were sent.
	strict := huma.DefaultJSONFormat
	strict.Unmarshal = func(data []byte, v any) error {
		if !utf8.Valid(data) {
			return errors.New("it is not valid UTF-8, as JSON has to be (RFC 8259, section 8.1)")
		}
		return huma.DefaultJSONFormat.Unmarshal(data, v)
	}
	c.Formats = map[string]huma.Format{"application/json": strict, "json": strict}
	c.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"apiKey": {Type: "apiKey", In: "header", Name: "X-API-Key", Description: "An API key. Not needed on the daemon's unix socket."},
		"bearer": {Type: "http", Scheme: "bearer", Description: "An API key as a bearer token."},
	}
	c.Security = []map[string][]string{{"apiKey": {}}, {"bearer": {}}}
	c.Tags = []*huma.Tag{
		{Name: "sandboxes", Description: "The lives of sandboxes"},
		{Name: "captures", Description: "Sleeping, snapshots, forks and their lineage"},
		{Name: "pools", Description: "Sandboxes that wait to be claimed"},
		{Name: "volumes", Description: "Directories that outlive sandboxes"},
		{Name: "inside", Description: "Commands, files and ports inside a sandbox"},
		{Name: "templates", Description: "Root filesystems to make sandboxes from"},
		{Name: "keys", Description: "API keys"},
		{Name: "system", Description: "The daemon and its host"},
	}
	return c
}

// Limits of one request's JSON.
const (
	maxJSON     = 1 << 20
	maxExecJSON = 24 << 20 // 16 MiB of standard input in base64, and room
)

// register adds an operation with JSON in and out.
func register[I, O any](a *API, op huma.Operation, h func(context.Context, *I) (*O, error)) {
	if op.MaxBodyBytes == 0 {
		op.MaxBodyBytes = maxJSON
	}
	op.BodyReadTimeout = -1 // ours is set where the body is read, and cleared after it: see body.go
	huma.Register(a.huma, op, func(ctx context.Context, in *I) (*O, error) {
		out, err := h(ctx, in)
		if err != nil {
			e := a.toError(ctx, err)
			if e.status == http.StatusServiceUnavailable {
				return nil, huma.ErrorWithHeaders(e, http.Header{"Retry-After": {"1"}})
			}
			return nil, e
		}
		return out, nil
	})
}

// stream adds an operation whose bodies are not JSON, or not all at once. op
// is for the document; its parameters are read by h.
func (a *API) stream(op huma.Operation, h func(w http.ResponseWriter, r *http.Request) error) {
	if op.Responses == nil {
		op.Responses = map[string]*huma.Response{}
	}
	op.Responses["default"] = &huma.Response{
		Description: "Error",
		Content:     map[string]*huma.MediaType{"application/json": {Schema: a.huma.OpenAPI().Components.Schemas.Schema(errorType, true, "Error")}},
	}
	pattern := op.Method + " " + op.Path
	if op.Method == anyMethod {
		pattern = strings.Replace(op.Path, "{path}", "{path...}", 1)
		for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			one := op
			one.Method, one.OperationID = m, op.OperationID+"-"+strings.ToLower(m)
			a.huma.OpenAPI().AddOperation(&one)
		}
	} else {
		a.huma.OpenAPI().AddOperation(&op)
	}
	a.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		body := r.Body // h may put its own in its place
		if err := h(w, r); err != nil {
			a.refuse(w, r, body, err)
		}
	})
}

// anyMethod is the method of a route that takes them all; the document tells
// the common ones.
const anyMethod = ""

func shortPath(p string) string {
	if len(p) > 100 {
		p = p[:100] + "…"
	}
	return strings.ToValidUTF8(p, "?")
}
