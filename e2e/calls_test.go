package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// cliResult is what a run of the command line gave.
type cliResult struct {
	stdout, stderr []byte
	code           int
}

func (l *lab) cli(t *testing.T, args ...string) cliResult {
	t.Helper()
	return l.cliIn(t, nil, args...)
}

func (l *lab) cliIn(t *testing.T, stdin io.Reader, args ...string) cliResult {
	t.Helper()
	return runCLI(t, l.bin, "unix://"+l.socket, stdin, args...)
}

func runCLI(t *testing.T, bin, host string, stdin io.Reader, args ...string) cliResult {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.Env = append(os.Environ(), "WARREN_HOST="+host)
	cmd.Stdin = stdin
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		t.Fatalf("warren %q: %v, %v\n%s", args, err, ctx.Err(), errs.Bytes())
	}
	return cliResult{out.Bytes(), errs.Bytes(), cmd.ProcessState.ExitCode()}
}

// answer is a raw answer of the API.
type answer struct {
	status int
	header http.Header
	body   []byte
}

// raw sends a request to the daemon's unix socket as it stands.
func (l *lab) raw(t *testing.T, method, path string, header http.Header, body io.Reader) answer {
	t.Helper()
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", l.socket)
		},
	}
	defer tr.CloseIdleConnections()
	return send(t, &http.Client{Transport: tr}, method, "http://warren"+path, header, body)
}

// send sends one request, and reads the answer whole.
func send(t *testing.T, c *http.Client, method, url string, header http.Header, body io.Reader) answer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		r.Header[k] = v
	}
	if h := header.Get("Host"); h != "" {
		r.Host = h
		r.Header.Del("Host")
	}
	res, err := c.Do(r)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(io.LimitReader(res.Body, 32<<20))
	if err != nil {
		t.Fatalf("%s %s: read the answer: %v", method, url, err)
	}
	return answer{res.StatusCode, res.Header, data}
}

// wantError checks that a is an error of the API's form, of code, whose
// message has all of phrases.
func (a answer) wantError(t *testing.T, code sandbox.Code, phrases ...string) {
	t.Helper()
	var e wire.Error
	if err := json.Unmarshal(a.body, &e); err != nil || a.status < 400 {
		t.Errorf("the answer is %d %.300q, not an error", a.status, a.body)
		return
	}
	checkError(t, &e, code, phrases)
}

// wantError checks the code and message of an error of the client's.
func wantError(t *testing.T, err error, code sandbox.Code, phrases ...string) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) {
		t.Errorf("the error is %v, of no code; want %s", err, code)
		return
	}
	checkError(t, &wire.Error{Code: e.Code, Message: e.Message}, code, phrases)
}

func checkError(t *testing.T, e *wire.Error, code sandbox.Code, phrases []string) {
	t.Helper()
	if e.Code != code || e.Message == "" {
		t.Errorf("the error is %s: %q; want %s", e.Code, e.Message, code)
	}
	for _, p := range phrases {
		if !strings.Contains(strings.ToLower(e.Message), strings.ToLower(p)) {
			t.Errorf("the message of %s is %q: it does not say %q", e.Code, e.Message, p)
		}
	}
}
