// Package daemon puts the parts of `warren serve` together: the store, the
// network, the template library, the runtimes, the manager and the API, on a
// unix socket and on TCP.
package daemon

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The defaults of Config.
const (
	DefaultState  = "/var/lib/warren"
	DefaultSocket = "/run/warren/warren.sock"
	DefaultListen = "127.0.0.1:7070"
	DefaultDomain = "localhost"

	// DefaultSpares is few enough to be no burden: see docs/decisions/0008.
	DefaultSpares = 4

	// NoListen as Config.Listen serves the unix socket alone.
	NoListen = "none"

	defaultGrace = 5 * time.Second
)

// runRoot holds every instance's run directory. It does not outlive the boot,
// as nothing in it would be true then.
const runRoot = "/run/warren"

// Config is what a daemon is started with. Zero fields take their defaults.
type Config struct {
	State string // directory of all durable state; two daemons never share one
	// StateFS is statefs.XFS to keep State on an XFS of its own where its
	// filesystem has no reflinks; StateFSSize is its size in bytes, 0 the default.
	StateFS     string
	StateFSSize int64

	Socket string // path of the unix socket
	Listen string // host:port of the TCP API; NoListen is none
	// ImageAliases name templates that builds of steps start from instead of
	// an image.
	ImageAliases map[string]string
	Domain       string // under which sandboxes have host names: <port>-<id>.<domain>

	Agent      string // path of warren-agent; "" looks beside the executable, then in the usual places
	Runsc      string // path of runsc; "" looks likewise
	OCIRuntime string // "crun", "runc" or a path; "" picks

	PoolSize  int              // network slots kept ready; below 0 is none
	Resolvers []netip.AddrPort // DNS servers to forward to; empty follows the host's /etc/resolv.conf

	// Spares is how many sandboxes are kept prepared for forks and wakes, at
	// most. The zero value is none: DefaultSpares is the flag's default.
	Spares int

	Budget    manager.Budget
	KeepEnded time.Duration // how long records of ended sandboxes are kept; 0 is 7 days
	MaxEnded  int           // and how many; 0 is 10,000
	Ballast   int64         // bytes of disk kept for the records of a full disk; 0 is 16 MiB, below 0 none

	Grace time.Duration // for calls under way when the daemon stops; 0 is 5 s
}

// Info tells what a daemon that is ready serves.
type Info struct {
	Version  string
	State    string
	Instance string // host.Instance of State: in the names of all that it has on the host
	Socket   string
	Listen   string // the TCP address, with the port that it got; "" where there is none
	Adopted  int    // sandboxes taken over from an earlier daemon
	FirstKey string // the first API key's secret, at the first start; it is shown this once
}

// withDefaults fills in what is not set, and makes paths absolute.
func (c Config) withDefaults() (Config, error) {
	def := func(s *string, d string) {
		if *s == "" {
			*s = d
		}
	}
	def(&c.State, DefaultState)
	def(&c.Socket, DefaultSocket)
	def(&c.Listen, DefaultListen)
	def(&c.Domain, DefaultDomain)
	if c.Grace == 0 {
		c.Grace = defaultGrace
	}
	for _, p := range []*string{&c.State, &c.Socket} {
		abs, err := filepath.Abs(*p)
		if err != nil {
			return c, sandbox.Errorf(sandbox.CodeInvalid, "%q: %w", *p, err)
		}
		*p = abs
	}
	if len(c.Socket) > maxSocket {
		return c, sandbox.Errorf(sandbox.CodeInvalid, "the socket's path has %d bytes: at most %d", len(c.Socket), maxSocket)
	}
	var err error
	if c.Agent, err = find("warren-agent", c.Agent); err != nil {
		return c, err
	}
	if c.Runsc != "" {
		if c.Runsc, err = find("runsc", c.Runsc); err != nil {
			return c, err
		}
	} else if path, err := find("runsc", ""); err == nil {
		c.Runsc = path // without one, the runtime's probe tells what to do
	}
	return c, nil
}

// RunDir is where the daemon of a state directory keeps what does not outlive
// the boot.
func RunDir(state string) (string, error) {
	instance, err := host.Instance(state)
	if err != nil {
		return "", err
	}
	return filepath.Join(runRoot, instance), nil
}

// find gives the path of a helper program: the one asked for, else beside the
// executable, in /usr/lib/warren, /usr/local/lib/warren or PATH.
func find(name, asked string) (string, error) {
	if asked != "" {
		path, err := exec.LookPath(asked)
		if err != nil {
			return "", sandbox.Errorf(sandbox.CodeInvalid, "%s cannot be executed: %w", asked, err)
		}
		return filepath.Abs(path)
	}
	var dirs []string
	if exe, err := os.Executable(); err == nil {
		dirs = append(dirs, filepath.Dir(exe))
	}
	for _, dir := range append(dirs, "/usr/lib/warren", "/usr/local/lib/warren") {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	if path, err := exec.LookPath(name); err == nil {
		return filepath.Abs(path)
	}
	return "", sandbox.Errorf(sandbox.CodeUnavailable, "%s is neither beside this program nor in /usr/lib/warren, /usr/local/lib/warren or PATH: run `make build`, or give its path", name)
}
