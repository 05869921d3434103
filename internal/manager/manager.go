// Package manager is the lifecycle: the only place that changes a sandbox's
// state.
//
// Every change follows one pattern: the intent is recorded, the host is
// changed, the result is recorded with its event. A daemon that starts after a
// crash finds in the store what was under way and, by that, adopts, finishes
// or undoes it (Start).
//
// Calls about one sandbox take turns (live.turn); calls about different ones
// never wait for each other, and no lock is held over I/O.
package manager

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/pool"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/snapshot"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

// Network is what the manager needs of the sandboxes' network;
// *network.Network is it.
type Network interface {
	Acquire(ctx context.Context, id sandbox.ID, p sandbox.NetworkPolicy) (sandbox.Link, error)
	SetPolicy(ctx context.Context, l sandbox.Link, p sandbox.NetworkPolicy) error
	Adopt(ctx context.Context, l sandbox.Link, id sandbox.ID, p sandbox.NetworkPolicy) error
	Release(ctx context.Context, l sandbox.Link) error
	Sweep(ctx context.Context, inUse map[int]sandbox.ID) error
	Capacity() (used, total int)
}

// Templates is what the manager needs of the template library;
// *template.Library is it.
type Templates interface {
	Resolve(ctx context.Context, tenant, nameOrID string) (template.Template, []string, error)
	Hold(ctx context.Context, id, holder string) error
	Drop(ctx context.Context, holder string) error
	List(ctx context.Context, tenant string) ([]template.Template, error)
	Get(ctx context.Context, tenant, nameOrID string) (template.Template, error)
	Remove(ctx context.Context, tenant, nameOrID string) (template.Template, error)
	Tag(ctx context.Context, tenant, nameOrID, name, tag string) (template.Template, error)
	Collect(ctx context.Context) error
	Builder
}

// Builder makes templates.
type Builder interface {
	BuildDebian(ctx context.Context, o template.DebianOptions, p template.Progress) (template.Template, error)
	Import(ctx context.Context, o template.ImportOptions, p template.Progress) (template.Template, error)
	BuildDockerfile(ctx context.Context, o template.DockerfileOptions, r template.StepRunner, p template.Progress) (template.Template, error)
	BuildSteps(ctx context.Context, o template.StepsOptions, r template.StepRunner, p template.Progress) (template.Template, error)
}

// Config is what a Manager works with. Fields without a default are needed.
type Config struct {
	StateDir string // absolute; sandboxes live in StateDir/sandboxes, captures in StateDir/snapshots
	Store    store.Store
	// Runtimes in the order in which they are told to people.
	Runtimes []sandbox.Runtime
	// Preferred names runtimes, the best first: a create that names none gets
	// the first of them that this host can run. Empty is Runtimes' order.
	Preferred []string
	// Planned names runtimes that the API knows and this build has not.
	Planned []string
	// BuildRuntime runs the steps of template builds; its instances are
	// sandbox.DiskCapturers. Empty is the first of Runtimes that captures disks.
	BuildRuntime string
	Network      Network
	Templates    Templates
	Budget       Budget
	Spares       int             // sandboxes kept prepared for forks and wakes, at most; see spares
	Retention    store.Retention // EndedAfter is not used: see KeepEnded
	KeepEnded    time.Duration   // how long ended sandboxes stay on record; 0 is 7 days
	Clock        Clock           // nil is the system's
	Log          *slog.Logger    // faults of background work; nil discards them
	Host         HostFacts       // nil reads this host's
	// ImageAliases name templates that builds of steps start from instead of
	// an image: "e2bdev/base" → "base".
	ImageAliases map[string]string
	Pools        pool.Options // how members of pools are made; Go is not used
}

// The defaults of Config.Retention and KeepEnded.
const (
	defaultKeepEnded = 7 * 24 * time.Hour
	defaultEnded     = 10_000
	defaultEvents    = 100_000
)

// Manager runs the lives of all sandboxes of one daemon.
type Manager struct {
	cfg      Config
	store    store.Store
	clock    Clock
	log      *slog.Logger
	runtimes map[string]sandbox.Runtime
	probes   probes
	ledger   *ledger
	creates  *semaphore.Weighted // creates at work
	ttl      *deadlines
	idle     *deadlines
	snaps    *snapshot.Library
	spares   *spares
	pools    pools
	builds   builds
	bell     bell // rings when events were recorded
	bootID   string

	serving atomic.Bool // between Start's end and Close's begin
	opened  atomic.Bool // Start was called

	watching context.Context // ends when Close begins: watchers, deadlines, upkeep
	unwatch  context.CancelFunc
	working  context.Context // ends when Close stops waiting: ends under way
	stopWork context.CancelFunc
	tasks    tasks

	mu         sync.Mutex
	live       map[sandbox.ID]*live
	departures map[sandbox.ID]chan struct{} // see depart

	keyUses keyUses
}

// New makes a Manager. It does nothing until Start.
func New(cfg Config) (*Manager, error) {
	if cfg.Clock == nil {
		cfg.Clock = SystemClock()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Host == nil {
		cfg.Host = hostFacts{stateDir: cfg.StateDir}
	}
	if cfg.KeepEnded == 0 {
		cfg.KeepEnded = defaultKeepEnded
	}
	if cfg.Retention.Ended == 0 {
		cfg.Retention.Ended = defaultEnded
	}
	if cfg.Retention.Events == 0 {
		cfg.Retention.Events = defaultEvents
	}
	m := &Manager{
		cfg: cfg, store: cfg.Store, clock: cfg.Clock, log: cfg.Log,
		runtimes: map[string]sandbox.Runtime{},
		live:     map[sandbox.ID]*live{}, departures: map[sandbox.ID]chan struct{}{},
	}
	for _, r := range cfg.Runtimes {
		if m.runtimes[r.Name()] != nil {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "runtime %q is registered twice", r.Name())
		}
		m.runtimes[r.Name()] = r
		if m.cfg.BuildRuntime == "" && r.Capabilities().DiskCapture {
			m.cfg.BuildRuntime = r.Name()
		}
		if len(cfg.Preferred) == 0 {
			m.cfg.Preferred = append(m.cfg.Preferred, r.Name())
		}
	}
	m.spares = newSpares(m, cfg.Spares)
	var err error
	if m.bootID, err = cfg.Host.BootID(); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "read the host's boot id: %w", err)
	}
	memory, err := cfg.Host.Memory()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "read the host's memory: %w", err)
	}
	processes, err := cfg.Host.Processes()
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "read the host's process limit: %w", err)
	}
	m.cfg.Budget = cfg.Budget.withDefaults(memory.Total, host.CPUs())
	m.ledger = newLedger(m.cfg.Budget, memory.Total, processes.Max)
	m.creates = semaphore.NewWeighted(int64(m.cfg.Budget.Creates))
	m.ttl, m.idle = newDeadlines(m.clock), newDeadlines(m.clock)
	m.newPools()
	m.builds.init()
	m.watching, m.unwatch = context.WithCancel(context.Background())
	m.working, m.stopWork = context.WithCancel(context.Background())
	return m, nil
}

// ready tells whether calls are served.
func (m *Manager) ready() error {
	if m.serving.Load() {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "the daemon is starting or stopping: try again in a moment")
}

// Close stops serving and ends the Manager's goroutines; sandboxes go on
// running. What is under way (creates, ends) is waited for until ctx is done,
// then it is cut off: a create is undone, an end is finished by the next Start.
func (m *Manager) Close(ctx context.Context) error {
	m.serving.Store(false)
	m.unwatch()
	m.tasks.run(m.spares.close)
	done := make(chan struct{})
	go func() {
		m.tasks.wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		m.abortCreates()
		m.stopWork()
		<-done
	}
	m.stopWork()
	m.mu.Lock()
	all := make([]*live, 0, len(m.live))
	for _, l := range m.live {
		all = append(all, l)
	}
	m.mu.Unlock()
	for _, l := range all {
		l.dropAgent()
		l.mu.Lock()
		inst := l.inst
		l.mu.Unlock()
		if r, ok := inst.(releaser); ok {
			r.Release()
		}
	}
	return nil
}

// releaser is an Instance that holds something in this process (a descriptor,
// a goroutine) that is to be given back when the daemon ends without it.
type releaser interface{ Release() }

func (m *Manager) abortCreates() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.live {
		l.mu.Lock()
		if l.abort != nil {
			l.abort(errStopping)
		}
		l.mu.Unlock()
	}
}

var errStopping = sandbox.Errorf(sandbox.CodeUnavailable, "the daemon is stopping")

// tasks counts goroutines and calls that Close waits for. Unlike a WaitGroup
// it may grow while it is waited for.
type tasks struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n falls to 0; nil while nobody waits
}

func (t *tasks) begin() {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
}

func (t *tasks) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n--; t.n == 0 && t.idle != nil {
		close(t.idle)
		t.idle = nil
	}
}

func (t *tasks) run(f func()) {
	t.begin()
	go func() {
		defer t.end()
		f()
	}()
}

func (t *tasks) wait() {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return
	}
	if t.idle == nil {
		t.idle = make(chan struct{})
	}
	idle := t.idle
	t.mu.Unlock()
	<-idle
}
