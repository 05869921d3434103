package client

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// CreateSandbox makes a sandbox and returns once its agent is up.
func (c *Client) CreateSandbox(ctx context.Context, r wire.CreateSandbox) (wire.Sandbox, error) {
	var out wire.Sandbox
	return out, c.json(ctx, call{method: "POST", path: "/v1/sandboxes", body: r}, &out)
}

// Sandbox gets one sandbox, an ended one too.
func (c *Client) Sandbox(ctx context.Context, id string) (wire.Sandbox, error) {
	var out wire.Sandbox
	return out, c.json(ctx, call{method: "GET", path: sandboxPath(id, "")}, &out)
}

// Filter narrows Sandboxes.
type Filter struct {
	Live     bool // only those that have not ended
	States   []sandbox.State
	Metadata map[string]string
	Template string
	Runtime  string
}

// Sandboxes lists sandboxes, newest first, page by page as they are taken. An
// error ends it.
func (c *Client) Sandboxes(ctx context.Context, f Filter) iter.Seq2[wire.Sandbox, error] {
	q := url.Values{"limit": {"1000"}}
	if f.Live {
		q.Set("live", "true")
	}
	if len(f.States) > 0 {
		var states []string
		for _, s := range f.States {
			states = append(states, string(s))
		}
		q.Set("state", strings.Join(states, ","))
	}
	if len(f.Metadata) > 0 {
		m := url.Values{}
		for k, v := range f.Metadata {
			m.Set(k, v)
		}
		q.Set("metadata", m.Encode())
	}
	if f.Template != "" {
		q.Set("template", f.Template)
	}
	if f.Runtime != "" {
		q.Set("runtime", f.Runtime)
	}
	return func(yield func(wire.Sandbox, error) bool) {
		for {
			var page wire.SandboxList
			if err := c.json(ctx, call{method: "GET", path: "/v1/sandboxes", query: q}, &page); err != nil {
				yield(wire.Sandbox{}, err)
				return
			}
			for _, sb := range page.Sandboxes {
				if !yield(sb, nil) {
					return
				}
			}
			if page.NextToken == "" {
				return
			}
			q.Set("token", page.NextToken)
		}
	}
}

// Kill ends a sandbox; one that has ended already is no error.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.json(ctx, call{method: "DELETE", path: sandboxPath(id, "")}, nil)
}

// SetTimeout sets the time to live anew, from now; 0 is until it is killed.
func (c *Client) SetTimeout(ctx context.Context, id string, d time.Duration) (wire.Sandbox, error) {
	var out wire.Sandbox
	return out, c.json(ctx, call{method: "POST", path: sandboxPath(id, "/timeout"), body: wire.SetTimeout{Timeout: d.Seconds()}}, &out)
}

// SetNetwork replaces what a sandbox may reach.
func (c *Client) SetNetwork(ctx context.Context, id string, n wire.Network) (wire.Sandbox, error) {
	var out wire.Sandbox
	return out, c.json(ctx, call{method: "PUT", path: sandboxPath(id, "/network"), body: n}, &out)
}

// Stats reads what a sandbox uses now.
func (c *Client) Stats(ctx context.Context, id string) (wire.Stats, error) {
	var out wire.Stats
	return out, c.json(ctx, call{method: "GET", path: sandboxPath(id, "/stats")}, &out)
}

// Logs opens a sandbox's console; with follow it goes on until the sandbox
// ends or ctx does. The caller closes it.
func (c *Client) Logs(ctx context.Context, id string, follow bool) (io.ReadCloser, error) {
	res, err := c.send(ctx, call{method: "GET", path: sandboxPath(id, "/logs"), query: url.Values{"follow": {strconv.FormatBool(follow)}}})
	if err != nil {
		return nil, err
	}
	return c.mapped(res.Body), nil
}

// Exec runs a command to its end and collects what it writes.
func (c *Client) Exec(ctx context.Context, id string, r wire.Exec) (wire.ExecResult, error) {
	var out wire.ExecResult
	return out, c.json(ctx, call{method: "POST", path: sandboxPath(id, "/exec"), body: r}, &out)
}

// Event is one event of a stream.
type Event = wire.Event

// Events follows what happens to sandboxes, to all where id is "", from behind
// the event after (-1: from now on), until ctx ends or f returns an error,
// which it then returns. A connection that breaks off is made anew where it
// was; one that cannot be made ends it.
func (c *Client) Events(ctx context.Context, id string, after int64, f func(Event) error) error {
	for {
		last, err := c.eventsOnce(ctx, id, after, f)
		if last > after {
			after = last
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return c.Error(ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// maxEventLine bounds a line of a stream of events.
const maxEventLine = 1 << 20

// eventsOnce follows one connection to its end; a nil error is a clean cut.
func (c *Client) eventsOnce(ctx context.Context, id string, after int64, f func(Event) error) (last int64, err error) {
	last = after
	q := url.Values{}
	if id != "" {
		q.Set("sandbox", id)
	}
	h := http.Header{"Accept": {"text/event-stream"}}
	if after >= 0 {
		h.Set("Last-Event-ID", strconv.FormatInt(after, 10))
	}
	res, err := c.send(ctx, call{method: "GET", path: "/v1/events", query: q, header: h})
	if err != nil {
		return last, err
	}
	defer res.Body.Close()
	sc := bufio.NewScanner(res.Body)
	sc.Buffer(make([]byte, 0, 8<<10), maxEventLine)
	for sc.Scan() {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		if !ok {
			continue // ids, types and heartbeats; the data has it all
		}
		var e Event
		if err := json.Unmarshal([]byte(data), &e); err != nil {
			return last, sandbox.Errorf(sandbox.CodeInternal, "the daemon sent an event that is none: %w", err)
		}
		last = e.Seq
		if err := f(e); err != nil {
			return last, err
		}
	}
	if ctx.Err() != nil {
		return last, c.Error(ctx.Err())
	}
	return last, nil
}

// Runtimes tells which runtimes the daemon's host can run.
func (c *Client) Runtimes(ctx context.Context) ([]wire.Runtime, error) {
	var out wire.RuntimeList
	err := c.json(ctx, call{method: "GET", path: "/v1/runtimes"}, &out)
	return out.Runtimes, err
}

// Capacity reads the host's budget.
func (c *Client) Capacity(ctx context.Context) (wire.Capacity, error) {
	var out wire.Capacity
	return out, c.json(ctx, call{method: "GET", path: "/v1/capacity"}, &out)
}

// Version reads the daemon's version.
func (c *Client) Version(ctx context.Context) (wire.Version, error) {
	var out wire.Version
	return out, c.json(ctx, call{method: "GET", path: "/v1/version"}, &out)
}

// TLS reads the TLS domain and the certificate authority to trust.
// CodeNotFound: the daemon has none.
func (c *Client) TLS(ctx context.Context) (wire.TLS, error) {
	var out wire.TLS
	return out, c.json(ctx, call{method: "GET", path: "/v1/tls"}, &out)
}

// CreateKey makes an API key, whose Key field is told this once.
func (c *Client) CreateKey(ctx context.Context, name string) (wire.Key, error) {
	var out wire.Key
	return out, c.json(ctx, call{method: "POST", path: "/v1/keys", body: wire.CreateKey{Name: name}}, &out)
}

// Keys lists the tenant's API keys.
func (c *Client) Keys(ctx context.Context) ([]wire.Key, error) {
	var out wire.KeyList
	err := c.json(ctx, call{method: "GET", path: "/v1/keys"}, &out)
	return out.Keys, err
}

// RemoveKey revokes an API key by its id.
func (c *Client) RemoveKey(ctx context.Context, id string) error {
	return c.json(ctx, call{method: "DELETE", path: "/v1/keys/" + url.PathEscape(id)}, nil)
}

// mapped maps the errors of a stream to the domain's.
func (c *Client) mapped(r io.ReadCloser) io.ReadCloser { return mappedBody{r, c} }

type mappedBody struct {
	io.ReadCloser
	c *Client
}

func (b mappedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = b.c.Error(err)
	}
	return n, err
}
