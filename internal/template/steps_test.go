package template

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// upload is the archive that a client makes of a COPY's files.
func upload(t *testing.T) func(string) (io.ReadCloser, error) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "folder/test.txt", Mode: 0o644, Size: 5, Typeflag: tar.TypeReg},
		{Name: "folder/link", Linkname: "test.txt", Typeflag: tar.TypeSymlink},
		{Name: "folder/dangling", Linkname: "nowhere", Typeflag: tar.TypeSymlink},
	} {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			io.WriteString(w, "hello")
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return func(string) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }
}

// TestStepsSemantics covers what each kind of step leaves in the template.
func TestStepsSemantics(t *testing.T) {
	l := withBox(t)
	o := StepsOptions{
		Target: Target{Name: "app", Tags: []string{"v1", DefaultTag}, BuildID: "b1"}, FromTemplate: "box", Files: upload(t),
		Steps: []BuildStep{
			{Type: StepUser, Args: []string{"user"}},
			{Type: StepWorkdir, Args: []string{"/home/user"}},
			{Type: StepEnv, Args: []string{"A", "one", "B", "$A-two", "C", `"quoted"`}},
			{Type: StepCopy, Args: []string{"folder/*", "folder", "", ""}, FilesHash: "x"},
			{Type: StepCopy, Args: []string{"folder/test.txt", "/etc/one.conf", "root", "0600"}, FilesHash: "x"},
		},
	}
	tpl, err := l.BuildSteps(t.Context(), o, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c := tpl.Config; c.User != "user" || c.Workdir != "/home/user" || c.Env["B"] != "one-two" || c.Env["C"] != `"quoted"` {
		t.Errorf("config %+v", c)
	}
	_, dirs, err := l.Resolve(t.Context(), "", "app:v1")
	if err != nil {
		t.Fatal(err)
	}
	v, err := layer.OpenView(dirs)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	e, err := v.Lookup("/home/user/folder/test.txt", false)
	if err != nil || e.Stat.Uid < stepUserID {
		t.Errorf("the copied file: uid %d, %v", e.Stat.Uid, err)
	}
	if e, err := v.Lookup("/home/user/folder/dangling", false); err != nil {
		t.Errorf("a dangling symlink: %v %v", e, err)
	}
	if e, err := v.Lookup("/etc/one.conf", false); err != nil || e.Stat.Uid != 0 || e.Stat.Mode&0o777 != 0o600 {
		t.Errorf("owner and mode: %+v %v", e.Stat, err)
	}
	// Again, all but the base is cached.
	cached := 0
	if _, err := l.BuildSteps(t.Context(), o, nil, func(e Event) {
		if e.Cached {
			cached++
		}
	}); err != nil || cached < 3 {
		t.Errorf("%d cached steps, %v", cached, err)
	}
	if got, err := l.Get(t.Context(), "", "app"); err != nil || got.BuildID != "b1" {
		t.Errorf("the default tag: %+v %v", got, err)
	}
	if _, err := l.Tag(t.Context(), "", "app", "app", "prod"); err != nil {
		t.Error(err)
	}
	if _, err := l.Tag(t.Context(), "other", "app", "app", "prod"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("another tenant's tag: %v", err)
	}
}

// TestStepsErrors checks that each failure says where it was.
func TestStepsErrors(t *testing.T) {
	l := withBox(t)
	for _, c := range []struct {
		name  string
		from  string
		steps []BuildStep
		step  string
	}{
		{"base", "nothing", nil, FailedBase},
		{"kind", "box", []BuildStep{{Type: "VOLUME", Args: []string{"/x"}}}, "1"},
		{"arguments", "box", []BuildStep{{Type: StepEnv, Args: []string{"A", "b"}}, {Type: StepEnv, Args: []string{"A"}}}, "2"},
		{"missing", "box", []BuildStep{{Type: StepCopy, Args: []string{"nope", "/x"}, FilesHash: "x"}}, "1"},
		{"no hash", "box", []BuildStep{{Type: StepCopy, Args: []string{"nope", "/x"}}}, "1"},
		{"no runner", "box", []BuildStep{{Type: StepRun, Args: []string{"true"}}}, "1"},
		{"bad user", "box", []BuildStep{{Type: StepUser, Args: []string{"a b"}}}, "1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := l.BuildSteps(context.Background(), StepsOptions{Target: Target{Name: "bad"}, FromTemplate: c.from, Steps: c.steps, Files: upload(t)}, nil, nil)
			if err == nil {
				t.Fatal("built")
			}
			if got := codeIs(t, err, sandbox.CodeOf(err)).Details["step"]; got != c.step {
				t.Errorf("step %q, want %q: %v", got, c.step, err)
			}
		})
	}
	if _, err := l.Get(t.Context(), "", "bad"); sandbox.CodeOf(err) != sandbox.CodeNotFound {
		t.Errorf("half a template: %v", err)
	}
	wantClean(t, l)
}

// TestStepsImage builds on an image of a registry, which gets the account.
func TestStepsImage(t *testing.T) {
	l := withBox(t)
	srv := httptest.NewServer(registry.New())
	defer srv.Close()
	image := strings.TrimPrefix(srv.URL, "http://") + "/box:1"
	ref, err := name.ParseReference(image)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(ref, imageOf(t, v1.Config{}, tarOf(t, boxFiles(t)...))); err != nil {
		t.Fatal(err)
	}
	tpl, err := l.BuildSteps(t.Context(), StepsOptions{Target: Target{Name: "app"}, FromImage: image}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if tpl.Config.User != "user" || tpl.Config.Workdir != "/home/user" {
		t.Errorf("config %+v", tpl.Config)
	}
	_, err = l.BuildSteps(t.Context(), StepsOptions{Target: Target{Name: "app"}, FromImage: "127.0.0.1:1/none:1"}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("a registry that does not answer: %v", err)
	}
}
