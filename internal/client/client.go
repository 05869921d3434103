// Package client is the Go client of Warren's native HTTP API. The CLI is made
// of it, and so can other programs be.
//
// Every error is a *sandbox.Error: what the daemon answered, or CodeUnavailable
// where there is no daemon to answer (then the detail "no_daemon" tells why).
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// DefaultHost is where a daemon listens unless it was told otherwise.
const DefaultHost = "unix:///run/warren/warren.sock"

// DetailNoDaemon is the key of an error's detail that says that nothing
// answers at the host: "missing", "refused", "denied" or "unreachable".
const DetailNoDaemon = "no_daemon"

// Options are a Client's settings.
type Options struct {
	APIKey    string // for http hosts
	Tenant    string // for unix hosts; "" is "default"
	UserAgent string
}

// Client calls one daemon. It is safe for concurrent use.
type Client struct {
	host string
	base string // URL of the API without a path
	o    Options
	dial func(ctx context.Context) (net.Conn, error)
	http *http.Client
	tr   *http.Transport
}

// New makes a client for host: unix:///PATH, http://HOST[:PORT], or https;
// "" is DefaultHost. It connects to nothing yet.
func New(host string, o Options) (*Client, error) {
	if host == "" {
		host = DefaultHost
	}
	u, err := url.Parse(host)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "host %q: %w", host, err)
	}
	c := &Client{host: host, o: o}
	c.tr = &http.Transport{
		DisableCompression:    true,
		MaxIdleConnsPerHost:   16,
		IdleConnTimeout:       time.Minute,
		ReadBufferSize:        64 << 10,
		WriteBufferSize:       64 << 10,
		ExpectContinueTimeout: 2 * time.Second,
	}
	var d net.Dialer
	switch u.Scheme {
	case "unix":
		if u.Host != "" || u.Path == "" {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "host %q: write unix:///PATH with the socket's absolute path", host)
		}
		c.base = "http://warren"
		c.dial = func(ctx context.Context) (net.Conn, error) { return d.DialContext(ctx, "unix", u.Path) }
		c.tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.dial(ctx) }
	case "http", "https":
		if u.Host == "" || (u.Path != "" && u.Path != "/") || u.RawQuery != "" {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "host %q: write %s://HOST:PORT and nothing behind it", host, u.Scheme)
		}
		c.base = u.Scheme + "://" + u.Host
		c.tr.Proxy = http.ProxyFromEnvironment
	default:
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "host %q: write unix:///PATH or http://HOST:PORT", host)
	}
	c.http = &http.Client{Transport: c.tr}
	return c, nil
}

// Host is what the client was made for.
func (c *Client) Host() string { return c.host }

// Local tells whether the daemon is reached by a unix socket, and so shares
// this machine's files.
func (c *Client) Local() bool { return strings.HasPrefix(c.host, "unix:") }

// Close drops idle connections.
func (c *Client) Close() { c.tr.CloseIdleConnections() }

// Do sends a request with the client's credentials, as connect.HTTPClient
// wants it.
func (c *Client) Do(r *http.Request) (*http.Response, error) {
	c.sign(r.Header)
	return c.http.Do(r)
}

func (c *Client) sign(h http.Header) {
	if c.o.APIKey != "" && !c.Local() {
		h.Set("X-API-Key", c.o.APIKey)
	}
	if c.o.Tenant != "" {
		h.Set("X-Warren-Tenant", c.o.Tenant)
	}
	if c.o.UserAgent != "" {
		h.Set("User-Agent", c.o.UserAgent)
	}
}

var _ connect.HTTPClient = (*Client)(nil)

// call is one request.
type call struct {
	method, path string
	query        url.Values
	body         any       // JSON, or
	stream       io.Reader // bytes of contentType
	size         int64     // of stream; -1 is not known
	contentType  string
	header       http.Header
}

// send sends c and gives the answer of a success; the caller closes its body.
func (c *Client) send(ctx context.Context, q call) (*http.Response, error) {
	u := c.base + q.path
	if len(q.query) > 0 {
		u += "?" + q.query.Encode()
	}
	body := q.stream
	if q.body != nil {
		data, err := json.Marshal(q.body)
		if err != nil {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
		}
		body, q.contentType = bytes.NewReader(data), "application/json"
	}
	r, err := http.NewRequestWithContext(ctx, q.method, u, body)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
	}
	for k, v := range q.header {
		r.Header[k] = v
	}
	if q.contentType != "" {
		r.Header.Set("Content-Type", q.contentType)
	}
	if q.stream != nil && q.size > 0 {
		r.ContentLength = q.size
	}
	if q.stream != nil {
		r.Header.Set("Expect", "100-continue") // a refusal comes before gigabytes are sent
	}
	res, err := c.Do(r)
	if err != nil {
		return nil, c.Error(err)
	}
	if res.StatusCode >= 300 {
		defer res.Body.Close()
		return nil, readError(res)
	}
	return res, nil
}

// json sends q and reads the answer into out, nil for none.
func (c *Client) json(ctx context.Context, q call, out any) error {
	res, err := c.send(ctx, q)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if out == nil {
		io.Copy(io.Discard, io.LimitReader(res.Body, 1<<20))
		return nil
	}
	if err := json.NewDecoder(res.Body).Decode(out); err != nil {
		if ctx.Err() != nil {
			return c.Error(ctx.Err())
		}
		return sandbox.Errorf(sandbox.CodeInternal, "%s %s answered with what is not its JSON: %w", q.method, q.path, err)
	}
	return nil
}

// readError makes an error of an answer that is none of a success.
func readError(res *http.Response) error {
	data, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	kind, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type"))
	var e wire.Error
	if kind == "application/json" && json.Unmarshal(data, &e) == nil && e.Code != "" {
		return e.Err()
	}
	text := strings.TrimSpace(strings.ToValidUTF8(string(data), "?"))
	if len(text) > 300 {
		text = text[:300] + "…"
	}
	return sandbox.Errorf(sandbox.CodeInternal, "the daemon answered %s: %s (is this a Warren daemon?)", res.Status, text)
}

// Error maps an error of a request, or of a stream, to the domain's.
func (c *Client) Error(err error) error {
	if err == nil {
		return nil
	}
	var known *sandbox.Error
	if errors.As(err, &known) { // Connect may have wrapped it
		return known
	}
	var ce *connect.Error
	if errors.As(err, &ce) && connect.IsWireError(err) {
		return sandbox.Errorf(codeOf(ce.Code()), "%s", ce.Message())
	}
	none := func(why, format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeUnavailable, format, args...).With(DetailNoDaemon, why)
	}
	switch {
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.CodeCanceled, "interrupted")
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "the daemon at %s did not answer in time", c.host)
	case errors.Is(err, fs.ErrNotExist):
		return none("missing", "no Warren daemon is running at %s: there is no such socket", c.host)
	case errors.Is(err, syscall.ECONNREFUSED):
		return none("refused", "no Warren daemon is running at %s", c.host)
	case errors.Is(err, fs.ErrPermission):
		return none("denied", "you may not open %s", c.host)
	}
	var op *net.OpError
	var dns *net.DNSError
	if errors.As(err, &dns) || errors.As(err, &op) && op.Op == "dial" {
		return none("unreachable", "cannot reach %s: %v", c.host, root(err))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || op != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the connection to the daemon at %s broke off: %w", c.host, root(err))
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%w", err)
}

// root drops the wrapping of net/http that repeats the URL.
func root(err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		return ue.Err
	}
	return err
}

var connectCodes = map[connect.Code]sandbox.Code{
	connect.CodeCanceled: sandbox.CodeCanceled, connect.CodeInvalidArgument: sandbox.CodeInvalid,
	connect.CodeDeadlineExceeded: sandbox.CodeTimeout, connect.CodeNotFound: sandbox.CodeNotFound,
	connect.CodeAlreadyExists: sandbox.CodeExists, connect.CodePermissionDenied: sandbox.CodeForbidden,
	connect.CodeResourceExhausted: sandbox.CodeTooLarge, connect.CodeFailedPrecondition: sandbox.CodeConflict,
	connect.CodeUnimplemented: sandbox.CodeUnsupported, connect.CodeUnavailable: sandbox.CodeUnavailable,
	connect.CodeUnauthenticated: sandbox.CodeInvalid, // of a user that the agent does not know
}

func codeOf(c connect.Code) sandbox.Code {
	if code, ok := connectCodes[c]; ok {
		return code
	}
	return sandbox.CodeInternal
}

// sandboxPath is the path of something of one sandbox.
func sandboxPath(id, rest string) string {
	return "/v1/sandboxes/" + url.PathEscape(id) + rest
}

// Process is the process service of a sandbox's agent; its errors become the
// domain's by Error.
func (c *Client) Process(id string) processconnect.ProcessClient {
	return processconnect.NewProcessClient(agentHTTP{c}, c.base+sandboxPath(id, "/agent"))
}

// Filesystem is the filesystem service of a sandbox's agent.
func (c *Client) Filesystem(id string) filesystemconnect.FilesystemClient {
	return filesystemconnect.NewFilesystemClient(agentHTTP{c}, c.base+sandboxPath(id, "/agent"))
}

// agentHTTP sends the calls of the agent's services. A refusal of the daemon's
// own, which is not in Connect's form, becomes an error of the request.
type agentHTTP struct{ c *Client }

func (a agentHTTP) Do(r *http.Request) (*http.Response, error) {
	res, err := a.c.Do(r)
	if err != nil || res.StatusCode == http.StatusOK || res.Header.Get("X-Request-Id") == "" {
		return res, err
	}
	// Connect's errors of unary calls are JSON of the same form, with Connect's
	// codes. Those that are the daemon's as well mean the same.
	data, rerr := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	res.Body.Close()
	if rerr != nil {
		return nil, rerr
	}
	var e wire.Error
	if json.Unmarshal(data, &e) == nil && domainCodes[e.Code] {
		if e.Code == sandbox.CodeUnauthenticated && res.Header.Get("WWW-Authenticate") == "" {
			e.Code = sandbox.CodeInvalid // the agent says so of a user that it does not know
		}
		return nil, e.Err()
	}
	res.Body = io.NopCloser(bytes.NewReader(data))
	return res, nil
}

var domainCodes = map[sandbox.Code]bool{
	sandbox.CodeInvalid: true, sandbox.CodeUnauthenticated: true, sandbox.CodeForbidden: true, sandbox.CodeNotFound: true,
	sandbox.CodeExists: true, sandbox.CodeConflict: true, sandbox.CodeUnsupported: true, sandbox.CodeUnavailable: true,
	sandbox.CodeNoCapacity: true, sandbox.CodeDiskFull: true, sandbox.CodeTooLarge: true, sandbox.CodeTimeout: true,
	sandbox.CodeCanceled: true, sandbox.CodeBadTemplate: true, sandbox.CodeBuildFailed: true, sandbox.CodeCorruptCapture: true,
	sandbox.CodeInternal: true,
}
