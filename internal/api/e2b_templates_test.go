package api_test

import (
	"encoding/json"
	"net/http"
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
