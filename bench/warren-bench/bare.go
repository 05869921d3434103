package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/host"
)

// bare runs the OCI runtime itself, on a bundle that a driver wrote for a
// sandbox of the same template. It has a thread of its own in a private mount
// namespace, where crun does not meet the v2 tree of a hybrid host.
type bare struct {
	tool   string
	dir    string // of the bundle
	argv   []string
	netns  string
	jobs   chan func()
	cgroup string
	n      int
}

// newBare makes the bundle out of a sandbox that it creates for that. tool is
// the runtime's program, "" the one that the driver runs.
func newBare(ctx context.Context, l *lab, rt, tool string) (*bare, error) {
	s, err := l.create(ctx, rt, 512)
	if err != nil {
		return nil, err
	}
	defer l.Kill(context.WithoutCancel(ctx), s.ID)
	data, err := os.ReadFile(filepath.Join("/run/warren", l.instance, "oci", rt, "sandboxes", s.ID, "config.json"))
	if err != nil {
		return nil, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, err
	}

	name := rt
	if tool != "" {
		name += "-" + filepath.Base(tool)
	}
	b := &bare{dir: filepath.Join(l.state, "bare-"+name), netns: "warren-bench-" + l.instance + "-" + name,
		// In the daemon's group, whose CPU sets the driver made: a group elsewhere
		// would have none on cgroup v1.
		cgroup: "/warren-" + l.instance + "/bench-" + name}
	if err := os.RemoveAll(b.dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return nil, err
	}
	root := filepath.Join(b.dir, "rootfs")
	if err := copyRoot(ctx, l, root, &spec); err != nil {
		return nil, err
	}
	stage := filepath.Dir(spec.Root.Path)
	spec.Root.Path = root
	spec.Process.Args = []string{"/bin/true"}
	mounts := spec.Mounts[:0]
	for _, m := range spec.Mounts {
		if !strings.HasPrefix(m.Source, stage+"/") { // the agent, lxcfs and /sys are Warren's own
			mounts = append(mounts, m)
		}
	}
	spec.Mounts = mounts
	if out, err := exec.CommandContext(ctx, "ip", "netns", "add", b.netns).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("ip netns add: %w: %s", err, out)
	}
	for i, ns := range spec.Linux.Namespaces {
		if ns.Type == specs.NetworkNamespace {
			spec.Linux.Namespaces[i].Path = "/run/netns/" + b.netns
		}
	}
	spec.Linux.CgroupsPath = b.cgroup
	if data, err = json.Marshal(spec); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(b.dir, "config.json"), data, 0o644); err != nil {
		return nil, err
	}

	if b.argv, err = driverArgv(l, rt, b.dir); err != nil {
		b.close()
		return nil, err
	}
	if tool != "" {
		b.argv[0] = tool
	}
	b.tool = filepath.Base(b.argv[0])
	b.jobs = make(chan func())
	ready := make(chan error)
	go privateThread(b.jobs, ready)
	if err := <-ready; err != nil {
		b.close()
		return nil, err
	}
	if err := b.run(ctx); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// driverArgv are the runtime and the flags that matter for its speed, as the
// drivers give them.
func driverArgv(l *lab, rt, dir string) ([]string, error) {
	state := filepath.Join(dir, "state")
	if rt == "gvisor" {
		return []string{
			filepath.Join(l.bin, "runsc"), "--root=" + state, "--platform=systrap", "--network=sandbox",
			"--file-access=exclusive", "--overlay2=root:dir=" + dir,
		}, nil
	}
	for _, tool := range []string{"crun", "runc"} {
		if path, err := exec.LookPath(tool); err == nil {
			return []string{path, "--root=" + state}, nil
		}
	}
	return nil, errors.New("neither crun nor runc is installed")
}

// run runs the bundle once, to its end.
func (b *bare) run(ctx context.Context) error {
	b.n++
	argv := append(b.argv[1:len(b.argv):len(b.argv)], "run", "--bundle="+b.dir, "bench"+strconv.Itoa(b.n))
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, b.argv[0], argv...)
	cmd.Stdout, cmd.Stderr = &out, &out
	done := make(chan error)
	b.jobs <- func() { done <- cmd.Run() }
	if err := <-done; err != nil {
		return fmt.Errorf("%s run: %w: %s", b.tool, err, out.Bytes())
	}
	return nil
}

func (b *bare) close() error {
	if b.jobs != nil {
		close(b.jobs)
	}
	err := exec.Command("ip", "netns", "del", b.netns).Run()
	if e := removeCgroup(b.cgroup); err == nil {
		err = e
	}
	if e := os.RemoveAll(b.dir); err == nil {
		err = e
	}
	return err
}

// privateThread runs jobs on a thread in a mount namespace of its own.
func privateThread(jobs <-chan func(), ready chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil && host.Cgroups() == host.CgroupHybrid {
		err = unix.Unmount("/sys/fs/cgroup/unified", unix.MNT_DETACH)
	}
	ready <- err
	for job := range jobs {
		job()
	}
}

// removeCgroup removes a group and those below it in every hierarchy.
func removeCgroup(group string) error {
	roots, err := filepath.Glob("/sys/fs/cgroup/*" + group)
	if err != nil {
		return err
	}
	for _, root := range append(roots, "/sys/fs/cgroup"+group) {
		var dirs []string
		filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, p)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- {
			if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// copyRoot copies the template's topmost layer, with the ids that the bundle's
// user namespace maps.
func copyRoot(ctx context.Context, l *lab, to string, spec *specs.Spec) error {
	t, err := l.Template(ctx, l.template)
	if err != nil {
		return err
	}
	if len(t.Layers) != 1 {
		return fmt.Errorf("template %s has %d layers: give one of a single layer", l.template, len(t.Layers))
	}
	from, err := layerDir(l.state, t.Layers[0])
	if err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, "cp", "-a", from, to).CombinedOutput(); err != nil {
		return fmt.Errorf("cp -a: %w: %s", err, out)
	}
	if len(spec.Linux.UIDMappings) == 0 {
		return nil
	}
	base := int(spec.Linux.UIDMappings[0].HostID)
	return filepath.WalkDir(to, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		return os.Lchown(p, base+int(st.Uid), base+int(st.Gid))
	})
}

func layerDir(state, digest string) (string, error) {
	dir := filepath.Join(state, "templates", "layers", strings.Replace(digest, ":", "-", 1))
	_, err := os.Stat(dir)
	return dir, err
}
