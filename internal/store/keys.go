package store

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

const keyColumns = `id, tenant, name, prefix, hash, created_at, last_used_at`

func scanKey(row scanner) (Key, error) {
	var k Key
	var hash []byte
	var created, used int64
	if err := row.Scan(&k.ID, &k.Tenant, &k.Name, &k.Prefix, &hash, &created, &used); err != nil {
		return k, err
	}
	copy(k.Hash[:], hash)
	k.CreatedAt, k.LastUsedAt = moment(created), moment(used)
	return k, nil
}

// InsertKey implements Keys.
func (s *SQLite) InsertKey(ctx context.Context, k Key) error {
	return s.write(ctx, "record the key", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO keys (`+keyColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)`,
			k.ID, k.Tenant, k.Name, k.Prefix, k.Hash[:], nanos(k.CreatedAt), nanos(k.LastUsedAt))
		if isUnique(err) {
			return sandbox.Errorf(sandbox.CodeExists, "key %q exists already", k.ID)
		}
		return err
	})
}

// KeyByHash implements Keys.
func (s *SQLite) KeyByHash(ctx context.Context, hash [32]byte) (Key, error) {
	k, err := scanKey(s.r.QueryRowContext(ctx, `SELECT `+keyColumns+` FROM keys WHERE hash = ?`, hash[:]))
	if errors.Is(err, sql.ErrNoRows) {
		return k, sandbox.Errorf(sandbox.CodeNotFound, "no such key")
	}
	return k, wrap(s.path, "read the key", err)
}

// ListKeys implements Keys.
func (s *SQLite) ListKeys(ctx context.Context, tenant string) ([]Key, error) {
	query, args := `SELECT `+keyColumns+` FROM keys`, []any{}
	if tenant != "" {
		query, args = query+` WHERE tenant = ?`, append(args, tenant)
	}
	return collect(ctx, s, "list the keys", scanKey, query+` ORDER BY created_at, id`, args...)
}

// DeleteKey implements Keys.
func (s *SQLite) DeleteKey(ctx context.Context, tenant, id string) error {
	return s.write(ctx, "remove the key", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM keys WHERE id = ? AND tenant = ?`, id, tenant)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil {
			return err
		} else if n == 0 {
			return sandbox.Errorf(sandbox.CodeNotFound, "no key %q: `warren key ls` shows what there is", id)
		}
		return nil
	})
}

// TouchKey implements Keys.
func (s *SQLite) TouchKey(ctx context.Context, id string, at time.Time) error {
	return s.write(ctx, "note the key's use", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE keys SET last_used_at = ? WHERE id = ?`, nanos(at), id)
		return err
	})
}
