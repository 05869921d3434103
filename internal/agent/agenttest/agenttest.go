// Package agenttest runs a real agent inside a test's process, over real TCP,
// for tests of what talks to agents.
package agenttest

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/agent"
	"github.com/warrenhq/warren/internal/agent/identity"
	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The user that Start's agent knows beside root. A test that is not root runs
// everything as "root", whose ids then are the test's own.
const (
	UserName = "user"
	UserID   = 47000
)

// Agent is a running agent.
type Agent struct {
	Agent *agent.Agent
	Addr  string // host:port
	URL   string // http://host:port
	Home  string // of the user, an empty directory that belongs to it
	Etc   string // what init writes to instead of /etc
	Run   string // what restored writes to instead of /run
	Var   string // what init writes to instead of /var
	// Hostnames and Clocks are what init asked the kernel for.
	Hostnames *[]string
	Clocks    *[]time.Time
	Freezer   *Freezer
}

// Freezer stands in for the one of package freeze, which would stop the
// machine's processes: it stops none, and counts.
type Freezer struct {
	Freezes, Thaws, Signals atomic.Int64
	frozen                  atomic.Bool
}

func (f *Freezer) Freeze(context.Context) error {
	if !f.frozen.Swap(true) {
		f.Freezes.Add(1)
	}
	return nil
}

func (f *Freezer) Thaw() {
	if f.frozen.Swap(false) {
		f.Thaws.Add(1)
	}
}

func (f *Freezer) Frozen() bool                       { return f.frozen.Load() }
func (f *Freezer) SignalAll(sig syscall.Signal) error { f.Signals.Add(1); return nil }
func (f *Freezer) Close()                             { f.Thaw() }

// Start runs an agent for the test's time. Its init changes nothing of the
// machine, and its users are root and "user", from files of its own.
func Start(t testing.TB) *Agent {
	t.Helper()
	dir := t.TempDir()
	// Others must be able to enter the directories of the test.
	for d := dir; len(d) > len(os.TempDir()); d = filepath.Dir(d) {
		os.Chmod(d, 0o755)
	}
	a := &Agent{Home: filepath.Join(dir, "home"), Etc: filepath.Join(dir, "etc"), Run: filepath.Join(dir, "run"), Var: filepath.Join(dir, "var"), Freezer: &Freezer{}, Hostnames: &[]string{}, Clocks: &[]time.Time{}}
	rootHome := filepath.Join(dir, "root")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{a.Home, a.Etc, a.Run, a.Var, rootHome} {
		must(os.Mkdir(d, 0o755))
	}
	uid, gid := os.Getuid(), os.Getgid()
	passwd := "root:x:" + strconv.Itoa(uid) + ":" + strconv.Itoa(gid) + ":root:" + rootHome + ":/bin/sh\n"
	group := "root:x:" + strconv.Itoa(gid) + ":\n"
	if uid == 0 {
		must(os.Chown(a.Home, UserID, UserID))
		passwd += UserName + ":x:47000:47000::" + a.Home + ":/bin/bash\n"
		group += UserName + ":x:47000:\nextra:x:47001:" + UserName + "\n"
	}
	db := &users.DB{Passwd: filepath.Join(dir, "passwd"), Group: filepath.Join(dir, "group")}
	must(os.WriteFile(db.Passwd, []byte(passwd), 0o644))
	must(os.WriteFile(db.Group, []byte(group), 0o644))
	ag, err := agent.New(agent.Config{Users: db, Freezer: a.Freezer, Host: identity.Host{
		Etc: a.Etc,
		Run: a.Run,
		Var: a.Var,
		Hostname: func() (string, error) {
			if len(*a.Hostnames) == 0 {
				return "", nil
			}
			return (*a.Hostnames)[len(*a.Hostnames)-1], nil
		},
		SetHostname: func(s string) error { *a.Hostnames = append(*a.Hostnames, s); return nil },
		SetClock:    func(c time.Time) error { *a.Clocks = append(*a.Clocks, c); return nil },
		Now:         time.Now,
	}})
	must(err)
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	must(err)
	done := make(chan error, 1)
	go func() { done <- ag.Serve(l) }()
	a.Agent, a.Addr, a.URL = ag, l.Addr().String(), "http://"+l.Addr().String()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		ag.Close(ctx)
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return a
}

// Dial connects to the agent for AgentPort, and else to the port on this
// machine, which is the agent's "inside".
func (a *Agent) Dial(ctx context.Context, port int) (net.Conn, error) {
	addr := a.Addr
	if port != sandbox.AgentPort {
		addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", addr)
}

// Client makes a client for the test's time.
func (a *Agent) Client(t testing.TB, token string) *agentclient.Client {
	c := agentclient.New(a.Dial, token)
	t.Cleanup(c.Close)
	return c
}

// HTTP is a plain client for the test's time, which adds nothing to requests.
func HTTP(t testing.TB) *http.Client {
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}
