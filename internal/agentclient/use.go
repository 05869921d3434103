package agentclient

import (
	"context"
	"io"
	"net/http"
	"sync"
)

// Begin is asked before each request to a sandbox's agent: it may wait, or
// refuse. release is called once, when the request and its answer, however
// long that streams, are over.
type Begin func(ctx context.Context) (release func(), err error)

// Using gives a client of the same agent, over the same connections, each of
// whose requests begin goes before: it tells when a sandbox is in use.
func (c *Client) Using(begin Begin) *Client {
	u := &Client{dial: c.dial, token: c.token, transport: c.transport}
	u.over(using{c.transport, begin})
	return u
}

type using struct {
	next  http.RoundTripper
	begin Begin
}

func (u using) RoundTrip(r *http.Request) (*http.Response, error) {
	release, err := u.begin(r.Context())
	if err != nil {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, err
	}
	release = sync.OnceFunc(release)
	resp, err := u.next.RoundTrip(r)
	if err != nil {
		release()
		return nil, err
	}
	body := usedBody{resp.Body, release}
	if rw, ok := resp.Body.(io.ReadWriteCloser); ok { // of an upgrade
		resp.Body = usedStream{body, rw}
	} else {
		resp.Body = body
	}
	return resp, nil
}

// usedBody releases at its end or its close, whichever is first.
type usedBody struct {
	io.ReadCloser
	release func()
}

func (b usedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.release()
	}
	return n, err
}

func (b usedBody) Close() error {
	defer b.release()
	return b.ReadCloser.Close()
}

type usedStream struct {
	usedBody
	w io.Writer
}

func (s usedStream) Write(p []byte) (int, error) { return s.w.Write(p) }
