package prove

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
)

func TestPercentile(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for _, c := range []struct {
		in   []float64
		p    int
		want float64
	}{
		{nil, 50, 0}, {[]float64{7}, 50, 7}, {[]float64{7}, 99, 7}, {[]float64{1, 2}, 50, 1}, {[]float64{1, 2, 3}, 50, 2},
		{hundred, 50, 50}, {hundred, 99, 99}, {hundred[:20], 99, 20},
	} {
		if got := percentile(c.in, c.p); got != c.want {
			t.Errorf("p%d of %d samples = %g, want %g", c.p, len(c.in), got, c.want)
		}
	}
}

func TestTiming(t *testing.T) {
	var g Timing
	g.add(2*time.Millisecond, nil)
	g.add(0, errors.New("first"))
	g.add(time.Millisecond, nil)
	g.add(0, errors.New("second"))
	if g.N != 2 || g.Failures != 2 || g.P50 != 1 || g.P99 != 2 || g.Min != 1 || g.Max != 2 || g.Note != "first" {
		t.Errorf("%+v", g)
	}
}

// facts is what boundary.sh prints in a sandbox that gives nothing away.
const closed = `@@ uname
Linux 4.19.0-gvisor #1 SMP x86_64
@@ version
Linux version 4.19.0-gvisor
@@ pids
1 agent
77 sh
@@ mounts
none / 9p rw 0 0
none /proc proc rw 0 0
@@ status
CapEff:	00000000000000c0
NoNewPrivs:	1
Seccomp:	2
@@ uidmap
         0   16908288      65536
@@ nproc
1
@@ meminfo
MemTotal:         524288 kB
@@ dmesg
dmesg: read kernel buffer failed: Operation not permitted
@@ dmesgcode
1
@@ devices
@@ dmi
@@ writable
@@ hostname
x
@@ end
`

// TestBoundary judges what a probe told: from a sandbox that holds, and with
// one thing changed at a time.
func TestBoundary(t *testing.T) {
	h := Host{Local: true, Kernel: "6.1.0", CPUs: 8, MemoryMiB: 16000}
	sb := wire.Sandbox{Resources: wire.Resources{CPUs: 1, MemoryMiB: 512}}
	verdicts := func(out string, h Host) map[string]Row {
		m := map[string]Row{}
		for _, r := range judgeBoundary(sections(out), h, sb) {
			m[r.ID] = r
		}
		return m
	}
	for id, r := range verdicts(closed, h) {
		if want := Yes; id == "version" && r.Verdict != Info || id != "version" && r.Verdict != want {
			t.Errorf("%s is %s (%s), want %s", id, r.Verdict, r.Detail, want)
		}
	}
	for _, c := range []struct{ from, to, id, want, says string }{
		{"4.19.0-gvisor #1", "6.1.0 #1", "kernel", "no", "the host's"},
		{"1 agent", "1 agent\n" + strings.Repeat("9 x\n", 3) + "8 y", "pids", "yes", "6 seen"},
		{"1 agent", "1 systemd" + strings.Repeat("\n9 x", 60), "pids", "no", "systemd"},
		{"none / 9p rw", "overlay / overlay rw,lowerdir=/var/lib/warren/layers/a:/b,upperdir=/proc/self/fd/3", "mounts", "no", "/var/lib/warren/layers/a"},
		{"none / 9p rw", "/etc/secret / 9p rw", "mounts", "no", "/etc/secret"},
		{"none / 9p rw", "/sys/fs/cgroup / cgroup rw", "mounts", "yes", "2 mounts"},
		{"CapEff:\t00000000000000c0", "CapEff:\t0000000000200000", "caps", "info", "sys_admin"},
		{"NoNewPrivs:\t1", "NoNewPrivs:\t0", "nnp", "info", "sudo"},
		{"@@ nproc\n1", "@@ nproc\n8", "nproc", "no", "the host has 8"},
		{"524288 kB", "16384000 kB", "meminfo", "no", "16000 MiB"},
		{"@@ dmi\n", "@@ dmi\nMachine 9\n", "dmi", "no", "Machine 9"},
		{"@@ devices\n", "@@ devices\n/dev/kvm\n", "devices", "info", "/dev/kvm"},
		{"@@ dmesgcode\n1", "@@ dmesgcode\n0", "dmesg", "yes", "its own kernel"},
		{"@@ end\n", "", "probe", "no", "broke off"},
	} {
		if !strings.Contains(closed, c.from) {
			t.Fatalf("%q is not in the probe's output", c.from)
		}
		r := verdicts(strings.Replace(closed, c.from, c.to, 1), h)[c.id]
		if string(r.Verdict) != c.want || !strings.Contains(r.Detail, c.says) {
			t.Errorf("with %.40q: %s is %s (%s), want %s (%s)", c.to, c.id, r.Verdict, r.Detail, c.want, c.says)
		}
	}
	// Where it is the host's own kernel, the same facts weigh more.
	shared := strings.Replace(closed, "4.19.0-gvisor #1", "6.1.0 #1", 1)
	for _, c := range []struct{ from, to, id string }{
		{"@@ dmesgcode\n1", "@@ dmesgcode\n0", "dmesg"},
		{"Seccomp:\t2", "Seccomp:\t0", "seccomp"},
		{"16908288", "0", "uids"},
		{"CapEff:\t00000000000000c0", "CapEff:\t0000000000200000", "caps"},
		{"@@ writable\n", "@@ writable\n/proc/sysrq-trigger\n", "knobs"},
	} {
		if r := verdicts(strings.Replace(shared, c.from, c.to, 1), h)[c.id]; r.Verdict != No {
			t.Errorf("with the host's kernel and %q: %s is %s (%s)", c.to, c.id, r.Verdict, r.Detail)
		}
	}
	if r := verdicts(closed, Host{})["kernel"]; r.Verdict != Info {
		t.Errorf("of a host that is not known the kernel is %s", r.Verdict)
	}
	// Nothing at all was printed.
	for id, r := range verdicts("", h) {
		if r.Verdict == Yes && id != "knobs" && id != "devices" && id != "dmi" && id != "dmesg" {
			t.Errorf("of an empty probe %s is yes (%s)", id, r.Detail)
		}
	}
}

func FuzzBoundary(f *testing.F) {
	f.Add(closed)
	f.Add("@@ status\nCapEff:\tzz\n@@ pids\n\n@@ uidmap\n0")
	f.Fuzz(func(t *testing.T, out string) {
		for _, r := range judgeBoundary(sections(out), Host{Local: true, Kernel: "6.1.0"}, wire.Sandbox{}) {
			if r.ID == "" || r.Verdict == "" || len([]rune(r.Detail)) > maxLine+1 || strings.ContainsAny(r.Detail, "\n\x1b") {
				t.Errorf("%+v", r)
			}
		}
	})
}

func TestJudge(t *testing.T) {
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		res  wire.ExecResult
		want Verdict
		says string
	}{
		{wire.ExecResult{Stdout: text("a\nwell done\n")}, Yes, "well done"},
		{wire.ExecResult{ExitCode: exitSkip, Stdout: text("gcc is not in the template\n")}, Skip, "gcc is not in the template"},
		{wire.ExecResult{ExitCode: exitNo, Stdout: text("no /dev/fuse")}, No, "no /dev/fuse"},
		{wire.ExecResult{ExitCode: 1, Stderr: text("Traceback\nAssertionError\n")}, No, "AssertionError"},
		{wire.ExecResult{ExitCode: 1, Stdout: text("only here")}, No, "only here"},
		{wire.ExecResult{ExitCode: 3}, No, "exit code 3"},
		{wire.ExecResult{ExitCode: 137, Signal: "SIGKILL"}, No, "ended by SIGKILL"},
		{wire.ExecResult{TimedOut: true, Signal: "SIGKILL", ExitCode: 137}, No, "not done after 1m0s"},
		{wire.ExecResult{StdoutBase64: []byte("\x1b[31m\xffred")}, Yes, "?[31m?red"},
	} {
		var row Row
		judge(&row, c.res, time.Minute)
		if row.Verdict != c.want || row.Detail != c.says {
			t.Errorf("%+v: %s %q, want %s %q", c.res, row.Verdict, row.Detail, c.want, c.says)
		}
	}
	if got := tail(strings.Repeat("é", 5000)); len([]rune(got)) != maxTail+1 {
		t.Errorf("a tail of %d runes", len([]rune(got)))
	}
}

func TestBatteryIsWhole(t *testing.T) {
	ids := map[string]bool{installer: true}
	for _, w := range battery {
		if ids[w.id] {
			t.Errorf("%s is there twice", w.id)
		}
		ids[w.id] = true
		if s, err := script(w.id); err != nil || !strings.HasPrefix(s, prelude) {
			t.Errorf("%s: %v", w.id, err)
		}
	}
	files, err := fs.Glob(scripts, "battery/*.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if id := strings.TrimSuffix(filepath.Base(f), ".sh"); !ids[id] {
			t.Errorf("%s is run by nothing", f)
		}
	}
}

func TestPSS(t *testing.T) {
	const id = "sbx7k2m9q4x1v8n3p6tc"
	proc := t.TempDir()
	write := func(pid, cgroup, cmdline, smaps string) {
		dir := filepath.Join(proc, pid)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, data := range map[string]string{"cgroup": cgroup, "cmdline": cmdline, "smaps_rollup": smaps} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("10", "0::/warren-0/"+id+"\n", "agent", "Rss: 9 kB\nPss:      100 kB\nPss_Anon: 7 kB\n") // v2
	write("11", "5:memory:/warren-0/"+id+"/x\n4:cpu:/\n", "sh", "Pss: 20 kB\n")                    // v1, below
	write("12", "0::/\n", "runsc-gofer\x00--id\x00"+id, "Pss: 3 kB\n")                             // by its name
	write("13", "0::/warren-0/"+id+"0\n", "other", "Pss: 5000 kB\n")                               // another's
	write("14", "0::/warren-0/sbxaaaaaaaaaaaaaaaaa\n", "other", "Pss: 5000 kB\n")                  // another's
	write("15", "0::/warren-0/"+id+"\n", "zombie", "")                                             // has no memory
	if err := os.Mkdir(filepath.Join(proc, "self"), 0o755); err != nil {
		t.Fatal(err)
	}
	bytes, n, err := readPSS(proc, id)
	if err != nil || bytes != 123<<10 || n != 3 {
		t.Errorf("%d bytes of %d processes, %v; want %d of 3", bytes, n, err, 123<<10)
	}
	if _, _, err := readPSS(proc, ""); err == nil {
		t.Error("an empty id matches nothing")
	}
	if _, _, err := readPSS(proc, "../x"); err == nil {
		t.Error("an id that is none is refused")
	}
}

func sample() *Report {
	g := Timing{ID: "start_cold", Name: "create and first exec answered (cold)"}
	for i := range 20 {
		g.add(time.Duration(i+40)*time.Millisecond, nil)
	}
	return &Report{
		Schema: schema, At: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Version: "v1", Template: "base",
		Host: Host{Local: true, Kernel: "6.1.0", CPUs: 2, MemoryMiB: 4096, Cgroups: "v2"},
		Runtimes: []Runtime{
			{
				Name: "container", Available: true, Error: "memory: it broke",
				Boundary: []Row{{ID: "kernel", Name: "a kernel of its own", Verdict: No, Detail: "the host's"}},
				Battery: []Row{
					{ID: "c", Name: "compile and run C", Verdict: Yes, Detail: "gcc"},
					{ID: "fuse", Name: "FUSE mount", Verdict: No, Detail: "none", Output: "<script>alert(1)</script>"},
				},
				Timings: []Timing{g}, Memory: &Memory{N: 2, PSS: 5 << 20, WorkingSet: 3 << 20, Source: "PSS"},
				Captures: []Row{{ID: rowDisk, Name: "snapshot of the disk", Verdict: Yes}, {ID: rowFull, Name: "full", Verdict: No}, {ID: "fork.clock", Verdict: Yes}, {ID: "fork.locks", Verdict: No}},
			},
			{
				Name: "gvisor", Available: true,
				Boundary: []Row{{ID: "kernel", Name: "a kernel of its own", Verdict: Yes, Detail: "Sentry\x1b[31m"}},
				Battery:  []Row{{ID: "c", Name: "compile and run C", Verdict: Yes, Detail: "gcc"}, {ID: "fuse", Name: "FUSE mount", Verdict: Skip, Detail: "why not"}},
			},
			{Name: "microvm", Why: "not built yet"},
		},
	}
}

func TestText(t *testing.T) {
	var b bytes.Buffer
	if err := Text(&b, sample(), nil); err != nil {
		t.Fatal(err)
	}
	out := b.String()
	for _, want := range []string{
		"container could not be measured whole: memory: it broke",
		"the host's kernel; 0 of 1 checks hold", "1 of 2", "cold 49 ms / 59 ms", "5.0 MiB PSS", "disk; a fork is right in 1 of 2",
		"not built yet", "compile and run C", "gvisor: why not",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
	if strings.Contains(out, "\x1b") {
		t.Error("what came from inside reaches the terminal as it is")
	}
	// What both say the same is said once.
	if strings.Contains(out, "container: gcc") {
		t.Errorf("the same detail stands there twice:\n%s", out)
	}
	b.Reset()
	if err := Text(&b, sample(), func(v Verdict, s string) string { return "[" + s + "]" }); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "[no]") || !strings.Contains(b.String(), "[skip]") {
		t.Errorf("verdicts are not painted:\n%s", b.String())
	}
}

func TestHTML(t *testing.T) {
	var b bytes.Buffer
	if err := HTML(&b, sample()); err != nil {
		t.Fatal(err)
	}
	out := b.String()
	if strings.Contains(out, "<script>") {
		t.Error("what came from inside is markup of the page")
	}
	for _, not := range []string{"http://", "https://", "src=", "<link"} {
		if strings.Contains(out, not) {
			t.Errorf("the page has %q: it is not self-contained", not)
		}
	}
	if !strings.Contains(out, "&lt;script&gt;") || !strings.Contains(out, `class="no"`) {
		t.Error("rows are missing")
	}
}

func TestKeep(t *testing.T) {
	env := func(m map[string]string) func(string) string { return func(k string) string { return m[k] } }
	for _, c := range []struct {
		env  map[string]string
		want string
	}{
		{map[string]string{"XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/warren/prove"},
		{map[string]string{"XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/warren/prove"},
		{map[string]string{"HOME": "/h"}, "/h/.local/state/warren/prove"},
		{nil, ""},
	} {
		if got, err := Dir(env(c.env)); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%v: %q, %v; want %q", c.env, got, err, c.want)
		}
	}
	dir := filepath.Join(t.TempDir(), "a", "b")
	if r, path, err := Latest(dir); r != nil || path != "" || err != nil {
		t.Errorf("of no directory: %v, %q, %v", r, path, err)
	}
	r := sample()
	for i := range keptReports + 3 {
		r.At = r.At.Add(time.Second)
		r.TookMS = float64(i)
		if _, err := Save(dir, r); err != nil {
			t.Fatal(err)
		}
	}
	names, err := reports(dir)
	if err != nil || len(names) != keptReports {
		t.Errorf("%d reports are kept, %v", len(names), err)
	}
	got, _, err := Latest(dir)
	if err != nil || got.TookMS != keptReports+2 {
		t.Fatalf("the newest is %+v, %v", got, err)
	}
	x, _ := json.Marshal(got)
	y, _ := json.Marshal(r)
	if !bytes.Equal(x, y) {
		t.Errorf("it came back as\n%s\nand was\n%s", x, y)
	}
	other := filepath.Join(dir, "99990101T000000Z.json")
	for _, data := range []string{`{"schema": 99}`, `{`, ``} {
		if err := os.WriteFile(other, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Latest(dir); err == nil {
			t.Errorf("%q was taken for a report", data)
		}
	}
}

func TestAdvise(t *testing.T) {
	here := []Fact{{"container", true, ""}, {"gvisor", true, ""}, {"isolate", false, "not built yet"}, {"microvm", false, "not built yet"}, {"kata", false, "not built yet"}, {"libkrun", false, "not built yet"}}
	for _, c := range []struct{ emits, trust, state, where, abuse, want, built string }{
		{"js", "strangers", "none", "cloud", "limits", "gvisor", "isolate"},
		{"js", "mine", "none", "anywhere", "none", "container", "isolate"},
		{"js", "strangers", "none", "metal", "hostile", "gvisor", "microvm"},
		{"any", "mine", "none", "anywhere", "none", "container", ""},
		{"any", "mine", "suspend", "cloud", "limits", "container", ""},
		{"any", "mine", "fork", "anywhere", "none", "gvisor", ""},
		{"any", "mine", "fork", "metal", "none", "gvisor", ""},
		{"any", "mine", "none", "metal", "hostile", "gvisor", "microvm"},
		{"any", "strangers", "none", "cloud", "limits", "gvisor", ""},
		{"any", "strangers", "fork", "cloud", "hostile", "gvisor", ""},
		{"any", "strangers", "fork", "anywhere", "limits", "gvisor", ""},
		{"any", "strangers", "fork", "metal", "limits", "gvisor", "microvm"},
	} {
		a := Answers{c.emits, c.trust, c.state, c.where, c.abuse}
		got, err := Advise(a, Facts{Runtimes: here, Report: sample()})
		if err != nil {
			t.Fatal(err)
		}
		if got.Runtime != c.want || got.IfBuilt != c.built {
			t.Errorf("%+v: %q, if all were built %q; want %q, %q", a, got.Runtime, got.IfBuilt, c.want, c.built)
		}
		if len(got.Reasons) < 2 || len(got.Settings) == 0 || len(got.Measured) == 0 || len(got.Others) != len(traits)-1 {
			t.Errorf("%+v: it says too little: %+v", a, got)
		}
	}
}

// TestAdviseAlways goes through all answers and sets of runtimes.
func TestAdviseAlways(t *testing.T) {
	var all []Answers
	for _, e := range Questions[0].Choices {
		for _, tr := range Questions[1].Choices {
			for _, s := range Questions[2].Choices {
				for _, w := range Questions[3].Choices {
					for _, ab := range Questions[4].Choices {
						all = append(all, Answers{e.ID, tr.ID, s.ID, w.ID, ab.ID})
					}
				}
			}
		}
	}
	for set := range 1 << len(traits) {
		var facts []Fact
		for i, tr := range traits {
			facts = append(facts, Fact{tr.name, set&(1<<i) != 0, "not here"})
		}
		for _, a := range all {
			got, err := Advise(a, Facts{Runtimes: facts})
			if err != nil {
				t.Fatal(err)
			}
			i := slices.IndexFunc(traits, func(tr trait) bool { return tr.name == got.Runtime })
			if got.Runtime != "" && (i < 0 || set&(1<<i) == 0 || traits[i].refuse(a) != "") {
				t.Fatalf("%+v with %v: %q, which will not do", a, facts, got.Runtime)
			}
			if got.Runtime == "" && got.IfBuilt == "" {
				t.Fatalf("%+v: nothing, and nothing would be", a)
			}
			if a.Trust == TrustOthers && got.Runtime == "container" {
				t.Fatalf("%+v: strangers' code on the host's kernel", a)
			}
		}
	}
}

func TestAdviseFacts(t *testing.T) {
	a := Answers{"any", "mine", "suspend", "cloud", "limits"}
	got, err := Advise(a, Facts{})
	if err != nil || got.Runtime != "" || !strings.Contains(strings.Join(got.Measured, " "), "warren prove") {
		t.Errorf("without any facts: %+v, %v", got, err)
	}
	got, err = Advise(a, Facts{Report: sample()}) // no daemon, but a report
	if err != nil || got.Runtime != "container" {
		t.Errorf("by the report alone: %+v, %v", got, err)
	}
	said := strings.Join(got.Measured, "\n")
	for _, want := range []string{"49 ms p50", "5.0 MiB PSS", "1 of 2 pieces", "FUSE mount", "captures that work: disk"} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not in what was measured:\n%s", want, said)
		}
	}
	if _, err := Advise(Answers{Emits: "poems"}, Facts{}); err == nil || !strings.Contains(err.Error(), "js, any") {
		t.Errorf("an answer that is none: %v", err)
	}
}
