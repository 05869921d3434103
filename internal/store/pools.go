package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/warrenhq/warren/internal/sandbox"
)

// poolData is the part of a Pool that no query asks for.
type poolData struct {
	Template  string            `json:"template"`
	Runtime   string            `json:"runtime"`
	Resources sandbox.Resources `json:"resources"`
	Ready     int               `json:"ready"`
}

const poolColumns = `id, tenant, created_at, capture, data`

func scanPool(row scanner) (Pool, error) {
	var (
		p       Pool
		created int64
		rest    string
		d       poolData
	)
	if err := row.Scan(&p.ID, &p.Tenant, &created, &p.Capture, &rest); err != nil {
		return p, err
	}
	if err := json.Unmarshal([]byte(rest), &d); err != nil {
		return p, fmt.Errorf("data of %s: %w", p.ID, err)
	}
	p.Template, p.Runtime, p.Resources, p.Ready = d.Template, d.Runtime, d.Resources, d.Ready
	p.CreatedAt = moment(created)
	return p, nil
}

// PutPool implements Pools.
func (s *SQLite) PutPool(ctx context.Context, p Pool) error {
	rest, err := json.Marshal(poolData{Template: p.Template, Runtime: p.Runtime, Resources: p.Resources, Ready: p.Ready})
	if err != nil {
		return wrap(s.path, "record the pool", err)
	}
	return s.write(ctx, "record the pool", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO pools (`+poolColumns+`) VALUES (?, ?, ?, '', ?)
			ON CONFLICT (id) DO UPDATE SET tenant = excluded.tenant, data = excluded.data`,
			p.ID, p.Tenant, nanos(p.CreatedAt), string(rest))
		return err
	})
}

// SetPoolCapture implements Pools.
func (s *SQLite) SetPoolCapture(ctx context.Context, id, capture string) error {
	return s.write(ctx, "record the pool's capture", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `UPDATE pools SET capture = ? WHERE id = ?`, capture, id)
		return err
	})
}

// GetPool implements Pools.
func (s *SQLite) GetPool(ctx context.Context, id string) (Pool, error) {
	p, err := scanPool(s.r.QueryRowContext(ctx, `SELECT `+poolColumns+` FROM pools WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return p, sandbox.Errorf(sandbox.CodeNotFound, "no pool %q: `warren pool ls` shows what there is", id)
	}
	return p, wrap(s.path, "read the pool", err)
}

// ListPools implements Pools.
func (s *SQLite) ListPools(ctx context.Context, tenant string) ([]Pool, error) {
	return collect(ctx, s, "list the pools", scanPool, `SELECT `+poolColumns+` FROM pools WHERE ? = '' OR tenant = ? ORDER BY created_at, id`, tenant, tenant)
}

// DeletePool implements Pools.
func (s *SQLite) DeletePool(ctx context.Context, id string) error {
	return s.write(ctx, "remove the pool", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM pools WHERE id = ?`, id)
		return err
	})
}
