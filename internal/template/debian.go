package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"strings"

	"github.com/warrenhq/warren/internal/agent/reseed"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/debian"
	"github.com/warrenhq/warren/internal/template/interpreter"
	"github.com/warrenhq/warren/internal/template/layer"
)

// DefaultSuite is the Debian release of templates that name none.
const DefaultSuite = "bookworm"

// BaseName is the name of the default template.
const BaseName = "base"

// slim is what a sandbox has no use for: it is a third of an installation.
var slim = []string{"/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*"}

var pointBootstrapped = fault.Register("template.debian.bootstrapped")

// Base describes the default template: what an agent finds on the computer
// that it is given. Python with the libraries for data and charts, Node.js
// with npm, git, curl, a C and C++ compiler, and the tools of a shell user.
func Base() DebianOptions {
	return DebianOptions{
		Target: Target{Tenant: SharedTenant, Name: BaseName, Shared: true},
		Reseed: true,
		Suite:  DefaultSuite,
		User:   "user",
		Packages: []string{
			"ca-certificates", "curl", "git", "openssh-client",
			"python3", "python3-pip", "python3-venv", "python-is-python3",
			"python3-numpy", "python3-pandas", "python3-matplotlib", "python3-pil", "python3-requests",
			"nodejs", "npm",
			"build-essential", "pkg-config",
			"procps", "iproute2", "netbase", "tzdata", "sudo",
			"less", "file", "unzip", "zip", "xz-utils", "ripgrep", "jq", "vim-tiny", "nano",
		},
		Env: map[string]string{
			// Debian keeps pip and npm out of the system's directories; in a
			// sandbox the user's own are on the PATH instead.
			"PATH":                      "/home/user/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"PIP_BREAK_SYSTEM_PACKAGES": "1",
			"NPM_CONFIG_PREFIX":         "/home/user/.local",
		},
		// python3-matplotlib brings in a whole compiler of numerical code
		// (pythran) by way of fonttools and scipy: its headers and static
		// libraries are 240 MB that charts do not need.
		Slim: append([]string{
			"/usr/include/boost/*", "/usr/lib/*/openblas-pthread/*.a", "/usr/lib/*/lapack/*.a",
			"/usr/lib/*/blas/*.a", "/usr/share/unicode/*", "/usr/bin/*lto-dump*",
		}, slim...),
		// The libraries' own tests, which dpkg has to see while it compiles
		// Python files, and static libraries for programs that embed Python.
		Prune: []string{
			"usr/lib/python3/dist-packages/*/tests", "usr/lib/python3/dist-packages/*/*/tests",
			"usr/lib/python3/dist-packages/*/*/*/tests", "usr/lib/python3/dist-packages/sympy/integrals/rubi",
			"usr/lib/python3.*/config-*/*.a", "usr/share/nodejs/@types",
		},
	}
}

// CodeInterpreterName is the name of the template with the code interpreter.
const CodeInterpreterName = "code-interpreter-v1"

// CodeInterpreter describes the template with the code interpreter: Base, and
// the service that runs code in Jupyter kernels.
func CodeInterpreter() DebianOptions {
	o := Base()
	o.Name = CodeInterpreterName
	o.Packages = append(o.Packages, interpreter.Packages...)
	o.Interpreter = true
	return o
}

var userPattern = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,31}$`)

// BuildDebian makes a template of Debian packages. It needs mmdebstrap and a
// mirror that can be reached; it takes about a minute for Base.
func (l *Library) BuildDebian(ctx context.Context, o DebianOptions, p Progress) (t Template, err error) {
	if o.Suite == "" {
		o.Suite = DefaultSuite
	}
	if o.User != "" && (!userPattern.MatchString(o.User) || o.User == "root") {
		return t, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a name for the template's user: use a-z, 0-9, _ and -", layer.Quote(o.User))
	}
	if o.Slim == nil {
		o.Slim = slim
	}
	opts := debian.Options{Suite: o.Suite, Packages: o.Packages, Mirror: o.Mirror, Variant: o.Variant, Exclude: o.Slim}
	if err := opts.Check(); err != nil {
		return t, err
	}
	if o.Interpreter {
		if o.StartCmd == "" {
			o.StartCmd = interpreter.StartCmd
		}
		if o.ReadyCmd == "" {
			o.ReadyCmd = interpreter.ReadyCmd
		}
	}
	b, err := l.begin(ctx, o.Target, p)
	if err != nil {
		return t, err
	}
	defer b.end(&err)
	b.emit(Event{Stage: StageResolve, Message: fmt.Sprintf("Debian %s, %d packages", o.Suite, len(o.Packages))})
	dir := b.temp("layer")
	opts.TmpDir = b.temp("apt")
	if err := os.Mkdir(opts.TmpDir, 0o700); err != nil {
		return t, layer.Error("begin the build", err)
	}
	if err := debian.Build(ctx, dir, opts, b.debianProgress); err != nil {
		return t, err
	}
	pointBootstrapped.Hit()
	if err := settle(dir, o.User, o.Prune); err != nil {
		return t, layer.Error("settle the root filesystem", err)
	}
	if o.Reseed {
		if err := installReseed(ctx, dir); err != nil {
			return t, layer.Error("install what seeds random numbers anew in forks", err)
		}
	}
	if o.Interpreter {
		if err := installInterpreter(dir); err != nil {
			return t, layer.Error("install the code interpreter", err)
		}
	}
	digest, err := b.commitTree(dir, layer.HashOptions{})
	if err != nil {
		return t, err
	}
	c := Config{Env: map[string]string{"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}}
	if o.User != "" {
		c.User, c.Workdir = o.User, path.Join("/home", o.User)
	}
	if o.Reseed {
		c.Env["NODE_OPTIONS"] = reseed.NodeOptions
	}
	maps.Copy(c.Env, o.Env)
	return b.finish([]string{digest}, c, "debian:"+o.Suite)
}

func (b *build) debianProgress(p debian.Progress) {
	if p.Line != "" {
		b.emit(Event{Stage: StageLog, Message: p.Line})
	}
	if p.Message != "" {
		b.emit(Event{Stage: StageResolve, Message: p.Message})
	}
	if p.Current > 0 {
		b.emit(Event{Stage: Stage(p.Phase), Current: int64(p.Current), Total: int64(p.Total), Unit: UnitPackages})
	}
}

// leftovers of an installation: caches, logs, and what mmdebstrap took from
// the host or told apt and dpkg for the build alone.
var leftovers = []string{
	"etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
	"etc/hostname", "etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id",
	"var/cache/ldconfig/aux-cache", "var/lib/systemd/random-seed",
}

// emptied are directories whose content goes: what a sandbox mounts over, and
// what only the installation needed.
var emptied = []string{
	"dev", "proc", "sys", "run", "tmp", "var/tmp", "var/cache/apt", "var/lib/apt/lists", "var/log",
}

// settle takes an installation's traces off the root filesystem in dir and
// makes user. Everything goes through os.Root: the packages' scripts are
// trusted, their symlinks need not be.
func settle(dir, user string, prune []string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, f := range leftovers {
		if err := root.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for _, d := range emptied {
		if err := emptyDir(root, d); err != nil {
			return err
		}
	}
	for _, pattern := range prune {
		names, err := fs.Glob(root.FS(), pattern)
		if err != nil {
			return sandbox.Errorf(sandbox.CodeInvalid, "the pattern %s is malformed: %w", layer.Quote(pattern), err)
		}
		for _, n := range names {
			if err := root.RemoveAll(n); err != nil {
				return err
			}
		}
	}
	for _, d := range []string{"var/cache/apt/archives/partial", "var/lib/apt/lists/partial"} {
		if _, err := root.Stat(path.Dir(path.Dir(d))); err != nil {
			continue
		}
		if err := root.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if user == "" {
		return nil
	}
	return addUser(root, user)
}

func installReseed(ctx context.Context, dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := reseed.Install(root); err != nil {
		return err
	}
	// The packages' own programs have run there before.
	return reseed.Compile(ctx, dir)
}

func installInterpreter(dir string) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	return interpreter.Install(root)
}

func emptyDir(root *os.Root, dir string) error {
	st, err := root.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) || (err == nil && !st.IsDir()) {
		return nil
	}
	if err != nil {
		return err
	}
	f, err := root.Open(dir)
	if err != nil {
		return err
	}
	names, err := f.Readdirnames(-1)
	f.Close()
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := root.RemoveAll(path.Join(dir, n)); err != nil {
			return err
		}
	}
	return nil
}

// userID is the id of a template's user: Debian's first for people.
const userID = 1000

// addUser makes a login user as useradd would, without running anything of
// the root filesystem.
func addUser(root *os.Root, name string) error {
	shell := "/bin/sh"
	if _, err := root.Stat("bin/bash"); err == nil {
		shell = "/bin/bash"
	}
	home := path.Join("home", name)
	for _, l := range []struct {
		file, line string
		mode       fs.FileMode
	}{
		{"etc/passwd", fmt.Sprintf("%s:x:%d:%d::/%s:%s", name, userID, userID, home, shell), 0o644},
		{"etc/group", fmt.Sprintf("%s:x:%d:", name, userID), 0o644},
		{"etc/shadow", fmt.Sprintf("%s:!:19000:0:99999:7:::", name), 0o640},
		{"etc/gshadow", fmt.Sprintf("%s:!::", name), 0o640},
	} {
		if err := appendLine(root, l.file, name, l.line, l.mode); err != nil {
			return err
		}
	}
	if err := root.MkdirAll(home, 0o755); err != nil {
		return err
	}
	if skel, err := root.Open("etc/skel"); err == nil {
		names, err := skel.Readdirnames(-1)
		skel.Close()
		if err != nil {
			return err
		}
		for _, n := range names {
			data, err := root.ReadFile(path.Join("etc/skel", n))
			if err != nil {
				continue // a directory: Debian's has none
			}
			if err := root.WriteFile(path.Join(home, n), data, 0o644); err != nil {
				return err
			}
			if err := root.Lchown(path.Join(home, n), userID, userID); err != nil {
				return err
			}
		}
	}
	if err := root.Lchown(home, userID, userID); err != nil {
		return err
	}
	if st, err := root.Stat("etc/sudoers.d"); err == nil && st.IsDir() {
		return root.WriteFile(path.Join("etc/sudoers.d", name), []byte(name+" ALL=(ALL:ALL) NOPASSWD: ALL\n"), 0o440)
	}
	return nil
}

// appendLine adds a line for name to one of the account files, unless it has
// one.
func appendLine(root *os.Root, file, name, line string, mode fs.FileMode) error {
	data, err := root.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	text := string(data)
	if strings.HasPrefix(text, name+":") || strings.Contains(text, "\n"+name+":") {
		return nil
	}
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return root.WriteFile(file, []byte(text+line+"\n"), mode)
}
