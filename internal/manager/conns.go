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
	mu      sync.Mutex
	open    map[net.Conn]struct{}
	dialing map[*context.CancelFunc]struct{} // one that has died does not refuse either
	over    bool
}

// dial opens a connection of inst's that hangUp closes.
func (c *conns) dial(ctx context.Context, inst sandbox.Instance, port int) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !c.begin(&cancel) {
		return nil, errOver
	}
	conn, err := inst.Dial(ctx, port)
	over := c.finish(&cancel, conn)
	if over && err == nil {
		conn.Close()
	}
	if over {
		return nil, errOver
	}
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		return &tcpConn{tcp, c}, nil
	}
	return &anyConn{conn, c}, nil
}

var errOver = sandbox.Errorf(sandbox.CodeConflict, "the sandbox has ended")

// begin notes a dial that hangUp is to give up; false: it is too late for one.
func (c *conns) begin(cancel *context.CancelFunc) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return false
	}
	if c.dialing == nil {
		c.dialing, c.open = map[*context.CancelFunc]struct{}{}, map[net.Conn]struct{}{}
	}
	c.dialing[cancel] = struct{}{}
	return true
}

// finish notes what a dial gave, nil for none, and tells whether hangUp came
// before it.
func (c *conns) finish(cancel *context.CancelFunc, conn net.Conn) (over bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.dialing, cancel)
	if conn != nil && !c.over {
		c.open[conn] = struct{}{}
	}
	return c.over
}

// hangUp closes all connections, gives up those that are being made, and
// refuses later ones.
func (c *conns) hangUp() {
	c.mu.Lock()
	open, dialing := c.open, c.dialing
	c.open, c.dialing, c.over = nil, nil, true
	for cancel := range dialing {
		(*cancel)()
	}
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
