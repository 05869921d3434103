package e2b

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/agent"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

func (f *facade) registerSandboxes() {
	f.add("POST /sandboxes", f.create)
	f.add("POST /v2/sandboxes", f.create)
	f.add("GET /sandboxes", f.listRunning)
	f.add("GET /v2/sandboxes", f.list)
	f.add("GET /sandboxes/{id}", f.info)
	f.add("PUT /sandboxes/{id}/network", f.setNetwork)
	f.add("GET /sandboxes/metrics", f.allMetrics)
	f.add("GET /sandboxes/{id}/metrics", f.metrics)
	f.add("GET /sandboxes/{id}/logs", f.logs)
	f.add("GET /v2/sandboxes/{id}/logs", f.logsV2)
}

// made is E2B's "Sandbox": what a client needs to speak to one.
type made struct {
	TemplateID         string `json:"templateID"`
	SandboxID          string `json:"sandboxID"`
	ClientID           string `json:"clientID"`
	Alias              string `json:"alias,omitempty"`
	EnvdVersion        string `json:"envdVersion"`
	EnvdAccessToken    string `json:"envdAccessToken,omitempty"`
	TrafficAccessToken string `json:"trafficAccessToken,omitempty"`
	Domain             string `json:"domain,omitempty"`
}

// clientID was a node's name in E2B's first API; today's clients only carry it.
const clientID = "warren"

func (f *facade) toMade(r *http.Request, sb sandbox.Sandbox) made {
	m := made{
		TemplateID: f.templateID(r.Context(), sb, nil), SandboxID: string(sb.ID), ClientID: clientID, Alias: sb.Template,
		EnvdVersion: agent.EnvdVersion, EnvdAccessToken: sb.Token, Domain: f.Domain,
	}
	if !sb.PublicTraffic {
		m.TrafficAccessToken = sb.TrafficToken
	}
	return m
}

// templateID is the ID by which a client knows what sb was made of: of a
// template that was built through this API its stable one, not its content's.
// known, where given, keeps what was found for other sandboxes of a list.
func (f *facade) templateID(ctx context.Context, sb sandbox.Sandbox, known map[string]string) string {
	if sb.Snapshot != "" && sb.Parent == "" {
		return sb.Snapshot
	}
	key := sb.Tenant + "/" + sb.Template
	if id, ok := known[key]; ok {
		return id
	}
	id := sb.TemplateID
	if n, err := f.Back.NamedTemplate(ctx, sb.Tenant, sb.Template); err == nil && n.ID != "" {
		id = n.ID
	}
	if known != nil {
		known[key] = id
	}
	return id
}

// listed is E2B's "ListedSandbox", and with its last fields "SandboxDetail".
type listed struct {
	TemplateID  string            `json:"templateID"`
	Alias       string            `json:"alias,omitempty"`
	SandboxID   string            `json:"sandboxID"`
	ClientID    string            `json:"clientID"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int               `json:"cpuCount"`
	MemoryMB    int               `json:"memoryMB"`
	DiskSizeMB  int               `json:"diskSizeMB"`
	Metadata    map[string]string `json:"metadata"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`

	VolumeMounts []volumeMount `json:"volumeMounts,omitempty"`

	*detail
}

type detail struct {
	EnvdAccessToken     string     `json:"envdAccessToken,omitempty"`
	AllowInternetAccess bool       `json:"allowInternetAccess"`
	Domain              string     `json:"domain,omitempty"`
	Network             network    `json:"network"`
	Lifecycle           *lifecycle `json:"lifecycle"`
}

type lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"`
}

type volumeMount struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

// E2B's two states.
const (
	stateRunning = "running"
	statePaused  = "paused"
)

// farAway is the endAt of a sandbox that has none: the field is a date.
var farAway = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

func (f *facade) toListed(ctx context.Context, sb sandbox.Sandbox, known map[string]string) listed {
	l := listed{
		TemplateID: f.templateID(ctx, sb, known), Alias: sb.Template, SandboxID: string(sb.ID), ClientID: clientID,
		StartedAt: sb.StartedAt.UTC(), EndAt: sb.ExpiresAt.UTC(), CPUCount: max(1, int(sb.Resources.CPUs)),
		MemoryMB: sb.Resources.MemoryMiB, DiskSizeMB: sb.Resources.DiskMiB, Metadata: sb.Metadata,
		State: stateRunning, EnvdVersion: agent.EnvdVersion,
	}
	for _, v := range sb.Volumes {
		l.VolumeMounts = append(l.VolumeMounts, volumeMount{v.Name, v.Path})
	}
	if l.Metadata == nil {
		l.Metadata = map[string]string{}
	}
	if sb.StartedAt.IsZero() {
		l.StartedAt = sb.CreatedAt.UTC()
	}
	if sb.ExpiresAt.IsZero() {
		l.EndAt = farAway
	}
	switch sb.State {
	case sandbox.Hibernated:
		l.State, l.EndAt = statePaused, sb.HibernatedAt.UTC()
	case sandbox.Suspended:
		l.State = statePaused
	}
	return l
}

// find gives the live sandbox of the path. One that has ended is not found, as
// is anything that cannot be an id.
func (f *facade) find(r *http.Request, tenant string) (sandbox.Sandbox, error) {
	return f.get(r.Context(), tenant, r.PathValue("id"))
}

func (f *facade) get(ctx context.Context, tenant, text string) (sandbox.Sandbox, error) {
	missing := sandbox.Errorf(sandbox.CodeNotFound, "no sandbox %q: it has ended, or never was", clip(text))
	id, err := sandbox.ParseID(text)
	if err != nil {
		return sandbox.Sandbox{}, missing
	}
	sb, err := f.Back.Get(ctx, tenant, id)
	if sandbox.CodeOf(err) == sandbox.CodeNotFound || err == nil && sb.State.Ended() {
		err = missing
	}
	return sb, err
}

func clip(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strings.ToValidUTF8(s, "?")
}

type createRequest struct {
	TemplateID      string            `json:"templateID"`
	Timeout         *int              `json:"timeout"` // seconds
	Metadata        map[string]string `json:"metadata"`
	EnvVars         map[string]string `json:"envVars"`
	Internet        *bool             `json:"allow_internet_access"`
	Network         network           `json:"network"`
	AutoPause       bool              `json:"autoPause"`
	AutoPauseMemory *bool             `json:"autoPauseMemory"`
	AutoResume      *autoResume       `json:"autoResume"`

	// Not read: "mcp" is for the SDK, which starts the gateway by a command.

	IAM          any           `json:"iam"`
	VolumeMounts []volumeMount `json:"volumeMounts"`
}

type autoResume struct {
	Enabled bool `json:"enabled"`
}

// The times to live where the client gives none, by version of the route.
const (
	defaultTimeoutV1 = 15 * time.Second
	defaultTimeout   = 300 * time.Second
)

// lifetime makes a time to live of seconds. 0 is none of Warren's: at E2B it
// ends the sandbox at once.
func lifetime(seconds *int, def time.Duration) (time.Duration, error) {
	switch {
	case seconds == nil:
		return def, nil
	case *seconds < 0 || *seconds > 1<<31:
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "timeout is %d: give seconds from 0", *seconds)
	case *seconds == 0:
		return time.Millisecond, nil
	}
	return time.Duration(*seconds) * time.Second, nil
}

func (f *facade) create(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in createRequest
	if err := readJSON(r, &in); err != nil {
		return err
	}
	def := defaultTimeout
	if r.URL.Path == "/sandboxes" {
		def = defaultTimeoutV1
	}
	req, err := f.createRequest(r.Context(), tenant, in, def)
	if err != nil {
		return err
	}
	begun := time.Now()
	sb, err := f.Back.Create(r.Context(), tenant, req)
	f.Created(req.Runtime, sb, err, time.Since(begun))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, f.toMade(r, sb))
}

func (f *facade) createRequest(ctx context.Context, tenant string, in createRequest, def time.Duration) (manager.CreateRequest, error) {
	var out manager.CreateRequest
	for _, o := range []struct {
		name  string
		given bool
		why   string
	}{
		{"iam", given(in.IAM), "there is no issuer of tokens; give credentials in envVars"},
	} {
		if o.given {
			return out, sandbox.Errorf(sandbox.CodeUnsupported, "%s is not supported: %s", o.name, o.why)
		}
	}
	if in.TemplateID == "" {
		return out, sandbox.Errorf(sandbox.CodeInvalid, "templateID is missing: name a template or a snapshot")
	}
	var err error
	if out.Network, err = in.Network.policy(in.Internet); err != nil {
		return out, err
	}
	if out.Timeout, err = lifetime(in.Timeout, def); err != nil {
		return out, err
	}
	if in.AutoPause {
		out.OnTimeout = sandbox.OnTimeoutHibernate
		if in.AutoPauseMemory != nil && !*in.AutoPauseMemory {
			out.HibernateKind = sandbox.SnapshotDisk
		}
	}
	out.ManualWake = in.AutoResume == nil || !in.AutoResume.Enabled
	out.PublicTraffic = in.Network.AllowPublicTraffic == nil || *in.Network.AllowPublicTraffic
	out.HostHeader = in.Network.MaskRequestHost
	out.Env, out.Metadata = in.EnvVars, in.Metadata
	for _, v := range in.VolumeMounts {
		if v.Name == "" {
			return out, sandbox.Errorf(sandbox.CodeInvalid, "volumeMounts names no volume at %s", clip(v.Path))
		}
		out.Volumes = append(out.Volumes, sandbox.VolumeMount{Name: v.Name, Path: v.Path})
	}
	if out.Snapshot, err = f.snapshot(ctx, tenant, in.TemplateID); err != nil || out.Snapshot != "" {
		return out, err
	}
	out.Template = in.TemplateID
	return out, nil
}

// snapshot tells which snapshot a client means by a templateID: E2B has one
// name space for both. "" is none; a template of that name goes first.
func (f *facade) snapshot(ctx context.Context, tenant, nameOrID string) (string, error) {
	if !sandbox.IsSnapshotID(nameOrID) {
		name, tag := template.SplitTag(nameOrID)
		if _, err := f.Back.NamedTemplate(ctx, tenant, nameOrID); sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return "", nil // it is a template, or it shows below what is wrong
		}
		if tag == template.DefaultTag {
			nameOrID = name
		}
	}
	n, err := f.Back.SnapshotByName(ctx, tenant, nameOrID)
	switch {
	case sandbox.CodeOf(err) == sandbox.CodeNotFound, err == nil && n.Hidden:
		return "", nil
	}
	return n.ID, err
}

func (f *facade) info(w http.ResponseWriter, r *http.Request, tenant string) error {
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	l := f.toListed(r.Context(), sb, nil)
	l.detail = &detail{
		EnvdAccessToken: sb.Token, AllowInternetAccess: internet(sb), Domain: f.Domain, Network: toNetwork(sb),
		Lifecycle: &lifecycle{AutoResume: !sb.ManualWake, OnTimeout: "kill"},
	}
	if sb.OnTimeout == sandbox.OnTimeoutHibernate {
		l.Lifecycle.OnTimeout = "pause"
	}
	return writeJSON(w, http.StatusOK, l)
}

// metadataQuery reads the labels of a listing: k=v&k=v, whose parts the SDKs
// percent-encode once before they encode the whole.
func metadataQuery(s string) (map[string]string, error) {
	if s == "" {
		return nil, nil
	}
	bad := sandbox.Errorf(sandbox.CodeInvalid, "metadata is not k=v&k=v, with k and v percent-encoded twice")
	q, err := url.ParseQuery(s)
	if err != nil {
		return nil, bad
	}
	out := map[string]string{}
	for k := range q {
		key, kerr := url.QueryUnescape(k)
		value, verr := url.QueryUnescape(q.Get(k))
		if kerr != nil || verr != nil {
			return nil, bad
		}
		out[key] = value
	}
	return out, nil
}

// listRunning is v1's list: no pages, and running ones alone.
func (f *facade) listRunning(w http.ResponseWriter, r *http.Request, tenant string) error {
	labels, err := metadataQuery(r.URL.Query().Get("metadata"))
	if err != nil {
		return err
	}
	out, known, token := []listed{}, map[string]string{}, ""
	for {
		page, next, err := f.Back.List(r.Context(), tenant, manager.ListFilter{
			States: []sandbox.State{sandbox.Running}, Metadata: labels, Limit: 1000, Token: token,
		})
		if err != nil {
			return err
		}
		for _, sb := range page {
			out = append(out, f.toListed(r.Context(), sb, known))
		}
		if token = next; token == "" {
			return writeJSON(w, http.StatusOK, out)
		}
	}
}

func (f *facade) list(w http.ResponseWriter, r *http.Request, tenant string) error {
	q := r.URL.Query()
	filter := manager.ListFilter{Template: q.Get("template"), Token: q.Get("nextToken")}
	states := q["state"]
	if len(states) == 0 {
		states = []string{stateRunning, statePaused}
	}
	for _, s := range strings.Split(strings.Join(states, ","), ",") {
		switch s {
		case stateRunning:
			filter.States = append(filter.States, sandbox.Running)
		case statePaused:
			filter.States = append(filter.States, sandbox.Hibernated, sandbox.Suspended)
		default:
			return sandbox.Errorf(sandbox.CodeInvalid, "%q is not a state: give running, paused or both", clip(s))
		}
	}
	var err error
	if filter.Metadata, err = metadataQuery(q.Get("metadata")); err != nil {
		return err
	}
	if filter.Limit, err = pageLimit(r); err != nil {
		return err
	}
	switch q.Get("order") {
	case "", "desc":
	case "asc":
		filter.Oldest = true
	default:
		return sandbox.Errorf(sandbox.CodeInvalid, "order is neither asc nor desc")
	}
	if s := q.Get("startedAfter"); s != "" {
		if filter.StartedFrom, err = time.Parse(time.RFC3339Nano, s); err != nil {
			return sandbox.Errorf(sandbox.CodeInvalid, "startedAfter is not a time of RFC 3339")
		}
	}
	page, next, err := f.Back.List(r.Context(), tenant, filter)
	if err != nil {
		return err
	}
	out, known := make([]listed, 0, len(page)), map[string]string{}
	for _, sb := range page {
		out = append(out, f.toListed(r.Context(), sb, known))
	}
	setNext(w, next)
	return writeJSON(w, http.StatusOK, out)
}
