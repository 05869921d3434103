package api_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestLifeOfASandbox(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	sb := w.create(t, wire.CreateSandbox{
		Metadata: map[string]string{"run": "a b&c=d"}, Env: map[string]string{"SECRET": "hunter2"}, Timeout: 3600,
		Network: wire.Network{Mode: "egress", Allow: []wire.EgressRule{{CIDR: "10.1.2.3", Port: 5432}, {Domain: "*.Example.com"}}},
	})
	if sb.State != sandbox.Running || sb.Runtime != "fake" || sb.Template != "base" || sb.Start != "cold" || sb.StartedAt == nil || sb.ExpiresAt == nil {
		t.Errorf("created: %+v", sb)
	}
	if sb.TrafficToken == "" {
		t.Error("the traffic token is not told at create")
	}
	if fmt.Sprint(sb.EnvNames) != "[SECRET]" || strings.Contains(fmt.Sprintf("%+v", sb), "hunter2") {
		t.Errorf("environment: %v", sb.EnvNames)
	}
	if sb.Network.Allow[0].CIDR != "10.1.2.3/32" || sb.Network.Allow[1].Domain != "*.example.com" {
		t.Errorf("network: %+v", sb.Network)
	}
	other := w.create(t, wire.CreateSandbox{})

	var ids []string
	for s, err := range w.root.Sandboxes(ctx, client.Filter{Metadata: map[string]string{"run": "a b&c=d"}}) {
		if err != nil {
			t.Fatal(err)
		}
		if s.TrafficToken != "" {
			t.Error("a list tells secrets")
		}
		ids = append(ids, s.ID)
	}
	if fmt.Sprint(ids) != fmt.Sprint([]string{sb.ID}) {
		t.Errorf("by label: %v", ids)
	}
	// Page by page.
	res, data := w.raw(t, "GET", "unix:/v1/sandboxes?limit=1", "", "")
	var page wire.SandboxList
	if err := json.Unmarshal(data, &page); err != nil || res.StatusCode != 200 || len(page.Sandboxes) != 1 || page.NextToken == "" {
		t.Fatalf("first page: %s", data)
	}
	_, data = w.raw(t, "GET", "unix:/v1/sandboxes?limit=1&token="+page.NextToken, "", "")
	first := page.Sandboxes[0].ID
	page = wire.SandboxList{}
	if err := json.Unmarshal(data, &page); err != nil || len(page.Sandboxes) != 1 || page.Sandboxes[0].ID == first {
		t.Fatalf("second page: %s", data)
	}

	if got, err := w.root.SetTimeout(ctx, sb.ID, 0); err != nil || got.ExpiresAt != nil {
		t.Errorf("timeout 0: %+v, %v", got.ExpiresAt, err)
	}
	if got, err := w.root.SetNetwork(ctx, sb.ID, wire.Network{Mode: "none"}); err != nil || got.Network.Mode != "none" || got.Network.Allow != nil {
		t.Errorf("network: %+v, %v", got.Network, err)
	}
	if st, err := w.root.Stats(ctx, sb.ID); err != nil || st.CPUSeconds != 1.5 || st.PIDs != 3 {
		t.Errorf("stats: %+v, %v", st, err)
	}
	for range 2 { // the second is no error
		if err := w.root.Kill(ctx, sb.ID); err != nil {
			t.Fatal(err)
		}
	}
	got, err := w.root.Sandbox(ctx, sb.ID)
	if err != nil || got.State != sandbox.Killed || got.Reason != sandbox.ReasonKilledByUser || got.EndedAt == nil || got.TrafficToken != "" {
		t.Errorf("after its end: %+v, %v", got, err)
	}
	if _, err := w.root.Exec(ctx, sb.ID, wire.Exec{Cmd: wire.Command{Argv: []string{"true"}}}); !isCode(err, sandbox.CodeConflict) {
		t.Errorf("exec after the end: %v", err)
	}
	ids = nil
	for s, err := range w.root.Sandboxes(ctx, client.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	if fmt.Sprint(ids) != fmt.Sprint([]string{other.ID, sb.ID}) {
		t.Errorf("all, the newest first: %v", ids)
	}
	ids = nil
	for s, err := range w.root.Sandboxes(ctx, client.Filter{Live: true}) {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	if fmt.Sprint(ids) != fmt.Sprint([]string{other.ID}) {
		t.Errorf("live: %v", ids)
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	for _, tc := range []struct {
		method, path, body string
		status             int
		code               sandbox.Code
		part               string
	}{
		{"POST", "/v1/sandboxes", `{"template":"nope"}`, 404, sandbox.CodeNotFound, "nope"},
		{"POST", "/v1/sandboxes", `{"runtime":"nope"}`, 404, sandbox.CodeNotFound, "nope"},
		{"POST", "/v1/sandboxes", `{"runtime":"microvm"}`, 501, sandbox.CodeUnsupported, "microvm"},
		{"POST", "/v1/sandboxes", `{"resources":{"memory_mib":1}}`, 400, sandbox.CodeInvalid, "memory"},
		{"POST", "/v1/sandboxes", `{"resources":{"cpus":"two"}}`, 400, sandbox.CodeInvalid, "cpus"},
		{"POST", "/v1/sandboxes", `{"bogus":1}`, 400, sandbox.CodeInvalid, "bogus"},
		{"POST", "/v1/sandboxes", `{"timeout":-1}`, 400, sandbox.CodeInvalid, "timeout"},
		{"POST", "/v1/sandboxes", `{"network":{"mode":"open"}}`, 400, sandbox.CodeInvalid, "mode"},
		{"POST", "/v1/sandboxes", `{"network":{"allow":[{}]}}`, 400, sandbox.CodeInvalid, "exactly one"},
		{"POST", "/v1/sandboxes", `{"network":{"allow":[{"cidr":"10.0.0.0/99"}]}}`, 400, sandbox.CodeInvalid, "prefix"},
		{"POST", "/v1/sandboxes", `{"hostname":"` + strings.Repeat("x", 100) + `"}`, 400, sandbox.CodeInvalid, "hostname"},
		{"POST", "/v1/sandboxes", `{"env":{"A=B":"c"}}`, 400, sandbox.CodeInvalid, "A=B"},
		{"POST", "/v1/sandboxes", `{"x":"` + strings.Repeat("y", 2<<20) + `"}`, 413, sandbox.CodeTooLarge, ""},
		{"POST", "/v1/sandboxes", `not json`, 400, sandbox.CodeInvalid, ""},
		{"POST", "/v1/sandboxes", ``, 400, sandbox.CodeInvalid, "body"},
		{"GET", "/v1/sandboxes/UPPER", ``, 400, sandbox.CodeInvalid, "not a sandbox id"},
		{"GET", "/v1/sandboxes/sbxnone", ``, 404, sandbox.CodeNotFound, "sbxnone"},
		{"DELETE", "/v1/sandboxes/sbxnone", ``, 404, sandbox.CodeNotFound, "sbxnone"},
		{"GET", "/v1/sandboxes?limit=0", ``, 400, sandbox.CodeInvalid, "limit"},
		{"GET", "/v1/sandboxes?bogus=1", ``, 400, sandbox.CodeInvalid, "bogus"},
		{"GET", "/v1/sandboxes?state=asleep", ``, 400, sandbox.CodeInvalid, "state"},
		{"GET", "/v1/sandboxes?metadata=%25zz", ``, 400, sandbox.CodeInvalid, "metadata"},
		{"GET", "/v1/sandboxes?token=%00", ``, 400, sandbox.CodeInvalid, ""},
		{"GET", "/v1/sandboxes/sbxnone/files", ``, 400, sandbox.CodeInvalid, "path"},
		{"GET", "/v1/sandboxes/sbxnone/files?path=/x", ``, 404, sandbox.CodeNotFound, ""},
		{"GET", "/v1/sandboxes/sbxnone/logs?follow=maybe", ``, 400, sandbox.CodeInvalid, "follow"},
		{"GET", "/v1/sandboxes/sbxnone/tunnel?port=0", ``, 400, sandbox.CodeInvalid, "port"},
		{"GET", "/v1/sandboxes/sbxnone/tunnel?port=80", ``, 400, sandbox.CodeInvalid, "Upgrade"},
		{"GET", "/v1/sandboxes/sbxnone/ports/99999/", ``, 400, sandbox.CodeInvalid, "port"},
		{"GET", "/v1/sandboxes/sbxnone/ports/80/", ``, 404, sandbox.CodeNotFound, ""},
		{"POST", "/v1/sandboxes/sbxnone/exec", `{"cmd":[]}`, 400, sandbox.CodeInvalid, "cmd"},
		{"POST", "/v1/sandboxes/sbxnone/exec", `{"cmd":7}`, 400, sandbox.CodeInvalid, "list of strings"},
		{"POST", "/v1/sandboxes/sbxnone/exec", `{"cmd":"x","stdin":"a","stdin_base64":"YQ=="}`, 400, sandbox.CodeInvalid, "stdin"},
		{"POST", "/v1/sandboxes/sbxnone/exec", `{"cmd":"x"}`, 404, sandbox.CodeNotFound, ""},
		{"GET", "/v1/events?after=-7", ``, 400, sandbox.CodeInvalid, "seq"},
		{"GET", "/v1/events?sandbox=sbxnone", ``, 404, sandbox.CodeNotFound, ""},
		{"GET", "/v1/templates/none", ``, 404, sandbox.CodeNotFound, "none"},
		{"DELETE", "/v1/keys/none", ``, 404, sandbox.CodeNotFound, ""},
		{"GET", "/v1/nothing", ``, 404, sandbox.CodeNotFound, "no route"},
		{"PATCH", "/v1/sandboxes", ``, 404, sandbox.CodeNotFound, "no route"},
		{"GET", "/v1/", ``, 404, sandbox.CodeNotFound, "no route"},
	} {
		name := tc.method + " " + tc.path + " " + tc.body
		t.Run(name[:min(len(name), 70)], func(t *testing.T) {
			res, data := w.raw(t, tc.method, "unix:"+tc.path, "", tc.body, "Content-Type", "application/json")
			wantError(t, res, data, tc.status, tc.code, tc.part)
		})
	}
}

func TestKeysAndTenants(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	res, data := w.raw(t, "GET", "/v1/sandboxes", "", "")
	wantError(t, res, data, 401, sandbox.CodeUnauthenticated, "API key")
	for _, bad := range []string{"x", "e2b_" + strings.Repeat("0", 40), "e2b_" + strings.Repeat("z", 40)} {
		res, data = w.raw(t, "GET", "/v1/sandboxes", bad, "")
		wantError(t, res, data, 401, sandbox.CodeUnauthenticated, "")
	}
	for _, open := range []string{"/healthz", "/readyz"} {
		if res, data := w.raw(t, "GET", open, "", ""); res.StatusCode != 200 {
			t.Errorf("%s: %s %s", open, res.Status, data)
		}
	}
	for _, closed := range []string{"/metrics", "/v1/openapi.json", "/v1/version", "/v1/nothing"} {
		res, data := w.raw(t, "GET", closed, "", "")
		wantError(t, res, data, 401, sandbox.CodeUnauthenticated, "")
	}

	// Two tenants, whose keys root makes.
	key := func(tenant string) (string, wire.Key) {
		k, err := w.client(t, w.unix, client.Options{Tenant: tenant}).CreateKey(ctx, "test")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(k.Key, "e2b_") || len(k.Key) != 44 || k.Tenant != tenant {
			t.Fatalf("key: %+v", k)
		}
		return k.Key, k
	}
	keyA, _ := key("default")
	keyB, recB := key("other")
	a := w.client(t, w.tcp, client.Options{APIKey: keyA})
	b := w.client(t, w.tcp, client.Options{APIKey: keyB, Tenant: "default"}) // the header means nothing on TCP
	sb, err := a.CreateSandbox(ctx, wire.CreateSandbox{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Sandbox(ctx, sb.ID); !isCode(err, sandbox.CodeNotFound) {
		t.Errorf("another tenant sees it: %v", err)
	}
	for name, call := range map[string]func() error{
		"kill":    func() error { return b.Kill(ctx, sb.ID) },
		"exec":    func() error { _, err := b.Exec(ctx, sb.ID, wire.Exec{Cmd: wire.Command{Shell: "true"}}); return err },
		"start":   func() error { _, err := b.Start(ctx, sb.ID, client.Command{Args: []string{"true"}}); return err },
		"files":   func() error { _, _, err := b.ReadFile(ctx, sb.ID, "/etc/passwd", ""); return err },
		"write":   func() error { return b.WriteFile(ctx, sb.ID, "/tmp/x", "", strings.NewReader("x"), 1, 0) },
		"tar":     func() error { _, err := b.ReadTar(ctx, sb.ID, "/etc", ""); return err },
		"logs":    func() error { _, err := b.Logs(ctx, sb.ID, false); return err },
		"stats":   func() error { _, err := b.Stats(ctx, sb.ID); return err },
		"tunnel":  func() error { _, err := b.Tunnel(ctx, sb.ID, 80); return err },
		"timeout": func() error { _, err := b.SetTimeout(ctx, sb.ID, time.Hour); return err },
		"network": func() error { _, err := b.SetNetwork(ctx, sb.ID, wire.Network{Mode: "none"}); return err },
	} {
		if err := call(); !isCode(err, sandbox.CodeNotFound) {
			t.Errorf("%s by another tenant: %v", name, err)
		}
	}
	for s := range b.Sandboxes(ctx, client.Filter{}) {
		t.Errorf("another tenant lists %s", s.ID)
	}
	if ks, err := b.Keys(ctx); err != nil || len(ks) != 1 || ks[0].Key != "" || ks[0].ID != recB.ID {
		t.Errorf("keys: %+v, %v", ks, err)
	}
	if res, _ := w.raw(t, "GET", "/v1/sandboxes/"+sb.ID, "", "", "Authorization", "Bearer "+keyA); res.StatusCode != 200 {
		t.Errorf("bearer: %s", res.Status)
	}
	if err := b.RemoveKey(ctx, recB.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Keys(ctx); !isCode(err, sandbox.CodeUnauthenticated) {
		t.Errorf("a revoked key: %v", err)
	}
	res, data = w.raw(t, "GET", "unix:/v1/sandboxes", "", "", "X-Warren-Tenant", "../etc")
	wantError(t, res, data, 400, sandbox.CodeInvalid, "tenant")
	if log := w.log.String(); strings.Contains(log, keyA) || strings.Contains(log, sb.TrafficToken) || strings.Contains(log, sb.ID) {
		t.Error("the log holds a key, a token or an id of a path")
	}
}

func TestExec(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	id := w.create(t, wire.CreateSandbox{}).ID
	run := func(e wire.Exec) wire.ExecResult {
		t.Helper()
		r, err := w.root.Exec(ctx, id, e)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	sh := func(s string) wire.Command { return wire.Command{Shell: s} }
	r := run(wire.Exec{Cmd: sh("cat; echo $A; pwd; echo err >&2; exit 7"), Stdin: "in\n", Env: map[string]string{"A": "b"}, Cwd: "/"})
	if r.ExitCode != 7 || string(r.OutBytes()) != "in\nb\n/\n" || string(r.ErrBytes()) != "err\n" || r.Signal != "" || r.Truncated {
		t.Errorf("%+v", r)
	}
	r = run(wire.Exec{Cmd: wire.Command{Argv: []string{"printf", `\377\376`}}})
	if r.Stdout != nil || !bytes.Equal(r.StdoutBase64, []byte{0xff, 0xfe}) {
		t.Errorf("binary: %+v", r)
	}
	r = run(wire.Exec{Cmd: sh("cat"), StdinBase64: []byte{0, 0xff}})
	if !bytes.Equal(r.OutBytes(), []byte{0, 0xff}) {
		t.Errorf("binary input: %+v", r)
	}
	r = run(wire.Exec{Cmd: sh("kill -9 $$")})
	if r.ExitCode != 137 || r.Signal != "SIGKILL" || r.OOM || r.TimedOut {
		t.Errorf("killed: %+v", r)
	}
	r = run(wire.Exec{Cmd: sh("head -c 5000 /dev/zero"), MaxOutput: 1000})
	if len(r.OutBytes()) != 1000 || !r.Truncated {
		t.Errorf("truncated: %d bytes, %v", len(r.OutBytes()), r.Truncated)
	}
	r = run(wire.Exec{Cmd: sh("echo before; sleep 60"), Timeout: 0.3})
	if !r.TimedOut || r.ExitCode != 124 || string(r.OutBytes()) != "before\n" {
		t.Errorf("timed out: %+v", r)
	}
	_, err := w.root.Exec(ctx, id, wire.Exec{Cmd: wire.Command{Argv: []string{"no-such-program"}}})
	if !isCode(err, sandbox.CodeInvalid) && !isCode(err, sandbox.CodeNotFound) {
		t.Errorf("no program: %v", err)
	}
	if _, err := w.root.Exec(ctx, id, wire.Exec{Cmd: sh("true"), User: "nobody-here"}); !isCode(err, sandbox.CodeInvalid) {
		t.Errorf("no user: %v", err)
	}

	// A client that goes away takes the command with it.
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(dir, "pid")
	gone, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	go func() {
		for gone.Err() == nil {
			if _, err := os.Stat(pidFile); err == nil {
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	if _, err := w.root.Exec(gone, id, wire.Exec{Cmd: sh("sleep 1000 & echo $! > " + pidFile + ".tmp; mv " + pidFile + ".tmp " + pidFile + "; wait")}); !isCode(err, sandbox.CodeCanceled) {
		t.Errorf("canceled: %v", err)
	}
	pid, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the command's end", func() bool {
		data, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/stat")
		return err != nil || bytes.Contains(data, []byte(") Z "))
	})
}

func waitFor(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 1000 {
		if f() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s did not come", what)
}

// Streamed commands through the agent's own interface, over both ways in.
func TestStart(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	id := w.create(t, wire.CreateSandbox{}).ID
	k, err := w.root.CreateKey(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	input := make([]byte, 3<<20)
	rand.Read(input)
	for name, c := range map[string]*client.Client{"unix": w.root, "tcp": w.client(t, w.tcp, client.Options{APIKey: k.Key})} {
		t.Run(name, func(t *testing.T) {
			var out, errs bytes.Buffer
			run, err := c.Start(ctx, id, client.Command{
				Args: []string{"sh", "-c", "cat; echo done >&2; exit 5"}, Stdin: bytes.NewReader(input), Stdout: &out, Stderr: &errs,
			})
			if err != nil {
				t.Fatal(err)
			}
			end, err := run.Wait(ctx)
			if err != nil || end.Code != 5 || errs.String() != "done\n" || !bytes.Equal(out.Bytes(), input) {
				t.Fatalf("%+v, %v, %d bytes, %q", end, err, out.Len(), errs.String())
			}

			out.Reset()
			run, err = c.Start(ctx, id, client.Command{Args: []string{"sh", "-c", "tty; stty size; read x; echo got $x"}, TTY: &client.Size{Cols: 91, Rows: 17}, Stdin: strings.NewReader("word\n"), Stdout: &out})
			if err != nil {
				t.Fatal(err)
			}
			if end, err := run.Wait(ctx); err != nil || end.Code != 0 || !strings.Contains(out.String(), "17 91") || !strings.Contains(out.String(), "got word") {
				t.Fatalf("terminal: %+v, %v, %q", end, err, out.String())
			}

			run, err = c.Start(ctx, id, client.Command{Args: []string{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			if err := run.Signal(ctx, 15); err != nil {
				t.Fatal(err)
			}
			if end, err := run.Wait(ctx); err != nil || end.Code != 143 || end.Signal != "SIGTERM" {
				t.Fatalf("signal: %+v, %v", end, err)
			}
		})
	}
	for _, private := range []string{"/init", "/tunnel?port=1", "/process.Process/a/b", "/process.Process/", "/freeze"} {
		res, data := w.raw(t, "POST", "unix:/v1/sandboxes/"+id+"/agent"+private, "", "{}")
		if res.StatusCode == 301 || res.StatusCode == 307 {
			continue // the mux made it clean
		}
		wantError(t, res, data, 404, sandbox.CodeNotFound, "")
	}
	if res, _ := w.raw(t, "GET", "unix:/v1/sandboxes/"+id+"/agent/health", "", "", "X-Access-Token", "wrong"); res.StatusCode != 204 {
		t.Errorf("health: %s", res.Status)
	}
}

func TestFiles(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	id := w.create(t, wire.CreateSandbox{}).ID
	dir := t.TempDir()
	for _, n := range []int{0, 1, 64<<10 + 1, 5 << 20} {
		data := make([]byte, n)
		rand.Read(data)
		name := filepath.Join(dir, "new", fmt.Sprint(n))
		for _, size := range []int64{int64(n), -1} {
			if err := w.root.WriteFile(ctx, id, name, "", bytes.NewReader(data), size, 0o750); err != nil {
				t.Fatalf("%d bytes: %v", n, err)
			}
			r, got, err := w.root.ReadFile(ctx, id, name, "")
			if err != nil {
				t.Fatal(err)
			}
			back, err := io.ReadAll(r)
			r.Close()
			if err != nil || got != int64(n) || !bytes.Equal(back, data) {
				t.Fatalf("%d bytes: size %d, %d came back, %v", n, got, len(back), err)
			}
		}
		if st, err := os.Stat(name); err != nil || st.Mode().Perm() != 0o750 {
			t.Errorf("mode: %v, %v", st.Mode(), err)
		}
	}
	if _, _, err := w.root.ReadFile(ctx, id, filepath.Join(dir, "none"), ""); !isCode(err, sandbox.CodeNotFound) {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, _, err := w.root.ReadFile(ctx, id, dir, ""); !isCode(err, sandbox.CodeInvalid) {
		t.Errorf("a directory: %v", err)
	}
	if _, _, err := w.root.ReadFile(ctx, id, "x", "nobody-here"); !isCode(err, sandbox.CodeInvalid) {
		t.Errorf("a user that is not there: %v", err)
	}
	res, data := w.raw(t, "PUT", "unix:/v1/sandboxes/"+id+"/files?path=/tmp/x&mode=7777", "", "x")
	wantError(t, res, data, 400, sandbox.CodeInvalid, "mode")

	// A body that breaks off leaves no half file.
	name := filepath.Join(dir, "half")
	broken := io.MultiReader(strings.NewReader("some"), errReader{})
	if err := w.root.WriteFile(ctx, id, name, "", broken, 100, 0); err == nil {
		t.Error("a broken upload succeeded")
	}
	if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a half file is there: %v", err)
	}

	src := filepath.Join(dir, "new")
	r, err := w.root.ReadTar(ctx, id, src, "")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := w.root.WriteTar(ctx, id, filepath.Join(dir, "copy"), "", r); err != nil {
		t.Fatal(err)
	}
	a, _ := os.ReadFile(filepath.Join(src, "65537"))
	b, err := os.ReadFile(filepath.Join(dir, "copy", "new", "65537"))
	if err != nil || !bytes.Equal(a, b) {
		t.Errorf("through tar: %d and %d bytes, %v", len(a), len(b), err)
	}
	if err := w.root.WriteTar(ctx, id, filepath.Join(dir, "bad"), "", strings.NewReader(strings.Repeat("no tar", 200))); !isCode(err, sandbox.CodeInvalid) {
		t.Errorf("no archive: %v", err)
	}
	res, data = w.raw(t, "PUT", "unix:/v1/sandboxes/"+id+"/tar?path="+dir+"&max_entries=x", "", "x")
	wantError(t, res, data, 400, sandbox.CodeInvalid, "max_entries")
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("the disk broke") }

func TestPorts(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	sb := w.create(t, wire.CreateSandbox{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(rw, "%s %s %s key=%q", r.Method, r.RequestURI, r.Header.Get("X-Forwarded-Prefix"), r.Header.Get("X-Api-Key"))
	})}
	go srv.Serve(l)
	defer srv.Close()
	port := l.Addr().(*net.TCPAddr).Port
	k, err := w.root.CreateKey(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	prefix := fmt.Sprintf("/v1/sandboxes/%s/ports/%d", sb.ID, port)
	res, data := w.raw(t, "PUT", prefix+"/a%2Fb//c/../d?x=1;2", k.Key, "body")
	if want := `PUT /a%2Fb//c/../d?x=1;2 ` + prefix + ` key=""`; res.StatusCode != 200 || string(data) != want {
		t.Errorf("%s %s, want %s", res.Status, data, want)
	}
	if _, data := w.raw(t, "GET", "unix:"+prefix, "", ""); !strings.HasPrefix(string(data), "GET / ") {
		t.Errorf("without a path: %s", data)
	}
	host := fmt.Sprintf("%d-%s.box.test", port, sb.ID)
	if res, data := w.raw(t, "GET", "/h", k.Key, "", "Host", host); res.StatusCode != 200 || !strings.HasPrefix(string(data), "GET /h ") {
		t.Errorf("by host name: %s %s", res.Status, data)
	}
	if res, data := w.raw(t, "GET", "/h", "", "", "Host", host, "e2b-traffic-access-token", sb.TrafficToken); res.StatusCode != 200 {
		t.Errorf("by traffic token: %s %s", res.Status, data)
	}
	if res, data := w.raw(t, "GET", "/h", "", "", "Host", host); res.StatusCode != 403 {
		t.Errorf("without anything: %s %s", res.Status, data)
	}
	if res, data := w.raw(t, "GET", "unix:/h", "", "", "Host", host); res.StatusCode != 200 {
		t.Errorf("by the socket: %s %s", res.Status, data)
	}

	// A raw tunnel carries bytes both ways, and each side's end by itself.
	echo, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				all, _ := io.ReadAll(c) // until the client has ended its side
				c.Write(all)
			}()
		}
	}()
	for name, c := range map[string]*client.Client{"unix": w.root, "tcp": w.client(t, w.tcp, client.Options{APIKey: k.Key})} {
		conn, err := c.Tunnel(ctx, sb.ID, echo.Addr().(*net.TCPAddr).Port)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		msg := make([]byte, 1<<20)
		rand.Read(msg)
		go func() {
			conn.Write(msg)
			conn.(interface{ CloseWrite() error }).CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		conn.Close()
		if err != nil || !bytes.Equal(got, msg) {
			t.Errorf("%s: %d bytes came back, %v", name, len(got), err)
		}
	}
	echoPort := echo.Addr().(*net.TCPAddr).Port
	conn, err := w.root.Tunnel(ctx, sb.ID, echoPort)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	echo.Close()
	if _, err := w.root.Tunnel(ctx, sb.ID, echoPort); !isCode(err, sandbox.CodeUnavailable) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := w.root.Tunnel(ctx, sb.ID, sandbox.AgentPort); !isCode(err, sandbox.CodeInvalid) {
		t.Errorf("the agent's port: %v", err)
	}
}

func TestEvents(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	first := w.create(t, wire.CreateSandbox{})
	w.create(t, wire.CreateSandbox{})
	w.rt.box(first.ID).end(sandbox.Exit{Reason: sandbox.ReasonOOM, Detail: "too much", At: time.Now()})

	stop := errors.New("enough")
	var got []string
	var seqs []int64
	err := w.root.Events(ctx, first.ID, 0, func(e client.Event) error {
		got = append(got, string(e.To))
		seqs = append(seqs, e.Seq)
		if e.To.Ended() {
			if e.Reason != sandbox.ReasonOOM {
				t.Errorf("%+v", e)
			}
			return stop
		}
		return nil
	})
	if err != stop || fmt.Sprint(got) != "[creating running failed]" {
		t.Fatalf("%v, %v", got, err)
	}
	// It goes on where it was.
	got = nil
	if err := w.root.Events(ctx, first.ID, seqs[1], func(e client.Event) error { got = append(got, string(e.To)); return stop }); err != stop || fmt.Sprint(got) != "[failed]" {
		t.Errorf("resumed: %v, %v", got, err)
	}

	// As the wire has it: ids, types, heartbeats.
	res, body := w.stream(t, ctx, "/v1/events", "Last-Event-ID", fmt.Sprint(seqs[0]))
	defer body.Close()
	if ct := res.Header.Get("Content-Type"); ct != "text/event-stream" {
		t.Errorf("content type %q", ct)
	}
	var id, kind, beats int
	sc := bufio.NewScanner(body)
	for sc.Scan() && (id < 2 || kind < 2 || beats < 2) {
		switch line := sc.Text(); {
		case strings.HasPrefix(line, "id: "):
			id++
		case strings.HasPrefix(line, "event: state"):
			kind++
		case line == ":":
			beats++
		}
	}
	if sc.Err() != nil || beats < 2 {
		t.Errorf("ids %d, types %d, heartbeats %d: %v", id, kind, beats, sc.Err())
	}

	// The sandbox's end is counted, by the API's own reading of the events.
	waitFor(t, "the metric", func() bool {
		_, data := w.raw(t, "GET", "unix:/metrics", "", "")
		return bytes.Contains(data, []byte(`warren_events_total{reason="oom_killed",to="failed",type="state"} 1`))
	})
}

// stream opens an answer that does not end, on the unix socket.
func (w *world) stream(t *testing.T, ctx context.Context, path string, headers ...string) (*http.Response, io.ReadCloser) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://warren"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	sock := strings.TrimPrefix(w.unix, "unix://")
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", sock)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	res, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	return res, res.Body
}
