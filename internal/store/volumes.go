package store

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Volume is the record of a volume: a directory that outlives sandboxes.
type Volume struct {
	ID        string
	Tenant    string
	Name      string // unique in its tenant
	Token     string // opens its content; a secret
	CreatedAt time.Time
}

// Volumes holds the volumes' records.
type Volumes interface {
	// InsertVolume adds a record. CodeExists: the tenant has one of that name,
	// or there is one of that ID.
	InsertVolume(ctx context.Context, v Volume) error
	// GetVolume gives a record, whoever's it is. CodeNotFound: there is none.
	GetVolume(ctx context.Context, id string) (Volume, error)
	// VolumeNamed gives a tenant's record by name. CodeNotFound: it has none.
	VolumeNamed(ctx context.Context, tenant, name string) (Volume, error)
	// ListVolumes gives a tenant's volumes ("" is every tenant's), by name.
	ListVolumes(ctx context.Context, tenant string) ([]Volume, error)
	// DeleteVolume removes a record; it is nil for one that is gone.
	DeleteVolume(ctx context.Context, id string) error
}

const volumeColumns = `id, tenant, name, token, created_at`

func scanVolume(row scanner) (Volume, error) {
	var v Volume
	var created int64
	err := row.Scan(&v.ID, &v.Tenant, &v.Name, &v.Token, &created)
	v.CreatedAt = moment(created)
	return v, err
}

// InsertVolume implements Volumes.
func (s *SQLite) InsertVolume(ctx context.Context, v Volume) error {
	return s.write(ctx, "record the volume", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `INSERT INTO volumes (`+volumeColumns+`) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			v.ID, v.Tenant, v.Name, v.Token, nanos(v.CreatedAt))
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n > 0 {
			return err
		}
		return sandbox.Errorf(sandbox.CodeExists, "there is a volume %q already: remove it, or choose another name", v.Name)
	})
}

func (s *SQLite) volume(ctx context.Context, shown, where string, args ...any) (Volume, error) {
	v, err := scanVolume(s.r.QueryRowContext(ctx, `SELECT `+volumeColumns+` FROM volumes WHERE `+where, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return v, sandbox.Errorf(sandbox.CodeNotFound, "no volume %q: `warren volume ls` shows what there is", shown)
	}
	return v, wrap(s.path, "read the volume", err)
}

// GetVolume implements Volumes.
func (s *SQLite) GetVolume(ctx context.Context, id string) (Volume, error) {
	return s.volume(ctx, id, `id = ?`, id)
}

// VolumeNamed implements Volumes.
func (s *SQLite) VolumeNamed(ctx context.Context, tenant, name string) (Volume, error) {
	return s.volume(ctx, name, `tenant = ? AND name = ?`, tenant, name)
}

// ListVolumes implements Volumes.
func (s *SQLite) ListVolumes(ctx context.Context, tenant string) ([]Volume, error) {
	return collect(ctx, s, "list the volumes", scanVolume, `SELECT `+volumeColumns+` FROM volumes WHERE ? = '' OR tenant = ? ORDER BY name, id`, tenant, tenant)
}

// DeleteVolume implements Volumes.
func (s *SQLite) DeleteVolume(ctx context.Context, id string) error {
	return s.write(ctx, "remove the volume", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM volumes WHERE id = ?`, id)
		return err
	})
}
