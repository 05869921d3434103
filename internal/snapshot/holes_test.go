package snapshot

import (
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestZeros(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int64{0, 1, 2, 3, 7, 8, 9, 255, 4096, 4097, 1 << 20, rng.Int64N(1 << 22)} {
		crc := rng.Uint32()
		if got, want := zeros(crc, n), crc32.Update(crc, castagnoli, make([]byte, n)); got != want {
			t.Errorf("%08x and %d zeros: %08x, want %08x", crc, n, got, want)
		}
	}
}

// TestSumOfHoles: a checksum goes by the content, however it lies on the disk,
// and a hole takes no time.
func TestSumOfHoles(t *testing.T) {
	dir := t.TempDir()
	sumOf := func(name string) Sum {
		t.Helper()
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		s, err := sumFile(t.Context(), root, name, make([]byte, 1<<16))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	data := make([]byte, 3<<20)
	copy(data[1<<20:], "in the middle")
	data[len(data)-1] = 1
	if err := os.WriteFile(filepath.Join(dir, "dense"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int{1 << 20, len(data) - 1} {
		if _, err := f.WriteAt(data[at:at+1], int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := f.WriteAt([]byte("in the middle"), 1<<20); err != nil {
		t.Fatal(err)
	}
	want := Sum(crc32.Checksum(data, castagnoli))
	if a, b := sumOf("dense"), sumOf("sparse"); a != want || b != want {
		t.Errorf("dense %08x, sparse %08x, want %08x", uint32(a), uint32(b), uint32(want))
	}
	if err := f.Truncate(1 << 42); err != nil {
		t.Skipf("no file of 4 TiB here: %v", err)
	}
	start := time.Now()
	if got := sumOf("sparse"); got != Sum(zeros(uint32(want), 1<<42-int64(len(data)))) {
		t.Errorf("of 4 TiB: %08x", uint32(got))
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("a hole of 4 TiB takes %v", took)
	}
}
