package manager

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

var (
	pointBuildBegun  = fault.Register("manager.build.begun")
	pointBuildMade   = fault.Register("manager.build.made")
	pointUploadWhole = fault.Register("manager.upload.whole")
)

// Bounds of builds in the background and of what is uploaded for them.
const (
	buildsAtOnce   = 2
	buildsWaiting  = 20             // under way or queued, of one tenant
	buildTime      = 2 * time.Hour  // of one build
	buildKeep      = 24 * time.Hour // how long one waits for its steps
	maxBuildTags   = 20
	uploadLinkLife = time.Hour
	maxUpload      = 4 << 30  // bytes of one upload
	maxUploads     = 16 << 30 // bytes of one tenant's uploads; the oldest go first
	uploadKeep     = 7 * 24 * time.Hour
)

var (
	hashPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)
	idOfNamed   = regexp.MustCompile(`^tpl[0-9a-z]{17}$`)
)

// builds is what the manager has of template builds in memory.
type builds struct {
	key     [32]byte // of upload links; a new one each start
	atOnce  *semaphore.Weighted
	mu      sync.Mutex
	logs    map[string]*buildLog // of builds that run
	uploads map[string]string    // files being written: path → tenant
}

func (b *builds) init() {
	rand.Read(b.key[:]) // never fails: crypto/rand aborts the program instead
	b.atOnce = semaphore.NewWeighted(buildsAtOnce)
	b.logs = map[string]*buildLog{}
	b.uploads = map[string]string{}
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

// A TemplateTag is a name under which a build of a template is to be had.
type TemplateTag struct {
	Tag       string
	BuildID   string
	CreatedAt time.Time
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
	named, err := m.store.NameTemplate(ctx, store.NamedTemplate{ID: newTemplateID(), Tenant: tenant, Name: name, CreatedAt: now})
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

func newTemplateID() string {
	const digits = "0123456789abcdefghjkmnpqrstvwxyz"
	var b [17]byte
	rand.Read(b[:])
	for i := range b {
		b[i] = digits[b[i]&31]
	}
	return "tpl" + string(b[:])
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
	m.builds.mu.Lock()
	m.builds.logs[b.ID] = log
	m.builds.mu.Unlock()
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
	defer func() {
		m.builds.mu.Lock()
		delete(m.builds.logs, b.ID)
		m.builds.mu.Unlock()
		log.close()
	}()
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

// templateRef is the library's name for what a client calls a template: its
// name or the ID that it has through all builds, either with ":tag".
func (m *Manager) templateRef(ctx context.Context, tenant, ref string) string {
	head, tag := template.SplitTag(ref)
	if idOfNamed.MatchString(head) {
		if n, err := m.store.FindNamed(ctx, tenant, head); err == nil {
			head = n.Name
		}
	}
	return template.Tagged(head, tag)
}

// resolveTemplate is Templates.Resolve of what a client calls a template.
func (m *Manager) resolveTemplate(ctx context.Context, tenant, ref string) (template.Template, []string, error) {
	return m.cfg.Templates.Resolve(ctx, tenant, m.templateRef(ctx, tenant, ref))
}

// NamedTemplate gives the template that tenant means, which need not have a
// build that is ready. One that was not made by RequestBuild goes by its ID in
// the library.
func (m *Manager) NamedTemplate(ctx context.Context, tenant, nameOrID string) (store.NamedTemplate, error) {
	head, _ := template.SplitTag(nameOrID)
	n, err := m.store.FindNamed(ctx, tenant, head)
	if sandbox.CodeOf(err) != sandbox.CodeNotFound {
		return n, err
	}
	t, err := m.cfg.Templates.Get(ctx, tenant, head)
	return store.NamedTemplate{ID: t.ID, Tenant: t.Tenant, Name: t.Name, CreatedAt: t.CreatedAt}, err
}

// TemplateBuilds lists a template's builds, the newest first.
func (m *Manager) TemplateBuilds(ctx context.Context, tenant, nameOrID string) ([]store.Build, error) {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return nil, err
	}
	return m.store.ListBuilds(ctx, n.ID, "")
}

// TemplateTags lists a template's tags, by name.
func (m *Manager) TemplateTags(ctx context.Context, tenant, nameOrID string) ([]TemplateTag, error) {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return nil, err
	}
	all, err := m.cfg.Templates.List(ctx, n.Tenant)
	if err != nil {
		return nil, err
	}
	tags := []TemplateTag{}
	for _, t := range all {
		if name, tag := template.SplitTag(t.Name); name == n.Name && t.Tenant == n.Tenant && (t.Tenant == tenant || t.Shared) {
			tags = append(tags, TemplateTag{Tag: tag, BuildID: t.BuildID, CreatedAt: t.CreatedAt})
		}
	}
	return tags, nil
}

// TagTemplate gives the template that target means more tags.
func (m *Manager) TagTemplate(ctx context.Context, tenant, target string, tags []string) (template.Template, error) {
	ref := m.templateRef(ctx, tenant, target)
	t, err := m.cfg.Templates.Get(ctx, tenant, ref)
	if err != nil {
		return t, err
	}
	if len(tags) == 0 || len(tags) > maxBuildTags {
		return t, invalid("give 1 to %d tags", maxBuildTags)
	}
	for _, tag := range tags {
		if err := template.CheckTag(tag); err != nil {
			return t, err
		}
	}
	name, _ := template.SplitTag(t.Name)
	for _, tag := range tags {
		if _, err := m.cfg.Templates.Tag(ctx, tenant, t.ID, name, tag); err != nil {
			return t, err
		}
	}
	return t, nil
}

// UntagTemplate takes tags from a template. Sandboxes of it go on.
func (m *Manager) UntagTemplate(ctx context.Context, tenant, nameOrID string, tags []string) error {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return err
	}
	if len(tags) == 0 {
		return invalid("give at least one tag")
	}
	for _, tag := range tags {
		if err := template.CheckTag(tag); err != nil {
			return err
		}
		if _, err := m.cfg.Templates.Remove(ctx, tenant, template.Tagged(n.Name, tag)); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return err
		}
	}
	return nil
}

// RemoveNamed removes a template with its tags and builds. CodeConflict: a
// live sandbox uses it.
func (m *Manager) RemoveNamed(ctx context.Context, tenant, nameOrID string) error {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return err
	}
	if n.Tenant != tenant {
		return m.RemoveTemplate(ctx, tenant, n.Name) // which says why not
	}
	if b, err := m.store.ListBuilds(ctx, n.ID, store.BuildBuilding); err != nil {
		return err
	} else if len(b) > 0 {
		return sandbox.Errorf(sandbox.CodeConflict, "the template %q is being built: wait for the build %s", n.Name, b[0].ID)
	}
	tags, err := m.TemplateTags(ctx, tenant, n.Name)
	if err != nil {
		return err
	}
	for _, tag := range tags {
		if err := m.RemoveTemplate(ctx, tenant, template.Tagged(n.Name, tag.Tag)); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return err
		}
	}
	builds, err := m.store.ListBuilds(ctx, n.ID, "")
	if err != nil {
		return err
	}
	if err := m.store.ForgetNamed(ctx, tenant, n.ID); err != nil {
		return err
	}
	for _, b := range builds {
		if err := os.Remove(m.buildLogPath(b.ID)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return diskError("remove a build's log", err)
		}
	}
	return nil
}

func (m *Manager) buildsDir() string             { return filepath.Join(m.cfg.StateDir, "builds") }
func (m *Manager) uploadsDir() string            { return filepath.Join(m.cfg.StateDir, "uploads") }
func (m *Manager) buildLogPath(id string) string { return filepath.Join(m.buildsDir(), id+".jsonl") }

// uploadPath is where an upload is, one directory for each tenant. Tenants'
// names are file names; templates' IDs and hashes have only letters and digits.
func (m *Manager) uploadPath(tenant, templateID, hash string) string {
	return filepath.Join(m.uploadsDir(), tenant, templateID+"-"+hash)
}

// Upload tells whether the files of a hash are there, and gives a token for
// PutUpload.
func (m *Manager) Upload(ctx context.Context, tenant, templateID, hash string) (present bool, token string, err error) {
	if !hashPattern.MatchString(hash) {
		return false, "", invalid("the files' hash is not 64 hexadecimal digits")
	}
	n, err := m.store.FindNamed(ctx, tenant, templateID)
	if err != nil {
		return false, "", err
	}
	if _, err := os.Stat(m.uploadPath(tenant, n.ID, hash)); err == nil {
		present = true
	}
	claim := strings.Join([]string{tenant, n.ID, hash, strconv.FormatInt(m.clock.Now().Add(uploadLinkLife).Unix(), 10)}, "/")
	return present, base64.RawURLEncoding.EncodeToString(append(m.builds.sign(claim), claim...)), nil
}

func (b *builds) sign(claim string) []byte {
	h := hmac.New(sha256.New, b.key[:])
	h.Write([]byte(claim))
	return h.Sum(nil)
}

// PutUpload stores the archive of a token of Upload: size bytes, all or none.
// What is in it is looked at when a build unpacks it.
func (m *Manager) PutUpload(ctx context.Context, token string, body io.Reader, size int64) error {
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(raw) < sha256.Size || !hmac.Equal(raw[:sha256.Size], m.builds.sign(string(raw[sha256.Size:]))) {
		return sandbox.Errorf(sandbox.CodeForbidden, "the upload link is not valid: ask for a new one")
	}
	part := strings.Split(string(raw[sha256.Size:]), "/")
	tenant, templateID, hash := part[0], part[1], part[2]
	if until, err := strconv.ParseInt(part[3], 10, 64); err != nil || m.clock.Now().Unix() > until {
		return sandbox.Errorf(sandbox.CodeForbidden, "the upload link has expired: ask for a new one")
	}
	switch {
	case size < 0:
		return invalid("an upload needs its exact Content-Length")
	case size > maxUpload:
		return sandbox.Errorf(sandbox.CodeTooLarge, "the upload has %d bytes: the most is %d", size, int64(maxUpload)).With("limit", "upload_bytes")
	}
	if disk, err := m.cfg.Host.Disk(); err != nil {
		return diskError("look for room for the upload", err)
	} else if disk.Free-m.cfg.Budget.DiskReserve < size {
		return sandbox.Errorf(sandbox.CodeDiskFull, "the host has no room for an upload of %d bytes: remove sandboxes and templates", size)
	}
	path := m.uploadPath(tenant, templateID, hash)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return diskError("store the upload", err)
	}
	f, err := os.CreateTemp(m.uploadsDir(), ".new-")
	if err != nil {
		return diskError("store the upload", err)
	}
	defer os.Remove(f.Name()) // of no effect once it is renamed
	defer f.Close()
	n, err := io.Copy(f, io.LimitReader(ctxReader{ctx, body}, size+1))
	switch {
	case err != nil:
		return diskError("store the upload", err)
	case n != size:
		return invalid("the upload has %d bytes of the %d that its Content-Length says", n, size)
	}
	if err := f.Sync(); err != nil {
		return diskError("store the upload", err)
	}
	pointUploadWhole.Hit()
	if err := os.Rename(f.Name(), path); err != nil {
		return diskError("store the upload", err)
	}
	return m.trimUploads(tenant, path)
}

// ctxReader ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

func (m *Manager) openUpload(tenant, templateID, hash string) (io.ReadCloser, error) {
	if !hashPattern.MatchString(hash) {
		return nil, invalid("the files' hash is not 64 hexadecimal digits")
	}
	path := m.uploadPath(tenant, templateID, hash)
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, invalid("the files of the step were not uploaded, or are gone: upload them again")
	}
	if err != nil {
		return nil, diskError("open the upload", err)
	}
	now := m.clock.Now()
	os.Chtimes(path, now, now) // what is used stays longest; no harm where it fails
	return f, nil
}

// trimUploads removes a tenant's oldest uploads, but keep, where they are too
// many or too old.
func (m *Manager) trimUploads(tenant, keep string) error {
	dir := filepath.Join(m.uploadsDir(), tenant)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return diskError("look through the uploads", err)
	}
	var all []os.FileInfo
	var sum int64
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			all = append(all, fi)
			sum += fi.Size()
		}
	}
	slices.SortFunc(all, func(a, b os.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for _, fi := range all {
		p := filepath.Join(dir, fi.Name())
		if p == keep || sum <= maxUploads && m.clock.Now().Sub(fi.ModTime()) < uploadKeep {
			continue
		}
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return diskError("remove an old upload", err)
		}
		sum -= fi.Size()
	}
	return nil
}

// sweepUploads removes what a crash left half written, and what is too old.
func (m *Manager) sweepUploads(context.Context) error {
	entries, err := os.ReadDir(m.uploadsDir())
	if err != nil {
		return diskError("look through the uploads", err)
	}
	for _, e := range entries {
		if e.IsDir() {
			err = m.trimUploads(e.Name(), "")
		} else {
			err = os.Remove(filepath.Join(m.uploadsDir(), e.Name()))
		}
		if err != nil {
			return diskError("remove old uploads", err)
		}
	}
	return nil
}
