package e2e

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/prove"
)

// TestProve measures the tiny template, of which most of the work needs what
// it has not: those are rows, and none of them a failure of the run.
func TestProve(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	page := filepath.Join(l.dir, "page.html")
	raw := filepath.Join(l.dir, "raw.json")
	for name := range l.abilities(t) {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, l.bin, "prove", "--quick", "--json", "--template", "tiny", "--runtime", name, "--html", page, "-o", raw)
			cmd.Env = append(os.Environ(), "WARREN_HOST=unix://"+l.socket, "HOME="+l.dir)
			var errs strings.Builder
			cmd.Stderr = &errs
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("prove: %v\n%s", err, errs.String())
			}
			var r prove.Report
			if err := json.Unmarshal(out, &r); err != nil {
				t.Fatalf("%v: %.300s", err, out)
			}
			checkProved(t, &r, name)
			if kept, err := prove.Load(raw); err != nil || kept.At != r.At {
				t.Errorf("the raw report is %+v, %v", kept, err)
			}
			if data, err := os.ReadFile(page); err != nil || !strings.Contains(string(data), "</html>") {
				t.Errorf("the page is %.100q, %v", data, err)
			}
			if left := l.list(t, client.Filter{Live: true}); len(left) > 0 {
				t.Errorf("it left %d sandboxes", len(left))
			}
		})
	}
	t.Run("interrupted", func(t *testing.T) {
		cmd := exec.Command(l.bin, "prove", "--quick", "--template", "tiny")
		cmd.Env = append(os.Environ(), "WARREN_HOST=unix://"+l.socket, "HOME="+l.dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if !eventually(func() bool { return len(l.list(t, client.Filter{Live: true})) > 0 }, longest) {
			t.Error("it made no sandbox")
		}
		cmd.Process.Signal(syscall.SIGINT)
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 130 {
			t.Errorf("it exited with %d, want 130", code)
		}
		if left := l.list(t, client.Filter{Live: true}); len(left) > 0 {
			t.Errorf("it left %d sandboxes", len(left))
		}
	})
	t.Run("advise", func(t *testing.T) {
		res := l.cli(t, "advise", "--json", "--report", raw, "--emits", "any", "--trust", "strangers", "--state", "none", "--where", "cloud", "--abuse", "limits")
		var ad prove.Advice
		if err := json.Unmarshal(res.stdout, &ad); err != nil || res.code != 0 {
			t.Fatalf("exit %d, %v: %s%s", res.code, err, res.stdout, res.stderr)
		}
		if _, can := l.abilities(t)["gvisor"]; can && ad.Runtime != "gvisor" {
			t.Errorf("it advises %q: %v", ad.Runtime, ad.Reasons)
		}
	})
}

// checkProved holds a report against what both runtimes are known to do. What
// depends on the host is not looked at.
func checkProved(t *testing.T, r *prove.Report, name string) {
	t.Helper()
	rt, ok := r.Runtime(name)
	if !ok || len(r.Runtimes) != 1 {
		t.Fatalf("the report is of %d runtimes", len(r.Runtimes))
	}
	if rt.Error != "" {
		t.Errorf("it could not be measured whole: %s", rt.Error)
	}
	kernel, nnp := prove.Yes, prove.Info
	if name == "container" {
		kernel, nnp = prove.No, prove.Yes
	}
	for id, want := range map[string]prove.Verdict{
		"kernel": kernel, "pids": prove.Yes, "nnp": nnp, "caps": prove.Yes, "hostloop": prove.Yes, "gateway": prove.Yes, "other": prove.Yes, "metadata": prove.Yes,
		"shell": prove.Yes, "c": prove.Skip, "numpy": prove.Skip, "browser": prove.Skip,
	} {
		if row, ok := rt.Row(id); !ok || row.Verdict != want || row.Detail == "" {
			t.Errorf("row %s is %+v, want %s", id, row, want)
		}
	}
	for _, id := range []string{"start_cold", "exec"} {
		if g, ok := rt.Timing(id); !ok || g.N == 0 || g.P50 <= 0 || g.P99 < g.P50 || g.Failures > 0 {
			t.Errorf("%s is %+v", id, g)
		}
	}
	if rt.Memory == nil || rt.Memory.PSS <= 1<<20 || rt.Memory.Processes == 0 {
		t.Errorf("memory is %+v", rt.Memory)
	}
	want := map[string]prove.Verdict{"suspend": prove.Yes, "fork.urandom": prove.Yes, "fork.hostname": prove.Yes, "fork.clock": prove.Yes, "fork.secrets": prove.Yes, "fork.chain": prove.Yes, "fork.suspended": prove.Yes, "fork.machineid": prove.Yes, "fork.generation": prove.Yes}
	full := prove.No
	if rt.Claims.FullCapture {
		full = prove.Yes
	}
	if rt.Claims.DiskCapture {
		want["capture_disk"] = prove.Yes
	}
	// What busybox has a witness for is kept by a capture of memory, and the
	// same rows are measured as lost by one of the disk.
	for _, id := range []string{"capture_full", "hibernate", "fork.process", "fork.files", "fork.timers", "fork.terminal", "fork.pipes", "fork.listen", "fork.conns", "fork.asleep", "hibernate.conns"} {
		want[id] = full
	}
	if !rt.Claims.DiskCapture && !rt.Claims.FullCapture {
		want = nil
	}
	for id, v := range want {
		if row, ok := rt.Row(id); !ok || row.Verdict != v {
			t.Errorf("row %s is %+v, want %s", id, row, v)
		}
	}
	var verdicts int
	for _, row := range rt.Captures {
		if row.Verdict == prove.Yes || row.Verdict == prove.No {
			verdicts++
		}
	}
	if verdicts == 0 {
		t.Errorf("nothing was measured of captures: %+v", rt.Captures)
	}
}
