package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// answering runs a command line against a daemon of which every call is
// answered by h, and gives what it printed and its exit code.
func answering(t *testing.T, h http.HandlerFunc, args ...string) (out, errs string, code int) {
	t.Helper()
	s := httptest.NewServer(h)
	defer s.Close()
	in, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	var o, e bytes.Buffer
	a := &app{in: in, out: &o, err: &e, getenv: func(k string) string {
		if k == "WARREN_HOST" {
			return s.URL
		}
		return ""
	}}
	code = a.main(t.Context(), args)
	return o.String(), e.String(), code
}

func answerJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v)
}

func TestDrawTree(t *testing.T) {
	now := time.Unix(1e9, 0)
	at := func(d time.Duration) time.Time { return now.Add(-d) }
	nodes := []wire.TreeNode{
		{Kind: "sandbox", ID: "sbxroot", State: sandbox.Running, CreatedAt: at(90 * time.Minute), DiskBytes: 3 << 20, MemoryBytes: 200 << 20},
		{Kind: "sandbox", ID: "sbxone", Parent: "sbxroot", State: sandbox.Running, CreatedAt: at(40 * time.Second), DiskBytes: 4096, MemoryBytes: 35 << 20},
		{Kind: "sandbox", ID: "sbxdeep", Parent: "sbxone", State: sandbox.Hibernated, CreatedAt: at(2 * time.Second), DiskBytes: 36 << 20},
		{Kind: "snapshot", ID: "snpa", Name: "ready\x1b[31m", SnapshotKind: sandbox.SnapshotFull, Parent: "sbxroot", CreatedAt: at(time.Minute), DiskBytes: 1 << 30},
		{Kind: "sandbox", ID: "sbxtwo", Parent: "snpa", State: sandbox.Suspended, CreatedAt: at(5 * time.Second)},
		{Kind: "sandbox", ID: "sbxlast", Parent: "sbxroot", State: sandbox.Killed, CreatedAt: at(-time.Second)},
		{Kind: "snapshot", ID: "snpb", SnapshotKind: sandbox.SnapshotDisk, CreatedAt: at(50 * time.Hour)},
	}
	var b bytes.Buffer
	if err := (&app{getenv: func(string) string { return "" }}).drawTree(&b, nodes, now); err != nil {
		t.Fatal(err)
	}
	want := strings.TrimPrefix(`
TREE                     STATE       AGE     DISK     MEMORY
sbxroot                  running     1h30m   3.0 MiB  200 MiB
├─ sbxone                running     40s     4.0 KiB  35 MiB
│  └─ sbxdeep            hibernated  2s      36 MiB   -
├─ ready?[31m (snpa)     full        1m00s   1.0 GiB  -
│  └─ sbxtwo             suspended   5s      0 B      -
└─ sbxlast               killed      0s      0 B      -
snpb                     disk        2d02h   0 B      -
`, "\n")
	if d := cmp.Diff(strings.Fields(want), strings.Fields(b.String())); d != "" {
		t.Error(d)
	}
	for i, line := range strings.Split(strings.TrimSpace(b.String()), "\n")[1:] {
		if w := strings.Split(want, "\n")[i+1]; !strings.HasPrefix(line, w[:strings.IndexAny(w, "rs")]) {
			t.Errorf("%q is not drawn as %q", line, w)
		}
	}
}

func TestForkOutput(t *testing.T) {
	var asked wire.Fork
	daemon := func(results ...wire.ForkResult) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method != "POST" || r.URL.Path != "/v1/sandboxes/sbxone/fork" {
				t.Errorf("%s %s", r.Method, r.URL)
			}
			asked = wire.Fork{}
			data, _ := io.ReadAll(r.Body)
			if err := json.Unmarshal(data, &asked); err != nil {
				t.Errorf("%v: %s", err, data)
			}
			answerJSON(w, 200, wire.ForkList{Kind: sandbox.SnapshotFull, Forks: results})
		}
	}
	child := func(id string) wire.ForkResult { return wire.ForkResult{Sandbox: &wire.Sandbox{ID: id}} }
	full := wire.ForkResult{Error: &wire.Error{Code: sandbox.CodeNoCapacity, Message: "the host is full"}}

	out, errs, code := answering(t, daemon(child("sbxa"), child("sbxb")), "fork", "-n", "2", "--env", "A=b", "--label", "k=v", "--kind", "full", "--timeout", "90s", "sbxone")
	if out != "sbxa\nsbxb\n" || errs != "" || code != 0 {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if d := cmp.Diff(wire.Fork{Count: 2, Kind: sandbox.SnapshotFull, Env: map[string]string{"A": "b"}, Metadata: map[string]string{"k": "v"}, Timeout: 90}, asked); d != "" {
		t.Error(d)
	}

	out, errs, code = answering(t, daemon(child("sbxa"), full, child("sbxc")), "fork", "-n", "3", "sbxone")
	if out != "sbxa\nsbxc\n" || !strings.Contains(errs, "the host is full") || code != exitFailure {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	if d := cmp.Diff(wire.Fork{Count: 3}, asked); d != "" {
		t.Error(d)
	}

	out, errs, code = answering(t, daemon(child("sbxa"), full), "--json", "fork", "sbxone")
	var got wire.ForkList
	if err := json.Unmarshal([]byte(out), &got); err != nil || len(got.Forks) != 2 || got.Forks[0].Sandbox.ID != "sbxa" || got.Forks[1].Error.Code != sandbox.CodeNoCapacity || got.Kind != sandbox.SnapshotFull || code != exitFailure {
		t.Errorf("%q, %q, %d: %v", out, errs, code, err)
	}
}

// each goes on behind an error, and tells all of them.
func TestEachOfSeveral(t *testing.T) {
	daemon := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/sandboxes/sbxbad/suspend" {
			answerJSON(w, http.StatusConflict, wire.Error{Code: sandbox.CodeConflict, Message: "sandbox sbxbad has ended"})
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}
	out, errs, code := answering(t, daemon, "suspend", "sbxa", "sbxbad", "sbxb")
	if out != "sbxa\nsbxb\n" || !strings.Contains(errs, "sbxbad has ended") || code != exitFailure {
		t.Errorf("%q, %q, %d", out, errs, code)
	}
	out, _, code = answering(t, daemon, "--json", "suspend", "sbxa", "sbxb")
	if out != `["sbxa","sbxb"]`+"\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
}

func TestCaptureUsage(t *testing.T) {
	refuse := func(_ http.ResponseWriter, r *http.Request) { t.Errorf("%s %s was asked", r.Method, r.URL) }
	for _, tc := range []struct{ line, part string }{
		{"suspend", "requires at least 1 arg"},
		{"fork", "accepts 1 arg"},
		{"fork -n 0 sbxone", "1 to 100"},
		{"fork -n 101 sbxone", "1 to 100"},
		{"fork --kind half sbxone", "full or disk"},
		{"fork --timeout soon sbxone", "not a time"},
		{"fork --label x sbxone", "KEY=VALUE"},
		{"snapshot create --kind half sbxone", "full or disk"},
		{"snapshot create", "accepts 1 arg"},
		{"snapshot rm", "requires at least 1 arg"},
		{"snapshot bogus", "unknown command"},
		{"tree a b", "at most 1 arg"},
		{"create --on-timeout explode", "kill or hibernate"},
		{"create --idle-timeout never", "not a time"},
		{"create --ephemeral-env =x", "NAME=VALUE"},
	} {
		_, errs, code := answering(t, refuse, strings.Fields(tc.line)...)
		if code != exitUsage || !strings.Contains(errs, tc.part) {
			t.Errorf("%s: exit code %d, %q, want %d and %q", tc.line, code, errs, exitUsage, tc.part)
		}
	}
}

func TestCreateFlagsOfCaptures(t *testing.T) {
	var asked map[string]any
	daemon := func(w http.ResponseWriter, r *http.Request) {
		asked = nil
		json.NewDecoder(r.Body).Decode(&asked)
		answerJSON(w, 201, wire.Sandbox{ID: "sbxnew"})
	}
	out, errs, code := answering(t, daemon, "create", "--snapshot", "ready", "--on-timeout", "hibernate", "--timeout", "1h", "--idle-timeout", "10m", "--env", "A=1", "--ephemeral-env", "KEY=x", "--ephemeral-env", "B=y")
	if out != "sbxnew\n" || code != 0 {
		t.Fatalf("%q, %q, %d", out, errs, code)
	}
	want := map[string]any{
		"snapshot": "ready", "on_timeout": "hibernate", "timeout": 3600., "idle_timeout": 600.,
		"env": map[string]any{"A": "1", "KEY": "x", "B": "y"}, "ephemeral_env": []any{"B", "KEY"},
	}
	if d := cmp.Diff(want, asked); d != "" {
		t.Error(d)
	}
}

func TestSnapshotList(t *testing.T) {
	daemon := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("token") == "" {
			answerJSON(w, 200, wire.SnapshotList{Snapshots: []wire.Snapshot{{ID: "snpa", Name: "ready", Kind: "full", Source: "sbxone", SizeBytes: 1 << 20, CreatedAt: time.Now()}}, NextToken: "t"})
			return
		}
		answerJSON(w, 200, wire.SnapshotList{Snapshots: []wire.Snapshot{{ID: "snpb", Kind: "disk", Source: "sbxtwo", CreatedAt: time.Now()}}})
	}
	if out, _, code := answering(t, daemon, "snapshot", "ls", "-q"); out != "snpa\nsnpb\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
	out, _, _ := answering(t, daemon, "snapshot", "ls")
	for _, part := range []string{"NAME", "ready", "full", "sbxone", "1.0 MiB", "snpb", "disk"} {
		if !strings.Contains(out, part) {
			t.Errorf("no %q in\n%s", part, out)
		}
	}
	// What the tab key offers goes by name where there is one.
	out, _, _ = answering(t, daemon, "__complete", "snapshot", "rm", "")
	if !strings.HasPrefix(out, "ready\tfull of sbxone\nsnpb\tdisk of sbxtwo\n") {
		t.Errorf("completion: %q", out)
	}
	if out, _, _ = answering(t, daemon, "__complete", "create", "--snapshot", ""); !strings.HasPrefix(out, "ready\t") {
		t.Errorf("completion of a flag: %q", out)
	}
}

func TestDescribeCaptures(t *testing.T) {
	now := time.Now()
	later := now.Add(90*time.Minute + 30*time.Second)
	sb := wire.Sandbox{
		ID: "sbxone", State: sandbox.Hibernated, Snapshot: "snpa", Parent: "sbxparent", OnTimeout: sandbox.OnTimeoutHibernate,
		IdleTimeout: 600, HibernatedAt: &now, ExpiresAt: &later, CreatedAt: now,
	}
	out, _, _ := answering(t, func(w http.ResponseWriter, r *http.Request) { answerJSON(w, 200, sb) }, "inspect", "sbxone")
	for name, part := range map[string]string{
		"snapshot": "snpa", "fork of": "sbxparent", "hibernated": "(now)", "idle": "hibernates after 10m00s", "sleeps in": "1h30m",
	} {
		if !strings.Contains(out, fmt.Sprintf("%-12s ", name)) || !strings.Contains(out, part) {
			t.Errorf("no %s with %q in\n%s", name, part, out)
		}
	}
}
