// Package attrs tells the modification times and extended attributes of files
// inside a sandbox to who captures its disk, where its kernel's own account of
// them is not exact. The agent's program is run for it in the sandbox with the
// argument Mode: names on standard input, answers on standard output. It keeps
// no state and serves nobody else.
//
// A name is NUL-terminated bytes. The answers have the order of the names; each
// is little-endian: a byte that is 1 where the file is there, and then its time
// in seconds (64 bits) and nanoseconds (32), the number of attributes (16), and
// for each the lengths of name (16) and value (32) and both.
package attrs

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Mode is the program's argument.
const Mode = "attributes"

// What one file may have (linux/limits.h).
const (
	maxName  = 255
	maxValue = 64 << 10
	maxList  = 64 << 10
)

// File is what is told of one file.
type File struct {
	Found bool
	Time  time.Time // of its last modification
	// Attrs are the extended attributes that a layer keeps: user.* and
	// security.capability.
	Attrs map[string]string
}

// Serve answers for the names of in, relative to dir, until its end. Of a link
// it tells the link's own.
func Serve(dir string, in io.Reader, out io.Writer) error {
	r, w := bufio.NewReaderSize(in, 1<<16), bufio.NewWriterSize(out, 1<<16)
	for {
		name, err := r.ReadString(0)
		if errors.Is(err, io.EOF) {
			return w.Flush()
		}
		if err != nil {
			return err
		}
		if err := write(w, look(dir+"/"+strings.TrimSuffix(name, "\x00"))); err != nil {
			return err
		}
	}
}

func look(path string) File {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return File{}
	}
	f := File{Found: true, Time: time.Unix(int64(st.Mtim.Sec), int64(st.Mtim.Nsec))}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return f // nothing else has attributes that are kept
	}
	names := make([]byte, maxList)
	n, err := unix.Llistxattr(path, names)
	if err != nil || n <= 0 {
		return f
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:n]), "\x00"), "\x00") {
		if !Kept(name) {
			continue
		}
		value := make([]byte, maxValue)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			continue
		}
		if f.Attrs == nil {
			f.Attrs = map[string]string{}
		}
		f.Attrs[name] = string(value[:n])
	}
	return f
}

// Kept tells whether a layer keeps the attribute. user.overlay.* would speak
// for overlayfs.
func Kept(name string) bool {
	if len(name) > maxName || strings.IndexByte(name, 0) >= 0 {
		return false
	}
	return name == "security.capability" || strings.HasPrefix(name, "user.") && name != "user." && !strings.HasPrefix(name, "user.overlay.")
}

func write(w *bufio.Writer, f File) error {
	if !f.Found {
		return w.WriteByte(0)
	}
	b := []byte{1}
	b = binary.LittleEndian.AppendUint64(b, uint64(f.Time.Unix()))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Time.Nanosecond()))
	b = binary.LittleEndian.AppendUint16(b, uint16(len(f.Attrs)))
	for k, v := range f.Attrs {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(k)))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(v)))
		b = append(append(b, k...), v...)
	}
	_, err := w.Write(b)
	return err
}

// errAnswer is of an answer that no program of ours gives.
var errAnswer = errors.New("the sandbox told of its files in a form that is not known")

// maxAttrs is how many attributes a file may have: a kernel lists them in
// 64 KiB, by names of 6 bytes at the least.
const maxAttrs = maxList / 6

// Read reads one answer. What comes from a sandbox is not trusted: nothing in it
// is longer than a file can have.
func Read(r *bufio.Reader) (File, error) {
	var f File
	found, err := r.ReadByte()
	if err != nil {
		return f, err
	}
	if found == 0 {
		return f, nil
	}
	var head [14]byte
	if found != 1 {
		return f, errAnswer
	}
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return f, err
	}
	nsec := binary.LittleEndian.Uint32(head[8:])
	n := int(binary.LittleEndian.Uint16(head[12:]))
	if nsec >= 1e9 || n > maxAttrs {
		return f, errAnswer
	}
	f.Found, f.Time = true, time.Unix(int64(binary.LittleEndian.Uint64(head[:])), int64(nsec))
	for range n {
		var lengths [6]byte
		if _, err := io.ReadFull(r, lengths[:]); err != nil {
			return f, err
		}
		k, v := int(binary.LittleEndian.Uint16(lengths[:])), int(binary.LittleEndian.Uint32(lengths[2:]))
		if k > maxName || v > maxValue {
			return f, errAnswer
		}
		both := make([]byte, k+v)
		if _, err := io.ReadFull(r, both); err != nil {
			return f, err
		}
		name := string(both[:k])
		if !Kept(name) {
			return f, fmt.Errorf("%w: the attribute %.80q", errAnswer, name)
		}
		if f.Attrs == nil {
			f.Attrs = map[string]string{}
		}
		f.Attrs[name] = string(both[k:])
	}
	return f, nil
}
