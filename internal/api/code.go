package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"reflect"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/interpreter"
)

const maxCode = 34 << 20

func (a *API) registerCode() {
	a.stream(huma.Operation{
		OperationID: "run-code", Method: http.MethodPost, Path: "/v1/sandboxes/{id}/code", Tags: []string{"inside"},
		Summary: "Run code in the code interpreter",
		Description: "Of a sandbox whose template has one, such as code-interpreter-v1. The answer is one JSON event a line as the code runs: stdout and stderr, " +
			"result, error, number_of_executions, and end_of_execution last. If the client goes away the code is interrupted.",
		Parameters: []*huma.Param{idParam()},
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{
			"application/json": {Schema: a.huma.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[wire.RunCode](), true, "RunCode")},
		}},
		Responses: bytesResponse("200", "application/x-ndjson", "Events"),
	}, a.runCode)
}

func (a *API) runCode(w http.ResponseWriter, r *http.Request) error {
	id, err := sandbox.ParseID(r.PathValue("id"))
	if err != nil {
		return err
	}
	ctx, tenant := r.Context(), tenantOf(r.Context())
	if _, err := a.back.Get(ctx, tenant, id); err != nil {
		return err
	}
	timeBody(w, r, false)
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxCode))
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "read the body: %w", err)
	}
	var in wire.RunCode
	if err := json.Unmarshal(data, &in); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the body is not the JSON of a request to run code: %w", err)
	}
	release, err := a.back.Use(ctx, tenant, id)
	if err != nil {
		return err
	}
	defer release()
	tr := &http.Transport{
		DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: 64 << 10,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return a.back.Dial(ctx, tenant, id, interpreter.Port)
		},
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://interpreter/execute", bytes.NewReader(data))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := tr.RoundTrip(req)
	if err != nil {
		var e *sandbox.Error
		if errors.As(err, &e) && e.Code != sandbox.CodeUnavailable {
			return e
		}
		return sandbox.Errorf(sandbox.CodeUnavailable, "nothing answers on port %d of the sandbox: make it of the template code-interpreter-v1: %w", interpreter.Port, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return codeRefused(res)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusOK)
	return a.sent(copyStream(w, res.Body, http.NewResponseController(w).Flush))
}

// codeRefused makes an error of the service's refusal.
func codeRefused(res *http.Response) error {
	data, _ := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	var e struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(data, &e) != nil || e.Message == "" {
		e.Message = "the code interpreter answered " + res.Status
	}
	code := sandbox.CodeUnavailable
	switch res.StatusCode {
	case http.StatusBadRequest:
		code = sandbox.CodeInvalid
	case http.StatusNotFound:
		code = sandbox.CodeNotFound
	}
	return sandbox.Errorf(code, "%s", e.Message)
}
