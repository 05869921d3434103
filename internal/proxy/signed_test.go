package proxy

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

// signedURL is the path and query of a file's URL, signed by a token.
func signedURL(f control.SignedFile, token string) string {
	q := url.Values{"path": {f.Path}, "signature": {f.Signature(token)}}
	if f.User != "" {
		q.Set("username", f.User)
	}
	if f.Expiration != "" {
		q.Set("signature_expiration", f.Expiration)
	}
	return "/files?" + q.Encode()
}

func TestSignedURLs(t *testing.T) {
	var reached string // by the agent
	base, h, _ := front(t, false, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		reached = r.Method + " " + r.RequestURI + " " + string(body)
	}))
	h.byID[idAsleep] = sandbox.Sandbox{ID: idAsleep, Tenant: "a", State: sandbox.Hibernated, Token: "agent-asleep"}
	read := control.SignedFile{Path: "/home/user/a b:c.txt", Operation: control.OperationRead}
	write := control.SignedFile{Path: "x", Operation: control.OperationWrite, User: "root"}
	at := func(f control.SignedFile, d time.Duration) control.SignedFile {
		f.Expiration = strconv.FormatInt(time.Now().Add(d).Unix(), 10)
		return f
	}
	for _, tc := range []struct {
		name, method, url string
		header            map[string]string
		host              string
		status            int
		msg               string // of the agent's form
	}{
		{name: "read", method: "GET", url: signedURL(read, "agent-a"), status: 200},
		{name: "head", method: "HEAD", url: signedURL(read, "agent-b"), status: 200},
		{name: "write", method: "POST", url: signedURL(write, "agent-b"), status: 200},
		{name: "not yet expired", method: "GET", url: signedURL(at(read, time.Hour), "agent-a"), status: 200},
		{name: "asleep", method: "GET", url: signedURL(read, "agent-asleep"), status: 200},
		{name: "expired", method: "GET", url: signedURL(at(read, -time.Hour), "agent-a"), status: 401, msg: control.ExpiredSignature},
		{name: "expired and nobody's", method: "GET", url: signedURL(at(read, -time.Hour), "agent-z"), status: 401, msg: control.InvalidSignature},
		{name: "nobody's", method: "GET", url: signedURL(read, "agent-z"), status: 401, msg: control.InvalidSignature},
		{name: "of one that has ended", method: "GET", url: signedURL(read, "agent-ended"), status: 401, msg: control.InvalidSignature},
		{name: "with no token", method: "GET", url: signedURL(read, ""), status: 401, msg: control.InvalidSignature},
		{name: "for reading, to write", method: "POST", url: signedURL(read, "agent-a"), status: 401, msg: control.InvalidSignature},
		{name: "for writing, to read", method: "GET", url: signedURL(write, "agent-a"), status: 401, msg: control.InvalidSignature},
		{name: "another path", method: "GET", url: signedURL(read, "agent-a") + "&path=z", status: 200}, // the first one counts, for the agent too
		{name: "another path first", method: "GET", url: strings.Replace(signedURL(read, "agent-a"), "?", "?path=z&", 1), status: 401, msg: control.InvalidSignature},
		{name: "another user", method: "GET", url: signedURL(read, "agent-a") + "&username=root", status: 401, msg: control.InvalidSignature},
		{name: "expiration is no number", method: "GET", url: signedURL(read, "agent-a") + "&signature_expiration=soon", status: 401, msg: control.ErrExpiration.Error()},
		{name: "not of the form", method: "GET", url: "/files?path=x&signature=v1_%00", status: 401, msg: control.InvalidSignature},
		{name: "a path too long", method: "GET", url: signedURL(control.SignedFile{Path: strings.Repeat("a", 5000), Operation: control.OperationRead}, "agent-a"), status: 401, msg: control.InvalidSignature},
		{name: "a name too long", method: "GET", url: signedURL(control.SignedFile{User: strings.Repeat("a", 300), Operation: control.OperationRead}, "agent-a"), status: 401, msg: control.InvalidSignature},
		{name: "no signature", method: "GET", url: "/files?path=x", status: 418},
		{name: "another path of the API", method: "POST", url: "/filesystem.Filesystem/Stat?signature=v1_x", status: 418},
		{name: "a path below", method: "GET", url: strings.Replace(signedURL(read, "agent-a"), "/files", "/files/", 1), status: 418},
		{name: "compose", method: "POST", url: strings.Replace(signedURL(write, "agent-a"), "/files", "/files/compose", 1), status: 418},
		{name: "another method", method: "DELETE", url: signedURL(read, "agent-a"), status: 418},
		{name: "a sandbox named by a header is asked itself", method: "GET", url: signedURL(read, "agent-z"), header: map[string]string{"E2b-Sandbox-Id": string(idB)}, status: 200},
		{name: "and by its host name", method: "GET", url: signedURL(read, "agent-z"), host: "49983-" + string(idB) + ".box.test", status: 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			reached = ""
			req, err := http.NewRequest(tc.method, base+tc.url, nil)
			if err != nil {
				t.Fatal(err)
			}
			if tc.method == "POST" {
				req, _ = http.NewRequest(tc.method, base+tc.url, strings.NewReader("content"))
			}
			for k, v := range tc.header {
				req.Header.Set(k, v)
			}
			req.Host = tc.host
			res, err := client(t, false).Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, _ := io.ReadAll(res.Body)
			if res.StatusCode != tc.status {
				t.Fatalf("status %d, want %d: %s", res.StatusCode, tc.status, body)
			}
			want := ""
			if tc.status == 200 {
				want = tc.method + " " + tc.url + " "
				if tc.method == "POST" {
					want += "content"
				}
			}
			if reached != want {
				t.Errorf("the agent got %q, want %q", reached, want)
			}
			if tc.msg == "" {
				return
			}
			var e control.Error
			if err := json.Unmarshal(body, &e); err != nil || e != (control.Error{Code: 401, Message: tc.msg}) {
				t.Errorf("the answer is %s", body)
			}
		})
	}
}

// Whatever the URL: nothing comes through by a signature that no token made.
func FuzzSignedURL(f *testing.F) {
	f.Add("GET", "/files", "path=/x&signature=v1_2%2FgNbgFPxFSqkheS%2FSD0NHlzA121E%2FnxkOtc%2FovxeoI")
	f.Add("POST", "/files", "signature=v1_&signature_expiration=-1&%zz")
	h := &hosts{byID: map[sandbox.ID]sandbox.Sandbox{idA: {ID: idA, State: sandbox.Running, Token: "never told"}}}
	h.use = func(sandbox.ID) error { return fmt.Errorf("passed") }
	p := New(Config{Sandboxes: h})
	f.Fuzz(func(t *testing.T, method, path, query string) {
		w := httptest.NewRecorder()
		r := &http.Request{Method: method, URL: &url.URL{Path: path, RawQuery: query}, Host: "127.0.0.1", Header: http.Header{}}
		p.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }), false).ServeHTTP(w, r)
		if w.Code != http.StatusTeapot && w.Code != http.StatusUnauthorized {
			t.Fatalf("%s %s?%s: %d %s", method, path, query, w.Code, w.Body)
		}
	})
}

func BenchmarkSigned(b *testing.B) {
	h := &hosts{byID: map[sandbox.ID]sandbox.Sandbox{}}
	for i := range 1000 {
		id := sandbox.ID(fmt.Sprintf("sbx%017d", i))
		h.byID[id] = sandbox.Sandbox{ID: id, State: sandbox.Running, Token: string(id) + "-0123456789abcdef0123456789abcdef"}
	}
	p := New(Config{Sandboxes: h})
	r := httptest.NewRequest("GET", signedURL(control.SignedFile{Path: strings.Repeat("p", maxSignedPath), Operation: control.OperationRead}, "none"), nil)
	for b.Loop() {
		p.serveSigned(httptest.NewRecorder(), r)
	}
}
