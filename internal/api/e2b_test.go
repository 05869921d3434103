package api_test

import (
	"encoding/json"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/e2b"
)

// TestE2BTemplateRoutes goes through every route of templates as the SDKs do.
func TestE2BTemplateRoutes(t *testing.T) {
	w := newWorld(t)
	_, key, err := w.manager.CreateKey(t.Context(), "a", "k")
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := w.manager.CreateKey(t.Context(), "b", "k")
	if err != nil {
		t.Fatal(err)
	}
	call := func(method, path, key, body string, want int) map[string]any {
		t.Helper()
		res, data := w.raw(t, method, path, key, body)
		if res.StatusCode != want {
			t.Errorf("%s %s: %d %s, want %d", method, path, res.StatusCode, data, want)
		}
		var out map[string]any
		json.Unmarshal(data, &out)
		if want >= 400 && out["code"] != float64(want) {
			t.Errorf("%s %s: error body %s", method, path, data)
		}
		return out
	}
	made := call("POST", "/v3/templates", key, `{"name":"app:v1","cpuCount":2,"memoryMB":1024}`, 202)
	id, _ := made["templateID"].(string)
	build, _ := made["buildID"].(string)
	hash := strings.Repeat("0", 64)
	link := call("GET", "/templates/"+id+"/files/"+hash, key, "", 201)
	url, _ := link["url"].(string)
	at := strings.Index(url, e2b.UploadPath)
	if at < 0 || link["present"] != false {
		t.Fatalf("upload link %v", link)
	}
	call("PUT", url[at:], "", "archive", 200) // the token is all it takes
	call("PUT", e2b.UploadPath+"AAAA", "", "archive", 403)
	if call("GET", "/templates/"+id+"/files/"+hash, key, "", 201)["present"] != true {
		t.Error("the upload is not there")
	}
	call("POST", "/v2/templates/"+id+"/builds/"+build, other, `{"fromTemplate":"base"}`, 404)
	call("POST", "/v2/templates/"+id+"/builds/"+build, key, `{"fromImage":"x","fromImageRegistry":{"type":"aws"}}`, 501)
	call("POST", "/v2/templates/"+id+"/builds/"+build, key, `{"fromTemplate":"base","steps":[{"type":"RUN","args":["true"]}],"startCmd":"x","readyCmd":"y"}`, 202)
	status := "/templates/" + id + "/builds/" + build + "/status"
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		s := call("GET", status+"?logsOffset=0", key, "", 200)
		if s["status"] == "ready" {
			break
		}
		if s["status"] == "error" || time.Now().After(deadline) {
			t.Fatalf("status %v", s)
		}
	}
	for _, path := range []string{status, "/templates/" + id, "/templates/" + id + "/tags", "/templates/aliases/app", "/templates/" + id + "/files/" + hash, "/templates/" + id + "/builds/" + build + "/logs"} {
		call("GET", path, other, "", http.StatusNotFound)
	}
	call("GET", "/templates/"+id+"/builds/"+build+"/logs", key, "", 200)
	call("GET", status+"?logsOffset=x", key, "", 400)
	if got := call("GET", "/templates/aliases/app", key, "", 200); got["templateID"] != id {
		t.Errorf("alias %v", got)
	}
	call("GET", "/templates/"+id, key, "", 200)
	call("PATCH", "/templates/"+id, key, `{"public":false}`, 200)
	call("PATCH", "/templates/"+id, key, `{"public":true}`, 501)
	call("GET", "/templates", key, "", 200)
	call("POST", "/templates", key, `{}`, 501)
	call("POST", "/v3/templates", key, `{"name":"No Name"}`, 400)
	call("POST", "/templates/tags", key, `{"target":"app:v1","tags":[":x"]}`, 400)
	call("DELETE", "/templates/"+id, other, "", 404)
	call("DELETE", "/templates/"+id, key, "", 204)
	call("GET", "/templates/aliases/app", key, "", 404)
}

// e2bCaller calls the façade as a tenant's client.
func e2bCaller(t *testing.T, w *world, tenant string) func(method, path, body string, want int) (http.Header, any) {
	t.Helper()
	_, key, err := w.manager.CreateKey(t.Context(), tenant, "k")
	if err != nil {
		t.Fatal(err)
	}
	return func(method, path, body string, want int) (http.Header, any) {
		t.Helper()
		res, data := w.raw(t, method, path, key, body)
		var out any
		json.Unmarshal(data, &out)
		if res.StatusCode != want {
			t.Errorf("%s %s %s: %d %s, want %d", method, path, body, res.StatusCode, data, want)
		}
		if e, _ := out.(map[string]any); want >= 400 && (e["code"] != float64(want) || e["message"] == "") {
			t.Errorf("%s %s: error body %s", method, path, data)
		}
		return res.Header, out
	}
}

// TestE2BSandboxRoutes goes through a sandbox's life as the SDKs do.
func TestE2BSandboxRoutes(t *testing.T) {
	w := newWorld(t)
	call, other := e2bCaller(t, w, "a"), e2bCaller(t, w, "b")
	field := func(v any, name string) any {
		m, _ := v.(map[string]any)
		return m[name]
	}
	ids := func(v any) (ids []any) {
		all, _ := v.([]any)
		for _, one := range all {
			ids = append(ids, field(one, "sandboxID"))
		}
		return ids
	}

	_, first := call("POST", "/sandboxes", `{"templateID":"base","timeout":60,"metadata":{"n":"1","k":"a b&c"},"envVars":{"A":"b"},"secure":true,"allow_internet_access":false}`, 201)
	_, second := call("POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"n":"2"},"network":{"allowPublicTraffic":false},"autoResume":{"enabled":true},"mcp":{"x":{}}}`, 201)
	id, _ := field(first, "sandboxID").(string)
	id2, _ := field(second, "sandboxID").(string)
	for _, name := range []string{"templateID", "sandboxID", "clientID", "envdVersion", "envdAccessToken"} {
		if field(first, name) == nil || field(first, name) == "" {
			t.Errorf("no %s in %v", name, first)
		}
	}
	if field(first, "trafficAccessToken") != nil || field(second, "trafficAccessToken") == nil {
		t.Errorf("traffic tokens of %v and %v", first, second)
	}

	_, info := call("GET", "/sandboxes/"+id, "", 200)
	if field(info, "state") != "running" || field(info, "allowInternetAccess") != false || field(info, "alias") != "base" ||
		field(field(info, "metadata"), "k") != "a b&c" || field(field(info, "lifecycle"), "onTimeout") != "kill" || field(field(info, "lifecycle"), "autoResume") != false {
		t.Errorf("info %v", info)
	}
	if _, info := call("GET", "/sandboxes/"+id2, "", 200); field(field(info, "network"), "allowPublicTraffic") != false ||
		field(field(info, "lifecycle"), "autoResume") != true {
		t.Errorf("info %v", info)
	}
	ends := func() time.Time {
		t.Helper()
		_, info := call("GET", "/sandboxes/"+id, "", 200)
		at, err := time.Parse(time.RFC3339, field(info, "endAt").(string))
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	left := func(least, most time.Duration) {
		t.Helper()
		if d := time.Until(ends()); d < least || d > most {
			t.Errorf("it ends in %v, want %v to %v", d, least, most)
		}
	}
	left(30*time.Second, time.Minute)
	call("POST", "/sandboxes/"+id+"/timeout", `{"timeout":1000}`, 204)
	left(900*time.Second, 1000*time.Second)
	call("POST", "/sandboxes/"+id+"/connect", `{"timeout":10}`, 200) // never shorter
	call("POST", "/sandboxes/"+id+"/refreshes", `{"duration":10}`, 204)
	left(900*time.Second, 1000*time.Second)
	call("POST", "/v2/sandboxes/"+id+"/connect", `{"timeout":2000}`, 200)
	left(1900*time.Second, 2000*time.Second)
	call("POST", "/sandboxes/"+id+"/resume", `{}`, 409)
	call("PUT", "/sandboxes/"+id+"/network", `{"denyOut":["0.0.0.0/0"],"allowOut":["1.1.1.1"]}`, 204)
	if _, info := call("GET", "/sandboxes/"+id, "", 200); len(field(field(info, "network"), "allowOut").([]any)) != 1 {
		t.Errorf("network %v", info)
	}
	if _, m := call("GET", "/sandboxes/"+id+"/metrics", "", 200); len(m.([]any)) != 1 {
		t.Errorf("metrics %v", m)
	}
	if _, m := call("GET", "/sandboxes/"+id+"/metrics?end=1000", "", 200); len(m.([]any)) != 0 {
		t.Errorf("metrics of long ago %v", m)
	}
	if _, m := call("GET", "/sandboxes/metrics?sandbox_ids="+id+",sbxnone", "", 200); len(field(m, "sandboxes").(map[string]any)) != 1 {
		t.Errorf("metrics of all %v", m)
	}
	call("GET", "/sandboxes/"+id+"/logs", "", 200)
	call("GET", "/v2/sandboxes/"+id+"/logs?limit=5&direction=backward", "", 200)

	// Lists.
	started, _ := field(info, "startedAt").(string)
	for _, tc := range []struct {
		query string
		want  []any
		next  bool
	}{
		{"", []any{id2, id}, false},
		{"?state=running", []any{id2, id}, false},
		{"?state=paused", nil, false},
		{"?state=running,paused&order=asc", []any{id, id2}, false},
		{"?limit=1", []any{id2}, true},
		{"?metadata=n%3D1", []any{id}, false},
		{"?metadata=k%3Da%252520b%252526c", []any{id}, false},
		{"?metadata=n%3D3", nil, false},
		{"?template=base", []any{id2, id}, false},
		{"?template=none", nil, false},
		{"?startedAfter=" + started, []any{id2, id}, false},
		{"?startedAfter=2100-01-01T00:00:00Z", nil, false},
	} {
		h, got := call("GET", "/v2/sandboxes"+tc.query, "", 200)
		if !reflect.DeepEqual(ids(got), tc.want) || (h.Get("X-Next-Token") != "") != tc.next {
			t.Errorf("%s: %v, next %q", tc.query, ids(got), h.Get("X-Next-Token"))
		}
		if tc.next {
			if h, got := call("GET", "/v2/sandboxes"+tc.query+"&nextToken="+h.Get("X-Next-Token"), "", 200); !reflect.DeepEqual(ids(got), []any{id}) || h.Get("X-Next-Token") != "" {
				t.Errorf("the next page: %v", ids(got))
			}
		}
	}
	if _, got := call("GET", "/sandboxes?metadata=n%3D2", "", 200); !reflect.DeepEqual(ids(got), []any{id2}) {
		t.Errorf("v1's list: %v", ids(got))
	}
	if _, got := other("GET", "/v2/sandboxes", "", 200); len(got.([]any)) != 0 {
		t.Errorf("another tenant's list: %v", got)
	}

	// What the runtime or Warren does not offer, and what is wrong.
	for _, path := range []string{"/pause", "/fork", "/snapshots"} {
		call("POST", "/sandboxes/"+id+path, "", 501)
	}
	for _, tc := range []struct {
		method, path, body string
		want               int
	}{
		{"POST", "/v2/sandboxes", `{}`, 400},
		{"POST", "/v2/sandboxes", `{"templateID":3}`, 400},
		{"POST", "/v2/sandboxes", `{"templateID":"none"}`, 404},
		{"POST", "/v2/sandboxes", `{"templateID":"base","timeout":-1}`, 400},
		{"POST", "/v2/sandboxes", `{"templateID":"base","iam":{"tokens":{"x":{}}}}`, 501},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"rules":{"x":[]}}}`, 501},
		{"POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowOut":["example.com"]}}`, 400},
		{"POST", "/v2/sandboxes", `{"templateID":"base","autoPause":true}`, 501},
		{"POST", "/sandboxes/" + id + "/timeout", `{}`, 400},
		{"POST", "/sandboxes/" + id + "/fork", `{"count":0}`, 400},
		{"POST", "/sandboxes/" + id + "/fork", `{"count":101}`, 400},
		{"PUT", "/sandboxes/" + id + "/network", `{"egressProxy":{"address":"x"}}`, 501},
		{"GET", "/sandboxes/" + id + "/metrics?start=x", ``, 400},
		{"GET", "/sandboxes/" + id + "/metrics?start=5&end=4", ``, 400},
		{"GET", "/v2/sandboxes?state=gone", ``, 400},
		{"GET", "/v2/sandboxes?limit=101", ``, 400},
		{"GET", "/v2/sandboxes?order=odd", ``, 400},
		{"GET", "/v2/sandboxes?startedAfter=monday", ``, 400},
		{"GET", "/v2/sandboxes?nextToken=!", ``, 400},
		{"GET", "/snapshots?limit=0", ``, 400},
		{"GET", "/snapshots?sandboxID=%2F", ``, 200},
		{"DELETE", "/templates/snp00000000000000000", ``, 404},
		{"GET", "/secrets", ``, 501},
		{"GET", "/teams", ``, 501},
		{"POST", "/volumes", `{"name":"no name"}`, 400},
		{"GET", "/volumes/none", ``, 404},
		{"DELETE", "/volumes/none", ``, 404},
		{"GET", "/volumecontent/none/dir?path=/", ``, 401}, // an API key opens none
		{"POST", "/v2/sandboxes", `{"templateID":"base","volumeMounts":[{"name":"none","path":"/x"}]}`, 404},
		{"POST", "/v2/sandboxes", `{"templateID":"base","volumeMounts":[{"path":"/x"}]}`, 400},
		{"GET", "/nothing", ``, 404},
	} {
		call(tc.method, tc.path, tc.body, tc.want)
	}

	// What is not there, or not the caller's, cannot be told apart.
	for _, one := range []struct {
		call func(string, string, string, int) (http.Header, any)
		id   string
	}{{call, "sbxnone"}, {call, "no%20id"}, {other, id}} {
		base := "/sandboxes/" + one.id
		for _, tc := range [][2]string{
			{"GET", ""}, {"DELETE", ""}, {"POST", "/connect"}, {"POST", "/resume"}, {"POST", "/timeout"}, {"POST", "/refreshes"}, {"POST", "/pause"},
			{"POST", "/fork"}, {"POST", "/snapshots"}, {"PUT", "/network"}, {"GET", "/metrics"}, {"GET", "/logs"},
		} {
			_, got := one.call(tc[0], base+tc[1], `{"timeout":5}`, 404)
			if msg, _ := field(got, "message").(string); !strings.HasPrefix(msg, "no sandbox ") {
				t.Errorf("%s %s: %q", tc[0], base+tc[1], msg)
			}
		}
	}
	res, data := w.raw(t, "GET", "/v2/sandboxes", "", "")
	if !strings.Contains(string(data), `"code":401`) || res.StatusCode != 401 {
		t.Errorf("without a key: %s %s", res.Status, data)
	}

	call("DELETE", "/sandboxes/"+id, "", 204)
	call("DELETE", "/sandboxes/"+id, "", 404)
	call("GET", "/sandboxes/"+id, "", 404)
	call("POST", "/sandboxes/"+id2+"/timeout", `{"timeout":0}`, 204) // ends it
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if _, got := call("GET", "/v2/sandboxes", "", 200); len(got.([]any)) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it did not end at its timeout of 0")
		}
	}
}
