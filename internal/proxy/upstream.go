package proxy

import (
	"context"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Bounds of what one sandbox may hold of the daemon.
const (
	maxConnsPerPort     = 1024
	maxIdlePerPort      = 32
	maxIdlePerSandbox   = 64
	idleTimeout         = 60 * time.Second
	maxResponseHeader   = 256 << 10
	upstreamBuffer      = 64 << 10
	forgetUnusedAfter   = 5 * time.Minute
	expectContinueAfter = time.Second
)

// upstream is the connections to one sandbox's ports.
type upstream struct {
	id     sandbox.ID
	ctx    context.Context // done when the sandbox has ended
	cancel context.CancelFunc
	h1     *http.Transport // HTTP/1.1
	h2     *http.Transport // HTTP/2 with prior knowledge, for gRPC

	// Both under table.mu.
	inFlight int
	lastUsed time.Time
}

func newUpstream(s Sandboxes, tenant string, id sandbox.ID) *upstream {
	ctx, cancel := context.WithCancel(context.Background())
	u := &upstream{id: id, ctx: ctx, cancel: cancel}
	dial := func(ctx context.Context, _, addr string) (net.Conn, error) {
		_, p, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		port, err := strconv.Atoi(p)
		if err != nil {
			return nil, err
		}
		return s.Dial(ctx, tenant, id, port)
	}
	transport := func() *http.Transport {
		return &http.Transport{
			DialContext:            dial,
			DisableCompression:     true, // bodies pass as they are
			MaxConnsPerHost:        maxConnsPerPort,
			MaxIdleConnsPerHost:    maxIdlePerPort,
			MaxIdleConns:           maxIdlePerSandbox,
			IdleConnTimeout:        idleTimeout,
			MaxResponseHeaderBytes: maxResponseHeader,
			ReadBufferSize:         upstreamBuffer,
			WriteBufferSize:        upstreamBuffer,
			ExpectContinueTimeout:  expectContinueAfter,
			Protocols:              new(http.Protocols),
		}
	}
	u.h1, u.h2 = transport(), transport()
	u.h1.Protocols.SetHTTP1(true)
	u.h2.Protocols.SetUnencryptedHTTP2(true)
	return u
}

// RoundTrip sends gRPC by HTTP/2, which it needs, and everything else by
// HTTP/1.1, which every server has.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	if isGRPC(r) {
		return u.h2.RoundTrip(r)
	}
	return u.h1.RoundTrip(r)
}

func isGRPC(r *http.Request) bool {
	ct := r.Header.Get("Content-Type")
	return r.ProtoMajor == 2 && (ct == "application/grpc" || strings.HasPrefix(ct, "application/grpc+") || strings.HasPrefix(ct, "application/grpc;"))
}

func (u *upstream) close() {
	u.cancel()
	u.h1.CloseIdleConnections()
	u.h2.CloseIdleConnections()
}

// table holds the upstreams in use.
type table struct {
	sandboxes Sandboxes
	mu        sync.Mutex
	byID      map[sandbox.ID]*upstream
}

// claim gives the upstream of sb, making it where there is none, and the
// function that gives it back.
func (t *table) claim(sb sandbox.Sandbox) (*upstream, func()) {
	now := time.Now()
	var unused []*upstream
	t.mu.Lock()
	u := t.byID[sb.ID]
	if u == nil {
		for id, other := range t.byID {
			if other.inFlight == 0 && now.Sub(other.lastUsed) > forgetUnusedAfter {
				delete(t.byID, id)
				unused = append(unused, other)
			}
		}
		u = newUpstream(t.sandboxes, sb.Tenant, sb.ID)
		t.byID[sb.ID] = u
	}
	u.inFlight++
	u.lastUsed = now
	t.mu.Unlock()
	for _, other := range unused {
		other.close()
	}
	return u, func() {
		t.mu.Lock()
		u.inFlight--
		u.lastUsed = time.Now()
		t.mu.Unlock()
	}
}

// forget ends everything that goes to id.
func (t *table) forget(id sandbox.ID) {
	t.mu.Lock()
	u := t.byID[id]
	delete(t.byID, id)
	t.mu.Unlock()
	if u != nil {
		u.close()
	}
}

func (t *table) closeAll() {
	t.mu.Lock()
	all := t.byID
	t.byID = map[sandbox.ID]*upstream{}
	t.mu.Unlock()
	for _, u := range all {
		u.close()
	}
}
