package template

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/testenv"
)

var update = flag.Bool("update", false, "write the golden Dockerfile cases' results")

// TestDockerfile builds testdata/dockerfile/*.txtar: files of a context, and
// what comes of it in "want": the configuration and the tree, or the error.
func TestDockerfile(t *testing.T) {
	cases, err := filepath.Glob("testdata/dockerfile/*.txtar")
	if err != nil || len(cases) == 0 {
		t.Fatal("no cases", err)
	}
	l := withBox(t)
	for _, path := range cases {
		name := strings.TrimSuffix(filepath.Base(path), ".txtar")
		t.Run(name, func(t *testing.T) {
			a, err := txtar.ParseFile(path)
			if err != nil {
				t.Fatal(err)
			}
			o := DockerfileOptions{}
			dir, want := t.TempDir(), -1
			for i, f := range a.Files {
				switch f.Name {
				case "want":
					want = i
				case "options":
					if err := json.Unmarshal(f.Data, &o); err != nil {
						t.Fatal(err)
					}
				default:
					p := filepath.Join(dir, f.Name)
					os.MkdirAll(filepath.Dir(p), 0o755)
					if err := os.WriteFile(p, f.Data, 0o644); err != nil {
						t.Fatal(err)
					}
				}
			}
			o.Target = Target{Name: "t-" + name}
			stream, err := PackContext(context.Background(), dir, "")
			if err != nil {
				t.Fatal(err)
			}
			defer stream.Close()
			o.Context = stream
			got := dump(t, l, o)
			if *update {
				if want < 0 {
					a.Files, want = append(a.Files, txtar.File{Name: "want"}), len(a.Files)
				}
				a.Files[want].Data = []byte(got)
				os.WriteFile(path, txtar.Format(a), 0o644)
				return
			}
			if want < 0 {
				t.Fatal("it has no want: run with -update, and read what it wrote")
			}
			if d := cmp.Diff(string(a.Files[want].Data), got); d != "" {
				t.Error(d)
			}
		})
	}
}

func dump(t *testing.T, l *Library, o DockerfileOptions) string {
	var b strings.Builder
	tpl, err := l.BuildDockerfile(context.Background(), o, &chrootRunner{}, func(e Event) {
		if e.Stage == StageWarning {
			fmt.Fprintf(&b, "warning line %d: %s\n", e.Line, e.Message)
		}
	})
	if err != nil {
		e := codeIs(t, err, sandbox.CodeOf(err))
		fmt.Fprintf(&b, "%s: %s\n", e.Code, e.Message)
		for _, k := range []string{"line", "step", "exit_code", "output"} {
			if v := e.Details[k]; v != "" {
				fmt.Fprintf(&b, "%s: %q\n", k, v)
			}
		}
		return b.String()
	}
	cfg, err := json.MarshalIndent(tpl.Config, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return b.String() + string(cfg) + "\n" + tree(t, l, tpl, inBox)
}

func buildSimple(t testing.TB, l *Library, o DockerfileOptions, df string, files ...file) (Template, []Event, error) {
	t.Helper()
	o.Target.Name = "built"
	o.Content = []byte(df)
	o.Context = bytes.NewReader(tarOf(t, files...))
	var events []Event
	tpl, err := l.BuildDockerfile(context.Background(), o, &chrootRunner{}, func(e Event) { events = append(events, e) })
	return tpl, events, err
}

func countCached(events []Event) (n int) {
	for _, e := range events {
		if e.Cached {
			n++
		}
	}
	return n
}

func TestCache(t *testing.T) {
	l := withBox(t)
	const df = "FROM box\nARG A=1\nRUN echo $A > /a\nCOPY f /f\nWORKDIR /w\nRUN echo b > /b"
	f := file{name: "f", body: "1"}
	build := func(o DockerfileOptions, df string, files ...file) (Template, int) {
		t.Helper()
		tpl, events, err := buildSimple(t, l, o, df, files...)
		if err != nil {
			t.Fatal(err)
		}
		return tpl, countCached(events)
	}
	first, n := build(DockerfileOptions{}, df, f)
	if n != 0 {
		t.Errorf("the first build took %d steps from the cache", n)
	}
	if again, n := build(DockerfileOptions{}, df, f); n != 4 || !slices.Equal(again.Layers, first.Layers) {
		t.Errorf("the second build took %d steps from the cache", n)
	}
	// A restart keeps it.
	dir := l.dir
	l.Close()
	l = openLibrary(t, dir)
	if _, n := build(DockerfileOptions{}, df, f); n != 4 {
		t.Errorf("after a restart %d steps are cached", n)
	}
	if _, n := build(DockerfileOptions{}, df, file{name: "f", body: "2"}); n != 1 {
		t.Errorf("with another file %d steps are cached", n)
	}
	if _, n := build(DockerfileOptions{BuildArgs: map[string]string{"A": "2"}}, df, f); n != 0 {
		t.Errorf("with another argument %d steps are cached", n)
	}
	if _, n := build(DockerfileOptions{NoCache: true}, df, f); n != 0 {
		t.Errorf("without the cache %d steps are cached", n)
	}
	if _, n := build(DockerfileOptions{Target: Target{Tenant: "acme"}}, df, f); n != 0 {
		t.Errorf("another tenant got %d steps from the cache", n)
	}
	// A step that fails keeps those before it.
	broken := strings.Replace(df, "echo b > /b", "exit 9", 1)
	if _, _, err := buildSimple(t, l, DockerfileOptions{}, broken, f); err == nil {
		t.Fatal("it did not fail")
	}
	_, events, _ := buildSimple(t, l, DockerfileOptions{}, broken, f)
	if n := countCached(events); n != 3 {
		t.Errorf("%d steps before the broken one are cached", n)
	}
	wantClean(t, l)
	if freed, err := l.PruneCache(context.Background()); err != nil || freed == 0 {
		t.Errorf("pruned %d, %v", freed, err)
	}
	wantClean(t, l)
}

func TestCacheSize(t *testing.T) {
	l := withBox(t, WithCacheSize(3<<20))
	for i := range 4 {
		if _, _, err := buildSimple(t, l, DockerfileOptions{}, fmt.Sprintf("FROM box\nRUN dd if=/dev/zero of=/f%d bs=1024 count=1024 2>/dev/null || echo %d > /f", i, i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM box\nCOPY big /\nCOPY small /", file{name: "big", body: strings.Repeat("x", 4<<20)}, file{name: "small"}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM box"); err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	var size int64
	for d, s := range l.layers {
		used := false
		for _, tpl := range l.live {
			used = used || slices.Contains(tpl.Layers, d)
		}
		if !used {
			size += s.Bytes
		}
	}
	l.mu.Unlock()
	if size > 3<<20 {
		t.Errorf("the cache keeps %d bytes", size)
	}
	wantClean(t, l)
}

func TestAdd(t *testing.T) {
	l := withBox(t)
	inner := tarOf(t, file{name: "in/a", body: "A", uid: 7}, file{name: "in/l", link: "/etc"}, file{name: "in/l2", link: "a"})
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	w.Write(inner)
	w.Close()
	var plain bytes.Buffer
	w = gzip.NewWriter(&plain)
	w.Write([]byte("only text"))
	w.Close()
	tpl, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM box\nADD x.tar y.tgz /un/\nADD t.gz /un/\nCOPY x.tar /as-is/\nADD --unpack=false x.tar /as-is/two", file{name: "x.tar", body: string(inner)}, file{name: "y.tgz", body: z.String()}, file{name: "t.gz", body: plain.String()})
	if err != nil {
		t.Fatal(err)
	}
	got := tree(t, l, tpl, func(p string) bool { return !strings.HasPrefix(p, "un") && p != "as-is" })
	for _, want := range []string{"un/in/a 100644 7:7 \"A\"", "un/in/l 120644 0:0 -> /etc", "un/t.gz 100644 0:0"} {
		if !strings.Contains(got, want) && !strings.Contains(strings.ReplaceAll(got, "120777", "120644"), want) {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
	for name, body := range map[string]string{
		"escape": string(tarOf(t, file{name: "../../evil", body: "x"})),
		"cut":    string(inner[:1500]),
	} {
		_, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM box\nADD x.tar /un/", file{name: "x.tar", body: body})
		if e := codeIs(t, err, sandbox.CodeInvalid); e.Details["line"] != "2" {
			t.Errorf("%s: %v", name, e)
		}
	}
	wantClean(t, l)
}

func TestOnBuild(t *testing.T) {
	l := withBox(t)
	ctx := context.Background()
	parent := DockerfileOptions{Target: Target{Name: "parent"}, Content: []byte("FROM box\nONBUILD COPY f /onbuild/\nONBUILD RUN echo x > /ran")}
	if _, err := l.BuildDockerfile(ctx, parent, &chrootRunner{}, nil); err != nil {
		t.Fatal(err)
	}
	tpl, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM parent", file{name: "f", body: "F"})
	if err != nil {
		t.Fatal(err)
	}
	if got := tree(t, l, tpl, inBox); got != "onbuild 40755 0:0\nonbuild/f 100644 0:0 \"F\"\nran 100644 0:0 \"x\\n\"\n" {
		t.Errorf("tree %s", got)
	}
	if len(tpl.Config.OnBuild) != 0 {
		t.Error("the triggers are inherited")
	}
}

func TestContextLimits(t *testing.T) {
	l := withBox(t, WithLimits(layer.Limits{MaxFileBytes: 3 << 20}), WithArchiveSize(4<<20))
	for name, files := range map[string][]file{
		"file_bytes":    {{name: "f", body: strings.Repeat("x", 7<<19)}},
		"context_bytes": {{name: "a", body: strings.Repeat("x", 1<<20)}, {name: "b", body: strings.Repeat("x", 1<<20)}, {name: "c", body: strings.Repeat("x", 1<<20)}, {name: "d", body: strings.Repeat("x", 1<<20)}, {name: "e", body: strings.Repeat("x", 1<<20)}},
	} {
		_, _, err := buildSimple(t, l, DockerfileOptions{}, "FROM box", files...)
		if e := codeIs(t, err, sandbox.CodeTooLarge); e.Details["limit"] != name {
			t.Errorf("limit %q, want %q", e.Details["limit"], name)
		}
	}
	wantClean(t, l)
}

func TestBuildCanceled(t *testing.T) {
	l := withBox(t)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	start := time.Now()
	_, err := l.BuildDockerfile(ctx, DockerfileOptions{Target: Target{Name: "x"}, Content: []byte("FROM box\nRUN echo on; sleep 300")}, &chrootRunner{}, func(e Event) {
		if e.Stage == StageLog {
			cancel()
		}
	})
	codeIs(t, err, sandbox.CodeCanceled)
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it took %v", took)
	}
	wantClean(t, l)
}

func TestManyVariablesAndBinaryOutput(t *testing.T) {
	l := withBox(t)
	var df strings.Builder
	df.WriteString("FROM box\n")
	for i := range 3000 {
		fmt.Fprintf(&df, "ENV V%d=%d\n", i, i)
	}
	df.WriteString("RUN echo $V2999 > /out; cat /bin/busybox; echo")
	tpl, events, err := buildSimple(t, l, DockerfileOptions{}, df.String())
	if err != nil {
		t.Fatal(err)
	}
	if len(tpl.Config.Env) < 3000 || !strings.Contains(tree(t, l, tpl, inBox), `out 100644 0:0 "2999\n"`) {
		t.Error("variables are lost")
	}
	for _, e := range events {
		if len(e.Message) > 4*maxLine {
			t.Errorf("an event of %d bytes", len(e.Message))
		}
	}
}

func TestStepOutput(t *testing.T) {
	var lines []string
	o := &stepOutput{emit: func(s string) { lines = append(lines, s) }}
	fmt.Fprint(o, "one\ntw")
	fmt.Fprint(o, "o\r\n\n", strings.Repeat("x", maxLine+10), "\nend")
	o.flush()
	if want := []string{"one", "two", "", strings.Repeat("x", maxLine), strings.Repeat("x", 10), "end"}; !slices.Equal(lines, want) {
		t.Errorf("%q", lines)
	}
	for range 100 {
		fmt.Fprint(o, strings.Repeat("y", 1000))
	}
	if n := len(o.tail()); n != maxTail {
		t.Errorf("the tail has %d bytes", n)
	}
}

func FuzzBuildArgs(f *testing.F) {
	f.Add("A", "b")
	f.Fuzz(func(t *testing.T, k, v string) {
		checkArgs(map[string]string{k: v})
		parsePorts(k)
	})
}

func TestDockerfileNeedsRunner(t *testing.T) {
	testenv.Root(t)
	l := withBox(t)
	_, err := l.BuildDockerfile(context.Background(), DockerfileOptions{Target: Target{Name: "x"}, Content: []byte("FROM box\nRUN echo")}, nil, nil)
	codeIs(t, err, sandbox.CodeUnavailable)
}
