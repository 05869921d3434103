package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

const idAsleep = sandbox.ID("sbxhhhhhhhhhhhhhhhhh")

// asleep makes idAsleep a hibernated sandbox that wakes when awake is closed.
func (h *hosts) asleep() (asked chan struct{}, awake chan struct{}) {
	asked, awake = make(chan struct{}, 100), make(chan struct{})
	h.mu.Lock()
	defer h.mu.Unlock()
	h.byID[idAsleep] = sandbox.Sandbox{ID: idAsleep, Tenant: "a", State: sandbox.Hibernated, PublicTraffic: true}
	h.use = func(sandbox.ID) error {
		asked <- struct{}{}
		<-awake
		return nil
	}
	return asked, awake
}

// Requests and upgrades to a hibernated sandbox wait until it is awake.
func TestRequestsWaitForTheWake(t *testing.T) {
	base, h, _ := front(t, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			io.Copy(w, r.Body)
			return
		}
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		kind, msg, err := c.Read(r.Context())
		if err == nil {
			c.Write(r.Context(), kind, msg)
		}
	}))
	asked, awake := h.asleep()
	host := "8080-" + string(idAsleep) + ".box.test"
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c := client(t, false)
	var wg sync.WaitGroup
	const n = 10
	for i := range n {
		wg.Go(func() {
			req, _ := http.NewRequestWithContext(ctx, "POST", base, strings.NewReader(fmt.Sprint(i)))
			req.Host = host
			res, err := c.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			if body, _ := io.ReadAll(res.Body); res.StatusCode != 200 || string(body) != fmt.Sprint(i) {
				t.Errorf("request %d: %s %q", i, res.Status, body)
			}
		})
	}
	wg.Go(func() {
		hc := client(t, false)
		hc.Timeout = 0
		ws, _, err := websocket.Dial(ctx, base+"/ws", &websocket.DialOptions{Host: host, HTTPClient: hc})
		if err != nil {
			t.Error(err)
			return
		}
		defer ws.CloseNow()
		ws.Write(ctx, websocket.MessageText, []byte("hello"))
		if _, msg, err := ws.Read(ctx); err != nil || string(msg) != "hello" {
			t.Errorf("%q, %v", msg, err)
		}
	})
	for range n + 1 {
		select {
		case <-asked:
		case <-ctx.Done():
			t.Fatal("not every request asked for the wake")
		}
	}
	h.mu.Lock()
	if h.dials != 0 {
		t.Error("a request did not wait")
	}
	h.mu.Unlock()
	close(awake)
	wg.Wait()
	eventually(t, "every use is given back", func() bool { return h.users() == 0 })
}

// A use lasts as long as what it is of: an answer that comes slowly, an upgrade.
func TestStreamsAreInUse(t *testing.T) {
	more := make(chan struct{})
	base, h, _ := front(t, true, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
			if err == nil {
				c.Read(r.Context())
				c.CloseNow()
			}
			return
		}
		io.WriteString(w, "first\n")
		http.NewResponseController(w).Flush()
		<-more
		io.WriteString(w, "last\n")
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, "GET", base, nil)
	req.Host = "8080-" + string(idA) + ".box.test"
	res, err := client(t, false).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewReader(res.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "first\n" {
		t.Fatalf("%q, %v", line, err)
	}
	if n := h.users(); n != 1 {
		t.Errorf("%d uses in the middle of an answer", n)
	}
	close(more)
	io.Copy(io.Discard, lines)
	eventually(t, "the use of the answer is given back", func() bool { return h.users() == 0 })

	hc := client(t, false)
	hc.Timeout = 0
	ws, _, err := websocket.Dial(ctx, base, &websocket.DialOptions{Host: req.Host, HTTPClient: hc})
	if err != nil {
		t.Fatal(err)
	}
	if n := h.users(); n != 1 {
		t.Errorf("%d uses with a socket open", n)
	}
	ws.CloseNow()
	eventually(t, "the use of the socket is given back", func() bool { return h.users() == 0 })
}

func TestWakeFailures(t *testing.T) {
	for _, tc := range []struct {
		err    error
		status int
		part   string
		retry  bool
	}{
		{sandbox.Errorf(sandbox.CodeNoCapacity, "the host's memory is promised\nto others"), 503, "could not be woken: the host's memory is promised", true},
		{sandbox.Errorf(sandbox.CodeDiskFull, "the disk is full"), 503, "the disk is full", true},
		{sandbox.Errorf(sandbox.CodeCorruptCapture, "pages.img is not what was written"), 502, "pages.img is not", false},
		{sandbox.Errorf(sandbox.CodeUnsupported, "captured by runsc 1"), 502, "captured by runsc 1", false},
		{sandbox.Errorf(sandbox.CodeTimeout, "x"), 504, "too long", false},
		{sandbox.Errorf(sandbox.CodeNotFound, "x"), 502, "The sandbox was not found", false},
		{sandbox.Errorf(sandbox.CodeConflict, "it has ended").With("state", "killed"), 502, "The sandbox was not found", false},
		{sandbox.Errorf(sandbox.CodeConflict, "it is suspended").With("state", "suspended"), 502, "The sandbox is suspended", false},
		{sandbox.Errorf(sandbox.CodeInternal, "open /var/lib/warren/x"), 502, "the daemon's log has more", false},
		{io.ErrUnexpectedEOF, 502, "the daemon's log has more", false},
	} {
		t.Run(tc.err.Error(), func(t *testing.T) {
			base, h, _ := front(t, true, http.HandlerFunc(echoHeaders))
			h.asleep()
			h.mu.Lock()
			h.use = func(sandbox.ID) error { return tc.err }
			h.mu.Unlock()
			req, _ := http.NewRequest("GET", base, nil)
			req.Host = "8080-" + string(idAsleep) + ".box.test"
			res, err := client(t, false).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			var e errorBody
			if err := json.NewDecoder(res.Body).Decode(&e); err != nil {
				t.Fatal(err)
			}
			if res.StatusCode != tc.status || e.Code != tc.status || !strings.Contains(e.Message, tc.part) || strings.ContainsAny(e.Message, "\n") || e.SandboxID != string(idAsleep) || e.Port != 8080 {
				t.Errorf("%s %+v", res.Status, e)
			}
			if got := res.Header.Get("Retry-After") != ""; got != tc.retry {
				t.Errorf("Retry-After: %v", got)
			}
			if h.users() != 0 {
				t.Error("a use was kept")
			}
		})
	}
}

// A client that goes away while the sandbox wakes is nobody to answer.
func TestClientGoesAwayWhileWaking(t *testing.T) {
	base, h, _ := front(t, true, http.HandlerFunc(echoHeaders))
	asked, awake := h.asleep()
	conn, err := net.Dial("tcp", strings.TrimPrefix(base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: 8080-%s.box.test\r\n\r\n", idAsleep)
	<-asked
	conn.Close()
	close(awake)
	eventually(t, "the use is given back", func() bool { return h.users() == 0 })
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 1000 {
		if f() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("not so: %s", what)
}

// TestManualWake sends traffic to a hibernated sandbox that it is not to wake.
func TestManualWake(t *testing.T) {
	base, h, _ := front(t, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {}))
	asked, awake := h.asleep()
	close(awake)
	h.mu.Lock()
	sb := h.byID[idAsleep]
	sb.ManualWake = true
	h.byID[idAsleep] = sb
	h.mu.Unlock()
	c := client(t, false)
	get := func() (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), "GET", base, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "8080-" + string(idAsleep) + ".box.test"
		res, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(body)
	}
	if status, body := get(); status != 502 || !strings.Contains(body, "traffic does not wake it") || len(asked) > 0 {
		t.Errorf("%d %s, and it was woken %d times", status, body, len(asked))
	}
	sb.State = sandbox.Running
	h.mu.Lock()
	h.byID[idAsleep] = sb
	h.mu.Unlock()
	if status, body := get(); status != 200 {
		t.Errorf("awake: %d %s", status, body)
	}
}

// TestStrangersDoNotWake calls the agent of a hibernated sandbox: only who has
// its token, or a URL signed by it, wakes it.
func TestStrangersDoNotWake(t *testing.T) {
	base, h, _ := front(t, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {}))
	asked, awake := h.asleep()
	close(awake)
	h.mu.Lock()
	sb := h.byID[idAsleep]
	sb.Token = "agent-asleep"
	h.byID[idAsleep] = sb
	h.mu.Unlock()
	f := control.SignedFile{Path: "/x", Operation: control.OperationRead}
	past := f
	past.Expiration = "1000000000"
	for _, tc := range []struct {
		name, path, token string
		wakes             bool
	}{
		{"nothing", "/health", "", false},
		{"a wrong token", "/health", "agent-a", false},
		{"its token", "/health", "agent-asleep", true},
		{"its signature", signedURL(f, "agent-asleep"), "", true},
		{"another's signature", signedURL(f, "agent-a"), "", false},
		{"an expired signature", signedURL(past, "agent-asleep"), "", false},
		{"its signature and a wrong token", signedURL(f, "agent-asleep"), "x", false},
		{"its signature for another call", strings.Replace(signedURL(f, "agent-asleep"), "/files", "/process.Process/Start", 1), "", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for len(asked) > 0 {
				<-asked
			}
			req, err := http.NewRequestWithContext(t.Context(), "GET", base+tc.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = "49983-" + string(idAsleep) + ".box.test"
			if tc.token != "" {
				req.Header.Set(control.TokenHeader, tc.token)
			}
			res, err := client(t, false).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if want := map[bool]int{true: 200, false: 401}[tc.wakes]; res.StatusCode != want || (len(asked) > 0) != tc.wakes {
				t.Errorf("%s, and it was woken %d times", res.Status, len(asked))
			}
		})
	}
}

// FuzzMatch routes hostile requests: what is matched is a well-formed target or
// an error to tell, whatever is in the host and the headers.
func FuzzMatch(f *testing.F) {
	f.Add("8080-sbxaaaaaaaaaaaaaaaaa.box.test", "", "")
	f.Add("127.0.0.1:7070", "sbxaaaaaaaaaaaaaaaaa", "49983")
	f.Add("sandbox.box.test", "../../etc/passwd", "-1")
	f.Add("70000-SBX.box.test.", "\x00", "00080")
	f.Add("[::1]:80", strings.Repeat("a", 1000), strings.Repeat("9", 1000))
	f.Fuzz(func(t *testing.T, host, id, port string) {
		r := &http.Request{Host: host, Header: http.Header{HeaderE2BSandboxID: {id}, HeaderE2BPort: {port}}}
		got, ok, err := Match(r, "localhost", "box.test")
		switch {
		case !ok:
			if err != nil || got != (Target{}) || id != "" {
				t.Fatalf("%q %q %q: not matched, yet %v, %v", host, id, port, got, err)
			}
		case err != nil:
			if sandbox.CodeOf(err) != sandbox.CodeInvalid || len(err.Error()) > 300 {
				t.Fatalf("%q %q %q: %v", host, id, port, err)
			}
		default:
			if _, err := sandbox.ParseID(string(got.ID)); err != nil || got.Port < 1 || got.Port > 65535 {
				t.Fatalf("%q %q %q: %v", host, id, port, got)
			}
		}
	})
}
