package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"sync"

	"github.com/pressly/goose/v3"
	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/warrenhq/warren/internal/sandbox"
)

//go:embed migrations/*.sql
var migrations embed.FS

// DefaultBallast is the size of the file that is given up when the disk is
// full, so that the records of what is being ended or undone still fit. A
// record is about 2 KiB, and the write-ahead log is kept below 4 MiB.
const DefaultBallast = 16 << 20

// SQLite is the Store in one SQLite database file, in WAL mode: one connection
// writes, several read.
type SQLite struct {
	path    string
	ballast *ballast
	w, r    *sql.DB
}

var _ Store = (*SQLite)(nil)

// Options tunes OpenSQLite.
type Options struct {
	Ballast int64 // bytes; 0 is DefaultBallast, below 0 is none
}

// OpenSQLite opens or makes the database file at path, mode 0600, and brings
// its schema up to date. A file that a newer Warren wrote is refused with
// CodeConflict.
func OpenSQLite(ctx context.Context, path string, o Options) (*SQLite, error) {
	// SQLite gives -wal and -shm the mode of the database file.
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, wrap(path, "open the state database", err)
	}
	f.Close()

	s := &SQLite{path: path, ballast: newBallast(path+".ballast", o.Ballast)}
	s.w, err = sql.Open("sqlite", dsn(path, "_txlock=immediate",
		// FULL syncs the log at each commit: a transition that was answered
		// for is on the disk also after a power cut.
		"_pragma=synchronous(FULL)", "_pragma=wal_autocheckpoint(512)", "_pragma=journal_size_limit(4194304)"))
	if err != nil {
		return nil, wrap(path, "open the state database", err)
	}
	s.w.SetMaxOpenConns(1)
	s.r, err = sql.Open("sqlite", dsn(path, "_pragma=query_only(1)"))
	if err != nil {
		s.w.Close()
		return nil, wrap(path, "open the state database", err)
	}
	s.r.SetMaxOpenConns(4)
	s.r.SetMaxIdleConns(4)
	if err := s.migrate(ctx); err != nil {
		s.Close()
		return nil, err
	}
	s.ballast.make()
	return s, nil
}

func dsn(path string, params ...string) string {
	q := "_pragma=busy_timeout(10000)&_pragma=journal_mode(WAL)&_pragma=foreign_keys(1)"
	for _, p := range params {
		q += "&" + p
	}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q}).String()
}

func (s *SQLite) migrate(ctx context.Context) error {
	sub, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, s.w, sub)
	if err != nil {
		return wrap(s.path, "read the migrations", err)
	}
	return s.retryFull(func() error {
		current, target, err := p.GetVersions(ctx)
		if err != nil {
			return wrap(s.path, "read the schema version", err)
		}
		if current > target {
			return sandbox.Errorf(sandbox.CodeConflict, "the state database %s has schema %d, this build knows %d: a newer Warren wrote it; run that one, or another --state directory", s.path, current, target)
		}
		if _, err := p.Up(ctx); err != nil {
			return wrap(s.path, "bring the schema up to date", err)
		}
		return nil
	})
}

// Close closes the database. Calls under way end with an error.
func (s *SQLite) Close() error {
	return errors.Join(s.r.Close(), s.w.Close())
}

// write runs f in a write transaction. When the disk is full it gives up the
// ballast and tries once more.
func (s *SQLite) write(ctx context.Context, what string, f func(tx *sql.Tx) error) error {
	return s.retryFull(func() error {
		tx, err := s.w.BeginTx(ctx, nil)
		if err != nil {
			return wrap(s.path, what, err)
		}
		if err := f(tx); err != nil {
			tx.Rollback()
			return wrap(s.path, what, err)
		}
		return wrap(s.path, what, tx.Commit())
	})
}

func (s *SQLite) retryFull(f func() error) error {
	err := f()
	if sandbox.CodeOf(err) == sandbox.CodeDiskFull && s.ballast.release() {
		err = f()
	}
	return err
}

// wrap makes an *sandbox.Error of a database error; nil stays nil.
func wrap(path, what string, err error) error {
	var known *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.CodeCanceled, "%s: %w", what, err)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "%s: %w", what, err)
	case errors.Is(err, sql.ErrNoRows):
		return sandbox.Errorf(sandbox.CodeNotFound, "%s: %w", what, err)
	case isFull(path, err):
		return sandbox.Errorf(sandbox.CodeDiskFull, "%s: no space left on the filesystem of %s: free some, or remove sandboxes and templates (%w)", what, filepath.Dir(path), err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "%s: %w", what, err)
}

// isFull tells whether err comes of a full disk or an exhausted quota. SQLite
// says SQLITE_FULL for a write that got ENOSPC; a failed sync or a failed
// extension of the shared-memory index is an SQLITE_IOERR whatever the reason,
// so there the filesystem itself is asked.
func isFull(path string, err error) bool {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return true
	}
	var se *sqlite.Error
	if !errors.As(err, &se) {
		return false
	}
	switch se.Code() & 0xff {
	case sqlite3.SQLITE_FULL:
		return true
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN:
		var st unix.Statfs_t
		return unix.Statfs(filepath.Dir(path), &st) == nil && int64(st.Bavail)*st.Bsize < 1<<20
	}
	return false
}

// ballast is a file that holds disk space in reserve.
type ballast struct {
	path string
	size int64
	mu   sync.Mutex
}

func newBallast(path string, size int64) *ballast {
	if size == 0 {
		size = DefaultBallast
	}
	return &ballast{path: path, size: max(size, 0)}
}

// make sets the space aside unless that is done, or the disk has too little
// left to make it worth it. Having none is no error: it is tried again later.
func (b *ballast) make() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.size == 0 {
		return
	}
	if fi, err := os.Stat(b.path); err == nil && fi.Size() == b.size {
		return
	}
	var st unix.Statfs_t
	if unix.Statfs(filepath.Dir(b.path), &st) != nil || int64(st.Bavail)*st.Bsize < 2*b.size {
		return
	}
	if err := b.fill(); err != nil {
		os.Remove(b.path)
	}
}

func (b *ballast) fill() error {
	f, err := os.OpenFile(b.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, b.size); err != nil {
		return fmt.Errorf("set %d bytes aside in %s: %w", b.size, b.path, err)
	}
	return nil
}

// release gives the space back, and tells whether there was any.
func (b *ballast) release() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return os.Remove(b.path) == nil
}

// collect reads all rows of a query. what is for its errors.
func collect[T any](ctx context.Context, s *SQLite, what string, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	rows, err := s.r.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, wrap(s.path, what, err)
	}
	defer rows.Close()
	var all []T
	for rows.Next() {
		one, err := scan(rows)
		if err != nil {
			return nil, wrap(s.path, what, err)
		}
		all = append(all, one)
	}
	return all, wrap(s.path, what, rows.Err())
}
