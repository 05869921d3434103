package session

import (
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/users"
)

func TestToken(t *testing.T) {
	s := New(users.System())
	if !s.Allowed("") || !s.Allowed("x") {
		t.Error("refused before the first init")
	}
	s.Update(control.InitRequest{AccessToken: "secret"})
	for token, want := range map[string]bool{"secret": true, "": false, "secre": false, "secret ": false, "SECRET": false} {
		if s.Allowed(token) != want {
			t.Errorf("%q: allowed is %v", token, !want)
		}
	}
}

func signature(path, operation, user, token, expiration string) string {
	return control.SignedFile{Path: path, Operation: operation, User: user, Expiration: expiration}.Signature(token)
}

func TestCheckFile(t *testing.T) {
	s := New(users.System())
	get := func(path, user, sig, exp, header string) *http.Request {
		q := url.Values{"path": {path}}
		if user != "" {
			q.Set("username", user)
		}
		if sig != "" {
			q.Set("signature", sig)
		}
		if exp != "" {
			q.Set("signature_expiration", exp)
		}
		r := httptest.NewRequest("GET", "/files?"+q.Encode(), nil)
		if header != "" {
			r.Header.Set(control.TokenHeader, header)
		}
		return r
	}
	if err := s.CheckFile(get("/x", "", "", "", ""), "read"); err != nil {
		t.Errorf("without a token in force: %v", err)
	}
	s.Update(control.InitRequest{AccessToken: "tok"})
	future := strconv.FormatInt(time.Now().Add(time.Hour).Unix(), 10)
	past := strconv.FormatInt(time.Now().Add(-time.Hour).Unix(), 10)
	for _, tt := range []struct {
		name string
		r    *http.Request
		ok   bool
	}{
		{"nothing", get("/x", "", "", "", ""), false},
		{"token", get("/x", "", "", "", "tok"), true},
		{"wrong token", get("/x", "", signature("/x", "read", "", "tok", ""), "", "no"), false},
		{"signed", get("/x", "", signature("/x", "read", "", "tok", ""), "", ""), true},
		{"signed for a user", get("/x", "user", signature("/x", "read", "user", "tok", ""), "", ""), true},
		{"for another user", get("/x", "root", signature("/x", "read", "user", "tok", ""), "", ""), false},
		{"for writing", get("/x", "", signature("/x", "write", "", "tok", ""), "", ""), false},
		{"for another path", get("/y", "", signature("/x", "read", "", "tok", ""), "", ""), false},
		{"not yet expired", get("/x", "", signature("/x", "read", "", "tok", future), future, ""), true},
		{"expired", get("/x", "", signature("/x", "read", "", "tok", past), past, ""), false},
		{"expiration not signed", get("/x", "", signature("/x", "read", "", "tok", ""), future, ""), false},
		{"expiration dropped", get("/x", "", signature("/x", "read", "", "tok", past), "", ""), false},
		{"not a number", get("/x", "", signature("/x", "read", "", "tok", "a"), "a", ""), false},
	} {
		if err := s.CheckFile(tt.r, "read"); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestRPCUser(t *testing.T) {
	s := New(users.System())
	h := http.Header{}
	h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("no-such-user:")))
	_, err := s.RPCUser(h)
	if connect.CodeOf(err) != connect.CodeUnauthenticated || !strings.Contains(err.Error(), "invalid username: 'no-such-user'") {
		t.Errorf("got %v", err)
	}
	h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("root:x")))
	if u, err := s.RPCUser(h); err != nil || u.UID != 0 {
		t.Errorf("root: %+v, %v", u, err)
	}
	h.Set("Authorization", "Basic !!")
	if _, err := s.RPCUser(h); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("broken header: %v", err)
	}
	h.Set("Authorization", "Bearer abc")
	if _, err := s.RPCUser(h); err != nil {
		t.Errorf("another scheme: %v", err)
	}
	s.Update(control.InitRequest{DefaultUser: "ghost"})
	if _, err := s.RPCUser(http.Header{}); err == nil || !strings.Contains(err.Error(), "'ghost'") {
		t.Errorf("unknown default user: %v", err)
	}
}

func TestEnviron(t *testing.T) {
	s := New(users.System())
	u := users.User{Name: "user", Home: "/home/user", Shell: "/bin/bash"}
	s.Update(control.InitRequest{SandboxID: "sbx1", TemplateID: "base", EnvVars: map[string]string{"A": "init", "B": "init", "PATH": "/opt/bin"}})
	env, path := s.Environ(u, map[string]string{"B": "call"})
	for _, want := range []string{"HOME=/home/user", "USER=user", "LOGNAME=user", "SHELL=/bin/bash", "A=init", "B=call", "PATH=/opt/bin", "E2B_SANDBOX=true", "E2B_SANDBOX_ID=sbx1", "E2B_TEMPLATE_ID=base"} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %q", want, env)
		}
	}
	if path != "/opt/bin" {
		t.Errorf("PATH is %q", path)
	}
	// A later init replaces the variables, and keeps the identity.
	s.Update(control.InitRequest{EnvVars: map[string]string{"C": "2"}})
	env, _ = s.Environ(u, nil)
	if slices.Contains(env, "A=init") || !slices.Contains(env, "C=2") || !slices.Contains(env, "E2B_SANDBOX_ID=sbx1") {
		t.Errorf("after the second init: %q", env)
	}
	// One without variables keeps them.
	s.Update(control.InitRequest{AccessToken: "t"})
	if env, _ = s.Environ(u, nil); !slices.Contains(env, "C=2") {
		t.Errorf("after the third init: %q", env)
	}
}

func TestUpdateOrder(t *testing.T) {
	s := New(users.System())
	now := time.Now()
	if fresh, late := s.Update(control.InitRequest{SandboxID: "a", Timestamp: now}); !fresh || late {
		t.Error("first")
	}
	if _, late := s.Update(control.InitRequest{SandboxID: "b", Timestamp: now.Add(-time.Second)}); !late {
		t.Error("an older one was taken")
	}
	if fresh, _ := s.Update(control.InitRequest{SandboxID: "a", Timestamp: now.Add(time.Second)}); fresh {
		t.Error("the same sandbox is fresh")
	}
}

func FuzzBasicName(f *testing.F) {
	f.Add("Basic cm9vdDo=")
	f.Add("Basic")
	f.Add("bearer x")
	f.Fuzz(func(t *testing.T, header string) {
		name, err := basicName(header)
		if err == nil && strings.Contains(name, ":") {
			t.Errorf("%q: name %q", header, name)
		}
	})
}

func FuzzCheckFile(f *testing.F) {
	f.Add("path=/x&signature=v1_abc&signature_expiration=99999999999")
	f.Add("path=%2fx;signature=v1_")
	s := New(users.System())
	s.Update(control.InitRequest{AccessToken: "a long and unguessable token"})
	f.Fuzz(func(t *testing.T, query string) {
		r := httptest.NewRequest("GET", "/files", nil)
		r.URL.RawQuery = query
		if s.CheckFile(r, "read") == nil {
			t.Errorf("%q was let in", query)
		}
	})
}
