package agentclient

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

// InitRequest is the body of POST /init.
type InitRequest = control.InitRequest

// AgentStats is what the agent tells of itself.
type AgentStats = control.Stats

// Init gives the agent its identity, environment and token. The first init of
// an agent needs no token; later ones are sent with the client's.
func (c *Client) Init(ctx context.Context, r InitRequest) error {
	return c.post(ctx, control.PathInit, r)
}

// RestoredRequest is the body of POST /restored.
type RestoredRequest = control.RestoredRequest

// Freeze stops every process of the sandbox but the agent, so that none runs an
// instruction until Thaw or Restored, and none of them or their parents sees it.
// It is idempotent, and returns once all are stopped. While frozen the agent
// answers health, init, thaw and restored; other calls fail with
// CodeUnavailable. On an error nothing is left stopped.
func (c *Client) Freeze(ctx context.Context) error { return c.post(ctx, control.PathFreeze, nil) }

// Thaw lets the processes that Freeze stopped go on. It is idempotent.
func (c *Client) Thaw(ctx context.Context) error { return c.post(ctx, control.PathThaw, nil) }

// Restored gives a sandbox that was restored from a capture taken while frozen
// its new identity, and then lets its processes go on. The client's token is the
// capture's; later calls need r.AccessToken. On an error the processes stay
// stopped, and the call can be repeated.
func (c *Client) Restored(ctx context.Context, r RestoredRequest) error {
	return c.post(ctx, control.PathRestore, r)
}

// post sends v, or nothing, and wants no answer but success.
func (c *Client) post(ctx context.Context, path string, v any) error {
	var body io.Reader
	var contentType string
	if v != nil {
		data, err := json.Marshal(v)
		if err != nil {
			return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", path, err)
		}
		body, contentType = bytes.NewReader(data), "application/json"
	}
	resp, err := c.do(ctx, http.MethodPost, path, nil, body, contentType)
	if err != nil {
		return err
	}
	return drain(resp)
}

// Stats reads what the agent tells of itself.
func (c *Client) Stats(ctx context.Context) (AgentStats, error) {
	var s AgentStats
	return s, c.getJSON(ctx, control.PathStats, &s)
}

// Metrics reads the sandbox's CPU, memory and disk as seen inside.
func (c *Client) Metrics(ctx context.Context) (control.Metrics, error) {
	var m control.Metrics
	return m, c.getJSON(ctx, control.PathMetrics, &m)
}

func (c *Client) getJSON(ctx context.Context, path string, into any) error {
	resp, err := c.do(ctx, http.MethodGet, path, nil, nil, "")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(into); err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "the sandbox's agent answered GET %s with no valid JSON: %w", path, err)
	}
	return nil
}

// do sends one plain HTTP call and maps its failure. On nil error the caller
// closes the body.
func (c *Client) do(ctx context.Context, method, path string, query url.Values, body io.Reader, contentType string, headers ...string) (*http.Response, error) {
	u := baseURL + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, u, body)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "%w", err)
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, Error(err)
	}
	if resp.StatusCode >= 300 {
		return nil, statusError(resp)
	}
	return resp, nil
}

// drain reads a small body to its end, so that the connection is kept.
func drain(resp *http.Response) error {
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20)); err != nil {
		return Error(err)
	}
	return nil
}

// DialPort opens a TCP connection to a port of the sandbox's loopback, through
// the agent, so that it reaches listeners on 127.0.0.1 or ::1 alone. The
// connection has CloseWrite. CodeUnavailable: nothing listens there.
func (c *Client) DialPort(ctx context.Context, port int) (net.Conn, error) {
	conn, err := c.dial(ctx, sandbox.AgentPort)
	if err != nil {
		return nil, Error(err)
	}
	tunnel, err := c.upgrade(ctx, conn, port)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return tunnel, nil
}

func (c *Client) upgrade(ctx context.Context, conn net.Conn, port int) (net.Conn, error) {
	// The deadline trick gives ctx the say over blocking reads and writes.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	req, err := http.NewRequest(http.MethodGet, baseURL+control.PathTunnel+"?port="+strconv.Itoa(port), nil)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "%w", err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", control.UpgradeProtocol)
	if c.token != "" {
		req.Header.Set(control.TokenHeader, c.token)
	}
	fail := func(err error) error {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return Error(err)
	}
	if err := req.Write(conn); err != nil {
		return nil, fail(err)
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, fail(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, statusError(resp)
	}
	if !stop() {
		return nil, Error(ctx.Err())
	}
	if br.Buffered() == 0 {
		return conn, nil
	}
	early, _ := br.Peek(br.Buffered())
	return &earlyConn{Conn: conn, early: bytes.Clone(early)}, nil
}

// earlyConn gives first what came together with the upgrade's answer.
type earlyConn struct {
	net.Conn
	early []byte
}

func (e *earlyConn) Read(p []byte) (int, error) {
	if len(e.early) > 0 {
		n := copy(p, e.early)
		e.early = e.early[n:]
		return n, nil
	}
	return e.Conn.Read(p)
}

// CloseWrite ends the writing side alone.
func (e *earlyConn) CloseWrite() error {
	if c, ok := e.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return e.Conn.Close()
}
