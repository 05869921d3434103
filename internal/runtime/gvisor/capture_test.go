package gvisor

import (
	"encoding/json"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/warrenhq/warren/internal/sandbox"
)

const goodCapture = `{"version":"v","agent":"a","cpu":["x"],"layers":["l/d"],"disk_mib":0,"spec":{"ociVersion":"1.2.0",
"process":{"args":["/agent"],"cwd":"/"},"root":{"path":"/r"},"hostname":"h",
"mounts":[{"destination":"/agent","type":"bind","source":"/old/agent"},{"destination":"/proc","type":"proc"}],
"linux":{"cgroupsPath":"/old","namespaces":[{"type":"network","path":"/old"}]}}}`

// freshSpec is what the sandbox would have if it were created.
func freshSpec() *specs.Spec {
	return &specs.Spec{
		Root: &specs.Root{Path: "/new"}, Hostname: "new",
		Mounts: []specs.Mount{{Destination: "/agent", Type: "bind", Source: "/new/agent"}, {Destination: "/proc", Type: "proc"}},
		Linux:  &specs.Linux{CgroupsPath: "/new", Namespaces: []specs.LinuxNamespace{{Type: specs.NetworkNamespace, Path: "/new"}}},
	}
}

func TestParseCapture(t *testing.T) {
	c, err := parseCapture([]byte(goodCapture))
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.adapt(freshSpec())
	if err != nil || out.Root.Path != "/new" || out.Hostname != "new" || out.Mounts[0].Source != "/new/agent" ||
		out.Linux.CgroupsPath != "/new" || out.Linux.Namespaces[0].Path != "/new" || c.Spec.Root.Path != "/r" {
		t.Errorf("adapted it is %+v, %v", out, err)
	}
	for _, edit := range [][2]string{
		{`"agent":"a"`, `"agent":""`}, {`"process":`, `"other":`}, {`"root":`, `"other":`}, {`"linux":`, `"other":`}, {`}}}`, `}`},
		{`"cpu":["x"]`, `"cpu":"x"`},
	} {
		if _, err := parseCapture([]byte(strings.Replace(goodCapture, edit[0], edit[1], 1))); sandbox.CodeOf(err) != sandbox.CodeCorruptCapture {
			t.Errorf("%v gave %v", edit, err)
		}
	}
	for _, edit := range [][2]string{{`"destination":"/agent"`, `"destination":"/etc"`}, {`"type":"network"`, `"type":"user"`}} {
		c, err := parseCapture([]byte(strings.Replace(goodCapture, edit[0], edit[1], 1)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.adapt(freshSpec()); sandbox.CodeOf(err) != sandbox.CodeUnsupported {
			t.Errorf("%v gave %v", edit, err)
		}
	}
}

// FuzzParseCapture checks that no warren.json makes the daemon mount, name or
// reach what a new sandbox would not.
func FuzzParseCapture(f *testing.F) {
	f.Add([]byte(goodCapture))
	f.Add([]byte(`{}`))
	f.Add([]byte(strings.Replace(goodCapture, `"mounts":[`, `"mounts":[{"destination":"/x","type":"bind","source":"/etc"},`, 1)))
	f.Add([]byte(strings.Replace(goodCapture, `"mounts":[`, `"hooks":{"prestart":[{"path":"/bin/sh"}]},"mounts":[{"destination":"/x","type":"none","options":["rbind"],"source":"/etc"},`, 1)))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseCapture(data)
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeCorruptCapture {
				t.Errorf("the error is %v", err)
			}
			return
		}
		fresh := freshSpec()
		out, err := c.adapt(fresh)
		if err != nil {
			return
		}
		if out.Hooks != nil || out.Root.Path != fresh.Root.Path || out.Linux.CgroupsPath != fresh.Linux.CgroupsPath || len(out.Linux.Namespaces) != 1 || out.Linux.Namespaces[0].Path != "/new" {
			t.Errorf("adapted it is %+v", out)
		}
		for _, m := range out.Mounts {
			if isBind(m) && m.Source != "/new/agent" {
				t.Errorf("it mounts %+v", m)
			}
		}
		c.same(fresh)
		if _, err := json.Marshal(out); err != nil {
			t.Error(err)
		}
	})
}
