package e2e

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/e2e/pattern"
	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/proto/process"
)

// resident reads how much memory a process of the host has, in MiB.
func resident(t *testing.T, pid int) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			kib, _ := strconv.Atoi(f[1])
			return kib >> 10
		}
	}
	return 0
}

// slowHash hashes what is written to it, and is slow at first.
type slowHash struct {
	hash.Hash
	n     int64
	pause time.Duration
	until int64 // bytes
	look  func(n int64)
	next  int64
}

func (s *slowHash) Write(p []byte) (int, error) {
	if s.n < s.until {
		time.Sleep(s.pause)
	}
	s.n += int64(len(p))
	if s.n >= s.next && s.look != nil {
		s.next = s.n + 8<<20
		s.look(s.n)
	}
	return s.Hash.Write(p)
}

// TestMuchOutput reads 200 MB of a command slowly: all of it comes, in order,
// and neither the daemon nor the agent keeps it.
func TestMuchOutput(t *testing.T) {
	t.Parallel()
	const size = 200_000_000
	l := newLab(t)
	want := sha256.New()
	pattern.Copy(want, size)
	l.each(t, func(t *testing.T, runtime string) {
		// The agent lives within the sandbox's limit: were it to keep the
		// output, the kernel would end it.
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime, Resources: wire.ResourceRequest{MemoryMiB: 128}})
		l.run(t, sb.ID, "inside", "spew", "1000")
		daemon := l.d.cmd.Process.Pid
		before, most := resident(t, daemon), 0
		out := &slowHash{Hash: sha256.New(), pause: 20 * time.Millisecond, until: 3 << 20, look: func(int64) { most = max(most, resident(t, daemon)) }}
		r, err := l.cl.Start(t.Context(), sb.ID, client.Command{Args: []string{"inside", "spew", fmt.Sprint(size)}, Stdout: out})
		must(t, err)
		end, err := r.Wait(t.Context())
		if err != nil || end.Code != 0 {
			t.Fatalf("it ended with %+v, %v after %d bytes", end, err, out.n)
		}
		if out.n != size || !bytes.Equal(out.Sum(nil), want.Sum(nil)) {
			t.Errorf("%d bytes came of %d, and they are others", out.n, size)
		}
		if most > before+48 {
			t.Errorf("the daemon's memory grew from %d to %d MiB", before, most)
		}
		if got := l.get(t, sb.ID); got.OOMKills != 0 {
			t.Errorf("%d OOM kills", got.OOMKills)
		}
	})
}

// TestOrder reads two streams that a command writes in turns.
func TestOrder(t *testing.T) {
	t.Parallel()
	const lines = 20_000
	l := newLab(t)
	numbered := func(word string) []byte {
		var b bytes.Buffer
		for i := range lines {
			fmt.Fprintf(&b, "%s %d\n", word, i)
		}
		return b.Bytes()
	}
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		var out, errs bytes.Buffer
		r, err := l.cl.Start(t.Context(), sb.ID, client.Command{Args: []string{"inside", "both", fmt.Sprint(lines)}, Stdout: &out, Stderr: &errs})
		must(t, err)
		if end, err := r.Wait(t.Context()); err != nil || end.Code != 0 {
			t.Fatalf("it ended with %+v, %v", end, err)
		}
		if !bytes.Equal(out.Bytes(), numbered("out")) || !bytes.Equal(errs.Bytes(), numbered("err")) {
			t.Errorf("the streams are not what was written: %d and %d bytes", out.Len(), errs.Len())
		}
		cli := l.cli(t, "exec", sb.ID, "--", "inside", "both", fmt.Sprint(lines))
		if !bytes.Equal(cli.stdout, numbered("out")) || !bytes.Equal(cli.stderr, numbered("err")) {
			t.Errorf("the command line gives %d and %d bytes", len(cli.stdout), len(cli.stderr))
		}
	})
}

// TestReconnect leaves a command's stream in the middle, and comes back by pid:
// the command was not ended, and its end is told.
func TestReconnect(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		stdin := true
		first, err := l.cl.Process(sb.ID).Start(t.Context(), connect.NewRequest(&process.StartRequest{
			Process: &process.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", `i=0; while [ $i -lt 50000 ]; do echo line $i; i=$((i+1)); done; read answer; echo got $answer; exit 5`}},
			Stdin:   &stdin,
		}))
		must(t, err)
		var pid uint32
		var before bytes.Buffer
		for before.Len() < 10_000 && first.Receive() {
			e := first.Msg().GetEvent()
			if e.GetStart() != nil {
				pid = e.GetStart().GetPid()
			}
			before.Write(e.GetData().GetStdout())
		}
		first.Close()
		sel := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
		list, err := l.cl.Process(sb.ID).List(t.Context(), connect.NewRequest(&process.ListRequest{}))
		must(t, err)
		if len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetPid() != pid {
			t.Errorf("the commands are %v; want pid %d", list.Msg.GetProcesses(), pid)
		}
		second, err := l.cl.Process(sb.ID).Connect(t.Context(), connect.NewRequest(&process.ConnectRequest{Process: sel}))
		must(t, err)
		defer second.Close()
		if _, err := l.cl.Process(sb.ID).SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{
			Process: sel, Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("hello\n")}},
		})); err != nil {
			t.Errorf("send input: %v", err)
		}
		var after bytes.Buffer
		var end *process.ProcessEvent_EndEvent
		for second.Receive() {
			after.Write(second.Msg().GetEvent().GetData().GetStdout())
			if e := second.Msg().GetEvent().GetEnd(); e != nil {
				end = e
			}
		}
		if end.GetExitCode() != 5 || !strings.HasSuffix(after.String(), "got hello\n") {
			t.Errorf("the end is %v, %v; the output ends with %.60q", end, second.Err(), after.String()[max(0, after.Len()-60):])
		}
		// What came is in order, without a hole in it.
		last := -1
		for line := range strings.Lines(after.String()) {
			var n int
			if _, err := fmt.Sscanf(line, "line %d", &n); err != nil {
				continue
			}
			if last >= 0 && n != last+1 {
				t.Fatalf("line %d follows line %d", n, last)
			}
			last = n
		}
		if last != 49_999 && last != -1 {
			t.Errorf("the last line is %d", last)
		}
	})
}
