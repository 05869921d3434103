package runtimetest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// WriteLayer makes a layer directory of files; a nil-like value of "-" makes
// a whiteout.
func WriteLayer(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if content == "-" {
			err = unix.Mknod(path, unix.S_IFCHR, 0)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func testRootfs(t *testing.T, e *Env) {
	i := e.Create(t, e.Spec(t))
	for _, c := range []struct{ cmd, want string }{
		{"id -u; id -g", "0\n0"},
		{"stat -c '%u:%g' / /etc/of-layer /home/user", "0:0\n0:0\n1000:1000"},
		{"echo changed > /etc/of-layer; cat /etc/of-layer", "changed"},
		{"touch /f && chown 1000:1000 /f && chmod 4755 /f && stat -c '%u:%g %a' /f", "1000:1000 4755"},
		{"rm /etc/group; ls /etc/group 2>/dev/null || echo gone", "gone"},
		{"mkdir -p /srv/a/b && mv /srv/a /srv/c && ls /srv", "c"},
		{"ln /f /g && stat -c %h /f", "2"},
		{"su user -c 'touch /home/user/x && stat -c %u /home/user/x'", "1000"},
		{"echo t > /tmp/x && su user -c 'echo y > /tmp/y' && cat /tmp/x /tmp/y", "t\ny"},
		{"echo s > /dev/shm/x && cat /dev/shm/x", "s"},
		{"head -c 5 /dev/zero | wc -c; head -c 5 /dev/urandom | wc -c; echo x > /dev/null", "5\n5"},
		{"ls /dev/pts /dev/ptmx /dev/tty /dev/fd/0 >/dev/null && echo ok", "ok"},
	} {
		if got := Sh(t, i, c.cmd); got != c.want {
			t.Errorf("%s = %q, want %q", c.cmd, got, c.want)
		}
	}
	if data, err := os.ReadFile(filepath.Join(e.Layer, "etc/of-layer")); err != nil || string(data) != "from the layer\n" {
		t.Errorf("the layer changed: %q, %v", data, err)
	}
}

func testLayers(t *testing.T, e *Env) {
	dir := t.TempDir()
	spec := e.Spec(t)
	// As many as a long Dockerfile makes.
	for n := range 60 {
		l := filepath.Join(dir, fmt.Sprintf("layer,with:odd\\name%d", n))
		WriteLayer(t, l, map[string]string{"seen": fmt.Sprint(n), fmt.Sprintf("only/%d", n): "x"})
		spec.Layers = append([]string{l}, spec.Layers...)
	}
	top := filepath.Join(dir, "top")
	WriteLayer(t, top, map[string]string{"etc/of-layer": "-", "only/7": "-"})
	spec.Layers = append([]string{top}, spec.Layers...)
	i := e.Create(t, spec)
	got := Sh(t, i, "cat /seen; echo; ls /only | wc -l; ls /etc/of-layer 2>/dev/null || echo gone")
	if got != "59\n59\ngone" {
		t.Errorf("seen = %q", got)
	}
}

func testLimits(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	if !e.Driver.Capabilities().HidesHost {
		t.Skip("this runtime shows the host's figures here")
	}
	if got := Sh(t, i, "nproc"); got != "1" {
		t.Errorf("nproc = %s, want 1", got)
	}
	kib, err := strconv.Atoi(Sh(t, i, "awk '/^MemTotal:/{print $2}' /proc/meminfo"))
	if err != nil || kib != spec.Resources.MemoryMiB<<10 {
		t.Errorf("MemTotal = %d KiB, %v; want %d", kib, err, spec.Resources.MemoryMiB<<10)
	}
	if got := Sh(t, i, "grep -c ^processor /proc/cpuinfo"); got != "1" {
		t.Errorf("/proc/cpuinfo has %s processors, want 1", got)
	}
	// The CPU quota holds: a second of busy loop takes a second of time.
	spec = e.Spec(t)
	spec.Resources.CPUs = 0.25
	i = e.Create(t, spec)
	before, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	Exec(ctx, i, "while true; do :; done")
	took := time.Since(start)
	after, err := i.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if used := after.CPUTime - before.CPUTime; used > took/4+took/8+100*time.Millisecond {
		t.Errorf("of 0.25 CPUs it used %v in %v", used, took)
	}
}

// hog fills memory beyond the limit of 256 MiB, in a shell variable.
const hog = "x=0123456789abcdef; while true; do x=$x$x; done"

func testOOM(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	other := e.Create(t, e.Spec(t))
	w, ok := i.(sandbox.OOMWatcher)
	if !ok {
		t.Fatal("not an OOMWatcher")
	}
	counts := make(chan int64, 16)
	watching, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.WatchOOM(watching, func(n int64) { counts <- n }) }()
	defer func() {
		stop()
		if err := <-done; err != nil && err != context.Canceled {
			t.Errorf("WatchOOM: %v", err)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	_, code, err := Exec(ctx, i, hog)
	t.Logf("the command at the memory limit: exit %d, %v", code, err)
	if err == nil && code == 0 {
		t.Error("it ended well")
	}
	select {
	case n := <-counts:
		if n < 1 {
			t.Errorf("count = %d", n)
		}
	case <-ctx.Done():
		t.Error("WatchOOM told nothing")
	}
	if s, err := i.Stats(t.Context()); err != nil || s.OOMKills < 1 {
		t.Errorf("stats = %+v, %v; want OOM kills", s, err)
	}
	Sh(t, i, "true") // the agent is unharmed
	Sh(t, other, "true")
}

// testIsolation tries from inside, as root, what must not work.
//
// It tries in the first sandbox of a driver and in the second: what a driver
// keeps of the first for the next must not weaken that.
func testIsolation(t *testing.T, e *Env) {
	for range 2 {
		isolation(t, e, e.Create(t, e.Spec(t)))
	}
}

func isolation(t *testing.T, e *Env, i sandbox.Instance) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("of the host"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []string{
		"mount -t tmpfs none /mnt",
		"mount -t proc none /home",
		"mount -o remount,rw /sys",
		"mount --bind /bin /home",
		"mknod /tmp/sda b 8 0 && head -c1 /tmp/sda",
		"mknod /tmp/mem c 1 1 && head -c1 /tmp/mem",
		"unshare -U true",
		"unshare -m true",
		"unshare -n true",
		"echo 1 > /proc/sys/kernel/panic",
		"echo c > /proc/sysrq-trigger",
		"echo '|/bin/x' > /proc/sys/kernel/core_pattern",
		"cat /proc/kcore | head -c 1 | grep -q .",
		"head -c1 /proc/keys | grep -q .",
		"cat " + secret,
		"chroot /proc/1/root/proc/1/root cat " + secret,
		"cat /proc/1/root" + secret,
		"ping -c 1 -W 1 127.0.0.1", // a raw or datagram ICMP socket
		"nsenter -t 1 -m true && cat " + secret,
		"echo x > /.warren/agent",
		"rm /.warren/agent",
		"touch /sys/x",
		"touch /sys/fs/cgroup/x",
		"echo 1 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
		"mkdir /sys/fs/cgroup/x /sys/fs/cgroup/memory/x /sys/fs/cgroup/pids/x",
		"dmesg",
		"ls -d /sys/firmware/* 2>/dev/null | grep -q .",
		"ls /run/warren /var/run/docker.sock 2>/dev/null | grep -q .",
		"kill -9 " + fmt.Sprint(os.Getpid()),
		"ls /proc/" + fmt.Sprint(os.Getpid()) + "/exe",
		"hostname other",
	} {
		if e.Driver.Name() == "gvisor" && (cmd == "unshare -U true" || cmd == "dmesg") {
			continue // the Sentry's own, of which the host's kernel knows nothing
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		out, code, err := Exec(ctx, i, cmd)
		cancel()
		if err != nil {
			t.Fatalf("%s: %v", cmd, err)
		}
		if code == 0 {
			t.Errorf("it could: %s: %s", cmd, out)
		}
	}
	// Where the kernel is the host's, a setuid program gives nobody more than he
	// had: busybox tells by what su complains of.
	nnp, suid := "1", "su: must be suid to work properly"
	if e.Driver.Name() == "gvisor" {
		nnp, suid = "0", "su: unknown user nobody-at-all"
	}
	for _, c := range []struct{ cmd, want string }{
		{"awk '/^NoNewPrivs:/{print $2}' /proc/self/status", nnp},
		{"su user -c '/opt/suid/busybox su nobody-at-all 2>&1; true'", suid},
		{"ps | awk 'NR>1 && $1==1{print 1}'", "1"},
		{"ls / | tr '\\n' ' '", Sh(t, i, "ls / | grep -v -e '^\\.' | tr '\\n' ' '")},
	} {
		if got := Sh(t, i, c.cmd); got != c.want {
			t.Errorf("%s = %q, want %q", c.cmd, got, c.want)
		}
	}
	caps := Sh(t, i, "awk '/^CapEff:/{print $2}' /proc/self/status")
	n, err := strconv.ParseUint(strings.TrimSpace(caps), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []int{unix.CAP_SYS_ADMIN, unix.CAP_NET_RAW, unix.CAP_NET_ADMIN, unix.CAP_MKNOD, unix.CAP_SYS_MODULE, unix.CAP_SYS_PTRACE, unix.CAP_SYS_BOOT, unix.CAP_SYS_TIME} {
		if n&(1<<c) != 0 {
			t.Errorf("it has capability %d", c)
		}
	}
}

// testOOMOfAll fills the memory from where ending a command frees none of it:
// files of a tmpfs. The sandbox may be ended for that, and then says why; a
// container may also go on, with writers that are ended each time.
func testOOMOfAll(t *testing.T, e *Env) {
	spec := e.Spec(t)
	i := e.Create(t, spec)
	other := e.Create(t, e.Spec(t))
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	Exec(ctx, i, "for n in 1 2 3 4 5 6; do mkdir -p /dev/shm /dev/x; dd if=/dev/zero of=/dev/shm/$n bs=1M count=100; done")
	Exec(ctx, i, "for n in 1 2 3 4; do dd if=/dev/zero of=/dev/shm/x$n bs=1M count=100; done")
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	exit, err := i.Wait(short)
	if err != nil {
		Sh(t, i, "rm -f /dev/shm/*")
	} else if exit.Reason != sandbox.ReasonOOM {
		t.Errorf("exit = %+v, want %s", exit, sandbox.ReasonOOM)
	}
	t.Logf("exit = %+v, %v", exit, err)
	Sh(t, other, "true")
}
