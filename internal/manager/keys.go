package manager

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"regexp"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

// DefaultTenant is the tenant of the first key.
const DefaultTenant = template.SharedTenant

// secretPattern is the form of an API key, E2B's.
var secretPattern = regexp.MustCompile(`^e2b_[0-9a-f]{40}$`)

// keyPrefix is how many characters of a secret are kept to tell keys apart:
// "e2b_" and 16 of its 160 bits.
const keyPrefix = 8

func keyOf(k store.Key) Key {
	return Key{ID: k.ID, Name: k.Name, Tenant: k.Tenant, Prefix: k.Prefix, CreatedAt: k.CreatedAt, LastUsedAt: k.LastUsedAt}
}

// CreateKey makes an API key of a tenant. The secret is "e2b_" and 40 hex
// digits; only its SHA-256 is kept.
func (m *Manager) CreateKey(ctx context.Context, tenant, name string) (Key, string, error) {
	if len(name) > maxName || !clean(name) {
		return Key{}, "", invalid("the key's name %q: at most %d bytes, no control characters", short(name), maxName)
	}
	if tenant == "" || len(tenant) > maxName || !clean(tenant) {
		return Key{}, "", invalid("the tenant's name %q: 1 to %d bytes, no control characters", short(tenant), maxName)
	}
	var random [20]byte
	rand.Read(random[:])
	secret := "e2b_" + hex.EncodeToString(random[:])
	var id [8]byte
	rand.Read(id[:])
	k := store.Key{
		ID: "key" + hex.EncodeToString(id[:]), Tenant: tenant, Name: name, Prefix: secret[:keyPrefix],
		Hash: sha256.Sum256([]byte(secret)), CreatedAt: m.now(),
	}
	if err := m.store.InsertKey(ctx, k); err != nil {
		return Key{}, "", err
	}
	return keyOf(k), secret, nil
}

// FirstKey makes a key of the default tenant if the store has none of any
// tenant. The secret is "" where there was one.
func (m *Manager) FirstKey(ctx context.Context) (Key, string, error) {
	all, err := m.store.ListKeys(ctx, "")
	if err != nil || len(all) > 0 {
		return Key{}, "", err
	}
	return m.CreateKey(ctx, DefaultTenant, "first")
}

// Keys lists a tenant's keys, the oldest first.
func (m *Manager) Keys(ctx context.Context, tenant string) ([]Key, error) {
	all, err := m.store.ListKeys(ctx, tenant)
	if err != nil {
		return nil, err
	}
	keys := make([]Key, len(all))
	for i, k := range all {
		keys[i] = keyOf(k)
	}
	return keys, nil
}

// RemoveKey removes a tenant's key: its secret is refused from then on.
func (m *Manager) RemoveKey(ctx context.Context, tenant, id string) error {
	if err := m.store.DeleteKey(ctx, tenant, id); err != nil {
		return err
	}
	m.keyUses.forget(id)
	return nil
}

// Authenticate gives the tenant of an API key's secret. CodeUnauthenticated:
// there is no such key.
func (m *Manager) Authenticate(ctx context.Context, secret string) (tenant string, err error) {
	refused := sandbox.Errorf(sandbox.CodeUnauthenticated, "no valid API key: `warren key create` on the daemon's host makes one")
	if !secretPattern.MatchString(secret) {
		return "", refused
	}
	// The lookup is by the hash of 160 random bits: its timing tells nothing
	// of use.
	k, err := m.store.KeyByHash(ctx, sha256.Sum256([]byte(secret)))
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		return "", refused
	}
	if err != nil {
		return "", err
	}
	if now := m.now(); m.keyUses.due(k.ID, now) {
		m.tasks.run(func() {
			if err := m.store.TouchKey(m.working, k.ID, now); err != nil {
				m.log.Warn("note a key's use", "key", k.ID, "error", err)
			}
		})
	}
	return k.Tenant, nil
}
