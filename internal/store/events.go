package store

import (
	"context"
	"database/sql"
	"errors"

	"github.com/warrenhq/warren/internal/sandbox"
)

func insertEvents(ctx context.Context, tx *sql.Tx, events []sandbox.Event) error {
	for _, e := range events {
		_, err := tx.ExecContext(ctx, `INSERT INTO events (at, sandbox, tenant, type, "from", "to", reason, detail) VALUES (?, ?, ?, ?, ?, ?, ?, ?)`,
			nanos(e.At), string(e.Sandbox), e.Tenant, string(e.Type), string(e.From), string(e.To), string(e.Reason), e.Detail)
		if err != nil {
			return err
		}
	}
	return nil
}

// EventsAfter implements Events.
func (s *SQLite) EventsAfter(ctx context.Context, tenant string, after int64, limit int) ([]sandbox.Event, error) {
	query, args := `SELECT seq, at, sandbox, tenant, type, "from", "to", reason, detail FROM events WHERE seq > ?`, []any{after}
	if tenant != "" {
		query, args = query+` AND tenant = ?`, append(args, tenant)
	}
	return collect(ctx, s, "read the events", scanEvent, query+` ORDER BY seq LIMIT ?`, append(args, limit)...)
}

func scanEvent(row scanner) (sandbox.Event, error) {
	var e sandbox.Event
	var at int64
	err := row.Scan(&e.Seq, &at, &e.Sandbox, &e.Tenant, &e.Type, &e.From, &e.To, &e.Reason, &e.Detail)
	e.At = moment(at)
	return e, err
}

// LastSeq implements Events.
func (s *SQLite) LastSeq(ctx context.Context) (int64, error) {
	var seq int64
	// AUTOINCREMENT remembers the highest, also when its row was pruned.
	err := s.r.QueryRowContext(ctx, `SELECT seq FROM sqlite_sequence WHERE name = 'events'`).Scan(&seq)
	if errors.Is(err, sql.ErrNoRows) {
		return 0, nil
	}
	return seq, wrap(s.path, "read the events", err)
}
