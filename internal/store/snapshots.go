package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
)

// snapshotData is the part of a Snapshot that no query asks for.
type snapshotData struct {
	Kind           sandbox.SnapshotKind  `json:"kind"`
	Parent         string                `json:"parent,omitempty"`
	Runtime        string                `json:"runtime"`
	RuntimeVersion string                `json:"runtime_version,omitempty"`
	Template       string                `json:"template"`
	TemplateID     string                `json:"template_id"`
	Resources      sandbox.Resources     `json:"resources"`
	Network        sandbox.NetworkPolicy `json:"network"`
	User           string                `json:"user,omitempty"`
	Workdir        string                `json:"workdir,omitempty"`
	Volumes        []sandbox.VolumeMount `json:"volumes,omitempty"`
	Metadata       map[string]string     `json:"metadata,omitempty"`
	SizeBytes      int64                 `json:"size_bytes"`
	Layers         []string              `json:"layers"`
	Token          string                `json:"token,omitempty"`
	Env            map[string]string     `json:"env,omitempty"`
	EphemeralEnv   []string              `json:"ephemeral_env,omitempty"`
	Transient      bool                  `json:"transient,omitempty"`
}

const snapshotColumns = `id, tenant, name, source, hidden, created_at, data`

func scanSnapshot(row scanner) (Snapshot, error) {
	var (
		s       Snapshot
		created int64
		rest    string
		d       snapshotData
	)
	if err := row.Scan(&s.ID, &s.Tenant, &s.Name, &s.Source, &s.Hidden, &created, &rest); err != nil {
		return s, err
	}
	if err := json.Unmarshal([]byte(rest), &d); err != nil {
		return s, fmt.Errorf("data of %s: %w", s.ID, err)
	}
	s.Kind, s.Parent, s.Runtime, s.RuntimeVersion = d.Kind, d.Parent, d.Runtime, d.RuntimeVersion
	s.Template, s.TemplateID, s.Resources, s.Network = d.Template, d.TemplateID, d.Resources, d.Network
	s.User, s.Workdir, s.Volumes, s.Metadata, s.SizeBytes = d.User, d.Workdir, d.Volumes, d.Metadata, d.SizeBytes
	s.Layers, s.Token, s.Env, s.EphemeralEnv, s.Transient = d.Layers, d.Token, d.Env, d.EphemeralEnv, d.Transient
	s.CreatedAt = moment(created)
	return s, nil
}

// InsertSnapshot implements Snapshots.
func (s *SQLite) InsertSnapshot(ctx context.Context, n Snapshot) error {
	rest, err := json.Marshal(snapshotData{
		Kind: n.Kind, Parent: n.Parent, Runtime: n.Runtime, RuntimeVersion: n.RuntimeVersion,
		Template: n.Template, TemplateID: n.TemplateID, Resources: n.Resources, Network: n.Network,
		User: n.User, Workdir: n.Workdir, Volumes: n.Volumes, Metadata: n.Metadata, SizeBytes: n.SizeBytes,
		Layers: n.Layers, Token: n.Token, Env: n.Env, EphemeralEnv: n.EphemeralEnv, Transient: n.Transient,
	})
	if err != nil {
		return wrap(s.path, "record the snapshot", err)
	}
	return s.write(ctx, "record the snapshot", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO snapshots (`+snapshotColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)`,
			n.ID, n.Tenant, n.Name, string(n.Source), n.Hidden, nanos(n.CreatedAt), string(rest))
		if isUnique(err) {
			return sandbox.Errorf(sandbox.CodeExists, "there is a snapshot %q already: remove it, or choose another name", n.Name)
		}
		return err
	})
}

// GetSnapshot implements Snapshots.
func (s *SQLite) GetSnapshot(ctx context.Context, id string) (Snapshot, error) {
	return s.snapshot(ctx, `id = ?`, id)
}

// SnapshotNamed implements Snapshots.
func (s *SQLite) SnapshotNamed(ctx context.Context, tenant, name string) (Snapshot, error) {
	return s.snapshot(ctx, `name = ? AND name <> '' AND tenant = ?`, name, tenant)
}

func (s *SQLite) snapshot(ctx context.Context, where string, args ...any) (Snapshot, error) {
	n, err := scanSnapshot(s.r.QueryRowContext(ctx, `SELECT `+snapshotColumns+` FROM snapshots WHERE `+where, args...))
	if errors.Is(err, sql.ErrNoRows) {
		return n, sandbox.Errorf(sandbox.CodeNotFound, "no snapshot %q: `warren snapshot ls` shows what there is", args[0])
	}
	return n, wrap(s.path, "read the snapshot", err)
}

// ListSnapshots implements Snapshots.
func (s *SQLite) ListSnapshots(ctx context.Context, f SnapshotFilter) ([]Snapshot, string, error) {
	where, args := []string{"1"}, []any{}
	add := func(cond string, a ...any) {
		where = append(where, cond)
		args = append(args, a...)
	}
	if f.Tenant != "" {
		add("tenant = ?", f.Tenant)
	}
	if f.Source != "" {
		add("source = ?", string(f.Source))
	}
	if f.Name != "" {
		add("name = ?", f.Name)
	}
	if !f.Hidden {
		add("hidden = 0")
	}
	if f.Token != "" {
		at, id, err := parseToken(f.Token)
		if err != nil {
			return nil, "", err
		}
		add("(created_at, id) < (?, ?)", at, string(id))
	}
	query := `SELECT ` + snapshotColumns + ` FROM snapshots WHERE ` + strings.Join(where, " AND ") + ` ORDER BY created_at DESC, id DESC`
	if f.Limit > 0 {
		query += ` LIMIT ` + strconv.Itoa(f.Limit+1)
	}
	page, err := collect(ctx, s, "list the snapshots", scanSnapshot, query, args...)
	if err != nil || f.Limit <= 0 || len(page) <= f.Limit {
		return page, "", err
	}
	page = page[:f.Limit]
	last := page[len(page)-1]
	return page, makeToken(last.CreatedAt, sandbox.ID(last.ID)), nil
}

// DeleteSnapshot implements Snapshots.
func (s *SQLite) DeleteSnapshot(ctx context.Context, id string) error {
	return s.write(ctx, "remove the snapshot", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `DELETE FROM snapshots WHERE id = ?`, id)
		return err
	})
}
