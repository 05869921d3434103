package dockerfile

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestPlan(t *testing.T) {
	f, err := Parse([]byte(`ARG V=1
ARG IMG=debian:$V
FROM scratch AS a
FROM ${IMG} AS B
COPY --from=a /x /y
FROM scratch AS unused
FROM b
COPY --from=0 /x /y
FROM scratch AS last
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		target string
		args   map[string]string
		want   []string // index:base:from
	}{
		{"", nil, []string{"4:scratch"}},
		{"3", nil, []string{"0:scratch", "1:debian:1", "3:stage 1"}},
		{"b", map[string]string{"V": "2"}, []string{"0:scratch", "1:debian:2"}},
		{"B", map[string]string{"IMG": "x"}, []string{"0:scratch", "1:x"}},
		{"UNUSED", nil, []string{"2:scratch"}},
	} {
		p, err := f.Plan(c.target, c.args)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range p.Stages {
			base := s.Base
			if s.From >= 0 {
				base = "stage " + string(rune('0'+s.From))
			}
			got = append(got, string(rune('0'+s.Index))+":"+base)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("target %q: %s", c.target, d)
		}
	}
	if _, err := f.Plan("nope", nil); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("an unknown target: %v", err)
	}
}

func TestParseRefuses(t *testing.T) {
	for src, line := range map[string]string{
		"":                                  "1",
		"FROM":                              "1",
		"FROM a\n\nNOPE x":                  "3",
		"FROM a\nRUN --security=insecure x": "2",
		"FROM a\nRUN --network=host x":      "2",
		"FROM a\nCOPY x":                    "2",
		"FROM a\nCOPY --parents a b /x/":    "2",
		"FROM a\nCOPY --from=$x a /":        "2",
		"FROM a\nRUN x\x00":                 "2",
		"FROM a\nADD git@x:y.git /":         "2",
		"FROM a\nSHELL /bin/sh":             "2",
		"FROM a\nRUN <<EOF\nnever ended":    "2",
	} {
		f, err := Parse([]byte(src))
		var e *sandbox.Error
		if f != nil || err == nil {
			t.Errorf("%q was taken", src)
			continue
		}
		if e, _ = err.(*sandbox.Error); e == nil || (e.Code != sandbox.CodeInvalid && e.Code != sandbox.CodeUnsupported) || e.Details["line"] != line {
			t.Errorf("%q: %v, details %v", src, err, e)
		}
	}
	if _, err := Parse(make([]byte, MaxBytes+1)); sandbox.CodeOf(err) != sandbox.CodeTooLarge {
		t.Errorf("a huge one: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	cases, _ := filepath.Glob("../testdata/dockerfile/*.txtar")
	for _, c := range cases {
		a, err := txtar.ParseFile(c)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range a.Files {
			if file.Name == "Dockerfile" {
				f.Add(file.Data)
			}
		}
	}
	if len(cases) == 0 {
		f.Fatal("no seeds: ", os.ErrNotExist)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse(data)
		if err != nil {
			if c := sandbox.CodeOf(err); c == sandbox.CodeInternal {
				t.Errorf("%s: %v", c, err)
			}
			return
		}
		p, err := file.Plan("", map[string]string{"A": "b"})
		if err != nil {
			return
		}
		for _, s := range p.Stages {
			if s.From >= s.Index {
				t.Errorf("stage %d is from %d", s.Index, s.From)
			}
		}
		file.ParseOnBuild(strings.Split(string(data), "\n"))
	})
}
