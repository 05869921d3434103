// Package pattern makes bytes that the end-to-end tests know on both sides of
// a sandbox's wall: what comes out can be compared with what went in.
package pattern

import (
	"encoding/binary"
	"io"
)

// block is how many bytes share one counter.
const block = 8

// Copy writes n bytes of a stream in which every 8 bytes are a counter mixed
// well, so that a lost, doubled or moved piece shows in a hash.
func Copy(w io.Writer, n int64) (int64, error) {
	buf := make([]byte, 64<<10)
	var written int64
	var counter uint64
	for written < n {
		for i := 0; i < len(buf); i += block {
			binary.LittleEndian.PutUint64(buf[i:], mix(counter))
			counter++
		}
		m, err := w.Write(buf[:min(int64(len(buf)), n-written)])
		written += int64(m)
		if err != nil {
			return written, err
		}
	}
	return written, nil
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// AllBytes has every byte value in order, then what is no UTF-8 in several
// ways: a lone continuation, an overlong form, a surrogate, a cut sequence.
func AllBytes() []byte {
	var b []byte
	for i := range 256 {
		b = append(b, byte(i))
	}
	return append(b, 0x80, 0xc0, 0xaf, 0xed, 0xa0, 0x80, 0xf0, 0x9f, 0x98)
}
