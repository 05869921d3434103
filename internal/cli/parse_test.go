package cli

import (
	"bytes"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/warrenhq/warren/internal/sandbox"
)

func TestParsePlace(t *testing.T) {
	for in, want := range map[string]place{
		"-":                  {std: true},
		"a.txt":              {path: "a.txt"},
		"./sbx1:x":           {path: "./sbx1:x"},
		"/tmp/a:b":           {path: "/tmp/a:b"},
		"sbxabc:/etc/passwd": {id: "sbxabc", path: "/etc/passwd"},
		"sbxabc:rel:x":       {id: "sbxabc", path: "rel:x"},
		"UPPER:x":            {path: "UPPER:x"},
		"a":                  {path: "a"},
	} {
		if got, err := parsePlace(in); err != nil || got != want {
			t.Errorf("%q: %+v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", ":x", "sbxabc:", "sbxabc:a\x00b"} {
		if got, err := parsePlace(in); err == nil {
			t.Errorf("%q: %+v", in, got)
		}
	}
}

func TestParseEnvFile(t *testing.T) {
	lookup := func(k string) (string, bool) { return "from " + k, k == "HERE" }
	got := map[string]string{}
	const file = "\ufeff# comment\n\nA=1\nB = x y \r\nexport C=\"quoted\"\nHERE\nNOT_HERE\nD=a=b\n  E=\n"
	if err := parseEnvFile("f", strings.NewReader(file), lookup, got); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"A": "1", "B": " x y ", "C": `"quoted"`, "HERE": "from HERE", "D": "a=b", "E": ""}
	if !maps.Equal(got, want) {
		t.Errorf("%q", got)
	}
	for _, bad := range []string{"=x", "a b=c", "A=\x00", "\xff=1", strings.Repeat("x", maxEnvLine+1)} {
		if err := parseEnvFile("f", strings.NewReader("OK=1\n"+bad), lookup, map[string]string{}); err == nil || !strings.Contains(err.Error(), "f") {
			t.Errorf("%.20q: %v", bad, err)
		}
	}
}

func TestParseAmounts(t *testing.T) {
	for in, want := range map[string]int{"512": 512, "512M": 512, "512mb": 512, "1.5G": 1536, "1GiB": 1024, "1k": 1, "2048K": 2, "1T": 1 << 20} {
		if got, err := parseMemory(in); err != nil || got != want {
			t.Errorf("%q: %d, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "x", "-1", "0", "NaN", "1e30", "5Q", "inf"} {
		if got, err := parseMemory(in); err == nil {
			t.Errorf("%q: %d", in, got)
		}
	}
	for in, want := range map[string]time.Duration{"0": 0, "90": 90 * time.Second, "1.5": 1500 * time.Millisecond, "1h30m": 90 * time.Minute, "2d": 48 * time.Hour} {
		if got, err := parseTimeout(in); err != nil || got != want {
			t.Errorf("%q: %v, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "x", "-5s", "d"} {
		if got, err := parseTimeout(in); err == nil {
			t.Errorf("%q: %v", in, got)
		}
	}
}

func TestParseRule(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.0/8": "10.0.0.0/8  0", "10.1.2.3": "10.1.2.3/32  0", "10.1.2.3:5432": "10.1.2.3/32  5432", "10.0.0.5/8:80": "10.0.0.0/8  80",
		"2001:db8::1": "2001:db8::1/128  0", "[2001:db8::1]:443": "2001:db8::1/128  443", "2001:db8::/32": "2001:db8::/32  0",
		"*.Example.com:443": " *.example.com 443", "db": " db 0",
	} {
		got, err := parseRule(in)
		if s := fmt.Sprintf("%s %s %d", got.CIDR, got.Domain, got.Port); err != nil || s != want {
			t.Errorf("%q: %q, %v", in, s, err)
		}
	}
	for _, in := range []string{"", "a b", "x:0", "x:99999", "http://x/", ":80"} {
		if got, err := parseRule(in); err == nil {
			t.Errorf("%q: %+v", in, got)
		}
	}
}

func TestRenameInArchives(t *testing.T) {
	for _, tc := range []struct {
		in, want string
		ok       bool
	}{
		{"top", "as", true}, {"top/", "as", true}, {"top/a/b", "as/a/b", true}, {"./top/a", "as/a", true}, {".", "as", true},
		{"/etc/passwd", "", false}, {"../x", "", false}, {"top/../../x", "", false}, {"top/a\x00", "", false}, {"..", "", false},
	} {
		if got, ok := rename(tc.in, "as"); ok != tc.ok || ok && got != tc.want {
			t.Errorf("%q: %q, %v", tc.in, got, ok)
		}
	}
}

func TestCleanKeepsTheTerminalSafe(t *testing.T) {
	if got := clean("a\x1b[31mred\x07\u009b\xff\n\tb"); got != "a?[31mred???\n\tb" {
		t.Errorf("%q", got)
	}
}

func TestStartErrors(t *testing.T) {
	for _, tc := range []struct {
		code sandbox.Code
		msg  string
		want int
	}{
		{sandbox.CodeInvalid, `"x": executable file not found in $PATH`, 127},
		{sandbox.CodeInvalid, `cannot start "/x": no such file or directory`, 127},
		{sandbox.CodeInvalid, `cannot start "/etc/passwd": permission denied`, 126},
		{sandbox.CodeNotFound, `no sandbox "sbxnone"`, 125},
		{sandbox.CodeUnavailable, `cannot reach the agent: no such file or directory`, 125},
	} {
		if got := startError(sandbox.Errorf(tc.code, "%s", tc.msg), "x").(exitError).code; got != tc.want {
			t.Errorf("%s %q: %d", tc.code, tc.msg, got)
		}
	}
}

func FuzzParsePlace(f *testing.F) {
	for _, s := range []string{"-", "a:b", "sbx1:/x", "./a:b", ":", "a:", "\x00", "sbx:\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := parsePlace(s)
		if err != nil {
			return
		}
		if p.id != "" {
			if _, err := sandbox.ParseID(p.id); err != nil || p.path == "" || p.id+":"+p.path != s {
				t.Fatalf("%q: %+v, %v", s, p, err)
			}
		} else if !p.std && p.path != s {
			t.Fatalf("%q: %+v", s, p)
		}
	})
}

func FuzzParseEnvFile(f *testing.F) {
	for _, s := range []string{"A=1\n", "export A=1\r\n", "# x\n\nA", "=\n", "A=\x00", "\ufeffA=1"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		env := map[string]string{}
		if err := parseEnvFile("f", bytes.NewReader(data), func(string) (string, bool) { return "", false }, env); err != nil {
			return
		}
		for k, v := range env {
			if !validEnvName(k) || !utf8.ValidString(k) || strings.ContainsAny(v, "\x00\n") {
				t.Fatalf("%q=%q", k, v)
			}
		}
	})
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "[::1]:80", "a.b:1", "::", "[", "a%b", "fe80::1%eth0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := parseRule(s)
		if err != nil {
			return
		}
		if (r.CIDR == "") == (r.Domain == "") || r.Port < 0 || r.Port > 65535 {
			t.Fatalf("%q: %+v", s, r)
		}
	})
}
