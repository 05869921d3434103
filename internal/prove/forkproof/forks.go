package forkproof

import (
	"bufio"
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

var (
	//go:embed prepare.sh
	prepareScript string
	//go:embed witness.py
	witnessPython []byte
	//go:embed witness.js
	witnessNode []byte
	// CallsPython is a program that waits in every system call that it knows of
	// at once, and tells which of them was ended before its time. It is given a
	// directory of its own, writes "up" there, and when there is a "release" its
	// findings to "result".
	//
	//go:embed calls.py
	CallsPython []byte
)

const (
	dir      = "/tmp/warren-forkproof"
	scripts  = "/tmp/warren-forkproof-prepare"
	echoPort = 18080 // of the witness that listens
)

// family is a source and what was forked off it.
type family struct {
	source Sandbox
	kids   []Sandbox
	secret string   // only the memory of a process of the source holds it
	conn   net.Conn // to the source's listener, from before the fork
	term   Terminal // of the source, detached: seenMark was read of it, unreadMark was not
}

// What the source's terminal wrote.
const (
	seenMark   = "seen-41"
	unreadMark = "unread-42"
)

// all is the source and its children, the source first.
func (f *family) all() []Sandbox { return append([]Sandbox{f.source}, f.kids...) }

// Secrets that the source is given.
const (
	plainEnv     = "WARREN_PROVE_PLAIN"
	ephemeralEnv = "WARREN_PROVE_EPHEMERAL"
)

// errUntried is an error of a check that could not be tried.
type errUntried struct{ why string }

func (e errUntried) Error() string { return e.why }

func untried(format string, args ...any) error { return errUntried{fmt.Sprintf(format, args...)} }

// check is one row about a fork.
type check struct {
	id, name string
	do       func(context.Context, *family) (string, error)
	remedy   string // what a program can do where it is a No
}

// What a program can do whose generator's state is in its own memory.
const (
	pythonRemedy = "reseed upon SIGURG or a change of /run/warren/generation, or load Warren's reseed module (warren_reseed) in the template"
	nodeRemedy   = "load Warren's reseed module by NODE_OPTIONS in the template, read /dev/urandom, or start a new process"
)

var checks = []check{
	{"fork.source", "the source goes on, its clients connected", sourceGoesOn, ""},
	{"fork.process", "processes and their memory are in each child", processes, ""},
	{"fork.files", "open files without a name", openFiles, ""},
	{"fork.blocked", "a call that blocked goes on blocking (open of a fifo)", blocked, ""},
	{"fork.calls", "calls that wait go on waiting (every kind that is known)", overCalls(JudgeCalls), ""},
	{"fork.write", "a write of more than fits is not cut short", overCalls(largeWrites), ""},
	{"fork.clock", "the wall clock is right", clock, ""},
	{"fork.hostname", "a host name of its own", hostnames, ""},
	{"fork.machineid", "a machine-id of its own", machineIDs, ""},
	{"fork.sshkeys", "SSH host keys of its own", sshKeys, ""},
	{"fork.generation", "/run/warren/generation of its own", fresh("cat /run/warren/generation 2>/dev/null || exit 77"), ""},
	{"fork.id", "its own sandbox id inside", ids, ""},
	{"fork.secrets", "ephemeral secrets are not in a child", secrets, ""},
	{"fork.urandom", "/dev/urandom differs", fresh("head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'"), ""},
	{"fork.kernelboot", "the kernel's random UUIDs differ", fresh("cat /proc/sys/kernel/random/uuid"), ""},
	{"fork.getrandom", "getrandom, in a process that lived through it", living("python", "getrandom"), ""},
	{"fork.pysecrets", "Python secrets, in a process that lived through it", living("python", "secrets"), ""},
	{"fork.pyuuid", "UUIDs, in a process that lived through it", living("python", "uuid"), ""},
	{"fork.pyrandom", "Python random, in a process that lived through it", living("python", "random"), pythonRemedy},
	{"fork.pyhooked", "Python random, in one that reseeds upon SIGURG", living("python", "hooked"), ""},
	{"fork.openssl", "OpenSSL, in a process that lived through it", living("python", "openssl"), pythonRemedy},
	{"fork.opensslhooked", "OpenSSL, in one that reseeds upon SIGURG", living("python", "opensslhooked"), ""},
	{"fork.opensslnew", "OpenSSL, a new process", fresh("command -v openssl >/dev/null || exit 77; openssl rand -hex 16"), ""},
	{"fork.nodecrypto", "Node crypto, in a process that lived through it", living("node", "crypto"), nodeRemedy},
	{"fork.nodeuuid", "Node randomUUID, in a process that lived through it", living("node", "uuid"), nodeRemedy},
	{"fork.nodemath", "Node Math.random, in a process that lived through it", living("node", "math"), nodeRemedy},
	{"fork.nodekeys", "Node key generation (OpenSSL), in a process that lived through it", living("node", "key"), nodeRemedy},
	{"fork.listen", "listeners answer in each child", listeners, ""},
	{"fork.conns", "a child's copy of an outside connection is closed", connections, ""},
	{"fork.timers", "sleepers and timers go on", timers, ""},
	{"fork.terminal", "a terminal can be reattached, with its scrollback", terminals, ""},
	{"fork.inotify", "inotify watches fire", inotify, ""},
	{"fork.locks", "file locks hold, and end with their holder", locks, ""},
	{"fork.pipes", "pipes between processes", pipes, ""},
	{"fork.unix", "unix sockets between processes", unixSockets, ""},
}

// forks checks a fork of a sandbox full of witnesses, then a fork of a fork of
// it, then a snapshot with memory, then sleep.
func (s *suite) forks(ctx context.Context) error {
	s.o.Progress("fork: preparing")
	f, err := s.prepare(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.add("fork", "live fork", time.Now(), Unsupported, "its witnesses cannot be made: %v", err)
		return nil
	}
	defer f.source.Kill(ctx)
	defer f.close()

	s.o.Progress(fmt.Sprintf("fork: one capture, %d children", s.o.Children))
	start := time.Now()
	forked, err := f.source.Fork(ctx, s.o.Children)
	took := time.Since(start)
	s.made = append(s.made, forked.Sandboxes...)
	f.kids = forked.Sandboxes
	if err == nil {
		err = errors.Join(forked.Errors...)
	}
	if err == nil && len(f.kids) != s.o.Children {
		err = fmt.Errorf("%d of %d children were made", len(f.kids), s.o.Children)
	}
	kind := ""
	if forked.Kind != "" {
		kind = " of kind " + forked.Kind
	}
	s.verdict("fork", "live fork", start, err, "%d children of one capture%s in %d ms", s.o.Children, kind, took.Milliseconds())
	if len(f.kids) == 0 {
		for _, c := range checks {
			s.add(c.id, c.name, time.Now(), Unsupported, "there is no fork to look at")
		}
	} else {
		for _, c := range checks {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.o.Progress(c.name)
			start := time.Now()
			seen, err := c.do(ctx, f)
			if e := (errUntried{}); errors.As(err, &e) {
				s.add(c.id, c.name, start, Unsupported, "%s", e.why)
				continue
			}
			if errors.As(err, new(errSame)) && c.remedy != "" {
				err = fmt.Errorf("%w; remedy: %s", err, c.remedy)
			}
			s.verdict(c.id, c.name, start, err, "%s", seen)
		}
		s.chain(ctx, f)
		s.suspended(ctx, f)
	}
	for _, k := range f.kids {
		k.Kill(ctx)
	}
	s.full(ctx, f)
	s.sleep(ctx, f)
	return nil
}

func (f *family) close() {
	if f.conn != nil {
		f.conn.Close()
	}
	if f.term != nil {
		f.term.Close()
	}
}

// prepare makes the source and all its witnesses.
func (s *suite) prepare(ctx context.Context) (*family, error) {
	f := &family{secret: rand.Text()}
	var err error
	f.source, err = s.create(ctx, map[string]string{plainEnv: "plain-" + f.secret[:8], ephemeralEnv: "ephemeral-" + f.secret[8:]}, []string{ephemeralEnv})
	if err != nil {
		return nil, err
	}
	if _, err := sh(ctx, f.source, "mkdir -p "+scripts); err != nil {
		return nil, err
	}
	// prepare.sh empties its directory first, so the programs come by another.
	text := strings.Replace(prepareScript, "mkdir -p $D/watched\n", "mkdir -p $D/watched\ncp "+scripts+"/witness.* $D/\n", 1)
	for name, data := range map[string][]byte{"prepare.sh": []byte(text), "witness.py": witnessPython, "witness.js": witnessNode} {
		if err := f.source.WriteFile(ctx, scripts+"/"+name, data, 0o644); err != nil {
			return nil, err
		}
	}
	out, err := f.source.Exec(ctx, "sh "+scripts+"/prepare.sh "+f.secret, 2*execLimit)
	if err != nil {
		return nil, err
	}
	if out.Code != 0 {
		return nil, errors.New(strings.TrimSpace(out.Stdout + out.Stderr))
	}
	// A client that stays connected over the fork.
	if has(ctx, f.source, "listen") {
		if f.conn, err = f.source.Dial(ctx, echoPort); err != nil {
			return nil, fmt.Errorf("the witness that listens does not answer: %w", err)
		}
		if err := echo(f.conn, "before"); err != nil {
			return nil, fmt.Errorf("the witness that listens does not answer: %w", err)
		}
	}
	// A terminal, of which the last output is read by nobody before the fork.
	if t, err := f.source.OpenTerminal(ctx, "/bin/sh"); err == nil {
		err := t.Send(ctx, "a=kept; echo se''en-$((40+1)); sleep 1; echo un''read-$((40+2))\n")
		if err == nil {
			_, err = t.ReadUntil(ctx, seenMark)
		}
		t.Close()
		if err == nil {
			f.term = t
			pause(ctx, 2*time.Second)
		}
	}
	if err := startCalls(ctx, f.source); err != nil && !errors.As(err, new(errUntried)) {
		return nil, err
	}
	if _, err := sh(ctx, f.source, "cd "+dir+"; (sleep 5; date +%s >slept) </dev/null >/dev/null 2>&1 & sync"); err != nil {
		return nil, err
	}
	return f, nil
}

// has tells whether the template had what a witness needs.
func has(ctx context.Context, sb Sandbox, witness string) bool {
	_, err := sh(ctx, sb, "test -s "+dir+"/"+witness+".pid")
	return err == nil
}

// lives fails where a witness is not there as a process of sb.
func lives(ctx context.Context, f *family, sb Sandbox, witness string) error {
	if !has(ctx, f.source, witness) {
		return untried("the template has no program for it")
	}
	if _, err := sh(ctx, sb, fmt.Sprintf("kill -0 $(cat %s/%s.pid)", dir, witness)); err != nil {
		return errors.New("its process is not there")
	}
	return nil
}

// eachKid runs f on each child and names the first that fails.
func (f *family) eachKid(do func(sb Sandbox) error) error {
	for i, k := range f.kids {
		if err := do(k); err != nil {
			var e errUntried
			if errors.As(err, &e) {
				return err
			}
			return fmt.Errorf("child %d of %d: %w", i+1, len(f.kids), err)
		}
	}
	return nil
}

// until repeats a command line until it succeeds.
func until(ctx context.Context, sb Sandbox, line string, limit time.Duration) (string, error) {
	for end := time.Now().Add(limit); ; pause(ctx, 300*time.Millisecond) {
		out, err := sh(ctx, sb, line)
		if err == nil || ctx.Err() != nil || time.Now().After(end) {
			return out, err
		}
	}
}

// ask asks the keeper, which counts what it is asked.
func ask(ctx context.Context, sb Sandbox) (string, error) {
	return sh(ctx, sb, "cd "+dir+" && timeout 15 sh -c 'echo x >q; read -r l <a; echo \"$l\"'")
}

func sourceGoesOn(ctx context.Context, f *family) (string, error) {
	if err := lives(ctx, f, f.source, "keeper"); err != nil {
		return "", err
	}
	got, err := ask(ctx, f.source)
	if err != nil {
		return "", fmt.Errorf("its process does not answer: %w", err)
	}
	if got != "1 "+f.secret {
		return "", errors.New("its process answers with what it was not told")
	}
	if f.conn == nil {
		return "its process answers; no connection could be kept: the template has no program that listens", nil
	}
	if err := echo(f.conn, "after"); err != nil {
		return "", fmt.Errorf("the client's connection from before is broken: %w", err)
	}
	return "its process answers, and so does a connection from before the fork", nil
}

func processes(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "keeper"); err != nil {
			return err
		}
		got, err := ask(ctx, sb)
		if err == nil && got != "1 "+f.secret {
			err = errors.New("its process does not remember")
		}
		return err
	})
	return "a process of the source answers in each with what only its memory held", err
}

func openFiles(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "open"); err != nil {
			return err
		}
		got, err := sh(ctx, sb, "cd "+dir+" && timeout 15 sh -c 'echo x >open.q; read -r l <open.a; echo \"$l\"'")
		if err == nil && got != "in a file without a name" {
			err = fmt.Errorf("it holds %q", got)
		}
		return err
	})
	return "a removed file that was open still is", err
}

func blocked(ctx context.Context, f *family) (string, error) {
	try := func(sb Sandbox) error {
		if _, err := sh(ctx, sb, "cd "+dir+" && { kill -0 $(cat blocked.pid) && timeout 10 sh -c 'echo word >blocked.q'; }"); err != nil {
			if said, _ := sh(ctx, sb, "tail -n 1 "+dir+"/blocked.log"); said != "" {
				return fmt.Errorf("the shell that waited ended: %s", said)
			}
			return errors.New("its process is not there")
		}
		_, err := until(ctx, sb, "grep -q word "+dir+"/blocked.got", waitLimit)
		return err
	}
	if err := try(f.source); err != nil {
		return "", fmt.Errorf("the source: %w", err)
	}
	return "a shell that waited for a fifo's other end got it, in each and in the source", f.eachKid(try)
}

func clock(ctx context.Context, f *family) (string, error) {
	// Both sides of one exec bound what the clock inside may say.
	var worst time.Duration
	err := f.eachKid(func(sb Sandbox) error {
		before := time.Now()
		out, err := sh(ctx, sb, "date +%s")
		after := time.Now()
		if err != nil {
			return err
		}
		sec, err := strconv.ParseInt(out, 10, 64)
		if err != nil {
			return fmt.Errorf("date says %q", out)
		}
		inside := time.Unix(sec, 0)
		off := max(before.Truncate(time.Second).Sub(inside), inside.Sub(after), 0)
		worst = max(worst, off)
		if off > time.Second {
			return fmt.Errorf("it is off by %s", off)
		}
		return nil
	})
	return fmt.Sprintf("within %d s in each", int(worst.Seconds())+1), err
}

// distinct fails where any two have the same, or one has nothing.
func distinct(values []string) error {
	for i, v := range values {
		if v == "" {
			return fmt.Errorf("%s has none", member(i))
		}
		if j := slices.Index(values, v); j < i {
			return errSame{member(j), member(i)}
		}
	}
	return nil
}

// errSame is of two that should differ.
type errSame struct{ one, other string }

func (e errSame) Error() string { return e.one + " and " + e.other + " have the same" }

func member(i int) string {
	if i == 0 {
		return "the source"
	}
	return fmt.Sprintf("child %d", i)
}

// values runs a command line in all; exit code 77 is one that cannot be tried.
func values(ctx context.Context, f *family, line string) ([]string, error) {
	var out []string
	for i, sb := range f.all() {
		res, err := sb.Exec(ctx, line, execLimit)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", member(i), err)
		}
		if res.Code == 77 {
			return nil, untried("the template has no program for it")
		}
		out = append(out, strings.TrimSpace(res.Stdout))
	}
	return out, nil
}

// fresh checks that a new process gets something else in each.
func fresh(line string) func(context.Context, *family) (string, error) {
	return func(ctx context.Context, f *family) (string, error) {
		v, err := values(ctx, f, line)
		if err == nil {
			err = distinct(v)
		}
		return fmt.Sprintf("the source and %d children have each their own", len(f.kids)), err
	}
}

// askLiving asks a witness for all that it can tell, which is asked once only:
// a generator's first number after the fork is the one that counts.
func askLiving(ctx context.Context, f *family, witness string, sb Sandbox) (map[string]string, error) {
	if err := lives(ctx, f, sb, witness); err != nil {
		return nil, err
	}
	line := `cd ` + dir + ` && { [ -s python.said ] || python3 -c '
import socket
s = socket.socket(socket.AF_UNIX); s.settimeout(15); s.connect("py.sock")
s.sendall(b"random hooked secrets uuid getrandom openssl opensslhooked unix\n")
print(s.makefile().read(), end="")' >python.said; } && cat python.said`
	if witness == "node" {
		line = `cd ` + dir + ` && { [ -s node.said ] || timeout 20 node -e '
require("net").connect("node.sock").pipe(process.stdout)' >node.said; } && cat node.said`
	}
	out, err := sh(ctx, sb, line)
	if err != nil {
		return nil, fmt.Errorf("its process does not answer: %w", err)
	}
	m := map[string]string{}
	for l := range strings.Lines(out) {
		k, v, _ := strings.Cut(strings.TrimSpace(l), " ")
		m[k] = v
	}
	return m, nil
}

// living checks that a process that was in the capture draws something else in
// each.
func living(witness, generator string) func(context.Context, *family) (string, error) {
	return func(ctx context.Context, f *family) (string, error) {
		var v []string
		for i, sb := range f.all() {
			m, err := askLiving(ctx, f, witness, sb)
			if err != nil {
				var e errUntried
				if errors.As(err, &e) {
					return "", err
				}
				return "", fmt.Errorf("%s: %w", member(i), err)
			}
			v = append(v, m[generator])
		}
		return fmt.Sprintf("the source's process and its %d copies draw each their own", len(f.kids)), distinct(v)
	}
}

func hostnames(ctx context.Context, f *family) (string, error) {
	return fresh("hostname 2>/dev/null || cat /proc/sys/kernel/hostname")(ctx, f)
}

func machineIDs(ctx context.Context, f *family) (string, error) {
	return fresh("cat /etc/machine-id 2>/dev/null || exit 77")(ctx, f)
}

func sshKeys(ctx context.Context, f *family) (string, error) {
	return fresh("cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null || exit 77")(ctx, f)
}

func ids(ctx context.Context, f *family) (string, error) {
	v, err := values(ctx, f, "env | grep -E '^(E2B|WARREN)_SANDBOX_ID=' | head -n 1")
	if err != nil {
		return "", err
	}
	for i, sb := range f.all() {
		if v[i] == "" {
			return "", untried("no environment variable tells a command its sandbox's id")
		}
		if _, id, _ := strings.Cut(v[i], "="); id != sb.ID() {
			return "", fmt.Errorf("%s (%s) is told that it is %s", member(i), sb.ID(), id)
		}
	}
	return "commands of each are told its own", nil
}

func secrets(ctx context.Context, f *family) (string, error) {
	v, err := values(ctx, f, fmt.Sprintf(`echo "$%s/$%s"`, plainEnv, ephemeralEnv))
	if err != nil {
		return "", err
	}
	plain, ephemeral := "plain-"+f.secret[:8], "ephemeral-"+f.secret[8:]
	for i, got := range v {
		want := plain + "/"
		if i == 0 {
			want += ephemeral
		}
		if got == want {
			continue
		}
		if i > 0 && strings.Contains(got, ephemeral) {
			return "", fmt.Errorf("commands of %s have it in their environment", member(i))
		}
		return "", fmt.Errorf("commands of %s have the wrong environment", member(i))
	}
	return "commands of a child have the source's environment without what was ephemeral", nil
}

// echo sends a line to the witness that listens and wants it back.
func echo(c net.Conn, word string) error {
	c.SetDeadline(time.Now().Add(waitLimit))
	if _, err := fmt.Fprintln(c, word); err != nil {
		return err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(line) != "echo "+word {
		return fmt.Errorf("it answered %q", line)
	}
	return nil
}

func listeners(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "listen"); err != nil {
			return err
		}
		c, err := sb.Dial(ctx, echoPort)
		if err != nil {
			return err
		}
		defer c.Close()
		return echo(c, "child")
	})
	return "the source's listener takes connections in each", err
}

func connections(ctx context.Context, f *family) (string, error) {
	if f.conn == nil {
		return "", untried("the template has no program that listens")
	}
	start := time.Now()
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "listen"); err != nil {
			return err
		}
		if _, err := until(ctx, sb, "test -e "+dir+"/conn.ended", 15*time.Second); err != nil {
			return errors.New("its end of the source's connection is open still after 15 s: it hangs")
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	if _, err := sh(ctx, f.source, "test ! -e "+dir+"/conn.ended"); err != nil {
		return "", errors.New("the source's own was closed, too")
	}
	return fmt.Sprintf("closed in each when looked at (%d ms), and open in the source", time.Since(start).Milliseconds()), nil
}

func timers(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "tick"); err != nil {
			return err
		}
		at, err := sh(ctx, sb, "cat "+dir+"/tick")
		if err != nil {
			return err
		}
		if _, err := until(ctx, sb, fmt.Sprintf("[ $(cat %s/tick) -gt %s ]", dir, at), waitLimit); err != nil {
			return errors.New("a process that sleeps and counts stands still")
		}
		if _, err := until(ctx, sb, "test -s "+dir+"/slept", waitLimit); err != nil {
			return errors.New("a sleep of 5 s from before the fork has not ended")
		}
		return nil
	})
	return "a counter counts on, and a sleep of 5 s from before the fork ended, in each", err
}

func terminals(ctx context.Context, f *family) (string, error) {
	if f.term == nil {
		return "", untried("no terminal could be opened in the source")
	}
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(f.kids)+1)*execLimit)
	defer cancel()
	try := func(sb Sandbox) error {
		ctx, cancel := context.WithTimeout(ctx, execLimit)
		defer cancel()
		t, err := sb.AttachTerminal(ctx, f.term.PID())
		if err != nil {
			return err
		}
		defer t.Close()
		text, err := t.ReadUntil(ctx, unreadMark)
		if err != nil {
			return fmt.Errorf("what it had written is not there: %w", err)
		}
		if strings.Count(text, seenMark) != 1 || strings.Count(text, unreadMark) != 1 {
			return fmt.Errorf("its scrollback is %q", text)
		}
		if err := t.Send(ctx, "echo still-$a-$((1+1))\n"); err != nil {
			return err
		}
		if _, err := t.ReadUntil(ctx, "still-kept-2"); err != nil {
			return fmt.Errorf("its shell does not answer: %w", err)
		}
		return nil
	}
	if err := f.eachKid(try); err != nil {
		return "", err
	}
	if err := try(f.source); err != nil {
		return "", fmt.Errorf("the source: %w", err)
	}
	return "the shell in it answers in each and in the source, and what it had written is read first, each line once, also what had been read before", nil
}

func inotify(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "inotify"); err != nil {
			return err
		}
		if _, err := sh(ctx, sb, "cd "+dir+" && : >watched/new-file"); err != nil {
			return err
		}
		if _, err := until(ctx, sb, "grep -q new-file "+dir+"/inotify.log", 15*time.Second); err != nil {
			return errors.New("no event within 15 s")
		}
		return nil
	})
	return "a watch from before the fork tells of a new file in each", err
}

func locks(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		if err := lives(ctx, f, sb, "lock"); err != nil {
			return err
		}
		if _, err := sh(ctx, sb, "cd "+dir+" && ! flock -n lock true"); err != nil {
			return errors.New("the lock that a process holds is free")
		}
		// flock's child has the descriptor, too.
		if _, err := sh(ctx, sb, "cd "+dir+" && kill -9 -$(cat lock.pid)"); err != nil {
			return err
		}
		if _, err := until(ctx, sb, "cd "+dir+" && flock -n lock true", waitLimit); err != nil {
			return errors.New("the lock outlives its holder")
		}
		return nil
	})
	return "held in each by the process that had it, and free once that ended", err
}

func pipes(ctx context.Context, f *family) (string, error) {
	n := 0
	err := f.eachKid(func(sb Sandbox) error {
		n++
		if err := lives(ctx, f, sb, "pipe"); err != nil {
			return err
		}
		word := fmt.Sprintf("word%d", n)
		if _, err := sh(ctx, sb, "cd "+dir+" && timeout 15 sh -c 'echo "+word+" >pin'"); err != nil {
			return err
		}
		_, err := until(ctx, sb, "grep -q through "+dir+"/pout."+word, waitLimit)
		return err
	})
	return "a word goes through a fifo and a pipe between two processes in each", err
}

func unixSockets(ctx context.Context, f *family) (string, error) {
	err := f.eachKid(func(sb Sandbox) error {
		m, err := askLiving(ctx, f, "python", sb)
		if err == nil && m["unix"] != "pong-ping" {
			err = fmt.Errorf("the other end answered %q", m["unix"])
		}
		return err
	})
	return "a listener at a path and a pair of two processes work in each", err
}

// generations is how deep chain goes: the source is the first.
const generations = 4

// chain forks a child of the fork, and its child. Each generation changes what
// the next has to have: a file, and what a process has counted, where the forks
// have processes.
func (s *suite) chain(ctx context.Context, f *family) {
	const id, name = "fork.chain", "a fork of a fork of a fork"
	s.o.Progress(name)
	start := time.Now()
	memory := lives(ctx, f, f.kids[0], "keeper") == nil
	at, hosts, ancestors := f.kids[0], map[string]bool{}, ""
	one := func(depth int) error {
		if memory {
			got, err := ask(ctx, at)
			if err != nil {
				return fmt.Errorf("its process does not answer: %w", err)
			}
			if got != fmt.Sprintf("%d %s", depth, f.secret) { // the second generation was asked once before
				return errors.New("its process does not remember what its parent's knew")
			}
		}
		got, err := sh(ctx, at, "cd "+dir+" && touch lineage && cat lineage")
		if err != nil {
			return err
		}
		if got != strings.TrimSpace(ancestors) {
			return fmt.Errorf("a file has %q and not what its ancestors wrote", got)
		}
		line := fmt.Sprintf("generation %d", depth)
		if _, err := sh(ctx, at, "echo "+line+" >>"+dir+"/lineage"); err != nil {
			return err
		}
		ancestors += line + "\n"
		host, err := sh(ctx, at, "hostname 2>/dev/null || cat /proc/sys/kernel/hostname")
		if err != nil {
			return err
		}
		if hosts[host] {
			return errors.New("it has the host name of an ancestor")
		}
		hosts[host] = true
		if depth == generations {
			return nil
		}
		if at, err = s.onlyChild(ctx, at); err != nil {
			return fmt.Errorf("it cannot be forked: %w", err)
		}
		return nil
	}
	var err error
	for depth := 2; depth <= generations && err == nil; depth++ {
		if err = one(depth); err != nil {
			err = fmt.Errorf("generation %d: %w", depth, err)
		}
	}
	what := "files; their forks are of the disk"
	if memory {
		what = "memory and files"
	}
	s.verdict(id, name, start, err, "%d generations, each with its parent's %s, and a name of its own", generations, what)
	for _, sb := range s.made {
		if sb != f.source && !slices.Contains(f.kids, sb) {
			sb.Kill(ctx)
		}
	}
}

// onlyChild forks sb once.
func (s *suite) onlyChild(ctx context.Context, sb Sandbox) (Sandbox, error) {
	forked, err := sb.Fork(ctx, 1)
	s.made = append(s.made, forked.Sandboxes...)
	if err == nil {
		err = errors.Join(forked.Errors...)
	}
	if err == nil && len(forked.Sandboxes) != 1 {
		err = errors.New("there is no child")
	}
	if err != nil {
		return nil, err
	}
	return forked.Sandboxes[0], nil
}

// remembers checks that a child has what its source's process knew, or where
// memory is not in forks, its files. after is what the source's process has
// counted.
func remembers(ctx context.Context, f *family, child Sandbox, memory bool, after int) error {
	if !memory {
		_, err := sh(ctx, child, "test -e "+dir+"/keeper.sh")
		return err
	}
	got, err := ask(ctx, child)
	if err != nil {
		return fmt.Errorf("the child's process does not answer: %w", err)
	}
	if got != fmt.Sprintf("%d %s", after+1, f.secret) {
		return errors.New("the child's process does not remember")
	}
	return nil
}

// suspended checks a fork of a suspended source, which stays so.
func (s *suite) suspended(ctx context.Context, f *family) {
	const id, name = "fork.suspended", "a fork of a suspended sandbox"
	s.o.Progress(name)
	start := time.Now()
	memory := lives(ctx, f, f.kids[0], "keeper") == nil
	err := func() error {
		before, err := ask(ctx, f.source)
		if err != nil {
			return err
		}
		counted := 0
		fmt.Sscan(before, &counted)
		if err := f.source.Suspend(ctx); err != nil {
			return err
		}
		child, err := s.onlyChild(ctx, f.source)
		if err == nil {
			defer child.Kill(ctx)
			err = remembers(ctx, f, child, memory, counted)
		}
		// Were the source not suspended any more, this would be refused.
		if e := f.source.Unsuspend(ctx); e != nil {
			return errors.Join(err, fmt.Errorf("the source cannot go on: %w", e))
		}
		if err != nil {
			return err
		}
		if again, err := ask(ctx, f.source); err != nil || again != fmt.Sprintf("%d %s", counted+1, f.secret) {
			return fmt.Errorf("the source does not go on as it was: %q (%w)", again, err)
		}
		return nil
	}()
	s.verdict(id, name, start, err, "the child runs, and the source stays suspended until it is told to go on")
}

// full checks a snapshot with memory.
func (s *suite) full(ctx context.Context, f *family) {
	const id, name = "capture_full", "snapshot of disk and memory"
	s.o.Progress(name)
	start := time.Now()
	err := func() error {
		snap, err := f.source.Snapshot(ctx, Full)
		if err != nil {
			return err
		}
		defer s.p.RemoveSnapshot(context.WithoutCancel(ctx), snap)
		at, err := ask(ctx, f.source)
		if err != nil {
			return fmt.Errorf("the source does not go on: %w", err)
		}
		child, err := s.p.FromSnapshot(ctx, snap)
		if err != nil {
			return fmt.Errorf("no sandbox can be made of it: %w", err)
		}
		s.made = append(s.made, child)
		defer child.Kill(ctx)
		got, err := ask(ctx, child)
		if err != nil {
			return fmt.Errorf("its process does not answer: %w", err)
		}
		if got != at { // both were asked once since
			return errors.New("its process does not remember")
		}
		return otherIdentity(ctx, f.source, child)
	}()
	s.verdict(id, name, start, err, "a process of the source goes on in a sandbox made of it, whose identity is its own")
}

// cycles is how often the source sleeps and wakes.
const cycles = 3

// sleep checks that nothing is lost over hibernation, an unsynced write neither.
func (s *suite) sleep(ctx context.Context, f *family) {
	const id, name = "hibernate", "hibernate and wake"
	s.o.Progress(name)
	start := time.Now()
	var down, up time.Duration
	conn := s.beforeSleep(ctx, f)
	err := func() error {
		identity, err := sh(ctx, f.source, "hostname; cat /etc/machine-id 2>/dev/null || true")
		if err != nil {
			return err
		}
		for n := range cycles {
			sum, err := sh(ctx, f.source, fmt.Sprintf("head -c 200000 /dev/urandom >>%s/grows; md5sum <%s/grows", dir, dir))
			if err != nil {
				return err
			}
			before, err := ask(ctx, f.source)
			if err != nil {
				return err
			}
			t := time.Now()
			if err := f.source.Hibernate(ctx); err != nil {
				return err
			}
			down = max(down, time.Since(t))
			if n == 0 {
				conn.asleep(ctx, s, f, before)
			}
			t = time.Now()
			// The first of the cycles is woken by being asked for something.
			if n > 0 {
				if err := f.source.Wake(ctx); err != nil {
					return fmt.Errorf("it does not wake: %w", err)
				}
			}
			after, err := ask(ctx, f.source)
			up = max(up, time.Since(t))
			if err != nil {
				return fmt.Errorf("its process does not answer after it woke: %w", err)
			}
			x, y := 0, 0
			fmt.Sscan(before, &x)
			fmt.Sscan(after, &y)
			if y != x+1 {
				return errors.New("its process does not remember")
			}
			if again, err := sh(ctx, f.source, "md5sum <"+dir+"/grows"); err != nil || again != sum {
				return errors.New("a file that was never synced is not the same")
			}
			now, err := sh(ctx, f.source, "hostname; cat /etc/machine-id 2>/dev/null || true")
			if err != nil {
				return err
			}
			if now != identity {
				return errors.New("it woke as another: its host name or machine-id changed")
			}
		}
		return nil
	}()
	s.verdict(id, name, start, err, "%d times, once by being asked for something; nothing lost. At most %d ms down, %d ms to the first answer", cycles, down.Milliseconds(), up.Milliseconds())
	conn.add(ctx, s, f, err)
}

// sleeper is what is checked beside the sleep itself.
type sleeper struct {
	conn     net.Conn // a client's, to a listener inside; nil is none
	connErr  error
	connTook time.Duration
	forked   time.Duration
	forkErr  error
	slept    bool
}

// promptly is how long an end of a connection may take to be known.
const promptly = time.Second

func (s *suite) beforeSleep(ctx context.Context, f *family) *sleeper {
	x := &sleeper{}
	if !has(ctx, f.source, "listen") {
		return x
	}
	sh(ctx, f.source, "rm -f "+dir+"/conn.ended")
	if x.conn, x.connErr = f.source.Dial(ctx, echoPort); x.connErr == nil {
		x.connErr = echo(x.conn, "before sleep")
	}
	return x
}

// asleep looks at the connection's outer end, and forks the sandbox while it
// sleeps. before is what its process said last.
func (x *sleeper) asleep(ctx context.Context, s *suite, f *family, before string) {
	x.slept = true
	if x.conn != nil && x.connErr == nil {
		start := time.Now()
		x.conn.SetReadDeadline(start.Add(10 * promptly))
		_, err := x.conn.Read(make([]byte, 1))
		x.connTook = time.Since(start)
		var late net.Error
		switch {
		case err == nil:
			x.connErr = errors.New("something came out of the connection of a sandbox that sleeps")
		case errors.As(err, &late) && late.Timeout():
			x.connErr = fmt.Errorf("the client's end hangs for %s", x.connTook)
		case x.connTook > promptly:
			x.connErr = fmt.Errorf("the client's end knew after %s only", x.connTook)
		}
	}
	counted := 0
	fmt.Sscan(before, &counted)
	start := time.Now()
	child, err := s.onlyChild(ctx, f.source)
	x.forked = time.Since(start)
	if err == nil {
		err = remembers(ctx, f, child, true, counted)
		child.Kill(ctx)
	}
	x.forkErr = err
}

func (x *sleeper) add(ctx context.Context, s *suite, f *family, slept error) {
	const forkID, forkName = "fork.asleep", "a fork of a hibernated sandbox"
	const connID, connName = "hibernate.conns", "connections end on both sides when it hibernates"
	start := time.Now()
	if x.conn != nil {
		defer x.conn.Close()
	}
	if !x.slept {
		s.add(forkID, forkName, start, No, "it does not hibernate: %v", slept)
		s.add(connID, connName, start, No, "it does not hibernate: %v", slept)
		return
	}
	s.verdict(forkID, forkName, start, x.forkErr, "the child runs after %d ms, with what the process knew", x.forked.Milliseconds())
	if x.conn == nil && x.connErr == nil {
		s.add(connID, connName, start, Unsupported, "the template has no program that listens")
		return
	}
	if x.connErr == nil {
		if _, err := until(ctx, f.source, "test -e "+dir+"/conn.ended", 15*time.Second); err != nil {
			x.connErr = errors.New("the process inside has not seen its end 15 s after it woke")
		}
	}
	s.verdict(connID, connName, start, x.connErr, "the client knew after %d ms, the process inside when it woke", x.connTook.Milliseconds())
}
