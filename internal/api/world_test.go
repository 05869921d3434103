package api_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/api"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/manager/managertest"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a real manager and the API over it, on a unix socket and on TCP.
// Its sandboxes are real agents in this process, on this machine's files.
type world struct {
	api     *api.API
	manager *manager.Manager
	rt      *agents
	builder *builder
	log     *syncBuffer

	unix, tcp string // for client.New
	root      *client.Client
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOver(t, func(m *manager.Manager) api.Backend { return m })
}

// newWorldOver is newWorld with another backend, made of the manager.
func newWorldOver(t *testing.T, backend func(*manager.Manager) api.Backend) *world {
	t.Helper()
	dir := t.TempDir()
	st, err := store.OpenSQLite(t.Context(), filepath.Join(dir, "warren.db"), store.Options{Ballast: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	w := &world{
		rt: &agents{t: t, live: map[sandbox.ID]*box{}}, builder: &builder{Templates: managertest.NewTemplates()},
		log: &syncBuffer{},
	}
	w.manager, err = manager.New(manager.Config{
		StateDir: dir, Store: st, Runtimes: []sandbox.Runtime{w.rt}, Planned: []string{"microvm"},
		Network: managertest.NewNetwork(50), Templates: w.builder, Host: managertest.NewHost(),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.manager.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.api = api.New(backend(w.manager), api.Options{
		Domain: "box.test", Heartbeat: 50 * time.Millisecond,
		Log: slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.api.Run(ctx) })

	// A short path: a socket's has 108 bytes at most.
	sock := filepath.Join(dir, "s")
	serve := func(network, addr string, h http.Handler) net.Listener {
		l, err := net.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		s := api.NewServer(h, nil)
		wg.Go(func() { s.Serve(l) })
		t.Cleanup(func() { s.Close() })
		return l
	}
	serve("unix", sock, w.api.Unix())
	w.unix = "unix://" + sock
	w.tcp = "http://" + serve("tcp", "127.0.0.1:0", w.api.TCP()).Addr().String()
	w.root = w.client(t, w.unix, client.Options{})
	t.Cleanup(func() {
		for sb, err := range w.root.Sandboxes(context.Background(), client.Filter{Live: true}) {
			if err != nil {
				t.Error(err)
				break
			}
			w.root.Kill(context.Background(), sb.ID)
		}
		cancel()
		closeCtx, stop := context.WithTimeout(context.Background(), 10*time.Second)
		defer stop()
		if err := w.manager.Close(closeCtx); err != nil {
			t.Error(err)
		}
		w.api.Close()
		w.root.Close()
	})
	return w
}

func (w *world) client(t *testing.T, host string, o client.Options) *client.Client {
	t.Helper()
	c, err := client.New(host, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// create makes a sandbox for the default tenant.
func (w *world) create(t *testing.T, r wire.CreateSandbox) wire.Sandbox {
	t.Helper()
	sb, err := w.root.CreateSandbox(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// raw sends a request without the typed client and gives status and body.
func (w *world) raw(t *testing.T, method, url, key, body string, headers ...string) (*http.Response, []byte) {
	t.Helper()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	if rest, ok := strings.CutPrefix(url, "unix:"); ok {
		path := strings.TrimPrefix(w.unix, "unix://")
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
		url = "http://warren" + rest
	} else {
		url = w.tcp + url
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("X-API-Key", key)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		if headers[i] == "Host" {
			req.Host = headers[i+1]
			continue
		}
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := (&http.Client{Transport: tr, Timeout: 30 * time.Second}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, data
}

// wantError checks that an answer has the one form that all errors have.
func wantError(t *testing.T, res *http.Response, data []byte, status int, code sandbox.Code, part string) {
	t.Helper()
	var e wire.Error
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		t.Fatalf("%s: the body is no error: %v: %s", res.Status, err, data)
	}
	if res.StatusCode != status || e.Code != code || !strings.Contains(e.Message, part) {
		t.Errorf("got %d %s %q, want %d %s and a message with %q", res.StatusCode, e.Code, e.Message, status, code, part)
	}
	if res.Header.Get("X-Request-Id") == "" {
		t.Error("an answer without a request id")
	}
}

// agents is a sandbox.Runtime of agents in this process.
type agents struct {
	t    *testing.T
	mu   sync.Mutex
	live map[sandbox.ID]*box
}

type box struct {
	*agenttest.Agent
	rt    *agents
	id    sandbox.ID
	once  sync.Once
	ended chan struct{}
	exit  sandbox.Exit
}

func (r *agents) Name() string { return "fake" }
func (r *agents) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{Boundary: "none", ArbitraryELF: true, MinMemoryMiB: 32, OverheadMiB: 1}
}
func (r *agents) Probe(context.Context) error { return nil }
func (r *agents) Create(_ context.Context, s sandbox.Spec) (sandbox.Instance, error) {
	b := &box{Agent: agenttest.Start(r.t), rt: r, id: s.ID, ended: make(chan struct{})}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.live[s.ID] = b
	return b, nil
}
func (r *agents) Adopt(context.Context, sandbox.Spec) (sandbox.Instance, error) {
	return nil, sandbox.Errorf(sandbox.CodeNotFound, "not there")
}
func (r *agents) Clean(_ context.Context, id sandbox.ID) error {
	r.mu.Lock()
	b := r.live[id]
	delete(r.live, id)
	r.mu.Unlock()
	if b != nil {
		b.end(sandbox.Exit{Reason: sandbox.ReasonRuntimeCrashed})
	}
	return nil
}
func (r *agents) List(context.Context) ([]sandbox.ID, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var ids []sandbox.ID
	for id := range r.live {
		ids = append(ids, id)
	}
	return ids, nil
}
func (r *agents) box(id string) *box {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.live[sandbox.ID(id)]
}

func (b *box) end(e sandbox.Exit) {
	b.once.Do(func() {
		b.exit = e
		close(b.ended)
	})
}

func (b *box) Dial(ctx context.Context, port int) (net.Conn, error) {
	select {
	case <-b.ended:
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "ended")
	default:
	}
	c, err := b.Agent.Dial(ctx, port)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "nothing listens on port %d", port)
	}
	return c, nil
}
func (b *box) Stats(context.Context) (sandbox.Stats, error) {
	return sandbox.Stats{At: time.Now(), CPUTime: 1500 * time.Millisecond, WorkingSet: 1 << 20, MemoryLimit: 512 << 20, PIDs: 3}, nil
}
func (b *box) Wait(ctx context.Context) (sandbox.Exit, error) {
	select {
	case <-b.ended:
		return b.exit, nil
	case <-ctx.Done():
		return sandbox.Exit{}, ctx.Err()
	}
}
func (b *box) Kill(ctx context.Context) error { return b.rt.Clean(ctx, b.id) }

// builder is a library whose builds tell what they were given.
type builder struct {
	*managertest.Templates
	mu   sync.Mutex
	last any
	read []string // names in the archive that came with it
}

func (b *builder) made(o any, target template.Target, archive io.Reader, p template.Progress) (template.Template, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last, b.read = o, nil
	p(template.Event{Stage: template.StageResolve, Message: "begun"})
	if archive != nil {
		tr := tar.NewReader(archive)
		for {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				return template.Template{}, sandbox.Errorf(sandbox.CodeInvalid, "the context: %w", err)
			}
			b.read = append(b.read, h.Name)
			p(template.Event{Stage: template.StageContext, Current: h.Size, Unit: template.UnitBytes})
		}
	}
	if target.Name == "broken" {
		return template.Template{}, sandbox.Errorf(sandbox.CodeBuildFailed, "line 3: RUN false: exit code 1").With("line", "3")
	}
	t := template.Template{ID: "tpl" + target.Name, Name: target.Name, Tenant: target.Tenant, CreatedAt: time.Now()}
	b.Put(t)
	return t, nil
}

func (b *builder) BuildDebian(_ context.Context, o template.DebianOptions, p template.Progress) (template.Template, error) {
	if o.Suite == "refused" {
		return template.Template{}, sandbox.Errorf(sandbox.CodeInvalid, "no such suite")
	}
	return b.made(o, o.Target, nil, p)
}
func (b *builder) Import(_ context.Context, o template.ImportOptions, p template.Progress) (template.Template, error) {
	return b.made(o, o.Target, o.Archive, p)
}
func (b *builder) BuildDockerfile(_ context.Context, o template.DockerfileOptions, _ template.StepRunner, p template.Progress) (template.Template, error) {
	return b.made(o, o.Target, o.Context, p)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *syncBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

// isCode tells whether err has code.
func isCode(err error, code sandbox.Code) bool {
	var e *sandbox.Error
	return errors.As(err, &e) && e.Code == code
}
