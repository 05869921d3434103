package manager_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

// waitBuild waits for a build's end.
func waitBuild(t *testing.T, m *manager.Manager, b manager.TemplateBuild) manager.TemplateBuild {
	t.Helper()
	for {
		got, err := m.TemplateBuild(t.Context(), b.Tenant, b.Template, b.ID)
		if err != nil {
			t.Fatal(err)
		}
		if got.State == store.BuildReady || got.State == store.BuildError {
			return got
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestBuildInBackground(t *testing.T) {
	w := newWorld(t)
	w.tpl.OnSteps = func(_ context.Context, o template.StepsOptions, p template.Progress) error {
		p(template.Event{Stage: template.StageStep, Message: "RUN x", Current: 1, Total: 1, Line: 1})
		if o.FromTemplate != "base" {
			return sandbox.Errorf(sandbox.CodeBuildFailed, "no").With("step", "1").With("output", "the end")
		}
		return nil
	}
	w.tune = func(c *manager.Config) { c.ImageAliases = map[string]string{"e2bdev/base": "base"} }
	m := w.start(t)
	b, err := m.RequestBuild(t.Context(), "a", manager.TemplateRequest{Name: "app:v1", Tags: []string{"v2"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.StartBuild(t.Context(), "b", b.Template, b.ID, template.StepsOptions{FromTemplate: "base"}); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("another tenant's build: %v", err)
	}
	if err := m.StartBuild(t.Context(), "a", b.Template, b.ID, template.StepsOptions{FromImage: "e2bdev/base:latest"}); err != nil {
		t.Fatal(err)
	}
	if got := waitBuild(t, m, b); got.State != store.BuildReady {
		t.Fatalf("%+v", got)
	}
	if err := m.StartBuild(t.Context(), "a", b.Template, b.ID, template.StepsOptions{FromTemplate: "base"}); sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Errorf("started twice: %v", err)
	}
	tags, err := m.TemplateTags(t.Context(), "a", b.Template)
	if err != nil || len(tags) != 2 || tags[0].BuildID != b.ID {
		t.Errorf("tags %v %v", tags, err)
	}
	failed, err := m.RequestBuild(t.Context(), "a", manager.TemplateRequest{Name: "app"})
	if err != nil || failed.Template != b.Template {
		t.Fatalf("%+v %v", failed, err)
	}
	if err := m.StartBuild(t.Context(), "a", "app", failed.ID, template.StepsOptions{FromImage: "x/y"}); err != nil {
		t.Fatal(err)
	}
	got := waitBuild(t, m, failed)
	if got.State != store.BuildError || got.Step != "1" || !strings.Contains(got.Reason, "the end") {
		t.Errorf("%+v", got)
	}
	logs, err := m.BuildLogs(t.Context(), "a", b.Template, failed.ID, 0, 100)
	if err != nil || len(logs) != 2 || logs[1].Level != "error" {
		t.Errorf("logs %v %v", logs, err)
	}
	if err := m.RemoveNamed(t.Context(), "a", b.Template); err != nil {
		t.Error(err)
	}
	if _, err := m.NamedTemplate(t.Context(), "a", "app"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("after the removal: %v", err)
	}
}

// TestBuildCutOff ends the daemon in the middle of a build, after one of its
// two tags is in the library: the next one tells that it failed, and has none.
func TestBuildCutOff(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	var all []manager.TemplateBuild
	for _, name := range []string{"half", "whole"} {
		b, err := m.RequestBuild(t.Context(), "a", manager.TemplateRequest{Name: name, Tags: []string{"v1", "v2"}})
		if err != nil {
			t.Fatal(err)
		}
		b.State = store.BuildBuilding // as a daemon that was killed leaves it
		if err := w.store.MoveBuild(t.Context(), b.Build, store.BuildWaiting); err != nil {
			t.Fatal(err)
		}
		w.tpl.Put(template.Template{Name: name + ":v1", ID: "tpl" + name + ":v1", Tenant: "a", BuildID: b.ID})
		all = append(all, b)
	}
	w.tpl.Put(template.Template{Name: "whole:v2", ID: "tplwhole:v2", Tenant: "a", BuildID: all[1].ID})
	half := filepath.Join(w.dir, "uploads", ".new-1")
	if err := os.WriteFile(half, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	w.stop(t)
	m = w.start(t)
	if got := waitBuild(t, m, all[0]); got.State != store.BuildError || got.Reason == "" {
		t.Errorf("the half one: %+v", got)
	}
	if _, err := m.Template(t.Context(), "a", "half:v1"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("half a template stays: %v", err)
	}
	if got := waitBuild(t, m, all[1]); got.State != store.BuildReady {
		t.Errorf("the whole one: %+v", got)
	}
	if _, err := os.Stat(half); !os.IsNotExist(err) {
		t.Errorf("half an upload stays: %v", err)
	}
}

// TestBuildStopped stops the daemon in the middle of a build.
func TestBuildStopped(t *testing.T) {
	w := newWorld(t)
	entered := make(chan struct{})
	w.tpl.OnSteps = func(ctx context.Context, _ template.StepsOptions, _ template.Progress) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	}
	m := w.start(t)
	b, err := m.RequestBuild(t.Context(), "a", manager.TemplateRequest{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.StartBuild(t.Context(), "a", b.Template, b.ID, template.StepsOptions{FromTemplate: "base"}); err != nil {
		t.Fatal(err)
	}
	<-entered
	w.stop(t)
	if got := waitBuild(t, w.start(t), b); got.State != store.BuildError || !strings.Contains(got.Reason, "stopping") {
		t.Errorf("%+v", got)
	}
}

func TestUploads(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	b, err := m.RequestBuild(t.Context(), "a", manager.TemplateRequest{Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	hash := strings.Repeat("a", 64)
	if _, _, err := m.Upload(t.Context(), "b", b.Template, hash); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("another tenant's: %v", err)
	}
	if _, _, err := m.Upload(t.Context(), "a", b.Template, "../x"); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("a bad hash: %v", err)
	}
	present, token, err := m.Upload(t.Context(), "a", b.Template, hash)
	if err != nil || present {
		t.Fatal(present, err)
	}
	put := func(token, body string, size int64) sandbox.Code {
		return sandbox.CodeOf(m.PutUpload(t.Context(), token, strings.NewReader(body), size))
	}
	for _, c := range []struct {
		what, token, body string
		size              int64
		want              sandbox.Code
	}{
		{"a made-up token", "AAAA", "x", 1, sandbox.CodeForbidden},
		{"a changed token", token[:len(token)-2] + "AA", "x", 1, sandbox.CodeForbidden},
		{"no length", token, "x", -1, sandbox.CodeInvalid},
		{"too short", token, "x", 2, sandbox.CodeInvalid},
		{"too large", token, "x", 1 << 40, sandbox.CodeTooLarge},
		{"whole", token, "xy", 2, ""},
	} {
		if got := put(c.token, c.body, c.size); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	if present, _, err := m.Upload(t.Context(), "a", b.Template, hash); err != nil || !present {
		t.Errorf("after the upload: %v %v", present, err)
	}
	w.clock.Advance(2 * time.Hour)
	if got := put(token, "xy", 2); got != sandbox.CodeForbidden {
		t.Errorf("an expired link: %q", got)
	}
}
