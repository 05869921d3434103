package manager_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

func TestLife(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	s := create(t, m, manager.CreateRequest{
		Env: map[string]string{"K": "s3cret"}, Metadata: map[string]string{"who": "me"}, User: "u", Workdir: "/w", Timeout: time.Hour,
	})
	if s.State != sandbox.Running || s.Runtime != "fake" || s.Template != "base" || s.TemplateID != "tplbase" ||
		s.Resources != sandbox.DefaultResources() || s.Network.Mode != sandbox.NetworkEgress || s.Hostname != string(s.ID) ||
		len(s.Token) != 64 || len(s.TrafficToken) != 64 || s.Token == s.TrafficToken || !s.ExpiresAt.Equal(s.StartedAt.Add(time.Hour)) {
		t.Errorf("the sandbox is %+v", s)
	}
	w.check(t)
	init := w.rt.Box(s.ID).Inits[0]
	if init.EnvVars["K"] != "s3cret" || init.EnvVars["LANG"] != "C" || init.AccessToken != s.Token || init.DefaultUser != "u" ||
		init.DefaultWorkdir != "/w" || init.Hostname != string(s.ID) || init.SandboxID != string(s.ID) || init.Address != s.Link.Address.Addr() {
		t.Errorf("the agent was told %+v", init)
	}
	if a, err := m.Agent(t.Context(), tenant, s.ID); err != nil || a.WaitReady(t.Context()) != nil {
		t.Errorf("the agent cannot be reached: %v", err)
	}
	if st, err := m.Stats(t.Context(), tenant, s.ID); err != nil || st.MemoryLimit != 512<<20 {
		t.Errorf("stats are %+v, %v", st, err)
	}
	if page, _, err := m.List(t.Context(), tenant, manager.ListFilter{Metadata: map[string]string{"who": "me"}}); err != nil || len(page) != 1 {
		t.Errorf("listed %v, %v", page, err)
	}
	wantCode(t, m.RemoveTemplate(t.Context(), tenant, "base"), sandbox.CodeConflict)
	os.WriteFile(filepath.Join(w.dir, "sandboxes", string(s.ID), "console.log"), []byte("last words\n"), 0o600)

	if err := m.Kill(t.Context(), tenant, s.ID); err != nil {
		t.Fatal(err)
	}
	w.check(t)
	got, err := m.Get(t.Context(), tenant, s.ID)
	if err != nil || got.State != sandbox.Killed || got.Reason != sandbox.ReasonKilledByUser || got.Metadata["who"] != "me" {
		t.Errorf("after the kill: %+v, %v", got, err)
	}
	if err := m.Kill(t.Context(), tenant, s.ID); err != nil {
		t.Errorf("a second kill: %v", err)
	}
	_, err = m.Agent(t.Context(), tenant, s.ID)
	wantCode(t, err, sandbox.CodeConflict, "killed_by_user")
	_, err = m.SetTimeout(t.Context(), tenant, s.ID, time.Second)
	wantCode(t, err, sandbox.CodeConflict)
	r, err := m.Logs(t.Context(), tenant, s.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	if log, _ := io.ReadAll(r); string(log) != "last words\n" {
		t.Errorf("the console is %q", log)
	}
	if page, _, err := m.List(t.Context(), tenant, manager.ListFilter{}); err != nil || len(page) != 0 {
		t.Errorf("listed %v, %v", page, err)
	}
	if page, _, err := m.List(t.Context(), tenant, manager.ListFilter{States: []sandbox.State{sandbox.Killed}}); err != nil || len(page) != 1 {
		t.Errorf("listed %v, %v", page, err)
	}
}

func TestTenantsSeeTheirOwn(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	s := create(t, m, manager.CreateRequest{})
	const other = "other"
	for name, call := range map[string]func() error{
		"get":     func() error { _, err := m.Get(t.Context(), other, s.ID); return err },
		"kill":    func() error { return m.Kill(t.Context(), other, s.ID) },
		"timeout": func() error { _, err := m.SetTimeout(t.Context(), other, s.ID, time.Hour); return err },
		"network": func() error { return m.SetNetwork(t.Context(), other, s.ID, sandbox.NetworkPolicy{}) },
		"stats":   func() error { _, err := m.Stats(t.Context(), other, s.ID); return err },
		"agent":   func() error { _, err := m.Agent(t.Context(), other, s.ID); return err },
		"dial":    func() error { _, err := m.Dial(t.Context(), other, s.ID, 80); return err },
		"logs":    func() error { _, err := m.Logs(t.Context(), other, s.ID, false); return err },
	} {
		theirs := call()
		if sandbox.CodeOf(theirs) != sandbox.CodeNotFound {
			t.Errorf("%s: %v", name, theirs)
		}
	}
	if _, err := m.Lookup(t.Context(), s.ID); err != nil {
		t.Error(err)
	}
	if page, _, _ := m.List(t.Context(), other, manager.ListFilter{}); len(page) != 0 {
		t.Errorf("another tenant lists %v", page)
	}
	if err := m.Kill(t.Context(), tenant, s.ID); err != nil {
		t.Fatal(err)
	}
	_, err := m.Get(t.Context(), other, s.ID)
	wantCode(t, err, sandbox.CodeNotFound)
}

func TestByToken(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	by := func(token string) (asked int, id sandbox.ID) {
		sb, ok := m.ByToken(func(have string) bool { asked++; return have == token })
		if ok != (sb.ID != "") {
			t.Errorf("%q: %v, %v", token, sb, ok)
		}
		return asked, sb.ID
	}
	var all []sandbox.Sandbox
	for range 3 {
		all = append(all, create(t, m, manager.CreateRequest{}))
	}
	for _, s := range all {
		if asked, id := by(s.Token); asked != 3 || id != s.ID || s.Token == "" {
			t.Errorf("%s's token leads to %q after %d", s.ID, id, asked)
		}
	}
	if err := m.Kill(t.Context(), tenant, all[0].ID); err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{all[0].Token, "", "x"} {
		if asked, id := by(token); asked != 2 || id != "" {
			t.Errorf("%q leads to %q after %d", token, id, asked)
		}
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	w.other.OnProbe = func() error { return sandbox.Errorf(sandbox.CodeUnavailable, "no such kernel: get one") }
	many := map[string]string{}
	for i := range 10_001 {
		many[fmt.Sprint("V", i)] = "x"
	}
	for _, tc := range []struct {
		name string
		r    manager.CreateRequest
		code sandbox.Code
		word string
	}{
		{"unknown template", manager.CreateRequest{Template: "nope"}, sandbox.CodeNotFound, "nope"},
		{"long template", manager.CreateRequest{Template: strings.Repeat("x", 256)}, sandbox.CodeInvalid, "256"},
		{"unknown runtime", manager.CreateRequest{Runtime: "nope"}, sandbox.CodeNotFound, "nope"},
		{"planned runtime", manager.CreateRequest{Runtime: "isolate"}, sandbox.CodeUnsupported, "not built yet"},
		{"runtime that cannot run", manager.CreateRequest{Runtime: "other"}, sandbox.CodeUnavailable, "no such kernel"},
		{"too little memory", manager.CreateRequest{Resources: sandbox.Resources{MemoryMiB: 8}}, sandbox.CodeInvalid, "memory"},
		{"too many cpus", manager.CreateRequest{Resources: sandbox.Resources{CPUs: 1e6}}, sandbox.CodeInvalid, "cpus"},
		{"too few pids", manager.CreateRequest{Resources: sandbox.Resources{PIDs: 1}}, sandbox.CodeInvalid, "pids"},
		{"disk limit", manager.CreateRequest{Resources: sandbox.Resources{DiskMiB: 100}}, sandbox.CodeUnsupported, "disk"},
		{"negative timeout", manager.CreateRequest{Timeout: -1}, sandbox.CodeInvalid, "timeout"},
		{"endless timeout", manager.CreateRequest{Timeout: 1 << 62}, sandbox.CodeInvalid, "timeout"},
		{"relative workdir", manager.CreateRequest{Workdir: "a"}, sandbox.CodeInvalid, "absolute"},
		{"host header", manager.CreateRequest{HostHeader: "a.example\r\nX: y"}, sandbox.CodeInvalid, "Host"},
		{"host header's port", manager.CreateRequest{HostHeader: "a.example:${OTHER}"}, sandbox.CodeInvalid, "Host"},
		{"long host header", manager.CreateRequest{HostHeader: strings.Repeat("a", 300)}, sandbox.CodeInvalid, "Host"},
		{"hostname", manager.CreateRequest{Hostname: "a_b"}, sandbox.CodeInvalid, "hostname"},
		{"long hostname", manager.CreateRequest{Hostname: strings.Repeat("a", 64)}, sandbox.CodeInvalid, "hostname"},
		{"user", manager.CreateRequest{User: "a\nb"}, sandbox.CodeInvalid, "user"},
		{"env name", manager.CreateRequest{Env: map[string]string{"A=B": "s3cret"}}, sandbox.CodeInvalid, "A=B"},
		{"env without a name", manager.CreateRequest{Env: map[string]string{"": "s3cret"}}, sandbox.CodeInvalid, "no name"},
		{"env value", manager.CreateRequest{Env: map[string]string{"A": "s3cret\x00"}}, sandbox.CodeInvalid, "NUL"},
		{"env entry", manager.CreateRequest{Env: map[string]string{"A": strings.Repeat("s3cret", 30_000)}}, sandbox.CodeInvalid, "180002"},
		{"env count", manager.CreateRequest{Env: many}, sandbox.CodeInvalid, "10001"},
		{"metadata key", manager.CreateRequest{Metadata: map[string]string{strings.Repeat("k", 257): ""}}, sandbox.CodeInvalid, "metadata"},
		{"metadata value", manager.CreateRequest{Metadata: map[string]string{"k": strings.Repeat("v", 4097)}}, sandbox.CodeInvalid, "metadata"},
		{"metadata that is no text", manager.CreateRequest{Metadata: map[string]string{"k": "\xff"}}, sandbox.CodeInvalid, "UTF-8"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := m.Create(t.Context(), tenant, tc.r)
			wantCode(t, err, tc.code, tc.word)
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error shows a value: %v", err)
			}
		})
	}
	w.check(t)
	if all, _, _ := m.List(t.Context(), tenant, manager.ListFilter{States: sandbox.States()}); len(all) != 0 {
		t.Errorf("a refused create is on record: %v", all)
	}
	// Thousands of variables are fine.
	delete(many, "V0")
	delete(many, "V1") // the template has one
	create(t, m, manager.CreateRequest{Env: many})
}

func TestFailedCreateIsUndone(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	w.rt.OnCreate = func(context.Context, sandbox.Spec) error {
		return sandbox.Errorf(sandbox.CodeBadTemplate, "no\nshell").With("k", "v")
	}
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeBadTemplate, "shell")
	var e *sandbox.Error
	if errors.As(err, &e); e.Details["k"] != "v" {
		t.Errorf("the details are lost: %v", e.Details)
	}
	w.check(t)
	all, _, err := m.List(t.Context(), tenant, manager.ListFilter{States: []sandbox.State{sandbox.Failed}})
	if err != nil || len(all) != 1 || all[0].Reason != sandbox.ReasonCreateFailed || all[0].Detail != "no shell" {
		t.Errorf("on record is %+v, %v", all, err)
	}
}

func TestStartCommandNeedsAShell(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	w.tpl.Put(template.Template{Name: "bare", ID: "tplbare", Tenant: tenant, Config: template.Config{StartCmd: "x"}})
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{Template: "bare"})
	wantCode(t, err, sandbox.CodeBadTemplate, "/bin/sh")
	w.check(t)
}

// blockCreate makes creates block until their context ends, and tells of each.
func (w *world) blockCreate() <-chan sandbox.ID {
	began := make(chan sandbox.ID, 100)
	w.rt.OnCreate = func(ctx context.Context, s sandbox.Spec) error {
		began <- s.ID
		<-ctx.Done()
		return ctx.Err()
	}
	return began
}

func TestKillWinsOverCreate(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	began := w.blockCreate()
	failed := make(chan error)
	go func() {
		_, err := m.Create(context.Background(), tenant, manager.CreateRequest{})
		failed <- err
	}()
	id := <-began
	_, err := m.Agent(t.Context(), tenant, id)
	wantCode(t, err, sandbox.CodeConflict, "creating")
	if err := m.Kill(t.Context(), tenant, id); err != nil {
		t.Fatal(err)
	}
	w.check(t)
	if s, _ := m.Get(t.Context(), tenant, id); s.State != sandbox.Killed || s.Reason != sandbox.ReasonKilledByUser {
		t.Errorf("it is %s, %s", s.State, s.Reason)
	}
	wantCode(t, <-failed, sandbox.CodeConflict, "killed_by_user")
}

func TestKillRightAfterTheRecordOfRunning(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	killed := make(chan error, 1)
	w.store.onUpdate = func(r store.Record) error {
		if r.State == sandbox.Running && r.Op == store.OpNone {
			w.store.onUpdate = nil
			go func() { killed <- m.Kill(context.Background(), tenant, r.ID) }()
			eventually(t, "the kill is known", func() bool {
				return len(w.net.Holders()) == 1 && m.SetNetwork(context.Background(), tenant, r.ID, sandbox.NetworkPolicy{}) != nil
			})
			time.Sleep(10 * time.Millisecond)
		}
		return nil
	}
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeConflict)
	if err := <-killed; err != nil {
		t.Error(err)
	}
	w.check(t)
}

func TestClientThatGoesAwayUndoesItsCreate(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	began := w.blockCreate()
	ctx, cancel := context.WithCancel(t.Context())
	go func() { <-began; cancel() }()
	_, err := m.Create(ctx, tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeCanceled)
	w.check(t)
}

func TestEndIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	s := create(t, m, manager.CreateRequest{})
	var mu sync.Mutex
	fails := 1
	w.rt.OnKill = func(context.Context, sandbox.ID) error {
		mu.Lock()
		defer mu.Unlock()
		if fails > 0 {
			fails--
			return errors.New("busy")
		}
		return nil
	}
	err := m.Kill(t.Context(), tenant, s.ID)
	wantCode(t, err, sandbox.CodeInternal, "tried again", "busy")
	_, err = m.Agent(t.Context(), tenant, s.ID)
	wantCode(t, err, sandbox.CodeConflict, "being ended")
	w.waitEnded(t, s.ID)
	w.check(t)
}

func TestTimeouts(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	soon := create(t, m, manager.CreateRequest{Timeout: time.Minute})
	never := create(t, m, manager.CreateRequest{})
	moved := create(t, m, manager.CreateRequest{Timeout: time.Minute})
	if _, err := m.SetTimeout(t.Context(), tenant, moved.ID, time.Hour); err != nil {
		t.Fatal(err)
	}
	lifted := create(t, m, manager.CreateRequest{Timeout: time.Minute})
	if s, err := m.SetTimeout(t.Context(), tenant, lifted.ID, 0); err != nil || !s.ExpiresAt.IsZero() {
		t.Fatal(s.ExpiresAt, err)
	}
	w.clock.Advance(59 * time.Second)
	time.Sleep(20 * time.Millisecond)
	if s, _ := m.Get(t.Context(), tenant, soon.ID); s.State != sandbox.Running {
		t.Fatalf("ended early: %+v", s)
	}
	w.clock.Advance(2 * time.Second)
	if s := w.waitEnded(t, soon.ID); s.State != sandbox.Killed || s.Reason != sandbox.ReasonTimeout {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	w.check(t)

	// It runs out while no daemon runs.
	w.stop(t)
	w.clock.Advance(time.Hour)
	m = w.start(t)
	if s, _ := m.Get(t.Context(), tenant, moved.ID); s.State != sandbox.Killed || s.Reason != sandbox.ReasonTimeout {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	// And it holds for what is adopted.
	if _, err := m.SetTimeout(t.Context(), tenant, never.ID, time.Minute); err != nil {
		t.Fatal(err)
	}
	w.stop(t)
	w.start(t)
	w.clock.Advance(2 * time.Minute)
	if s := w.waitEnded(t, never.ID); s.Reason != sandbox.ReasonTimeout {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	if s, _ := w.m.Get(t.Context(), tenant, lifted.ID); s.State != sandbox.Running {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	w.check(t)
}

func TestCrashAndOOM(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	crashed := create(t, m, manager.CreateRequest{})
	oom := create(t, m, manager.CreateRequest{})
	w.rt.Box(oom.ID).OOM()
	eventually(t, "the OOM kill is on record", func() bool {
		s, _ := m.Get(t.Context(), tenant, oom.ID)
		return s.OOMKills == 1 && s.State == sandbox.Running
	})
	w.rt.Box(crashed.ID).Crash(sandbox.ReasonRuntimeCrashed, "signal 11")
	if s := w.waitEnded(t, crashed.ID); s.State != sandbox.Failed || s.Reason != sandbox.ReasonRuntimeCrashed || s.Detail != "signal 11" {
		t.Errorf("it ended %s, %s, %s", s.State, s.Reason, s.Detail)
	}
	w.rt.Box(oom.ID).Crash(sandbox.ReasonOOM, "all of it")
	if s := w.waitEnded(t, oom.ID); s.State != sandbox.Failed || s.Reason != sandbox.ReasonOOM || s.OOMKills != 1 {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	w.check(t)
	evs, _ := w.store.EventsAfter(t.Context(), tenant, 0, 100)
	n := 0
	for _, e := range evs {
		if e.Type == sandbox.EventOOM && e.Sandbox == oom.ID {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d OOM events", n)
	}
}

func TestFullDiskDoesNotKeepASandboxAlive(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	s := create(t, m, manager.CreateRequest{})
	full := sandbox.Errorf(sandbox.CodeDiskFull, "no space")
	w.store.onUpdate = func(r store.Record) error {
		if r.Op == store.OpEnd {
			return full
		}
		return nil
	}
	if err := m.Kill(t.Context(), tenant, s.ID); err != nil {
		t.Fatal(err)
	}
	w.check(t)
	if s, _ := m.Get(t.Context(), tenant, s.ID); s.Reason != sandbox.ReasonKilledByUser {
		t.Errorf("it ended %s, %s", s.State, s.Reason)
	}
	// A change that cannot be recorded is not done.
	w.store.onUpdate = nil
	s = create(t, m, manager.CreateRequest{Timeout: time.Hour})
	w.store.onUpdate = func(store.Record) error { return full }
	_, err := m.SetTimeout(t.Context(), tenant, s.ID, time.Minute)
	wantCode(t, err, sandbox.CodeDiskFull)
	wantCode(t, m.SetNetwork(t.Context(), tenant, s.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}), sandbox.CodeDiskFull)
	w.store.onUpdate = nil
	got, _ := m.Get(t.Context(), tenant, s.ID)
	if !got.ExpiresAt.Equal(s.ExpiresAt) || got.Network.Mode != sandbox.NetworkEgress || w.net.Policy(s.Link.Slot).Mode != sandbox.NetworkEgress {
		t.Errorf("it was changed: %+v", got)
	}
}

func TestNetworkPolicy(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	s := create(t, m, manager.CreateRequest{Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}})
	if got := w.net.Policy(s.Link.Slot).Mode; got != sandbox.NetworkNone {
		t.Errorf("the mode is %s", got)
	}
	if err := m.SetNetwork(t.Context(), tenant, s.ID, sandbox.NetworkPolicy{}); err != nil {
		t.Fatal(err)
	}
	w.stop(t)
	m = w.start(t)
	if got := w.net.Policy(s.Link.Slot).Mode; got != sandbox.NetworkEgress {
		t.Errorf("the mode is %s", got)
	}
	if s, _ := m.Get(t.Context(), tenant, s.ID); s.Network.Mode != sandbox.NetworkEgress {
		t.Errorf("the mode on record is %s", s.Network.Mode)
	}
}

func TestRuntimes(t *testing.T) {
	w := newWorld(t)
	w.tune = func(c *manager.Config) { c.Preferred = []string{"absent", "other", "fake"} }
	m := w.start(t)
	if s := create(t, m, manager.CreateRequest{}); s.Runtime != "other" {
		t.Errorf("the default runtime is %s", s.Runtime)
	}
	w.other.OnProbe = func() error { return errors.New("broken") }
	all := m.Runtimes(t.Context())
	if len(all) != 4 || !all[0].Default || all[0].Error != nil || all[1].Default || all[1].Error == nil || all[3].Name != "isolate" || all[3].Error.Code != sandbox.CodeUnsupported {
		t.Errorf("runtimes are %+v", all)
	}
	if s := create(t, m, manager.CreateRequest{}); s.Runtime != "fake" {
		t.Errorf("the default runtime is %s", s.Runtime)
	}
	w.rt.OnProbe = w.other.OnProbe
	m.Runtimes(t.Context())
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeUnavailable, "broken")
}

func TestEvents(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	only, err := m.Subscribe(ctx, tenant, -1)
	if err != nil {
		t.Fatal(err)
	}
	theirs, _ := m.Subscribe(ctx, "other", 0)
	s := create(t, m, manager.CreateRequest{})
	m.Kill(t.Context(), tenant, s.ID)
	var seqs []int64
	for _, want := range []sandbox.State{sandbox.Creating, sandbox.Running, sandbox.Killed} {
		e := <-only
		if e.To != want || e.Sandbox != s.ID {
			t.Errorf("event %+v, want to %s", e, want)
		}
		seqs = append(seqs, e.Seq)
	}
	resumed, _ := m.Subscribe(ctx, tenant, seqs[0])
	if e := <-resumed; e.Seq != seqs[1] {
		t.Errorf("resumed at %d, want %d", e.Seq, seqs[1])
	}
	// A reader that never reads holds nobody up, and misses nothing.
	for range 60 {
		s := create(t, m, manager.CreateRequest{})
		m.Kill(t.Context(), tenant, s.ID)
	}
	last := seqs[2]
	for range 180 {
		e := <-only
		if e.Seq <= last {
			t.Fatalf("seq %d after %d", e.Seq, last)
		}
		last = e.Seq
	}
	select {
	case e := <-theirs:
		t.Errorf("another tenant got %+v", e)
	default:
	}
	cancel()
	for range only {
	}
}

func TestKeys(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	k, secret, err := m.FirstKey(t.Context())
	if err != nil || !strings.HasPrefix(secret, "e2b_") || len(secret) != 44 || k.Tenant != tenant {
		t.Fatalf("%+v %q %v", k, secret, err)
	}
	if _, again, err := m.FirstKey(t.Context()); err != nil || again != "" {
		t.Errorf("a second first key: %q, %v", again, err)
	}
	if who, err := m.Authenticate(t.Context(), secret); err != nil || who != tenant {
		t.Errorf("authenticated as %q, %v", who, err)
	}
	eventually(t, "its use is noted", func() bool {
		ks, _ := m.Keys(t.Context(), tenant)
		return len(ks) == 1 && !ks[0].LastUsedAt.IsZero()
	})
	k2, s2, _ := m.CreateKey(t.Context(), "other", "n")
	if who, err := m.Authenticate(t.Context(), s2); err != nil || who != "other" {
		t.Errorf("authenticated as %q, %v", who, err)
	}
	for _, bad := range []string{"", "e2b_", secret[:43], secret + "0", strings.ToUpper(secret), "e2b_" + strings.Repeat("0", 40)} {
		_, err := m.Authenticate(t.Context(), bad)
		wantCode(t, err, sandbox.CodeUnauthenticated)
	}
	wantCode(t, m.RemoveKey(t.Context(), tenant, k2.ID), sandbox.CodeNotFound)
	if err := m.RemoveKey(t.Context(), "other", k2.ID); err != nil {
		t.Fatal(err)
	}
	_, err = m.Authenticate(t.Context(), s2)
	wantCode(t, err, sandbox.CodeUnauthenticated)
	if b, err := os.ReadFile(filepath.Join(w.dir, "warren.db-wal")); err != nil || strings.Contains(string(b), secret) {
		t.Errorf("the secret is on the disk (%v)", err)
	}
}

func TestBuildsAreCutOffByTheStop(t *testing.T) {
	w := newWorld(t)
	m := w.start(t)
	began := make(chan struct{})
	w.tpl.OnBuild = func(ctx context.Context, r template.StepRunner) (template.Template, error) {
		close(began)
		<-ctx.Done()
		return template.Template{}, ctx.Err()
	}
	failed := make(chan error)
	go func() {
		_, err := m.BuildTemplate(context.Background(), tenant, manager.BuildRequest{Dockerfile: &template.DockerfileOptions{}}, nil)
		failed <- err
	}()
	<-began
	w.stop(t)
	wantCode(t, <-failed, sandbox.CodeUnavailable, "stopping")
	_, err := m.Create(t.Context(), tenant, manager.CreateRequest{})
	wantCode(t, err, sandbox.CodeUnavailable)
	_, err = m.BuildTemplate(t.Context(), tenant, manager.BuildRequest{}, nil)
	wantCode(t, err, sandbox.CodeUnavailable)
}
