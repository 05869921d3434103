// Package proc serves the process service: commands, their input and output,
// terminals and signals.
package proc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/reaper"
	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/proto/process"
)

// What is kept of commands that ended, so that a Connect that comes a moment
// after the end still gets it, and the output that nobody took.
const (
	keepEnded      = 30 * time.Second
	keepEndedCount = 64
	keepEndedBytes = 4 << 20 // of output, together
)

// Manager holds the commands.
type Manager struct {
	reaper  *reaper.Reaper
	session *session.State
	started atomic.Int64
	life    context.Context
	die     context.CancelFunc

	mu     sync.Mutex
	closed bool
	live   []*command // in order of start
	ended  []*remains // oldest first
	wg     sync.WaitGroup
}

// remains is what is kept of a command.
type remains struct {
	pid   uint32
	tag   *string
	hub   *hub
	timer *time.Timer
}

// NewManager makes a manager without commands.
func NewManager(r *reaper.Reaper, s *session.State) *Manager {
	life, die := context.WithCancel(context.Background())
	return &Manager{reaper: r, session: s, life: life, die: die}
}

// Started is how many commands were started so far.
func (m *Manager) Started() int64 { return m.started.Load() }

// Running is how many commands run now.
func (m *Manager) Running() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.live)
}

// start checks and starts a command as u, with a reader attached from its
// first byte on. A deadline that is not zero ends it.
func (m *Manager) start(u users.User, req *process.StartRequest, deadline time.Time) (*command, *reader, error) {
	sp, err := check(m.session, u, req)
	if err != nil {
		return nil, nil, err
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, nil, connect.NewError(connect.CodeUnavailable, errors.New("the sandbox is shutting down"))
	}
	m.wg.Add(1) // Close waits for it
	m.mu.Unlock()

	h := newHub()
	rd := h.attach(0)
	c, err := start(m.life, m.reaper, sp, h)
	if err != nil {
		m.wg.Done()
		return nil, nil, err
	}
	c.config, c.tag = req.GetProcess(), req.Tag
	m.started.Add(1)
	m.mu.Lock()
	m.live = append(m.live, c)
	closed := m.closed
	m.mu.Unlock()
	if closed { // Close did not see it
		c.child.Signal(syscall.SIGKILL)
	}
	var timeout *time.Timer
	if !deadline.IsZero() {
		timeout = time.AfterFunc(time.Until(deadline), func() { c.child.Signal(syscall.SIGKILL) })
	}
	go func() {
		defer m.wg.Done()
		<-c.child.Done()
		if timeout != nil {
			timeout.Stop()
		}
		<-c.ended
		m.retire(c)
	}()
	return c, rd, nil
}

// retire moves a command to the ended ones.
func (m *Manager) retire(c *command) {
	e := &remains{pid: c.pid, tag: c.tag, hub: c.hub}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.live {
		if m.live[i] == c {
			m.live = append(m.live[:i:i], m.live[i+1:]...)
			break
		}
	}
	if m.closed {
		return
	}
	e.timer = time.AfterFunc(keepEnded, func() { m.forget(e) })
	m.ended = append(m.ended, e)
	bytes := 0
	for i := len(m.ended) - 1; i >= 0; i-- {
		bytes += m.ended[i].hub.kept()
		if len(m.ended)-i > keepEndedCount || bytes > keepEndedBytes {
			for _, old := range m.ended[:i+1] {
				old.timer.Stop()
			}
			m.ended = append([]*remains(nil), m.ended[i+1:]...)
			break
		}
	}
}

func (m *Manager) forget(e *remains) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.ended {
		if m.ended[i] == e {
			m.ended = append(m.ended[:i:i], m.ended[i+1:]...)
			return
		}
	}
}

func noProcess(sel *process.ProcessSelector) error {
	switch s := sel.GetSelector().(type) {
	case *process.ProcessSelector_Pid:
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", s.Pid))
	case *process.ProcessSelector_Tag:
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag '%.64s' not found", s.Tag))
	}
	return invalid("the request selects no process: give a pid or a tag")
}

func selects(sel *process.ProcessSelector, pid uint32, tag *string) bool {
	switch s := sel.GetSelector().(type) {
	case *process.ProcessSelector_Pid:
		return pid == s.Pid
	case *process.ProcessSelector_Tag:
		return tag != nil && *tag == s.Tag
	}
	return false
}

// find gives a running command; of several with one tag, the newest.
func (m *Manager) find(sel *process.ProcessSelector) (*command, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(m.live) - 1; i >= 0; i-- {
		if c := m.live[i]; selects(sel, c.pid, c.tag) {
			return c, nil
		}
	}
	return nil, noProcess(sel)
}

// attach gives a reader of a command that runs, or that ended a moment ago, with
// up to scroll bytes of what its terminal wrote before.
func (m *Manager) attach(sel *process.ProcessSelector, scroll int) (uint32, *reader, error) {
	c, err := m.find(sel)
	if err == nil {
		return c.pid, c.hub.attach(scroll), nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := len(m.ended) - 1; i >= 0; i-- {
		if e := m.ended[i]; selects(sel, e.pid, e.tag) {
			return e.pid, e.hub.attach(scroll), nil
		}
	}
	return 0, nil, err
}

// list gives the commands that run.
func (m *Manager) list() []*process.ProcessInfo {
	m.mu.Lock()
	defer m.mu.Unlock()
	infos := make([]*process.ProcessInfo, 0, len(m.live))
	for _, c := range m.live {
		infos = append(infos, &process.ProcessInfo{Config: c.config, Pid: c.pid, Tag: c.tag})
	}
	return infos
}

// Close ends all commands: SIGTERM to each process group, SIGKILL to those
// that are there when ctx is done. It returns when all have ended.
func (m *Manager) Close(ctx context.Context) {
	defer m.die()
	m.mu.Lock()
	m.closed = true
	for _, e := range m.ended {
		e.timer.Stop()
	}
	m.ended = nil
	m.mu.Unlock()
	m.signal(syscall.SIGTERM)
	m.signal(syscall.SIGCONT) // a stopped one does not see SIGTERM
	gone := make(chan struct{})
	go func() {
		m.wg.Wait()
		close(gone)
	}()
	select {
	case <-gone:
	case <-ctx.Done():
		m.signal(syscall.SIGKILL)
		<-gone
	}
}

func (m *Manager) signal(sig syscall.Signal) {
	m.mu.Lock()
	live := append([]*command(nil), m.live...)
	m.mu.Unlock()
	for _, c := range live {
		c.child.Signal(sig)
	}
}
