package agentclient

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

func basicUser(user string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"))
}

// codes maps the agent's Connect codes to the domain's.
var codes = map[connect.Code]sandbox.Code{
	connect.CodeCanceled:           sandbox.CodeCanceled,
	connect.CodeInvalidArgument:    sandbox.CodeInvalid,
	connect.CodeDeadlineExceeded:   sandbox.CodeTimeout,
	connect.CodeNotFound:           sandbox.CodeNotFound,
	connect.CodeAlreadyExists:      sandbox.CodeExists,
	connect.CodePermissionDenied:   sandbox.CodeForbidden,
	connect.CodeResourceExhausted:  sandbox.CodeTooLarge,
	connect.CodeFailedPrecondition: sandbox.CodeConflict,
	connect.CodeAborted:            sandbox.CodeConflict,
	connect.CodeUnimplemented:      sandbox.CodeUnsupported,
	connect.CodeUnavailable:        sandbox.CodeUnavailable,
	connect.CodeUnauthenticated:    sandbox.CodeUnauthenticated,
}

// Error maps an error of the agent's services, or of the way to it, to the
// domain's: the agent's own refusal keeps its code and message; a connection
// that fails is CodeUnavailable. nil stays nil.
func Error(err error) error {
	if err == nil {
		return nil
	}
	var known *sandbox.Error
	if errors.As(err, &known) {
		return err
	}
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Code() != connect.CodeUnknown && !brokeOff(err) {
		code, ok := codes[ce.Code()]
		if !ok {
			code = sandbox.CodeInternal
		}
		if code == sandbox.CodeInternal && errors.Is(err, syscall.ENOSPC) || ce.Code() == connect.CodeResourceExhausted && strings.Contains(ce.Message(), "no space left") {
			code = sandbox.CodeDiskFull
		}
		if connect.IsWireError(err) {
			return sandbox.Errorf(code, "%s", ce.Message())
		}
		return sandbox.Errorf(code, "the sandbox's agent: %w", err)
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.CodeTimeout, "the sandbox's agent did not answer in time: %w", err)
	case errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.CodeCanceled, "the call to the sandbox's agent was given up: %w", err)
	case isConnection(err):
		return sandbox.Errorf(sandbox.CodeUnavailable, "cannot reach the sandbox's agent: %w", err)
	}
	return sandbox.Errorf(sandbox.CodeInternal, "the sandbox's agent: %w", err)
}

// brokeOff tells whether err is a stream that a lost connection cut, which
// Connect calls a protocol error.
func brokeOff(err error) bool {
	return !connect.IsWireError(err) && isConnection(err) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled)
}

func isConnection(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}

// statusCodes maps the statuses of the plain HTTP calls.
var statusCodes = map[int]sandbox.Code{
	http.StatusBadRequest:            sandbox.CodeInvalid,
	http.StatusUnauthorized:          sandbox.CodeUnauthenticated,
	http.StatusForbidden:             sandbox.CodeForbidden,
	http.StatusNotFound:              sandbox.CodeNotFound,
	http.StatusMethodNotAllowed:      sandbox.CodeUnsupported,
	http.StatusNotAcceptable:         sandbox.CodeInvalid,
	http.StatusConflict:              sandbox.CodeConflict,
	http.StatusRequestEntityTooLarge: sandbox.CodeTooLarge,
	http.StatusBadGateway:            sandbox.CodeUnavailable,
	http.StatusServiceUnavailable:    sandbox.CodeUnavailable,
	http.StatusInsufficientStorage:   sandbox.CodeDiskFull,
}

// statusError reads the error body of resp, at most 64 KiB of it, and closes
// it. The text comes from inside the sandbox: it is shown, never trusted.
func statusError(resp *http.Response) error {
	defer resp.Body.Close()
	data, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var body control.Error
	message := strings.TrimSpace(string(data))
	if json.Unmarshal(data, &body) == nil && body.Message != "" {
		message = body.Message
	}
	if message == "" {
		message = "the sandbox's agent answered " + resp.Status
	}
	code, ok := statusCodes[resp.StatusCode]
	if !ok {
		code = sandbox.CodeInternal
	}
	return sandbox.Errorf(code, "%s", strings.ToValidUTF8(message, "?"))
}
