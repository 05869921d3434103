package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// HeaderBuildOptions carries a build's options as JSON where the body is the
// context's tar archive alone.
const HeaderBuildOptions = "Warren-Build-Options"

type ByName struct {
	Name string `path:"name" maxLength:"256" doc:"The template's name or id"`
}

func (a *API) registerTemplates() {
	register(a, huma.Operation{
		OperationID: "list-templates", Method: http.MethodGet, Path: "/v1/templates", Tags: []string{"templates"}, Summary: "List templates",
	}, func(ctx context.Context, _ *struct{}) (*body[wire.TemplateList], error) {
		ts, err := a.back.Templates(ctx, tenantOf(ctx))
		if err != nil {
			return nil, err
		}
		out := wire.TemplateList{Templates: make([]wire.Template, 0, len(ts))}
		for _, t := range ts {
			out.Templates = append(out.Templates, toTemplate(t))
		}
		return &body[wire.TemplateList]{out}, nil
	})
	register(a, huma.Operation{
		OperationID: "get-template", Method: http.MethodGet, Path: "/v1/templates/{name}", Tags: []string{"templates"}, Summary: "Get one template",
	}, func(ctx context.Context, in *ByName) (*body[wire.Template], error) {
		t, err := a.back.Template(ctx, tenantOf(ctx), in.Name)
		if err != nil {
			return nil, err
		}
		return &body[wire.Template]{toTemplate(t)}, nil
	})
	register(a, huma.Operation{
		OperationID: "delete-template", Method: http.MethodDelete, Path: "/v1/templates/{name}", Tags: []string{"templates"},
		Summary: "Remove a template", Description: "conflict: a live sandbox uses it.",
	}, func(ctx context.Context, in *ByName) (*none, error) {
		return nil, a.back.RemoveTemplate(ctx, tenantOf(ctx), in.Name)
	})
	schemas := a.huma.OpenAPI().Components.Schemas
	options := schemas.Schema(reflect.TypeFor[wire.BuildTemplate](), true, "BuildTemplate")
	binary := &huma.Schema{Type: huma.TypeString, Format: "binary"}
	a.stream(huma.Operation{
		OperationID: "build-template", Method: http.MethodPost, Path: "/v1/templates/build", Tags: []string{"templates"},
		Summary: "Build a template",
		Description: "Of Debian packages, of an OCI image, or of a Dockerfile. The answer is one JSON event a line as the build goes on; " +
			"the last has template, or error where the build failed. A client that goes away ends the build.\n\n" +
			"The options are the body, or the part \"options\" before a part \"context\" with a tar archive (a Dockerfile's context, or the image archive), " +
			"or the header " + HeaderBuildOptions + " of a body that is the archive.",
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
			"application/json": {Schema: options},
			"multipart/form-data": {Schema: &huma.Schema{
				Type: huma.TypeObject, Required: []string{"options"},
				Properties: map[string]*huma.Schema{"options": options, "context": binary},
			}},
			"application/x-tar": {Schema: binary},
		}},
		Responses: map[string]*huma.Response{"200": {
			Description: "The build's events",
			Content:     map[string]*huma.MediaType{"application/x-ndjson": {Schema: schemas.Schema(reflect.TypeFor[wire.BuildEvent](), true, "BuildEvent")}},
		}},
	}, a.build)
}

func (a *API) build(w http.ResponseWriter, r *http.Request) error {
	body := r.Body
	timeBody(w, r, true)
	options, archive, err := buildParts(r)
	if err != nil {
		return err
	}
	in := infoOf(r.Context())
	req, err := toBuild(options, archive, in.tenant, in.root)
	if err != nil {
		return err
	}
	rc := http.NewResponseController(w)
	// The context is read while progress is written.
	if err := rc.EnableFullDuplex(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return err
	}
	out := &eventWriter{w: w, rc: rc}
	t, err := a.back.BuildTemplate(r.Context(), in.tenant, req, func(e template.Event) {
		out.write(wire.BuildEvent{
			Stage: string(e.Stage), Message: e.Message, Current: e.Current, Total: e.Total,
			Unit: string(e.Unit), Cached: e.Cached, Line: e.Line,
		})
	})
	if err != nil {
		if !out.begun { // nothing is out: it can be a plain refusal
			return err
		}
		e := a.toError(r.Context(), err)
		out.write(wire.BuildEvent{Error: &e.body})
		linger(w, r, body)
		return nil
	}
	wt := toTemplate(t)
	out.write(wire.BuildEvent{Template: &wt})
	return nil
}

// eventWriter writes the lines of a build's answer.
type eventWriter struct {
	w     http.ResponseWriter
	rc    *http.ResponseController
	begun bool
}

func (o *eventWriter) write(e wire.BuildEvent) {
	if !o.begun {
		o.begun = true
		o.w.Header().Set("Content-Type", "application/x-ndjson")
		o.w.Header().Set("X-Accel-Buffering", "no")
		o.w.WriteHeader(http.StatusOK)
	}
	data, err := json.Marshal(e)
	if err != nil {
		return // wire.BuildEvent always can be
	}
	// A client that went away cancels the request's context, which ends the build.
	o.w.Write(append(data, '\n'))
	o.rc.Flush()
}

// buildParts takes a build request apart: its options, and the archive that
// comes with it, nil where none does.
func buildParts(r *http.Request) (o wire.BuildTemplate, archive io.Reader, err error) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		kind = ""
	}
	switch kind {
	case "", "application/json":
		o, err = readOptions(r.Body)
		return o, nil, err
	case "multipart/form-data":
		mr, err := r.MultipartReader()
		if err != nil {
			return o, nil, sandbox.Errorf(sandbox.CodeInvalid, "the multipart body: %w", err)
		}
		p, err := mr.NextPart()
		if err != nil || p.FormName() != "options" {
			return o, nil, sandbox.Errorf(sandbox.CodeInvalid, `the first part has to be "options"`)
		}
		if o, err = readOptions(p); err != nil {
			return o, nil, err
		}
		p, err = mr.NextPart()
		switch {
		case err == io.EOF:
			return o, nil, nil
		case err != nil:
			return o, nil, sandbox.Errorf(sandbox.CodeInvalid, "the multipart body: %w", err)
		case p.FormName() != "context":
			return o, nil, sandbox.Errorf(sandbox.CodeInvalid, `the second part has to be "context"`)
		}
		return o, p, nil
	case "application/x-tar", "application/octet-stream", "application/gzip", "application/zstd":
		h := r.Header.Get(HeaderBuildOptions)
		if h == "" {
			return o, nil, sandbox.Errorf(sandbox.CodeInvalid, "a body of %s needs its options as JSON in the header %s", kind, HeaderBuildOptions)
		}
		o, err = readOptions(bytes.NewReader([]byte(h)))
		return o, r.Body, err
	}
	return o, nil, sandbox.Errorf(sandbox.CodeInvalid, "a build's body is application/json, multipart/form-data or application/x-tar, not %q", kind)
}

// maxOptions leaves room for a Dockerfile in the options.
const maxOptions = 2 << 20

func readOptions(r io.Reader) (wire.BuildTemplate, error) {
	var o wire.BuildTemplate
	data, err := io.ReadAll(io.LimitReader(r, maxOptions+1))
	if err != nil {
		return o, sandbox.Errorf(sandbox.CodeInvalid, "read the build's options: %w", err)
	}
	if len(data) > maxOptions {
		return o, sandbox.Errorf(sandbox.CodeTooLarge, "the build's options are larger than %d bytes", maxOptions)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&o); err != nil {
		return o, sandbox.Errorf(sandbox.CodeInvalid, "the build's options are not the JSON of a build: %w", err)
	}
	return o, nil
}

// toBuild checks that o asks for exactly one kind of build. root says that the
// caller is root on this host, and so may have its files read.
func toBuild(o wire.BuildTemplate, archive io.Reader, tenant string, root bool) (manager.BuildRequest, error) {
	var b manager.BuildRequest
	kinds := 0
	for _, set := range []bool{o.Debian != nil, o.Import != nil, o.Dockerfile != nil} {
		if set {
			kinds++
		}
	}
	switch {
	case kinds != 1:
		return b, sandbox.Errorf(sandbox.CodeInvalid, "give exactly one of debian, import and dockerfile")
	case o.Name == "":
		return b, sandbox.Errorf(sandbox.CodeInvalid, "name is missing: give the template a name")
	case o.Debian != nil && archive != nil:
		return b, sandbox.Errorf(sandbox.CodeInvalid, "a Debian build takes no context")
	}
	target := template.Target{
		Tenant: tenant, Name: o.Name, Shared: o.Shared, Resources: sandbox.Resources(o.Resources),
		StartCmd: o.StartCmd, ReadyCmd: o.ReadyCmd,
	}
	switch {
	case o.Debian != nil:
		d := o.Debian
		b.Debian = &template.DebianOptions{
			Target: target, Suite: d.Suite, Packages: d.Packages, Mirror: d.Mirror, User: d.User, Env: d.Env, Slim: d.Slim,
			Prune: d.Prune, Variant: d.Variant, Reseed: d.Reseed, Interpreter: d.Interpreter,
		}
	case o.Import != nil:
		b.Import = &template.ImportOptions{
			Target: target, Ref: o.Import.Ref, AllowLocal: root, Archive: archive, Insecure: o.Import.Insecure,
		}
	default:
		d := o.Dockerfile
		b.Dockerfile = &template.DockerfileOptions{
			Target: target, Context: archive, Dockerfile: d.Dockerfile, BuildArgs: d.BuildArgs,
			Stage: d.Stage, NoCache: d.NoCache, Insecure: d.Insecure,
		}
		if d.Content != "" {
			b.Dockerfile.Content = []byte(d.Content)
		}
	}
	return b, nil
}
