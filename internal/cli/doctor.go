package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/daemon"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/host/census"
	"github.com/warrenhq/warren/internal/host/statefs"
	"github.com/warrenhq/warren/internal/idmap"
	"github.com/warrenhq/warren/internal/sandbox"
)

// finding is one line of doctor.
type finding struct {
	Check  string `json:"check"`
	Level  string `json:"level"` // ok, warn, fail
	Found  string `json:"found"`
	Remedy string `json:"remedy,omitempty"`
}

// The levels of a finding.
const (
	levelOK   = "ok"
	levelWarn = "warn"
	levelFail = "fail"
)

func (a *app) doctorCmd() *cobra.Command {
	var state string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check what this host needs to run sandboxes, with or without a daemon",
		Long:  "Checks what this host needs, and says what to do about what is missing.\nExits with 1 where a check failed.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			fs := a.examine(cmd.Context(), c, state)
			if slices.ContainsFunc(fs, func(f finding) bool { return f.Level == levelFail }) {
				a.code = exitFailure
			}
			if a.json {
				return a.printJSON(fs)
			}
			colors := map[string]string{levelOK: green, levelWarn: yellow, levelFail: red}
			for _, f := range fs {
				fmt.Fprintf(a.out, "%s  %-16s %s\n", a.paint(a.out, colors[f.Level], fmt.Sprintf("%-4s", f.Level)), f.Check, clean(f.Found))
				if f.Remedy != "" {
					fmt.Fprintf(a.out, "      %-16s → %s\n", "", clean(f.Remedy))
				}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&state, "state", daemon.DefaultState, "the daemon's state directory")
	return cmd
}

func (a *app) examine(ctx context.Context, c *client.Client, state string) []finding {
	var fs []finding
	fs = append(fs, checkUser(), checkKernel(), checkCgroups(), checkOverlay(), checkIDMap(state), checkUserNS(),
		checkNFT(), checkForwarding(), checkMmdebstrap(), checkLXCFS())
	version, err := c.Version(ctx)
	running := err == nil
	if running {
		fs = append(fs, finding{Check: "daemon", Level: levelOK, Found: fmt.Sprintf("version %s at %s", version.Version, c.Host())})
	} else {
		f := finding{Check: "daemon", Level: levelWarn, Found: err.Error()}
		var e *sandbox.Error
		if errors.As(err, &e) {
			f.Remedy = a.hint(e)
		}
		fs = append(fs, f)
	}
	fs = append(fs, a.checkRuntimes(ctx, c, running, state)...)
	fs = append(fs, checkMemory(), checkDisk(state), checkReflinks(state))
	if running && c.Local() {
		fs = append(fs, checkBase(ctx, c))
	}
	if !running || c.Local() {
		fs = append(fs, checkLeftovers(ctx, c, running, state))
	}
	return fs
}

func checkUser() finding {
	if os.Geteuid() == 0 {
		return finding{Check: "user", Level: levelOK, Found: "root"}
	}
	return finding{Check: "user", Level: levelWarn, Found: "not root: some checks cannot be made, and the daemon needs root", Remedy: "sudo warren doctor"}
}

// Kernels below the first cannot run containers (idmapped mounts under
// overlayfs came with 5.19).
var minKernel = [2]int{5, 19}

func checkKernel() finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding{Check: "kernel", Level: levelFail, Found: err.Error()}
	}
	release := unix.ByteSliceToString(u.Release[:])
	f := finding{Check: "kernel", Level: levelOK, Found: "Linux " + release + " " + unix.ByteSliceToString(u.Machine[:])}
	if major, minor, ok := parseRelease(release); ok && (major < minKernel[0] || major == minKernel[0] && minor < minKernel[1]) {
		f.Level, f.Remedy = levelWarn, fmt.Sprintf("the container runtime needs Linux %d.%d; gVisor runs on 4.14.77 and newer", minKernel[0], minKernel[1])
	}
	return f
}

// parseRelease reads the two leading numbers of a kernel release.
func parseRelease(s string) (major, minor int, ok bool) {
	a, rest, found := strings.Cut(s, ".")
	if !found {
		return 0, 0, false
	}
	end := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
	if end >= 0 {
		rest = rest[:end]
	}
	major, err1 := strconv.Atoi(a)
	minor, err2 := strconv.Atoi(rest)
	return major, minor, err1 == nil && err2 == nil
}

func checkCgroups() finding {
	f := finding{Check: "cgroups", Level: levelOK, Found: string(host.Cgroups())}
	if host.Cgroups() == host.CgroupV2 {
		data, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers")
		if err != nil {
			return finding{Check: "cgroups", Level: levelFail, Found: err.Error(), Remedy: "mount cgroup2 at /sys/fs/cgroup"}
		}
		have := strings.Fields(string(data))
		for _, need := range []string{"cpu", "memory", "pids"} {
			if !slices.Contains(have, need) {
				return finding{Check: "cgroups", Level: levelFail, Found: "v2 without the " + need + " controller", Remedy: "boot without cgroup_disable=" + need + ", and with cgroup_enable=" + need}
			}
		}
		return f
	}
	for _, need := range []string{"cpu", "memory", "pids", "freezer"} {
		if _, err := os.Stat("/sys/fs/cgroup/" + need); err != nil {
			return finding{Check: "cgroups", Level: levelFail, Found: f.Found + " without " + need, Remedy: "mount the controller, or boot with systemd.unified_cgroup_hierarchy=1"}
		}
	}
	return f
}

func checkOverlay() finding {
	if data, err := os.ReadFile("/proc/filesystems"); err == nil && strings.Contains(string(data), "\toverlay\n") {
		return finding{Check: "overlayfs", Level: levelOK, Found: "in the kernel"}
	}
	if moduleThere("overlay") {
		return finding{Check: "overlayfs", Level: levelOK, Found: "a module, loaded when it is needed"}
	}
	return finding{Check: "overlayfs", Level: levelFail, Found: "not in this kernel", Remedy: "modprobe overlay, or use a kernel that has it"}
}

// moduleThere tells whether modprobe would find a module.
func moduleThere(name string) bool {
	if _, err := os.Stat("/sys/module/" + name); err == nil {
		return true
	}
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	dir := "/lib/modules/" + unix.ByteSliceToString(u.Release[:])
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		data, err := os.ReadFile(filepath.Join(dir, list))
		if err == nil && strings.Contains(string(data), "/"+name+".ko") {
			return true
		}
	}
	return false
}

func checkIDMap(state string) finding {
	if os.Geteuid() != 0 {
		return finding{Check: "idmapped mounts", Level: levelWarn, Found: "can only be checked as root", Remedy: "sudo warren doctor"}
	}
	dir := nearest(state)
	if err := idmap.Supported(dir); err != nil {
		return finding{Check: "idmapped mounts", Level: levelFail, Found: fmt.Sprintf("not at %s: %v", dir, err), Remedy: "the container runtime needs Linux 5.19 and its state on ext4, XFS or btrfs; gVisor does without"}
	}
	return finding{Check: "idmapped mounts", Level: levelOK, Found: "work at " + dir}
}

// nearest is the lowest directory on the way to path that is there.
func nearest(path string) string {
	for {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			return path
		}
		up := filepath.Dir(path)
		if up == path {
			return path
		}
		path = up
	}
}

func checkUserNS() finding {
	const file = "/proc/sys/user/max_user_namespaces"
	data, err := os.ReadFile(file)
	n, aerr := strconv.Atoi(strings.TrimSpace(string(data)))
	switch {
	case err != nil:
		return finding{Check: "user namespaces", Level: levelFail, Found: "not in this kernel", Remedy: "use a kernel with CONFIG_USER_NS"}
	case aerr == nil && n == 0:
		return finding{Check: "user namespaces", Level: levelFail, Found: "turned off", Remedy: "sysctl -w user.max_user_namespaces=16384"}
	}
	return finding{Check: "user namespaces", Level: levelOK, Found: fmt.Sprintf("up to %d", n)}
}

func checkNFT() finding {
	if os.Geteuid() != 0 {
		return finding{Check: "nftables", Level: levelWarn, Found: "can only be checked as root", Remedy: "sudo warren doctor"}
	}
	if _, err := (&nftables.Conn{}).ListTables(); err != nil {
		return finding{Check: "nftables", Level: levelFail, Found: "the kernel does not answer: " + err.Error(), Remedy: "modprobe nf_tables, or use a kernel that has it"}
	}
	return finding{Check: "nftables", Level: levelOK, Found: "in the kernel"}
}

func checkForwarding() finding {
	data, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	switch {
	case err != nil:
		return finding{Check: "ip forwarding", Level: levelFail, Found: err.Error(), Remedy: "use a kernel with IPv4"}
	case strings.TrimSpace(string(data)) == "1":
		return finding{Check: "ip forwarding", Level: levelOK, Found: "on"}
	}
	return finding{Check: "ip forwarding", Level: levelWarn, Found: "off: the daemon turns it on where it may", Remedy: "sysctl -w net.ipv4.ip_forward=1"}
}

func checkMmdebstrap() finding {
	if path, err := exec.LookPath("mmdebstrap"); err == nil {
		return finding{Check: "mmdebstrap", Level: levelOK, Found: path}
	}
	return finding{Check: "mmdebstrap", Level: levelWarn, Found: "not installed: no templates of Debian packages", Remedy: "apt-get install mmdebstrap"}
}

func checkLXCFS() finding {
	if path, err := exec.LookPath("lxcfs"); err == nil {
		return finding{Check: "lxcfs", Level: levelOK, Found: path}
	}
	return finding{Check: "lxcfs", Level: levelWarn, Found: "not installed: containers see the host's memory and CPUs in /proc", Remedy: "apt-get install lxcfs"}
}

func (a *app) checkRuntimes(ctx context.Context, c *client.Client, running bool, state string) []finding {
	var fs []finding
	add := func(name string, err error) {
		f := finding{Check: "runtime " + name, Level: levelOK, Found: "runs here"}
		if err != nil {
			f.Level, f.Found = levelFail, err.Error()
		}
		fs = append(fs, f)
	}
	if running {
		rs, err := c.Runtimes(ctx)
		if err != nil {
			return []finding{{Check: "runtimes", Level: levelFail, Found: err.Error()}}
		}
		for _, r := range rs {
			switch {
			case r.Available:
				add(r.Name, nil)
			case r.Error != nil && r.Error.Code != sandbox.CodeUnsupported: // that is one of a later version
				add(r.Name, r.Error.Err())
			}
		}
		return fs
	}
	if os.Geteuid() != 0 {
		return []finding{{Check: "runtimes", Level: levelWarn, Found: "can only be checked as root", Remedy: "sudo warren doctor"}}
	}
	probed, err := daemon.Probe(ctx, daemon.Config{State: state})
	for _, p := range probed {
		add(p.Name, p.Error)
	}
	if err != nil {
		fs = append(fs, finding{Check: "runtimes", Level: levelFail, Found: err.Error()})
	}
	return fs
}

// Below these a host is short of room for sandboxes.
const (
	lowMemory = 1 << 30
	lowDisk   = 5 << 30
)

func checkMemory() finding {
	m, err := host.ReadMemory()
	if err != nil {
		return finding{Check: "memory", Level: levelFail, Found: err.Error()}
	}
	f := finding{Check: "memory", Level: levelOK, Found: fmt.Sprintf("%s, %s available; %d CPUs", size(m.Total), size(m.Available), host.CPUs())}
	if m.Available < lowMemory {
		f.Level, f.Remedy = levelWarn, "little is left for sandboxes: see `warren top` and the host's own programs"
	}
	return f
}

func checkDisk(state string) finding {
	dir := nearest(state)
	d, err := host.ReadDisk(dir)
	if err != nil {
		return finding{Check: "disk", Level: levelFail, Found: err.Error()}
	}
	f := finding{Check: "disk", Level: levelOK, Found: fmt.Sprintf("%s free of %s at %s", size(d.Free), size(d.Total), dir)}
	if d.Free < lowDisk {
		f.Level, f.Remedy = levelWarn, "templates take about 1 GiB each: free some space, or give the daemon another --state"
	}
	return f
}

// checkReflinks tells whether copies of disks share their blocks.
func checkReflinks(state string) finding {
	if os.Geteuid() != 0 {
		return finding{Check: "reflinks", Level: levelWarn, Found: "can only be checked as root", Remedy: "sudo warren doctor"}
	}
	dir := nearest(state)
	if statefs.Mounted(state) {
		return finding{Check: "reflinks", Level: levelOK, Found: fmt.Sprintf("%s is on the XFS in %s", state, statefs.Image(state))}
	}
	err := host.Reflinks(dir)
	if err == nil {
		return finding{Check: "reflinks", Level: levelOK, Found: "work at " + dir}
	}
	return finding{
		Check: "reflinks", Level: levelWarn, Found: "each capture of a disk is a whole copy: " + err.Error(),
		Remedy: "keep the state on XFS or btrfs, or give an empty --state and `warren serve --state-fs xfs` (apt-get install xfsprogs)",
	}
}

func checkBase(ctx context.Context, c *client.Client) finding {
	t, err := c.Template(ctx, "base")
	if err != nil {
		return finding{Check: "template base", Level: levelWarn, Found: err.Error(), Remedy: "warren template build --base"}
	}
	return finding{Check: "template base", Level: levelOK, Found: fmt.Sprintf("%s, %s, made %s", t.Source, size(t.SizeBytes), ago(t.CreatedAt))}
}

// checkLeftovers counts what the daemon's instance has on the host.
func checkLeftovers(ctx context.Context, c *client.Client, running bool, state string) finding {
	if os.Geteuid() != 0 {
		return finding{Check: "leftovers", Level: levelWarn, Found: "can only be looked for as root", Remedy: "sudo warren doctor"}
	}
	instance, err := host.Instance(state)
	if err != nil {
		return finding{Check: "leftovers", Level: levelFail, Found: err.Error()}
	}
	runDir, err := daemon.RunDir(state)
	if err != nil {
		return finding{Check: "leftovers", Level: levelFail, Found: err.Error()}
	}
	items, err := census.Take(census.Where{Instance: instance, State: state, RunDir: runDir})
	if err != nil {
		return finding{Check: "leftovers", Level: levelWarn, Found: "could not be counted: " + err.Error()}
	}
	ids := map[sandbox.ID]bool{}
	for _, i := range items {
		if i.ID != "" && i.Kind == census.Process {
			ids[i.ID] = true
		}
	}
	if !running {
		if len(items) == 0 {
			return finding{Check: "leftovers", Level: levelOK, Found: "nothing of Warren's is on this host"}
		}
		return finding{
			Check: "leftovers", Level: levelWarn,
			Found:  fmt.Sprintf("%d sandboxes run without a daemon, which has %d things on this host in all", len(ids), len(items)),
			Remedy: "start the daemon (sudo warren serve): it takes over what runs and removes what nothing owns",
		}
	}
	// A create or an end may be under way: look twice before telling of it.
	var cap wire.Capacity
	for range 3 {
		if cap, err = c.Capacity(ctx); err != nil {
			return finding{Check: "leftovers", Level: levelWarn, Found: err.Error()}
		}
		known := cap.Sandboxes + cap.CreatesInFlight + len(cap.Spares)
		if len(ids) <= known {
			return finding{Check: "leftovers", Level: levelOK, Found: fmt.Sprintf("none: %d live sandboxes explain what is on this host", cap.Sandboxes)}
		}
		time.Sleep(500 * time.Millisecond)
		if items, err = census.Take(census.Where{Instance: instance, State: state, RunDir: runDir}); err != nil {
			return finding{Check: "leftovers", Level: levelWarn, Found: "could not be counted: " + err.Error()}
		}
		clear(ids)
		for _, i := range items {
			if i.ID != "" && i.Kind == census.Process {
				ids[i.ID] = true
			}
		}
	}
	return finding{
		Check: "leftovers", Level: levelWarn,
		Found:  fmt.Sprintf("processes of %d sandboxes, and the daemon knows %d", len(ids), cap.Sandboxes),
		Remedy: "restart the daemon: it removes what nothing owns",
	}
}
