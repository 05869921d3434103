package manager

import (
	"context"
	"io"
	"net"
	"testing"

	"github.com/warrenhq/warren/internal/sandbox"
)

// listening is an instance of which only Dial is used.
type listening struct {
	sandbox.Instance
	addr string
}

func (l listening) Dial(ctx context.Context, _ int) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", l.addr)
}

// hanging is an instance whose Dial tells that it began, and waits for ever.
type hangingInstance struct {
	sandbox.Instance
	began chan struct{}
}

func hanging(began chan struct{}) sandbox.Instance { return hangingInstance{began: began} }

func (h hangingInstance) Dial(ctx context.Context, _ int) (net.Conn, error) {
	close(h.began)
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestHangUp(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	inst := listening{addr: l.Addr().String()}
	var c conns
	silent, err := c.dial(t.Context(), inst, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := silent.(io.ReaderFrom); !ok {
		t.Error("a TCP connection lost its ReadFrom")
	}
	closed, err := c.dial(t.Context(), inst, 1)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	if len(c.open) != 1 {
		t.Errorf("%d connections are kept, not 1", len(c.open))
	}
	read := make(chan error, 1)
	go func() {
		_, err := silent.Read(make([]byte, 1)) // nobody ever writes
		read <- err
	}()
	c.hangUp()
	if err := <-read; err == nil {
		t.Error("a read of a connection that was hung up gave no error")
	}
	silent.Close()

	// One that is being made, to an address that does not answer.
	var d conns
	mute := make(chan error, 1)
	began := make(chan struct{})
	go func() {
		_, err := d.dial(t.Context(), hanging(began), 1)
		mute <- err
	}()
	<-began
	d.hangUp()
	if err := <-mute; sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Errorf("a connection that was being made: %v", err)
	}
	if _, err := c.dial(t.Context(), inst, 1); sandbox.CodeOf(err) != sandbox.CodeConflict {
		t.Errorf("a connection after the end: %v", err)
	}
}
