package e2b

import (
	"context"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

// TemplatesBackend is what the template routes need below them: the manager.
type TemplatesBackend interface {
	RequestBuild(ctx context.Context, tenant string, r manager.TemplateRequest) (manager.TemplateBuild, error)
	StartBuild(ctx context.Context, tenant, templateID, buildID string, o template.StepsOptions) error
	TemplateBuild(ctx context.Context, tenant, templateID, buildID string) (manager.TemplateBuild, error)
	TemplateBuilds(ctx context.Context, tenant, nameOrID string) ([]store.Build, error)
	BuildLogs(ctx context.Context, tenant, templateID, buildID string, offset, limit int) ([]manager.BuildLogEntry, error)
	NamedTemplate(ctx context.Context, tenant, nameOrID string) (store.NamedTemplate, error)
	TemplateTags(ctx context.Context, tenant, nameOrID string) ([]manager.TemplateTag, error)
	TagTemplate(ctx context.Context, tenant, target string, tags []string) (template.Template, error)
	UntagTemplate(ctx context.Context, tenant, nameOrID string, tags []string) error
	RemoveNamed(ctx context.Context, tenant, nameOrID string) error
	Templates(ctx context.Context, tenant string) ([]template.Template, error)
	Upload(ctx context.Context, tenant, templateID, hash string) (present bool, token string, err error)
	PutUpload(ctx context.Context, token string, body io.Reader, size int64) error
}

var _ TemplatesBackend = (*manager.Manager)(nil)

// UploadPath begins the paths of upload links. They carry a token, and need no
// API key.
const UploadPath = "/_uploads/"

// logPage is the most entries of a log in one answer.
const logPage = 100

func (f *facade) registerTemplates() {
	f.add("POST /v3/templates", f.requestBuild)
	f.add("POST /v2/templates", f.requestBuild)
	f.add("GET /templates/{id}/files/{hash}", f.uploadLink)
	f.add("POST /v2/templates/{id}/builds/{build}", f.startBuild)
	f.add("GET /templates/{id}/builds/{build}/status", f.buildStatus)
	f.add("GET /templates/{id}/builds/{build}/logs", f.buildLogs)
	f.add("POST /templates/tags", f.tagTemplate)
	f.add("DELETE /templates/tags", f.untagTemplate)
	// "aliases/{alias}" and "{id}/tags" overlap, which a mux does not take.
	f.add("GET /templates/{id}/{what}", func(w http.ResponseWriter, r *http.Request, tenant string) error {
		switch {
		case r.PathValue("id") == "aliases":
			return f.templateAlias(w, r, tenant)
		case r.PathValue("what") == "tags":
			return f.templateTags(w, r, tenant)
		}
		return sandbox.Errorf(sandbox.CodeNotFound, "no such route")
	})
	f.add("GET /templates", f.listTemplates)
	f.add("GET /v2/templates", f.listTemplates)
	f.add("GET /templates/{id}", f.getTemplate)
	f.add("PATCH /templates/{id}", f.updateTemplate)
	f.add("PATCH /v2/templates/{id}", f.updateTemplate)
	f.add("DELETE /templates/{id}", f.removeTemplate)
	for _, p := range []string{"POST /templates", "POST /templates/{id}", "POST /templates/{id}/builds/{build}"} {
		f.refuse(p, "builds of a Dockerfile that the client pushes as an image are not supported: use the SDK's template builder (Template.build), or `warren template build`")
	}
	// An upload link has a token of its own, and needs no API key.
	f.mux.HandleFunc("PUT "+UploadPath+"{token}", func(w http.ResponseWriter, r *http.Request) {
		// A large archive takes its time.
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Hour)) // not all connections can
		if err := f.Back.PutUpload(r.Context(), r.PathValue("token"), r.Body, r.ContentLength); err != nil {
			f.Fail(w, r, err)
			return
		}
		w.WriteHeader(http.StatusOK)
	})
}

func (f *facade) requestBuild(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Name     string   `json:"name"`
		Alias    string   `json:"alias"` // v2's and older v3's
		Tags     []string `json:"tags"`
		CPUs     int      `json:"cpuCount"`
		MemoryMB int      `json:"memoryMB"`
		MinFree  int      `json:"minFreeDiskMb"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if in.Name == "" {
		in.Name = in.Alias
	}
	if in.CPUs < 0 || in.MemoryMB < 0 || in.MinFree < 0 {
		return sandbox.Errorf(sandbox.CodeInvalid, "cpuCount, memoryMB and minFreeDiskMb are not negative")
	}
	b, err := f.Back.RequestBuild(r.Context(), tenant, manager.TemplateRequest{
		Name: in.Name, Tags: in.Tags, Resources: sandbox.Resources{CPUs: float64(in.CPUs), MemoryMiB: in.MemoryMB, DiskMiB: in.MinFree},
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, map[string]any{
		"templateID": b.Template, "buildID": b.ID, "public": false, "names": []string{b.Name}, "aliases": []string{b.Name}, "tags": b.Tags,
	})
}

func (f *facade) uploadLink(w http.ResponseWriter, r *http.Request, tenant string) error {
	present, token, err := f.Back.Upload(r.Context(), tenant, r.PathValue("id"), r.PathValue("hash"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, map[string]any{"present": present, "url": f.baseURL(r) + UploadPath + token})
}

func (f *facade) startBuild(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		FromImage    string `json:"fromImage"`
		FromTemplate string `json:"fromTemplate"`
		Registry     *struct {
			Type     string `json:"type"`
			Username string `json:"username"`
			Password string `json:"password"`
		} `json:"fromImageRegistry"`
		Steps []struct {
			Type      string   `json:"type"`
			Args      []string `json:"args"`
			FilesHash string   `json:"filesHash"`
			Force     bool     `json:"force"`
		} `json:"steps"`
		StartCmd string `json:"startCmd"`
		ReadyCmd string `json:"readyCmd"`
		Force    bool   `json:"force"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	o := template.StepsOptions{
		Target:    template.Target{StartCmd: in.StartCmd, ReadyCmd: in.ReadyCmd},
		FromImage: in.FromImage, FromTemplate: in.FromTemplate, NoCache: in.Force,
	}
	if g := in.Registry; g != nil {
		if g.Type != "registry" {
			return sandbox.Errorf(sandbox.CodeUnsupported, "a registry of type %q is not supported: give the registry's username and password (type \"registry\")", g.Type)
		}
		o.Username, o.Password = g.Username, g.Password
	}
	for _, s := range in.Steps {
		o.Steps = append(o.Steps, template.BuildStep{Type: s.Type, Args: s.Args, FilesHash: s.FilesHash, Force: s.Force})
	}
	if err := f.Back.StartBuild(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"), o); err != nil {
		return err
	}
	w.WriteHeader(http.StatusAccepted)
	return nil
}

type logEntry struct {
	Timestamp time.Time `json:"timestamp"`
	Level     string    `json:"level"`
	Message   string    `json:"message"`
	Step      string    `json:"step,omitempty"`
}

func toEntries(in []manager.BuildLogEntry, level string) []logEntry {
	levels := []string{"debug", "info", "warn", "error"}
	least := slices.Index(levels, level)
	out := []logEntry{}
	for _, e := range in {
		if slices.Index(levels, e.Level) >= least {
			out = append(out, logEntry{e.Time, e.Level, e.Message, e.Step})
		}
	}
	return out
}

func (f *facade) buildStatus(w http.ResponseWriter, r *http.Request, tenant string) error {
	offset, err := number(r, "logsOffset", 0, maxOffset)
	if err != nil {
		return err
	}
	limit, err := number(r, "limit", logPage, logPage)
	if err != nil {
		return err
	}
	// The state first: a build that is over by it has all of its log.
	b, err := f.Back.TemplateBuild(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"))
	if err != nil {
		return err
	}
	all, err := f.Back.BuildLogs(r.Context(), tenant, b.Template, b.ID, offset, limit)
	if err != nil {
		return err
	}
	entries := toEntries(all, "")
	lines := []string{}
	for _, e := range entries {
		lines = append(lines, e.Message)
	}
	out := map[string]any{
		"templateID": b.Template, "buildID": b.ID, "status": b.State, "logs": lines, "logEntries": entries,
	}
	if b.State == store.BuildError {
		reason := map[string]any{"message": b.Reason, "logEntries": []logEntry{}}
		if b.Step != "" {
			reason["step"] = b.Step
		}
		out["reason"] = reason
	}
	return writeJSON(w, http.StatusOK, out)
}

func (f *facade) buildLogs(w http.ResponseWriter, r *http.Request, tenant string) error {
	cursor, err := number(r, "cursor", 0, maxOffset)
	if err != nil {
		return err
	}
	offset, err := number(r, "logsOffset", cursor, maxOffset)
	if err != nil {
		return err
	}
	limit, err := number(r, "limit", logPage, logPage)
	if err != nil {
		return err
	}
	all, err := f.Back.BuildLogs(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"), offset, limit)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"logs": toEntries(all, r.URL.Query().Get("level"))})
}

func (f *facade) templateAlias(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := f.Back.NamedTemplate(r.Context(), tenant, r.PathValue("what"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"templateID": n.ID, "public": n.Tenant != tenant})
}

func (f *facade) tagTemplate(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Target string   `json:"target"`
		Tags   []string `json:"tags"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	got, err := f.Back.TagTemplate(r.Context(), tenant, in.Target, in.Tags)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, map[string]any{"buildID": buildOf(got), "tags": in.Tags})
}

// buildOf is the build that made a template; one that was not made by the
// routes here stands for itself.
func buildOf(t template.Template) string {
	if t.BuildID != "" {
		return t.BuildID
	}
	return t.ID
}

func (f *facade) untagTemplate(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if err := f.Back.UntagTemplate(r.Context(), tenant, in.Name, in.Tags); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (f *facade) templateTags(w http.ResponseWriter, r *http.Request, tenant string) error {
	tags, err := f.Back.TemplateTags(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for _, g := range tags {
		out = append(out, map[string]any{"tag": g.Tag, "buildID": g.BuildID, "createdAt": g.CreatedAt})
	}
	return writeJSON(w, http.StatusOK, out)
}

func (f *facade) listTemplates(w http.ResponseWriter, r *http.Request, tenant string) error {
	all, err := f.Back.Templates(r.Context(), tenant)
	if err != nil {
		return err
	}
	out := []map[string]any{}
	seen := map[string]bool{}
	for _, one := range all {
		name, _ := template.SplitTag(one.Name)
		if seen[name] {
			continue
		}
		seen[name] = true
		n, err := f.Back.NamedTemplate(r.Context(), tenant, name)
		if err != nil {
			n.ID = one.ID // it has other tags only
		}
		out = append(out, toTemplate(one, n.ID, name, tenant))
	}
	return writeJSON(w, http.StatusOK, out)
}

func toTemplate(t template.Template, id, name, tenant string) map[string]any {
	res := t.Resources.Or(sandbox.DefaultResources())
	return map[string]any{
		"templateID": id, "buildID": buildOf(t), "buildStatus": store.BuildReady, "names": []string{name}, "aliases": []string{name},
		"public": t.Tenant != tenant || t.Shared, "cpuCount": max(1, int(res.CPUs)), "memoryMB": res.MemoryMiB, "diskSizeMB": res.DiskMiB,
		"createdAt": t.CreatedAt, "updatedAt": t.CreatedAt, "createdBy": nil, "lastSpawnedAt": nil, "spawnCount": 0, "buildCount": 1,
		"envdVersion": "",
	}
}

func (f *facade) getTemplate(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := f.Back.NamedTemplate(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	builds, err := f.Back.TemplateBuilds(r.Context(), tenant, n.ID)
	if err != nil {
		return err
	}
	out, updated := []map[string]any{}, n.CreatedAt
	for _, b := range builds {
		res := b.Resources.Or(sandbox.DefaultResources())
		one := map[string]any{
			"buildID": b.ID, "status": b.State, "createdAt": b.CreatedAt, "updatedAt": b.CreatedAt,
			"cpuCount": max(1, int(res.CPUs)), "memoryMB": res.MemoryMiB, "diskSizeMB": res.DiskMiB,
		}
		if !b.FinishedAt.IsZero() {
			one["finishedAt"], one["updatedAt"] = b.FinishedAt, b.FinishedAt
		}
		if b.CreatedAt.After(updated) {
			updated = b.CreatedAt
		}
		out = append(out, one)
	}
	return writeJSON(w, http.StatusOK, map[string]any{
		"templateID": n.ID, "public": n.Tenant != tenant, "names": []string{n.Name}, "aliases": []string{n.Name},
		"createdAt": n.CreatedAt, "updatedAt": updated, "lastSpawnedAt": nil, "spawnCount": 0, "builds": out,
	})
}

func (f *facade) updateTemplate(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := f.Back.NamedTemplate(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	var in struct {
		Public *bool `json:"public"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if in.Public != nil && *in.Public {
		return sandbox.Errorf(sandbox.CodeUnsupported, "a template cannot be made public here: the tenant %q shares templates by `warren template build --shared`", template.SharedTenant)
	}
	return writeJSON(w, http.StatusOK, map[string]any{"names": []string{n.Name}})
}

// removeTemplate removes a template or a snapshot: the SDKs delete both here.
func (f *facade) removeTemplate(w http.ResponseWriter, r *http.Request, tenant string) error {
	id := r.PathValue("id")
	remove := f.Back.RemoveNamed
	if n, err := f.snapshot(r.Context(), tenant, id); err != nil {
		return err
	} else if n != "" {
		id, remove = n, f.Back.RemoveSnapshot
	}
	if err := remove(r.Context(), tenant, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
