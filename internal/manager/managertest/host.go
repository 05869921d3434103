package managertest

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

var (
	_ manager.Network   = (*Network)(nil)
	_ manager.Templates = (*Templates)(nil)
	_ manager.Clock     = (*Clock)(nil)
	_ manager.HostFacts = (*Host)(nil)
)

// Network is a manager.Network of numbered slots.
type Network struct {
	Total     int
	OnRelease func(sandbox.Link) error
	OnAdopt   func(sandbox.ID) error

	mu       sync.Mutex
	slots    map[int]sandbox.ID
	policies map[int]sandbox.NetworkPolicy
}

// NewNetwork makes one of total slots.
func NewNetwork(total int) *Network {
	return &Network{Total: total, slots: map[int]sandbox.ID{}, policies: map[int]sandbox.NetworkPolicy{}}
}

// Acquire implements manager.Network.
func (n *Network) Acquire(_ context.Context, id sandbox.ID, p sandbox.NetworkPolicy) (sandbox.Link, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for slot := range n.Total {
		if _, taken := n.slots[slot]; !taken {
			n.slots[slot], n.policies[slot] = id, p
			return linkOf(slot), nil
		}
	}
	return sandbox.Link{}, sandbox.Errorf(sandbox.CodeNoCapacity, "no slot")
}

func linkOf(slot int) sandbox.Link {
	return sandbox.Link{
		Slot: slot, NetNS: fmt.Sprintf("/netns/%d", slot), Device: "eth0",
		Address: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, byte(slot / 64), byte(slot%64*4 + 2)}), 30),
	}
}

// SetPolicy implements manager.Network.
func (n *Network) SetPolicy(_ context.Context, l sandbox.Link, p sandbox.NetworkPolicy) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.policies[l.Slot] = p
	return nil
}

// Adopt implements manager.Network.
func (n *Network) Adopt(_ context.Context, l sandbox.Link, id sandbox.ID, p sandbox.NetworkPolicy) error {
	if n.OnAdopt != nil {
		if err := n.OnAdopt(id); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slots[l.Slot], n.policies[l.Slot] = id, p
	return nil
}

// Release implements manager.Network.
func (n *Network) Release(_ context.Context, l sandbox.Link) error {
	if n.OnRelease != nil {
		if err := n.OnRelease(l); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.slots, l.Slot)
	delete(n.policies, l.Slot)
	return nil
}

// Sweep implements manager.Network.
func (n *Network) Sweep(_ context.Context, inUse map[int]sandbox.ID) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for slot := range n.slots {
		if _, ok := inUse[slot]; !ok {
			delete(n.slots, slot)
		}
	}
	return nil
}

// Capacity implements manager.Network.
func (n *Network) Capacity() (used, total int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.slots), n.Total
}

// Holders gives the sandbox of each slot in use.
func (n *Network) Holders() map[int]sandbox.ID {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := map[int]sandbox.ID{}
	for slot, id := range n.slots {
		all[slot] = id
	}
	return all
}

// Policy gives a slot's policy.
func (n *Network) Policy(slot int) sandbox.NetworkPolicy {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.policies[slot]
}

// Templates is a manager.Templates that holds what it is given.
type Templates struct {
	mu    sync.Mutex
	all   map[string]template.Template // by name
	holds map[string]string
	// OnSteps is what a build of steps does before its template is there.
	OnSteps func(context.Context, template.StepsOptions, template.Progress) error
	// OnBuild runs a Dockerfile build.
	OnBuild func(ctx context.Context, r template.StepRunner) (template.Template, error)
}

// NewTemplates makes a library with the template "base".
func NewTemplates() *Templates {
	t := &Templates{all: map[string]template.Template{}, holds: map[string]string{}}
	t.Put(template.Template{Name: "base", ID: "tplbase", Tenant: template.SharedTenant, Shared: true, Config: template.Config{HasShell: true, Env: map[string]string{"LANG": "C"}}})
	return t
}

// Put adds a template.
func (t *Templates) Put(tpl template.Template) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all[tpl.Name] = tpl
}

// Holders gives what each holder holds.
func (t *Templates) Holders() map[string]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]string{}
	for h, id := range t.holds {
		all[h] = id
	}
	return all
}

// Get implements manager.Templates.
func (t *Templates) Get(_ context.Context, tenant, name string) (template.Template, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, tpl := range t.all {
		if (tpl.Name == name || tpl.ID == name) && (tpl.Tenant == tenant || tpl.Shared) {
			return tpl, nil
		}
	}
	return template.Template{}, sandbox.Errorf(sandbox.CodeNotFound, "no template %q", name)
}

// Resolve implements manager.Templates.
func (t *Templates) Resolve(ctx context.Context, tenant, name string) (template.Template, []string, error) {
	tpl, err := t.Get(ctx, tenant, name)
	return tpl, []string{"/layers/" + tpl.ID}, err
}

// Hold implements manager.Templates.
func (t *Templates) Hold(_ context.Context, id, holder string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.holds[holder] = id
	return nil
}

// Drop implements manager.Templates.
func (t *Templates) Drop(_ context.Context, holder string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.holds, holder)
	return nil
}

// List implements manager.Templates.
func (t *Templates) List(context.Context, string) ([]template.Template, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []template.Template
	for _, tpl := range t.all {
		all = append(all, tpl)
	}
	return all, nil
}

// Remove implements manager.Templates.
func (t *Templates) Remove(ctx context.Context, tenant, name string) (template.Template, error) {
	tpl, err := t.Get(ctx, tenant, name)
	if err != nil {
		return tpl, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.all, tpl.Name)
	return tpl, nil
}

// Collect implements manager.Templates.
func (t *Templates) Collect(context.Context) error { return nil }

// BuildDebian implements manager.Builder.
func (t *Templates) BuildDebian(_ context.Context, o template.DebianOptions, _ template.Progress) (template.Template, error) {
	tpl := template.Template{Name: o.Name, ID: "tpl" + o.Name, Tenant: o.Tenant}
	t.Put(tpl)
	return tpl, nil
}

// Import implements manager.Builder.
func (t *Templates) Import(_ context.Context, o template.ImportOptions, _ template.Progress) (template.Template, error) {
	return template.Template{Name: o.Name, Tenant: o.Tenant}, nil
}

// BuildDockerfile implements manager.Builder.
func (t *Templates) BuildDockerfile(ctx context.Context, o template.DockerfileOptions, r template.StepRunner, _ template.Progress) (template.Template, error) {
	if t.OnBuild == nil {
		return template.Template{Name: o.Name, Tenant: o.Tenant}, nil
	}
	return t.OnBuild(ctx, r)
}

// BuildSteps implements manager.Builder.
func (t *Templates) BuildSteps(ctx context.Context, o template.StepsOptions, r template.StepRunner, p template.Progress) (template.Template, error) {
	tpl := template.Template{Name: o.Name, ID: "tpl" + o.Name, Tenant: o.Tenant, BuildID: o.BuildID, CreatedAt: time.Now()}
	if t.OnSteps != nil {
		if err := t.OnSteps(ctx, o, p); err != nil {
			return tpl, err
		}
	}
	if len(o.Tags) == 0 {
		t.Put(tpl)
	}
	for _, tag := range o.Tags {
		tpl.Name = template.Tagged(o.Name, tag)
		tpl.ID = "tpl" + tpl.Name
		t.Put(tpl)
	}
	return tpl, nil
}

// Tag implements manager.Templates.
func (t *Templates) Tag(ctx context.Context, tenant, nameOrID, name, tag string) (template.Template, error) {
	tpl, err := t.Get(ctx, tenant, nameOrID)
	if err != nil {
		return tpl, err
	}
	tpl.Name = template.Tagged(name, tag)
	tpl.ID = "tpl" + tpl.Name
	t.Put(tpl)
	return tpl, nil
}

// Clock is a manager.Clock that a test moves.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*timer]bool
}

type timer struct {
	at time.Time
	ch chan time.Time
}

// NewClock makes one that stands at now.
func NewClock(now time.Time) *Clock { return &Clock{now: now, timers: map[*timer]bool{}} }

// Now implements manager.Clock.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// After implements manager.Clock.
func (c *Clock) After(d time.Duration) (<-chan time.Time, func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &timer{at: c.now.Add(d), ch: make(chan time.Time, 1)}
	if d <= 0 {
		t.ch <- c.now
	} else {
		c.timers[t] = true
	}
	return t.ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.timers, t)
	}
}

// Advance moves the clock on by d and fires what is due.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	for t := range c.timers {
		if !t.at.After(c.now) {
			t.ch <- c.now
			delete(c.timers, t)
		}
	}
}

// Host is manager.HostFacts that a test sets.
type Host struct {
	mu   sync.Mutex
	Mem  host.Memory
	Dsk  host.Disk
	Proc manager.Processes
	Boot string
}

// NewHost is a machine of 64 GiB.
func NewHost() *Host {
	return &Host{
		Mem: host.Memory{Total: 64 << 30, Available: 60 << 30}, Dsk: host.Disk{Total: 1 << 40, Free: 1 << 39},
		Proc: manager.Processes{Now: 500, Max: 1 << 20}, Boot: "boot1",
	}
}

// Set changes facts.
func (h *Host) Set(f func(*Host)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

// Memory implements manager.HostFacts.
func (h *Host) Memory() (host.Memory, error) { h.mu.Lock(); defer h.mu.Unlock(); return h.Mem, nil }

// Disk implements manager.HostFacts.
func (h *Host) Disk() (host.Disk, error) { h.mu.Lock(); defer h.mu.Unlock(); return h.Dsk, nil }

// Processes implements manager.HostFacts.
func (h *Host) Processes() (manager.Processes, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.Proc, nil
}

// BootID implements manager.HostFacts.
func (h *Host) BootID() (string, error) { h.mu.Lock(); defer h.mu.Unlock(); return h.Boot, nil }
