package runtimetest

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Bench measures, in turn, Create to the first answered exec, and the OCI
// runtime alone: argv (its command and flags) with `run` of the same bundle
// with /bin/true in a plain directory. It reports the medians and their ratio,
// and how long Kill takes.
func Bench(b *testing.B, f Factory, argv ...string) {
	e := New(b, f)
	link := e.Link(b)
	bare := newBare(b, e, link, argv)
	var create, kill, alone []time.Duration
	for b.Loop() {
		start := time.Now()
		i, err := e.Driver.Create(b.Context(), e.SpecAt(b, link))
		if err != nil {
			b.Fatal(err)
		}
		if _, _, err := Exec(b.Context(), i, "true"); err != nil {
			b.Fatal(err)
		}
		created := time.Now()
		if err := i.Kill(context.Background()); err != nil {
			b.Fatal(err)
		}
		create = append(create, created.Sub(start))
		kill = append(kill, time.Since(created))
		alone = append(alone, bare(len(alone)))
	}
	c, k, a := median(create), median(kill), median(alone)
	b.ReportMetric(c, "create-ms")
	b.ReportMetric(k, "kill-ms")
	b.ReportMetric(a, "bare-ms")
	b.ReportMetric(c/a, "create/bare")
	b.ReportMetric(0, "ns/op")
}

func median(d []time.Duration) float64 {
	sort.Slice(d, func(i, j int) bool { return d[i] < d[j] })
	return float64(d[len(d)/2].Microseconds()) / 1000
}

// newBare makes a bundle from that of a live sandbox, and returns what runs it
// once.
func newBare(b *testing.B, e *Env, link sandbox.Link, argv []string) func(n int) time.Duration {
	b.Helper()
	spec := e.SpecAt(b, link)
	i := e.Create(b, spec)
	data, err := os.ReadFile(filepath.Join(e.Config.RunDir, "oci", e.Driver.Name(), "sandboxes", string(spec.ID), "config.json"))
	if err != nil {
		b.Fatal(err)
	}
	if err := i.Kill(b.Context()); err != nil {
		b.Fatal(err)
	}
	var config specs.Spec
	if err := json.Unmarshal(data, &config); err != nil {
		b.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "warren-bare") // every id may enter it
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	root := filepath.Join(dir, "root")
	Run(b, "cp", "-a", e.Layer, root)
	Run(b, "chmod", "755", dir, root)
	config.Root.Path = root
	config.Process.Args = []string{"/bin/true"}
	config.Linux.CgroupsPath = "/warren-" + e.Config.Instance + "/bare"
	agentCopy := filepath.Join(dir, "agent")
	Run(b, "cp", e.Config.AgentPath, agentCopy)
	sys := filepath.Join(dir, "sys")
	for n := range config.Mounts {
		m := &config.Mounts[n]
		switch {
		case m.Destination == oci.AgentMount:
			m.Source = agentCopy
		case m.Destination == "/sys" && m.Type == "bind":
			m.Source = sys
		case m.Type == "bind" && strings.HasPrefix(m.Destination, "/proc/"):
			m.Source = m.Destination
		case m.Destination == "/sys/devices/system/cpu":
			m.Source = m.Destination
		}
	}
	for _, d := range []string{"sys/devices/system/cpu", "sys/fs/cgroup", "root/.warren"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			b.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, ".warren/agent"), nil, 0o755); err != nil {
		b.Fatal(err)
	}
	if m := config.Linux.UIDMappings; len(m) > 0 {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Lchown(path, int(m[0].HostID), int(m[0].HostID))
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	if data, err = json.Marshal(config); err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o644); err != nil {
		b.Fatal(err)
	}
	argv = append(argv[:len(argv):len(argv)], "--root="+filepath.Join(dir, "state"), "run", "--bundle="+dir)
	on := privateThread(b)
	run := func(n int) time.Duration {
		cmd := exec.Command(argv[0], append(argv[1:len(argv):len(argv)], fmt.Sprintf("bare%d", n))...)
		var out []byte
		var took time.Duration
		on(func() {
			start := time.Now()
			out, err = cmd.CombinedOutput()
			took = time.Since(start)
		})
		if err != nil {
			b.Fatalf("%s: %v: %s", strings.Join(cmd.Args, " "), err, out)
		}
		return took
	}
	run(-1)
	return run
}

// privateThread gives a thread in a mount namespace without the v2 tree of a
// hybrid host, which crun refuses.
func privateThread(b *testing.B) (on func(func())) {
	b.Helper()
	work, done := make(chan func()), make(chan struct{})
	ready := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		unix.Unmount("/sys/fs/cgroup/unified", unix.MNT_DETACH)
		ready <- err
		for f := range work {
			f()
			done <- struct{}{}
		}
	}()
	if err := <-ready; err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { close(work) })
	return func(f func()) {
		work <- f
		<-done
	}
}
