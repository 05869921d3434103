package oci

import (
	"reflect"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestParseCPUList(t *testing.T) {
	for _, c := range []struct {
		in   string
		want []int
	}{
		{"0", []int{0}}, {"0-3", []int{0, 1, 2, 3}}, {"0-1,8,10-11", []int{0, 1, 8, 10, 11}},
		{"", nil}, {"3-1", nil}, {"-1", nil}, {"a", nil}, {"1,", nil}, {"0-99999999", nil},
	} {
		got, err := parseCPUList(c.in)
		if (err != nil) != (c.want == nil) || (err == nil && !reflect.DeepEqual(got, c.want)) {
			t.Errorf("parseCPUList(%q) = %v, %v; want %v", c.in, got, err, c.want)
		}
		if err == nil {
			if again, err := parseCPUList(formatCPUList(got)); err != nil || !reflect.DeepEqual(again, got) {
				t.Errorf("%q does not come back: %v, %v", c.in, again, err)
			}
		}
	}
}

func FuzzParseCPUList(f *testing.F) {
	for _, s := range []string{"0-3,8", "", "1-", "65535"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if strings.Count(s, ",") > 10 {
			t.Skip()
		}
		parseCPUList(s)
	})
}

func TestParseStartTime(t *testing.T) {
	fields := "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"
	for _, c := range []struct {
		in   string
		want uint64
		ok   bool
	}{
		{"12 (sh) " + fields, 4242, true},
		{"12 (a b) c) R) " + fields, 4242, true},
		{"12 (sh) Z" + fields[1:], 0, false},
		{"12 (sh) S 1 2", 0, false},
		{"", 0, false},
	} {
		got, err := parseStartTime([]byte(c.in))
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("parseStartTime(%q) = %d, %v", c.in, got, err)
		}
	}
}

func FuzzParseStartTime(f *testing.F) {
	f.Add([]byte("12 (sh) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20"))
	f.Fuzz(func(t *testing.T, b []byte) { parseStartTime(b) })
}

func TestParseKeyed(t *testing.T) {
	data := []byte("low 0\nhigh 12\noom_kill 3\nbad x\n")
	for key, want := range map[string]int64{"low": 0, "high": 12, "oom_kill": 3} {
		if got, ok := parseKeyed(data, key); !ok || got != want {
			t.Errorf("%s = %d, %v", key, got, ok)
		}
	}
	for _, key := range []string{"oom", "bad", ""} {
		if got, ok := parseKeyed(data, key); ok {
			t.Errorf("%q = %d", key, got)
		}
	}
}

func FuzzParseKeyed(f *testing.F) {
	f.Add([]byte("a 1\nb 2\n"), "b")
	f.Fuzz(func(t *testing.T, b []byte, key string) { parseKeyed(b, key) })
}

func TestIDOfState(t *testing.T) {
	id := sandbox.ID("sbx0123456789abcdef0")
	for name, want := range map[string]sandbox.ID{
		string(id): id,
		string(id) + "_sandbox:" + string(id) + ".state": id,
		string(id) + ".lock":                             id,
		"runsc-" + string(id) + ".sock":                  id,
		"..":                                             "",
		".cache":                                         "",
		"UPPER":                                          "",
	} {
		if got := idOfState(name); got != want {
			t.Errorf("idOfState(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestExplain(t *testing.T) {
	killed, exited := unix.WaitStatus(9), unix.WaitStatus(7<<8)
	for _, c := range []struct {
		status unix.WaitStatus
		known  bool
		kills  int64
		want   sandbox.Reason
		detail string
	}{
		{killed, true, 1, sandbox.ReasonOOM, "memory"},
		{killed, true, 0, sandbox.ReasonRuntimeCrashed, "SIGKILL"},
		{exited, true, 0, sandbox.ReasonRuntimeCrashed, "status 7"},
		{exited, true, 3, sandbox.ReasonRuntimeCrashed, "status 7"},
		{0, false, 0, sandbox.ReasonRuntimeCrashed, "ended"},
		{0, false, 1, sandbox.ReasonOOM, "memory"},
	} {
		reason, detail := explain(c.status, c.known, c.kills)
		if reason != c.want || !strings.Contains(detail, c.detail) {
			t.Errorf("explain(%v, %v, %d) = %s, %q", c.status, c.known, c.kills, reason, detail)
		}
	}
}

func TestPrintable(t *testing.T) {
	if got := printable([]byte("\x1b[31mred\x00\nline\t\xff ")); got != "[31mred line ?" {
		t.Errorf("printable = %q", got)
	}
}

func TestCPUTable(t *testing.T) {
	tab := newCPUTable([]int{0, 1, 2, 3})
	if got := tab.take("a", 2); !reflect.DeepEqual(got, []int{0, 1}) {
		t.Errorf("a = %v", got)
	}
	if got := tab.take("b", 1.5); !reflect.DeepEqual(got, []int{2, 3}) {
		t.Errorf("b = %v", got)
	}
	if got := tab.take("c", 4); got != nil {
		t.Errorf("c of all CPUs = %v", got)
	}
	tab.free("a")
	tab.free("a") // idempotent
	if got := tab.take("d", 0.5); !reflect.DeepEqual(got, []int{0}) {
		t.Errorf("d = %v", got)
	}
	tab.adopt("e", []int{1})
	if got := tab.take("f", 1); !reflect.DeepEqual(got, []int{0}) {
		t.Errorf("f = %v", got) // all have one now
	}
}

func TestFindHierarchies(t *testing.T) {
	info := func(fs, mount, opts string) *mountinfo.Info {
		return &mountinfo.Info{FSType: fs, Mountpoint: mount, VFSOptions: opts}
	}
	full := []*mountinfo.Info{
		info("tmpfs", "/sys/fs/cgroup", "rw,mode=755"),
		info("cgroup", "/sys/fs/cgroup/memory", "rw,memory"),
		info("cgroup", "/sys/fs/cgroup/cpu,cpuacct", "rw,cpu,cpuacct"),
		info("cgroup", "/sys/fs/cgroup/pids", "rw,pids"),
		info("cgroup", "/sys/fs/cgroup/freezer", "rw,freezer"),
		info("cgroup", "/sys/fs/cgroup/cpuset", "rw,cpuset"),
		info("cgroup", "/sys/fs/cgroup/systemd", "rw,xattr,release_agent=/lib/x,name=systemd"),
		info("cgroup2", "/sys/fs/cgroup/unified", "rw"),
	}
	h, err := findHierarchies(host.CgroupHybrid, full)
	if err != nil {
		t.Fatal(err)
	}
	if h.v1["cpuacct"] != "/sys/fs/cgroup/cpu,cpuacct" || h.v1["name=systemd"] == "" || len(h.roots) != 7 {
		t.Errorf("hierarchies = %+v", h)
	}
	_, err = findHierarchies(host.CgroupV1, full[:5])
	if err == nil || !strings.Contains(err.Error(), "cpuset") {
		t.Errorf("without cpuset: %v", err)
	}
	if h, err = findHierarchies(host.CgroupV2, nil); err != nil || len(h.roots) != 1 {
		t.Errorf("v2 = %+v, %v", h, err)
	}
}

func TestStageDir(t *testing.T) {
	got, err := stageDir("/mnt/run", "/var/lib", "/usr/bin/crun")
	if err != nil || got == "/mnt" || got == "" {
		t.Errorf("stageDir = %q, %v", got, err)
	}
	if _, err := stageDir(stageDirs...); err == nil {
		t.Error("a directory that is needed was taken")
	}
}

func TestConfigValidate(t *testing.T) {
	good := Config{Instance: "i", RunDir: "/run/x", AgentPath: "/bin/agent"}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Config{
		{RunDir: "/r", AgentPath: "/a"}, {Instance: "i", RunDir: "r", AgentPath: "/a"},
		{Instance: "i", RunDir: "/r", AgentPath: "a"}, {Instance: "i", RunDir: "/r", AgentPath: "/a", MemoryBudget: -1},
	} {
		if err := bad.Validate(); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
