package store_test

import (
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/store/storetest"
	"github.com/warrenhq/warren/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t *testing.T, dir string) store.Store {
	t.Helper()
	s, err := store.OpenSQLite(t.Context(), filepath.Join(dir, "warren.db"), store.Options{Ballast: -1})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSQLite(t *testing.T) { storetest.Suite(t, open) }

func TestFilesAreForRootAlone(t *testing.T) {
	dir := t.TempDir()
	s, err := store.OpenSQLite(t.Context(), filepath.Join(dir, "a b?c%.db"), store.Options{Ballast: 1 << 16})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := s.Insert(t.Context(), storetest.Sample("sbx1")); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) < 3 {
		t.Errorf("only %v", entries)
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		if fi.Mode().Perm() != 0o600 || !strings.HasPrefix(e.Name(), "a b?c%.db") {
			t.Errorf("%s has mode %v", e.Name(), fi.Mode())
		}
	}
}

func TestNewerSchemaIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir).Close()
	db, err := sql.Open("sqlite", filepath.Join(dir, "warren.db"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`INSERT INTO goose_db_version (version_id, is_applied) VALUES (99, 1)`); err != nil {
		t.Fatal(err)
	}
	db.Close()
	_, err = store.OpenSQLite(t.Context(), filepath.Join(dir, "warren.db"), store.Options{})
	if sandbox.CodeOf(err) != sandbox.CodeConflict || !strings.Contains(err.Error(), "newer") {
		t.Errorf("error is %v", err)
	}
}

func TestFullDisk(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m,mode=0700"); err != nil {
		t.Skipf("needs to mount a tmpfs: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	ctx := t.Context()
	path := filepath.Join(dir, "warren.db")
	s, err := store.OpenSQLite(ctx, path, store.Options{Ballast: 512 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	live, err := s.Insert(ctx, storetest.Sample("sbxlive"))
	if err != nil {
		t.Fatal(err)
	}
	fill(t, dir)

	// The ballast carries the changes on for a while…
	done := 0
	for {
		live.Detail = strings.Repeat(fmt.Sprint(done%10), 8<<10)
		next, err := s.Update(ctx, live, sandbox.Event{At: time.Now(), Sandbox: live.ID, Tenant: "default"})
		if err != nil {
			if sandbox.CodeOf(err) != sandbox.CodeDiskFull || !strings.Contains(err.Error(), "free some") {
				t.Fatalf("after %d updates: %v (%s)", done, err, sandbox.CodeOf(err))
			}
			break
		}
		live = next
		if done++; done > 5000 {
			t.Fatal("the disk never got full")
		}
		if done%20 == 0 {
			fill(t, dir)
		}
	}
	if done < 10 {
		t.Errorf("only %d updates fitted into the ballast", done)
	}
	// …and what it refuses is not half there.
	got, err := s.Get(ctx, live.ID)
	if err != nil || got.Version != live.Version || got.Detail != strings.Repeat(fmt.Sprint((done-1)%10), 8<<10) {
		t.Fatalf("the record is at version %d (%v), want %d", got.Version, err, live.Version)
	}
	evs, err := s.EventsAfter(ctx, "", 0, 10000)
	if err != nil || len(evs) != done {
		t.Errorf("%d events (%v), want %d", len(evs), err, done)
	}
	// With space it goes on, and the ballast comes back.
	os.Remove(filepath.Join(dir, "filler"))
	if _, err := s.Update(ctx, live); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Maintain(ctx, store.Retention{Ended: 10, Events: 10}); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path + ".ballast"); err != nil || fi.Size() != 512<<10 {
		t.Errorf("the ballast did not come back: %v", err)
	}
}

// fill writes until the filesystem of dir has no byte left.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, "filler"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 64 << 10; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			size /= 2
		}
	}
}

func FuzzPageToken(f *testing.F) {
	dir := f.TempDir()
	s, err := store.OpenSQLite(f.Context(), filepath.Join(dir, "warren.db"), store.Options{Ballast: -1})
	if err != nil {
		f.Fatal(err)
	}
	defer s.Close()
	f.Add("MS5zYnhh")
	f.Add("")
	f.Fuzz(func(t *testing.T, token string) {
		_, _, err := s.List(t.Context(), store.Filter{Token: token, Limit: 1})
		if err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%q: %v", token, err)
		}
	})
}
