package prove

import (
	"context"
	_ "embed"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	//go:embed boundary.sh
	boundaryScript string
	//go:embed reach.sh
	reachScript string
)

// boundary tells what is seen and reached of the host from inside, as root
// there: what the code that is kept in would try.
func (m *measurement) boundary(ctx context.Context) ([]Row, error) {
	sb, err := m.create(ctx, wire.CreateSandbox{Network: wire.Network{Mode: sandbox.NetworkEgress}})
	if err != nil {
		return nil, err
	}
	defer m.kill(ctx, sb.ID)
	res, err := m.exec(ctx, sb.ID, wire.Exec{
		Cmd: wire.Command{Argv: []string{"/bin/sh", "-c", boundaryScript}}, User: "root", Cwd: "/", MaxOutput: 1 << 20,
	})
	if err != nil {
		return nil, err
	}
	facts := sections(string(res.OutBytes()))
	rows := judgeBoundary(facts, m.host, sb)
	return append(rows, m.reaches(ctx, sb)...), nil
}

// sections reads the output of boundary.sh.
func sections(out string) map[string]string {
	m := map[string]string{}
	name := ""
	for line := range strings.Lines(out) {
		if n, ok := strings.CutPrefix(line, "@@ "); ok {
			name = strings.TrimSpace(n)
			m[name] = ""
		} else if name != "" {
			m[name] += line
		}
	}
	for k, v := range m {
		m[k] = strings.TrimSpace(v)
	}
	return m
}

// judgeBoundary reads the facts. A row is Yes where the boundary holds, and No
// where something of the host comes through.
func judgeBoundary(f map[string]string, h Host, sb wire.Sandbox) []Row {
	var rows []Row
	add := func(id, name string, v Verdict, format string, args ...any) {
		rows = append(rows, Row{ID: id, Name: name, Verdict: v, Detail: oneLine(fmt.Sprintf(format, args...))})
	}
	if _, ok := f["end"]; !ok {
		add("probe", "the probe ran whole", No, "it broke off: what is missing below was not looked at")
	}

	// The kernel.
	release := ""
	if w := strings.Fields(f["uname"]); len(w) > 1 {
		release = w[1]
	}
	shared := h.Local && release != "" && release == h.Kernel
	switch {
	case release == "":
		add("kernel", "a kernel of its own", Skip, "uname told nothing")
	case !h.Local:
		add("kernel", "a kernel of its own", Info, "%s; the host's is not known here", f["uname"])
	case shared:
		add("kernel", "a kernel of its own", No, "the host's, %s: a hole in it is a hole in the sandbox", release)
	default:
		add("kernel", "a kernel of its own", Yes, "%s; the host has %s", f["uname"], h.Kernel)
	}
	add("version", "/proc/version", Info, "%s", f["version"])

	// Processes: the first one is the agent, and this program is not there.
	pids := strings.Split(f["pids"], "\n")
	first, mine := "", false
	for _, line := range pids {
		pid, comm, _ := strings.Cut(line, " ")
		if pid == "1" {
			first = comm
		}
		if pid == strconv.Itoa(os.Getpid()) && comm == strings.TrimSpace(firstLine("/proc/self/comm")) {
			mine = true
		}
	}
	switch {
	case f["pids"] == "":
		add("pids", "no processes of the host", Skip, "/proc shows none at all")
	case first != "warren-agent" && first != "agent" && len(pids) > 50, h.Local && mine:
		add("pids", "no processes of the host", No, "%d processes, the first is %q", len(pids), first)
	default:
		add("pids", "no processes of the host", Yes, "%d seen, the first is %q", len(pids), first)
	}

	// Mounts: paths of the host that show in a source or an option.
	if paths := hostPaths(f["mounts"]); f["mounts"] == "" {
		add("mounts", "no paths of the host in the mounts", Skip, "/proc/self/mounts is not there")
	} else if len(paths) > 0 {
		add("mounts", "no paths of the host in the mounts", No, "names only, their files are not reached by them: %s", strings.Join(paths[:min(3, len(paths))], ", "))
	} else {
		add("mounts", "no paths of the host in the mounts", Yes, "%d mounts", len(strings.Split(f["mounts"], "\n")))
	}

	switch {
	case strings.Contains(f["dmesg"], "not found"):
		add("dmesg", "the host's kernel log is hidden", Skip, "the template has no dmesg")
	case f["dmesgcode"] != "0":
		add("dmesg", "the host's kernel log is hidden", Yes, "%s", lastLine(f["dmesg"]))
	case shared:
		add("dmesg", "the host's kernel log is hidden", No, "it can be read")
	case h.Local:
		add("dmesg", "the host's kernel log is hidden", Yes, "dmesg reads the log of its own kernel: %s", lastLine(f["dmesg"]))
	default:
		add("dmesg", "the host's kernel log is hidden", Info, "dmesg reads a log: %s", lastLine(f["dmesg"]))
	}

	st := status(f["status"])
	caps, err := strconv.ParseUint(st["CapEff"], 16, 64)
	switch bad := dangerous(caps); {
	case err != nil:
		add("caps", "root's capabilities inside are few", Skip, "/proc/self/status has no CapEff")
	case len(bad) > 0 && shared:
		add("caps", "root's capabilities inside are few", No, "%d, with %s", popcount(caps), strings.Join(bad, ", "))
	case len(bad) > 0:
		add("caps", "root's capabilities inside are few", Info, "%d, with %s: of its own kernel", popcount(caps), strings.Join(bad, ", "))
	default:
		add("caps", "root's capabilities inside are few", Yes, "%d: %s", popcount(caps), strings.Join(capNames(caps), ", "))
	}
	switch mode := st["Seccomp"]; {
	case mode == "2":
		add("seccomp", "system calls are filtered", Yes, "mode 2 (filter)")
	case mode == "":
		add("seccomp", "system calls are filtered", Skip, "/proc/self/status does not say")
	case shared:
		add("seccomp", "system calls are filtered", No, "mode %s", mode)
	default:
		add("seccomp", "system calls are filtered", Info, "mode %s inside: its calls go to a kernel of its own", mode)
	}
	if v := st["NoNewPrivs"]; v == "" {
		add("nnp", "no_new_privs", Skip, "/proc/self/status does not say")
	} else if v == "0" && !shared {
		add("nnp", "no_new_privs", Info, "set-id programs (sudo) work inside: the ids are of a kernel of its own")
	} else {
		add("nnp", "no_new_privs", verdict(v == "1"), "NoNewPrivs is %s", v)
	}
	if w := strings.Fields(f["uidmap"]); len(w) < 3 {
		add("uids", "root inside is not the host's root", Skip, "/proc/self/uid_map is not there")
	} else if w[0] == "0" && w[1] == "0" {
		v := Info
		if shared {
			v = No
		}
		add("uids", "root inside is not the host's root", v, "uid_map is %s", strings.Join(w[:3], " "))
	} else {
		add("uids", "root inside is not the host's root", Yes, "uid 0 inside is %s outside", w[1])
	}
	if f["writable"] == "" {
		add("knobs", "the kernel's knobs cannot be written", Yes, "core_pattern, sysrq-trigger, uevent_helper, drop_caches refuse")
	} else {
		v := Info
		if shared {
			v = No
		}
		add("knobs", "the kernel's knobs cannot be written", v, "opened for writing: %s", f["writable"])
	}
	if d := strings.Fields(f["devices"]); len(d) == 0 {
		add("devices", "no device of the host", Yes, "no kvm, mem, fuse, tun, kmsg or disk in /dev")
	} else {
		add("devices", "no device of the host", Info, "%s", strings.Join(d, " "))
	}
	if f["dmi"] == "" {
		add("dmi", "the machine's make is hidden", Yes, "no DMI in /sys")
	} else {
		add("dmi", "the machine's make is hidden", No, "%s", f["dmi"])
	}

	// The limits, or the host's figures.
	if n, err := strconv.Atoi(f["nproc"]); err != nil {
		add("nproc", "nproc shows the limit", Skip, "there is no nproc")
	} else {
		want := max(1, int(sb.Resources.CPUs+0.999))
		add("nproc", "nproc shows the limit", verdict(n == want), "%d; the limit is %g CPUs%s", n, sb.Resources.CPUs, ofHost(h, fmt.Sprint(h.CPUs)))
	}
	kib, ok := memTotal(f["meminfo"])
	if !ok {
		add("meminfo", "/proc/meminfo shows the limit", Skip, "it has no MemTotal")
	} else {
		mib := int(kib >> 10)
		add("meminfo", "/proc/meminfo shows the limit", verdict(mib <= sb.Resources.MemoryMiB), "%d MiB; the limit is %d MiB%s",
			mib, sb.Resources.MemoryMiB, ofHost(h, fmt.Sprintf("%d MiB", h.MemoryMiB)))
	}
	return rows
}

func ofHost(h Host, what string) string {
	if !h.Local {
		return ""
	}
	return ", the host has " + what
}

func verdict(ok bool) Verdict {
	if ok {
		return Yes
	}
	return No
}

// hostPaths finds paths of the host in mount sources and overlay's options. One in
// /dev, /proc or /sys is none.
var kernelsOwn = regexp.MustCompile(`^/(dev|sys|proc)(/|$)`)

var overlayDirs = regexp.MustCompile(`(?:lowerdir|upperdir|workdir)=([^,\s]+)`)

func hostPaths(mounts string) []string {
	var out []string
	for line := range strings.Lines(mounts) {
		w := strings.Fields(line)
		if len(w) < 4 {
			continue
		}
		if strings.HasPrefix(w[0], "/") && !kernelsOwn.MatchString(w[0]) {
			out = append(out, w[0])
		}
		for _, m := range overlayDirs.FindAllStringSubmatch(w[3], -1) {
			for p := range strings.SplitSeq(m[1], ":") {
				if strings.HasPrefix(p, "/") && !strings.HasPrefix(p, "/proc/self/") {
					out = append(out, p)
				}
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// status reads the "Name:\tvalue" lines of /proc/self/status.
func status(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

func memTotal(s string) (kib int64, ok bool) {
	w := strings.Fields(status(s)["MemTotal"])
	if len(w) == 0 {
		return 0, false
	}
	n, err := strconv.ParseInt(w[0], 10, 64)
	return n, err == nil
}

// capability names by number, capabilities(7).
var capabilities = []string{
	"chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "linux_immutable",
	"net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner", "sys_module", "sys_rawio", "sys_chroot",
	"sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice", "sys_resource", "sys_time", "sys_tty_config", "mknod", "lease",
	"audit_write", "audit_control", "setfcap", "mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read",
	"perfmon", "bpf", "checkpoint_restore",
}

func capNames(mask uint64) []string {
	var out []string
	for n := range 64 {
		if mask&(1<<n) == 0 {
			continue
		}
		if n < len(capabilities) {
			out = append(out, capabilities[n])
		} else {
			out = append(out, fmt.Sprint(n))
		}
	}
	return out
}

// dangerous names those with which root could act on a kernel that it shares.
func dangerous(mask uint64) []string {
	const bad = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_MODULE | 1<<unix.CAP_SYS_RAWIO | 1<<unix.CAP_SYS_PTRACE | 1<<unix.CAP_SYS_BOOT |
		1<<unix.CAP_SYS_TIME | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_MKNOD | 1<<unix.CAP_DAC_READ_SEARCH |
		1<<unix.CAP_BPF | 1<<unix.CAP_PERFMON | 1<<unix.CAP_SYSLOG | 1<<unix.CAP_CHECKPOINT_RESTORE
	return capNames(mask & bad)
}

func popcount(mask uint64) int { return len(capNames(mask)) }

// metadata is where clouds serve a machine's credentials.
const metadata = "169.254.169.254"

// reaches tries from inside to connect to what must not be reached. Where the
// program shares the host, it listens there itself and counts who comes, which
// is evidence that a timeout inside is not.
func (m *measurement) reaches(ctx context.Context, sb wire.Sandbox) []Row {
	var rows []Row
	try := func(host string, port int) (string, error) {
		res, err := m.exec(ctx, sb.ID, wire.Exec{
			Cmd: wire.Command{Argv: []string{"/bin/sh", "-c", reachScript, "reach", host, strconv.Itoa(port)}}, User: "root", Cwd: "/",
		})
		if err != nil {
			return "", err
		}
		return lastLine(string(res.OutBytes()) + string(res.ErrBytes())), nil
	}
	row := func(id, name, host string, port int, came func() bool, more string) {
		m.progress("%s: %s", m.runtime, name)
		r := Row{ID: id, Name: name}
		start := time.Now()
		said, err := try(host, port)
		r.TookMS = millis(time.Since(start))
		switch {
		case err != nil:
			r.Verdict, r.Detail = Skip, err.Error()
		case said == "connected" || came != nil && came():
			r.Verdict, r.Detail = No, fmt.Sprintf("%s:%d was reached", host, port)
		case strings.HasPrefix(said, "cannot try"):
			r.Verdict, r.Detail = Skip, said
		default:
			r.Verdict, r.Detail = Yes, fmt.Sprintf("%s:%d: %s%s", host, port, said, more)
		}
		r.Detail = oneLine(r.Detail)
		rows = append(rows, r)
	}

	more := ""
	if m.host.Local {
		if c, err := net.DialTimeout("tcp", net.JoinHostPort(metadata, "80"), 2*time.Second); err == nil {
			c.Close()
			more = " (the host itself reaches it)"
		} else {
			more = " (nor does the host: there is none here)"
		}
	}
	row("metadata", "the cloud's metadata is out of reach", metadata, 80, nil, more)

	if !m.host.Local {
		for _, r := range [][2]string{{"hostloop", "the host's loopback is out of reach"}, {"hostaddr", "the host's own addresses are out of reach"}} {
			rows = append(rows, Row{ID: r[0], Name: r[1], Verdict: Skip, Detail: "the daemon is on another machine: nothing can be put there to listen"})
		}
	} else {
		rows = append(rows, m.hostReach(sb, row)...)
	}

	other, err := m.create(ctx, wire.CreateSandbox{})
	if err != nil {
		return append(rows, Row{ID: "other", Name: "other sandboxes are out of reach", Verdict: Skip, Detail: oneLine(err.Error())})
	}
	defer m.kill(ctx, other.ID)
	if other.Address == "" {
		return append(rows, Row{ID: "other", Name: "other sandboxes are out of reach", Verdict: Yes, Detail: "they have no address"})
	}
	row("other", "other sandboxes are out of reach", other.Address, sandbox.AgentPort, nil, " (the agent listens there)")
	return rows
}

// hostReach listens on the host, on loopback and on every address, and has the
// sandbox try: its gateway, the host's other addresses, and 127.0.0.1.
func (m *measurement) hostReach(sb wire.Sandbox, row func(id, name, host string, port int, came func() bool, more string)) []Row {
	fail := func(err error) []Row {
		return []Row{{ID: "hostaddr", Name: "the host's own addresses are out of reach", Verdict: Skip, Detail: oneLine(err.Error())}}
	}
	all, err := countOn(":0")
	if err != nil {
		return fail(err)
	}
	defer all.Close()
	loop, err := countOn("127.0.0.1:0")
	if err != nil {
		return fail(err)
	}
	defer loop.Close()
	// The control: a listener that nobody could reach would prove nothing.
	for _, l := range []*counter{all, loop} {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", l.port), 5*time.Second)
		if err != nil {
			return fail(fmt.Errorf("this machine cannot connect to itself: %w", err))
		}
		c.Close()
		for end := time.Now().Add(5 * time.Second); !l.came() && time.Now().Before(end); {
			time.Sleep(5 * time.Millisecond)
		}
		l.n.Store(0)
	}
	const listens = " (a listener waits there)"
	row("hostloop", "the host's loopback is out of reach", "127.0.0.1", loop.port, loop.came, listens)
	if a, err := netip.ParseAddr(sb.Address); err == nil {
		row("gateway", "the host's end of the link is out of reach", a.Prev().String(), all.port, all.came, listens)
	}
	if own := ownAddress(); own == "" {
		return []Row{{ID: "hostaddr", Name: "the host's own addresses are out of reach", Verdict: Skip, Detail: "the host has no other address"}}
	} else {
		row("hostaddr", "the host's own addresses are out of reach", own, all.port, all.came, listens)
	}
	return nil
}

// ownAddress gives an IPv4 address of this machine that is neither loopback
// nor a link of Warren's.
func ownAddress() string {
	links, _ := net.Interfaces()
	for _, l := range links {
		if l.Flags&net.FlagLoopback != 0 || l.Flags&net.FlagUp == 0 || strings.HasPrefix(l.Name, "wr") {
			continue
		}
		addrs, _ := l.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() {
				return p.Addr().String()
			}
		}
	}
	return ""
}

// counter is a listener that counts who comes.
type counter struct {
	net.Listener
	port int
	n    atomic.Int64
	done chan struct{}
}

func countOn(addr string) (*counter, error) {
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		return nil, err
	}
	c := &counter{Listener: l, port: l.Addr().(*net.TCPAddr).Port, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			c.n.Add(1)
			conn.Close()
		}
	}()
	return c, nil
}

func (c *counter) came() bool { return c.n.Load() > 0 }

// Close ends the listener and its goroutine.
func (c *counter) Close() error {
	err := c.Listener.Close()
	<-c.done
	return err
}
