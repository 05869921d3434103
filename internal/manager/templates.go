package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

var (
	pointStepStarted  = fault.Register("manager.step.started")
	pointStepRan      = fault.Register("manager.step.ran")
	pointStepCaptured = fault.Register("manager.step.captured")
)

// Templates lists the templates that a tenant can use.
func (m *Manager) Templates(ctx context.Context, tenant string) ([]template.Template, error) {
	return m.cfg.Templates.List(ctx, tenant)
}

// Template gives one by name or id. CodeNotFound: the tenant has no such one.
func (m *Manager) Template(ctx context.Context, tenant, name string) (template.Template, error) {
	return m.cfg.Templates.Get(ctx, tenant, name)
}

// RemoveTemplate removes a tenant's template. CodeConflict: a live sandbox was
// made from it.
func (m *Manager) RemoveTemplate(ctx context.Context, tenant, name string) error {
	t, err := m.cfg.Templates.Get(ctx, tenant, name)
	if err != nil {
		return err
	}
	if t.Tenant == tenant {
		if users := m.usersOf(t.ID); len(users) > 0 {
			return sandbox.Errorf(sandbox.CodeConflict, "template %q is in use by %d sandboxes (%s): end them first", t.Name, len(users), users[0]).
				With("sandbox", string(users[0]))
		}
	}
	m.spares.drop(func(k *spareKind) bool { return k.of.TemplateID == t.ID })
	// A create that comes in between is no harm: the library keeps the layers
	// of what is held.
	_, err = m.cfg.Templates.Remove(ctx, tenant, name)
	m.pools.Look()
	return err
}

// usersOf gives the live sandboxes of a template. Pools' members go with it.
func (m *Manager) usersOf(templateID string) []sandbox.ID {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []sandbox.ID
	for id, l := range m.live {
		if rec := l.record(); rec.TemplateID == templateID && rec.Pool == "" {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// BuildTemplate makes a template of the tenant's, whatever tenant r names, and
// tells progress on the way. When ctx ends, nothing of it is left.
func (m *Manager) BuildTemplate(ctx context.Context, tenant string, r BuildRequest, progress template.Progress) (template.Template, error) {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return template.Template{}, err
	}
	// A build can take long: it does not hold up the daemon's stop.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(m.watching, func() { cancel(errStopping) })()
	t, err := m.runBuild(ctx, tenant, r, progress)
	m.pools.Look()
	if err != nil && ctx.Err() != nil {
		return t, ctxError(ctx, "build the template")
	}
	return t, err
}

func (m *Manager) runBuild(ctx context.Context, tenant string, r BuildRequest, progress template.Progress) (template.Template, error) {
	n := 0
	for _, set := range []bool{r.Debian != nil, r.Import != nil, r.Dockerfile != nil} {
		if set {
			n++
		}
	}
	switch {
	case n != 1:
		return template.Template{}, invalid("a template build has %d sources: give exactly one of debian, import and dockerfile", n)
	case r.Debian != nil:
		o := *r.Debian
		o.Tenant = tenant
		return m.cfg.Templates.BuildDebian(ctx, o, progress)
	case r.Import != nil:
		o := *r.Import
		o.Tenant = tenant
		return m.cfg.Templates.Import(ctx, o, progress)
	default:
		o := *r.Dockerfile
		o.Tenant = tenant
		return m.cfg.Templates.BuildDockerfile(ctx, o, (*steps)(m), progress)
	}
}

// steps runs a Dockerfile's steps, each in a sandbox of its own that no tenant
// sees listed.
type steps Manager

var _ template.StepRunner = (*steps)(nil)

// RunStep implements template.StepRunner.
func (s *steps) RunStep(ctx context.Context, step template.Step) (result template.StepResult, err error) {
	m := (*Manager)(s)
	rt, err := m.chooseRuntime(ctx, m.cfg.BuildRuntime)
	if err != nil {
		return result, describe(err, "run a build step")
	}
	p, err := m.plan(ctx, step.Tenant, CreateRequest{
		Template: "build", Runtime: rt.Name(), InlineLayers: step.Layers, Resources: step.Resources,
		Network: sandbox.NetworkPolicy{Mode: step.Network}, Hostname: "build",
	})
	if err != nil {
		return result, err
	}
	l, err := m.make(ctx, p)
	if err != nil {
		return result, err
	}
	defer func() {
		// Also when ctx ended: nothing of it stays.
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), initTimeout)
		defer cancel()
		err = errors.Join(err, m.endAndWait(end, l, sandbox.ReasonKilledByUser, "the build step is over"))
	}()
	pointStepStarted.Hit()
	l.mu.Lock()
	agent, inst := l.agent, l.inst
	l.mu.Unlock()
	if agent == nil {
		return result, sandbox.Errorf(sandbox.CodeUnavailable, "the build step's sandbox ended before its command ran")
	}
	write := func(b []byte) error {
		_, err := step.Output.Write(b)
		return err
	}
	user := step.User
	if user == "" {
		user = "root"
	}
	r, err := agent.Exec(ctx, agentclient.Command{
		Path: step.Argv[0], Args: step.Argv[1:], Env: step.Env, Cwd: step.Workdir, User: user,
	}, agentclient.Output{Stdout: write, Stderr: write})
	if err != nil {
		return result, m.explainStep(l, err)
	}
	pointStepRan.Hit()
	if result.ExitCode, err = exitCode(r); err != nil || result.ExitCode != 0 {
		return result, err
	}
	capturer, ok := inst.(sandbox.DiskCapturer)
	if !ok {
		return result, sandbox.Errorf(sandbox.CodeUnsupported, "runtime %q cannot capture disks: builds need one that can", rt.Name())
	}
	if err := capturer.CaptureDisk(ctx, step.LayerDir); err != nil {
		return result, orCtx(ctx, "capture the build step's changes", err)
	}
	pointStepCaptured.Hit()
	return result, nil
}

// explainStep tells why a step's command broke off: its sandbox's end, if that
// was it, says more than a lost connection.
func (m *Manager) explainStep(l *live, err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ending != nil {
		return sandbox.Errorf(sandbox.CodeBuildFailed, "the build step's sandbox ended: %s (%s)", l.ending.reason, l.ending.detail)
	}
	return err
}

// exitCode is the code as a shell tells it: 128 and the number of the signal
// that ended the command.
func exitCode(r agentclient.Result) (int, error) {
	if r.Exited {
		return r.ExitCode, nil
	}
	if n := signalOf(r.Status); n > 0 {
		return 128 + n, nil
	}
	return 0, fmt.Errorf("the command ended in an unknown way: %q", r.Status)
}

// signalOf gives the number of the signal in a status like "signal: killed"
// or "signal: killed (core dumped)"; 0 where there is none.
func signalOf(status string) int {
	name, ok := strings.CutPrefix(strings.TrimSuffix(status, " (core dumped)"), "signal: ")
	if !ok {
		return 0
	}
	for n := 1; n < 65; n++ {
		if syscall.Signal(n).String() == name {
			return n
		}
	}
	return 0
}
