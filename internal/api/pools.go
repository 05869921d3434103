package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

// ByPool is the path parameter of everything about one pool.
type ByPool struct {
	ID string `path:"id" maxLength:"256" doc:"The pool's id, or its template where there is one pool of that"`
}

func (a *API) registerPools() {
	register(a, huma.Operation{
		OperationID: "set-pool", Method: http.MethodPut, Path: "/v1/pools", Tags: []string{"pools"},
		Summary: "Keep sandboxes of a template ready",
		Description: "Adds a pool, or changes the size of the one of the same template, runtime and resources. Its members are made in the background; " +
			"a create that comes to the same template, runtime and resources gets one.",
	}, a.setPool)
	register(a, huma.Operation{
		OperationID: "list-pools", Method: http.MethodGet, Path: "/v1/pools", Tags: []string{"pools"},
		Summary: "List pools", Description: "The oldest first.",
	}, func(ctx context.Context, _ *none) (*body[wire.PoolList], error) {
		all, err := a.back.Pools(ctx, tenantOf(ctx))
		if err != nil {
			return nil, err
		}
		out := wire.PoolList{Pools: make([]wire.Pool, 0, len(all))}
		for _, p := range all {
			out.Pools = append(out.Pools, a.toPool(ctx, p, false))
		}
		return &body[wire.PoolList]{out}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-pool", Method: http.MethodGet, Path: "/v1/pools/{id}", Tags: []string{"pools"},
		Summary: "Get one pool", Description: "conflict: the template that was named has several pools.",
	}, func(ctx context.Context, in *ByPool) (*body[wire.Pool], error) {
		p, err := a.back.PoolByName(ctx, tenantOf(ctx), in.ID)
		if err != nil {
			return nil, err
		}
		return &body[wire.Pool]{a.toPool(ctx, p, true)}, nil
	})
	register(a, huma.Operation{
		OperationID: "delete-pool", Method: http.MethodDelete, Path: "/v1/pools/{id}", Tags: []string{"pools"},
		Summary: "Remove a pool", Description: "Its members are gone when the answer comes; what was claimed from it goes on.",
	}, func(ctx context.Context, in *ByPool) (*none, error) {
		return nil, a.back.RemovePool(ctx, tenantOf(ctx), in.ID)
	})
}

func (a *API) setPool(ctx context.Context, in *body[wire.SetPool]) (*body[wire.Pool], error) {
	p, err := a.back.SetPool(ctx, tenantOf(ctx), manager.PoolRequest{
		Template: in.Body.Template, Runtime: in.Body.Runtime, Resources: sandbox.Resources(in.Body.Resources), Ready: in.Body.Ready,
	})
	if err != nil {
		return nil, err
	}
	return &body[wire.Pool]{a.toPool(ctx, p, true)}, nil
}

// toPool leaves the members out where whole is not set.
func (a *API) toPool(ctx context.Context, p manager.Pool, whole bool) wire.Pool {
	out := wire.Pool{
		ID: p.ID, Template: p.Template, TemplateID: p.TemplateID, Runtime: p.Runtime, Resources: wire.Resources(p.Resources),
		Ready: p.Ready, Available: len(p.Members), Making: p.Making, Ending: p.Ending, CreatedAt: p.CreatedAt.UTC(),
	}
	if whole {
		for _, id := range p.Members {
			out.Members = append(out.Members, string(id))
		}
	}
	if n := p.Capture; n != nil {
		out.Capture = &wire.Warm{ID: n.ID, SizeBytes: n.SizeBytes, CreatedAt: n.CreatedAt.UTC()}
	}
	if p.LastError != nil {
		at := p.ErrorAt.UTC()
		// As any other error's answer: faults of ours are logged, not told.
		out.Error, out.ErrorAt = &a.toError(ctx, p.LastError).body, &at
	}
	return out
}
