package api_test

import (
	"encoding/json"
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestOpenAPI holds the document to its form, and the API to its document: a
// change of the API shows in testdata/openapi.json.
func TestOpenAPI(t *testing.T) {
	w := newWorld(t)
	_, data := w.raw(t, "GET", "unix:/v1/openapi.json", "", "")
	var doc struct {
		OpenAPI    string
		Info       struct{ Title, Version string }
		Paths      map[string]map[string]json.RawMessage
		Components struct {
			Schemas         map[string]json.RawMessage
			SecuritySchemes map[string]json.RawMessage
		}
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || doc.Info.Title == "" || doc.Info.Version == "" {
		t.Errorf("openapi %q, info %+v", doc.OpenAPI, doc.Info)
	}
	methods := []string{"get", "put", "post", "delete", "patch", "options", "head", "trace"}
	ids := map[string]bool{}
	param := regexp.MustCompile(`\{([^}]+)\}`)
	for path, item := range doc.Paths {
		if !strings.HasPrefix(path, "/v1/") {
			t.Errorf("%s is not under /v1", path)
		}
		for method, raw := range item {
			if !slices.Contains(methods, method) {
				continue
			}
			var op struct {
				OperationID string
				Summary     string
				Parameters  []struct {
					Name, In string
					Required bool
					Schema   json.RawMessage
				}
				Responses map[string]json.RawMessage
			}
			if err := json.Unmarshal(raw, &op); err != nil {
				t.Fatalf("%s %s: %v", method, path, err)
			}
			if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" || len(op.Responses) < 2 {
				t.Errorf("%s %s: id %q, summary %q, %d responses", method, path, op.OperationID, op.Summary, len(op.Responses))
			}
			ids[op.OperationID] = true
			for _, m := range param.FindAllStringSubmatch(path, -1) {
				if !slices.ContainsFunc(op.Parameters, func(p struct {
					Name, In string
					Required bool
					Schema   json.RawMessage
				}) bool {
					return p.Name == m[1] && p.In == "path" && p.Required && p.Schema != nil
				}) {
					t.Errorf("%s %s: the path parameter %s is not described", method, path, m[1])
				}
			}
			if def, ok := op.Responses["default"]; !ok || !strings.Contains(string(def), `"#/components/schemas/Error"`) {
				t.Errorf("%s %s: its errors are not Error: %s", method, path, def)
			}
		}
	}
	for _, ref := range regexp.MustCompile(`"\$ref": "#/components/schemas/([^"]+)"`).FindAllStringSubmatch(string(data), -1) {
		if _, ok := doc.Components.Schemas[ref[1]]; !ok {
			t.Errorf("a reference to the schema %q, which is not there", ref[1])
		}
	}
	for _, s := range []string{"apiKey", "bearer"} {
		if _, ok := doc.Components.SecuritySchemes[s]; !ok {
			t.Errorf("no security scheme %q", s)
		}
	}

	const golden = "testdata/openapi.json"
	if *update {
		os.MkdirAll("testdata", 0o755)
		if err := os.WriteFile(golden, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(data)); d != "" {
		t.Errorf("the document has changed (go test -run OpenAPI -update writes it anew):\n%s", d)
	}
}
