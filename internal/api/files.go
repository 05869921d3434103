package api

import (
	"context"
	"io"
	"io/fs"
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

func (a *API) registerFiles() {
	at := func(what string) []*huma.Param {
		return []*huma.Param{
			idParam(), queryParam("path", "string", what, true),
			queryParam("user", "string", "Whose what is made will be, and whose home relative paths begin at; default: the sandbox's user. The agent itself reads and writes as root", false),
		}
	}
	a.stream(huma.Operation{
		OperationID: "read-file", Method: http.MethodGet, Path: "/v1/sandboxes/{id}/files", Tags: []string{"inside"},
		Summary: "Read a file", Parameters: at("The file; a relative path begins at the user's home"),
		Responses: bytesResponse("200", "application/octet-stream", "Its content"),
	}, a.readFile)
	a.stream(huma.Operation{
		OperationID: "write-file", Method: http.MethodPut, Path: "/v1/sandboxes/{id}/files", Tags: []string{"inside"},
		Summary: "Write a file", Description: "Whole or not at all; makes the directories above it.",
		Parameters:  append(at("The file; a relative path begins at the user's home"), queryParam("mode", "string", "Permission bits in octal; default: those that it has, 0644 for a new one", false)),
		RequestBody: bytesBody("application/octet-stream", "Its content, of any size"),
		Responses:   map[string]*huma.Response{"204": {Description: "Written"}},
	}, a.writeFile)
	a.stream(huma.Operation{
		OperationID: "read-tar", Method: http.MethodGet, Path: "/v1/sandboxes/{id}/tar", Tags: []string{"inside"},
		Summary: "Read a file or directory as a tar archive", Description: "Names in it begin with the last element of path.",
		Parameters: at("What to read"), Responses: bytesResponse("200", "application/x-tar", "The archive"),
	}, a.readTar)
	a.stream(huma.Operation{
		OperationID: "write-tar", Method: http.MethodPut, Path: "/v1/sandboxes/{id}/tar", Tags: []string{"inside"},
		Summary: "Extract a tar archive into a directory", Description: "Makes the directory if it is missing. Nothing lands outside of it. What was extracted before an error stays.",
		Parameters: append(at("The directory"),
			queryParam("max_bytes", "integer", "Refuse file contents of more than this; default: no limit", false),
			queryParam("max_entries", "integer", "Refuse more entries than this; default: a million", false),
			queryParam("preserve", "boolean", "Keep the archive's numeric owners instead of giving all to user", false)),
		RequestBody: bytesBody("application/x-tar", "The archive"),
		Responses:   map[string]*huma.Response{"204": {Description: "Extracted"}},
	}, a.writeTar)
}

// inside finds what every call into a sandbox needs: its agent, and the path
// and user of the query. leave tells that the call is over.
func (a *API) inside(r *http.Request) (agent *agentclient.Client, path, user string, leave func(), err error) {
	id, err := sandbox.ParseID(r.PathValue("id"))
	if err != nil {
		return nil, "", "", nil, err
	}
	q := r.URL.Query()
	path, user = q.Get("path"), q.Get("user")
	if path == "" {
		return nil, "", "", nil, sandbox.Errorf(sandbox.CodeInvalid, "path is missing: give ?path=")
	}
	agent, leave, err = a.enter(r.Context(), id)
	return agent, path, user, leave, err
}

func (a *API) readFile(w http.ResponseWriter, r *http.Request) error {
	agent, path, user, leave, err := a.inside(r)
	if err != nil {
		return err
	}
	defer leave()
	src, size, err := agent.ReadFile(r.Context(), path, user)
	if err != nil {
		return ofUser(err)
	}
	return a.download(w, src, size, "application/octet-stream")
}

func (a *API) readTar(w http.ResponseWriter, r *http.Request) error {
	agent, path, user, leave, err := a.inside(r)
	if err != nil {
		return err
	}
	defer leave()
	src, err := agent.GetTar(r.Context(), path, user)
	if err != nil {
		return ofUser(err)
	}
	return a.download(w, src, -1, "application/x-tar")
}

func (a *API) download(w http.ResponseWriter, src io.ReadCloser, size int64, contentType string) error {
	defer src.Close()
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("X-Content-Type-Options", "nosniff") // it is the sandbox's: no browser should make a page of it
	h.Set("Content-Disposition", "attachment")
	if size >= 0 {
		h.Set("Content-Length", strconv.FormatInt(size, 10))
	}
	w.WriteHeader(http.StatusOK)
	return a.sent(copyStream(w, src, nil))
}

func (a *API) writeFile(w http.ResponseWriter, r *http.Request) error {
	agent, path, user, leave, err := a.inside(r)
	if err != nil {
		return err
	}
	defer leave()
	var mode fs.FileMode
	if s := r.URL.Query().Get("mode"); s != "" {
		n, err := strconv.ParseUint(s, 8, 32)
		if err != nil || n == 0 || n > 0o777 {
			return sandbox.Errorf(sandbox.CodeInvalid, "mode is %q: give octal permission bits like 0755", s)
		}
		mode = fs.FileMode(n)
	}
	return a.upload(w, r, func(ctx context.Context, src io.Reader) error {
		return agent.WriteFile(ctx, path, user, src, mode)
	})
}

func (a *API) writeTar(w http.ResponseWriter, r *http.Request) error {
	agent, path, user, leave, err := a.inside(r)
	if err != nil {
		return err
	}
	defer leave()
	var o agentclient.TarOptions
	for name, into := range map[string]*int64{"max_bytes": &o.MaxBytes, "max_entries": &o.MaxEntries} {
		if s := r.URL.Query().Get(name); s != "" {
			if *into, err = strconv.ParseInt(s, 10, 64); err != nil || *into <= 0 {
				return sandbox.Errorf(sandbox.CodeInvalid, "%s is %q: give a number above 0", name, s)
			}
		}
	}
	if o.Preserve, err = boolQuery(r, "preserve"); err != nil {
		return err
	}
	return a.upload(w, r, func(ctx context.Context, src io.Reader) error {
		return agent.PutTar(ctx, path, user, src, o)
	})
}

func (a *API) upload(w http.ResponseWriter, r *http.Request, put func(context.Context, io.Reader) error) error {
	timeBody(w, r, true)
	src := &bigReader{src: r.Body}
	if err := put(r.Context(), src); err != nil {
		if src.err != nil { // the client's side broke, and the agent only saw the consequence
			return sandbox.Errorf(sandbox.CodeInvalid, "the body ended early: %w", src.err)
		}
		return ofUser(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// bigReader makes net/http copy a request's body by our large buffers: it
// would use its own of 32 KiB for a plain reader.
type bigReader struct {
	src io.Reader
	err error // of reading src
}

func (b *bigReader) Read(p []byte) (int, error) {
	n, err := b.src.Read(p)
	if err != nil && err != io.EOF {
		b.err = err
	}
	return n, err
}

func (b *bigReader) WriteTo(w io.Writer) (int64, error) {
	return copyStream(w, struct{ io.Reader }{b}, nil)
}
