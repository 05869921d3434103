package proxy

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Sandboxes is what the proxy needs of the manager.
type Sandboxes interface {
	// Lookup finds a sandbox whoever's it is. CodeNotFound: there is none.
	Lookup(ctx context.Context, id sandbox.ID) (sandbox.Sandbox, error)
	// ByToken finds the live sandbox, whoever's, for whose agent's token is
	// tells true; it asks about all of them.
	ByToken(is func(token string) bool) (sandbox.Sandbox, bool)
	// Use wakes a sandbox that is hibernated, and keeps it from being taken for
	// idle until release is called. CodeConflict, with the detail "state": it
	// neither runs nor can be woken.
	Use(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error)
	// UseAwake is Use that wakes nothing: CodeConflict, with the detail
	// "state", where the sandbox is hibernated.
	UseAwake(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error)
	// Dial connects to a port inside. CodeUnavailable: nothing listens there.
	Dial(ctx context.Context, tenant string, id sandbox.ID, port int) (net.Conn, error)
}

// Config is what a Proxy works with.
type Config struct {
	Sandboxes Sandboxes
	// Authenticate gives the tenant of an API key; CodeUnauthenticated where
	// it is not one.
	Authenticate func(ctx context.Context, key string) (tenant string, err error)
	Domains      []string // of the host names; none is "localhost"
	Log          *slog.Logger
}

// Proxy carries requests into sandboxes. It is safe for concurrent use.
type Proxy struct {
	cfg   Config
	table table
	rp    *httputil.ReverseProxy
}

// New makes a Proxy. Close it at the end.
func New(cfg Config) *Proxy {
	if len(cfg.Domains) == 0 {
		cfg.Domains = []string{"localhost"}
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{cfg: cfg, table: table{sandboxes: cfg.Sandboxes, byID: map[sandbox.ID]*upstream{}}}
	p.rp = &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     roundTripper{},
		FlushInterval: -1, // streams are the rule: every write goes out at once
		BufferPool:    &bufferPool{},
		ErrorHandler:  p.fail,
		ErrorLog:      slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return p
}

// Forget ends the connections to a sandbox that has ended.
func (p *Proxy) Forget(id sandbox.ID) { p.table.forget(id) }

// Close ends all connections. Requests that come later make new ones.
func (p *Proxy) Close() { p.table.closeAll() }

// Wrap serves what is meant for a sandbox and gives the rest to next. trusted
// says that whoever can connect may reach every sandbox.
func (p *Proxy) Wrap(next http.Handler, trusted bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t, ok, err := Match(r, p.cfg.Domains...)
		switch {
		case !ok && signed(r):
			p.serveSigned(w, r)
		case !ok:
			next.ServeHTTP(w, r)
		case err != nil:
			writeError(w, http.StatusBadRequest, t, err.Error())
		default:
			p.serve(w, r, t, trusted)
		}
	})
}

func (p *Proxy) serve(w http.ResponseWriter, r *http.Request, t Target, trusted bool) {
	sb, err := p.cfg.Sandboxes.Lookup(r.Context(), t.ID)
	if err != nil {
		if sandbox.CodeOf(err) == sandbox.CodeNotFound {
			writeError(w, http.StatusBadGateway, t, "The sandbox was not found")
			return
		}
		p.cfg.Log.WarnContext(r.Context(), "proxy: lookup failed", "sandbox", t.ID, "err", err)
		writeError(w, http.StatusBadGateway, t, "The sandbox could not be looked up")
		return
	}
	if !trusted {
		if status, msg := p.admit(r, sb, t.Port); status != 0 {
			writeError(w, status, t, msg)
			return
		}
		if t.Port == sandbox.AgentPort && sb.State == sandbox.Hibernated && !sb.ManualWake && !mayWake(r, sb) {
			refuseAgent(w, "the sandbox is hibernated, and its access token in the "+control.TokenHeader+" header is needed to wake it")
			return
		}
	}
	p.traffic(w, r, sb, t.Port)
}

// traffic carries r to a port of sb, and wakes it unless it is not to be woken
// so.
func (p *Proxy) traffic(w http.ResponseWriter, r *http.Request, sb sandbox.Sandbox, port int) {
	use := p.cfg.Sandboxes.Use
	if sb.ManualWake {
		use = p.cfg.Sandboxes.UseAwake
	}
	p.carry(w, r, sb, port, use)
}

// mayWake tells whether the agent would take r once it is awake: whoever knows
// an id and nothing else is not to have it woken.
func mayWake(r *http.Request, sb sandbox.Sandbox) bool {
	if token := r.Header.Get(control.TokenHeader); token != "" {
		return sb.Token != "" && subtle.ConstantTimeCompare([]byte(token), []byte(sb.Token)) == 1
	}
	if !signed(r) {
		return false
	}
	f, err := parseSigned(r)
	if err != nil {
		return false
	}
	given, ok := f.Sum()
	made := f.Summer()(sb.Token)
	return ok && subtle.ConstantTimeCompare(made[:], given[:]) == 1 && !f.Expired(time.Now().Unix())
}

// admit gives 0 where r may reach the port, else the status and the reason.
// The agent guards its own port. A missing or wrong secret is 403 as E2B's
// clients expect it.
func (p *Proxy) admit(r *http.Request, sb sandbox.Sandbox, port int) (int, string) {
	if port == sandbox.AgentPort || sb.PublicTraffic {
		return 0, ""
	}
	if token := r.Header.Get(HeaderTrafficToken); token != "" {
		if sb.TrafficToken != "" && subtle.ConstantTimeCompare([]byte(token), []byte(sb.TrafficToken)) == 1 {
			return 0, ""
		}
		return http.StatusForbidden, "The traffic access token is not this sandbox's"
	}
	if key := BearerOrKey(r.Header); IsKey(key) {
		tenant, err := p.cfg.Authenticate(r.Context(), key)
		switch {
		case err == nil && tenant == sb.Tenant:
			return 0, ""
		case err == nil:
			// Another tenant's sandbox: as if there were none.
			return http.StatusBadGateway, "The sandbox was not found"
		case sandbox.CodeOf(err) != sandbox.CodeUnauthenticated:
			return http.StatusBadGateway, "The API key could not be checked"
		}
		return http.StatusForbidden, "The API key is not valid"
	}
	return http.StatusForbidden, "The sandbox's ports are private: send its traffic token as " + HeaderTrafficToken + " or an API key as X-API-Key"
}

// Serve carries r to a port of sb, for a caller that may reach it. The path is
// forwarded as it stands in r.URL. One that is hibernated is woken first: the
// request, or the upgrade, waits for it.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, sb sandbox.Sandbox, port int) {
	p.carry(w, r, sb, port, p.cfg.Sandboxes.Use)
}

type use func(ctx context.Context, tenant string, id sandbox.ID) (release func(), err error)

func (p *Proxy) carry(w http.ResponseWriter, r *http.Request, sb sandbox.Sandbox, port int, use use) {
	t := Target{ID: sb.ID, Port: port}
	switch {
	case sb.State.Ended():
		p.Forget(sb.ID)
		writeError(w, http.StatusBadGateway, t, "The sandbox was not found")
		return
	case sb.State != sandbox.Running && sb.State != sandbox.Hibernated:
		writeError(w, http.StatusBadGateway, t, "The sandbox is "+string(sb.State))
		return
	}
	release, err := use(r.Context(), sb.Tenant, sb.ID)
	if err != nil {
		p.failUse(w, r, t, err)
		return
	}
	defer release()
	FullDuplex(w)
	u, done := p.table.claim(sb)
	defer done()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(u.ctx, cancel)()
	host := ""
	if port != sandbox.AgentPort {
		host = strings.ReplaceAll(sb.HostHeader, "${PORT}", strconv.Itoa(port))
	}
	ctx = context.WithValue(ctx, routeKey{}, route{t, u, host})
	p.rp.ServeHTTP(w, r.WithContext(ctx))
}

// FullDuplex lets an HTTP/1.1 request's body be read after the answer has
// begun; HTTP/2 always does. Every reverse proxy needs it: without, net/http
// closes the body with the first byte of the answer, which its own transport
// may still be reading for the body's end; it then drops the connection to the
// upstream in the middle of the answer.
func FullDuplex(w http.ResponseWriter) {
	http.NewResponseController(w).EnableFullDuplex() // fails for HTTP/2 alone
}

type routeKey struct{}

// route travels with a request from Serve to the transport.
type route struct {
	Target
	up   *upstream
	host string // to show to the program; "" is the client's
}

func rewrite(pr *httputil.ProxyRequest) {
	rt := pr.In.Context().Value(routeKey{}).(route)
	pr.SetXForwarded()
	pr.Out.URL.Scheme = "http"
	pr.Out.URL.Host = net.JoinHostPort(string(rt.ID), strconv.Itoa(rt.Port)) // the pool's key
	pr.Out.Host = pr.In.Host
	if rt.host != "" {
		pr.Out.Host = rt.host // X-Forwarded-Host tells the client's
	}
	// We read nothing from the query, so it passes as it is, odd ones too.
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	stripSecrets(pr.Out.Header)
	if _, ok := pr.In.Header["User-Agent"]; !ok {
		pr.Out.Header.Set("User-Agent", "") // net/http would put its own
	}
}

type roundTripper struct{}

func (roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	return r.Context().Value(routeKey{}).(route).up.RoundTrip(r)
}

// statusClientClosed is nginx's status for a client that went away; nobody
// reads it but the access log.
const statusClientClosed = 499

func (p *Proxy) fail(w http.ResponseWriter, r *http.Request, err error) {
	rt := r.Context().Value(routeKey{}).(route)
	switch {
	case rt.up.ctx.Err() != nil:
		writeError(w, http.StatusBadGateway, rt.Target, "The sandbox was not found")
	case errors.Is(err, context.Canceled):
		w.WriteHeader(statusClientClosed)
	case sandbox.CodeOf(err) == sandbox.CodeUnavailable:
		writeError(w, http.StatusBadGateway, rt.Target, "The sandbox is running but port is not open")
	case sandbox.CodeOf(err) == sandbox.CodeNotFound, sandbox.CodeOf(err) == sandbox.CodeConflict:
		writeError(w, http.StatusBadGateway, rt.Target, "The sandbox was not found")
	default:
		p.cfg.Log.DebugContext(r.Context(), "proxy: upstream failed", "sandbox", rt.ID, "port", rt.Port, "err", err)
		writeError(w, http.StatusBadGateway, rt.Target, "The program at this port of the sandbox did not answer as HTTP: "+firstLine(err.Error()))
	}
}

// failUse answers where a sandbox is not there to be used, or not woken. The
// reader may be anybody: what went wrong inside Warren is for its log.
func (p *Proxy) failUse(w http.ResponseWriter, r *http.Request, t Target, err error) {
	const asleep = "The sandbox is hibernated and could not be woken: "
	var e *sandbox.Error
	errors.As(err, &e)
	switch code := sandbox.CodeOf(err); {
	case r.Context().Err() != nil:
		w.WriteHeader(statusClientClosed)
	case code == sandbox.CodeConflict && e.Details["state"] == string(sandbox.Suspended):
		writeError(w, http.StatusBadGateway, t, "The sandbox is suspended")
	case code == sandbox.CodeConflict && e.Details["state"] == string(sandbox.Hibernated):
		writeError(w, http.StatusBadGateway, t, "The sandbox is hibernated, and traffic does not wake it: resume it first")
	case code == sandbox.CodeNotFound, code == sandbox.CodeConflict:
		writeError(w, http.StatusBadGateway, t, "The sandbox was not found")
	case code == sandbox.CodeNoCapacity, code == sandbox.CodeUnavailable, code == sandbox.CodeDiskFull:
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, t, asleep+firstLine(e.Message))
	case code == sandbox.CodeTimeout:
		writeError(w, http.StatusGatewayTimeout, t, asleep+"it took too long")
	case code == sandbox.CodeCorruptCapture, code == sandbox.CodeUnsupported:
		writeError(w, http.StatusBadGateway, t, asleep+firstLine(e.Message))
	default:
		p.cfg.Log.WarnContext(r.Context(), "proxy: wake failed", "sandbox", t.ID, "err", err)
		writeError(w, http.StatusBadGateway, t, asleep+"the daemon's log has more")
	}
}

// errorBody is E2B's form of a proxy error; code repeats the status.
type errorBody struct {
	SandboxID string `json:"sandboxId"`
	Message   string `json:"message"`
	Port      int    `json:"port,omitempty"`
	Code      int    `json:"code"`
}

func writeError(w http.ResponseWriter, status int, t Target, msg string) {
	body, _ := json.Marshal(errorBody{SandboxID: string(t.ID), Message: msg, Port: t.Port, Code: status})
	h := w.Header()
	h.Set("Content-Type", "application/json; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	if len(s) > 200 {
		s = s[:200] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

// bufferPool lends the buffers that bodies are copied through.
type bufferPool struct{ pool sync.Pool }

func (b *bufferPool) Get() []byte {
	if v, ok := b.pool.Get().(*[]byte); ok {
		return *v
	}
	return make([]byte, upstreamBuffer)
}

func (b *bufferPool) Put(buf []byte) { b.pool.Put(&buf) }
