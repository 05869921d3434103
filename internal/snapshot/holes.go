package snapshot

import (
	"hash/crc32"
	"math/bits"
)

// zeros is the checksum of what crc is of with n zero bytes behind it, as
// hash/crc32 counts it, without feeding them: a sandbox may have a hole of any
// size in a file. A zero bit is one step of the polynomial's shift register,
// which is linear, so that n bytes are a matrix to the power of 8n (as in zlib's
// crc32_combine).
func zeros(crc uint32, n int64) uint32 {
	state := ^crc
	for exp := uint64(n); exp != 0; exp &= exp - 1 {
		state = apply(&zeroPowers[bits.TrailingZeros64(exp)], state)
	}
	return ^state
}

// matrix is a linear map of 32 bits: what it makes of each.
type matrix [32]uint32

func apply(m *matrix, v uint32) uint32 {
	var out uint32
	for ; v != 0; v &= v - 1 {
		out ^= m[bits.TrailingZeros32(v)]
	}
	return out
}

// zeroPowers are the maps of 2^i zero bytes.
var zeroPowers = func() (powers [63]matrix) {
	var step matrix // of one bit
	step[0] = crc32.Castagnoli
	for i := 1; i < 32; i++ {
		step[i] = 1 << (i - 1)
	}
	for range 3 { // of a byte
		step = squared(&step)
	}
	for i := range powers {
		powers[i] = step
		step = squared(&step)
	}
	return powers
}()

func squared(m *matrix) (out matrix) {
	for i := range m {
		out[i] = apply(m, m[i])
	}
	return out
}
