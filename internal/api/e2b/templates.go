package e2b

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strconv"
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

// maxTemplateBody leaves room for a build's steps.
const maxTemplateBody = 4 << 20

// logPage is the most entries of a log in one answer.
const logPage = 100

// Templates serves the routes of templates and their builds.
type Templates struct {
	Back TemplatesBackend
	// Tenant gives whose request it is.
	Tenant func(*http.Request) string
	// Fail answers with an error.
	Fail func(http.ResponseWriter, *http.Request, error)
	// BaseURL is under what URL a client reaches the API; nil is by the
	// request's Host.
	BaseURL func(*http.Request) string
}

// Register adds the routes that need a tenant.
func (t *Templates) Register(mux *http.ServeMux) {
	add := func(pattern string, f func(http.ResponseWriter, *http.Request, string) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := f(w, r, t.Tenant(r)); err != nil {
				t.Fail(w, r, err)
			}
		})
	}
	for _, p := range []string{"POST /v3/templates", "POST /v2/templates"} {
		add(p, t.request)
	}
	add("GET /templates/{id}/files/{hash}", t.upload)
	add("POST /v2/templates/{id}/builds/{build}", t.start)
	add("GET /templates/{id}/builds/{build}/status", t.status)
	add("GET /templates/{id}/builds/{build}/logs", t.logs)
	add("POST /templates/tags", t.tag)
	add("DELETE /templates/tags", t.untag)
	// "aliases/{alias}" and "{id}/tags" overlap, which a mux does not take.
	add("GET /templates/{id}/{what}", func(w http.ResponseWriter, r *http.Request, tenant string) error {
		switch {
		case r.PathValue("id") == "aliases":
			return t.alias(w, r, tenant)
		case r.PathValue("what") == "tags":
			return t.tags(w, r, tenant)
		}
		return sandbox.Errorf(sandbox.CodeNotFound, "no such route")
	})
	add("GET /templates", t.list)
	add("GET /v2/templates", t.list)
	add("GET /templates/{id}", t.get)
	add("PATCH /templates/{id}", t.update)
	add("PATCH /v2/templates/{id}", t.update)
	add("DELETE /templates/{id}", t.remove)
	for _, p := range []string{"POST /templates", "POST /templates/{id}", "POST /templates/{id}/builds/{build}"} {
		add(p, func(http.ResponseWriter, *http.Request, string) error {
			return sandbox.Errorf(sandbox.CodeUnsupported, "builds of a Dockerfile that the client pushes as an image are not supported: use the SDK's template builder (Template.build), or `warren template build`")
		})
	}
}

// RegisterPublic adds the routes that need no API key.
func (t *Templates) RegisterPublic(mux *http.ServeMux) {
	mux.HandleFunc("PUT "+UploadPath+"{token}", func(w http.ResponseWriter, r *http.Request) {
		// A large archive takes its time.
		http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Hour)) // not all connections can
		if err := t.Back.PutUpload(r.Context(), r.PathValue("token"), r.Body, r.ContentLength); err != nil {
			t.Fail(w, r, err)
			return
		}
		w.WriteHeader(http.StatusOK)
	})
}

func readJSON(r *http.Request, v any) error {
	data, err := io.ReadAll(io.LimitReader(r.Body, maxTemplateBody+1))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "read the body: %w", err)
	}
	if len(data) > maxTemplateBody {
		return sandbox.Errorf(sandbox.CodeTooLarge, "the body is larger than %d bytes", maxTemplateBody)
	}
	if err := json.Unmarshal(data, v); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body is not the JSON that this route takes: %w", err)
	}
	return nil
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "write the answer: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(data) // a client that went away is no error of ours
	return nil
}

func (t *Templates) request(w http.ResponseWriter, r *http.Request, tenant string) error {
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
	b, err := t.Back.RequestBuild(r.Context(), tenant, manager.TemplateRequest{
		Name: in.Name, Tags: in.Tags, Resources: sandbox.Resources{CPUs: float64(in.CPUs), MemoryMiB: in.MemoryMB, DiskMiB: in.MinFree},
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, map[string]any{
		"templateID": b.Template, "buildID": b.ID, "public": false, "names": []string{b.Name}, "aliases": []string{b.Name}, "tags": b.Tags,
	})
}

func (t *Templates) upload(w http.ResponseWriter, r *http.Request, tenant string) error {
	present, token, err := t.Back.Upload(r.Context(), tenant, r.PathValue("id"), r.PathValue("hash"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, map[string]any{"present": present, "url": t.baseURL(r) + UploadPath + token})
}

func (t *Templates) baseURL(r *http.Request) string {
	if t.BaseURL != nil {
		return t.BaseURL(r)
	}
	if r.TLS != nil {
		return "https://" + r.Host
	}
	return "http://" + r.Host
}

func (t *Templates) start(w http.ResponseWriter, r *http.Request, tenant string) error {
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
	if err := t.Back.StartBuild(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"), o); err != nil {
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

// number reads a query parameter between 0 and most.
func number(r *http.Request, name string, def, most int) (int, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return def, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a number from 0", name)
	}
	return min(n, most), nil
}

const maxOffset = 1 << 30

func (t *Templates) status(w http.ResponseWriter, r *http.Request, tenant string) error {
	offset, err := number(r, "logsOffset", 0, maxOffset)
	if err != nil {
		return err
	}
	limit, err := number(r, "limit", logPage, logPage)
	if err != nil {
		return err
	}
	// The state first: a build that is over by it has all of its log.
	b, err := t.Back.TemplateBuild(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"))
	if err != nil {
		return err
	}
	all, err := t.Back.BuildLogs(r.Context(), tenant, b.Template, b.ID, offset, limit)
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

func (t *Templates) logs(w http.ResponseWriter, r *http.Request, tenant string) error {
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
	all, err := t.Back.BuildLogs(r.Context(), tenant, r.PathValue("id"), r.PathValue("build"), offset, limit)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"logs": toEntries(all, r.URL.Query().Get("level"))})
}

func (t *Templates) alias(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := t.Back.NamedTemplate(r.Context(), tenant, r.PathValue("what"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"templateID": n.ID, "public": n.Tenant != tenant})
}

func (t *Templates) tag(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Target string   `json:"target"`
		Tags   []string `json:"tags"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	got, err := t.Back.TagTemplate(r.Context(), tenant, in.Target, in.Tags)
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

func (t *Templates) untag(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if err := t.Back.UntagTemplate(r.Context(), tenant, in.Name, in.Tags); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (t *Templates) tags(w http.ResponseWriter, r *http.Request, tenant string) error {
	tags, err := t.Back.TemplateTags(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for _, g := range tags {
		out = append(out, map[string]any{"tag": g.Tag, "buildID": g.BuildID, "createdAt": g.CreatedAt})
	}
	return writeJSON(w, http.StatusOK, out)
}

func (t *Templates) list(w http.ResponseWriter, r *http.Request, tenant string) error {
	all, err := t.Back.Templates(r.Context(), tenant)
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
		n, err := t.Back.NamedTemplate(r.Context(), tenant, name)
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

func (t *Templates) get(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := t.Back.NamedTemplate(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	builds, err := t.Back.TemplateBuilds(r.Context(), tenant, n.ID)
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

func (t *Templates) update(w http.ResponseWriter, r *http.Request, tenant string) error {
	n, err := t.Back.NamedTemplate(r.Context(), tenant, r.PathValue("id"))
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

func (t *Templates) remove(w http.ResponseWriter, r *http.Request, tenant string) error {
	if err := t.Back.RemoveNamed(r.Context(), tenant, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
