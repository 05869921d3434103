// Package agent is the program that is PID 1 in every sandbox with a kernel:
// it reaps orphans, and serves E2B's environment interface (processes, files,
// watches) and Warren's private control calls on one TCP port.
//
// Connect, gRPC and plain HTTP come over HTTP/1.1 and cleartext HTTP/2. After
// the first POST /init every call needs the access token, but for GET /health,
// POST /init and GET and POST /files, which check for themselves.
package agent

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/files"
	"github.com/warrenhq/warren/internal/agent/freeze"
	"github.com/warrenhq/warren/internal/agent/fsys"
	"github.com/warrenhq/warren/internal/agent/identity"
	"github.com/warrenhq/warren/internal/agent/proc"
	"github.com/warrenhq/warren/internal/agent/reaper"
	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/internal/agent/tunnel"
	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// EnvdVersion is the version of E2B's envd whose interface the agent serves
// whole. SDKs choose what they use by it: 0.5.2 has CloseStdin, 0.5.7 uploads
// as octet-stream, 0.6.2 file metadata, 0.6.3 entries in events, 0.6.4 watches
// on network mounts.
const EnvdVersion = "0.6.4"

// trimAfter is how long the agent must be without calls before it gives the
// memory that they took back to the host.
const trimAfter = 5 * time.Second

// maxMessage bounds one message of a client to the services, in bytes.
const maxMessage = 32 << 20

// Config is how an agent works.
type Config struct {
	// ReapOrphans makes the agent the reaper of every child of its process;
	// see reaper.New. It is for the agent's own program, not for tests in
	// process.
	ReapOrphans bool
	Host        identity.Host // zero is identity.System()
	Users       *users.DB     // nil is users.System()
	Freezer     Freezer       // nil is package freeze's
}

// Freezer stops all processes but the agent and lets them go on; see
// freeze.Freezer.
type Freezer interface {
	Freeze(context.Context) error
	Thaw()
	Frozen() bool
	SignalAll(syscall.Signal) error
	Close()
}

// Agent is one agent. Use New.
type Agent struct {
	host     identity.Host
	session  *session.State
	reaper   *reaper.Reaper
	commands *proc.Manager
	fs       *fsys.Service
	files    *files.Handler
	tunnels  *tunnel.Handler
	freezer  Freezer
	answers  answers
	conns    connections
	cpu      cpuMeter
	started  time.Time
	server   *http.Server
	trim     *time.Timer   // runs out when the agent is idle
	initMu   chan struct{} // holds one token: inits, freezes and thaws are done one after the other
	closing  sync.Once
}

// New makes an agent that does not serve yet.
func New(cfg Config) (*Agent, error) {
	r, err := reaper.New(cfg.ReapOrphans)
	if err != nil {
		return nil, err
	}
	if cfg.Host.Etc == "" {
		cfg.Host = identity.System()
	}
	if cfg.Users == nil {
		cfg.Users = users.System()
	}
	if cfg.Freezer == nil {
		cfg.Freezer = &freeze.Freezer{}
	}
	s := session.New(cfg.Users)
	a := &Agent{
		host:     cfg.Host,
		session:  s,
		reaper:   r,
		commands: proc.NewManager(r, s),
		fs:       fsys.NewService(s),
		files:    &files.Handler{Session: s},
		tunnels:  &tunnel.Handler{},
		freezer:  cfg.Freezer,
		started:  time.Now(),
		initMu:   make(chan struct{}, 1),
	}
	a.initMu <- struct{}{}
	a.trim = time.AfterFunc(trimAfter, debug.FreeOSMemory)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	a.server = &http.Server{
		Handler:           a.handler(),
		Protocols:         &protocols,
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       10 * time.Minute, // above the clients', so that they close first
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          log.New(io.Discard, "", 0), // clients that break off are not news
		ConnState:         a.conns.note,
		ConnContext:       withConn,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: 1000},
	}
	return a, nil
}

// Serve serves on l until Close. Its error is nil after Close.
func (a *Agent) Serve(l net.Listener) error {
	if err := a.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// Close ends commands (SIGTERM, and SIGKILL when ctx is done), lets streams
// tell their end, and stops serving.
func (a *Agent) Close(ctx context.Context) {
	a.closing.Do(func() {
		if a.freezer.Frozen() {
			a.thaw()
		}
		a.freezer.Close()
		a.commands.Close(ctx)
		a.fs.Close()
		a.tunnels.Close()
		short, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		if a.server.Shutdown(short) != nil {
			a.server.Close()
		}
		a.trim.Stop()
		a.reaper.Close()
	})
}

func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	// Messages are not compressed: the way is short, and output is large.
	opts := []connect.HandlerOption{connect.WithReadMaxBytes(maxMessage), connect.WithCompressMinBytes(1 << 30)}
	mux.Handle(processconnect.NewProcessHandler(proc.Service{M: a.commands}, opts...))
	mux.Handle(filesystemconnect.NewFilesystemHandler(a.fs, opts...))
	mux.HandleFunc("GET "+control.PathHealth, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("POST "+control.PathInit, a.handleInit)
	mux.HandleFunc("POST "+control.PathFreeze, a.handleFreeze)
	mux.HandleFunc("POST "+control.PathThaw, a.handleThaw)
	mux.HandleFunc("POST "+control.PathRestore, a.handleRestored)
	mux.HandleFunc("GET "+control.PathEnvs, a.handleEnvs)
	mux.HandleFunc("GET "+control.PathMetrics, a.handleMetrics)
	mux.HandleFunc("GET "+control.PathStats, a.handleStats)
	mux.HandleFunc("GET "+control.PathFiles, a.files.Download)
	mux.HandleFunc("POST "+control.PathFiles, a.files.Upload)
	mux.HandleFunc("POST "+control.PathCompose, a.files.Compose)
	mux.HandleFunc("GET "+control.PathTar, a.files.GetTar)
	mux.HandleFunc("PUT "+control.PathTar, a.files.PutTar)
	mux.Handle("GET "+control.PathTunnel, a.tunnels)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		files.WriteStatus(w, http.StatusNotFound, "no such call: "+r.Method+" "+r.URL.Path)
	})
	return cors(a.authorize(mux))
}

// open are the calls that need no token, or check it themselves.
func open(r *http.Request) bool {
	switch r.URL.Path {
	case control.PathHealth:
		return r.Method == http.MethodGet || r.Method == http.MethodHead
	case control.PathFiles:
		return r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodPost
	case control.PathInit:
		return r.Method == http.MethodPost
	}
	return false
}

func (a *Agent) authorize(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !open(r) && !a.session.Allowed(r.Header.Get(control.TokenHeader)) {
			files.WriteStatus(w, http.StatusUnauthorized, "unauthorized access: give the sandbox's access token in the "+control.TokenHeader+" header")
			return
		}
		if a.freezer.Frozen() && !whileFrozen(r.URL.Path) {
			files.WriteStatus(w, http.StatusServiceUnavailable, reaper.ErrPaused.Error())
			return
		}
		// An absent timeout, in a client's own words.
		if r.Header.Get("Connect-Timeout-Ms") == "0" {
			r.Header.Del("Connect-Timeout-Ms")
		}
		defer a.trim.Reset(trimAfter)
		if r.Method != http.MethodGet && r.Method != http.MethodHead && !whileFrozen(r.URL.Path) {
			w = &heldWriter{w, r.Context(), &a.answers}
		}
		next.ServeHTTP(w, r)
	})
}

// cors lets pages of any origin call, as envd does: the token is what guards,
// and no cookie is used.
func cors(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Origin") != "" {
			h := w.Header()
			h.Set("Access-Control-Allow-Origin", "*")
			h.Set("Access-Control-Expose-Headers", "*")
			if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
				h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, OPTIONS")
				h.Set("Access-Control-Allow-Headers", "*, Authorization")
				h.Set("Access-Control-Max-Age", "7200")
				w.WriteHeader(http.StatusNoContent)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}
