package client

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

func fileQuery(path, user string) url.Values {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	return q
}

// ReadFile opens a file inside; size is -1 where only reading tells. The
// caller closes it.
func (c *Client) ReadFile(ctx context.Context, id, path, user string) (r io.ReadCloser, size int64, err error) {
	res, err := c.send(ctx, call{method: "GET", path: sandboxPath(id, "/files"), query: fileQuery(path, user)})
	if err != nil {
		return nil, 0, err
	}
	return c.mapped(res.Body), res.ContentLength, nil
}

// WriteFile writes r to a file inside, whole or not at all. size may be -1.
// mode 0 keeps the permissions that the file has, 0644 for a new one.
func (c *Client) WriteFile(ctx context.Context, id, path, user string, r io.Reader, size int64, mode fs.FileMode) error {
	q := fileQuery(path, user)
	if mode.Perm() != 0 {
		q.Set("mode", strconv.FormatUint(uint64(mode.Perm()), 8))
	}
	if size == 0 {
		r = http.NoBody
	}
	return c.json(ctx, call{
		method: "PUT", path: sandboxPath(id, "/files"), query: q, stream: bigReader{r}, size: size, contentType: "application/octet-stream",
	}, nil)
}

// ReadTar opens a file or directory inside as a tar archive, whose names begin
// with the last element of path. The caller closes it.
func (c *Client) ReadTar(ctx context.Context, id, path, user string) (io.ReadCloser, error) {
	res, err := c.send(ctx, call{method: "GET", path: sandboxPath(id, "/tar"), query: fileQuery(path, user)})
	if err != nil {
		return nil, err
	}
	return c.mapped(res.Body), nil
}

// WriteTar extracts a tar archive into a directory inside.
func (c *Client) WriteTar(ctx context.Context, id, path, user string, r io.Reader) error {
	return c.json(ctx, call{
		method: "PUT", path: sandboxPath(id, "/tar"), query: fileQuery(path, user), stream: bigReader{r}, size: -1, contentType: "application/x-tar",
	}, nil)
}

// copyBuffer is how much of a file goes at once.
const copyBuffer = 256 << 10

// bigReader makes net/http copy a body by large buffers, and hides what the
// reader is besides.
type bigReader struct{ r io.Reader }

func (b bigReader) Read(p []byte) (int, error) { return b.r.Read(p) }

func (b bigReader) WriteTo(w io.Writer) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{b.r}, make([]byte, copyBuffer))
}

// tunnelProtocol is the Upgrade token of the tunnel route.
const tunnelProtocol = "warren-tcp"

// Tunnel opens a TCP connection to a port inside. The connection has
// CloseWrite. CodeUnavailable: nothing listens there.
func (c *Client) Tunnel(ctx context.Context, id string, port int) (net.Conn, error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, c.Error(err)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	fail := func(err error) (net.Conn, error) {
		stop()
		conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, c.Error(err)
	}
	r, err := http.NewRequest("GET", c.base+sandboxPath(id, "/tunnel")+"?port="+strconv.Itoa(port), nil)
	if err != nil {
		return fail(err)
	}
	c.sign(r.Header)
	r.Header.Set("Connection", "Upgrade")
	r.Header.Set("Upgrade", tunnelProtocol)
	if err := r.Write(conn); err != nil {
		return fail(err)
	}
	br := bufio.NewReader(conn)
	res, err := http.ReadResponse(br, r)
	if err != nil {
		return fail(err)
	}
	if res.StatusCode != http.StatusSwitchingProtocols {
		err := readError(res)
		return fail(err)
	}
	if !stop() {
		return fail(ctx.Err())
	}
	return &tunnelConn{Conn: conn, br: br}, nil
}

// connect opens a connection to the daemon itself.
func (c *Client) connect(ctx context.Context) (net.Conn, error) {
	if c.dial != nil {
		return c.dial(ctx)
	}
	u, err := url.Parse(c.base)
	if err != nil {
		return nil, err
	}
	port := u.Port()
	if u.Scheme == "https" {
		if port == "" {
			port = "443"
		}
		d := tls.Dialer{Config: &tls.Config{ServerName: u.Hostname(), NextProtos: []string{"http/1.1"}}}
		return d.DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	}
	if port == "" {
		port = "80"
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
}

// tunnelConn reads first what came together with the upgrade's answer.
type tunnelConn struct {
	net.Conn
	br *bufio.Reader
}

func (t *tunnelConn) Read(p []byte) (int, error) { return t.br.Read(p) }

// CloseWrite ends the writing side alone.
func (t *tunnelConn) CloseWrite() error {
	if cw, ok := t.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return t.Conn.Close()
}

// ParsePort reads a TCP port of a command line. The error has CodeInvalid.
func ParsePort(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || strings.HasPrefix(s, "+") {
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%q is not a port: give 1 to 65535", s)
	}
	return int(n), nil
}
