package manager

import (
	"context"
	"net"
	"sync"

	"github.com/warrenhq/warren/internal/sandbox"
)

// conns are the open connections into one sandbox. One that has died does not
// close them: gVisor's network stack goes without a word, and the daemon's end
// would wait for keep-alives to fail, which takes minutes.
type conns struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
	over bool
}

// dial opens a connection of inst's that hangUp closes.
func (c *conns) dial(ctx context.Context, inst sandbox.Instance, port int) (net.Conn, error) {
	conn, err := inst.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	over := c.over
	if !over {
		if c.open == nil {
			c.open = map[net.Conn]struct{}{}
		}
		c.open[conn] = struct{}{}
	}
	c.mu.Unlock()
	if over {
		conn.Close()
		return nil, sandbox.Errorf(sandbox.CodeConflict, "the sandbox has ended")
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		return &tcpConn{tcp, c}, nil
	}
	return &anyConn{conn, c}, nil
}

// hangUp closes all connections, and each that is made later.
func (c *conns) hangUp() {
	c.mu.Lock()
	open := c.open
	c.open, c.over = nil, true
	c.mu.Unlock()
	for conn := range open {
		conn.Close()
	}
}

func (c *conns) forget(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, conn)
}

// tcpConn keeps what a TCP connection can do beside net.Conn: half-closing,
// copying without buffers.
type tcpConn struct {
	*net.TCPConn
	of *conns
}

func (t *tcpConn) Close() error {
	t.of.forget(t.TCPConn)
	return t.TCPConn.Close()
}

type anyConn struct {
	net.Conn
	of *conns
}

func (a *anyConn) Close() error {
	a.of.forget(a.Conn)
	return a.Conn.Close()
}

// CloseWrite ends the writing side where the connection has one of its own.
func (a *anyConn) CloseWrite() error {
	if cw, ok := a.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return a.Close()
}
