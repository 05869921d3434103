package agentclient

import (
	"context"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strconv"

	"github.com/warrenhq/warren/internal/agent/control"
)

func fileQuery(path, user string) url.Values {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("username", user)
	}
	return q
}

// ReadFile opens a file inside as user ("" is the default; relative paths are
// under its home) and tells its size in bytes, or -1 where only reading tells.
// The caller closes it.
func (c *Client) ReadFile(ctx context.Context, path, user string) (io.ReadCloser, int64, error) {
	resp, err := c.do(ctx, http.MethodGet, control.PathFiles, fileQuery(path, user), nil, "")
	if err != nil {
		return nil, 0, err
	}
	return mappedBody{resp.Body}, resp.ContentLength, nil
}

// WriteFile writes r to a file inside as user, whole or not at all, making its
// parent directories. mode sets the permission bits; 0 keeps those of a file
// that is there, and is 0644 for a new one. CodeDiskFull: no room.
func (c *Client) WriteFile(ctx context.Context, path, user string, r io.Reader, mode fs.FileMode) error {
	var headers []string
	if mode != 0 {
		headers = []string{control.ModeHeader, strconv.FormatUint(uint64(mode.Perm()), 8)}
	}
	resp, err := c.do(ctx, http.MethodPost, control.PathFiles, fileQuery(path, user), r, "application/octet-stream", headers...)
	if err != nil {
		return err
	}
	return drain(resp)
}

// TarOptions bound what PutTar makes.
type TarOptions struct {
	MaxBytes   int64 // of file contents; 0 is no limit
	MaxEntries int64 // 0 is the agent's default, a million
	Preserve   bool  // keep the archive's numeric owners instead of giving all to user
}

// GetTar streams a file or directory inside as a tar archive, whose names
// begin with the last element of path. The caller closes it; an archive that
// was cut short by an error inside ends with an error, not with EOF.
func (c *Client) GetTar(ctx context.Context, path, user string) (io.ReadCloser, error) {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	resp, err := c.do(ctx, http.MethodGet, control.PathTar, q, nil, "")
	if err != nil {
		return nil, err
	}
	return mappedBody{resp.Body}, nil
}

// PutTar extracts a tar archive into the directory path inside, making it if
// it is missing. Nothing lands outside of path, whatever the archive says.
// CodeInvalid: a hostile or broken archive; CodeTooLarge: over a limit;
// CodeDiskFull: no room. What was extracted before the error stays.
func (c *Client) PutTar(ctx context.Context, path, user string, r io.Reader, o TarOptions) error {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	if o.MaxBytes > 0 {
		q.Set("max_bytes", strconv.FormatInt(o.MaxBytes, 10))
	}
	if o.MaxEntries > 0 {
		q.Set("max_entries", strconv.FormatInt(o.MaxEntries, 10))
	}
	if o.Preserve {
		q.Set("preserve", "true")
	}
	resp, err := c.do(ctx, http.MethodPut, control.PathTar, q, r, "application/x-tar")
	if err != nil {
		return err
	}
	return drain(resp)
}

// mappedBody maps the errors of a response's body.
type mappedBody struct{ body io.ReadCloser }

func (b mappedBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	if err != nil && err != io.EOF {
		err = Error(err)
	}
	return n, err
}

func (b mappedBody) WriteTo(w io.Writer) (int64, error) {
	if wt, ok := b.body.(io.WriterTo); ok {
		n, err := wt.WriteTo(w)
		return n, err
	}
	return io.CopyBuffer(w, struct{ io.Reader }{b}, make([]byte, 256<<10))
}

func (b mappedBody) Close() error { return b.body.Close() }
