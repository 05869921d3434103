package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// statusClientClosed is nginx's status for a client that went away before the
// answer; it is only ever seen in the access log.
const statusClientClosed = 499

// statuses gives each code its HTTP status. It is part of the API.
var statuses = map[sandbox.Code]int{
	sandbox.CodeInvalid:         http.StatusBadRequest,
	sandbox.CodeUnauthenticated: http.StatusUnauthorized,
	sandbox.CodeForbidden:       http.StatusForbidden,
	sandbox.CodeNotFound:        http.StatusNotFound,
	sandbox.CodeExists:          http.StatusConflict,
	sandbox.CodeConflict:        http.StatusConflict,
	sandbox.CodeUnsupported:     http.StatusNotImplemented,
	sandbox.CodeUnavailable:     http.StatusServiceUnavailable,
	sandbox.CodeNoCapacity:      http.StatusServiceUnavailable,
	sandbox.CodeDiskFull:        http.StatusInsufficientStorage,
	sandbox.CodeTooLarge:        http.StatusRequestEntityTooLarge,
	sandbox.CodeTimeout:         http.StatusGatewayTimeout,
	sandbox.CodeCanceled:        statusClientClosed,
	sandbox.CodeBadTemplate:     http.StatusUnprocessableEntity,
	sandbox.CodeBuildFailed:     http.StatusUnprocessableEntity,
	sandbox.CodeCorruptCapture:  http.StatusUnprocessableEntity, // no change of the request or of the state mends it
	sandbox.CodeInternal:        http.StatusInternalServerError,
}

// HTTPStatus gives the status that an error of this code is answered with.
func HTTPStatus(c sandbox.Code) int {
	if s, ok := statuses[c]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// codeOfStatus is the way back, for errors that HTTP's own machinery makes.
func codeOfStatus(status int) sandbox.Code {
	switch {
	case status == http.StatusUnauthorized:
		return sandbox.CodeUnauthenticated
	case status == http.StatusForbidden:
		return sandbox.CodeForbidden
	case status == http.StatusNotFound:
		return sandbox.CodeNotFound
	case status == http.StatusRequestEntityTooLarge:
		return sandbox.CodeTooLarge
	case status == http.StatusRequestTimeout:
		return sandbox.CodeTimeout
	case status >= 400 && status < 500:
		return sandbox.CodeInvalid
	}
	return sandbox.CodeInternal
}

// apiError is wire.Error as huma wants an error.
type apiError struct {
	body   wire.Error
	status int
}

func (e *apiError) Error() string                { return e.body.Message }
func (e *apiError) GetStatus() int               { return e.status }
func (e *apiError) MarshalJSON() ([]byte, error) { return json.Marshal(e.body) }

// Schema describes the body: it is wire.Error's.
func (e *apiError) Schema(r huma.Registry) *huma.Schema {
	return r.Schema(errorType, true, "Error")
}

var setHumaErrors = sync.OnceFunc(func() {
	// huma builds its own errors (a body that does not fit its schema, say)
	// by this function; ours gives them the one form that all errors have.
	huma.NewError = func(status int, msg string, errs ...error) huma.StatusError {
		if status == http.StatusUnprocessableEntity {
			status = http.StatusBadRequest
		}
		e := &apiError{status: status, body: wire.Error{Code: codeOfStatus(status), Message: msg}}
		var parts []string
		for _, err := range errs {
			var d *huma.ErrorDetail
			switch {
			case err == nil:
			case errors.As(err, &d) && d.Location != "":
				if e.body.Details == nil {
					e.body.Details = map[string]string{}
				}
				e.body.Details[d.Location] = d.Message
				parts = append(parts, d.Location+": "+d.Message)
			default:
				parts = append(parts, err.Error())
			}
		}
		if len(parts) > 3 {
			parts = append(parts[:3], "…")
		}
		if len(parts) > 0 {
			e.body.Message += ": " + strings.Join(parts, "; ")
		}
		return e
	}
})

// toError makes any error the body and status of an answer. What is not an
// error of the domain is a fault of ours: it is logged and not told.
func (a *API) toError(ctx context.Context, err error) *apiError {
	var e *sandbox.Error
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &e):
	case errors.As(err, &tooLarge):
		e = sandbox.Errorf(sandbox.CodeTooLarge, "the body is larger than %d bytes", tooLarge.Limit)
	case errors.Is(err, context.Canceled):
		e = sandbox.Errorf(sandbox.CodeCanceled, "the client went away")
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		e = sandbox.Errorf(sandbox.CodeTimeout, "it took longer than allowed")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		e = sandbox.Errorf(sandbox.CodeDiskFull, "the host's disk is full: free some space under the state directory")
	case errors.Is(err, io.ErrUnexpectedEOF):
		e = sandbox.Errorf(sandbox.CodeInvalid, "the body ended early")
	default:
		e = sandbox.Errorf(sandbox.CodeInternal, "a fault of Warren's own; the daemon's log has more under request id %s", requestID(ctx))
	}
	if e.Code == sandbox.CodeInternal {
		a.log.ErrorContext(ctx, "request failed", "request_id", requestID(ctx), "err", err)
	}
	return &apiError{status: HTTPStatus(e.Code), body: wire.Error{Code: e.Code, Message: strings.ToValidUTF8(e.Message, "?"), Details: e.Details}}
}

// fail answers a request that huma does not handle with err.
func (a *API) fail(w http.ResponseWriter, r *http.Request, err error) {
	e := a.toError(r.Context(), err)
	writeJSON(w, e.status, e.body)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	writeJSONHead(w, status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.Encode(v) // the client went away: nobody is left to tell
}

// writeJSONHead begins an answer of JSON.
func writeJSONHead(w http.ResponseWriter, status int) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	if status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1")
	}
	w.WriteHeader(status)
}
