package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/warrenhq/warren/internal/agent/agenttest"
	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/testenv"
	"github.com/warrenhq/warren/proto/process"
	"github.com/warrenhq/warren/proto/process/processconnect"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// codecs runs f with each way in: the JSON and binary codecs of Connect, and
// gRPC over cleartext HTTP/2.
func codecs(t *testing.T, f func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient)) {
	for name, opts := range map[string][]connect.ClientOption{
		"json":  {connect.WithProtoJSON()},
		"proto": nil,
		"grpc":  {connect.WithGRPC()},
	} {
		t.Run(name, func(t *testing.T) {
			a := agenttest.Start(t)
			f(t, a, processconnect.NewProcessClient(httpClient(t, name == "grpc"), a.URL, opts...))
		})
	}
}

func httpClient(t *testing.T, h2 bool) *http.Client {
	c := agenttest.HTTP(t)
	if h2 {
		var p http.Protocols
		p.SetUnencryptedHTTP2(true)
		c.Transport.(*http.Transport).Protocols = &p
	}
	return c
}

// outcome is a command followed to its end.
type outcome struct {
	pid            uint32
	stdout, stderr []byte
	pty            []byte
	keepalives     int
	end            *process.ProcessEvent_EndEvent
}

func (o *outcome) take(t *testing.T, ev *process.ProcessEvent) {
	t.Helper()
	switch ev := ev.GetEvent().(type) {
	case *process.ProcessEvent_Start:
		if o.pid != 0 || o.end != nil {
			t.Error("start is not the first event")
		}
		o.pid = ev.Start.GetPid()
	case *process.ProcessEvent_Data:
		if o.pid == 0 || o.end != nil {
			t.Error("data before the start or after the end")
		}
		o.stdout = append(o.stdout, ev.Data.GetStdout()...)
		o.stderr = append(o.stderr, ev.Data.GetStderr()...)
		o.pty = append(o.pty, ev.Data.GetPty()...)
	case *process.ProcessEvent_End:
		o.end = ev.End
	case *process.ProcessEvent_Keepalive:
		o.keepalives++
	}
}

func startReq(script string, edit ...func(*connect.Request[process.StartRequest])) *connect.Request[process.StartRequest] {
	no := false
	req := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &no})
	for _, e := range edit {
		e(req)
	}
	return req
}

func as(user string) func(*connect.Request[process.StartRequest]) {
	return func(r *connect.Request[process.StartRequest]) {
		r.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
}

func run(t *testing.T, c processconnect.ProcessClient, req *connect.Request[process.StartRequest]) (*outcome, error) {
	t.Helper()
	s, err := c.Start(t.Context(), req)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	o := &outcome{}
	for s.Receive() {
		o.take(t, s.Msg().GetEvent())
	}
	return o, s.Err()
}

func mustRun(t *testing.T, c processconnect.ProcessClient, req *connect.Request[process.StartRequest]) *outcome {
	t.Helper()
	o, err := run(t, c, req)
	if err != nil {
		t.Fatal(err)
	}
	if o.end == nil {
		t.Fatal("no end event")
	}
	return o
}

func TestStart(t *testing.T) {
	codecs(t, func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient) {
		for _, tt := range []struct {
			script, stdout, stderr string
			code                   int32
			exited                 bool
			status                 string
		}{
			{"echo out; echo err >&2", "out\n", "err\n", 0, true, "exit status 0"},
			{"exit 7", "", "", 7, true, "exit status 7"},
			{"kill -9 $$", "", "", -1, false, "signal: killed"},
			{"kill -TERM $$", "", "", -1, false, "signal: terminated"},
			{`printf '\377\000\376'`, "\xff\x00\xfe", "", 0, true, "exit status 0"},
			{"cat", "", "", 0, true, "exit status 0"}, // stdin is empty
		} {
			o := mustRun(t, c, startReq(tt.script))
			if string(o.stdout) != tt.stdout || string(o.stderr) != tt.stderr {
				t.Errorf("%s: stdout %q, stderr %q", tt.script, o.stdout, o.stderr)
			}
			if o.end.GetExitCode() != tt.code || o.end.GetExited() != tt.exited || o.end.GetStatus() != tt.status {
				t.Errorf("%s: end %v", tt.script, o.end)
			}
		}
	})
}

func TestStartRefusals(t *testing.T) {
	codecs(t, func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient) {
		noexec := filepath.Join(a.Home, "noexec")
		if err := os.WriteFile(noexec, []byte("#!/bin/sh\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		lost := filepath.Join(a.Home, "lost")
		if err := os.WriteFile(lost, []byte("#!/no/such/interpreter\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		set := func(f func(*process.ProcessConfig)) func(*connect.Request[process.StartRequest]) {
			return func(r *connect.Request[process.StartRequest]) { f(r.Msg.Process) }
		}
		cmd := func(s string) func(*connect.Request[process.StartRequest]) {
			return set(func(p *process.ProcessConfig) { p.Cmd, p.Args = s, nil })
		}
		cwd := func(s string) func(*connect.Request[process.StartRequest]) {
			return set(func(p *process.ProcessConfig) { p.Cwd = &s })
		}
		for _, tt := range []struct {
			name string
			edit func(*connect.Request[process.StartRequest])
			code connect.Code
			text string
		}{
			{"no command", cmd(""), connect.CodeInvalidArgument, "names no command"},
			{"not in PATH", cmd("no-such-program"), connect.CodeInvalidArgument, "not found in $PATH"},
			{"no such path", cmd("/no/such/program"), connect.CodeInvalidArgument, "no such file"},
			{"no interpreter", cmd(lost), connect.CodeInvalidArgument, "interpreter"},
			{"not executable", cmd(noexec), connect.CodeInvalidArgument, "permission denied"},
			{"a directory", cmd("/tmp"), connect.CodeInvalidArgument, "permission denied"},
			{"no cwd", cwd("/no/such/dir"), connect.CodeInvalidArgument, "cwd '/no/such/dir' does not exist"},
			{"cwd is a file", cwd("/etc/passwd"), connect.CodeInvalidArgument, "not a directory"},
			{"other's home", cwd("~root"), connect.CodeInvalidArgument, "home directory"},
			{"NUL in an argument", set(func(p *process.ProcessConfig) { p.Args = []string{"a\x00b"} }), connect.CodeInvalidArgument, "NUL"},
			{"bad variable", set(func(p *process.ProcessConfig) { p.Envs = map[string]string{"A=B": "c"} }), connect.CodeInvalidArgument, "environment variable"},
			{"too long", set(func(p *process.ProcessConfig) { p.Args = []string{strings.Repeat("x", 4<<20)} }), connect.CodeInvalidArgument, "too long"},
			{"unknown user", as("ghost"), connect.CodeUnauthenticated, "invalid username: 'ghost'"},
		} {
			_, err := run(t, c, startReq("true", tt.edit))
			if connect.CodeOf(err) != tt.code || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%s: %v", tt.name, err)
			}
		}
		for name, err := range map[string]error{
			"signal": func() error {
				_, err := c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPid(4_000_000), Signal: process.Signal_SIGNAL_SIGKILL}))
				return err
			}(),
			"input": func() error {
				_, err := c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: byTag("none"), Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("x")}}}))
				return err
			}(),
			"connect": func() error {
				s, err := c.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: byPid(4_000_000)}))
				if err != nil {
					return err
				}
				defer s.Close()
				s.Receive()
				return s.Err()
			}(),
		} {
			if connect.CodeOf(err) != connect.CodeNotFound {
				t.Errorf("%s of an unknown process: %v", name, err)
			}
		}
	})
}

func byPid(pid uint32) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
}

func byTag(tag string) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}}
}

func protoClient(t *testing.T, a *agenttest.Agent) processconnect.ProcessClient {
	return processconnect.NewProcessClient(agenttest.HTTP(t), a.URL)
}

func TestEnvironmentAndUser(t *testing.T) {
	testenv.Root(t)
	a := agenttest.Start(t)
	c := protoClient(t, a)
	client := a.Client(t, "")
	if err := client.Init(t.Context(), control.InitRequest{SandboxID: "sbx1", TemplateID: "base", EnvVars: map[string]string{"BASE": "b", "BOTH": "base"}}); err != nil {
		t.Fatal(err)
	}
	o := mustRun(t, c, startReq(`id -u; id -g; id -G; pwd; echo "$HOME $USER $LOGNAME $SHELL $BASE $BOTH $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID"`,
		func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Envs = map[string]string{"BOTH": "call"} }))
	want := fmt.Sprintf("47000\n47000\n47000 47001\n%s\n%s user user /bin/bash b call true sbx1 base\n", a.Home, a.Home)
	if string(o.stdout) != want {
		t.Errorf("got %q\nwant %q\n%s", o.stdout, want, o.stderr)
	}
	o = mustRun(t, c, startReq("id -u; pwd", as("root")))
	if !strings.HasPrefix(string(o.stdout), "0\n") {
		t.Errorf("as root: %q", o.stdout)
	}
	// A directory that the user may not enter.
	locked := filepath.Join(a.Home, "locked")
	if err := os.Mkdir(locked, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := run(t, c, startReq("true", func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Cwd = &locked }))
	if connect.CodeOf(err) != connect.CodeInvalidArgument || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("locked cwd: %v", err)
	}
	// The default directory.
	if err := client.Init(t.Context(), control.InitRequest{DefaultWorkdir: "/usr", DefaultUser: "root"}); err != nil {
		t.Fatal(err)
	}
	if o = mustRun(t, c, startReq("id -u; pwd")); string(o.stdout) != "0\n/usr\n" {
		t.Errorf("defaults: %q", o.stdout)
	}
	// A default user that is not there is refused, and changes nothing.
	err = client.Init(t.Context(), control.InitRequest{DefaultWorkdir: "/tmp", DefaultUser: "ghost"})
	if sandbox.CodeOf(err) != sandbox.CodeInvalid || !strings.Contains(err.Error(), "ghost") {
		t.Errorf("unknown default user: %v", err)
	}
	if o = mustRun(t, c, startReq("id -u; pwd")); string(o.stdout) != "0\n/usr\n" {
		t.Errorf("defaults after a refused init: %q", o.stdout)
	}
	if err := client.Init(t.Context(), control.InitRequest{DefaultWorkdir: "/gone"}); err != nil {
		t.Fatal(err)
	}
	if o = mustRun(t, c, startReq("pwd")); string(o.stdout) == "/gone\n" || o.end.GetExitCode() != 0 {
		t.Errorf("a default directory that is gone: %q", o.stdout)
	}
}

func TestManyVariables(t *testing.T) {
	a := agenttest.Start(t)
	env := map[string]string{}
	for i := range 5000 {
		env["VAR_"+strconv.Itoa(i)] = "value " + strconv.Itoa(i)
	}
	o := mustRun(t, protoClient(t, a), startReq("env | grep -c ^VAR_", func(r *connect.Request[process.StartRequest]) { r.Msg.Process.Envs = env }))
	if string(o.stdout) != "5000\n" {
		t.Errorf("%q", o.stdout)
	}
}

// Much output to a reader that is slow at first: nothing is lost or reordered,
// and the command is held up meanwhile.
func TestBackPressure(t *testing.T) {
	codecs(t, func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient) {
		mark := filepath.Join(a.Home, "written")
		const lines = 2_000_000
		script := fmt.Sprintf("seq 1 %d; echo done > %s; seq 1 1000 >&2", lines, mark)
		s, err := c.Start(t.Context(), startReq(script, as("root")))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		o := &outcome{}
		sum := sha256.New()
		for n := 0; s.Receive(); n++ {
			if n == 3 {
				time.Sleep(300 * time.Millisecond)
				if _, err := os.Stat(mark); err == nil {
					t.Error("the command was not held up")
				}
			}
			o.take(t, s.Msg().GetEvent())
			sum.Write(o.stdout)
			o.stdout = o.stdout[:0]
		}
		if err := s.Err(); err != nil {
			t.Fatal(err)
		}
		want := sha256.New()
		for i := 1; i <= lines; i++ {
			fmt.Fprintln(want, i)
		}
		if !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
			t.Error("the output differs")
		}
		if n := bytes.Count(o.stderr, []byte("\n")); n != 1000 {
			t.Errorf("%d lines on stderr", n)
		}
		if o.end.GetExitCode() != 0 {
			t.Errorf("end %v", o.end)
		}
	})
}

// One client starts and goes away; the command goes on, is never blocked, and
// the next client gets what was kept and the end.
func TestReconnect(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	gate, mark := filepath.Join(a.Home, "gate"), filepath.Join(a.Home, "mark")
	tag := "job"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Start(ctx, startReq(fmt.Sprintf(`echo first; while [ ! -e %s ]; do sleep 0.01; done; seq 1 200000; echo last; touch %s; sleep 0.2; echo end; exit 5`, gate, mark), as("root"),
		func(r *connect.Request[process.StartRequest]) { r.Msg.Tag = &tag }))
	if err != nil {
		t.Fatal(err)
	}
	o := &outcome{}
	for s.Receive() {
		o.take(t, s.Msg().GetEvent())
		if len(o.stdout) > 0 {
			break
		}
	}
	cancel()
	s.Close()
	list, err := c.List(t.Context(), connect.NewRequest(&process.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetTag() != tag || list.Msg.GetProcesses()[0].GetPid() != o.pid {
		t.Fatalf("list: %v, %v", list, err)
	}
	touch(t, gate)
	wait(t, func() bool { _, err := os.Stat(mark); return err == nil }) // not blocked without a reader
	for _, sel := range []*process.ProcessSelector{byTag(tag), byPid(o.pid)} {
		got := connectTo(t, c, sel)
		if got.pid != o.pid || got.end.GetExitCode() != 5 {
			t.Errorf("pid %d, end %v", got.pid, got.end)
		}
		if sel.GetTag() == tag && !bytes.HasSuffix(got.stdout, []byte("200000\nlast\nend\n")) {
			t.Errorf("kept %d bytes: …%q", len(got.stdout), got.stdout[max(0, len(got.stdout)-40):])
		}
	}
	// It ended: signals find it no more.
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byTag(tag), Signal: process.Signal_SIGNAL_SIGKILL}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("signal after the end: %v", err)
	}
}

func connectTo(t *testing.T, c processconnect.ProcessClient, sel *process.ProcessSelector) *outcome {
	t.Helper()
	s, err := c.Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: sel}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	o := &outcome{}
	for s.Receive() {
		o.take(t, s.Msg().GetEvent())
	}
	if s.Err() != nil {
		t.Fatal(s.Err())
	}
	return o
}

func touch(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func wait(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not come to be")
		}
	}
}

// A server left in the background does not hold up the end, and does not die
// of its closed output.
func TestBackgroundChild(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	gate, mark := filepath.Join(a.Home, "gate"), filepath.Join(a.Home, "mark")
	began := time.Now()
	o := mustRun(t, c, startReq(fmt.Sprintf(`(while [ ! -e %s ]; do sleep 0.01; done; seq 1 100000; touch %s) & echo started`, gate, mark), as("root")))
	if string(o.stdout) != "started\n" || o.end.GetExitCode() != 0 {
		t.Errorf("%q, %v", o.stdout, o.end)
	}
	if d := time.Since(began); d > 10*time.Second {
		t.Errorf("the end took %v", d)
	}
	touch(t, gate)
	wait(t, func() bool { _, err := os.Stat(mark); return err == nil })
}

// What a command wrote right before its end arrives although its reader is
// slow and a child holds the pipe.
func TestLastWordsWithBackgroundChild(t *testing.T) {
	a := agenttest.Start(t)
	s, err := protoClient(t, a).Start(t.Context(), startReq(`sleep 5 & seq 1 300000`))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	o := &outcome{}
	for n := 0; s.Receive(); n++ {
		if n < 3 {
			time.Sleep(400 * time.Millisecond) // longer than the grace
		}
		o.take(t, s.Msg().GetEvent())
	}
	if !bytes.HasSuffix(o.stdout, []byte("\n300000\n")) || bytes.Count(o.stdout, []byte("\n")) != 300000 {
		t.Errorf("%d lines, …%q", bytes.Count(o.stdout, []byte("\n")), o.stdout[max(0, len(o.stdout)-20):])
	}
}

func TestInput(t *testing.T) {
	codecs(t, func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient) {
		yes := true
		s, err := c.Start(t.Context(), startReq("cat; echo over", func(r *connect.Request[process.StartRequest]) { r.Msg.Stdin = &yes }))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		o := &outcome{}
		s.Receive()
		o.take(t, s.Msg().GetEvent())
		var want bytes.Buffer
		fed := make(chan struct{})
		go func() {
			defer close(fed)
			in := c.StreamInput(context.Background())
			in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start{Start: &process.StreamInputRequest_StartEvent{Process: byPid(o.pid)}}})
			for i := range 200 {
				in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: stdinInput(fmt.Appendf(nil, "%d %s\n", i, strings.Repeat("x", 5000)))}}})
				in.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Keepalive{Keepalive: &process.StreamInputRequest_KeepAlive{}}})
			}
			if _, err := in.CloseAndReceive(); err != nil {
				t.Error("stream input:", err)
			}
			if _, err := c.SendInput(context.Background(), connect.NewRequest(&process.SendInputRequest{Process: byPid(o.pid), Input: stdinInput([]byte("sent\n"))})); err != nil {
				t.Error("send input:", err)
			}
			for range 2 { // idempotent
				if _, err := c.CloseStdin(context.Background(), connect.NewRequest(&process.CloseStdinRequest{Process: byPid(o.pid)})); err != nil && connect.CodeOf(err) != connect.CodeNotFound {
					t.Error("close stdin:", err)
				}
			}
		}()
		for i := range 200 {
			fmt.Fprintf(&want, "%d %s\n", i, strings.Repeat("x", 5000))
		}
		want.WriteString("sent\nover\n")
		for s.Receive() {
			o.take(t, s.Msg().GetEvent())
		}
		<-fed
		if !bytes.Equal(o.stdout, want.Bytes()) {
			t.Errorf("got %d bytes, want %d", len(o.stdout), want.Len())
		}
		if o.end.GetExitCode() != 0 {
			t.Errorf("end %v, %v", o.end, s.Err())
		}
	})
}

func stdinInput(data []byte) *process.ProcessInput {
	return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: data}}
}

// A command that does not read its input holds up its writer, and nobody else.
func TestInputIsHeldUp(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	yes := true
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Start(ctx, startReq("exec sleep 60", func(r *connect.Request[process.StartRequest]) { r.Msg.Stdin = &yes }))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Receive()
	pid := s.Msg().GetEvent().GetStart().GetPid()
	short, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer stop()
	_, err = c.SendInput(short, connect.NewRequest(&process.SendInputRequest{Process: byPid(pid), Input: stdinInput(make([]byte, 1<<20))}))
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("got %v", err)
	}
	if _, err := c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPid(pid), Signal: process.Signal_SIGNAL_SIGTERM})); err != nil {
		t.Error(err)
	}
	o := &outcome{pid: pid}
	for s.Receive() {
		o.take(t, s.Msg().GetEvent())
	}
	if got := o.end.GetStatus(); got != "signal: terminated" {
		t.Errorf("end %q, %v", got, s.Err())
	}
}

// The interface names SIGTERM and SIGKILL; any other number of Linux's goes too.
func TestSignals(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	s, err := c.Start(t.Context(), startReq(`trap "echo int" INT; trap "echo usr1; exit 7" USR1; echo ready; while :; do sleep 0.05; done`))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	o := &outcome{}
	sent := false
	for s.Receive() {
		o.take(t, s.Msg().GetEvent())
		if !sent && bytes.Contains(o.stdout, []byte("ready")) {
			sent = true
			pid := s.Msg().GetEvent().GetStart().GetPid()
			if pid == 0 {
				pid = o.pid
			}
			for _, n := range []int32{0, -1, 65, 1 << 20} {
				if _, err := c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPid(pid), Signal: process.Signal(n)})); connect.CodeOf(err) != connect.CodeInvalidArgument {
					t.Errorf("signal %d: %v", n, err)
				}
			}
			for _, n := range []syscall.Signal{syscall.SIGINT, syscall.SIGUSR1} {
				if _, err := c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPid(pid), Signal: process.Signal(n)})); err != nil {
					t.Error(n, err)
				}
			}
		}
	}
	if o.end.GetExitCode() != 7 || !bytes.Contains(o.stdout, []byte("usr1")) {
		t.Errorf("end %v, output %q", o.end, o.stdout)
	}
}

func TestDeadlineEndsTheCommand(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	s, err := c.Start(ctx, startReq("sleep 60 & sleep 60"))
	if err == nil {
		for s.Receive() {
		}
		err = s.Err()
		s.Close()
	}
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("got %v", err)
	}
	wait(t, func() bool {
		list, err := c.List(t.Context(), connect.NewRequest(&process.ListRequest{}))
		return err == nil && len(list.Msg.GetProcesses()) == 0
	})
}

func TestKeepalive(t *testing.T) {
	a := agenttest.Start(t)
	o := mustRun(t, protoClient(t, a), startReq("sleep 1.5", func(r *connect.Request[process.StartRequest]) { r.Header().Set(control.KeepaliveHeader, "1") }))
	if o.keepalives == 0 {
		t.Error("no keepalive")
	}
}

func TestTerminal(t *testing.T) {
	codecs(t, func(t *testing.T, a *agenttest.Agent, c processconnect.ProcessClient) {
		req := startReq(`tty; stty size; echo "$TERM"; test -t 0 -a -t 1 -a -t 2 && echo all; read x; stty size; echo "got $x"; cat >/dev/null; exit 4`,
			func(r *connect.Request[process.StartRequest]) {
				r.Msg.Pty = &process.PTY{Size: &process.PTY_Size{Cols: 100, Rows: 30}}
			})
		s, err := c.Start(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		o := &outcome{}
		until := func(text string) {
			t.Helper()
			for !strings.Contains(string(o.pty), text) && s.Receive() {
				o.take(t, s.Msg().GetEvent())
			}
			if !strings.Contains(string(o.pty), text) {
				t.Fatalf("no %q in %q: %v", text, o.pty, s.Err())
			}
		}
		until("all")
		for _, want := range []string{"/dev/pts/", "30 100", "xterm-256color"} {
			if !strings.Contains(string(o.pty), want) {
				t.Errorf("no %q in %q", want, o.pty)
			}
		}
		if _, err := c.Update(t.Context(), connect.NewRequest(&process.UpdateRequest{Process: byPid(o.pid), Pty: &process.PTY{Size: &process.PTY_Size{Cols: 70, Rows: 20}}})); err != nil {
			t.Fatal(err)
		}
		send := func(data string) {
			t.Helper()
			if _, err := c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: byPid(o.pid), Input: &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte(data)}}})); err != nil {
				t.Fatal(err)
			}
		}
		_, err = c.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: byPid(o.pid), Input: stdinInput([]byte("x"))}))
		if connect.CodeOf(err) != connect.CodeFailedPrecondition {
			t.Errorf("stdin of a terminal: %v", err)
		}
		send("hello\n")
		until("20 70")
		until("got hello")
		send("\x04")
		for s.Receive() {
			o.take(t, s.Msg().GetEvent())
		}
		if o.end.GetExitCode() != 4 {
			t.Errorf("end %v, %v", o.end, s.Err())
		}
	})
}

func TestResizeWithoutTerminal(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Start(ctx, startReq("exec sleep 60"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Receive()
	pid := s.Msg().GetEvent().GetStart().GetPid()
	_, err = c.Update(t.Context(), connect.NewRequest(&process.UpdateRequest{Process: byPid(pid), Pty: &process.PTY{Size: &process.PTY_Size{Cols: 1, Rows: 1}}}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("got %v", err)
	}
	_, err = c.SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPid(pid)}))
	if connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("no signal: %v", err)
	}
	cancel()
}

// Close ends what runs, also what ignores SIGTERM.
func TestCloseEndsCommands(t *testing.T) {
	a := agenttest.Start(t)
	c := protoClient(t, a)
	ends := make(chan string, 2)
	for _, script := range []string{"exec sleep 60", "trap '' TERM; while :; do sleep 0.05; done"} {
		s, err := c.Start(t.Context(), startReq(script))
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			o := &outcome{}
			for s.Receive() {
				o.take(t, s.Msg().GetEvent())
			}
			ends <- o.end.GetStatus()
			s.Close()
		}()
	}
	time.Sleep(100 * time.Millisecond) // let the trap be set
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	a.Agent.Close(ctx)
	got := map[string]bool{<-ends: true, <-ends: true}
	if !got["signal: terminated"] || !got["signal: killed"] {
		t.Errorf("ends %v", got)
	}
	if _, err := run(t, c, startReq("true")); err == nil {
		t.Error("a command was started after Close")
	}
}
