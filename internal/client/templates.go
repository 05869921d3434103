package client

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"mime/multipart"
	"net/url"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Templates lists the templates that the tenant may use.
func (c *Client) Templates(ctx context.Context) ([]wire.Template, error) {
	var out wire.TemplateList
	err := c.json(ctx, call{method: "GET", path: "/v1/templates"}, &out)
	return out.Templates, err
}

// Template gets one template by name or id.
func (c *Client) Template(ctx context.Context, name string) (wire.Template, error) {
	var out wire.Template
	return out, c.json(ctx, call{method: "GET", path: "/v1/templates/" + url.PathEscape(name)}, &out)
}

// RemoveTemplate removes a template that no live sandbox uses.
func (c *Client) RemoveTemplate(ctx context.Context, name string) error {
	return c.json(ctx, call{method: "DELETE", path: "/v1/templates/" + url.PathEscape(name)}, nil)
}

// BuildTemplate builds a template and calls progress for what it tells on the
// way. archive is the Dockerfile's context or the image's archive, nil where
// there is none. The build ends with ctx.
func (c *Client) BuildTemplate(ctx context.Context, r wire.BuildTemplate, archive io.Reader, progress func(wire.BuildEvent)) (wire.Template, error) {
	q := call{method: "POST", path: "/v1/templates/build"}
	if archive == nil {
		q.body = r
	} else {
		pr, pw := io.Pipe()
		defer pr.Close() // ends the writer where the daemon wants no more
		mw := multipart.NewWriter(pw)
		go func() { pw.CloseWithError(writeBuild(mw, r, archive)) }()
		q.stream, q.size, q.contentType = bigReader{pr}, -1, mw.FormDataContentType()
	}
	res, err := c.send(ctx, q)
	if err != nil {
		return wire.Template{}, err
	}
	defer res.Body.Close()
	dec := json.NewDecoder(bufio.NewReaderSize(res.Body, 64<<10))
	for {
		var e wire.BuildEvent
		if err := dec.Decode(&e); err != nil {
			if ctx.Err() != nil {
				err = ctx.Err()
			} else if err == io.EOF {
				return wire.Template{}, sandbox.Errorf(sandbox.CodeUnavailable, "the daemon at %s ended before the build did", c.host)
			}
			return wire.Template{}, c.Error(err)
		}
		switch {
		case e.Error != nil:
			return wire.Template{}, e.Error.Err()
		case e.Template != nil:
			return *e.Template, nil
		case progress != nil:
			progress(e)
		}
	}
}

func writeBuild(mw *multipart.Writer, r wire.BuildTemplate, archive io.Reader) error {
	w, err := mw.CreateFormField("options")
	if err != nil {
		return err
	}
	if err := json.NewEncoder(w).Encode(r); err != nil {
		return err
	}
	if w, err = mw.CreateFormFile("context", "context.tar"); err != nil {
		return err
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{archive}, make([]byte, copyBuffer)); err != nil {
		return err
	}
	return mw.Close()
}
