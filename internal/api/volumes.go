package api

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/store"
)

func toVolume(v store.Volume) wire.Volume {
	return wire.Volume{ID: v.ID, Name: v.Name, CreatedAt: v.CreatedAt.UTC()}
}

func (a *API) registerVolumes() {
	register(a, huma.Operation{
		OperationID: "create-volume", Method: http.MethodPost, Path: "/v1/volumes", Tags: []string{"volumes"},
		Summary: "Make an empty volume", DefaultStatus: http.StatusCreated,
		Description: "A directory that outlives sandboxes and can be mounted into several: see volumes of a create.",
	}, func(ctx context.Context, in *body[wire.CreateVolume]) (*body[wire.Volume], error) {
		v, err := a.back.CreateVolume(ctx, tenantOf(ctx), in.Body.Name)
		if err != nil {
			return nil, err
		}
		return &body[wire.Volume]{toVolume(v)}, nil
	})
	register(a, huma.Operation{
		OperationID: "list-volumes", Method: http.MethodGet, Path: "/v1/volumes", Tags: []string{"volumes"}, Summary: "List volumes",
	}, func(ctx context.Context, _ *struct{}) (*body[wire.VolumeList], error) {
		all, err := a.back.Volumes(ctx, tenantOf(ctx))
		if err != nil {
			return nil, err
		}
		out := wire.VolumeList{Volumes: make([]wire.Volume, 0, len(all))}
		for _, v := range all {
			out.Volumes = append(out.Volumes, toVolume(v))
		}
		return &body[wire.VolumeList]{out}, nil
	})
	register(a, huma.Operation{
		OperationID: "delete-volume", Method: http.MethodDelete, Path: "/v1/volumes/{id}", Tags: []string{"volumes"},
		Summary: "Remove a volume", Description: "With all that is in it. conflict: a live sandbox has it.",
	}, func(ctx context.Context, in *struct {
		ID string `path:"id" maxLength:"128" doc:"The volume's name or id"`
	}) (*none, error) {
		return nil, a.back.RemoveVolume(ctx, tenantOf(ctx), in.ID)
	})
}
