package console

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func record(t *testing.T, dir string) (*Recorder, *os.File) {
	t.Helper()
	r, err := Record(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	w, err := r.Writer()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return r, w
}

func TestCloseTakesTheLastWords(t *testing.T) {
	dir := t.TempDir()
	r, w := record(t, dir)
	fmt.Fprint(w, "one\ntwo\n")
	r.Close()
	if got := string(Tail(dir, 100)); got != "one\ntwo\n" {
		t.Errorf("Tail = %q", got)
	}
	if got := string(Tail(dir, 6)); got != "two\n" {
		t.Errorf("Tail of 6 bytes = %q, want a whole line", got)
	}
}

func TestOutputWaitsForTheNextRecorder(t *testing.T) {
	dir := t.TempDir()
	r, w := record(t, dir)
	fmt.Fprint(w, "before\n")
	r.Close()
	fmt.Fprint(w, "while no daemon ran\n")
	r2, _ := record(t, dir)
	r2.Close()
	if got := string(Tail(dir, 100)); got != "before\nwhile no daemon ran\n" {
		t.Errorf("Tail = %q", got)
	}
}

func TestDiskIsBounded(t *testing.T) {
	dir := t.TempDir()
	r, w := record(t, dir)
	line := []byte(strings.Repeat("x", 99) + "\n")
	for range 5 * maxFile / len(line) {
		if _, err := w.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	r.Close()
	var total int64
	for _, name := range []string{logName, oldName} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		total += st.Size()
	}
	if total > 2*maxFile {
		t.Errorf("the console takes %d bytes, more than %d", total, 2*maxFile)
	}
}

func TestFollowAcrossRotation(t *testing.T) {
	dir := t.TempDir()
	r, w := record(t, dir)
	rd := Open(t.Context(), func() string { return dir }, true)
	defer rd.Close()
	const lines = 9000 // 900 kB: one rotation, so that no kept byte is lost
	go func() {
		for i := range lines {
			fmt.Fprintf(w, "%099d\n", i)
			if i%1000 == 0 {
				time.Sleep(5 * time.Millisecond)
			}
		}
	}()
	buf := make([]byte, 100)
	for i := range lines {
		if _, err := io.ReadFull(rd, buf); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%099d\n", i); string(buf) != want {
			t.Fatalf("line %d = %q", i, buf)
		}
	}
	r.Close()
}

func TestReadersEnd(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	rd := Open(ctx, func() string { return dir }, true)
	time.AfterFunc(20*time.Millisecond, cancel)
	if data, err := io.ReadAll(rd); err != nil || len(data) != 0 {
		t.Errorf("following nothing = %q, %v", data, err)
	}
	rd.Close()
	_, w := record(t, dir)
	fmt.Fprint(w, "hello\n")
	deadline := time.Now().Add(10 * time.Second)
	for {
		data, err := io.ReadAll(Open(t.Context(), func() string { return dir }, false))
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Equal(data, []byte("hello\n")) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("read %q", data)
		}
		time.Sleep(time.Millisecond)
	}
}
