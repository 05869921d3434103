package attrs

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestServe(t *testing.T) {
	dir := t.TempDir()
	at := time.Unix(981173106, 123456789)
	for _, name := range []string{"a", "caf\xe9"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(dir, name), at, at); err != nil {
			t.Fatal(err)
		}
	}
	value := "\xff\x00\x80binary"
	if err := unix.Setxattr(filepath.Join(dir, "a"), "user.k", []byte(value), 0); err != nil {
		t.Skipf("no attributes here: %v", err)
	}
	if err := os.Symlink("a", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := Serve(dir, strings.NewReader("a\x00none\x00caf\xe9\x00link\x00"), &out); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(&out)
	var got []File
	for {
		f, err := Read(r)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, f)
	}
	if len(got) != 4 {
		t.Fatalf("%d answers", len(got))
	}
	if !got[0].Found || !got[0].Time.Equal(at) || len(got[0].Attrs) != 1 || got[0].Attrs["user.k"] != value {
		t.Errorf("a: %+v", got[0])
	}
	if got[1].Found {
		t.Errorf("none: %+v", got[1])
	}
	if !got[2].Time.Equal(at) {
		t.Errorf("a name that is no UTF-8: %+v", got[2])
	}
	if !got[3].Found || got[3].Time.Equal(at) || got[3].Attrs != nil {
		t.Errorf("the link's own: %+v", got[3])
	}
}

func FuzzRead(f *testing.F) {
	var b bytes.Buffer
	w := bufio.NewWriter(&b)
	write(w, File{Found: true, Time: time.Unix(1, 2), Attrs: map[string]string{"user.k": "v"}})
	w.Flush()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReader(bytes.NewReader(data))
		for {
			a, err := Read(r)
			if err != nil {
				return
			}
			for k, v := range a.Attrs {
				if !Kept(k) || len(v) > maxValue {
					t.Fatalf("%q has %d bytes", k, len(v))
				}
			}
		}
	})
}
