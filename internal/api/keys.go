package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
)

func (a *API) registerKeys() {
	register(a, huma.Operation{
		OperationID: "create-key", Method: http.MethodPost, Path: "/v1/keys", Tags: []string{"keys"},
		Summary: "Make an API key", DefaultStatus: http.StatusCreated,
		Description: "For the caller's tenant. The key is told in this answer and never again.",
	}, func(ctx context.Context, in *body[wire.CreateKey]) (*body[wire.Key], error) {
		k, secret, err := a.back.CreateKey(ctx, tenantOf(ctx), in.Body.Name)
		if err != nil {
			return nil, err
		}
		return &body[wire.Key]{toKey(k, secret)}, nil
	})
	register(a, huma.Operation{
		OperationID: "list-keys", Method: http.MethodGet, Path: "/v1/keys", Tags: []string{"keys"}, Summary: "List API keys",
	}, func(ctx context.Context, _ *struct{}) (*body[wire.KeyList], error) {
		keys, err := a.back.Keys(ctx, tenantOf(ctx))
		if err != nil {
			return nil, err
		}
		out := wire.KeyList{Keys: make([]wire.Key, 0, len(keys))}
		for _, k := range keys {
			out.Keys = append(out.Keys, toKey(k, ""))
		}
		return &body[wire.KeyList]{out}, nil
	})
	register(a, huma.Operation{
		OperationID: "delete-key", Method: http.MethodDelete, Path: "/v1/keys/{id}", Tags: []string{"keys"},
		Summary: "Revoke an API key", Description: "It stops working at once.",
	}, func(ctx context.Context, in *struct {
		ID string `path:"id" maxLength:"64" doc:"The key's id, not the key"`
	}) (*none, error) {
		return nil, a.back.RemoveKey(ctx, tenantOf(ctx), in.ID)
	})
}
