package client

import (
	"context"
	"net/url"

	"github.com/warrenhq/warren/internal/api/wire"
)

// SetPool adds a pool, or changes the size of the one of the same template,
// runtime and resources.
func (c *Client) SetPool(ctx context.Context, r wire.SetPool) (wire.Pool, error) {
	var out wire.Pool
	return out, c.json(ctx, call{method: "PUT", path: "/v1/pools", body: r}, &out)
}

// Pools lists pools, the oldest first.
func (c *Client) Pools(ctx context.Context) ([]wire.Pool, error) {
	var out wire.PoolList
	err := c.json(ctx, call{method: "GET", path: "/v1/pools"}, &out)
	return out.Pools, err
}

// Pool gets one pool by its id, or by its template.
func (c *Client) Pool(ctx context.Context, name string) (wire.Pool, error) {
	var out wire.Pool
	return out, c.json(ctx, call{method: "GET", path: "/v1/pools/" + url.PathEscape(name)}, &out)
}

// RemovePool removes a pool, by its id or its template, and its members.
func (c *Client) RemovePool(ctx context.Context, name string) error {
	return c.json(ctx, call{method: "DELETE", path: "/v1/pools/" + url.PathEscape(name)}, nil)
}
