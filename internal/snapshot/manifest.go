package snapshot

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/sandbox"
)

// manifestVersion is the format of manifest.json that this build writes.
const manifestVersion = 1

// maxManifest bounds a manifest that is read: about 100 bytes for each file,
// and a layer of a million files is none that anybody makes.
const maxManifest = 256 << 20

// castagnoli is the polynomial of CRC-32C (RFC 3720, appendix B.4), for which
// CPUs have an instruction.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Manifest describes one capture.
type Manifest struct {
	Version        int                  `json:"version"`
	ID             string               `json:"id"`
	Kind           sandbox.SnapshotKind `json:"kind"`
	Runtime        string               `json:"runtime"`
	RuntimeVersion string               `json:"runtime_version,omitempty"`
	CreatedAt      time.Time            `json:"created_at"`
	// Summed tells whether the files have checksums. A capture that is used up
	// at once has none.
	Summed bool   `json:"summed"`
	Files  []File `json:"files"`
}

// Size is the bytes of all files.
func (m Manifest) Size() int64 {
	var n int64
	for _, f := range m.Files {
		n += f.Size
	}
	return n
}

// File is one entry of a capture below its data directory; directories too.
type File struct {
	Path Name `json:"path"`
	// Type is the entry's file type alone, as fs.FileMode has it: 0 is a
	// regular file.
	Type fs.FileMode `json:"type,omitempty"`
	Size int64       `json:"size,omitempty"` // bytes of a regular file
	Sum  Sum         `json:"crc32c,omitempty"`
}

// Name is a path relative to the data directory. In JSON, bytes that are not
// printable ASCII, and %, are written as %XX: a sandbox may name its files by
// any bytes.
type Name string

// MarshalText implements encoding.TextMarshaler.
func (n Name) MarshalText() ([]byte, error) {
	const digits = "0123456789ABCDEF"
	out := make([]byte, 0, len(n))
	for i := range len(n) {
		if c := n[i]; c <= 0x20 || c >= 0x7f || c == '%' {
			out = append(out, '%', digits[c>>4], digits[c&15])
		} else {
			out = append(out, c)
		}
	}
	return out, nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Name) UnmarshalText(text []byte) error {
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] != '%' {
			out = append(out, text[i])
			continue
		}
		if i+2 >= len(text) {
			return errors.New("a name ends within an escape")
		}
		b, err := hex.DecodeString(string(text[i+1 : i+3]))
		if err != nil {
			return fmt.Errorf("a name has the escape %q", text[i:i+3])
		}
		out = append(out, b...)
		i += 2
	}
	*n = Name(out)
	return nil
}

// Sum is the CRC-32C of a file's bytes, or of a symbolic link's target; in
// JSON 8 hex digits.
type Sum uint32

// MarshalText implements encoding.TextMarshaler.
func (s Sum) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%08x", uint32(s)), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Sum) UnmarshalText(text []byte) error {
	b, err := hex.DecodeString(string(text))
	if err != nil || len(b) != 4 {
		return fmt.Errorf("%.20q is no CRC-32C", text)
	}
	*s = Sum(uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3]))
	return nil
}

// ParseManifest reads a manifest and checks that it is one of this format. It
// does not look at any file. CodeUnsupported: it is of another format.
func ParseManifest(data []byte) (Manifest, error) {
	var m Manifest
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("it is no manifest: %w", err)
	}
	switch {
	case m.Version != manifestVersion:
		return m, sandbox.Errorf(sandbox.CodeUnsupported, "its format is %d, and this build reads %d: run the Warren that took it, or take it anew from a sandbox that runs", m.Version, manifestVersion)
	case !sandbox.IsSnapshotID(m.ID):
		return m, fmt.Errorf("its id is %.40q", m.ID)
	case m.Kind != sandbox.SnapshotDisk && m.Kind != sandbox.SnapshotFull:
		return m, fmt.Errorf("its kind is %.40q", string(m.Kind))
	}
	seen := make(map[Name]bool, len(m.Files))
	var total int64
	for _, f := range m.Files {
		p := string(f.Path)
		if !filepath.IsLocal(p) || filepath.Clean(p) != p || p == "." || strings.ContainsRune(p, 0) {
			return m, fmt.Errorf("it names the file %.80q", p)
		}
		if seen[f.Path] {
			return m, fmt.Errorf("it names the file %.80q twice", p)
		}
		seen[f.Path] = true
		if f.Type&^fs.ModeType != 0 || f.Size < 0 || f.Size > 0 && f.Type != 0 {
			return m, fmt.Errorf("file %.80q has the type %v and %d bytes", p, f.Type, f.Size)
		}
		if total += f.Size; total < 0 {
			return m, errors.New("its sizes are more than a disk can hold")
		}
	}
	return m, nil
}

// readManifest reads the manifest file at path.
func readManifest(path string) (Manifest, error) {
	// As what is there now may not be what was written: no link is followed, and
	// no pipe waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return Manifest{}, err
	}
	defer f.Close()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return Manifest{}, errors.Join(err, errors.New("its manifest is no regular file"))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return Manifest{}, err
	}
	if len(data) > maxManifest {
		return Manifest{}, fmt.Errorf("it has more than %d bytes", maxManifest)
	}
	return ParseManifest(data)
}
