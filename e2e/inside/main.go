// Command inside is what the end-to-end tests run in a sandbox: servers,
// generators of output, and probes of what can be reached. It is static, so
// that an image needs nothing else.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/warrenhq/warren/e2e/pattern"
)

func main() {
	if len(os.Args) < 2 {
		fail("usage: inside COMMAND [ARG...]")
	}
	args := os.Args[2:]
	switch os.Args[1] {
	case "serve":
		serve(args[0])
	case "hog":
		hog(number(args[0]))
	case "spew":
		spew(int64(number(args[0])))
	case "both":
		both(number(args[0]))
	case "allbytes":
		os.Stdout.Write(pattern.AllBytes())
		os.Stderr.Write(pattern.AllBytes())
	case "dial":
		dial(args)
	case "env":
		env()
	case "args":
		json.NewEncoder(os.Stdout).Encode(args)
	case "cpus":
		fmt.Println(runtime.NumCPU())
	default:
		fail("no command %q", os.Args[1])
	}
}

func fail(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "inside: "+format+"\n", args...)
	os.Exit(64)
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		fail("%q is no number", s)
	}
	return n
}

// serve answers HTTP/1.1 and h2c at addr with what it was asked, and echoes
// WebSocket messages at /ws.
func serve(addr string) {
	ws := func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(4 << 20)
		for {
			kind, data, err := c.Read(r.Context())
			if err != nil {
				return
			}
			if c.Write(r.Context(), kind, data) != nil {
				return
			}
		}
	}
	// No ServeMux: it would redirect odd paths, which are to be shown.
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ws" {
			ws(w, r)
			return
		}
		body := new(bytes.Buffer)
		body.ReadFrom(http.MaxBytesReader(w, r.Body, 1<<20))
		w.Header().Set("Inside-Proto", r.Proto)
		json.NewEncoder(w).Encode(map[string]any{
			"proto": r.Proto, "method": r.Method, "path": r.RequestURI, "host": r.Host, "headers": r.Header, "body": body.String(),
		})
	})
	s := &http.Server{Addr: addr, Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	l, err := net.Listen("tcp", addr)
	if err != nil {
		fail("%v", err)
	}
	fmt.Println("listening")
	fail("%v", s.Serve(l))
}

// hog takes mib MiB of memory and touches every page, then says that it fitted.
// It never takes more than was asked for.
func hog(mib int) {
	var held [][]byte
	for range mib {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		held = append(held, b)
	}
	fmt.Printf("fitted %d\n", len(held))
	time.Sleep(2 * time.Second)
	runtime.KeepAlive(held)
}

// spew writes n bytes of the pattern.
func spew(n int64) {
	w := bufio.NewWriterSize(os.Stdout, 256<<10)
	if _, err := pattern.Copy(w, n); err != nil {
		fail("%v", err)
	}
	if err := w.Flush(); err != nil {
		fail("%v", err)
	}
}

// both writes n numbered lines to each of stdout and stderr, in turns.
func both(n int) {
	for i := range n {
		fmt.Fprintf(os.Stdout, "out %d\n", i)
		fmt.Fprintf(os.Stderr, "err %d\n", i)
	}
}

// dial tries each "network!address" and tells of it "address ok" or "address
// and the error". UDP is asked for an answer to a DNS query.
func dial(targets []string) {
	results := make([]string, len(targets))
	done := make(chan struct{})
	for i, target := range targets {
		go func() {
			results[i] = try(target)
			done <- struct{}{}
		}()
	}
	for range targets {
		<-done
	}
	fmt.Println(strings.Join(results, "\n"))
}

const dialTimeout = 2 * time.Second

func try(target string) string {
	network, addr, ok := strings.Cut(target, "!")
	if !ok {
		fail("%q is not NETWORK!ADDRESS", target)
	}
	if network == "name" {
		ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
		defer cancel()
		addrs, err := net.DefaultResolver.LookupHost(ctx, addr)
		if err != nil {
			return target + " " + err.Error()
		}
		return target + " ok " + strings.Join(addrs, " ")
	}
	c, err := net.DialTimeout(network, addr, dialTimeout)
	if err != nil {
		return target + " " + err.Error()
	}
	defer c.Close()
	if network != "udp" {
		return target + " ok"
	}
	c.SetDeadline(time.Now().Add(dialTimeout))
	// A query of "." for NS (RFC 1035, section 4).
	c.Write([]byte{0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1})
	if _, err := c.Read(make([]byte, 1500)); err != nil {
		return target + " " + err.Error()
	}
	return target + " ok"
}

// env tells how many variables there are and how large the largest is.
func env() {
	largest := 0
	for _, e := range os.Environ() {
		largest = max(largest, len(e))
	}
	n := 0
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, "E2E_") {
			n++
		}
	}
	fmt.Println(n, largest)
}
