package e2b

import (
	"bufio"
	"errors"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

type metric struct {
	Timestamp     time.Time `json:"timestamp"`
	TimestampUnix int64     `json:"timestampUnix"`
	CPUCount      int       `json:"cpuCount"`
	CPUUsedPct    float64   `json:"cpuUsedPct"`
	MemUsed       uint64    `json:"memUsed"` // bytes, as the rest
	MemTotal      uint64    `json:"memTotal"`
	MemCache      uint64    `json:"memCache"`
	DiskUsed      uint64    `json:"diskUsed"`
	DiskTotal     uint64    `json:"diskTotal"`
}

// measure reads what the agent sees. A sandbox that is asleep has no metrics,
// and is not woken for them.
func (f *facade) measure(r *http.Request, tenant string, sb sandbox.Sandbox) ([]metric, error) {
	if sb.State != sandbox.Running {
		return []metric{}, nil
	}
	agent, err := f.Back.Agent(r.Context(), tenant, sb.ID)
	if err != nil {
		return nil, err
	}
	m, err := agent.Metrics(r.Context())
	if err != nil {
		return nil, err
	}
	at := time.Unix(m.Timestamp, 0).UTC()
	return []metric{{
		Timestamp: at, TimestampUnix: m.Timestamp, CPUCount: m.CPUCount, CPUUsedPct: m.CPUUsedPct,
		MemUsed: m.MemUsed, MemTotal: m.MemTotal, MemCache: m.MemCache, DiskUsed: m.DiskUsed, DiskTotal: m.DiskTotal,
	}}, nil
}

// unixQuery reads a time in Unix seconds; the zero time is none.
func unixQuery(r *http.Request, name string) (time.Time, error) {
	s := r.URL.Query().Get(name)
	if s == "" {
		return time.Time{}, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt32*100 {
		return time.Time{}, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a time in Unix seconds", name)
	}
	return time.Unix(n, 0), nil
}

// metrics answers with one reading, of now: Warren keeps no history of them.
// A range that does not hold now has none.
func (f *facade) metrics(w http.ResponseWriter, r *http.Request, tenant string) error {
	start, err := unixQuery(r, "start")
	if err != nil {
		return err
	}
	end, err := unixQuery(r, "end")
	if err != nil {
		return err
	}
	if !end.IsZero() && end.Before(start) {
		return sandbox.Errorf(sandbox.CodeInvalid, "end is before start")
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	now := time.Now()
	if start.After(now) || !end.IsZero() && end.Before(now.Truncate(time.Second)) {
		return writeJSON(w, http.StatusOK, []metric{})
	}
	out, err := f.measure(r, tenant, sb)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, out)
}

// maxMeasured is the most sandboxes of one question for metrics.
const maxMeasured = 100

func (f *facade) allMetrics(w http.ResponseWriter, r *http.Request, tenant string) error {
	ids := strings.Split(strings.Join(r.URL.Query()["sandbox_ids"], ","), ",")
	if len(ids) > maxMeasured {
		return sandbox.Errorf(sandbox.CodeInvalid, "sandbox_ids names %d: at most %d", len(ids), maxMeasured)
	}
	out := map[string]metric{}
	for _, id := range ids {
		sb, err := f.get(r.Context(), tenant, id)
		if err != nil {
			continue // it has none
		}
		if m, err := f.measure(r, tenant, sb); err == nil && len(m) > 0 {
			out[id] = m[0]
		}
	}
	return writeJSON(w, http.StatusOK, map[string]any{"sandboxes": out})
}

type sandboxLog struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields"`
}

// Bounds of a log's lines: a sandbox prints what it likes.
const (
	maxLogLine  = 16 << 10
	maxLogLines = 1000
)

// console reads the console of the path's sandbox by lines, and how many of
// them were asked for. Its lines carry no time: the sandbox's start stands for
// it.
func (f *facade) console(r *http.Request, tenant string) (lines []sandboxLog, limit int, err error) {
	if limit, err = number(r, "limit", maxLogLines, maxLogLines); err != nil {
		return nil, 0, err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return nil, 0, err
	}
	src, err := f.Back.Logs(r.Context(), tenant, sb.ID, false)
	if err != nil {
		return nil, 0, err
	}
	defer src.Close()
	lines = []sandboxLog{}
	in := bufio.NewReaderSize(src, maxLogLine)
	for {
		line, err := in.ReadSlice('\n') // a longer line comes in pieces
		if text := strings.ToValidUTF8(strings.TrimRight(string(line), "\r\n"), "?"); text != "" {
			lines = append(lines, sandboxLog{sb.StartedAt.UTC(), "info", text, map[string]string{}})
		}
		switch {
		case err == nil, errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF):
			return lines, limit, nil
		default:
			return nil, 0, err
		}
	}
}

// logs is the first version: the newest lines.
func (f *facade) logs(w http.ResponseWriter, r *http.Request, tenant string) error {
	all, limit, err := f.console(r, tenant)
	if err != nil {
		return err
	}
	all = all[max(0, len(all)-limit):]
	type line struct {
		Timestamp time.Time `json:"timestamp"`
		Line      string    `json:"line"`
	}
	lines := make([]line, len(all))
	for i, l := range all {
		lines[i] = line{l.Timestamp, l.Message}
	}
	return writeJSON(w, http.StatusOK, map[string]any{"logs": lines, "logEntries": all})
}

func (f *facade) logsV2(w http.ResponseWriter, r *http.Request, tenant string) error {
	all, limit, err := f.console(r, tenant)
	if err != nil {
		return err
	}
	q := r.URL.Query()
	out := []sandboxLog{}
	for _, l := range all {
		// Every line is of level info, the second of four.
		if level := q.Get("level"); (level == "" || level == "debug" || level == "info") && strings.Contains(l.Message, q.Get("search")) {
			out = append(out, l)
		}
	}
	if q.Get("direction") == "backward" {
		out = out[max(0, len(out)-limit):]
	} else {
		out = out[:min(limit, len(out))]
	}
	return writeJSON(w, http.StatusOK, map[string]any{"logs": out})
}
