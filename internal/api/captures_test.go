package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/warrenhq/warren/internal/api"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// captures is a manager whose captures are the test's: what is asked of it, and
// what it answers.
type captures struct {
	*manager.Manager

	mu        sync.Mutex
	calls     []string
	err       error // of every call
	snapshots []sandbox.Snapshot
	forks     []manager.ForkResult
	fork      manager.ForkRequest
	nodes     []manager.TreeNode
}

func (c *captures) call(format string, args ...any) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, fmt.Sprintf(format, args...))
	return c.err
}

func (c *captures) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls := c.calls
	c.calls = nil
	return calls
}

func (c *captures) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

func (c *captures) Suspend(_ context.Context, tenant string, id sandbox.ID) error {
	return c.call("suspend %s %s", tenant, id)
}
func (c *captures) Unsuspend(_ context.Context, tenant string, id sandbox.ID) error {
	return c.call("unsuspend %s %s", tenant, id)
}
func (c *captures) Hibernate(_ context.Context, tenant string, id sandbox.ID) error {
	return c.call("hibernate %s %s", tenant, id)
}
func (c *captures) Wake(_ context.Context, tenant string, id sandbox.ID) error {
	return c.call("wake %s %s", tenant, id)
}
func (c *captures) Snapshot(_ context.Context, tenant string, id sandbox.ID, r manager.SnapshotRequest) (sandbox.Snapshot, error) {
	err := c.call("snapshot %s %s %s %s %v", tenant, id, r.Name, r.Kind, r.Metadata)
	return sandbox.Snapshot{ID: "snp1", Name: r.Name, Kind: r.Kind, Tenant: tenant, Source: id, Metadata: r.Metadata, Runtime: "fake", SizeBytes: 7, CreatedAt: time.Unix(1e9, 0)}, err
}
func (c *captures) Snapshots(_ context.Context, tenant string, f manager.SnapshotFilter) ([]sandbox.Snapshot, string, error) {
	err := c.call("snapshots %s %s %s %d %s", tenant, f.Source, f.Name, f.Limit, f.Token)
	if f.Token == "" && len(c.snapshots) > 1 {
		return c.snapshots[:1], "more", err
	}
	return c.snapshots[min(1, len(c.snapshots)):], "", err
}
func (c *captures) SnapshotByName(_ context.Context, tenant, name string) (sandbox.Snapshot, error) {
	err := c.call("get %s %s", tenant, name)
	return sandbox.Snapshot{ID: "snp1", Name: name, Kind: sandbox.SnapshotDisk, Tenant: tenant}, err
}
func (c *captures) RemoveSnapshot(_ context.Context, tenant, name string) error {
	return c.call("remove %s %s", tenant, name)
}
func (c *captures) Fork(_ context.Context, tenant string, id sandbox.ID, r manager.ForkRequest) ([]manager.ForkResult, error) {
	c.fork = r
	return c.forks, c.call("fork %s %s", tenant, id)
}
func (c *captures) Tree(_ context.Context, tenant, root string) ([]manager.TreeNode, error) {
	return c.nodes, c.call("tree %s %q", tenant, root)
}

func newCaptures(t *testing.T) (*world, *captures) {
	c := &captures{}
	w := newWorldOver(t, func(m *manager.Manager) api.Backend { c.Manager = m; return c })
	return w, c
}

func TestSleepCalls(t *testing.T) {
	w, back := newCaptures(t)
	ctx := t.Context()
	for name, call := range map[string]func(context.Context, string) error{
		"suspend": w.root.Suspend, "unsuspend": w.root.Unsuspend, "hibernate": w.root.Hibernate, "wake": w.root.Wake,
	} {
		if err := call(ctx, "sbxone"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if d := cmp.Diff([]string{name + " default sbxone"}, back.take()); d != "" {
			t.Error(d)
		}
		if res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/"+name, "", "", "X-Warren-Tenant", "other"); res.StatusCode != 204 || len(data) != 0 {
			t.Errorf("%s: %s %s", name, res.Status, data)
		}
		if d := cmp.Diff([]string{name + " other sbxone"}, back.take()); d != "" {
			t.Error(d)
		}
		res, data := w.raw(t, "POST", "unix:/v1/sandboxes/NOT-ONE/"+name, "", "")
		wantError(t, res, data, 400, sandbox.CodeInvalid, "not a sandbox id")
		if calls := back.take(); calls != nil {
			t.Errorf("a bad id came through: %v", calls)
		}
		for _, e := range []struct {
			code   sandbox.Code
			status int
		}{
			{sandbox.CodeUnsupported, 501}, {sandbox.CodeConflict, 409}, {sandbox.CodeCorruptCapture, 422},
			{sandbox.CodeNoCapacity, 503}, {sandbox.CodeDiskFull, 507}, {sandbox.CodeNotFound, 404},
		} {
			back.fail(sandbox.Errorf(e.code, "because").With("state", "hibernated"))
			res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/"+name, "", "")
			wantError(t, res, data, e.status, e.code, "because")
			if err := call(ctx, "sbxone"); !isCode(err, e.code) {
				t.Errorf("%s by the client: %v, want %s", name, err, e.code)
			}
		}
		back.fail(nil)
		back.take()
	}
}

func TestSnapshotCalls(t *testing.T) {
	w, back := newCaptures(t)
	ctx := t.Context()
	s, err := w.root.CreateSnapshot(ctx, "sbxone", wire.CreateSnapshot{Name: "ready", Kind: sandbox.SnapshotFull, Metadata: map[string]string{"a": "b"}})
	if err != nil || s.ID != "snp1" || s.Name != "ready" || s.Kind != "full" || s.Source != "sbxone" || s.SizeBytes != 7 || s.Metadata["a"] != "b" || !s.CreatedAt.Equal(time.Unix(1e9, 0)) {
		t.Errorf("%+v, %v", s, err)
	}
	if d := cmp.Diff([]string{"snapshot default sbxone ready full map[a:b]"}, back.take()); d != "" {
		t.Error(d)
	}
	if res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/snapshots", "", `{}`); res.StatusCode != 201 || strings.Contains(string(data), `"name"`) {
		t.Errorf("%s %s", res.Status, data)
	}
	for body, part := range map[string]string{
		`{"kind":"half"}`: "kind", `{"bogus":1}`: "bogus", `{"name":"` + strings.Repeat("x", 200) + `"}`: "name",
	} {
		res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/snapshots", "", body)
		wantError(t, res, data, 400, sandbox.CodeInvalid, part)
	}
	back.take()

	back.snapshots = []sandbox.Snapshot{{ID: "snp2", Name: "two"}, {ID: "snp1"}}
	var ids []string
	for s, err := range w.root.Snapshots(ctx, "sbxone") {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, s.ID)
	}
	if d := cmp.Diff([]string{"snp2", "snp1"}, ids); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"snapshots default sbxone  1000 ", "snapshots default sbxone  1000 more"}, back.take()); d != "" {
		t.Error(d)
	}
	for _, bad := range []string{"?limit=0", "?limit=1001", "?source=UPPER", "?bogus=1"} {
		res, data := w.raw(t, "GET", "unix:/v1/snapshots"+bad, "", "")
		wantError(t, res, data, 400, sandbox.CodeInvalid, "")
	}
	back.take()

	// A name goes through the path as it is.
	for _, name := range []string{"ready", "v1.2", "a b", "team/app", "50%", "ü"} {
		if s, err := w.root.Snapshot(ctx, name); err != nil || s.Name != name {
			t.Errorf("%q: %+v, %v", name, s, err)
		}
		if err := w.root.RemoveSnapshot(ctx, name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
		if d := cmp.Diff([]string{"get default " + name, "remove default " + name}, back.take()); d != "" {
			t.Error(d)
		}
	}
	back.fail(sandbox.Errorf(sandbox.CodeConflict, "sandbox sbxtwo needs it"))
	if err := w.root.RemoveSnapshot(ctx, "ready"); !isCode(err, sandbox.CodeConflict) || !strings.Contains(err.Error(), "sbxtwo") {
		t.Errorf("one that is needed: %v", err)
	}
}

func TestForkCalls(t *testing.T) {
	w, back := newCaptures(t)
	ctx := t.Context()
	back.forks = []manager.ForkResult{
		{Sandbox: sandbox.Sandbox{ID: "sbxchild", Runtime: "fake", Parent: "sbxone", Snapshot: "snpx", State: sandbox.Running, Start: sandbox.StartCold, TrafficToken: "tok", Env: map[string]string{"SEED": "hunter2"}}},
		{Err: sandbox.Errorf(sandbox.CodeNoCapacity, "the host is full").With("resource", "memory")},
		{Err: sandbox.Errorf(sandbox.CodeInternal, "broken: %w", context.DeadlineExceeded)},
	}
	out, err := w.root.Fork(ctx, "sbxone", wire.Fork{
		Count: 3, Env: map[string]string{"SEED": "hunter2"}, Metadata: map[string]string{"try": "2"}, Timeout: 1.5,
	})
	if err != nil || len(out.Forks) != 3 {
		t.Fatalf("%+v, %v", out, err)
	}
	if d := cmp.Diff(manager.ForkRequest{Count: 3, Env: map[string]string{"SEED": "hunter2"}, Metadata: map[string]string{"try": "2"}, Timeout: 1500 * time.Millisecond}, back.fork); d != "" {
		t.Error(d)
	}
	// Which kind it became is told: here the runtime could do the disk alone.
	if d := cmp.Diff([]string{"fork default sbxone"}, back.take()); d != "" || out.Kind != sandbox.SnapshotDisk {
		t.Errorf("kind %q: %s", out.Kind, d)
	}
	sb := out.Forks[0].Sandbox
	if sb == nil || sb.ID != "sbxchild" || sb.Parent != "sbxone" || sb.Snapshot != "snpx" || sb.Start != "cold" || sb.TrafficToken != "tok" || !reflect.DeepEqual(sb.EnvNames, []string{"SEED"}) || out.Forks[0].Error != nil {
		t.Errorf("child: %+v", out.Forks[0])
	}
	if e := out.Forks[1].Error; e == nil || e.Code != sandbox.CodeNoCapacity || e.Details["resource"] != "memory" || out.Forks[1].Sandbox != nil {
		t.Errorf("the second: %+v", out.Forks[1])
	}
	if e := out.Forks[2].Error; e == nil || e.Code != sandbox.CodeInternal || !strings.Contains(w.log.String(), "broken") {
		t.Errorf("the third: %+v", out.Forks[2])
	}

	if _, data := w.raw(t, "GET", "unix:/metrics", "", ""); !strings.Contains(string(data), `warren_creates_total{result="no_capacity",runtime="fake"} 1`) || !strings.Contains(string(data), `warren_creates_total{result="ok",runtime="fake"} 1`) {
		t.Error("the metrics do not count the copies")
	}

	// The defaults: one copy, the source's labels.
	back.forks = nil
	if res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/fork", "", `{"kind":"full"}`); res.StatusCode != 200 || strings.TrimSpace(string(data)) != `{"kind":"full","forks":[]}` {
		t.Errorf("%s %s", res.Status, data)
	}
	if d := cmp.Diff(manager.ForkRequest{Count: 1, Kind: sandbox.SnapshotFull}, back.fork); d != "" {
		t.Error(d)
	}
	for body, part := range map[string]string{
		`{"count":0}`: "count", `{"count":101}`: "count", `{"count":-1}`: "count", `{"count":1.5}`: "count",
		`{"kind":"half"}`: "kind", `{"timeout":-1}`: "timeout", `{"bogus":1}`: "bogus",
	} {
		res, data := w.raw(t, "POST", "unix:/v1/sandboxes/sbxone/fork", "", body)
		wantError(t, res, data, 400, sandbox.CodeInvalid, part)
	}
	back.fail(sandbox.Errorf(sandbox.CodeUnsupported, `runtime "container" cannot capture memory: ask for kind disk, or use gvisor`))
	if _, err := w.root.Fork(ctx, "sbxone", wire.Fork{Kind: sandbox.SnapshotFull}); !isCode(err, sandbox.CodeUnsupported) || !strings.Contains(err.Error(), "gvisor") {
		t.Errorf("a kind that the runtime lacks: %v", err)
	}
	if strings.Contains(w.log.String(), "hunter2") {
		t.Error("the log holds the environment")
	}
}

func TestTreeCalls(t *testing.T) {
	w, back := newCaptures(t)
	ctx := t.Context()
	at := func(n int64) time.Time { return time.Unix(1e9+n, 0) }
	back.nodes = []manager.TreeNode{ // in no order
		{Kind: "sandbox", ID: "d", Parent: "b", CreatedAt: at(5), State: sandbox.Hibernated, DiskBytes: 3},
		{Kind: "sandbox", ID: "orphan", Parent: "gone", CreatedAt: at(0), State: sandbox.Killed},
		{Kind: "sandbox", ID: "c", Parent: "a", CreatedAt: at(3), State: sandbox.Running, MemoryBytes: 9},
		{Kind: "sandbox", ID: "a", CreatedAt: at(1), State: sandbox.Running},
		{Kind: "snapshot", ID: "b", Name: "ready", SnapshotKind: "disk", Parent: "a", CreatedAt: at(2)},
	}
	nodes, err := w.root.Tree(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, n := range nodes {
		got = append(got, n.Parent+">"+n.ID)
	}
	if d := cmp.Diff([]string{">orphan", ">a", "a>b", "b>d", "a>c"}, got); d != "" {
		t.Error(d)
	}
	if n := nodes[2]; n.Kind != wire.TreeSnapshot || n.Name != "ready" || n.SnapshotKind != "disk" || n.State != "" {
		t.Errorf("%+v", n)
	}
	if n := nodes[4]; n.State != sandbox.Running || n.MemoryBytes != 9 || !n.CreatedAt.Equal(at(3)) {
		t.Errorf("%+v", n)
	}
	back.take()

	// One of several roots; and none at all.
	back.nodes = nil
	if nodes, err := w.root.Tree(ctx, "sbxone"); err != nil || len(nodes) != 0 {
		t.Errorf("%+v, %v", nodes, err)
	}
	if d := cmp.Diff([]string{`tree default "sbxone"`}, back.take()); d != "" {
		t.Error(d)
	}
	if _, data := w.raw(t, "GET", "unix:/v1/tree", "", ""); strings.TrimSpace(string(data)) != `{"nodes":[]}` {
		t.Errorf("%s", data)
	}
	// Records that name each other as parents come to an end, too.
	back.nodes = []manager.TreeNode{{ID: "x", Parent: "y", CreatedAt: at(1)}, {ID: "y", Parent: "x", CreatedAt: at(2)}, {ID: "z", Parent: "z"}}
	if _, err := w.root.Tree(ctx, ""); err != nil {
		t.Error(err)
	}
}

// What create takes and a sandbox tells of captures.
func TestCreateWithCaptures(t *testing.T) {
	var mu sync.Mutex
	var asked manager.CreateRequest
	w := newWorldOver(t, func(m *manager.Manager) api.Backend {
		return createSpy{m, func(r manager.CreateRequest) { mu.Lock(); asked = r; mu.Unlock() }}
	})
	sb, err := w.root.CreateSandbox(t.Context(), wire.CreateSandbox{
		Snapshot: "ready", OnTimeout: sandbox.OnTimeoutHibernate, IdleTimeout: 90, Timeout: 60,
		Env: map[string]string{"KEY": "x"}, EphemeralEnv: []string{"KEY"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if asked.Snapshot != "ready" || asked.OnTimeout != sandbox.OnTimeoutHibernate || asked.IdleTimeout != 90*time.Second || !reflect.DeepEqual(asked.EphemeralEnv, []string{"KEY"}) {
		t.Errorf("%+v", asked)
	}
	if sb.Snapshot != "snpx" || sb.Parent != "sbxparent" || sb.OnTimeout != "hibernate" || sb.IdleTimeout != 90 || sb.SuspendedAt == nil || sb.HibernatedAt == nil {
		t.Errorf("%+v", sb)
	}
	for body, part := range map[string]string{
		`{"on_timeout":"explode"}`: "on_timeout", `{"idle_timeout":-1}`: "idle_timeout", `{"idle_timeout":1e12}`: "idle_timeout",
	} {
		res, data := w.raw(t, "POST", "unix:/v1/sandboxes", "", body)
		wantError(t, res, data, 400, sandbox.CodeInvalid, part)
	}
	// Nothing is told of what is not there.
	data, err := json.Marshal(w.create(t, wire.CreateSandbox{Hostname: "plain"}))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"snapshot", "parent", "idle_timeout", "suspended_at", "hibernated_at"} {
		if strings.Contains(string(data), `"`+name+`"`) {
			t.Errorf("%s is told of a plain sandbox: %s", name, data)
		}
	}
}

// createSpy tells what a create asked for, and answers for captures.
type createSpy struct {
	*manager.Manager
	see func(manager.CreateRequest)
}

func (c createSpy) Create(ctx context.Context, tenant string, r manager.CreateRequest) (sandbox.Sandbox, error) {
	if r.Snapshot == "" {
		return c.Manager.Create(ctx, tenant, r)
	}
	c.see(r)
	now := time.Now()
	return sandbox.Sandbox{
		ID: "sbxmade", Snapshot: "snpx", Parent: "sbxparent", OnTimeout: r.OnTimeout, IdleTimeout: r.IdleTimeout,
		SuspendedAt: now, HibernatedAt: now, CreatedAt: now,
	}, nil
}

// Captures are a tenant's own: the tenant of the key goes with every call.
func TestCapturesByKey(t *testing.T) {
	w, back := newCaptures(t)
	ctx := t.Context()
	k, err := w.client(t, w.unix, client.Options{Tenant: "other"}).CreateKey(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	c := w.client(t, w.tcp, client.Options{APIKey: k.Key})
	for name, call := range map[string]func() error{
		"suspend":   func() error { return c.Suspend(ctx, "sbxone") },
		"hibernate": func() error { return c.Hibernate(ctx, "sbxone") },
		"snapshot":  func() error { _, err := c.CreateSnapshot(ctx, "sbxone", wire.CreateSnapshot{}); return err },
		"get":       func() error { _, err := c.Snapshot(ctx, "ready"); return err },
		"remove":    func() error { return c.RemoveSnapshot(ctx, "ready") },
		"fork":      func() error { _, err := c.Fork(ctx, "sbxone", wire.Fork{}); return err },
		"tree":      func() error { _, err := c.Tree(ctx, ""); return err },
	} {
		if err := call(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if calls := back.take(); len(calls) != 1 || !strings.HasPrefix(calls[0], name+" other") {
			t.Errorf("%s: %v", name, calls)
		}
	}
	for _, path := range []string{"/v1/snapshots", "/v1/tree", "/v1/snapshots/ready"} {
		res, data := w.raw(t, "GET", path, "", "")
		wantError(t, res, data, 401, sandbox.CodeUnauthenticated, "")
	}
}
