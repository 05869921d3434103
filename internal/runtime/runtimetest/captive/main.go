// Captive is what the suite of captures captures: a process and its child with
// everything open that a capture has to keep, and a listener on which they tell
// whether it still works. It is built for the tests and runs in sandboxes.
package main

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	port    = ":7000"
	lock    = "/tmp/captive.lock"
	socket  = "/tmp/captive.sock"
	watched = "/tmp/watched"
)

func main() {
	var err error
	if len(os.Args) > 1 && os.Args[1] == "child" {
		err = child()
	} else {
		err = parent()
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// child answers on a unix socket and on its pipes, and tries the parent's lock.
func child() error {
	l, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		for in := bufio.NewScanner(c); in.Scan(); {
			fmt.Fprintln(c, "socket:"+in.Text())
		}
	}()
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "lock":
			f, err := os.Open(lock)
			if err != nil {
				return err
			}
			err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				fmt.Println("held")
			} else {
				fmt.Println("free", err)
			}
		default:
			fmt.Println("pipe:" + in.Text())
		}
	}
	return errors.New("the parent's pipe has ended")
}

type captive struct {
	secret string // in memory alone
	ticks  atomic.Int64
	alarm  atomic.Bool // a timer of the time that the caller set has gone off

	mu     sync.Mutex
	toPipe *bufio.ReadWriter
	toSock *bufio.ReadWriter
	events *os.File // inotify
	sleep  *exec.Cmd

	open atomic.Int64 // connections to the listener
	out  atomic.Value // the state of the connection to the outside
}

func parent() error {
	c := &captive{}
	c.out.Store("none")
	var b [16]byte
	rand.Read(b[:])
	c.secret = hex.EncodeToString(b[:])

	f, err := os.Create(lock)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", "child")
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.toPipe = bufio.NewReadWriter(bufio.NewReader(out), bufio.NewWriter(in))
	if _, err := c.toPipe.ReadString('\n'); err != nil {
		return err
	}
	s, err := net.Dial("unix", socket)
	if err != nil {
		return err
	}
	c.toSock = bufio.NewReadWriter(bufio.NewReader(s), bufio.NewWriter(s))

	if err := os.MkdirAll(watched, 0o755); err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK)
	if err != nil {
		return err
	}
	if _, err := unix.InotifyAddWatch(fd, watched, unix.IN_CREATE); err != nil {
		return err
	}
	c.events = os.NewFile(uintptr(fd), "inotify")
	c.sleep = exec.Command("/bin/sleep", "100000")
	if err := c.sleep.Start(); err != nil {
		return err
	}
	go func() {
		for range time.Tick(10 * time.Millisecond) {
			c.ticks.Add(1)
		}
	}()
	l, err := net.Listen("tcp", port)
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		c.open.Add(1)
		go func() {
			defer c.open.Add(-1)
			defer conn.Close()
			for in := bufio.NewScanner(conn); in.Scan(); {
				fmt.Fprintln(conn, c.answer(in.Text()))
			}
		}()
	}
}

func (c *captive) answer(line string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	word, arg, _ := strings.Cut(line, " ")
	switch word {
	case "echo":
		return arg
	case "secret":
		return c.secret
	case "ticks":
		return strconv.FormatInt(c.ticks.Load(), 10)
	case "alarm":
		d, err := time.ParseDuration(arg)
		if err != nil {
			return err.Error()
		}
		time.AfterFunc(d, func() { c.alarm.Store(true) })
		return "set"
	case "alarmed":
		return strconv.FormatBool(c.alarm.Load())
	case "pipe", "lock":
		return ask(c.toPipe, strings.TrimSpace(strings.TrimPrefix(line, "pipe ")))
	case "socket":
		return ask(c.toSock, arg)
	case "inotify":
		return c.inotify(arg)
	case "sleeping":
		if err := unix.Kill(c.sleep.Process.Pid, 0); err != nil {
			return err.Error()
		}
		return "yes"
	case "open":
		return strconv.FormatInt(c.open.Load(), 10)
	case "dial":
		conn, err := net.Dial("tcp", arg)
		if err != nil {
			return err.Error()
		}
		c.out.Store("open")
		go func() {
			_, err := conn.Read(make([]byte, 1))
			c.out.Store("closed")
			_ = err
			conn.Close()
		}()
		return "open"
	case "out":
		return c.out.Load().(string)
	}
	return "what?"
}

func ask(rw *bufio.ReadWriter, line string) string {
	fmt.Fprintln(rw, line)
	if err := rw.Flush(); err != nil {
		return err.Error()
	}
	got, err := rw.ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(got)
}

// inotify makes a file and waits for the watch, which is older than it.
func (c *captive) inotify(name string) string {
	if err := os.WriteFile(filepath.Join(watched, filepath.Base(name)), nil, 0o600); err != nil {
		return err.Error()
	}
	c.events.SetReadDeadline(time.Now().Add(10 * time.Second))
	buf := make([]byte, 4096)
	n, err := c.events.Read(buf)
	if err != nil {
		return err.Error()
	}
	if n <= unix.SizeofInotifyEvent {
		return "an event without a name"
	}
	return "created " + strings.TrimRight(string(buf[unix.SizeofInotifyEvent:n]), "\x00")
}
