package store

import (
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/warrenhq/warren/internal/sandbox"
)

// data is the part of a Record that no query asks for.
type data struct {
	Resources sandbox.Resources     `json:"resources"`
	Network   sandbox.NetworkPolicy `json:"network"`
	Env       map[string]string     `json:"env,omitempty"`
	User      string                `json:"user,omitempty"`
	Workdir   string                `json:"workdir,omitempty"`
	Hostname  string                `json:"hostname,omitempty"`
	Token     string                `json:"token,omitempty"`
	Traffic   string                `json:"traffic_token,omitempty"`
	Public    bool                  `json:"public_traffic,omitempty"`
	Host      string                `json:"host_header,omitempty"`
	Link      sandbox.Link          `json:"link"`
	Start     sandbox.StartKind     `json:"start,omitempty"`
	EndReason sandbox.Reason        `json:"end_reason,omitempty"`
	EndDetail string                `json:"end_detail,omitempty"`
	Layers    []string              `json:"layers,omitempty"`
	BootID    string                `json:"boot_id,omitempty"`

	Snapshot      string                `json:"snapshot,omitempty"`
	Parent        sandbox.ID            `json:"parent,omitempty"`
	OnTimeout     sandbox.OnTimeout     `json:"on_timeout,omitempty"`
	IdleTimeout   time.Duration         `json:"idle_timeout,omitempty"`
	HibernateKind sandbox.SnapshotKind  `json:"hibernate_kind,omitempty"`
	Volumes       []sandbox.VolumeMount `json:"volumes,omitempty"`
	ManualWake    bool                  `json:"manual_wake,omitempty"`
	SuspendedAt   int64                 `json:"suspended_at,omitempty"`
	HibernatedAt  int64                 `json:"hibernated_at,omitempty"`
	Capture       string                `json:"capture,omitempty"`
	Lifetime      time.Duration         `json:"lifetime,omitempty"`
	EphemeralEnv  []string              `json:"ephemeral_env,omitempty"`
	Instance      sandbox.ID            `json:"instance,omitempty"`
	Pool          string                `json:"pool,omitempty"`
}

const columns = `id, version, tenant, state, op, internal, reason, detail, runtime, template, template_id,
	metadata, oom_kills, created_at, started_at, expires_at, ended_at, data`

func values(r Record) ([]any, error) {
	meta, err := json.Marshal(r.Metadata)
	if err != nil {
		return nil, err
	}
	if r.Metadata == nil {
		meta = []byte("{}")
	}
	rest, err := json.Marshal(data{
		Resources: r.Resources, Network: r.Network, Env: r.Env, User: r.User, Workdir: r.Workdir,
		Hostname: r.Hostname, Token: r.Token, Traffic: r.TrafficToken, Public: r.PublicTraffic, Host: r.HostHeader, Link: r.Link, Start: r.Start,
		EndReason: r.EndReason, EndDetail: r.EndDetail, Layers: r.Layers, BootID: r.BootID,
		Snapshot: r.Snapshot, Parent: r.Parent, OnTimeout: r.OnTimeout, IdleTimeout: r.IdleTimeout, HibernateKind: r.HibernateKind, ManualWake: r.ManualWake, Volumes: r.Volumes,
		SuspendedAt: nanos(r.SuspendedAt), HibernatedAt: nanos(r.HibernatedAt),
		Capture: r.Capture, Lifetime: r.Lifetime, EphemeralEnv: r.EphemeralEnv, Instance: r.Instance, Pool: r.Pool,
	})
	if err != nil {
		return nil, err
	}
	return []any{
		string(r.ID), r.Version, r.Tenant, string(r.State), string(r.Op), r.Internal, string(r.Reason), r.Detail,
		r.Runtime, r.Template, r.TemplateID, string(meta), r.OOMKills,
		nanos(r.CreatedAt), nanos(r.StartedAt), nanos(r.ExpiresAt), nanos(r.EndedAt), string(rest),
	}, nil
}

type scanner interface{ Scan(dest ...any) error }

func scan(row scanner) (Record, error) {
	var (
		r                               Record
		meta, rest                      string
		created, started, expires, ends int64
		d                               data
	)
	err := row.Scan(&r.ID, &r.Version, &r.Tenant, &r.State, &r.Op, &r.Internal, &r.Reason, &r.Detail,
		&r.Runtime, &r.Template, &r.TemplateID, &meta, &r.OOMKills, &created, &started, &expires, &ends, &rest)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal([]byte(meta), &r.Metadata); err != nil {
		return r, fmt.Errorf("metadata of %s: %w", r.ID, err)
	}
	if len(r.Metadata) == 0 {
		r.Metadata = nil
	}
	if err := json.Unmarshal([]byte(rest), &d); err != nil {
		return r, fmt.Errorf("data of %s: %w", r.ID, err)
	}
	r.Resources, r.Network, r.Env, r.User, r.Workdir = d.Resources, d.Network, d.Env, d.User, d.Workdir
	r.Hostname, r.Token, r.Link, r.Start = d.Hostname, d.Token, d.Link, d.Start
	r.TrafficToken, r.PublicTraffic, r.HostHeader = d.Traffic, d.Public, d.Host
	r.EndReason, r.EndDetail, r.Layers, r.BootID = d.EndReason, d.EndDetail, d.Layers, d.BootID
	r.Snapshot, r.Parent, r.OnTimeout, r.IdleTimeout, r.HibernateKind, r.ManualWake, r.Volumes = d.Snapshot, d.Parent, d.OnTimeout, d.IdleTimeout, d.HibernateKind, d.ManualWake, d.Volumes
	r.SuspendedAt, r.HibernatedAt = moment(d.SuspendedAt), moment(d.HibernatedAt)
	r.Capture, r.Lifetime, r.EphemeralEnv, r.Instance, r.Pool = d.Capture, d.Lifetime, d.EphemeralEnv, d.Instance, d.Pool
	r.CreatedAt, r.StartedAt, r.ExpiresAt, r.EndedAt = moment(created), moment(started), moment(expires), moment(ends)
	return r, nil
}

func nanos(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}

func moment(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}

// Insert implements Sandboxes.
func (s *SQLite) Insert(ctx context.Context, r Record, events ...sandbox.Event) (Record, error) {
	r.Version = 1
	args, err := values(r)
	if err != nil {
		return r, wrap(s.path, "record the sandbox", err)
	}
	err = s.write(ctx, "record the sandbox", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO sandboxes (`+columns+`) VALUES (?`+strings.Repeat(", ?", len(args)-1)+`)`, args...)
		if isUnique(err) {
			return sandbox.Errorf(sandbox.CodeExists, "sandbox %s is recorded already", r.ID)
		}
		if err != nil {
			return err
		}
		return insertEvents(ctx, tx, events)
	})
	return r, err
}

// Update implements Sandboxes.
func (s *SQLite) Update(ctx context.Context, r Record, events ...sandbox.Event) (Record, error) {
	next := r
	next.Version++
	args, err := values(next)
	if err != nil {
		return r, wrap(s.path, "record the sandbox's change", err)
	}
	err = s.write(ctx, "record the sandbox's change", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `UPDATE sandboxes SET (`+columns+`) = (?`+strings.Repeat(", ?", len(args)-1)+`) WHERE id = ? AND version = ?`,
			append(args, string(r.ID), r.Version)...)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil {
			return err
		} else if n == 0 {
			var version int64
			if err := tx.QueryRowContext(ctx, `SELECT version FROM sandboxes WHERE id = ?`, string(r.ID)).Scan(&version); errors.Is(err, sql.ErrNoRows) {
				return notFound(r.ID)
			} else if err != nil {
				return err
			}
			return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s was changed meanwhile (version %d, not %d): read it again", r.ID, version, r.Version)
		}
		return insertEvents(ctx, tx, events)
	})
	if err != nil {
		return r, err
	}
	return next, nil
}

// Get implements Sandboxes.
func (s *SQLite) Get(ctx context.Context, id sandbox.ID) (Record, error) {
	r, err := scan(s.r.QueryRowContext(ctx, `SELECT `+columns+` FROM sandboxes WHERE id = ?`, string(id)))
	if errors.Is(err, sql.ErrNoRows) {
		return r, notFound(id)
	}
	return r, wrap(s.path, "read the sandbox", err)
}

// List implements Sandboxes.
func (s *SQLite) List(ctx context.Context, f Filter) ([]Record, string, error) {
	where, args := []string{"1"}, []any{}
	add := func(cond string, a ...any) {
		where = append(where, cond)
		args = append(args, a...)
	}
	if f.Tenant != "" {
		add("tenant = ?", f.Tenant)
	}
	if !f.Internal {
		add("internal = 0")
	}
	if len(f.States) > 0 {
		in := make([]any, len(f.States))
		for i, st := range f.States {
			in[i] = string(st)
		}
		add("state IN (?"+strings.Repeat(", ?", len(in)-1)+")", in...)
	}
	for k, v := range f.Metadata {
		add("EXISTS (SELECT 1 FROM json_each(metadata) AS m WHERE m.key = ? AND m.value = ?)", k, v)
	}
	if f.Template != "" {
		add("(template = ? OR template_id = ?)", f.Template, f.Template)
	}
	if f.Runtime != "" {
		add("runtime = ?", f.Runtime)
	}
	if !f.StartedFrom.IsZero() {
		add("started_at >= ?", nanos(f.StartedFrom))
	}
	beyond, order := "<", "DESC"
	if f.Oldest {
		beyond, order = ">", "ASC"
	}
	if f.Token != "" {
		at, id, err := parseToken(f.Token)
		if err != nil {
			return nil, "", err
		}
		add("(created_at, id) "+beyond+" (?, ?)", at, string(id))
	}
	query := `SELECT ` + columns + ` FROM sandboxes WHERE ` + strings.Join(where, " AND ") + ` ORDER BY created_at ` + order + `, id ` + order
	if f.Limit > 0 {
		query += ` LIMIT ` + strconv.Itoa(f.Limit+1) // one more tells whether there is a next page
	}
	page, err := s.records(ctx, query, args...)
	if err != nil || f.Limit <= 0 || len(page) <= f.Limit {
		return page, "", err
	}
	page = page[:f.Limit]
	last := page[len(page)-1]
	return page, makeToken(last.CreatedAt, last.ID), nil
}

// Unfinished implements Sandboxes.
func (s *SQLite) Unfinished(ctx context.Context) ([]Record, error) {
	return s.records(ctx, `SELECT `+columns+` FROM sandboxes WHERE state NOT IN ('killed', 'failed') OR op <> '' ORDER BY created_at, id`)
}

func (s *SQLite) records(ctx context.Context, query string, args ...any) ([]Record, error) {
	return collect(ctx, s, "list the sandboxes", scan, query, args...)
}

// SetConsole implements Sandboxes.
func (s *SQLite) SetConsole(ctx context.Context, id sandbox.ID, tail []byte) error {
	if tail == nil {
		tail = []byte{}
	}
	return s.write(ctx, "keep the console", func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO consoles (id, tail) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET tail = excluded.tail`, string(id), tail)
		var se *sqlite.Error
		if errors.As(err, &se) && se.Code() == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY {
			return notFound(id)
		}
		return err
	})
}

// Console implements Sandboxes.
func (s *SQLite) Console(ctx context.Context, id sandbox.ID) ([]byte, error) {
	var tail []byte
	err := s.r.QueryRowContext(ctx, `SELECT tail FROM consoles WHERE id = ?`, string(id)).Scan(&tail)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return tail, wrap(s.path, "read the console", err)
}

// Maintain implements Store.
func (s *SQLite) Maintain(ctx context.Context, r Retention) (pruned int, err error) {
	err = s.write(ctx, "prune the records", func(tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `DELETE FROM sandboxes WHERE state IN ('killed', 'failed') AND op = '' AND (ended_at < ?1
			OR id IN (SELECT id FROM sandboxes WHERE state IN ('killed', 'failed') ORDER BY ended_at DESC, id LIMIT -1 OFFSET ?2))`,
			nanos(r.EndedAfter), r.Ended)
		if err != nil {
			return err
		}
		n, err := res.RowsAffected()
		if err != nil {
			return err
		}
		pruned = int(n)
		_, err = tx.ExecContext(ctx, `DELETE FROM events WHERE seq <= (SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?)`, r.Events)
		return err
	})
	s.ballast.make()
	return pruned, err
}

func notFound(id sandbox.ID) *sandbox.Error {
	return sandbox.Errorf(sandbox.CodeNotFound, "no sandbox %q: `warren ls --all` shows what there is", id)
}

func isUnique(err error) bool {
	var se *sqlite.Error
	return errors.As(err, &se) && (se.Code() == sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY || se.Code() == sqlite3.SQLITE_CONSTRAINT_UNIQUE)
}

// A page token is the place of a page's last record in the order, opaque to
// clients.
func makeToken(at time.Time, id sandbox.ID) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(nanos(at), 36) + "." + string(id)))
}

func parseToken(token string) (at int64, id sandbox.ID, err error) {
	bad := sandbox.Errorf(sandbox.CodeInvalid, "the page token is not one that a list gave: leave it out to begin anew")
	b, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		return 0, "", bad
	}
	first, second, ok := strings.Cut(string(b), ".")
	if !ok {
		return 0, "", bad
	}
	if at, err = strconv.ParseInt(first, 36, 64); err != nil {
		return 0, "", bad
	}
	if id, err = sandbox.ParseID(second); err != nil {
		return 0, "", bad
	}
	return at, id, nil
}
