package api

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// ByID is the path parameter of everything about one sandbox.
type ByID struct {
	ID string `path:"id" maxLength:"64" doc:"The sandbox's id"`
}

type body[T any] struct{ Body T }

type none struct{}

func (a *API) registerSandboxes() {
	register(a, huma.Operation{
		OperationID: "create-sandbox", Method: http.MethodPost, Path: "/v1/sandboxes", Tags: []string{"sandboxes"},
		Summary: "Make a sandbox", DefaultStatus: http.StatusCreated,
		Description: "Answers once its agent is up. no_capacity: the host's budget cannot hold it.",
	}, a.createSandbox)
	register(a, huma.Operation{
		OperationID: "list-sandboxes", Method: http.MethodGet, Path: "/v1/sandboxes", Tags: []string{"sandboxes"},
		Summary: "List sandboxes", Description: "Newest first, live and ended, narrowed by every parameter that is given.",
	}, a.listSandboxes)
	register(a, huma.Operation{
		OperationID: "get-sandbox", Method: http.MethodGet, Path: "/v1/sandboxes/{id}", Tags: []string{"sandboxes"},
		Summary: "Get one sandbox", Description: "Ended ones too, with the reason of their end.",
	}, func(ctx context.Context, in *ByID) (*body[wire.Sandbox], error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		sb, err := a.back.Get(ctx, tenantOf(ctx), id)
		if err != nil {
			return nil, err
		}
		return &body[wire.Sandbox]{toSandbox(sb, true)}, nil
	})
	register(a, huma.Operation{
		OperationID: "kill-sandbox", Method: http.MethodDelete, Path: "/v1/sandboxes/{id}", Tags: []string{"sandboxes"},
		Summary: "End a sandbox", Description: "Its processes and its disk are gone when the answer comes; its record stays. One that has ended already is no error.",
	}, func(ctx context.Context, in *ByID) (*none, error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		if err := a.back.Kill(ctx, tenantOf(ctx), id); err != nil {
			return nil, err
		}
		a.proxy.Forget(id)
		return nil, nil
	})
	register(a, huma.Operation{
		OperationID: "set-timeout", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/timeout", Tags: []string{"sandboxes"},
		Summary: "Set a sandbox's time to live anew",
	}, func(ctx context.Context, in *struct {
		ByID
		Body wire.SetTimeout
	}) (*body[wire.Sandbox], error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		d, err := seconds(in.Body.Timeout)
		if err != nil {
			return nil, err
		}
		sb, err := a.back.SetTimeout(ctx, tenantOf(ctx), id, d)
		if err != nil {
			return nil, err
		}
		return &body[wire.Sandbox]{toSandbox(sb, true)}, nil
	})
	register(a, huma.Operation{
		OperationID: "set-network", Method: http.MethodPut, Path: "/v1/sandboxes/{id}/network", Tags: []string{"sandboxes"},
		Summary: "Replace what a sandbox may reach", Description: "Holds for new connections at once.",
	}, func(ctx context.Context, in *struct {
		ByID
		Body wire.Network
	}) (*body[wire.Sandbox], error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		p, err := fromNetwork(in.Body)
		if err != nil {
			return nil, err
		}
		if p.Mode == "" {
			p.Mode = sandbox.NetworkEgress
		}
		if err := a.back.SetNetwork(ctx, tenantOf(ctx), id, p); err != nil {
			return nil, err
		}
		sb, err := a.back.Get(ctx, tenantOf(ctx), id)
		if err != nil {
			return nil, err
		}
		return &body[wire.Sandbox]{toSandbox(sb, true)}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-stats", Method: http.MethodGet, Path: "/v1/sandboxes/{id}/stats", Tags: []string{"sandboxes"},
		Summary: "Read what a sandbox uses now",
	}, func(ctx context.Context, in *ByID) (*body[wire.Stats], error) {
		id, err := sandbox.ParseID(in.ID)
		if err != nil {
			return nil, err
		}
		st, err := a.back.Stats(ctx, tenantOf(ctx), id)
		if err != nil {
			return nil, err
		}
		return &body[wire.Stats]{toStats(st)}, nil
	})
	a.stream(huma.Operation{
		OperationID: "get-logs", Method: http.MethodGet, Path: "/v1/sandboxes/{id}/logs", Tags: []string{"sandboxes"},
		Summary:    "Read a sandbox's console",
		Parameters: []*huma.Param{idParam(), queryParam("follow", "boolean", "Stay and tell what comes, until the sandbox ends", false)},
		Responses:  bytesResponse("200", "text/plain", "What the agent and the start command wrote"),
	}, a.logs)
}

func (a *API) createSandbox(ctx context.Context, in *body[wire.CreateSandbox]) (*body[wire.Sandbox], error) {
	p, err := fromNetwork(in.Body.Network)
	if err != nil {
		return nil, err
	}
	timeout, err := seconds(in.Body.Timeout)
	if err != nil {
		return nil, err
	}
	idle, err := seconds(in.Body.IdleTimeout)
	if err != nil {
		return nil, err
	}
	var volumes []sandbox.VolumeMount
	for _, v := range in.Body.Volumes {
		volumes = append(volumes, sandbox.VolumeMount{ID: v.Volume, Path: v.Path, ReadOnly: v.ReadOnly})
	}
	start := time.Now()
	sb, err := a.back.Create(ctx, tenantOf(ctx), manager.CreateRequest{
		Template: in.Body.Template, Runtime: in.Body.Runtime, Resources: sandbox.Resources(in.Body.Resources), Network: p,
		Env: in.Body.Env, Metadata: in.Body.Metadata, User: in.Body.User, Workdir: in.Body.Workdir, Hostname: in.Body.Hostname,
		Timeout: timeout, Snapshot: in.Body.Snapshot, OnTimeout: in.Body.OnTimeout, IdleTimeout: idle, HibernateKind: in.Body.HibernateKind, Volumes: volumes, ManualWake: in.Body.ManualWake,
		EphemeralEnv:  in.Body.EphemeralEnv,
		PublicTraffic: in.Body.PublicTraffic, HostHeader: in.Body.HostHeader,
	})
	a.metrics.created(in.Body.Runtime, sb, err, time.Since(start))
	if err != nil {
		return nil, err
	}
	return &body[wire.Sandbox]{toSandbox(sb, true)}, nil
}

type listInput struct {
	State    []string `query:"state" enum:"creating,running,suspended,hibernated,killed,failed" doc:"Any of these states, comma-separated; default: all"`
	Live     bool     `query:"live" doc:"Only those that have not ended"`
	Metadata string   `query:"metadata" maxLength:"8192" doc:"Each of these labels, as k=v&k=v, percent-encoded once more"`
	Template string   `query:"template" maxLength:"256" doc:"Made of this template, by name or id"`
	Runtime  string   `query:"runtime" maxLength:"64"`
	Limit    int      `query:"limit" minimum:"1" maximum:"1000" default:"100"`
	Token    string   `query:"token" maxLength:"512" doc:"next_token of the page before"`
}

func (a *API) listSandboxes(ctx context.Context, in *listInput) (*body[wire.SandboxList], error) {
	f := manager.ListFilter{Template: in.Template, Runtime: in.Runtime, Limit: in.Limit, Token: in.Token}
	for _, s := range in.State {
		f.States = append(f.States, sandbox.State(s))
	}
	switch {
	case in.Live && f.States != nil:
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "give one of state and live")
	case !in.Live && f.States == nil:
		f.States = sandbox.States() // without, the manager gives live ones alone
	}
	if in.Metadata != "" {
		q, err := url.ParseQuery(in.Metadata)
		if err != nil {
			return nil, sandbox.Errorf(sandbox.CodeInvalid, "metadata is not k=v&k=v: %s", strings.ToValidUTF8(err.Error(), "?"))
		}
		f.Metadata = map[string]string{}
		for k := range q {
			f.Metadata[k] = q.Get(k)
		}
	}
	page, next, err := a.back.List(ctx, tenantOf(ctx), f)
	if err != nil {
		return nil, err
	}
	out := wire.SandboxList{Sandboxes: make([]wire.Sandbox, 0, len(page)), NextToken: next}
	for _, sb := range page {
		out.Sandboxes = append(out.Sandboxes, toSandbox(sb, false))
	}
	return &body[wire.SandboxList]{out}, nil
}

func (a *API) logs(w http.ResponseWriter, r *http.Request) error {
	id, err := sandbox.ParseID(r.PathValue("id"))
	if err != nil {
		return err
	}
	follow, err := boolQuery(r, "follow")
	if err != nil {
		return err
	}
	src, err := a.back.Logs(r.Context(), tenantOf(r.Context()), id, follow)
	if err != nil {
		return err
	}
	defer src.Close()
	// A reader that waits for more does not see the client go.
	defer context.AfterFunc(r.Context(), func() { src.Close() })()
	w.Header().Set("Content-Type", "text/plain")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	rc := http.NewResponseController(w)
	if follow {
		rc.Flush()
	}
	return a.sent(copyStream(w, src, flushIf(follow, rc)))
}

func flushIf(on bool, rc *http.ResponseController) func() error {
	if !on {
		return nil
	}
	return rc.Flush
}

// sent ends an answer whose body was copied from a sandbox. The status is out,
// so a copy that did not come to its end can only break off.
func (a *API) sent(_ int64, err error) error {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	return nil
}
