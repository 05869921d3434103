package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

// operation is one of the OpenAPI document.
type operation struct {
	method, path, id string
}

// operations reads them all out of the daemon's own document.
func operations(t *testing.T, l *lab) []operation {
	t.Helper()
	a := l.raw(t, "GET", "/v1/openapi.json", nil, nil)
	var doc struct {
		OpenAPI string                                `json:"openapi"`
		Paths   map[string]map[string]json.RawMessage `json:"paths"`
	}
	if err := json.Unmarshal(a.body, &doc); err != nil || !strings.HasPrefix(doc.OpenAPI, "3.1") {
		t.Fatalf("the document is %d %.200q: %v", a.status, a.body, err)
	}
	var all []operation
	for path, methods := range doc.Paths {
		for m, raw := range methods {
			m = strings.ToUpper(m)
			if strings.Contains("GET PUT POST DELETE PATCH HEAD OPTIONS", m) {
				var op struct {
					OperationID string `json:"operationId"`
				}
				if err := json.Unmarshal(raw, &op); err != nil {
					t.Fatal(err)
				}
				all = append(all, operation{m, path, op.OperationID})
			}
		}
	}
	if len(all) < 20 {
		t.Fatalf("the document has %d operations: %v", len(all), all)
	}
	return all
}

// TestKeys walks the OpenAPI document on the TCP address: nothing answers
// without a key, and another tenant's key finds nothing.
func TestKeys(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	theirs, err := client.New("unix://"+l.socket, client.Options{Tenant: "rival"})
	must(t, err)
	defer theirs.Close()
	other, err := theirs.CreateKey(t.Context(), "other")
	must(t, err)
	mine, err := l.cl.CreateKey(t.Context(), "mine")
	must(t, err)
	sb := l.create(t, wire.CreateSandbox{Runtime: "container", Metadata: map[string]string{"secret": "label"}})
	l.sh(t, sb.ID, "echo content > /tmp/file")
	ops := operations(t, l)
	fill := func(path string) string {
		for k, v := range map[string]string{"{id}": sb.ID, "{name}": "tiny", "{port}": "8080", "{path}": "files"} {
			path = strings.ReplaceAll(path, k, v)
		}
		return l.tcp + path
	}
	bodies := map[string]string{
		"exec": `{"cmd":["true"]}`, "run-code": `{"code":"1"}`, "set-timeout": `{"timeout":1}`, "set-network": `{"mode":"none"}`,
		"create-sandbox": `{"template":"tiny"}`, "build-template": `{"name":"x","import":{"ref":"127.0.0.1:1/x"}}`, "create-key": `{}`,
		"fork-sandbox": `{"count":1}`, "set-pool": `{"template":"tiny","ready":1}`, "create-snapshot": `{"name":"theirs"}`,
	}
	queries := map[string]string{"read-file": "?path=/tmp/file", "write-file": "?path=/tmp/file", "read-tar": "?path=/tmp", "write-tar": "?path=/tmp", "tunnel": "?port=80"}
	c := &http.Client{}
	defer c.CloseIdleConnections()
	request := func(t *testing.T, op operation, h http.Header) answer {
		t.Helper()
		if h == nil {
			h = http.Header{}
		}
		h.Set("Content-Type", "application/json")
		if op.id == "tunnel" {
			h.Set("Connection", "Upgrade")
			h.Set("Upgrade", "warren-tcp")
		}
		return send(t, c, op.method, fill(op.path)+queries[op.id], h, strings.NewReader(bodies[op.id]))
	}
	key := func(k string) http.Header { return http.Header{"X-Api-Key": {k}} }

	for _, op := range ops {
		t.Run(op.id, func(t *testing.T) {
			for name, h := range map[string]http.Header{
				"none": {}, "empty": key(""), "short": key("e2b_12"), "wrong": key("e2b_" + strings.Repeat("0", 40)),
				"wrong bearer": {"Authorization": {"Bearer e2b_" + strings.Repeat("a", 40)}}, "basic": {"Authorization": {"Basic cm9vdDo="}},
				"tenant header": {"X-Warren-Tenant": {"default"}}, "key in upper case": key(strings.ToUpper(mine.Key)), "long": key("e2b_" + strings.Repeat("0", 10_000)),
			} {
				a := request(t, op, h)
				if a.status != http.StatusUnauthorized || a.header.Get("WWW-Authenticate") == "" {
					t.Errorf("%s: %d %.200q", name, a.status, a.body)
					continue
				}
				a.wantError(t, sandbox.CodeUnauthenticated, "key")
				if bytes.Contains(a.body, []byte(sb.ID)) {
					t.Errorf("%s: the refusal tells of the sandbox: %s", name, a.body)
				}
			}
			if strings.Contains(op.path, "{id}") {
				// The same as of a sandbox that there never was.
				h := key(other.Key)
				h.Set("X-Warren-Tenant", "default") // is of no use here
				a := request(t, op, h)
				never := operation{op.method, strings.ReplaceAll(op.path, "{id}", "sbx00000000000000000"), op.id}
				b := request(t, never, key(other.Key))
				if a.status != http.StatusNotFound || b.status != a.status ||
					string(bytes.ReplaceAll(a.body, []byte(sb.ID), nil)) != string(bytes.ReplaceAll(b.body, []byte("sbx00000000000000000"), nil)) {
					t.Errorf("another tenant's key: %d %s; of a sandbox that never was: %d %s", a.status, a.body, b.status, b.body)
				}
				a.wantError(t, sandbox.CodeNotFound)
			}
		})
	}
	t.Run("undocumented routes", func(t *testing.T) {
		for _, path := range []string{"/", "/v1", "/v1/openapi.json", "/metrics", "/v1/nothing", "//v1/sandboxes", "/v1/../v1/sandboxes", "/debug/pprof/"} {
			if a := send(t, c, "GET", l.tcp+path, nil, nil); a.status != http.StatusUnauthorized && a.status/100 != 3 {
				t.Errorf("GET %s without a key: %d %.200q", path, a.status, a.body)
			}
		}
		for _, path := range []string{"/healthz", "/readyz"} {
			if a := send(t, c, "GET", l.tcp+path, nil, nil); a.status != http.StatusOK {
				t.Errorf("GET %s: %d %s", path, a.status, a.body)
			}
		}
	})
	t.Run("tenants", func(t *testing.T) {
		if sbs := send(t, c, "GET", l.tcp+"/v1/sandboxes", key(other.Key), nil); sbs.status != 200 || bytes.Contains(sbs.body, []byte(sb.ID)) {
			t.Errorf("the other tenant's list: %d %s", sbs.status, sbs.body)
		}
		for _, path := range []string{"/v1/templates/tiny", "/v1/events?sandbox=" + sb.ID} {
			send(t, c, "GET", l.tcp+path, key(other.Key), nil).wantError(t, sandbox.CodeNotFound)
		}
		send(t, c, "DELETE", l.tcp+"/v1/templates/tiny", key(other.Key), nil).wantError(t, sandbox.CodeNotFound)
		send(t, c, "DELETE", l.tcp+"/v1/keys/"+mine.ID, key(other.Key), nil).wantError(t, sandbox.CodeNotFound)
		send(t, c, "POST", l.tcp+"/v1/sandboxes", http.Header{"X-Api-Key": {other.Key}, "Content-Type": {"application/json"}},
			strings.NewReader(`{"template":"tiny"}`)).wantError(t, sandbox.CodeNotFound, "tiny")
		// A path of the daemon's host is for root there, not for who has a key.
		send(t, c, "POST", l.tcp+"/v1/templates/build", http.Header{"X-Api-Key": {mine.Key}, "Content-Type": {"application/json"}},
			strings.NewReader(`{"name":"x","import":{"ref":"docker-archive:/etc/passwd"}}`)).wantError(t, sandbox.CodeForbidden, "upload")
		send(t, c, "POST", l.tcp+"/v1/templates/build", http.Header{"X-Api-Key": {other.Key}, "Content-Type": {"application/json"}},
			strings.NewReader(`{"name":"base","shared":true,"dockerfile":{"content":"FROM scratch"}}`)).wantError(t, sandbox.CodeForbidden)
	})
	t.Run("the sandbox's own", func(t *testing.T) {
		if got := l.get(t, sb.ID); got.State != sandbox.Running || got.ExpiresAt != nil || got.Network.Mode != sandbox.NetworkEgress {
			t.Errorf("after all that the sandbox is %+v", got)
		}
		if out := l.sh(t, sb.ID, "cat /tmp/file"); out != "content" {
			t.Errorf("and its file %q", out)
		}
		a := send(t, c, "GET", l.tcp+"/v1/sandboxes/"+sb.ID, key(mine.Key), nil)
		if a.status != 200 {
			t.Errorf("with the right key: %d %s", a.status, a.body)
		}
		a = send(t, c, "GET", l.tcp+"/v1/sandboxes/"+sb.ID, http.Header{"Authorization": {"Bearer " + l.key}}, nil)
		if a.status != 200 {
			t.Errorf("with the first key as a bearer token: %d %s", a.status, a.body)
		}
	})
	t.Run("removed key", func(t *testing.T) {
		must(t, l.cl.RemoveKey(t.Context(), mine.ID))
		send(t, c, "GET", l.tcp+"/v1/sandboxes", key(mine.Key), nil).wantError(t, sandbox.CodeUnauthenticated)
		if strings.Contains(l.d.output(), mine.Key) || strings.Contains(l.d.output(), other.Key) {
			t.Error("the daemon's log has a key")
		}
		db := contents(l.state + "/warren.db")
		wal := contents(l.state + "/warren.db-wal")
		for _, k := range []string{mine.Key, other.Key, l.key} {
			if strings.Contains(db, k) || strings.Contains(wal, k) {
				t.Error("the state database has a key as it is")
			}
		}
	})
}
