package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/e2e/pattern"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/proto/process"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

// envd is a sandbox's agent as E2B's SDKs reach it where all sandboxes are
// behind one URL: by headers, with the agent's own token, in JSON.
type envd struct {
	base, id, token string
	tr              http.RoundTripper
}

// envd gives the agent of a sandbox. Its connections are its own.
func (l *lab) envd(t *testing.T, id string, h2 bool) *envd {
	t.Helper()
	a := send(t, &http.Client{}, "GET", l.tcp+"/sandboxes/"+id, http.Header{"X-Api-Key": {l.key}}, nil)
	var sb struct{ EnvdAccessToken string }
	if err := json.Unmarshal(a.body, &sb); err != nil || sb.EnvdAccessToken == "" {
		t.Fatalf("E2B's API tells of %s: %d %s", id, a.status, a.body)
	}
	tr := &http.Transport{Protocols: new(http.Protocols)}
	if h2 {
		tr.Protocols.SetUnencryptedHTTP2(true)
	} else {
		tr.Protocols.SetHTTP1(true)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &envd{l.tcp, id, sb.EnvdAccessToken, tr}
}

func (e *envd) Do(r *http.Request) (*http.Response, error) {
	r.Header.Set("E2b-Sandbox-Id", e.id)
	r.Header.Set("E2b-Sandbox-Port", strconv.Itoa(sandbox.AgentPort))
	if r.Header.Get(control.TokenHeader) == "" {
		r.Header.Set(control.TokenHeader, e.token)
	}
	return (&http.Client{Transport: e.tr}).Do(r)
}

func (e *envd) process() processconnect.ProcessClient {
	return processconnect.NewProcessClient(e, e.base, connect.WithProtoJSON())
}

// get asks for a path of the agent's.
func (e *envd) get(ctx context.Context, path string) (status int, body []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, "GET", e.base+path, nil)
	if err != nil {
		return 0, nil, err
	}
	res, err := e.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer res.Body.Close()
	body, err = io.ReadAll(io.LimitReader(res.Body, 1<<20))
	return res.StatusCode, body, err
}

// wantGone checks that the agent is as the SDKs expect it of a sandbox that has
// ended: its health is the proxy's 502.
func (e *envd) wantGone(t *testing.T) {
	t.Helper()
	status, body, err := e.get(t.Context(), control.PathHealth)
	var said struct {
		SandboxID, Message string
		Code               int
	}
	if err != nil || json.Unmarshal(body, &said) != nil || status != 502 || said.Code != 502 || said.SandboxID != e.id || said.Message != "The sandbox was not found" {
		t.Errorf("the health of a sandbox that has ended is %d %s, %v", status, body, err)
	}
}

func sh(line, tag string) *connect.Request[process.StartRequest] {
	r := &process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", line}}}
	if tag != "" {
		r.Tag = &tag
	}
	return connect.NewRequest(r)
}

func byPID(pid uint32) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
}

func byTag(tag string) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}}
}

// protocols runs f over HTTP/1.1 and HTTP/2.
func protocols(t *testing.T, f func(t *testing.T, h2 bool)) {
	for _, h2 := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP1", true: "HTTP2"}[h2], func(t *testing.T) { f(t, h2) })
	}
}

// eventStream is a stream of a process's events, of Start or of Connect.
type eventStream interface {
	Receive() bool
	Err() error
	Close() error
}

func eventOf(s eventStream) *process.ProcessEvent {
	switch s := s.(type) {
	case *connect.ServerStreamForClient[process.StartResponse]:
		return s.Msg().GetEvent()
	case *connect.ServerStreamForClient[process.ConnectResponse]:
		return s.Msg().GetEvent()
	}
	return nil
}

// TestDataPlaneReconnect drops a process's stream in the middle by dropping its
// connection, and comes back by pid, and then by tag.
func TestDataPlaneReconnect(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		protocols(t, func(t *testing.T, h2 bool) {
			// It writes until it is told to end: what was on its way to a client
			// that went is lost, and may be much.
			tag := "job-" + strconv.FormatBool(h2)
			var pid uint32
			last, told := -1, -1
			// some reads some output and then breaks off, or reads to the end.
			some := func(open func(ctx context.Context, c processconnect.ProcessClient) (eventStream, error), toEnd bool) *process.ProcessEvent_EndEvent {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), longest)
				defer cancel()
				s, err := open(ctx, l.envd(t, sb.ID, h2).process())
				must(t, err)
				defer s.Close()
				var rest []byte
				fresh := true
				for n := 0; toEnd || n < 20_000; {
					if !s.Receive() {
						t.Fatalf("the stream ends after line %d: %v", last, s.Err())
					}
					e := eventOf(s)
					if start := e.GetStart(); start != nil {
						if pid != 0 && start.GetPid() != pid {
							t.Errorf("it is pid %d, and was %d", start.GetPid(), pid)
						}
						pid = start.GetPid()
						if toEnd {
							l.sh(t, sb.ID, "touch /tmp/"+tag)
						}
					}
					if end := e.GetEnd(); end != nil {
						return end
					}
					n += len(e.GetData().GetStdout())
					rest = append(rest, e.GetData().GetStdout()...)
					for {
						line, more, ok := bytes.Cut(rest, []byte("\n"))
						if !ok {
							break
						}
						rest = more
						var i int
						if _, err := fmt.Sscanf(string(line), "last %d", &told); err == nil {
							continue
						}
						if _, err := fmt.Sscanf(string(line), "line %d", &i); err != nil {
							if fresh { // what was before it was on its way when the connection broke
								fresh = false
								continue
							}
							t.Fatalf("after line %d comes %q", last, line)
						}
						if fresh && i <= last {
							t.Fatalf("line %d comes again after %d", i, last)
						}
						if !fresh && i != last+1 {
							t.Fatalf("line %d follows line %d", i, last)
						}
						fresh, last = false, i
					}
				}
				return nil
			}
			some(func(ctx context.Context, c processconnect.ProcessClient) (eventStream, error) {
				return c.Start(ctx, sh("i=0; until test -e /tmp/"+tag+"; do echo line $i; i=$((i+1)); done; echo line $i; echo last $i; exit 7", tag))
			}, false)
			some(func(ctx context.Context, c processconnect.ProcessClient) (eventStream, error) {
				return c.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
			}, false)
			end := some(func(ctx context.Context, c processconnect.ProcessClient) (eventStream, error) {
				return c.Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byTag(tag)}))
			}, true)
			if end.GetExitCode() != 7 || last != told {
				t.Errorf("it ends with %v after line %d of %d", end, last, told)
			}
			for _, sel := range []*process.ProcessSelector{byPID(pid + 100_000), byTag("nobody"), byTag("")} {
				s, err := l.envd(t, sb.ID, h2).process().Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: sel}))
				if err == nil {
					s.Receive()
					err = s.Err()
					s.Close()
				}
				if connect.CodeOf(err) != connect.CodeNotFound {
					t.Errorf("to %v, which never was, connects %v", sel, err)
				}
			}
		})
	})
}

// TestDataPlaneSlowReader leaves a stream unread: the process that writes to it
// waits, the daemon holds little of it, and others go on, in the same sandbox
// and in another, over the same connection where there is one.
func TestDataPlaneSlowReader(t *testing.T) {
	t.Parallel()
	const size = 64_000_000
	l := newLab(t)
	want := sha256.New()
	pattern.Copy(want, size)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128}})
		other := l.create(t, wire.CreateSandbox{Runtime: runtime})
		protocols(t, func(t *testing.T, h2 bool) {
			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()
			agent, beside := l.envd(t, sb.ID, h2), l.envd(t, other.ID, h2)
			beside.tr = agent.tr
			before := resident(t, l.d.cmd.Process.Pid)
			l.sh(t, sb.ID, "rm -f /tmp/done")
			s, err := agent.process().Start(ctx, sh(fmt.Sprintf("inside spew %d; touch /tmp/done", size), ""))
			must(t, err)
			defer s.Close()
			for range 2 { // the start, and some of the output
				if !s.Receive() {
					t.Fatal(s.Err())
				}
			}
			got := sha256.New()
			got.Write(s.Msg().GetEvent().GetData().GetStdout())
			for i := range 40 {
				e := agent
				if i%2 == 1 {
					e = beside
				}
				r, err := e.process().Start(ctx, sh(fmt.Sprintf("echo %d", i), ""))
				must(t, err)
				var out []byte
				for r.Receive() {
					out = append(out, r.Msg().GetEvent().GetData().GetStdout()...)
				}
				if err := r.Err(); err != nil || string(out) != fmt.Sprintln(i) {
					t.Errorf("another command says %q, %v", out, err)
				}
				r.Close()
			}
			if out := l.sh(t, sb.ID, "test -e /tmp/done && echo done || echo waits"); out != "waits" {
				t.Error("the process ended although nobody read what it wrote")
			}
			if grew := resident(t, l.d.cmd.Process.Pid) - before; grew > 32 {
				t.Errorf("the daemon holds %d MiB more", grew)
			}
			most := 0
			for n := 0; s.Receive(); n++ {
				got.Write(s.Msg().GetEvent().GetData().GetStdout())
				if n%256 == 0 {
					most = max(most, resident(t, l.d.cmd.Process.Pid))
				}
			}
			if s.Err() != nil || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
				t.Errorf("read to the end it is not what was written: %v", s.Err())
			}
			if most-before > 48 {
				t.Errorf("the daemon's memory grew from %d to %d MiB", before, most)
			}
		})
	})
}

// TestDataPlaneLoad starts 200 processes at once on 20 sandboxes.
func TestDataPlaneLoad(t *testing.T) {
	t.Parallel()
	const sandboxes, each = 20, 10
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		var agents []*envd
		for range sandboxes {
			sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128}})
			agents = append(agents, l.envd(t, sb.ID, false))
		}
		ctx, cancel := context.WithTimeout(t.Context(), longest)
		defer cancel()
		started := time.Now()
		var failures atomic.Int64
		var wg sync.WaitGroup
		for i, agent := range agents {
			for j := range each {
				wg.Go(func() {
					s, err := agent.process().Start(ctx, sh(fmt.Sprintf("echo %d of %d; exit %d", j, i, j), ""))
					var out []byte
					var end *process.ProcessEvent_EndEvent
					for err == nil && s.Receive() {
						out = append(out, s.Msg().GetEvent().GetData().GetStdout()...)
						if e := s.Msg().GetEvent().GetEnd(); e != nil {
							end = e
						}
					}
					if err == nil {
						err = s.Err()
						s.Close()
					}
					if err != nil || end.GetExitCode() != int32(j) || string(out) != fmt.Sprintf("%d of %d\n", j, i) {
						failures.Add(1)
						t.Errorf("command %d of sandbox %d: %v, %q, %v", j, i, end, out, err)
					}
				})
			}
		}
		wg.Wait()
		t.Logf("%s: %d commands on %d sandboxes at once in %v, %d failed", runtime, sandboxes*each, sandboxes, time.Since(started).Round(time.Millisecond), failures.Load())
	})
}

// TestDataPlaneEnds ends a sandbox while it streams: the stream breaks off, with
// no end of the process, and the agent's health tells the SDKs why.
func TestDataPlaneEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		for how, end := range map[string]func(t *testing.T, id string){
			"killed by E2B's API": func(t *testing.T, id string) {
				if a := send(t, &http.Client{}, "DELETE", l.tcp+"/sandboxes/"+id, http.Header{"X-Api-Key": {l.key}}, nil); a.status != 204 {
					t.Errorf("the kill gives %d %s", a.status, a.body)
				}
			},
			"killed": func(t *testing.T, id string) { must(t, l.cl.Kill(context.Background(), id)) },
			"timed out": func(t *testing.T, id string) {
				_, err := l.cl.SetTimeout(context.Background(), id, time.Second)
				must(t, err)
			},
		} {
			t.Run(how, func(t *testing.T) {
				sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
				protocols := map[bool]eventStream{}
				ctx, cancel := context.WithTimeout(t.Context(), longest)
				defer cancel()
				for _, h2 := range []bool{false, true} {
					s, err := l.envd(t, sb.ID, h2).process().Start(ctx, sh("while :; do echo on; sleep 0.05; done", ""))
					must(t, err)
					defer s.Close()
					for range 3 {
						if !s.Receive() {
							t.Fatal(s.Err())
						}
					}
					protocols[h2] = s
				}
				after := l.envd(t, sb.ID, false)
				end(t, sb.ID)
				for h2, s := range protocols {
					for s.Receive() {
						if e := eventOf(s).GetEnd(); e != nil {
							t.Errorf("HTTP/2 %v: the process ends with %v", h2, e)
						}
					}
					if err := s.Err(); err == nil || ctx.Err() != nil {
						t.Errorf("HTTP/2 %v: the stream ends with %v", h2, err)
					}
				}
				// The stream may break off a moment before the end is on record.
				eventually(func() bool { return sandbox.State(l.get(t, sb.ID).State).Ended() }, 10*time.Second)
				after.wantGone(t)
			})
		}
	})
}

// loopback gives an address of this host's that no other test listens on, so
// that a port can be taken again.
var loopback = func() func() string {
	var n atomic.Int32
	return func() string {
		pid := os.Getpid()
		return fmt.Sprintf("127.%d.%d.%d", 1+pid>>8&0x7f, pid&0xff, 1+n.Add(1))
	}
}()

// TestDataPlaneRestart ends the daemon, in both ways, while a client holds a
// sandbox: its next call works, on the same address and with the same tokens,
// and what it started is still there.
func TestDataPlaneRestart(t *testing.T) {
	t.Parallel()
	l := openLab(t)
	ip := loopback()
	l.flags = []string{"--listen", ip + ":0", "--pool=-1", "--grace", "1s"}
	l.start(t)
	_, addr, _ := strings.Cut(servesLine.FindString(l.d.output()), "http://")
	_, port, err := net.SplitHostPort(addr)
	must(t, err)
	l.flags[1] = net.JoinHostPort(ip, port)
	key := l.key
	l.importTiny(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		l.tcp, l.key = "http://"+l.flags[1], key
		protocols(t, func(t *testing.T, h2 bool) {
			agent := l.envd(t, sb.ID, h2)
			for how, stop := range map[string]func(){"killed": func() { l.d.kill() }, "stopped": func() { l.d.terminate(t) }} {
				ctx, cancel := context.WithTimeout(t.Context(), longest)
				defer cancel()
				s, err := agent.process().Start(ctx, sh("echo ready; read x; echo got $x; exit 3", how))
				must(t, err)
				for range 2 {
					if !s.Receive() {
						t.Fatal(s.Err())
					}
				}
				stop()
				if s.Receive() || s.Err() == nil {
					t.Errorf("%s: the stream goes on: %v", how, s.Err())
				}
				s.Close()
				l.start(t)
				l.tcp = "http://" + l.flags[1]
				again, err := agent.process().Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byTag(how)}))
				if err == nil && !again.Receive() {
					err = again.Err()
				}
				if err != nil {
					t.Fatalf("%s: connect to the process: %v", how, err)
				}
				again.Close()
				if status, body, err := agent.get(ctx, control.PathHealth); err != nil || status != 204 {
					t.Errorf("%s: its health is %d %s, %v", how, status, body, err)
				}
				if out := l.sh(t, sb.ID, "echo on"); out != "on" {
					t.Errorf("%s: a command says %q", how, out)
				}
				if _, err := agent.process().SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byTag(how), Signal: process.Signal_SIGNAL_SIGKILL})); err != nil {
					t.Errorf("%s: end the process: %v", how, err)
				}
			}
		})
	})
}

// TestDataPlaneFile sends a file through the proxy and fetches it, by the token
// and by signed URLs that name no sandbox. WARREN_E2E_FILE_MIB is its size; 2048
// was measured (bench/results/proxy.json).
func TestDataPlaneFile(t *testing.T) {
	t.Parallel()
	mib := 64
	if s := os.Getenv("WARREN_E2E_FILE_MIB"); s != "" {
		n, err := strconv.Atoi(s)
		must(t, err)
		mib = n
	}
	size := int64(mib) << 20
	want := sha256.New()
	pattern.Copy(want, size)
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		// The agent lives within the limit, and a container's page cache does.
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128 + 2*mib}})
		agent := l.envd(t, sb.ID, false)
		signed := func(path, operation, user string, until time.Time) string {
			f := control.SignedFile{Path: path, Operation: operation, User: user, Expiration: strconv.FormatInt(until.Unix(), 10)}
			q := url.Values{"path": {path}, "username": {user}, "signature": {f.Signature(agent.token)}, "signature_expiration": {f.Expiration}}
			return l.tcp + "/files?" + q.Encode()
		}
		soon, gone := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
		byToken := func(string, string, string, time.Time) string {
			return l.tcp + "/files?" + url.Values{"path": {"/tmp/big"}, "username": {"root"}}.Encode()
		}
		for how, at := range map[string]func(path, operation, user string, until time.Time) string{"token": byToken, "signature": signed} {
			t.Run(how, func(t *testing.T) {
				do := func(r *http.Request) (*http.Response, error) {
					if how == "token" {
						return agent.Do(r)
					}
					return (&http.Client{Transport: agent.tr}).Do(r)
				}
				daemon := l.d.cmd.Process.Pid
				before, most := resident(t, daemon), 0
				r, w := io.Pipe()
				go func() {
					_, err := pattern.Copy(w, size)
					w.CloseWithError(err)
				}()
				req, err := http.NewRequestWithContext(t.Context(), "POST", at("/tmp/big", "write", "root", soon), r)
				must(t, err)
				req.Header.Set("Content-Type", "application/octet-stream")
				res, err := do(req)
				must(t, err)
				body, _ := io.ReadAll(res.Body)
				res.Body.Close()
				if res.StatusCode != 200 {
					t.Fatalf("the upload gives %d %s", res.StatusCode, body)
				}
				most = resident(t, daemon)
				req, err = http.NewRequestWithContext(t.Context(), "GET", at("/tmp/big", "read", "root", soon), nil)
				must(t, err)
				if res, err = do(req); err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				got := &slowHash{Hash: sha256.New(), look: func(int64) { most = max(most, resident(t, daemon)) }}
				if n, err := io.Copy(got, res.Body); err != nil || n != size || res.StatusCode != 200 || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
					t.Errorf("the download gives %d, %d bytes of %d, %v, or other ones", res.StatusCode, n, size, err)
				}
				if most-before > 32 {
					t.Errorf("the daemon's memory grew from %d to %d MiB", before, most)
				}
			})
		}
		for what, u := range map[string]string{
			"signature is already expired": signed("/tmp/big", "read", "root", gone),
			"invalid signature":            signed("/tmp/big", "write", "root", soon),
		} {
			a := send(t, &http.Client{}, "GET", u, nil, nil)
			var e control.Error
			if err := json.Unmarshal(a.body, &e); err != nil || a.status != 401 || e.Code != 401 || e.Message != what {
				t.Errorf("%d %s; want 401 %q", a.status, a.body, what)
			}
		}
		url := signed("/tmp/big", "read", "root", soon)
		must(t, l.cl.Kill(t.Context(), sb.ID))
		if a := send(t, &http.Client{}, "GET", url, nil, nil); a.status != 401 || !bytes.Contains(a.body, []byte("invalid signature")) {
			t.Errorf("of a sandbox that has ended: %d %s", a.status, a.body)
		}
	})
}

// TestDataPlaneStrangers asks for another tenant's sandbox, by what it may
// have: all of it is as of one that never was.
func TestDataPlaneStrangers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	rival, err := client.New("unix://"+l.socket, client.Options{Tenant: "rival"})
	must(t, err)
	defer rival.Close()
	theirs, err := rival.CreateKey(t.Context(), "theirs")
	must(t, err)
	sb := l.create(t, wire.CreateSandbox{})
	agent := l.envd(t, sb.ID, false)
	never := "sbx00000000000000000"
	// ask gives the answer with the id taken out of it.
	ask := func(method, path, id string, h http.Header, body string) string {
		t.Helper()
		h = h.Clone()
		for _, name := range []string{"E2b-Sandbox-Id"} {
			if h.Get(name) != "" {
				h.Set(name, id)
			}
		}
		a := send(t, &http.Client{}, method, l.tcp+strings.ReplaceAll(path, "ID", id), h, strings.NewReader(body))
		return fmt.Sprint(a.status, " ", strings.ReplaceAll(string(a.body), id, "ID"))
	}
	key := http.Header{"X-Api-Key": {theirs.Key}}
	port := http.Header{"X-Api-Key": {theirs.Key}, "E2b-Sandbox-Id": {"ID"}, "E2b-Sandbox-Port": {"8080"}}
	for _, tc := range []struct {
		method, path, body string
		header             http.Header
		status             string
	}{
		{"GET", "/sandboxes/ID", "", key, "404"},
		{"DELETE", "/sandboxes/ID", "", key, "404"},
		{"POST", "/v2/sandboxes/ID/connect", `{"timeout":60}`, key, "404"},
		{"POST", "/sandboxes/ID/timeout", `{"timeout":60}`, key, "404"},
		{"POST", "/sandboxes/ID/pause", `{}`, key, "404"},
		{"POST", "/sandboxes/ID/fork", `{}`, key, "404"},
		{"GET", "/sandboxes/ID/metrics", "", key, "404"},
		{"GET", "/v1/sandboxes/ID", "", key, "404"},
		{"GET", "/v1/sandboxes/ID/agent/health", "", key, "404"},
		{"GET", "/v1/sandboxes/ID/ports/8080/", "", key, "404"},
		{"GET", "/", "", port, "502"},
	} {
		of, none := ask(tc.method, tc.path, sb.ID, tc.header, tc.body), ask(tc.method, tc.path, never, tc.header, tc.body)
		if of != none || !strings.HasPrefix(of, tc.status) {
			t.Errorf("%s %s: theirs gives %s\nand none gives %s; want %s", tc.method, tc.path, of, none, tc.status)
		}
	}
	if out := l.sh(t, sb.ID, "echo on"); out != "on" {
		t.Errorf("it says %q", out)
	}

	// With a wrong key, and with a wrong token of the agent's.
	wrong := http.Header{"X-Api-Key": {"e2b_" + strings.Repeat("0", 40)}}
	for _, path := range []string{"/sandboxes/" + sb.ID, "/v2/sandboxes", "/v1/sandboxes"} {
		if a := send(t, &http.Client{}, "GET", l.tcp+path, wrong, nil); a.status != 401 {
			t.Errorf("%s with a wrong key: %d %s", path, a.status, a.body)
		}
	}
	for _, token := range []string{"x", agent.token + "x", strings.ToUpper(agent.token)} {
		bad := *agent
		bad.token = token
		if status, body, err := bad.get(t.Context(), "/files?path=/etc/passwd"); err != nil || status != 401 {
			t.Errorf("a file with a wrong token: %d %s, %v", status, body, err)
		}
		s, err := bad.process().Start(t.Context(), sh("true", ""))
		if err == nil {
			s.Receive()
			err = s.Err()
			s.Close()
		}
		var ce *connect.Error
		if !errors.As(err, &ce) || ce.Code() != connect.CodeUnauthenticated {
			t.Errorf("a command with a wrong token: %v", err)
		}
	}
}
