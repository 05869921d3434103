package agentclient_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agentclient"
	"github.com/warrenhq/warren/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sh(script string) agentclient.Command {
	return agentclient.Command{Path: "/bin/sh", Args: []string{"-c", script}, User: "root"}
}

func wantCode(t *testing.T, what string, err error, code sandbox.Code) {
	t.Helper()
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: %v (%T, %s), want code %s", what, err, err, sandbox.CodeOf(err), code)
	}
}

func TestRun(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	for _, tt := range []struct {
		cmd    agentclient.Command
		out    string
		code   int
		status string
	}{
		{sh("echo hi; exit 3"), "hi\n", 3, "exit status 3"},
		{sh("kill -9 $$"), "", -1, "signal: killed"},
		{agentclient.Command{Path: "cat", Stdin: strings.NewReader("through"), User: "root"}, "through", 0, "exit status 0"},
		{agentclient.Command{Path: "cat", User: "root"}, "", 0, "exit status 0"},
		{agentclient.Command{Path: "/bin/sh", Args: []string{"-c", "echo $A; pwd"}, Env: map[string]string{"A": "b"}, Cwd: "/usr", User: "root"}, "b\n/usr\n", 0, "exit status 0"},
		{agentclient.Command{Path: "stty", Args: []string{"size"}, PTY: &agentclient.Size{Cols: 90, Rows: 30}, User: "root"}, "30 90\r\n", 0, "exit status 0"},
	} {
		r, err := c.Run(t.Context(), tt.cmd)
		if err != nil || string(r.Stdout) != tt.out || r.ExitCode != tt.code || r.Status != tt.status || r.PID == 0 {
			t.Errorf("%v: %+v, %v", tt.cmd.Args, r, err)
		}
	}
	cut := sh("seq 1 100000; seq 1 10 >&2")
	cut.MaxOutput = 100
	r, err := c.Run(t.Context(), cut)
	if err != nil || len(r.Stdout) != 100 || !r.StdoutTruncated || r.StderrTruncated || r.ExitCode != 0 {
		t.Errorf("%d bytes, %v %v, %v", len(r.Stdout), r.StdoutTruncated, r.StderrTruncated, err)
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18)
	r, err = c.Run(t.Context(), agentclient.Command{Path: "cat", Stdin: bytes.NewReader(big), MaxOutput: len(big), User: "root"})
	if err != nil || !bytes.Equal(r.Stdout, big) {
		t.Errorf("4 MiB through stdin: %d bytes, %v", len(r.Stdout), err)
	}
}

func TestErrors(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	bg := t.Context()
	_, err := c.Run(bg, agentclient.Command{Path: "no-such-program", User: "root"})
	wantCode(t, "no program", err, sandbox.CodeInvalid)
	_, err = c.Run(bg, agentclient.Command{Path: "true", User: "ghost"})
	wantCode(t, "unknown user", err, sandbox.CodeUnauthenticated)
	if !strings.Contains(err.Error(), "invalid username: 'ghost'") {
		t.Error(err)
	}
	wantCode(t, "signal", c.Signal(bg, 4_000_000, true), sandbox.CodeNotFound)
	_, err = c.Attach(bg, 4_000_000, agentclient.Output{})
	wantCode(t, "attach", err, sandbox.CodeNotFound)
	_, _, err = c.ReadFile(bg, "/no/such", "root")
	wantCode(t, "no file", err, sandbox.CodeNotFound)
	_, _, err = c.ReadFile(bg, "/etc", "root")
	wantCode(t, "a directory", err, sandbox.CodeInvalid)
	_, _, err = c.ReadFile(bg, "/etc/passwd", "ghost")
	wantCode(t, "unknown user of a file", err, sandbox.CodeUnauthenticated)
	wantCode(t, "write to a directory", c.WriteFile(bg, "/tmp", "root", strings.NewReader("x"), 0), sandbox.CodeInvalid)
	_, err = c.GetTar(bg, "/no/such", "root")
	wantCode(t, "no tar", err, sandbox.CodeNotFound)
	wantCode(t, "hostile tar", c.PutTar(bg, a.Home, "root", strings.NewReader("nonsense"), agentclient.TarOptions{}), sandbox.CodeInvalid)
	wantCode(t, "bad init", c.Init(bg, agentclient.InitRequest{Hostname: "a b"}), sandbox.CodeInvalid)
	ctx, cancel := context.WithTimeout(bg, 100*time.Millisecond)
	defer cancel()
	_, err = c.Run(ctx, sh("sleep 60"))
	wantCode(t, "deadline", err, sandbox.CodeTimeout)
	ctx, cancel = context.WithCancel(bg)
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err = c.Run(ctx, sh("sleep 60"))
	wantCode(t, "cancel", err, sandbox.CodeCanceled)

	none := agentclient.New(func(context.Context, int) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	}, "")
	_, err = none.Run(bg, sh("true"))
	wantCode(t, "nobody there", err, sandbox.CodeUnavailable)
	_, err = none.DialPort(bg, 80)
	wantCode(t, "nobody there to tunnel", err, sandbox.CodeUnavailable)
	ctx, cancel = context.WithTimeout(bg, 50*time.Millisecond)
	defer cancel()
	wantCode(t, "never ready", none.WaitReady(ctx), sandbox.CodeTimeout)
}

func TestInitAndToken(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "tok")
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Init(t.Context(), agentclient.InitRequest{AccessToken: "tok", SandboxID: "sbx1", EnvVars: map[string]string{"X": "y"}, Timestamp: time.Now()}); err != nil {
		t.Fatal(err)
	}
	if r, err := c.Run(t.Context(), sh("echo $X $E2B_SANDBOX_ID")); err != nil || string(r.Stdout) != "y sbx1\n" {
		t.Errorf("%q %v", r.Stdout, err)
	}
	_, err := a.Client(t, "").Run(t.Context(), sh("true"))
	wantCode(t, "without the token", err, sandbox.CodeUnauthenticated)
	_, err = a.Client(t, "other").Stats(t.Context())
	wantCode(t, "with another", err, sandbox.CodeUnauthenticated)
	_, err = a.Client(t, "other").DialPort(t.Context(), 80)
	wantCode(t, "tunnel with another", err, sandbox.CodeUnauthenticated)
	wantCode(t, "init without", a.Client(t, "").Init(t.Context(), agentclient.InitRequest{}), sandbox.CodeUnauthenticated)
	s, err := c.Stats(t.Context())
	if err != nil || s.Started != 1 || s.Version == "" {
		t.Errorf("%+v %v", s, err)
	}
}

func TestFiles(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	path := filepath.Join(a.Home, "sub/f")
	data := bytes.Repeat([]byte("data"), 1<<20)
	if err := c.WriteFile(t.Context(), path, "", bytes.NewReader(data), 0o640); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("%v %v", st, err)
	}
	r, size, err := c.ReadFile(t.Context(), path, "")
	if err != nil || size != int64(len(data)) {
		t.Fatalf("%d %v", size, err)
	}
	got, err := io.ReadAll(r)
	r.Close()
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	// A reader that fails leaves nothing.
	err = c.WriteFile(t.Context(), path, "", io.MultiReader(bytes.NewReader(data), failing{}), 0)
	if err == nil {
		t.Error("no error")
	}
	time.Sleep(20 * time.Millisecond)
	if st, _ := os.Stat(path); st.Size() != int64(len(data)) {
		t.Errorf("size %d", st.Size())
	}
	tr, err := c.GetTar(t.Context(), filepath.Join(a.Home, "sub"), "")
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if err := c.PutTar(t.Context(), filepath.Join(a.Home, "copy"), "", tr, agentclient.TarOptions{MaxEntries: 10, MaxBytes: 1 << 30}); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(a.Home, "copy/sub/f")); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("broken source") }

func TestAttach(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	gate := filepath.Join(a.Home, "gate")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var pid uint32
	_, err := c.Exec(ctx, sh(fmt.Sprintf("while [ ! -e %s ]; do sleep 0.01; done; echo late; exit 9", gate)), agentclient.Output{
		Start: func(p uint32) error { pid = p; cancel(); return nil },
	})
	wantCode(t, "cancelled exec", err, sandbox.CodeCanceled)
	ps, err := c.Processes(t.Context())
	if err != nil || len(ps) != 1 || ps[0].GetPid() != pid {
		t.Fatalf("%v %v", ps, err)
	}
	if err := os.WriteFile(gate, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var out []byte
	r, err := c.Attach(t.Context(), pid, agentclient.Output{Stdout: func(p []byte) error { out = append(out, p...); return nil }})
	if err != nil || r.ExitCode != 9 || string(out) != "late\n" {
		t.Errorf("%+v %q %v", r, out, err)
	}
	stop := errors.New("enough")
	_, err = c.Exec(t.Context(), sh("echo x; sleep 60"), agentclient.Output{Start: func(p uint32) error { pid = p; return nil }, Stdout: func([]byte) error { return stop }})
	if !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
	if err := c.Signal(t.Context(), pid, false); err != nil {
		t.Error(err)
	}
}

func TestDialPort(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "")
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Log("no", addr, err)
			continue
		}
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() { // greets first, and echoes until the end of writing
					defer conn.Close()
					io.WriteString(conn, "hello ")
					io.Copy(conn, conn)
				}()
			}
		}()
		port := l.Addr().(*net.TCPAddr).Port
		conn, err := c.DialPort(t.Context(), port)
		if err != nil {
			t.Fatal(addr, err)
		}
		big := bytes.Repeat([]byte("0123456789"), 1<<20)
		go func() {
			conn.Write(big)
			conn.(interface{ CloseWrite() error }).CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		if err != nil || string(got[:6]) != "hello " || !bytes.Equal(got[6:], big) {
			t.Errorf("%s: %d bytes, %v", addr, len(got), err)
		}
		conn.Close()
		l.Close()
		_, err = c.DialPort(t.Context(), port)
		wantCode(t, "nothing listens", err, sandbox.CodeUnavailable)
	}
	_, err := c.DialPort(t.Context(), 0)
	wantCode(t, "port 0", err, sandbox.CodeInvalid)
	// One that is open when the agent ends.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := c.DialPort(t.Context(), l.Addr().(*net.TCPAddr).Port)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	inner, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer inner.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	a.Agent.Close(ctx)
	if _, err := io.ReadAll(conn); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Log("the tunnel ended with", err)
	}
}

func TestTransport(t *testing.T) {
	a := agenttest.Start(t)
	c := a.Client(t, "tok")
	if err := c.Init(t.Context(), agentclient.InitRequest{AccessToken: "tok"}); err != nil {
		t.Fatal(err)
	}
	front := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(&url.URL{Scheme: "http", Host: "whatever.example"}) },
		Transport: c.Transport(),
	})
	defer front.Close()
	h := agenttest.HTTP(t)
	for token, status := range map[string]int{"": 401, "tok": 200} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", front.URL+control.PathEnvs, nil)
		req.Header.Set(control.TokenHeader, token)
		resp, err := h.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("token %q: %s", token, resp.Status)
		}
	}
}

func BenchmarkExecTrue(b *testing.B) {
	a := agenttest.Start(b)
	c := a.Client(b, "")
	for b.Loop() {
		if r, err := c.Run(b.Context(), agentclient.Command{Path: "/bin/true", User: "root"}); err != nil || r.ExitCode != 0 {
			b.Fatal(r, err)
		}
	}
}

const benchBytes = 256 << 20

func BenchmarkUpload(b *testing.B) {
	a := agenttest.Start(b)
	c := a.Client(b, "")
	path := benchFile(b)
	b.SetBytes(benchBytes)
	for b.Loop() {
		if err := c.WriteFile(b.Context(), path, "root", io.LimitReader(zeros{}, benchBytes), 0); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDownload(b *testing.B) {
	a := agenttest.Start(b)
	c := a.Client(b, "")
	path := benchFile(b)
	if err := c.WriteFile(b.Context(), path, "root", io.LimitReader(zeros{}, benchBytes), 0); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(benchBytes)
	buf := make([]byte, 1<<20)
	for b.Loop() {
		r, _, err := c.ReadFile(b.Context(), path, "root")
		if err != nil {
			b.Fatal(err)
		}
		n := 0
		for {
			k, err := r.Read(buf)
			n += k
			if err != nil {
				break
			}
		}
		r.Close()
		if n != benchBytes {
			b.Fatal(n)
		}
	}
}

func benchFile(b *testing.B) string {
	dir, err := os.MkdirTemp("/dev/shm", "warren-agent-bench-") // memory: the disk is not what is measured
	if err != nil {
		dir = b.TempDir()
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "f")
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
