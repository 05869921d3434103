package client

import (
	"context"
	"net/url"

	"github.com/warrenhq/warren/internal/api/wire"
)

// CreateVolume makes an empty volume.
func (c *Client) CreateVolume(ctx context.Context, name string) (wire.Volume, error) {
	var out wire.Volume
	return out, c.json(ctx, call{method: "POST", path: "/v1/volumes", body: wire.CreateVolume{Name: name}}, &out)
}

// Volumes lists all volumes, by name.
func (c *Client) Volumes(ctx context.Context) ([]wire.Volume, error) {
	var out wire.VolumeList
	err := c.json(ctx, call{method: "GET", path: "/v1/volumes"}, &out)
	return out.Volumes, err
}

// RemoveVolume removes a volume, by name or id, with all that is in it.
func (c *Client) RemoveVolume(ctx context.Context, nameOrID string) error {
	return c.json(ctx, call{method: "DELETE", path: "/v1/volumes/" + url.PathEscape(nameOrID)}, nil)
}
