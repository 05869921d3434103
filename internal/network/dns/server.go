package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// The bounds of what sandboxes may ask.
const (
	ratePerSecond  = 200 // queries of one sandbox
	rateBurst      = 400
	maxPerClient   = 64  // queries of one sandbox at once
	maxQueries     = 512 // queries at once
	tcpPerClient   = 8   // connections of one sandbox
	maxTCP         = 256 // connections at once
	tcpIdle        = 10 * time.Second
	maxUDPQuery    = 4096 // bytes
	upstreamTime   = 2 * time.Second
	upstreamRounds = 2
)

// Config is what Listen needs.
type Config struct {
	Addr      netip.AddrPort                      // where to listen, UDP and TCP
	Upstreams func() []netip.AddrPort             // whom to ask, in order
	Client    func(src netip.Addr) (Client, bool) // the sandbox of a source address
	Log       func(msg string, err error)         // faults of the listening itself; may be nil
}

// Server is a running resolver.
type Server struct {
	cfg     Config
	udp     *net.UDPConn
	tcp     *net.TCPListener
	ctx     context.Context
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	queries chan struct{} // a token for each query at work

	mu      sync.Mutex
	clients map[netip.Addr]*client // at most one for each slot
	conns   map[net.Conn]struct{}
}

// client is what the server remembers of a source address.
type client struct {
	tokens float64
	filled time.Time
	active int // queries
	conns  int // TCP connections
}

// Listen opens UDP and TCP on cfg.Addr and serves until Close.
func Listen(cfg Config) (*Server, error) {
	udp, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(cfg.Addr))
	if err != nil {
		return nil, err
	}
	port := udp.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	tcp, err := net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(netip.AddrPortFrom(cfg.Addr.Addr(), port)))
	if err != nil {
		udp.Close()
		return nil, err
	}
	s := &Server{cfg: cfg, udp: udp, tcp: tcp, queries: make(chan struct{}, maxQueries),
		clients: map[netip.Addr]*client{}, conns: map[net.Conn]struct{}{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.wg.Go(s.serveUDP)
	s.wg.Go(s.serveTCP)
	return s, nil
}

// Addr is where the server listens.
func (s *Server) Addr() netip.AddrPort { return s.udp.LocalAddr().(*net.UDPAddr).AddrPort() }

// Close stops listening, abandons queries at work, and returns when all
// goroutines have ended.
func (s *Server) Close() error {
	s.cancel()
	err := errors.Join(s.udp.Close(), s.tcp.Close())
	s.mu.Lock()
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
	return err
}

// admit takes a token of src's rate and a place among the queries at work.
func (s *Server) admit(src netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.client(src)
	now := time.Now()
	c.tokens = min(rateBurst, c.tokens+now.Sub(c.filled).Seconds()*ratePerSecond)
	c.filled = now
	if c.tokens < 1 || c.active >= maxPerClient {
		return false
	}
	select {
	case s.queries <- struct{}{}:
	default:
		return false
	}
	c.tokens--
	c.active++
	return true
}

func (s *Server) client(src netip.Addr) *client {
	c := s.clients[src]
	if c == nil {
		c = &client{tokens: rateBurst, filled: time.Now()}
		s.clients[src] = c
	}
	return c
}

func (s *Server) done(src netip.Addr) {
	<-s.queries
	s.mu.Lock()
	s.clients[src].active--
	s.mu.Unlock()
}

func (s *Server) fault(msg string, err error) {
	if s.cfg.Log != nil && s.ctx.Err() == nil {
		s.cfg.Log(msg, err)
	}
}

func (s *Server) serveUDP() {
	buf := make([]byte, maxUDPQuery)
	for {
		n, from, err := s.udp.ReadFromUDPAddrPort(buf)
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.fault("dns: read", err)
			s.pause()
			continue
		}
		src := from.Addr().Unmap()
		c, ok := s.cfg.Client(src)
		if !ok || !s.admit(src) {
			continue // over its rate: the client asks again
		}
		query := append([]byte(nil), buf[:n]...)
		s.wg.Go(func() {
			defer s.done(src)
			ctx, cancel := context.WithTimeout(s.ctx, queryTime)
			defer cancel()
			if b := respond(ctx, c, query, "udp", s.exchange); b != nil {
				s.udp.WriteToUDPAddrPort(b, from) // an answer that cannot be sent is a lost packet
			}
		})
	}
}

// pause keeps a persistent error from becoming a busy loop.
func (s *Server) pause() {
	select {
	case <-s.ctx.Done():
	case <-time.After(50 * time.Millisecond):
	}
}

func (s *Server) serveTCP() {
	for {
		conn, err := s.tcp.Accept()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.fault("dns: accept", err)
			s.pause()
			continue
		}
		src := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		c, ok := s.cfg.Client(src)
		if !ok || !s.track(src, conn) {
			conn.Close()
			continue
		}
		s.wg.Go(func() {
			defer s.untrack(src, conn)
			s.serveConn(c, src, conn)
		})
	}
}

func (s *Server) track(src netip.Addr, conn net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.client(src)
	if s.ctx.Err() != nil || c.conns >= tcpPerClient || len(s.conns) >= maxTCP {
		return false
	}
	c.conns++
	s.conns[conn] = struct{}{}
	return true
}

func (s *Server) untrack(src netip.Addr, conn net.Conn) {
	conn.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients[src].conns--
	delete(s.conns, conn)
}

// serveConn answers one query after the other (RFC 7766 allows it).
func (s *Server) serveConn(c Client, src netip.Addr, conn net.Conn) {
	for {
		conn.SetDeadline(time.Now().Add(tcpIdle))
		var length [2]byte
		if _, err := io.ReadFull(conn, length[:]); err != nil {
			return
		}
		n := binary.BigEndian.Uint16(length[:])
		if n > maxUDPQuery {
			return
		}
		query := make([]byte, n)
		if _, err := io.ReadFull(conn, query); err != nil || !s.admit(src) {
			return
		}
		ctx, cancel := context.WithTimeout(s.ctx, queryTime)
		b := respond(ctx, c, query, "tcp", s.exchange)
		cancel()
		s.done(src)
		if b == nil {
			return
		}
		conn.SetDeadline(time.Now().Add(tcpIdle))
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)); err != nil {
			return
		}
	}
}

var errNoUpstream = errors.New("dns: the host has no resolver")

// exchange asks the upstreams in turn, twice round.
func (s *Server) exchange(ctx context.Context, m *dns.Msg, network string) (*dns.Msg, error) {
	err := errNoUpstream
	upstreams := s.cfg.Upstreams()
	for range upstreamRounds {
		for _, u := range upstreams {
			if u == s.Addr() {
				continue // a host whose resolv.conf names us
			}
			cl := dns.Client{Net: network, Timeout: upstreamTime, UDPSize: maxUDP}
			r, _, e := cl.ExchangeContext(ctx, m, u.String())
			if e == nil && (r.Rcode == dns.RcodeServerFailure || r.Rcode == dns.RcodeRefused) && len(upstreams) > 1 {
				e = errors.New("dns: " + u.String() + " answered " + dns.RcodeToString[r.Rcode])
			}
			if e == nil {
				return r, nil
			}
			if err = e; ctx.Err() != nil {
				return nil, err
			}
		}
	}
	return nil, err
}

// Lookup asks for a name's IPv4 addresses as if c had asked, so that c's
// Resolved is told of them.
func (s *Server) Lookup(ctx context.Context, c Client, name string) {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), dns.TypeA)
	ctx, cancel := context.WithTimeout(ctx, queryTime)
	defer cancel()
	answer(ctx, c, m, "udp", s.exchange)
}
