// Package debian makes a Debian root filesystem by driving mmdebstrap.
package debian

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// Options describe the root filesystem.
type Options struct {
	Suite    string
	Packages []string
	Mirror   string   // "" is the host's own sources for the suite, else mmdebstrap's default
	Variant  string   // mmdebstrap's; "" is minbase
	Exclude  []string // path patterns that no package gets to unpack (dpkg's --path-exclude)
	TmpDir   string   // an existing directory for the build's own files; the caller removes it
}

// Phase is what mmdebstrap is doing.
type Phase string

// The phases.
const (
	Resolving   Phase = "resolve"  // reading the package lists
	Downloading Phase = "download" // Current of Total packages
	Unpacking   Phase = "extract"  // Current of Total packages
	Configuring Phase = "install"  // Current of Total packages
)

// Progress is one step forward. Line is a line of output where it is not "".
type Progress struct {
	Phase          Phase
	Current, Total int
	Message, Line  string
}

var (
	suitePattern   = regexp.MustCompile(`^[a-z][a-z0-9-]{0,40}$`)
	packagePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,127}(:[a-z0-9-]{1,32})?([=/][A-Za-z0-9.+:~-]{1,128})?$`)
	variants       = map[string]bool{"minbase": true, "apt": true, "essential": true, "custom": true, "standard": true, "important": true, "required": true, "buildd": true}
)

// maxPackages bounds the packages asked for: they go on one command line.
const maxPackages = 2000

// Check validates o. The errors have CodeInvalid, or CodeTooLarge.
func (o Options) Check() error {
	if !suitePattern.MatchString(o.Suite) {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a Debian suite: give a name such as bookworm", layer.Quote(o.Suite))
	}
	if len(o.Packages) > maxPackages {
		return sandbox.Errorf(sandbox.CodeTooLarge, "%d packages were asked for: the most is %d; metapackages say more with less", len(o.Packages), maxPackages)
	}
	for _, p := range o.Packages {
		if !packagePattern.MatchString(p) {
			return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a Debian package's name", layer.Quote(p))
		}
	}
	if o.Variant != "" && !variants[o.Variant] {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a variant that mmdebstrap knows: give minbase, apt, essential or custom", layer.Quote(o.Variant))
	}
	if o.Mirror != "" {
		u, err := url.Parse(o.Mirror)
		if err != nil || strings.ContainsAny(o.Mirror, " \t\n[]") || (u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "file") {
			return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a mirror: give an http, https or file URL", layer.Quote(o.Mirror))
		}
	}
	return nil
}

// Build makes the root filesystem in dir, which must not exist. The command
// and all that it starts live in a PID and mount namespace that ends with ctx
// and with this process: no process or mount of theirs is left, and dir is
// all that a caller has to remove after an error.
func Build(ctx context.Context, dir string, o Options, progress func(Progress)) error {
	if err := o.Check(); err != nil {
		return err
	}
	for _, tool := range []string{"mmdebstrap", "unshare"} {
		if _, err := exec.LookPath(tool); err != nil {
			return sandbox.Errorf(sandbox.CodeUnavailable, "building from Debian packages needs %s: apt install mmdebstrap util-linux: %w", tool, err)
		}
	}
	conf, err := acquireConfig(ctx, o.TmpDir)
	if err != nil {
		return err
	}
	return run(ctx, command(dir, o, conf), o.TmpDir, progress)
}

func command(dir string, o Options, conf string) []string {
	variant := o.Variant
	if variant == "" {
		variant = "minbase"
	}
	args := []string{
		// A namespace of its own: killing its first process ends all, and its
		// mounts go with it.
		"unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--",
		"mmdebstrap", "--mode=root", "--format=directory", "--verbose", "--variant=" + variant,
		"--aptopt=APT::Install-Recommends \"false\"",
		"--aptopt=APT::Install-Suggests \"false\"",
		// The layer is synced as a whole afterwards.
		"--dpkgopt=force-unsafe-io",
	}
	if conf != "" {
		args = append(args, "--aptopt="+conf)
	}
	for _, p := range o.Exclude {
		args = append(args, "--dpkgopt=path-exclude="+p)
	}
	if len(o.Exclude) > 0 { // licences stay, as distributing them asks for
		args = append(args, "--dpkgopt=path-include=/usr/share/doc/*/copyright")
	}
	if len(o.Packages) > 0 {
		args = append(args, "--include="+strings.Join(o.Packages, ","))
	}
	args = append(args, "--", o.Suite, dir)
	if o.Mirror != "" {
		return append(args, o.Mirror)
	}
	return append(args, HostSources("/", o.Suite)...)
}

// carried are the settings of the host's apt that fetching depends on. None
// weakens what apt verifies but the two about dates, which a host that uses an
// archive's snapshot needs.
var carried = []string{
	"Acquire::http::", "Acquire::https::", "Acquire::Retries ", "Acquire::ForceIPv4 ", "Acquire::ForceIPv6 ",
	"Acquire::Check-Valid-Until ", "Acquire::Check-Date ", "Acquire::Max-FutureTime ",
}

// acquireConfig writes how the host's apt fetches (proxies, timeouts,
// checks) into a file for mmdebstrap, whose apt does not read the host's
// configuration. It goes by file because it can hold a proxy's password. ""
// is nothing to say.
func acquireConfig(ctx context.Context, tmp string) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-config", "dump").Output()
	if err != nil {
		return "", nil // no apt on this host: mmdebstrap tells what it lacks
	}
	var b strings.Builder
	for line := range strings.Lines(string(out)) {
		for _, prefix := range carried {
			if strings.HasPrefix(line, prefix) && !strings.Contains(line, ` "";`) {
				b.WriteString(line)
			}
		}
	}
	if b.Len() == 0 {
		return "", nil
	}
	path := filepath.Join(tmp, "apt-acquire.conf")
	return path, layer.Error("write apt's configuration", os.WriteFile(path, []byte(b.String()), 0o600))
}

// killWait is how long after a kill the output's pipe may stay open.
const killWait = 10 * time.Second

func run(ctx context.Context, argv []string, tmp string, progress func(Progress)) error {
	// PDEATHSIG goes by the thread that forks: it must live as long as the
	// child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, w, err := os.Pipe()
	if err != nil {
		return layer.Error("run mmdebstrap", err)
	}
	defer r.Close()
	defer w.Close()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "PATH="+pathWithSbin())
	cmd.Stdout, cmd.Stderr = w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killWait
	if err := cmd.Start(); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "mmdebstrap does not start: %w", err)
	}
	w.Close()
	p := &parser{progress: progress}
	read := make(chan struct{})
	go func() {
		defer close(read)
		p.read(r)
	}()
	err = cmd.Wait()
	if ctx.Err() != nil {
		// The namespace is gone, but a hook may have passed the pipe on.
		r.SetReadDeadline(time.Now().Add(killWait))
	}
	<-read
	if ctx.Err() != nil {
		return layer.Error("build from Debian packages", ctx.Err())
	}
	if err != nil {
		return p.failure(err)
	}
	return nil
}

func pathWithSbin() string {
	p := os.Getenv("PATH")
	for _, d := range []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		if !strings.Contains(":"+p+":", ":"+d+":") {
			p += ":" + d
		}
	}
	return strings.TrimPrefix(p, ":")
}

// parser turns mmdebstrap's verbose output into progress.
type parser struct {
	progress func(Progress)
	total    int
	got, in  int
	set      int
	tail     []string
}

var newlyInstalled = regexp.MustCompile(`^\d+ upgraded, (\d+) newly installed`)

// tailLines is how much of the output an error keeps.
const tailLines = 40

func (p *parser) read(r io.Reader) {
	br := bufio.NewReaderSize(r, 16<<10)
	for {
		line, err := br.ReadSlice('\n')
		if len(line) > 0 {
			p.line(strings.TrimRight(strings.ToValidUTF8(string(line), "\uFFFD"), "\r\n"))
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

func (p *parser) line(s string) {
	e := Progress{Phase: Configuring, Line: s}
	switch {
	case strings.HasPrefix(s, "I: "):
		e.Message = strings.TrimSuffix(strings.TrimPrefix(s, "I: "), "...")
		e.Phase = Resolving
	case strings.HasPrefix(s, "Get:"):
		p.got++
		e.Phase, e.Current = Downloading, p.got
	case strings.HasPrefix(s, "Unpacking "):
		p.in++
		e.Phase, e.Current = Unpacking, p.in
	case strings.HasPrefix(s, "Setting up "):
		p.set++
		e.Phase, e.Current = Configuring, p.set
	default:
		if m := newlyInstalled.FindStringSubmatch(s); m != nil {
			var n int
			fmt.Sscan(m[1], &n)
			p.total += n
		}
	}
	if s != "" {
		if p.tail = append(p.tail, s); len(p.tail) > tailLines {
			p.tail = p.tail[1:]
		}
	}
	if e.Current > 0 {
		e.Total = max(p.total, e.Current)
	}
	if p.progress != nil {
		p.progress(e)
	}
}

var noPackage = regexp.MustCompile(`E: (?:Unable to locate package|Package '?)\s*'?([^' ]+)`)

// failure says why mmdebstrap failed, as far as its output tells.
func (p *parser) failure(err error) error {
	tail := strings.Join(p.tail, "\n")
	var e *sandbox.Error
	switch m := noPackage.FindStringSubmatch(tail); {
	case m != nil:
		e = sandbox.Errorf(sandbox.CodeInvalid, "the suite has no package %s: check its name for this suite", layer.Quote(m[1]))
	case strings.Contains(tail, "No space left on device"):
		e = sandbox.Errorf(sandbox.CodeDiskFull, "the disk that holds the templates became full while packages were installed: free space on it")
	case strings.Contains(tail, "does not have a Release file"), strings.Contains(tail, "404  Not Found"):
		e = sandbox.Errorf(sandbox.CodeInvalid, "the mirror does not have the suite: check the suite's and the mirror's names")
	case strings.Contains(tail, "Could not resolve"), strings.Contains(tail, "Could not connect"), strings.Contains(tail, "Failed to fetch"), strings.Contains(tail, "Temporary failure resolving"):
		e = sandbox.Errorf(sandbox.CodeUnavailable, "the Debian mirror cannot be reached: check the network and the host's apt, or give another mirror")
	default:
		e = sandbox.Errorf(sandbox.CodeBuildFailed, "mmdebstrap failed (%v): %s", err, lastError(p.tail))
	}
	return e.With("output", tail)
}

// lastError picks the line that says most.
func lastError(tail []string) string {
	for i := len(tail) - 1; i >= 0; i-- {
		if strings.HasPrefix(tail[i], "E: ") && !strings.Contains(tail[i], "mmdebstrap failed to run") {
			return tail[i]
		}
	}
	if len(tail) > 0 {
		return tail[len(tail)-1]
	}
	return "it said nothing"
}
