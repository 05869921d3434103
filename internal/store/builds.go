package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/warrenhq/warren/internal/sandbox"
)

// buildData is the part of a Build that no query asks for.
type buildData struct {
	Tags       []string          `json:"tags"`
	Resources  sandbox.Resources `json:"resources"`
	Reason     string            `json:"reason,omitempty"`
	Step       string            `json:"step,omitempty"`
	FinishedAt int64             `json:"finished_at,omitempty"`
}

// NameTemplate implements Builds.
func (s *SQLite) NameTemplate(ctx context.Context, t NamedTemplate) (NamedTemplate, error) {
	err := s.write(ctx, "record the template's name", func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO named_templates (id, tenant, name, created_at) VALUES (?, ?, ?, ?)
			ON CONFLICT (tenant, name) DO NOTHING`, t.ID, t.Tenant, t.Name, nanos(t.CreatedAt)); err != nil {
			return err
		}
		var err error
		t, err = scanNamed(tx.QueryRowContext(ctx, `SELECT id, tenant, name, created_at FROM named_templates WHERE tenant = ? AND name = ?`, t.Tenant, t.Name))
		return err
	})
	return t, err
}

func scanNamed(row scanner) (NamedTemplate, error) {
	var t NamedTemplate
	var created int64
	err := row.Scan(&t.ID, &t.Tenant, &t.Name, &created)
	t.CreatedAt = moment(created)
	return t, err
}

// FindNamed implements Builds.
func (s *SQLite) FindNamed(ctx context.Context, tenant, nameOrID string) (NamedTemplate, error) {
	t, err := scanNamed(s.r.QueryRowContext(ctx, `SELECT id, tenant, name, created_at FROM named_templates
		WHERE tenant = ? AND (name = ? OR id = ?) ORDER BY name = ? DESC LIMIT 1`, tenant, nameOrID, nameOrID, nameOrID))
	if errors.Is(err, sql.ErrNoRows) {
		return t, sandbox.Errorf(sandbox.CodeNotFound, "there is no template %q", nameOrID)
	}
	return t, wrap(s.path, "read the template's name", err)
}

// ForgetNamed implements Builds.
func (s *SQLite) ForgetNamed(ctx context.Context, tenant, id string) error {
	return s.write(ctx, "forget the template", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM named_templates WHERE tenant = ? AND id = ?`, tenant, id)
		return err
	})
}

const buildColumns = `id, tenant, template, state, created_at, data`

func scanBuild(row scanner) (Build, error) {
	var (
		b       Build
		created int64
		rest    string
		d       buildData
	)
	if err := row.Scan(&b.ID, &b.Tenant, &b.Template, &b.State, &created, &rest); err != nil {
		return b, err
	}
	if err := json.Unmarshal([]byte(rest), &d); err != nil {
		return b, fmt.Errorf("data of %s: %w", b.ID, err)
	}
	b.Tags, b.Resources, b.Reason, b.Step = d.Tags, d.Resources, d.Reason, d.Step
	b.CreatedAt, b.FinishedAt = moment(created), moment(d.FinishedAt)
	return b, nil
}

// PutBuild implements Builds.
func (s *SQLite) PutBuild(ctx context.Context, b Build) error {
	return s.putBuild(ctx, b, "")
}

// MoveBuild implements Builds.
func (s *SQLite) MoveBuild(ctx context.Context, b Build, from BuildState) error {
	return s.putBuild(ctx, b, from)
}

func (s *SQLite) putBuild(ctx context.Context, b Build, from BuildState) error {
	rest, err := json.Marshal(buildData{Tags: b.Tags, Resources: b.Resources, Reason: b.Reason, Step: b.Step, FinishedAt: nanos(b.FinishedAt)})
	if err != nil {
		return wrap(s.path, "record the build", err)
	}
	return s.write(ctx, "record the build", func(tx *sql.Tx) error {
		if from == "" {
			_, err := tx.ExecContext(ctx, `INSERT INTO builds (`+buildColumns+`) VALUES (?, ?, ?, ?, ?, ?)`,
				b.ID, b.Tenant, b.Template, b.State, nanos(b.CreatedAt), string(rest))
			return err
		}
		res, err := tx.ExecContext(ctx, `UPDATE builds SET state = ?, data = ? WHERE id = ? AND state = ?`, b.State, string(rest), b.ID, from)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil {
			return err
		} else if n == 0 {
			return sandbox.Errorf(sandbox.CodeConflict, "the build %s is not %s", b.ID, from)
		}
		return nil
	})
}

// GetBuild implements Builds.
func (s *SQLite) GetBuild(ctx context.Context, id string) (Build, error) {
	b, err := scanBuild(s.r.QueryRowContext(ctx, `SELECT `+buildColumns+` FROM builds WHERE id = ?`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return b, sandbox.Errorf(sandbox.CodeNotFound, "there is no build %q", id)
	}
	return b, wrap(s.path, "read the build", err)
}

// ListBuilds implements Builds.
func (s *SQLite) ListBuilds(ctx context.Context, template string, state BuildState) ([]Build, error) {
	return collect(ctx, s, "list the builds", scanBuild, `SELECT `+buildColumns+` FROM builds WHERE (? = '' OR template = ?) AND (? = '' OR state = ?)
		ORDER BY created_at DESC, id`, template, template, state, state)
}

// DeleteBuild implements Builds.
func (s *SQLite) DeleteBuild(ctx context.Context, id string) error {
	return s.write(ctx, "remove the build", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM builds WHERE id = ?`, id)
		return err
	})
}
