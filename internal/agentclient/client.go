// Package agentclient talks to the agent inside a sandbox: commands, files,
// the private control calls, and TCP to the sandbox's loopback.
//
// Every error that it returns is a *sandbox.Error.
package agentclient

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// Dialer opens a TCP connection to a port of one sandbox.
type Dialer func(ctx context.Context, port int) (net.Conn, error)

// baseURL is what requests name; the host means nothing, as every connection
// is the Dialer's.
const baseURL = "http://agent"

// Client is the agent of one sandbox. It is safe for concurrent use.
type Client struct {
	dial  Dialer
	token string

	transport  *http.Transport   // the connections
	requests   http.RoundTripper // over them
	http       *http.Client
	process    processconnect.ProcessClient
	filesystem filesystemconnect.FilesystemClient
}

// New makes a client over dial. token is the access token that Init gives to
// the agent or gave earlier; "" sends none. No connection is made yet.
func New(dial Dialer, token string) *Client {
	c := &Client{dial: dial, token: token}
	c.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, sandbox.AgentPort)
		},
		DisableCompression:    true, // the bytes of a file are wanted as they are, and fast
		MaxIdleConns:          8,
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       90 * time.Second, // below the agent's, so that the client closes first
		ExpectContinueTimeout: time.Second,
		WriteBufferSize:       64 << 10,
		ReadBufferSize:        64 << 10,
	}
	c.over(c.transport)
	return c
}

// over makes c's requests go over rt.
func (c *Client) over(rt http.RoundTripper) {
	c.requests = rt
	c.http = &http.Client{Transport: withToken{rt, c.token}}
	c.process = processconnect.NewProcessClient(c.http, baseURL)
	c.filesystem = filesystemconnect.NewFilesystemClient(c.http, baseURL)
}

// Close drops the idle connections. Calls under way go on, and the client can
// be used again.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// Process is the process service, authenticated with the client's token. Its
// errors are Connect's; Error maps them.
func (c *Client) Process() processconnect.ProcessClient { return c.process }

// Filesystem is the filesystem service, authenticated with the client's token.
func (c *Client) Filesystem() filesystemconnect.FilesystemClient { return c.filesystem }

// Transport sends any request to the agent, whatever its URL's host, as it is:
// it adds no token. It is for reverse proxies, whose clients bring their own.
func (c *Client) Transport() http.RoundTripper { return toAgent{c.requests} }

// WaitReady polls GET /health until the agent answers, beginning 1 ms apart
// and backing off to 20 ms. The error has CodeTimeout or CodeCanceled, and
// tells the last failure.
func (c *Client) WaitReady(ctx context.Context) error {
	wait := time.Millisecond
	for {
		err := c.health(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			code := sandbox.CodeTimeout
			if ctx.Err() == context.Canceled {
				code = sandbox.CodeCanceled
			}
			return sandbox.Errorf(code, "the sandbox's agent did not answer: %w", err)
		case <-time.After(wait):
		}
		wait = min(wait*2, 20*time.Millisecond)
	}
}

func (c *Client) health(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, baseURL+control.PathHealth, nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("GET %s answered %s", control.PathHealth, resp.Status)
	}
	return nil
}

// withToken adds the access token where a request has none.
type withToken struct {
	next  http.RoundTripper
	token string
}

func (t withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	if t.token != "" && r.Header.Get(control.TokenHeader) == "" {
		r = r.Clone(r.Context())
		r.Header.Set(control.TokenHeader, t.token)
	}
	return t.next.RoundTrip(r)
}

// toAgent sends every request to the agent's connection pool.
type toAgent struct{ next http.RoundTripper }

func (t toAgent) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "http" || r.URL.Host != strings.TrimPrefix(baseURL, "http://") {
		u := *r.URL
		if r.Host == "" { // the client's Host header goes on
			r.Host = u.Host
		}
		u.Scheme, u.Host = "http", strings.TrimPrefix(baseURL, "http://")
		host := r.Host
		r = r.Clone(r.Context())
		r.URL, r.Host = &u, host
	}
	return t.next.RoundTrip(r)
}

// asUser sets the user of a call to a Connect service; "" is the default user.
func asUser(h http.Header, user string) {
	if user != "" {
		h.Set("Authorization", basicUser(user))
	}
}
