package prove

import (
	"context"
	"embed"
	"fmt"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/api/wire"
)

// work is one piece of real work: a script in battery/ that exits with 0 where
// it succeeded, exitSkip where it cannot be tried (its last line says why), and
// exitNo where the system refuses what it asks (its last line says what).
type work struct {
	id, name string
	root     bool          // run as root, else as the template's user
	limit    time.Duration // 0: workLimit
	slow     bool          // left out of a quick run
	// install is a command that it needs and the Debian packages of it. Where the
	// template has it not, it is installed in the sandbox, but for a quick run.
	install []string
}

const (
	exitSkip  = 77 // as automake has it
	exitNo    = 78
	workLimit = 60 * time.Second
	// installLimit bounds what is installed for one piece of work.
	installLimit = 8 * time.Minute
	installer    = "install" // its script
)

var battery = []work{
	{id: "shell", name: "shell, pipes, coreutils"},
	{id: "c", name: "compile and run C"},
	{id: "make", name: "make -j4"},
	{id: "deb", name: "apt-get install of a .deb", root: true},
	{id: "aptnet", name: "apt-get install over the network", root: true, limit: 120 * time.Second, slow: true},
	{id: "numpy", name: "Python: numpy"},
	{id: "pyext", name: "Python: native code built from source", limit: 120 * time.Second, slow: true},
	{id: "pyproc", name: "Python: multiprocessing"},
	{id: "sqlite", name: "SQLite with WAL"},
	{id: "node", name: "Node.js: HTTP, worker thread"},
	{id: "npm", name: "npm pack and install"},
	{id: "git", name: "git init, commit, clone, fsck", slow: true},
	{id: "http", name: "HTTP server and curl on loopback"},
	{id: "browser", name: "headless browser", limit: 120 * time.Second, install: []string{"chromium", "chromium", "chromium-sandbox"}},
	{id: "lsp", name: "language server", install: []string{"pylsp", "python3-pylsp"}},
	{id: "strace", name: "strace", install: []string{"strace", "strace"}},
	{id: "ptrace", name: "ptrace"},
	{id: "inotify", name: "inotify"},
	{id: "epoll", name: "epoll, eventfd, timerfd"},
	{id: "iouring", name: "io_uring"},
	{id: "unix", name: "unix sockets"},
	{id: "locks", name: "file locks"},
	{id: "mmap", name: "mmap of a large file"},
	{id: "bigfile", name: "64 MiB file written and flushed"},
	{id: "procs", name: "1000 processes", limit: 120 * time.Second},
	{id: "threads", name: "1000 threads", limit: 120 * time.Second},
	{id: "tar", name: "GNU tar, xattrs, sparse files"},
	{id: "sudo", name: "sudo"},
	{id: "setuid", name: "setuid programs", root: true},
	{id: "userns", name: "user namespaces, as a user"},
	{id: "docker", name: "docker-in-sandbox: what it needs", root: true},
	{id: "fuse", name: "FUSE mount", root: true},
	{id: "tun", name: "TUN/TAP device", root: true},
	{id: "ping", name: "ping", root: true, install: []string{"ping", "iputils-ping"}},
}

//go:embed battery/*.sh
var scripts embed.FS

// prelude is what every script of the battery begins with.
const prelude = `set -eu
skip() { echo "$*"; exit 77; }
no() { echo "$*"; exit 78; }
need() { for c; do command -v "$c" >/dev/null 2>&1 || skip "$c is not in the template"; done; }
cd "$(mktemp -d)" || skip "no temporary directory can be made"
`

func script(id string) (string, error) {
	data, err := scripts.ReadFile("battery/" + id + ".sh")
	return prelude + string(data), err
}

// runBattery does all work in one sandbox, one after the other, and in a new
// one after work that ended it.
func (m *measurement) runBattery(ctx context.Context) ([]Row, error) {
	// What 1000 processes and a compiler need, where the host has it.
	ask := wire.ResourceRequest{MemoryMiB: 2048, PIDs: 2048}
	if c, err := m.o.Client.Capacity(ctx); err == nil && c.MemoryBudget-c.MemoryPromised < 4<<30 {
		ask.MemoryMiB = 1024
	}
	var id string
	defer func() {
		if id != "" {
			m.kill(ctx, id)
		}
	}()
	var rows []Row
	for i, w := range battery {
		m.progress("%s: %s (%d of %d)", m.runtime, w.name, i+1, len(battery))
		if w.slow && m.o.Quick {
			rows = append(rows, Row{ID: w.id, Name: w.name, Verdict: Skip, Detail: "left out of a quick run"})
			continue
		}
		if id == "" {
			sb, err := m.create(ctx, wire.CreateSandbox{Resources: ask})
			if err != nil {
				return rows, err
			}
			id = sb.ID
		}
		row, err := m.do(ctx, id, w)
		if err != nil {
			return rows, fmt.Errorf("%s: %w", w.name, err)
		}
		if why := m.end(ctx, id); why != "" {
			row.Verdict, row.Detail = No, fmt.Sprintf("the sandbox (%d MiB) did not outlive it: %s", ask.MemoryMiB, why)
			m.kill(ctx, id)
			id = ""
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// do does one piece of work, after what it lacks was installed where it cannot
// be tried else. Its error is the platform's, not the work's.
func (m *measurement) do(ctx context.Context, id string, w work) (Row, error) {
	row, err := m.perform(ctx, id, w)
	if err != nil || row.Verdict != Skip || len(w.install) == 0 {
		return row, err
	}
	if m.o.Quick {
		row.Detail += "; a quick run installs nothing"
		return row, nil
	}
	m.progress("%s: %s: installing %s", m.runtime, w.name, w.install[0])
	how, err := m.perform(ctx, id, work{id: installer, name: w.name, root: true, limit: installLimit}, w.install...)
	if err != nil {
		return row, err
	}
	if how.Verdict != Yes {
		row.Detail = how.Detail
		return row, nil
	}
	row, err = m.perform(ctx, id, w)
	row.Detail = strings.TrimSpace(row.Detail + " (" + how.Detail + ")")
	return row, err
}

// perform runs a piece of work's script.
func (m *measurement) perform(ctx context.Context, id string, w work, args ...string) (Row, error) {
	row := Row{ID: w.id, Name: w.name}
	text, err := script(w.id)
	if err != nil {
		return row, err
	}
	limit := w.limit
	if limit == 0 {
		limit = workLimit
	}
	user := ""
	if w.root {
		user = "root"
	}
	start := time.Now()
	res, err := m.exec(ctx, id, wire.Exec{
		Cmd: wire.Command{Argv: append([]string{"/bin/sh", "-c", text, "sh"}, args...)}, User: user, Cwd: "/tmp",
		Timeout: limit.Seconds(), MaxOutput: 1 << 20,
	})
	row.TookMS = millis(time.Since(start))
	if err != nil {
		if ctx.Err() != nil {
			return row, err
		}
		row.Verdict, row.Detail = No, "its end is not known: "+oneLine(err.Error())
		return row, nil
	}
	judge(&row, res, limit)
	return row, nil
}

// judge reads the end of a script into row.
func judge(row *Row, res wire.ExecResult, limit time.Duration) {
	out, errs := string(res.OutBytes()), string(res.ErrBytes())
	switch {
	case res.TimedOut:
		row.Verdict, row.Detail, row.Output = No, fmt.Sprintf("not done after %s", limit), tail(out+errs)
	case res.ExitCode == 0:
		row.Verdict, row.Detail = Yes, lastLine(out)
	case res.ExitCode == exitSkip:
		row.Verdict, row.Detail = Skip, lastLine(out)
	case res.ExitCode == exitNo:
		row.Verdict, row.Detail = No, lastLine(out)
	default:
		row.Verdict, row.Detail, row.Output = No, lastLine(errs), tail(out+errs)
		if row.Detail == "" {
			row.Detail = lastLine(out)
		}
		if res.Signal != "" {
			row.Detail = strings.TrimSpace(fmt.Sprintf("ended by %s %s", res.Signal, row.Detail))
		}
		if row.Detail == "" {
			row.Detail = fmt.Sprintf("exit code %d", res.ExitCode)
		}
	}
}

// maxLine and maxTail bound what a report keeps of what came from inside.
const (
	maxLine = 300
	maxTail = 2000
)

// lastLine gives the last line of s that is not empty, fit to print.
func lastLine(s string) string {
	s = strings.TrimSpace(s)
	if i := strings.LastIndexByte(s, '\n'); i >= 0 {
		s = s[i+1:]
	}
	return oneLine(s)
}

// oneLine makes s one printable line of a bounded length.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(printable(s)), " ")
	if r := []rune(s); len(r) > maxLine {
		s = string(r[:maxLine]) + "…"
	}
	return s
}

// tail keeps the end of s.
func tail(s string) string {
	s = strings.TrimSpace(printable(s))
	if r := []rune(s); len(r) > maxTail {
		s = "…" + string(r[len(r)-maxTail:])
	}
	return s
}

// printable takes out what a terminal would act on.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || (r >= 0x20 && r != 0x7f && (r < 0x80 || r >= 0xa0)) {
			return r
		}
		return '?'
	}, strings.ToValidUTF8(s, "?"))
}
