package template

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
	"github.com/warrenhq/warren/internal/testenv"
)

// debianLibrary opens a library where Debian templates can be built.
func debianLibrary(t *testing.T) *Library {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "mmdebstrap", "apt install mmdebstrap")
	if testing.Short() {
		t.Skip("fetches and installs packages: not in -short")
	}
	return openLibrary(t, filepath.Join(t.TempDir(), "lib"))
}

func TestBuildDebian(t *testing.T) {
	l := debianLibrary(t)
	var packages int64
	tpl, err := l.BuildDebian(context.Background(), DebianOptions{Target: Target{Name: "deb"}, Packages: []string{"busybox-static"}, User: "user", Env: map[string]string{"A": "b"}}, func(e Event) {
		if e.Unit == UnitPackages {
			packages = max(packages, e.Total)
		}
	})
	if sandbox.CodeOf(err) == sandbox.CodeUnavailable {
		t.Skipf("needs a Debian mirror: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if packages == 0 {
		t.Error("no progress in packages was told")
	}
	if !tpl.Config.HasShell || tpl.Config.User != "user" || tpl.Config.Workdir != "/home/user" || tpl.Config.Env["A"] != "b" || tpl.Config.Env["LANG"] == "" {
		t.Errorf("config %+v", tpl.Config)
	}
	_, dirs, err := l.Resolve(context.Background(), "", "deb")
	if err != nil {
		t.Fatal(err)
	}
	v, err := layer.OpenView(dirs)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	for p, want := range map[string]bool{
		"/bin/busybox": true, "/usr/bin/apt-get": true, "/home/user/.bashrc": true, "/etc/apt/sources.list": true,
		"/etc/resolv.conf": false, "/etc/hostname": false, "/etc/machine-id": false, "/dev/null": false,
		"/etc/apt/apt.conf.d/99mmdebstrap": false, "/etc/dpkg/dpkg.cfg.d/99mmdebstrap": false, "/var/cache/apt/pkgcache.bin": false,
		"/var/log/dpkg.log": false, "/usr/share/man/man1": false,
	} {
		if _, err := v.Lookup(p, true); (err == nil) != want {
			t.Errorf("%s: %v", p, err)
		}
	}
	passwd, _ := v.ReadFile("/etc/passwd", 1<<20)
	if !strings.Contains(string(passwd), "user:x:1000:1000::/home/user:/bin/bash\n") {
		t.Errorf("passwd %s", passwd)
	}
	wantClean(t, l)
	wantNoMounts(t, l)
}

func TestDebianRefuses(t *testing.T) {
	l := debianLibrary(t)
	for name, c := range map[string]struct {
		o    DebianOptions
		code sandbox.Code
	}{
		"suite":          {DebianOptions{Suite: "--help"}, sandbox.CodeInvalid},
		"package option": {DebianOptions{Packages: []string{"-x"}}, sandbox.CodeInvalid},
		"package list":   {DebianOptions{Packages: []string{"a,b"}}, sandbox.CodeInvalid},
		"mirror":         {DebianOptions{Mirror: "copy:/etc"}, sandbox.CodeInvalid},
		"user":           {DebianOptions{User: "a:b"}, sandbox.CodeInvalid},
		"variant":        {DebianOptions{Variant: "x --hook"}, sandbox.CodeInvalid},
		"unreachable":    {DebianOptions{Mirror: "http://127.0.0.1:1/debian"}, sandbox.CodeUnavailable},
		"no package":     {DebianOptions{Packages: []string{"no-such-package-at-all"}}, sandbox.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			c.o.Target.Name = "x"
			_, err := l.BuildDebian(context.Background(), c.o, nil)
			if name == "no package" && sandbox.CodeOf(err) == sandbox.CodeUnavailable {
				t.Skipf("needs a Debian mirror: %v", err)
			}
			e := codeIs(t, err, c.code)
			t.Log(e.Message)
			wantClean(t, l)
		})
	}
}

func TestDebianCanceled(t *testing.T) {
	l := debianLibrary(t)
	for _, at := range []string{"extracting archives", "installing essential packages"} {
		ctx, cancel := context.WithCancel(context.Background())
		start := time.Now()
		seen := false
		_, err := l.BuildDebian(ctx, DebianOptions{Target: Target{Name: "x"}}, func(e Event) {
			if strings.Contains(e.Message, at) {
				seen = true
				cancel()
			}
		})
		cancel()
		if sandbox.CodeOf(err) == sandbox.CodeUnavailable {
			t.Skipf("needs a Debian mirror: %v", err)
		}
		if !seen {
			t.Fatalf("it never came to %q", at)
		}
		codeIs(t, err, sandbox.CodeCanceled)
		t.Logf("canceled at %q, gone after %v in all", at, time.Since(start))
		wantClean(t, l)
		wantNoMounts(t, l)
		wantNoProcesses(t, l)
	}
}

// killedEnv makes TestDebianKilledChild build there.
const killedEnv = "WARREN_TEST_DEBIAN_DIR"

func TestDebianKilledChild(t *testing.T) {
	dir := os.Getenv(killedEnv)
	if dir == "" {
		t.Skip("for TestDebianKilled: it is the process that is killed")
	}
	l := openLibrary(t, dir)
	_, err := l.BuildDebian(context.Background(), DebianOptions{Target: Target{Name: "x"}}, func(e Event) { fmt.Println("progress:", e.Message) })
	fmt.Println("ended:", err)
}

// TestDebianKilled kills a process with a build in it: what the build started
// must go too, and its files at the next Open.
func TestDebianKilled(t *testing.T) {
	l := debianLibrary(t)
	l.Close()
	cmd := exec.Command(os.Args[0], "-test.run=^TestDebianKilledChild$", "-test.v")
	cmd.Env = append(os.Environ(), killedEnv+"="+l.dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := ""
	for sc := bufio.NewScanner(out); sc.Scan() && !strings.Contains(sc.Text(), "installing essential packages"); {
		if s, ok := strings.CutPrefix(sc.Text(), "ended: "); ok {
			ended = s
		}
	}
	cmd.Process.Kill()
	cmd.Wait()
	if ended != "" {
		t.Skipf("needs a Debian mirror: %s", ended)
	}
	for deadline := time.Now().Add(30 * time.Second); len(processesOf(l)) > 0 && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	wantNoProcesses(t, l)
	wantNoMounts(t, l)
	again := openLibrary(t, l.dir)
	wantClean(t, again)
}

func wantNoMounts(t *testing.T, l *Library) {
	t.Helper()
	m, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(m), l.dir) {
		t.Error("a mount below the library is left")
	}
}

func wantNoProcesses(t *testing.T, l *Library) {
	t.Helper()
	for _, p := range processesOf(l) {
		t.Errorf("a process is left: %s", p)
	}
}

// processesOf finds the processes that have the library's directory in their
// command line or as their root directory.
func processesOf(l *Library) (out []string) {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		cmd, _ := os.ReadFile(p + "/cmdline")
		root, _ := os.Readlink(p + "/root")
		if bytes.Contains(cmd, []byte(l.dir)) || strings.HasPrefix(root, l.dir) {
			out = append(out, fmt.Sprintf("%s %q", p, cmd))
		}
	}
	return out
}
