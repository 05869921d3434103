package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/sandbox"
)

func (a *API) registerEvents() {
	a.stream(huma.Operation{
		OperationID: "stream-events", Method: http.MethodGet, Path: "/v1/events", Tags: []string{"sandboxes"},
		Summary: "Follow what happens to sandboxes",
		Description: "Server-sent events: id is the event's seq, event its type, data the event as JSON. " +
			"A client that reads too slowly is cut off; it goes on where it was by Last-Event-ID.",
		Parameters: []*huma.Param{
			queryParam("sandbox", "string", "Only this sandbox's", false),
			queryParam("after", "integer", "Begin after this seq; 0 begins at the oldest kept. Default: only what is new", false),
			{Name: "Last-Event-ID", In: "header", Description: "The same as after, as EventSource sends it; goes before it", Schema: &huma.Schema{Type: huma.TypeString}},
		},
		Responses: map[string]*huma.Response{"200": {
			Description: "The stream",
			Content:     map[string]*huma.MediaType{"text/event-stream": {Schema: &huma.Schema{Type: huma.TypeString}}},
		}},
	}, a.events)
}

// parseLastEventID reads a seq to begin after; -1, "only what is new", for "".
// The error has CodeInvalid.
func parseLastEventID(s string) (int64, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return -1, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || s[0] == '+' || s[0] == '-' {
		if len(s) > 32 {
			s = s[:32] + "…"
		}
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%q is not an event's seq: give the id of the last event that you have", strings.ToValidUTF8(s, "?"))
	}
	return n, nil
}

func (a *API) events(w http.ResponseWriter, r *http.Request) error {
	last := r.Header.Get("Last-Event-ID")
	if last == "" {
		last = r.URL.Query().Get("after")
	}
	after, err := parseLastEventID(last)
	if err != nil {
		return err
	}
	var only sandbox.ID
	if s := r.URL.Query().Get("sandbox"); s != "" {
		if only, err = sandbox.ParseID(s); err != nil {
			return err
		}
		if _, err := a.back.Get(r.Context(), tenantOf(r.Context()), only); err != nil {
			return err
		}
	}
	events, err := a.back.Subscribe(r.Context(), tenantOf(r.Context()), after)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would hold events back
	rc := http.NewResponseController(w)
	w.WriteHeader(http.StatusOK)
	fmt.Fprint(w, ": warren\n\n")
	rc.Flush()
	beat := time.NewTicker(a.o.Heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-r.Context().Done():
			return nil
		case <-beat.C:
			if _, err := fmt.Fprint(w, ":\n\n"); err != nil {
				return nil
			}
		case e, ok := <-events:
			if !ok {
				return nil
			}
			if only != "" && e.Sandbox != only {
				continue
			}
			data, err := json.Marshal(e)
			if err != nil {
				return nil
			}
			if _, err := fmt.Fprintf(w, "id: %d\nevent: %s\ndata: %s\n\n", e.Seq, e.Type, data); err != nil {
				return nil
			}
			if len(events) > 0 {
				continue // more is there: flush once
			}
		}
		if rc.Flush() != nil {
			return nil
		}
	}
}
