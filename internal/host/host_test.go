package host

import (
	"os"
	"path/filepath"
	"testing"
)

func TestInstanceFollowsTheRealDirectory(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	direct, err := Instance(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(direct) != 8 {
		t.Errorf("Instance is %q: want 8 digits", direct)
	}
	if linked, _ := Instance(link); linked != direct {
		t.Errorf("by a link the instance is %q, directly %q: one state directory must be one instance", linked, direct)
	}
	if other, _ := Instance(t.TempDir()); other == direct {
		t.Errorf("two state directories are both instance %q", other)
	}
}

func TestReadMemory(t *testing.T) {
	m, err := ReadMemory()
	if err != nil {
		t.Fatal(err)
	}
	if m.Total < 64<<20 || m.Available <= 0 || m.Available > m.Total {
		t.Errorf("implausible: %+v", m)
	}
}

func TestParseMeminfo(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want Memory
		fail bool
	}{
		{in: "MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable:    1024 kB\n", want: Memory{Total: 2 << 20, Available: 1 << 20}},
		{in: "MemTotal: 2048 kB\n", fail: true},
		{in: "MemTotal: x kB\nMemAvailable: 1 kB\n", fail: true},
		{in: "MemTotal:\nMemAvailable:\n", fail: true},
		{in: "", fail: true},
	} {
		got, err := parseMeminfo([]byte(tc.in))
		if (err != nil) != tc.fail || !tc.fail && got != tc.want {
			t.Errorf("%q: %+v, %v; want %+v, failure %v", tc.in, got, err, tc.want, tc.fail)
		}
	}
}
