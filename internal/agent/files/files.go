// Package files serves the plain HTTP calls on files: downloads, uploads,
// composition, and tar archives both ways, all in constant memory.
package files

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/warrenhq/warren/internal/agent/beneath"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/internal/agent/users"
)

// copyBytes is the buffer of one transfer.
const copyBytes = 256 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, copyBytes); return &b }}

// Handler serves the calls.
type Handler struct{ Session *session.State }

// httpError is an error with its HTTP status.
type httpError struct {
	status int
	err    error
}

func (e *httpError) Error() string { return e.err.Error() }
func (e *httpError) Unwrap() error { return e.err }

func statusf(status int, format string, args ...any) error {
	return &httpError{status, fmt.Errorf(format, args...)}
}

// WriteError answers with err as JSON {code, message}. Errors of the file
// system get the status that fits.
func WriteError(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	var he *httpError
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &he):
		status = he.status
	case errors.As(err, &tooLarge):
		status = http.StatusRequestEntityTooLarge
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		status = http.StatusInsufficientStorage
		err = fmt.Errorf("not enough disk space available: %w", err)
	case errors.Is(err, beneath.ErrEscapes):
		status = http.StatusBadRequest
	case errors.Is(err, fs.ErrNotExist):
		status = http.StatusNotFound
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		status = http.StatusForbidden
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ELOOP),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL), errors.Is(err, fs.ErrExist):
		status = http.StatusBadRequest
	}
	WriteStatus(w, status, err.Error())
}

// WriteStatus answers with a status and a message as JSON.
func WriteStatus(w http.ResponseWriter, status int, message string) {
	h := w.Header()
	h.Del("Content-Encoding")
	h.Del("Content-Length")
	h.Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(control.Error{Code: status, Message: strings.ToValidUTF8(message, "?")})
}

// WriteJSON answers 200 with v.
func WriteJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

// user finds the user that a call names.
func (h *Handler) user(name string) (users.User, error) {
	u, err := h.Session.User(name)
	if errors.Is(err, users.ErrUnknown) {
		return u, statusf(http.StatusUnauthorized, "invalid username: '%.64s'", name)
	}
	return u, err
}

// resolve resolves the path that a call names.
func resolve(path string, u users.User) (string, error) {
	p, err := users.Resolve(path, u)
	if err != nil {
		return "", &httpError{http.StatusBadRequest, err}
	}
	return p, nil
}

// openRegular opens a regular file for reading; it never waits, as opening a
// pipe would.
func openRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, syscall.ENXIO) {
			err = statusf(http.StatusBadRequest, "path '%s' is not a regular file", path)
		}
		return nil, nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		what := "not a regular file"
		if st.IsDir() {
			what = "a directory"
		}
		err = statusf(http.StatusBadRequest, "path '%s' is %s", path, what)
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, st, nil
}
