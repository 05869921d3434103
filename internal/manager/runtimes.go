package manager

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// How long a probe's answer is good for: a host that can run a runtime goes on
// to; one that cannot may be mended at any moment. Within staleProbe a good one
// is taken still, and asked for anew beside: nothing that a client waits for
// needs to.
const (
	goodProbe  = time.Minute
	staleProbe = 10 * time.Minute
	badProbe   = 2 * time.Second
)

// probes remembers the runtimes' answers, so that a create does not pay for a
// probe each time.
type probes struct {
	mu   sync.Mutex
	last map[string]probed
}

type probed struct {
	at     time.Time
	err    error
	asking bool // anew
}

// probe asks whether this host can run rt. fresh does not take a remembered
// answer.
func (m *Manager) probe(ctx context.Context, rt sandbox.Runtime, fresh bool) error {
	now := m.clock.Now()
	m.probes.mu.Lock()
	p, ok := m.probes.last[rt.Name()]
	age := now.Sub(p.at)
	if ok && !fresh && p.err == nil && age >= goodProbe && age < staleProbe {
		if !p.asking {
			p.asking = true
			m.probes.last[rt.Name()] = p
			m.tasks.run(func() { m.probe(m.watching, rt, true) })
		}
		m.probes.mu.Unlock()
		return nil
	}
	m.probes.mu.Unlock()
	good := goodProbe
	if p.err != nil {
		good = badProbe
	}
	if ok && !fresh && age < good {
		return p.err
	}
	err := rt.Probe(ctx)
	if err != nil && ctx.Err() != nil {
		return ctxError(ctx, "probe runtime "+rt.Name())
	}
	m.probes.mu.Lock()
	defer m.probes.mu.Unlock()
	if m.probes.last == nil {
		m.probes.last = map[string]probed{}
	}
	m.probes.last[rt.Name()] = probed{at: now, err: err}
	return err
}

// chooseRuntime gives the runtime of a name, or the first preferred one that
// this host can run.
func (m *Manager) chooseRuntime(ctx context.Context, name string) (sandbox.Runtime, error) {
	if name != "" {
		rt := m.runtimes[name]
		if rt == nil {
			return nil, m.unknownRuntime(name)
		}
		return rt, m.probe(ctx, rt, false)
	}
	var all []error
	for _, name := range m.cfg.Preferred {
		rt := m.runtimes[name]
		if rt == nil {
			continue
		}
		err := m.probe(ctx, rt, false)
		if err == nil {
			return rt, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
		all = append(all, describe(err, name))
	}
	if len(all) == 0 {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "no runtime is registered: this build cannot run sandboxes")
	}
	return nil, sandbox.Errorf(sandbox.CodeUnavailable, "this host can run none of the runtimes: %w", errors.Join(all...))
}

func (m *Manager) unknownRuntime(name string) error {
	for _, p := range m.cfg.Planned {
		if p == name {
			return sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q is not built yet: `warren runtimes` shows what there is", name)
		}
	}
	names := make([]string, 0, len(m.cfg.Runtimes))
	for _, r := range m.cfg.Runtimes {
		names = append(names, r.Name())
	}
	return sandbox.Errorf(sandbox.CodeNotFound, "no runtime %q: there is %s", short(name), strings.Join(names, ", "))
}

// Runtimes tells of every runtime whether this host can run it, those that the
// API knows and this build has not included.
func (m *Manager) Runtimes(ctx context.Context) []RuntimeStatus {
	var all []RuntimeStatus
	for _, rt := range m.cfg.Runtimes {
		s := RuntimeStatus{Name: rt.Name(), Capabilities: rt.Capabilities()}
		if err := m.probe(ctx, rt, true); err != nil && !errors.As(err, &s.Error) {
			s.Error = sandbox.Errorf(sandbox.CodeUnavailable, "%w", err)
		}
		all = append(all, s)
	}
	for _, name := range m.cfg.Preferred {
		if i := statusOf(all, name); i >= 0 && all[i].Error == nil {
			all[i].Default = true
			break
		}
	}
	for _, name := range m.cfg.Planned {
		all = append(all, RuntimeStatus{Name: name, Error: sandbox.Errorf(sandbox.CodeUnsupported, "not built yet")})
	}
	return all
}

func statusOf(all []RuntimeStatus, name string) int {
	for i, s := range all {
		if s.Name == name {
			return i
		}
	}
	return -1
}
