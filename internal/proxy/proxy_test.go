package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	idA     = sandbox.ID("sbxaaaaaaaaaaaaaaaaa")
	idB     = sandbox.ID("sbxbbbbbbbbbbbbbbbbb")
	idEnded = sandbox.ID("sbxeeeeeeeeeeeeeeeee")
	keyA    = "e2b_00000000000000000000000000000000000000aa"
	keyB    = "e2b_00000000000000000000000000000000000000bb"
)

// hosts is two live sandboxes whose ports are listeners of the test's.
type hosts struct {
	mu    sync.Mutex
	ports map[int]string // sandbox port -> address
	byID  map[sandbox.ID]sandbox.Sandbox
	dials int

	use   func(id sandbox.ID) error // of Use; nil: it runs
	using int
}

func (h *hosts) Lookup(_ context.Context, id sandbox.ID) (sandbox.Sandbox, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	sb, ok := h.byID[id]
	if !ok {
		return sb, sandbox.Errorf(sandbox.CodeNotFound, "no sandbox %q", id)
	}
	return sb, nil
}

func (h *hosts) ByToken(is func(token string) bool) (found sandbox.Sandbox, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, sb := range h.byID {
		if !sb.State.Ended() && is(sb.Token) {
			found, ok = sb, true
		}
	}
	return found, ok
}

func (h *hosts) Dial(ctx context.Context, tenant string, id sandbox.ID, port int) (net.Conn, error) {
	h.mu.Lock()
	addr, ok := h.ports[port]
	h.dials++
	h.mu.Unlock()
	if !ok {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "nothing listens on port %d", port)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
}

func (h *hosts) UseAwake(ctx context.Context, tenant string, id sandbox.ID) (func(), error) {
	h.mu.Lock()
	asleep := h.byID[id].State == sandbox.Hibernated
	h.mu.Unlock()
	if asleep {
		return nil, sandbox.Errorf(sandbox.CodeConflict, "asleep").With("state", string(sandbox.Hibernated))
	}
	return h.Use(ctx, tenant, id)
}

func (h *hosts) Use(_ context.Context, _ string, id sandbox.ID) (func(), error) {
	h.mu.Lock()
	use := h.use
	h.using++
	h.mu.Unlock()
	release := sync.OnceFunc(func() { h.mu.Lock(); h.using--; h.mu.Unlock() })
	if use != nil {
		if err := use(id); err != nil {
			release()
			return nil, err
		}
	}
	return release, nil
}

func (h *hosts) users() int { h.mu.Lock(); defer h.mu.Unlock(); return h.using }

func (h *hosts) authenticate(_ context.Context, key string) (string, error) {
	switch key {
	case keyA:
		return "a", nil
	case keyB:
		return "b", nil
	}
	return "", sandbox.Errorf(sandbox.CodeUnauthenticated, "not a key")
}

// front starts the proxy on TCP and gives its base URL.
func front(t *testing.T, trusted bool, upstream http.Handler) (string, *hosts, *Proxy) {
	t.Helper()
	h := &hosts{ports: map[int]string{}, byID: map[sandbox.ID]sandbox.Sandbox{
		idA:     {ID: idA, Tenant: "a", State: sandbox.Running, Token: "agent-a", TrafficToken: "tok-a"},
		idB:     {ID: idB, Tenant: "b", State: sandbox.Running, Token: "agent-b", TrafficToken: "tok-b", PublicTraffic: true},
		idEnded: {ID: idEnded, Tenant: "a", State: sandbox.Killed, Token: "agent-ended"},
	}}
	if upstream != nil {
		h.ports[8080] = serve(t, upstream)
		h.ports[sandbox.AgentPort] = h.ports[8080]
	}
	p := New(Config{Sandboxes: h, Authenticate: h.authenticate, Domains: []string{"box.test"}})
	t.Cleanup(p.Close)
	base := "http://" + serve(t, p.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "not for a sandbox", http.StatusTeapot)
	}), trusted))
	return base, h, p
}

// serve serves h by HTTP/1.1 and h2c and gives the address.
func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func client(t *testing.T, h2 bool) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	if h2 {
		tr.Protocols.SetUnencryptedHTTP2(true)
	} else {
		tr.Protocols.SetHTTP1(true)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

func echoHeaders(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "path": r.RequestURI, "header": r.Header, "proto": r.Proto, "body": string(body)})
}

type echoed struct {
	Host, Path, Proto, Body string
	Header                  http.Header
}

func TestWhoMayPass(t *testing.T) {
	base, _, _ := front(t, false, http.HandlerFunc(echoHeaders))
	c := client(t, false)
	for _, tc := range []struct {
		name   string
		host   string
		header map[string]string
		status int
		msg    string
	}{
		{name: "no credentials", host: "8080-" + string(idA) + ".box.test", status: 403, msg: "private"},
		{name: "own key", host: "8080-" + string(idA) + ".box.test", header: map[string]string{"X-API-Key": keyA}, status: 200},
		{name: "own key as bearer", host: "8080-" + string(idA) + ".box.test:7070", header: map[string]string{"Authorization": "Bearer " + keyA}, status: 200},
		{name: "another tenant's key", host: "8080-" + string(idA) + ".box.test", header: map[string]string{"X-API-Key": keyB}, status: 502, msg: "The sandbox was not found"},
		{name: "a key of nobody", host: "8080-" + string(idA) + ".box.test", header: map[string]string{"X-API-Key": "e2b_" + strings.Repeat("0", 40)}, status: 403, msg: "not valid"},
		{name: "traffic token", host: "8080-" + string(idA) + ".box.test", header: map[string]string{"e2b-traffic-access-token": "tok-a"}, status: 200},
		{name: "another's traffic token", host: "8080-" + string(idA) + ".box.test", header: map[string]string{"e2b-traffic-access-token": "tok-b"}, status: 403, msg: "not this sandbox's"},
		{name: "public", host: "8080-" + string(idB) + ".box.test", status: 200},
		{name: "agent's port", host: "49983-" + string(idA) + ".box.test", status: 200},
		{name: "by E2B's headers", host: "127.0.0.1", header: map[string]string{"E2b-Sandbox-Id": string(idB), "E2b-Sandbox-Port": "8080"}, status: 200},
		{name: "by Warren's headers, upper case", host: "anything", header: map[string]string{"Warren-Sandbox-Id": strings.ToUpper(string(idB)), "Warren-Sandbox-Port": "8080"}, status: 200},
		{name: "the agent is the default port", host: "x", header: map[string]string{"E2b-Sandbox-Id": string(idA)}, status: 200},
		{name: "the host name goes before headers", host: "8080-" + string(idB) + ".box.test", header: map[string]string{"E2b-Sandbox-Id": string(idEnded)}, status: 200},
		{name: "unknown sandbox", host: "8080-sbxzzz.box.test", status: 502, msg: "The sandbox was not found"},
		{name: "ended sandbox", host: "49983-" + string(idEnded) + ".box.test", status: 502, msg: "The sandbox was not found"},
		{name: "port not open", host: "9-" + string(idB) + ".box.test", status: 502, msg: "The sandbox is running but port is not open"},
		{name: "port 0", host: "0-" + string(idB) + ".box.test", status: 400, msg: "not a port"},
		{name: "port too large", host: "70000-" + string(idB) + ".box.test", status: 400, msg: "not a port"},
		{name: "bad header port", host: "x", header: map[string]string{"E2b-Sandbox-Id": string(idB), "E2b-Sandbox-Port": "-1"}, status: 400, msg: "not a port"},
		{name: "another domain", host: "8080-" + string(idB) + ".other.test", status: 418},
		{name: "no sandbox named", host: "box.test", status: 418},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req, _ := http.NewRequest("GET", base+"/x", nil)
			req.Host = tc.host
			for k, v := range tc.header {
				req.Header.Set(k, v)
			}
			res, err := c.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, _ := io.ReadAll(res.Body)
			if res.StatusCode != tc.status {
				t.Fatalf("status %d, want %d: %s", res.StatusCode, tc.status, body)
			}
			if tc.status == 200 || tc.status == 418 {
				return
			}
			var e errorBody
			if err := json.Unmarshal(body, &e); err != nil {
				t.Fatalf("error body %q: %v", body, err)
			}
			if !strings.Contains(e.Message, tc.msg) || e.Code != tc.status {
				t.Errorf("got %+v, want message with %q and code %d", e, tc.msg, tc.status)
			}
		})
	}
}

func TestSecretsStayOut(t *testing.T) {
	base, _, _ := front(t, false, http.HandlerFunc(echoHeaders))
	req, _ := http.NewRequest("POST", base+"/a%2Fb?q=1;2", strings.NewReader("hello"))
	req.Host = "8080-" + string(idA) + ".box.test"
	req.Header.Set("X-API-Key", keyA)
	req.Header.Set("Authorization", "Bearer "+keyA)
	req.Header.Set("E2b-Traffic-Access-Token", "tok-a")
	req.Header.Set("E2b-Sandbox-Id", string(idA))
	req.Header.Set("X-Forwarded-For", "6.6.6.6")
	req.Header.Set("Connection", "X-Hop")
	req.Header.Set("X-Hop", "1")
	req.Header.Set("X-Access-Token", "the agent's")
	res, err := client(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var got echoed
	if err := json.NewDecoder(res.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if got.Host != req.Host || got.Path != "/a%2Fb?q=1;2" || got.Body != "hello" {
		t.Errorf("host, path or body changed: %+v", got)
	}
	for _, name := range []string{"X-Api-Key", "Authorization", "E2b-Traffic-Access-Token", "E2b-Sandbox-Id", "X-Hop"} {
		if v := got.Header.Get(name); v != "" {
			t.Errorf("%s: %q reached the sandbox", name, v)
		}
	}
	if v := got.Header.Get("X-Forwarded-For"); v != "127.0.0.1" {
		t.Errorf("X-Forwarded-For is %q", v)
	}
	if got.Header.Get("X-Forwarded-Host") != req.Host || got.Header.Get("X-Forwarded-Proto") != "http" {
		t.Errorf("X-Forwarded-Host or -Proto: %v", got.Header)
	}
	if got.Header.Get("X-Access-Token") == "" {
		t.Error("X-Access-Token did not pass")
	}

	// A key of the workload's own is not ours to take away.
	req, _ = http.NewRequest("GET", base, nil)
	req.Host = "8080-" + string(idB) + ".box.test"
	req.Header.Set("X-API-Key", "sk-the-app's")
	req.Header.Set("Authorization", "Bearer jwt.of.app")
	res, err = client(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	got = echoed{}
	json.NewDecoder(res.Body).Decode(&got)
	if got.Header.Get("X-Api-Key") != "sk-the-app's" || got.Header.Get("Authorization") != "Bearer jwt.of.app" {
		t.Errorf("the workload's own credentials were dropped: %v", got.Header)
	}
}

func TestStreamsAtOnce(t *testing.T) {
	step := make(chan struct{})
	base, _, _ := front(t, true, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			fmt.Fprintf(w, "%d\n", i)
			w.(http.Flusher).Flush()
			<-step
		}
	}))
	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequest("GET", base, nil)
		req.Host = "8080-" + string(idA) + ".box.test"
		res, err := client(t, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 2)
		for i := range 3 {
			if _, err := io.ReadFull(res.Body, buf); err != nil || string(buf) != fmt.Sprintf("%d\n", i) {
				t.Fatalf("h2=%v: %q, %v", h2, buf, err)
			}
			step <- struct{}{}
		}
		res.Body.Close()
	}
}

// The answer's first byte must not cut off the request's body, nor, by that,
// the answer.
func TestBodyAfterAnswerBegan(t *testing.T) {
	base, _, _ := front(t, true, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		buf := make([]byte, 5)
		for {
			if _, err := io.ReadFull(r.Body, buf); err != nil {
				return
			}
			w.Write(buf)
			w.(http.Flusher).Flush()
		}
	}))
	for i := range 20 {
		pr, pw := io.Pipe()
		req, _ := http.NewRequest("POST", base, pr)
		req.Host = "8080-" + string(idA) + ".box.test"
		go pw.Write([]byte("first"))
		res, err := client(t, false).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 5)
		for _, msg := range []string{"first", "secon", "third"} {
			if msg != "first" {
				if _, err := pw.Write([]byte(msg)); err != nil {
					t.Fatalf("round %d: write %q: %v", i, msg, err)
				}
			}
			if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != msg {
				t.Fatalf("round %d: %q for %q, %v", i, got, msg, err)
			}
		}
		pw.Close()
		if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
			t.Fatalf("round %d: %q, %v", i, rest, err)
		}
		res.Body.Close()
	}
}

func TestGRPCTrailers(t *testing.T) {
	// A server that speaks HTTP/2 alone, as gRPC servers do, echoing message
	// by message in both directions at once.
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Te") != "trailers" {
			http.Error(w, "no TE: trailers", http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/grpc")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		buf := make([]byte, 5)
		for {
			if _, err := io.ReadFull(r.Body, buf); err != nil {
				break
			}
			w.Write(buf)
			w.(http.Flusher).Flush()
		}
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	defer s.Close()
	base, h, _ := front(t, true, nil)
	h.ports[50051] = s.Listener.Addr().String()

	pr, pw := io.Pipe()
	req, _ := http.NewRequest("POST", base+"/pkg.Service/Bidi", pr)
	req.Host = "50051-" + string(idA) + ".box.test"
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	res, err := client(t, true).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 || res.ProtoMajor != 2 {
		t.Fatalf("%s %s", res.Proto, res.Status)
	}
	for _, msg := range []string{"first", "secon", "third"} {
		if _, err := pw.Write([]byte(msg)); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 5)
		if _, err := io.ReadFull(res.Body, buf); err != nil || string(buf) != msg {
			t.Fatalf("%q, %v", buf, err)
		}
	}
	pw.Close()
	if rest, err := io.ReadAll(res.Body); err != nil || len(rest) != 0 {
		t.Fatalf("%q, %v", rest, err)
	}
	if res.Trailer.Get("Grpc-Status") != "0" || res.Trailer.Get("Grpc-Message") != "fine" {
		t.Errorf("trailers: %v", res.Trailer)
	}
}

func TestWebSocket(t *testing.T) {
	base, _, p := front(t, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(1 << 20)
		for {
			kind, msg, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if err := c.Write(r.Context(), kind, msg); err != nil {
				return
			}
		}
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	hc := client(t, false)
	hc.Timeout = 0
	c, _, err := websocket.Dial(ctx, base+"/ws", &websocket.DialOptions{
		Host: "8080-" + string(idA) + ".box.test", HTTPClient: hc,
		HTTPHeader: http.Header{"X-Api-Key": {keyA}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	c.SetReadLimit(1 << 20)
	msg := make([]byte, 100<<10)
	rand.Read(msg)
	for range 10 {
		if err := c.Write(ctx, websocket.MessageBinary, msg); err != nil {
			t.Fatal(err)
		}
		_, got, err := c.Read(ctx)
		if err != nil || !bytes.Equal(got, msg) {
			t.Fatalf("echo differs (%d bytes): %v", len(got), err)
		}
	}
	// The sandbox's end ends its sockets.
	p.Forget(idA)
	if _, _, err := c.Read(ctx); err == nil || ctx.Err() != nil {
		t.Fatalf("the socket outlived its sandbox: %v", err)
	}
}

func TestNotHTTP(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("\xff\xfeSSH-2.0-hello\r\n"))
			c.Close()
		}
	}()
	base, h, _ := front(t, true, nil)
	h.ports[22] = l.Addr().String()
	req, _ := http.NewRequest("GET", base, nil)
	req.Host = "22-" + string(idA) + ".box.test"
	res, err := client(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var e errorBody
	if err := json.NewDecoder(res.Body).Decode(&e); err != nil || res.StatusCode != 502 || !strings.Contains(e.Message, "did not answer as HTTP") {
		t.Fatalf("%d %+v %v", res.StatusCode, e, err)
	}
}

func TestConnectionsAreReusedAndBounded(t *testing.T) {
	base, h, p := front(t, true, http.HandlerFunc(echoHeaders))
	c := client(t, false)
	for range 50 {
		req, _ := http.NewRequest("GET", base, nil)
		req.Host = "8080-" + string(idA) + ".box.test"
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
	}
	h.mu.Lock()
	if h.dials > 2 {
		t.Errorf("%d dials for 50 requests in a row", h.dials)
	}
	h.mu.Unlock()
	p.Forget(idA)
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	if n := len(p.table.byID); n != 0 {
		t.Errorf("%d upstreams left after Forget", n)
	}
}

// The Host that a sandbox's programs are to be shown is not the client's; the
// agent, and everything else, gets the client's.
func TestHostHeader(t *testing.T) {
	base, h, _ := front(t, false, http.HandlerFunc(echoHeaders))
	shown := sandbox.ID("sbxmmmmmmmmmmmmmmmmm")
	h.mu.Lock()
	h.byID[shown] = sandbox.Sandbox{ID: shown, State: sandbox.Running, PublicTraffic: true, HostHeader: "app.example:${PORT}"}
	h.mu.Unlock()
	for _, tc := range []struct {
		id   sandbox.ID
		port int
		host string
	}{
		{shown, 8080, "app.example:8080"},
		{shown, sandbox.AgentPort, ""},
		{idB, 8080, ""},
	} {
		asked := fmt.Sprintf("%d-%s.box.test:7070", tc.port, tc.id)
		req, _ := http.NewRequest("GET", base, nil)
		req.Host = asked
		res, err := client(t, false).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		var got echoed
		if err := json.NewDecoder(res.Body).Decode(&got); err != nil {
			t.Fatal(err)
		}
		if tc.host == "" {
			tc.host = asked
		}
		if got.Host != tc.host || got.Header.Get("X-Forwarded-Host") != asked {
			t.Errorf("%s: the program is shown %q, and that the client sent %q", asked, got.Host, got.Header.Get("X-Forwarded-Host"))
		}
	}
}

func FuzzParseHost(f *testing.F) {
	for _, s := range []string{"8080-sbxabc.localhost", "8080-sbxabc.localhost:7070", "8080-SBX.LOCALHOST.", "-.localhost", "0-a.localhost", "[::1]:80", "99999999999999999999-a1.localhost", "8080-a-b.localhost", ".", "1-aa.localhost.."} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, host string) {
		got, ok, err := ParseHost(host, "localhost")
		if !ok {
			if got != (Target{}) || err != nil {
				t.Fatalf("%q: not matched, yet %v, %v", host, got, err)
			}
			return
		}
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeInvalid {
				t.Fatalf("%q: %v", host, err)
			}
			return
		}
		if got.Port < 1 || got.Port > 65535 {
			t.Fatalf("%q: port %d", host, got.Port)
		}
		if _, err := sandbox.ParseID(string(got.ID)); err != nil {
			t.Fatalf("%q: %v", host, err)
		}
		again, ok, err := ParseHost(fmt.Sprintf("%d-%s.localhost", got.Port, got.ID), "localhost")
		if !ok || err != nil || again != got {
			t.Fatalf("%q: %v does not survive: %v, %v, %v", host, got, again, ok, err)
		}
	})
}
