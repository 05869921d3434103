package manager

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Budget bounds what sandboxes may take of the host. Zero fields take their
// defaults.
type Budget struct {
	// MemoryReserve is kept for the host itself, in bytes: the larger of 1 GiB
	// and 5 % of its memory.
	MemoryReserve int64
	// MemoryOvercommit is how many times the rest may be promised to sandboxes
	// as limits, since few use theirs whole: 4.
	MemoryOvercommit float64
	// DiskReserve is the free space of the state directory's filesystem, in
	// bytes, below which no sandbox is made: 1 GiB.
	DiskReserve int64
	// ProcessOvercommit is how many times the host's processes may be promised
	// to sandboxes as limits: 16.
	ProcessOvercommit float64
	// Creates is how many creates are at work at the same time; more wait
	// their turn: 2 per CPU, at least 4.
	Creates int
}

// Parts of the budget that are no knobs.
const (
	// memoryFloor is what a new sandbox takes at once, beside its runtime's
	// overhead: the agent, the page tables, a little page cache.
	memoryFloor = 16 << 20
	// diskFloor is what a new sandbox writes at once: its bundle, its console.
	diskFloor = 4 << 20
	// processFloor is the processes and threads of a new sandbox's first
	// second, the agent's and the runtime's helpers.
	processFloor = 64
	// processShare is the part of the host's processes that may be in use.
	processShare = 0.9
)

func (b Budget) withDefaults(memory int64, cpus int) Budget {
	if b.MemoryReserve == 0 {
		b.MemoryReserve = max(1<<30, memory/20)
	}
	if b.MemoryOvercommit == 0 {
		b.MemoryOvercommit = 4
	}
	if b.DiskReserve == 0 {
		b.DiskReserve = 1 << 30
	}
	if b.ProcessOvercommit == 0 {
		b.ProcessOvercommit = 16
	}
	if b.Creates == 0 {
		b.Creates = max(4, 2*cpus)
	}
	return b
}

// MemoryLimit is what all sandboxes of a host with this much memory may really
// use together, in bytes: the bound of their common control group.
func (b Budget) MemoryLimit(total int64) int64 {
	return max(total-b.withDefaults(total, 1).MemoryReserve, 0)
}

// HostFacts reads what admission goes by.
type HostFacts interface {
	Memory() (host.Memory, error)
	Disk() (host.Disk, error) // of the state directory
	Processes() (Processes, error)
	BootID() (string, error)
}

// Processes counts processes and threads.
type Processes struct {
	Now int // existing
	Max int // that the kernel allows
}

type hostFacts struct{ stateDir string }

func (hostFacts) Memory() (host.Memory, error) { return host.ReadMemory() }

func (h hostFacts) Disk() (host.Disk, error) { return host.ReadDisk(h.stateDir) }

func (hostFacts) BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(b)), err
}

func (hostFacts) Processes() (Processes, error) {
	p := Processes{Max: 1 << 30}
	for _, name := range []string{"threads-max", "pid_max"} {
		b, err := os.ReadFile("/proc/sys/kernel/" + name)
		if err != nil {
			return p, err
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			return p, fmt.Errorf("/proc/sys/kernel/%s: %w", name, err)
		}
		p.Max = min(p.Max, n)
	}
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return p, err
	}
	// The fourth field is running/existing, in threads (proc_loadavg(5)).
	if f := bytes.Fields(b); len(f) > 3 {
		if _, all, ok := strings.Cut(string(f[3]), "/"); ok {
			p.Now, err = strconv.Atoi(all)
		}
	}
	return p, err
}

// ledger keeps what was promised to whom. Its lock is held for arithmetic
// alone.
type ledger struct {
	budget     Budget
	memoryCap  int64 // bytes that may be promised
	memoryMost int64 // bytes that one sandbox may be promised
	processCap int

	mu     sync.Mutex
	claims map[sandbox.ID]claim
	sum    claim // of all; floors of those in flight only
	flight int
}

type claim struct {
	memory    int64 // limit and overhead
	processes int
	// What a create in flight will take of the host at once and the host's
	// own figures do not show yet.
	memoryNow, diskNow int64
	processesNow       int
}

func newLedger(b Budget, memory int64, processes int) *ledger {
	return &ledger{
		budget:     b,
		memoryCap:  int64(b.MemoryOvercommit * float64(max(memory-b.MemoryReserve, 0))),
		memoryMost: memory - b.MemoryReserve,
		processCap: int(b.ProcessOvercommit * processShare * float64(processes)),
		claims:     map[sandbox.ID]claim{},
	}
}

func claimOf(r sandbox.Resources, c sandbox.Capabilities) claim {
	overhead := int64(c.OverheadMiB) << 20
	return claim{
		memory:    int64(r.MemoryMiB)<<20 + overhead,
		processes: r.PIDs,
		memoryNow: overhead + memoryFloor, diskNow: diskFloor, processesNow: processFloor,
	}
}

// facts is the host at one moment.
type facts struct {
	memory    host.Memory
	disk      host.Disk
	processes Processes
}

func (m *Manager) facts() (facts, error) {
	var f facts
	var err error
	if f.memory, err = m.cfg.Host.Memory(); err != nil {
		return f, sandbox.Errorf(sandbox.CodeInternal, "read the host's memory: %w", err)
	}
	if f.disk, err = m.cfg.Host.Disk(); err != nil {
		return f, sandbox.Errorf(sandbox.CodeInternal, "read the host's disk: %w", err)
	}
	if f.processes, err = m.cfg.Host.Processes(); err != nil {
		return f, sandbox.Errorf(sandbox.CodeInternal, "read the host's processes: %w", err)
	}
	return f, nil
}

// admit claims c for id, or tells with CodeNoCapacity what is missing.
func (l *ledger) admit(id sandbox.ID, c claim, f facts) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.budget
	short := func(what, format string, args ...any) error {
		return sandbox.Errorf(sandbox.CodeNoCapacity, format+": end sandboxes, ask for less, or use a larger host", args...).With("resource", what)
	}
	if most := f.memory.Total - b.MemoryReserve; c.memory > most {
		return short("memory", "the host can give its sandboxes %s of memory together, %s do not fit", size(most), size(c.memory))
	}
	if l.sum.memory+c.memory > l.memoryCap {
		return short("memory", "the host's memory budget of %s is promised up to %s, %s more do not fit",
			size(l.memoryCap), size(l.sum.memory), size(c.memory))
	}
	if free := f.memory.Available - b.MemoryReserve - l.sum.memoryNow; free < c.memoryNow {
		return short("memory", "the host has %s of memory available, of which %s are kept for itself and %s for creates under way; %s more do not fit",
			size(f.memory.Available), size(b.MemoryReserve), size(l.sum.memoryNow), size(c.memoryNow))
	}
	if free := f.disk.Free - b.DiskReserve - l.sum.diskNow; free < c.diskNow {
		return short("disk", "the disk of the state directory has %s free, of which %s are kept in reserve", size(f.disk.Free), size(b.DiskReserve))
	}
	if l.sum.processes+c.processes > l.processCap {
		return short("processes", "the host's process budget of %d is promised up to %d, %d more do not fit", l.processCap, l.sum.processes, c.processes)
	}
	if most := int(processShare * float64(f.processes.Max)); f.processes.Now+l.sum.processesNow+c.processesNow > most {
		return short("processes", "the host has %d processes and threads of at most %d", f.processes.Now, most)
	}
	l.add(id, c)
	l.flight++
	return nil
}

// madeRoomFor tells whether the end of other sandboxes can make room for c,
// which was refused with err.
func (l *ledger) madeRoomFor(c claim, err error) bool {
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code != sandbox.CodeNoCapacity {
		return false
	}
	switch e.Details["resource"] {
	case "memory":
		return c.memory <= min(l.memoryCap, l.memoryMost)
	case "processes":
		return c.processes <= l.processCap
	}
	return e.Details["resource"] == "slots"
}

// force claims c for id, whatever is free: it exists already.
func (l *ledger) force(id sandbox.ID, c claim) {
	c.memoryNow, c.diskNow, c.processesNow = 0, 0, 0
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(id, c)
}

func (l *ledger) add(id sandbox.ID, c claim) {
	l.claims[id] = c
	l.sum = l.sum.plus(c, 1)
}

func (c claim) plus(d claim, sign int64) claim {
	return claim{
		memory: c.memory + sign*d.memory, processes: c.processes + int(sign)*d.processes,
		memoryNow: c.memoryNow + sign*d.memoryNow, diskNow: c.diskNow + sign*d.diskNow,
		processesNow: c.processesNow + int(sign)*d.processesNow,
	}
}

// settle tells that id's create is over: the host's figures show it now.
func (l *ledger) settle(id sandbox.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settleLocked(id)
}

func (l *ledger) settleLocked(id sandbox.ID) {
	c, ok := l.claims[id]
	if !ok || c.memoryNow == 0 {
		return
	}
	l.sum = l.sum.plus(c, -1)
	c.memoryNow, c.diskNow, c.processesNow = 0, 0, 0
	l.add(id, c)
	l.flight--
}

// release gives back what id claimed.
func (l *ledger) release(id sandbox.ID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settleLocked(id)
	if c, ok := l.claims[id]; ok {
		l.sum = l.sum.plus(c, -1)
		delete(l.claims, id)
	}
}

func size(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

// Capacity tells the host's budget and its use. What cannot be read is 0.
func (m *Manager) Capacity(ctx context.Context) Capacity {
	f, err := m.facts()
	if err != nil {
		m.log.WarnContext(ctx, "read the host's figures", "error", err)
	}
	c := Capacity{
		ByState: map[string]int{}, ByRuntime: map[string]int{},
		MemoryTotal: f.memory.Total, MemoryAvailable: f.memory.Available, MemoryReserve: m.cfg.Budget.MemoryReserve,
		DiskTotal: f.disk.Total, DiskFree: f.disk.Free, DiskReserve: m.cfg.Budget.DiskReserve,
		CreatesMax: m.cfg.Budget.Creates,
	}
	c.Spares = m.spares.ready()
	c.SlotsUsed, c.Slots = m.cfg.Network.Capacity()
	m.ledger.mu.Lock()
	c.MemoryBudget, c.MemoryPromised = m.ledger.memoryCap, m.ledger.sum.memory
	c.ProcessBudget, c.ProcessPromised = m.ledger.processCap, m.ledger.sum.processes
	c.CreatesInFlight = m.ledger.flight
	m.ledger.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	c.Sandboxes, c.Departing = len(m.live), len(m.departures)
	for _, l := range m.live {
		r := l.record()
		c.ByState[string(r.State)]++
		c.ByRuntime[r.Runtime]++
	}
	return c
}

// upkeepEvery is how often the store is pruned.
const upkeepEvery = 10 * time.Minute

// upkeep prunes the store until ctx is done.
func (m *Manager) upkeep(ctx context.Context) {
	for {
		r := m.cfg.Retention
		r.EndedAfter = m.now().Add(-m.cfg.KeepEnded)
		if _, err := m.store.Maintain(ctx, r); err != nil && ctx.Err() == nil {
			m.log.WarnContext(ctx, "prune the records", "error", err)
		}
		timer, stop := m.clock.After(upkeepEvery)
		select {
		case <-ctx.Done():
			stop()
			return
		case <-timer:
		}
	}
}
