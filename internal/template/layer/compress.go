package layer

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/warrenhq/warren/internal/sandbox"
)

// zstdWindow is the most memory a zstd stream may ask for: `zstd --ultra -22`
// asks for this much.
const zstdWindow = 128 << 20

var (
	gzipMagic  = []byte{0x1f, 0x8b}
	zstdMagic  = []byte{0x28, 0xb5, 0x2f, 0xfd}
	bzip2Magic = []byte("BZh")
	xzMagic    = []byte{0xfd, '7', 'z', 'X', 'Z', 0}
)

// Decompress gives the content of r, which may be gzip, zstd, bzip2 or plain;
// it looks at the first bytes, not at what r claims to be. Once
// Limits.RatioFrom bytes came out, more than MaxRatio bytes out per byte in
// end it with CodeTooLarge. The caller closes the result, not r.
func Decompress(r io.Reader, l Limits) (io.ReadCloser, error) {
	l = l.filled()
	in := &counter{r: r}
	br := bufio.NewReaderSize(in, 64<<10)
	magic, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, err
	}
	var out io.ReadCloser
	switch {
	case bytes.HasPrefix(magic, gzipMagic):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, notArchive("gzip", err)
		}
		out = z
	case bytes.HasPrefix(magic, zstdMagic):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, notArchive("zstd", err)
		}
		out = z.IOReadCloser()
	case bytes.HasPrefix(magic, bzip2Magic):
		out = io.NopCloser(bzip2.NewReader(br))
	case bytes.HasPrefix(magic, xzMagic):
		return nil, sandbox.Errorf(sandbox.CodeUnsupported, "xz archives are not supported: recompress it with gzip or zstd")
	default:
		return io.NopCloser(br), nil
	}
	return &ratioReader{ReadCloser: out, in: in, l: l}, nil
}

func notArchive(kind string, err error) error {
	return sandbox.Errorf(sandbox.CodeInvalid, "the %s stream is broken: %w", kind, err)
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

type ratioReader struct {
	io.ReadCloser
	in  *counter
	out int64
	l   Limits
}

func (r *ratioReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.out += int64(n)
	if r.out > r.l.RatioFrom && r.out/max(r.in.n, 1) > r.l.MaxRatio {
		return n, tooLarge("ratio", "the archive unpacks to more than %d times its size (%d bytes from %d): it looks made to fill disks", r.l.MaxRatio, r.out, r.in.n)
	}
	return n, err
}

// IsArchive tells whether content that begins with head is a tar archive,
// plain or compressed, as ADD unpacks it. head is the first 512 bytes or more.
func IsArchive(head []byte) bool {
	for _, m := range [][]byte{gzipMagic, zstdMagic, bzip2Magic, xzMagic} {
		if bytes.HasPrefix(head, m) {
			return true
		}
	}
	return len(head) >= 262 && string(head[257:262]) == "ustar"
}
