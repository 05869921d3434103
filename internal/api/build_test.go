package api_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

func archive(t *testing.T, names ...string) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for _, n := range names {
		if err := tw.WriteHeader(&tar.Header{Name: n, Typeflag: tar.TypeReg, Size: 3, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		tw.Write([]byte("abc"))
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestBuild(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	var stages []string
	got, err := w.root.BuildTemplate(ctx, wire.BuildTemplate{
		Name: "deb", Shared: true, StartCmd: "s", Resources: wire.ResourceRequest{MemoryMiB: 64},
		Debian: &wire.BuildDebian{Suite: "bookworm", Packages: []string{"git"}, Slim: []string{"/usr/share/doc/*"}},
	}, nil, func(e wire.BuildEvent) { stages = append(stages, e.Stage) })
	if err != nil || got.Name != "deb" || !slices.Contains(stages, "resolve") {
		t.Fatalf("%+v, %v, %v", got, stages, err)
	}
	deb := w.builder.last.(template.DebianOptions)
	if deb.Tenant != "default" || !deb.Shared || deb.StartCmd != "s" || deb.Resources.MemoryMiB != 64 || fmt.Sprint(deb.Packages, deb.Slim) != "[git] [/usr/share/doc/*]" {
		t.Errorf("%+v", deb)
	}

	_, err = w.root.BuildTemplate(ctx, wire.BuildTemplate{
		Name: "app", Dockerfile: &wire.BuildDockerfile{Dockerfile: "d/Dockerfile", BuildArgs: map[string]string{"A": "b"}, Stage: "last", NoCache: true},
	}, archive(t, "Dockerfile", "src/a"), nil)
	if err != nil {
		t.Fatal(err)
	}
	df := w.builder.last.(template.DockerfileOptions)
	if df.Dockerfile != "d/Dockerfile" || df.BuildArgs["A"] != "b" || df.Stage != "last" || !df.NoCache || fmt.Sprint(w.builder.read) != "[Dockerfile src/a]" {
		t.Errorf("%+v with %v", df, w.builder.read)
	}

	// A build that fails after it began tells so in its last line.
	_, err = w.root.BuildTemplate(ctx, wire.BuildTemplate{Name: "broken", Dockerfile: &wire.BuildDockerfile{}}, archive(t, "x"), nil)
	if !isCode(err, sandbox.CodeBuildFailed) || !strings.Contains(err.Error(), "line 3") || err.(*sandbox.Error).Details["line"] != "3" {
		t.Errorf("%v", err)
	}
	// One that is refused before is a plain error.
	res, data := w.raw(t, "POST", "unix:/v1/templates/build", "", `{"name":"x","debian":{"suite":"refused"}}`)
	wantError(t, res, data, 400, sandbox.CodeInvalid, "no such suite")

	// The archive alone, its options in a header.
	res, data = w.raw(t, "POST", "unix:/v1/templates/build", "", archive(t, "only").String(),
		"Content-Type", "application/x-tar", "Warren-Build-Options", `{"name":"t","dockerfile":{"content":"FROM base"}}`)
	lines := bytes.Split(bytes.TrimSpace(data), []byte("\n"))
	var last wire.BuildEvent
	if err := json.Unmarshal(lines[len(lines)-1], &last); err != nil || res.StatusCode != 200 || last.Template == nil || last.Template.Name != "t" {
		t.Errorf("%s: %s", res.Status, data)
	}
	if df := w.builder.last.(template.DockerfileOptions); string(df.Content) != "FROM base" || fmt.Sprint(w.builder.read) != "[only]" {
		t.Errorf("%+v with %v", df, w.builder.read)
	}

	for _, tc := range []struct{ body, part string }{
		{`{"name":"x"}`, "exactly one"},
		{`{"name":"x","debian":{},"import":{"ref":"a"}}`, "exactly one"},
		{`{"debian":{}}`, "name"},
		{`{"name":"x","debian":{},"extra":1}`, "extra"},
		{`{`, "JSON"},
	} {
		res, data := w.raw(t, "POST", "unix:/v1/templates/build", "", tc.body)
		wantError(t, res, data, 400, sandbox.CodeInvalid, tc.part)
	}
	res, data = w.raw(t, "POST", "unix:/v1/templates/build", "", "x", "Content-Type", "image/png")
	wantError(t, res, data, 400, sandbox.CodeInvalid, "image/png")
	res, data = w.raw(t, "POST", "unix:/v1/templates/build", "", "x", "Content-Type", "application/x-tar")
	wantError(t, res, data, 400, sandbox.CodeInvalid, "Warren-Build-Options")

	ts, err := w.root.Templates(ctx)
	if err != nil || len(ts) < 3 {
		t.Fatalf("%v, %v", ts, err)
	}
	if got, err := w.root.Template(ctx, "deb"); err != nil || got.ID != "tpldeb" {
		t.Errorf("%+v, %v", got, err)
	}
	if err := w.root.RemoveTemplate(ctx, "deb"); err != nil {
		t.Error(err)
	}
	if _, err := w.root.Template(ctx, "deb"); !isCode(err, sandbox.CodeNotFound) {
		t.Errorf("%v", err)
	}
}

// Who comes by TCP may not have files of the daemon's host read.
func TestImportReadsTheHostForRootAlone(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	k, err := w.root.CreateKey(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		c    *client.Client
		want bool
	}{{w.root, true}, {w.client(t, w.tcp, client.Options{APIKey: k.Key}), false}} {
		if _, err := tc.c.BuildTemplate(ctx, wire.BuildTemplate{Name: "i", Import: &wire.BuildImport{Ref: "oci:/srv/image"}}, nil, nil); err != nil {
			t.Fatal(err)
		}
		if o := w.builder.last.(template.ImportOptions); o.AllowLocal != tc.want || o.Ref != "oci:/srv/image" {
			t.Errorf("%s: %+v", tc.c.Host(), o)
		}
	}
}
