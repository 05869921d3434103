package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// serve starts the HTTP server of e2e/inside in a sandbox, and returns when it
// listens.
func serve(t *testing.T, l *lab, id, addr string) {
	t.Helper()
	out := &notify{line: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	r, err := l.cl.Start(ctx, id, client.Command{Args: []string{"inside", "serve", addr}, Stdout: out, Stderr: out})
	must(t, err)
	done := make(chan struct{})
	go func() { defer close(done); r.Wait(ctx) }()
	select {
	case <-out.line:
	case <-done:
		t.Fatalf("the server in %s does not serve: %s", id, out.b.Bytes())
	}
	if !strings.HasPrefix(out.b.String(), "listening") {
		t.Fatalf("the server in %s says %q", id, out.b.Bytes())
	}
}

// notify closes line with its first write.
type notify struct {
	b    bytes.Buffer
	line chan struct{}
}

func (n *notify) Write(p []byte) (int, error) {
	if n.b.Len() == 0 && len(p) > 0 {
		n.b.Write(p)
		close(n.line)
	}
	return len(p), nil
}

// said is what the server inside tells of a request.
type said struct {
	Proto, Method, Path, Host, Body string
	Headers                         http.Header
}

// TestProxy reaches ports inside by host name and by headers, in every
// protocol, and checks who may.
func TestProxy(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	h1 := &http.Transport{}
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h1.CloseIdleConnections()
	defer h2.CloseIdleConnections()
	rival, err := client.New("unix://"+l.socket, client.Options{Tenant: "rival"})
	must(t, err)
	defer rival.Close()
	other, err := rival.CreateKey(t.Context(), "other")
	must(t, err)

	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		sb = l.get(t, sb.ID) // with its traffic token
		serve(t, l, sb.ID, "0.0.0.0:8080")
		serve(t, l, sb.ID, "127.0.0.1:8081")
		name := func(port any, id string) string { return fmt.Sprintf("%v-%s.localhost:7070", port, id) }
		for proto, tr := range map[string]*http.Transport{"HTTP/1.1": h1, "HTTP/2.0": h2} {
			c := &http.Client{Transport: tr}
			for how, route := range map[string]http.Header{
				"host name":        {"Host": {name(8080, sb.ID)}},
				"loopback only":    {"Host": {name(8081, sb.ID)}},
				"E2B's headers":    {"E2b-Sandbox-Id": {sb.ID}, "E2b-Sandbox-Port": {"8080"}},
				"Warren's headers": {"Warren-Sandbox-Id": {sb.ID}, "Warren-Sandbox-Port": {"8081"}},
				"host in capitals": {"Host": {strings.ToUpper(name(8080, sb.ID))}},
				"name goes before": {"Host": {name(8080, sb.ID)}, "E2b-Sandbox-Id": {"sbx00000000000000000"}, "E2b-Sandbox-Port": {"1"}},
			} {
				t.Run(proto+" by "+how, func(t *testing.T) {
					for with, cred := range map[string][2]string{
						"key": {"X-Api-Key", l.key}, "bearer": {"Authorization", "Bearer " + l.key}, "traffic token": {"E2b-Traffic-Access-Token", sb.TrafficToken},
					} {
						h := route.Clone()
						h.Set(cred[0], cred[1])
						h.Set("X-Mine", "kept")
						path := "/some%2Fpath/../x?q=1&r=%20;odd"
						a := send(t, c, "POST", l.tcp+path, h, strings.NewReader("the body"))
						var s said
						if err := json.Unmarshal(a.body, &s); err != nil || a.status != 200 {
							t.Fatalf("with a %s: %d %s", with, a.status, a.body)
						}
						if s.Method != "POST" || s.Path != path || s.Body != "the body" || s.Headers.Get("X-Mine") != "kept" {
							t.Errorf("with a %s the program got %+v", with, s)
						}
						if bytes.Contains(a.body, []byte(l.key)) || bytes.Contains(a.body, []byte(sb.TrafficToken)) {
							t.Errorf("with a %s the program got the secret: %s", with, a.body)
						}
					}
				})
			}
			t.Run(proto+" refusals", func(t *testing.T) {
				good := func(h http.Header) http.Header { h.Set("X-Api-Key", l.key); return h }
				for what, c := range map[string]struct {
					h      http.Header
					status int
					phrase string
				}{
					"closed port":            {good(http.Header{"Host": {name(9999, sb.ID)}}), 502, "port is not open"},
					"unknown sandbox":        {good(http.Header{"Host": {name(80, "sbx00000000000000000")}}), 502, "not found"},
					"unknown by header":      {good(http.Header{"E2b-Sandbox-Id": {"sbx00000000000000000"}, "E2b-Sandbox-Port": {"80"}}), 502, "not found"},
					"no credentials":         {http.Header{"Host": {name(8080, sb.ID)}}, 403, "private"},
					"no credentials, header": {http.Header{"E2b-Sandbox-Id": {sb.ID}, "E2b-Sandbox-Port": {"8080"}}, 403, "private"},
					"wrong token":            {http.Header{"Host": {name(8080, sb.ID)}, "E2b-Traffic-Access-Token": {"x"}}, 403, "token"},
					"wrong key":              {http.Header{"Host": {name(8080, sb.ID)}, "X-Api-Key": {"e2b_" + strings.Repeat("0", 40)}}, 403, "key"},
					"another tenant's key":   {http.Header{"Host": {name(8080, sb.ID)}, "X-Api-Key": {other.Key}}, 502, "not found"},
					"port 0":                 {good(http.Header{"Host": {name(0, sb.ID)}}), 400, "port"},
					"port too high":          {good(http.Header{"Host": {name(70000, sb.ID)}}), 400, "port"},
					"bad id":                 {good(http.Header{"E2b-Sandbox-Id": {"../../etc"}}), 400, "id"},
				} {
					hc := &http.Client{Transport: tr}
					a := send(t, hc, "GET", l.tcp+"/", c.h, nil)
					var e struct {
						SandboxID, Message string
						Code               int
					}
					if err := json.Unmarshal(a.body, &e); err != nil || a.status != c.status || e.Code != c.status || !strings.Contains(strings.ToLower(e.Message), c.phrase) {
						t.Errorf("%s: %d %s; want %d and %q", what, a.status, a.body, c.status, c.phrase)
					}
				}
			})
		}
		t.Run("WebSocket", func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()
			ws, _, err := websocket.Dial(ctx, strings.Replace(l.tcp, "http", "ws", 1)+"/ws", &websocket.DialOptions{
				Host: name(8081, sb.ID), HTTPHeader: http.Header{"X-Api-Key": {l.key}},
			})
			must(t, err)
			defer ws.CloseNow()
			ws.SetReadLimit(4 << 20)
			for _, size := range []int{0, 1, 100, 1 << 20} {
				msg := bytes.Repeat([]byte{'w'}, size)
				must(t, ws.Write(ctx, websocket.MessageBinary, msg))
				if _, got, err := ws.Read(ctx); err != nil || !bytes.Equal(got, msg) {
					t.Fatalf("of %d bytes come back %d: %v", size, len(got), err)
				}
			}
			// With the sandbox, its connections end.
			gone := l.create(t, wire.CreateSandbox{Runtime: runtime})
			serve(t, l, gone.ID, "0.0.0.0:8080")
			ws2, _, err := websocket.Dial(ctx, strings.Replace(l.tcp, "http", "ws", 1)+"/ws", &websocket.DialOptions{
				Host: name(8080, gone.ID), HTTPHeader: http.Header{"X-Api-Key": {l.key}},
			})
			must(t, err)
			defer ws2.CloseNow()
			must(t, l.cl.Kill(ctx, gone.ID))
			if _, _, err := ws2.Read(ctx); err == nil || ctx.Err() != nil {
				t.Errorf("a WebSocket into a sandbox that was killed: %v", err)
			}
		})
		t.Run("by the API", func(t *testing.T) {
			a := l.raw(t, "PUT", "/v1/sandboxes/"+sb.ID+"/ports/8081/a//b/../c?x=y", nil, strings.NewReader("api"))
			var s said
			if err := json.Unmarshal(a.body, &s); err != nil || s.Path != "/a//b/../c?x=y" || s.Body != "api" {
				t.Errorf("the program got %d %s", a.status, a.body)
			}
			conn, err := l.cl.Tunnel(t.Context(), sb.ID, 8081)
			must(t, err)
			fmt.Fprintf(conn, "GET /tunnel HTTP/1.0\r\n\r\n")
			buf := make([]byte, 15)
			if n, err := conn.Read(buf); err != nil || !bytes.HasPrefix(buf[:n], []byte("HTTP/1.0 200")) {
				t.Errorf("through the tunnel comes %q, %v", buf[:n], err)
			}
			conn.Close()
			_, err = l.cl.Tunnel(t.Context(), sb.ID, 9999)
			wantError(t, err, sandbox.CodeUnavailable, "9999")
			_, err = l.cl.Tunnel(t.Context(), sb.ID, sandbox.AgentPort)
			wantError(t, err, sandbox.CodeInvalid, "agent")
		})
	})
}
