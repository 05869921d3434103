package manager

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

var (
	pointBuildBegun = fault.Register("manager.build.begun")
	pointBuildMade  = fault.Register("manager.build.made")
)

// Bounds of builds in the background.
const (
	buildsAtOnce  = 2
	buildsWaiting = 20             // under way or queued, of one tenant
	buildTime     = 2 * time.Hour  // of one build
	buildKeep     = 24 * time.Hour // how long one waits for its steps
	maxBuildTags  = 20
)

// builds is what the manager has of template builds in memory.
type builds struct {
	key    [32]byte // of upload links; a new one each start
	atOnce *semaphore.Weighted
}

func (b *builds) init() {
	rand.Read(b.key[:]) // never fails: crypto/rand aborts the program instead
	b.atOnce = semaphore.NewWeighted(buildsAtOnce)
}

// TemplateRequest asks for a template that is described later, by StartBuild.
type TemplateRequest struct {
	Name      string // may end in ":tag"
	Tags      []string
	Resources sandbox.Resources // zero fields: none of its own
}

// A TemplateBuild is one build of a template.
type TemplateBuild struct {
	store.Build
	Name string // of the template
}

// RequestBuild records a build that waits for its steps, and the template
// where its name is new.
func (m *Manager) RequestBuild(ctx context.Context, tenant string, r TemplateRequest) (TemplateBuild, error) {
	var b TemplateBuild
	if err := m.ready(); err != nil {
		return b, err
	}
	name, tag, tagged := strings.Cut(r.Name, ":")
	tags := slices.Clone(r.Tags)
	if tagged {
		tags = append([]string{tag}, tags...)
	}
	if len(tags) == 0 {
		tags = []string{template.DefaultTag}
	}
	slices.Sort(tags)
	tags = slices.Compact(tags)
	if err := template.CheckName(name); err != nil {
		return b, err
	}
	if len(tags) > maxBuildTags {
		return b, sandbox.Errorf(sandbox.CodeTooLarge, "%d tags: the most is %d", len(tags), maxBuildTags).With("limit", "tags")
	}
	for _, t := range tags {
		if err := template.CheckTag(t); err != nil {
			return b, err
		}
	}
	if r.Resources != (sandbox.Resources{}) {
		if err := r.Resources.Or(sandbox.DefaultResources()).Validate(0); err != nil {
			return b, err
		}
	}
	if n, err := m.countBuilds(ctx, tenant); err != nil {
		return b, err
	} else if n >= buildsWaiting {
		return b, sandbox.Errorf(sandbox.CodeNoCapacity, "%d builds of this tenant are under way: let some finish, the most is %d", n, buildsWaiting)
	}
	now := m.clock.Now().UTC()
	named, err := m.store.NameTemplate(ctx, store.NamedTemplate{ID: template.NewID(), Tenant: tenant, Name: name, CreatedAt: now})
	if err != nil {
		return b, err
	}
	b = TemplateBuild{Name: name, Build: store.Build{
		ID: newBuildID(), Tenant: tenant, Template: named.ID, State: store.BuildWaiting, Tags: tags, Resources: r.Resources, CreatedAt: now,
	}}
	return b, m.store.PutBuild(ctx, b.Build)
}

// countBuilds counts a tenant's builds under way, and gives up those that nobody
// started.
func (m *Manager) countBuilds(ctx context.Context, tenant string) (int, error) {
	all, err := m.store.ListBuilds(ctx, "", store.BuildWaiting)
	if err != nil {
		return 0, err
	}
	running, err := m.store.ListBuilds(ctx, "", store.BuildBuilding)
	if err != nil {
		return 0, err
	}
	n := 0
	for _, b := range all {
		if m.clock.Now().Sub(b.CreatedAt) > buildKeep {
			b.State, b.Reason, b.FinishedAt = store.BuildError, "the build was never started", m.clock.Now().UTC()
			if err := m.store.MoveBuild(ctx, b, store.BuildWaiting); err != nil && sandbox.CodeOf(err) != sandbox.CodeConflict {
				return 0, err
			}
		}
	}
	for _, b := range running {
		if b.Tenant == tenant {
			n++
		}
	}
	return n, nil
}

func newBuildID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80 // a random UUID, RFC 9562
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// TemplateBuild gives one of a template's builds.
func (m *Manager) TemplateBuild(ctx context.Context, tenant, templateID, buildID string) (TemplateBuild, error) {
	named, err := m.store.FindNamed(ctx, tenant, templateID)
	if err != nil {
		return TemplateBuild{}, err
	}
	b, err := m.store.GetBuild(ctx, buildID)
	if err == nil && (b.Template != named.ID || b.Tenant != tenant) {
		err = sandbox.Errorf(sandbox.CodeNotFound, "there is no build %q of this template", buildID)
	}
	if err != nil {
		return TemplateBuild{}, err
	}
	return TemplateBuild{Build: b, Name: named.Name}, nil
}

// StartBuild gives a build that waits its steps; it goes on in the background.
// o's target, files and base alias are the manager's.
func (m *Manager) StartBuild(ctx context.Context, tenant, templateID, buildID string, o template.StepsOptions) error {
	if err := m.ready(); err != nil {
		return err
	}
	b, err := m.TemplateBuild(ctx, tenant, templateID, buildID)
	if err != nil {
		return err
	}
	if to, ok := m.imageAlias(o.FromImage); ok {
		o.FromImage, o.FromTemplate = "", to
	}
	if o.FromTemplate != "" {
		o.FromTemplate = m.templateRef(ctx, tenant, o.FromTemplate)
	}
	o.Tenant, o.Name, o.Tags, o.BuildID, o.Resources = tenant, b.Name, b.Tags, b.ID, b.Resources
	o.StepResources = sandbox.Resources{CPUs: b.Resources.CPUs, MemoryMiB: b.Resources.MemoryMiB}
	o.Files = func(hash string) (io.ReadCloser, error) { return m.openUpload(tenant, b.Template, hash) }
	log, err := newBuildLog(m.buildLogPath(b.ID))
	if err != nil {
		return diskError("make the build's log", err)
	}
	b.State = store.BuildBuilding
	if err := m.store.MoveBuild(ctx, b.Build, store.BuildWaiting); err != nil {
		log.close()
		return err
	}
	pointBuildBegun.Hit()
	m.tasks.run(func() { m.background(b, o, log) })
	return nil
}

// imageAlias gives the template that stands for an image.
func (m *Manager) imageAlias(image string) (string, bool) {
	if image == "" {
		return "", false
	}
	for _, try := range []string{image, strings.TrimSuffix(image, ":latest")} {
		if t, ok := m.cfg.ImageAliases[try]; ok {
			return t, true
		}
	}
	return "", false
}

func (m *Manager) background(b TemplateBuild, o template.StepsOptions, log *buildLog) {
	ctx, cancel := context.WithTimeout(m.watching, buildTime)
	defer cancel()
	defer log.close()
	err := m.builds.atOnce.Acquire(ctx, 1)
	if err == nil {
		_, err = m.cfg.Templates.BuildSteps(ctx, o, (*steps)(m), log.progress)
		m.builds.atOnce.Release(1)
	}
	pointBuildMade.Hit()
	m.pools.Look()
	b.State, b.FinishedAt = store.BuildReady, m.clock.Now().UTC()
	if err != nil {
		b.State = store.BuildError
		b.Reason, b.Step = buildReason(err)
		switch {
		case m.watching.Err() != nil:
			b.Reason, b.Step = errStopping.Error(), ""
		case errors.Is(ctx.Err(), context.DeadlineExceeded):
			b.Reason = fmt.Sprintf("the build took longer than %v", buildTime)
		}
		log.add("error", b.Reason, b.Step)
	} else {
		log.add("info", "the template is ready", template.FailedFinalize)
	}
	// Also when the daemon stops: the state is to be told.
	if err := m.store.MoveBuild(context.WithoutCancel(ctx), b.Build, store.BuildBuilding); err != nil &&
		sandbox.CodeOf(err) != sandbox.CodeConflict { // removed meanwhile
		m.log.Error("record the end of a build; the next start tells that it failed", "build", b.ID, "error", err)
	}
}

// buildReason is what a build tells of its failure: the end of a command's
// output says more than its exit code.
func buildReason(err error) (reason, step string) {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return err.Error(), ""
	}
	reason, step = e.Error(), e.Details["step"]
	if out := strings.TrimSpace(e.Details["output"]); out != "" {
		if len(out) > 1000 {
			out = strings.ToValidUTF8(out[len(out)-1000:], "")
		}
		reason += ": " + out
	}
	return reason, step
}

// startBuilds ends the builds that an earlier daemon left under way: one whose
// result is whole is ready, any other failed.
func (m *Manager) startBuilds(ctx context.Context) error {
	for _, dir := range []string{m.buildsDir(), m.uploadsDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return diskError("make "+dir, err)
		}
	}
	left, err := m.store.ListBuilds(ctx, "", store.BuildBuilding)
	if err != nil {
		return err
	}
	for _, b := range left {
		whole, err := m.buildWhole(ctx, b)
		if err != nil {
			return err
		}
		b.State, b.FinishedAt = store.BuildReady, m.clock.Now().UTC()
		if !whole {
			b.State, b.Reason = store.BuildError, "the daemon ended during the build: build again; finished steps are cached"
		}
		if err := m.store.MoveBuild(ctx, b, store.BuildBuilding); err != nil {
			return err
		}
	}
	return m.sweepUploads(ctx)
}

// buildWhole tells whether every tag of the build is in the library, and
// removes those of a build that is not.
func (m *Manager) buildWhole(ctx context.Context, b store.Build) (bool, error) {
	named, err := m.store.FindNamed(ctx, b.Tenant, b.Template)
	if err != nil {
		return false, err
	}
	var have []string
	for _, tag := range b.Tags {
		t, err := m.cfg.Templates.Get(ctx, b.Tenant, template.Tagged(named.Name, tag))
		if err == nil && t.BuildID == b.ID && t.Tenant == b.Tenant {
			have = append(have, t.ID)
		}
	}
	if len(have) == len(b.Tags) {
		return true, nil
	}
	for _, id := range have {
		if _, err := m.cfg.Templates.Remove(ctx, b.Tenant, id); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return false, err
		}
	}
	return false, nil
}

func (m *Manager) buildsDir() string             { return filepath.Join(m.cfg.StateDir, "builds") }
func (m *Manager) buildLogPath(id string) string { return filepath.Join(m.buildsDir(), id+".jsonl") }
