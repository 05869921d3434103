package sandbox

import (
	"errors"
	"fmt"
)

// Code is an error's stable, machine-readable name. Codes are part of the API:
// they are never renamed or reused.
type Code string

// The error codes.
const (
	CodeInvalid         Code = "invalid_argument"  // the request itself is wrong
	CodeUnauthenticated Code = "unauthenticated"   // no valid key or token
	CodeForbidden       Code = "forbidden"         // a valid key, but not for this
	CodeNotFound        Code = "not_found"         // no such thing, or not yours
	CodeExists          Code = "already_exists"    // the name is taken
	CodeConflict        Code = "conflict"          // not in this state
	CodeUnsupported     Code = "unsupported"       // this runtime or build cannot do it
	CodeUnavailable     Code = "unavailable"       // this host or the sandbox cannot do it now
	CodeNoCapacity      Code = "no_capacity"       // the host's budget cannot hold it
	CodeDiskFull        Code = "disk_full"         // ENOSPC or EDQUOT
	CodeTooLarge        Code = "too_large"         // over a stated limit
	CodeTimeout         Code = "deadline_exceeded" // it took longer than allowed
	CodeCanceled        Code = "canceled"          // the client went away
	CodeBadTemplate     Code = "bad_template"      // the template cannot run
	CodeBuildFailed     Code = "build_failed"      // a step of a template build failed
	CodeCorruptCapture  Code = "corrupt_capture"   // a capture's files are not what was written
	CodeInternal        Code = "internal"          // a fault of Warren's own
)

// Error is an error with a stable code, a message for people that says what
// was wrong and what to do, and details for machines. The cause is for logs
// and errors.Is; it is never shown to a client.
type Error struct {
	Code    Code
	Message string
	Details map[string]string
	cause   error
}

// Errorf makes an Error. The format takes %w: the wrapped error becomes the
// cause, and its text is part of the message.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), cause: errors.Unwrap(err)}
}

// With returns a copy of e with one more detail.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.Details = make(map[string]string, len(e.Details)+1)
	for k, v := range e.Details {
		c.Details[k] = v
	}
	c.Details[key] = value
	return &c
}

// Error gives the message alone: the code travels beside it.
func (e *Error) Error() string { return e.Message }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is match two Errors by code, so that a bare
// &Error{Code: c} works as a sentinel.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Message == "" && t.Code == e.Code
}

// CodeOf gives the code of the first Error in err's chain; CodeInternal where
// there is none, and "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	return CodeInternal
}
