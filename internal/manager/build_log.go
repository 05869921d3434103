package manager

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/template"
)

// Bounds of one build's log.
const (
	maxLogEntries = 50_000
	maxLogBytes   = 16 << 20
)

// BuildLogEntry is one line of a build's log.
type BuildLogEntry struct {
	Time    time.Time `json:"time"`
	Level   string    `json:"level"` // "debug", "info", "warn" or "error"
	Message string    `json:"message"`
	Step    string    `json:"step,omitempty"` // as template.FailedBase and its like
}

// buildLog is the log of a build that runs: a file of JSON lines.
type buildLog struct {
	mu      sync.Mutex
	f       *os.File
	entries int
	bytes   int64
	full    bool
	step    string
}

func newBuildLog(path string) (*buildLog, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	return &buildLog{f: f, step: template.FailedBase}, err
}

func (l *buildLog) close() { l.f.Close() }

// add writes an entry. A disk that is full loses lines, not the build.
func (l *buildLog) add(level, message, step string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.full && level != "error" {
		return
	}
	if l.entries >= maxLogEntries || l.bytes >= maxLogBytes {
		if l.full = true; level != "error" {
			level, message = "warn", "the log is full: what follows is not kept"
		}
	}
	data, err := json.Marshal(BuildLogEntry{Time: time.Now().UTC(), Level: level, Message: message, Step: step})
	if err != nil {
		return // strings always can be
	}
	n, _ := l.f.Write(append(data, '\n'))
	l.entries++
	l.bytes += int64(n)
}

// progress takes a build's events.
func (l *buildLog) progress(e template.Event) {
	level, message := "info", e.Message
	switch e.Stage {
	case template.StageStep:
		l.step = template.FailedBase
		if e.Line > 0 {
			l.step = strconv.Itoa(e.Line)
		}
		if e.Cached {
			message = "CACHED " + e.Message
		} else {
			message = fmt.Sprintf("[%d/%d] %s", e.Current, e.Total, e.Message)
		}
	case template.StageLog:
	case template.StageWarning:
		level = "warn"
	case template.StageDownload, template.StageExtract, template.StageContext:
		if e.Message == "" {
			return // counts of bytes
		}
		level = "debug"
	default:
		level = "debug"
	}
	l.add(level, message, l.step)
}

// BuildLogs gives up to limit entries of a build's log after the first offset.
func (m *Manager) BuildLogs(ctx context.Context, tenant, templateID, buildID string, offset, limit int) ([]BuildLogEntry, error) {
	b, err := m.TemplateBuild(ctx, tenant, templateID, buildID)
	if err != nil {
		return nil, err
	}
	entries := []BuildLogEntry{}
	f, err := os.Open(m.buildLogPath(b.ID))
	if errors.Is(err, os.ErrNotExist) {
		return entries, nil
	}
	if err != nil {
		return nil, diskError("read the build's log", err)
	}
	defer f.Close()
	r := bufio.NewReader(f)
	for n := 0; len(entries) < limit; n++ {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			break // a line without its end is being written
		}
		if err != nil {
			return nil, diskError("read the build's log", err)
		}
		if n < offset {
			continue
		}
		var e BuildLogEntry
		if err := json.Unmarshal(line, &e); err != nil {
			e = BuildLogEntry{Level: "warn", Message: "a line of the log cannot be read"}
		}
		entries = append(entries, e)
	}
	return entries, nil
}
