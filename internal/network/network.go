// Package network gives every sandbox a network of its own.
package network

import (
	"context"
	"log/slog"
	"net/netip"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Config is what Open needs.
type Config struct {
	Instance  string           // host.Instance of the state directory
	RunDir    string           // /run/warren/<instance>: netns pins live in RunDir/netns
	StateDir  string           // network.json, the chosen address range, lives here
	HostDir   string           // what daemons of one host share; "" is /run/warren
	PoolSize  int              // slots kept ready; 0 is DefaultPoolSize, negative is none
	Resolvers []netip.AddrPort // upstream DNS servers; empty follows the host's /etc/resolv.conf
	Log       *slog.Logger     // faults of background work; nil discards them
}

// Network hands out slots.
type Network struct{}

// Open starts the network of one daemon.
func Open(ctx context.Context, cfg Config) (*Network, error) {
	return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the network is being written")
}

// Acquire gives a sandbox a slot of its own under policy p.
func (n *Network) Acquire(ctx context.Context, id sandbox.ID, p sandbox.NetworkPolicy) (sandbox.Link, error) {
	return sandbox.Link{}, nil
}

// SetPolicy changes a live sandbox's policy.
func (n *Network) SetPolicy(ctx context.Context, l sandbox.Link, p sandbox.NetworkPolicy) error {
	return nil
}

// Adopt takes over a slot that an earlier daemon gave out.
func (n *Network) Adopt(ctx context.Context, l sandbox.Link, id sandbox.ID, p sandbox.NetworkPolicy) error {
	return nil
}

// Release destroys a slot; it is idempotent.
func (n *Network) Release(ctx context.Context, l sandbox.Link) error { return nil }

// Sweep removes every slot that is neither in inUse nor pooled.
func (n *Network) Sweep(ctx context.Context, inUse map[int]sandbox.ID) error { return nil }

// Capacity counts slots.
func (n *Network) Capacity() (used, total int) { return 0, 0 }

// Check tells what on this host keeps sandboxes from the network.
func (n *Network) Check(ctx context.Context) []*sandbox.Error { return nil }

// Resolver is the address that sandboxes ask for names.
func (n *Network) Resolver() netip.Addr { return netip.Addr{} }

// Close stops the goroutines and the resolver; slots in use stay.
func (n *Network) Close() error { return nil }

// Validate checks a policy.
func Validate(p sandbox.NetworkPolicy) error { return nil }
