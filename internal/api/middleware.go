package api

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"regexp"
	"runtime/debug"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// HeaderRequestID names a request in answers and in logs.
const HeaderRequestID = "X-Request-Id"

var requestIDPattern = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

type infoKey struct{}

// info is what the layers of one request tell each other. Only the request's
// own goroutine writes to it.
type info struct {
	id     string
	tenant string
	root   bool // the caller is root on this host: it came by the unix socket
	route  string
	// switched: the connection was taken over, and 101 written to it.
	switched bool
}

func (i *info) become(tenant string, root bool) { i.tenant, i.root = tenant, root }

func infoOf(ctx context.Context) *info {
	if i, ok := ctx.Value(infoKey{}).(*info); ok {
		return i
	}
	return &info{}
}

func requestID(ctx context.Context) string { return infoOf(ctx).id }

func tenantOf(ctx context.Context) string { return infoOf(ctx).tenant }

// outer gives a request its id, counts it, logs it and catches its panics.
func (a *API) outer(next http.Handler, via string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		in := &info{id: r.Header.Get(HeaderRequestID)}
		if !requestIDPattern.MatchString(in.id) {
			in.id = rand.Text()
		}
		w.Header().Set(HeaderRequestID, in.id)
		rec := &recorder{ResponseWriter: w}
		r = r.WithContext(context.WithValue(r.Context(), infoKey{}, in))
		start := time.Now()
		defer func() {
			p := recover()
			err, _ := p.(error)
			aborted := p != nil && errors.Is(err, http.ErrAbortHandler)
			if p != nil && !aborted {
				a.log.ErrorContext(r.Context(), "panic in a request", "request_id", in.id, "panic", p, "stack", string(debug.Stack()))
				if rec.status == 0 {
					a.fail(rec, r, sandbox.Errorf(sandbox.CodeInternal, "a fault of Warren's own; the daemon's log has more under request id %s", in.id))
				} else {
					aborted = true // the answer is half out: only breaking off tells that it is not whole
				}
			}
			took := time.Since(start)
			route := in.route
			if route == "" {
				route = "proxy"
			}
			status := rec.code()
			if in.switched {
				status = http.StatusSwitchingProtocols
			}
			a.metrics.observe(route, status, took)
			// No path or query: they may hold secrets and are the tenant's business.
			a.log.LogAttrs(r.Context(), slog.LevelDebug, "request",
				slog.String("request_id", in.id), slog.String("via", via), slog.String("method", r.Method),
				slog.String("route", route), slog.Int("status", status), slog.Int64("bytes", rec.bytes),
				slog.Duration("took", took), slog.String("tenant", in.tenant))
			if aborted {
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(rec, r)
	})
}

// recorder notes the status and size of an answer. http.ResponseController
// reaches what is below it through Unwrap.
type recorder struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) Write(p []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	n, err := w.ResponseWriter.Write(p)
	w.bytes += int64(n)
	return n, err
}

func (w *recorder) code() int {
	if w.status == 0 {
		return http.StatusOK
	}
	return w.status
}
