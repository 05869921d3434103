// Package managertest holds what the manager's tests put in the place of a
// host: a runtime, a network, a template library and a clock in memory. What
// the runtime and the network hold outlives a Manager, as a host's state
// outlives a daemon.
package managertest

import (
	"context"
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Runtime is a sandbox.Runtime whose sandboxes are a web server each.
type Runtime struct {
	name string
	caps sandbox.Capabilities

	// Hooks; nil does nothing. They may block until ctx is done.
	OnCreate func(ctx context.Context, spec sandbox.Spec) error // before it runs
	OnKill   func(ctx context.Context, id sandbox.ID) error
	OnProbe  func() error

	mu    sync.Mutex
	boxes map[sandbox.ID]*Box
	ready map[sandbox.ID]bool // prepared, with nothing that runs
}

var (
	_ sandbox.Runtime    = (*Runtime)(nil)
	_ sandbox.OOMWatcher = (*instance)(nil)
)

// NewRuntime makes an empty one.
func NewRuntime(name string) *Runtime {
	return &Runtime{
		name:  name,
		caps:  sandbox.Capabilities{Boundary: "none", MinMemoryMiB: 32, OverheadMiB: 8, DiskCapture: true},
		boxes: map[sandbox.ID]*Box{}, ready: map[sandbox.ID]bool{},
	}
}

// Box is one sandbox of a Runtime.
type Box struct {
	Spec  sandbox.Spec
	Inits []control.InitRequest // what its agent was told
	// Restores is what it was told after it was restored.
	Restores []control.RestoredRequest

	rt     *Runtime
	server *http.Server
	ln     *listener
	done   chan struct{}
	exit   sandbox.Exit

	mu        sync.Mutex
	memory    string // what a full capture keeps
	disk      string // what any capture keeps
	token     string // the agent's
	frozen    bool   // by the agent
	suspended bool
	ooms      int64
	oom       chan struct{} // closed and renewed at each OOM kill
}

// Name implements sandbox.Runtime.
func (r *Runtime) Name() string { return r.name }

// Capabilities implements sandbox.Runtime.
func (r *Runtime) Capabilities() sandbox.Capabilities { return r.caps }

// Probe implements sandbox.Runtime.
func (r *Runtime) Probe(context.Context) error {
	if r.OnProbe != nil {
		return r.OnProbe()
	}
	return nil
}

// Create implements sandbox.Runtime.
func (r *Runtime) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	if r.OnCreate != nil {
		if err := r.OnCreate(ctx, spec); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b := &Box{Spec: spec}
	b.readLayers()
	return r.enter(b)
}

// enter puts b on the host.
func (r *Runtime) enter(b *Box) (*instance, error) {
	b.rt, b.done, b.oom, b.ln = r, make(chan struct{}), make(chan struct{}), newListener()
	b.server = &http.Server{Handler: b}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.boxes[b.Spec.ID] != nil {
		return nil, sandbox.Errorf(sandbox.CodeExists, "box %s exists", b.Spec.ID)
	}
	r.boxes[b.Spec.ID] = b
	go b.server.Serve(b.ln)
	return &instance{b}, nil
}

// Adopt implements sandbox.Runtime.
func (r *Runtime) Adopt(_ context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	if b := r.Box(spec.ID); b != nil && !b.ended() {
		return &instance{b}, nil
	}
	return nil, sandbox.Errorf(sandbox.CodeNotFound, "no box %s", spec.ID)
}

// Clean implements sandbox.Runtime.
func (r *Runtime) Clean(ctx context.Context, id sandbox.ID) error {
	if r.OnKill != nil {
		if err := r.OnKill(ctx, id); err != nil {
			return err
		}
	}
	r.mu.Lock()
	b := r.boxes[id]
	delete(r.boxes, id)
	delete(r.ready, id)
	r.mu.Unlock()
	if b != nil {
		b.end(sandbox.Exit{Reason: sandbox.ReasonRuntimeCrashed, Detail: "ended", At: time.Now()})
	}
	return nil
}

// List implements sandbox.Runtime.
func (r *Runtime) List(context.Context) ([]sandbox.ID, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Concat(slices.Collect(maps.Keys(r.boxes)), slices.Collect(maps.Keys(r.ready))), nil
}

// Box gives a sandbox that the host holds; nil where there is none.
func (r *Runtime) Box(id sandbox.ID) *Box {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.boxes[id]
}

// Plant puts a sandbox on the host that no manager knows.
func (r *Runtime) Plant(spec sandbox.Spec) {
	if _, err := r.Create(context.Background(), spec); err != nil {
		panic(err)
	}
}

// Crash ends a sandbox by itself; its remains stay until they are cleaned.
func (b *Box) Crash(reason sandbox.Reason, detail string) {
	b.end(sandbox.Exit{Reason: reason, Detail: detail, At: time.Now()})
}

// OOM ends a command inside, as the kernel does at the memory limit.
func (b *Box) OOM() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ooms++
	close(b.oom)
	b.oom = make(chan struct{})
}

func (b *Box) ended() bool {
	select {
	case <-b.done:
		return true
	default:
		return false
	}
}

func (b *Box) end(e sandbox.Exit) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended() {
		b.exit = e
		close(b.done)
		b.server.Close()
	}
}

// ServeHTTP is the box's agent: health and init, and an echo of anything else.
func (b *Box) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case control.PathHealth:
		w.WriteHeader(http.StatusNoContent)
	case control.PathInit:
		var req control.InitRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		b.mu.Lock()
		b.Inits = append(b.Inits, req)
		b.token = req.AccessToken
		b.mu.Unlock()
		w.WriteHeader(http.StatusNoContent)
	case control.PathFreeze, control.PathThaw, control.PathRestore:
		b.capture(w, r)
	case "/process.Process/List":
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	default:
		http.NotFound(w, r)
	}
}

type instance struct{ *Box }

func (i *instance) Dial(ctx context.Context, port int) (net.Conn, error) {
	if port != sandbox.AgentPort {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "nothing listens on %d", port)
	}
	return i.ln.dial(ctx)
}

func (i *instance) Stats(context.Context) (sandbox.Stats, error) {
	return sandbox.Stats{At: time.Now(), WorkingSet: 1 << 20}, nil
}

func (i *instance) Wait(ctx context.Context) (sandbox.Exit, error) {
	select {
	case <-i.done:
		return i.exit, nil
	case <-ctx.Done():
		return sandbox.Exit{}, ctx.Err()
	}
}

func (i *instance) Kill(ctx context.Context) error { return i.rt.Clean(ctx, i.Spec.ID) }

func (i *instance) WatchOOM(ctx context.Context, f func(int64)) error {
	var told int64
	for {
		i.mu.Lock()
		total, next := i.ooms, i.oom
		i.mu.Unlock()
		if total > told {
			told = total
			f(total)
		}
		select {
		case <-next:
		case <-i.done:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// listener is a net.Listener in memory.
type listener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newListener() *listener { return &listener{conns: make(chan net.Conn), done: make(chan struct{})} }

func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case l.conns <- there:
		return here, nil
	case <-l.done:
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the box has ended")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "box", Net: "unix"} }
