package fsys

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

func FuzzParseEvents(f *testing.F) {
	ev := make([]byte, unix.SizeofInotifyEvent+16)
	binary.NativeEndian.PutUint32(ev[12:], 16)
	copy(ev[16:], "name")
	f.Add(append(ev, ev...))
	f.Add(ev[:20])
	f.Fuzz(func(t *testing.T, buf []byte) {
		n := 0
		parseEvents(buf, func(wd int32, mask, cookie uint32, name string) {
			n++
			if len(name) > len(buf) {
				t.Error("a name longer than the buffer")
			}
		})
		if n > len(buf)/unix.SizeofInotifyEvent {
			t.Errorf("%d events in %d bytes", n, len(buf))
		}
	})
}
