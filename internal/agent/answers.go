package agent

import (
	"context"
	"net/http"
	"sync"
)

// answers holds back the answers of calls that change the sandbox while its
// processes are stopped. A capture is made meanwhile, and the agent goes on: a
// file that it finishes after the capture is not in it, and where the capture
// is all that stays of the sandbox, the client must not have been told that it
// was written.
type answers struct {
	mu   sync.Mutex
	open chan struct{} // nil: they go out
}

func (a *answers) hold() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open == nil {
		a.open = make(chan struct{})
	}
}

func (a *answers) release() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open != nil {
		close(a.open)
		a.open = nil
	}
}

// wait waits until answers go out, or ctx is done.
func (a *answers) wait(ctx context.Context) {
	a.mu.Lock()
	open := a.open
	a.mu.Unlock()
	if open == nil {
		return
	}
	select {
	case <-open:
	case <-ctx.Done():
	}
}

// heldWriter writes when answers go out.
type heldWriter struct {
	http.ResponseWriter
	ctx     context.Context
	answers *answers
}

func (w *heldWriter) WriteHeader(status int) {
	w.answers.wait(w.ctx)
	w.ResponseWriter.WriteHeader(status)
}

func (w *heldWriter) Write(p []byte) (int, error) {
	w.answers.wait(w.ctx)
	return w.ResponseWriter.Write(p)
}

// Flush implements http.Flusher, for which connect asks.
func (w *heldWriter) Flush() {
	w.answers.wait(w.ctx)
	http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap is for http.ResponseController.
func (w *heldWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
