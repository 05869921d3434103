// Package tunnel joins an upgraded HTTP connection to a TCP port of the
// sandbox's loopback.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/agent/files"
)

const dialTimeout = 10 * time.Second

// Handler serves GET /tunnel?port=N with "Upgrade: warren-tcp" over HTTP/1.1:
// after 101 the connection is the port's, on 127.0.0.1 or else ::1. 502 tells
// that nothing listens there.
type Handler struct {
	open atomic.Int64

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

// Open is how many tunnels are open.
func (h *Handler) Open() int { return int(h.open.Load()) }

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		files.WriteStatus(w, http.StatusBadRequest, fmt.Sprintf("port %.20q is not a number of 1 to 65535", r.URL.Query().Get("port")))
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), control.UpgradeProtocol) || r.ProtoMajor != 1 {
		w.Header().Set("Upgrade", control.UpgradeProtocol)
		files.WriteStatus(w, http.StatusUpgradeRequired, "a tunnel needs HTTP/1.1 and the header Upgrade: "+control.UpgradeProtocol)
		return
	}
	target, err := dial(r.Context(), strconv.Itoa(int(port)))
	if err != nil {
		files.WriteStatus(w, http.StatusBadGateway, fmt.Sprintf("nothing answers on port %d inside the sandbox: %v", port, err))
		return
	}
	defer target.Close()
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		files.WriteStatus(w, http.StatusInternalServerError, err.Error())
		return
	}
	defer conn.Close()
	if !h.track(conn, target) {
		return
	}
	defer h.untrack(conn, target)
	conn.SetDeadline(time.Time{})
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+control.UpgradeProtocol+"\r\n\r\n"); err != nil {
		return
	}
	// What the client sent already is in the server's buffer.
	if n := rw.Reader.Buffered(); n > 0 {
		early, _ := rw.Reader.Peek(n)
		if _, err := target.Write(early); err != nil {
			return
		}
	}
	join(conn, target)
}

func dial(ctx context.Context, port string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	c, err := d.DialContext(ctx, "tcp4", net.JoinHostPort("127.0.0.1", port))
	if err == nil {
		return c, nil
	}
	if c, err6 := d.DialContext(ctx, "tcp6", net.JoinHostPort("::1", port)); err6 == nil {
		return c, nil
	}
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err
	}
	return nil, err
}

// join copies both ways, and passes on each side's end of writing.
func join(a, b net.Conn) {
	done := make(chan struct{}, 2)
	half := func(dst, src net.Conn) {
		defer func() { done <- struct{}{} }()
		_, err := io.Copy(dst, src) // splices
		if c, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
			c.CloseWrite()
			return
		}
		dst.Close()
		src.Close()
	}
	go half(a, b)
	half(b, a)
	<-done
	<-done
}

func (h *Handler) track(conns ...net.Conn) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return false
	}
	if h.conns == nil {
		h.conns = map[net.Conn]struct{}{}
	}
	for _, c := range conns {
		h.conns[c] = struct{}{}
	}
	h.open.Add(1)
	return true
}

func (h *Handler) untrack(conns ...net.Conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range conns {
		delete(h.conns, c)
	}
	h.open.Add(-1)
}

// Drop ends the tunnels that are open; new ones can be made.
func (h *Handler) Drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for c := range h.conns {
		c.Close()
	}
}

// Close ends all tunnels: a server's Shutdown does not know them any more.
func (h *Handler) Close() {
	h.mu.Lock()
	h.closed = true
	for c := range h.conns {
		c.Close()
	}
	h.mu.Unlock()
}
