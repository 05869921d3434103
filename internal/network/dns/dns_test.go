package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rules is a Client of fixed rules that remembers what it was told.
type rules struct {
	actions map[string]Action
	told    []string
	err     error
}

func (r *rules) Judge(name string) Action { return r.actions[name] }

func (r *rules) Resolved(_ context.Context, a Action, name string, addrs []netip.Addr, ttl time.Duration) error {
	r.told = append(r.told, fmt.Sprintf("%d %s %v %v", a, name, addrs, ttl))
	return r.err
}

func zone(records ...string) Exchange {
	return func(_ context.Context, m *dns.Msg, _ string) (*dns.Msg, error) {
		r := new(dns.Msg)
		r.SetReply(m)
		for _, s := range records {
			rr, err := dns.NewRR(s)
			if err != nil {
				return nil, err
			}
			r.Answer = append(r.Answer, rr)
		}
		return r, nil
	}
}

func query(t testing.TB, name string, qtype uint16, change func(*dns.Msg)) []byte {
	t.Helper()
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), qtype)
	m.Id = 4711
	if change != nil {
		change(m)
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRespond(t *testing.T) {
	ok := zone("a.example. 60 IN CNAME b.example.", "b.example. 30 IN A 192.0.2.7", "stray.example. 60 IN A 192.0.2.8", "b.example. 9999999 IN A 192.0.2.9")
	for _, tc := range []struct {
		name    string
		query   []byte
		actions map[string]Action
		err     error
		ask     Exchange
		rcode   int
		answers int
		told    string
	}{
		{"forward", query(t, "a.example", dns.TypeA, nil), nil, nil, ok, dns.RcodeSuccess, 4, "[]"},
		{"open", query(t, "A.Example", dns.TypeA, nil), map[string]Action{"a.example": Open}, nil, ok, dns.RcodeSuccess, 4, "[1 a.example [192.0.2.7 192.0.2.9] 30s]"},
		{"open fails", query(t, "a.example", dns.TypeA, nil), map[string]Action{"a.example": Open}, errors.New("full"), ok, dns.RcodeServerFailure, 0, "[1 a.example [192.0.2.7 192.0.2.9] 30s]"},
		{"block", query(t, "a.example", dns.TypeAAAA, nil), map[string]Action{"a.example": Block}, nil, ok, dns.RcodeNameError, 0, "[3 a.example [192.0.2.7 192.0.2.9] 30s]"},
		{"blocked alias", query(t, "a.example", dns.TypeA, nil), map[string]Action{"b.example": Block}, nil, ok, dns.RcodeNameError, 0, "[3 b.example [192.0.2.7 192.0.2.9] 30s]"},
		{"closed alias", query(t, "a.example", dns.TypeA, nil), map[string]Action{"b.example": Close}, nil, ok, dns.RcodeSuccess, 4, "[2 b.example [192.0.2.7 192.0.2.9] 30s]"},
		{"refuse", query(t, "a.example", dns.TypeA, nil), map[string]Action{"a.example": Refuse}, nil, nil, dns.RcodeRefused, 0, "[]"},
		{"no IPv6", query(t, "a.example", dns.TypeAAAA, nil), nil, nil, nil, dns.RcodeSuccess, 0, "[]"},
		{"no hints", query(t, "a.example", dns.TypeHTTPS, nil), nil, nil, nil, dns.RcodeSuccess, 0, "[]"},
		{"any", query(t, "a.example", dns.TypeANY, nil), nil, nil, nil, dns.RcodeNotImplemented, 0, "[]"},
		{"transfer", query(t, "a.example", dns.TypeAXFR, nil), nil, nil, nil, dns.RcodeNotImplemented, 0, "[]"},
		{"chaos", query(t, "version.bind", dns.TypeTXT, func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }), nil, nil, nil, dns.RcodeRefused, 0, "[]"},
		{"update", query(t, "a.example", dns.TypeA, func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }), nil, nil, nil, dns.RcodeNotImplemented, 0, "[]"},
		{"two questions", query(t, "a.example", dns.TypeA, func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }), nil, nil, nil, dns.RcodeFormatError, 0, "[]"},
		{"garbage", append(query(t, "a.example", dns.TypeA, nil)[:14], 0xff, 0xff), nil, nil, nil, dns.RcodeFormatError, 0, "[]"},
		{"upstream down", query(t, "a.example", dns.TypeA, nil), nil, nil, func(context.Context, *dns.Msg, string) (*dns.Msg, error) { return nil, errors.New("down") }, dns.RcodeServerFailure, 0, "[]"},
		{"upstream answers another question", query(t, "a.example", dns.TypeA, nil), nil, nil, func(_ context.Context, m *dns.Msg, _ string) (*dns.Msg, error) {
			r := m.Copy()
			r.Response, r.Question[0].Name = true, "evil.example."
			return r, nil
		}, dns.RcodeServerFailure, 0, "[]"},
		{"alias loop", query(t, "a.example", dns.TypeA, nil), map[string]Action{"a.example": Open}, nil, zone("a.example. 1 IN CNAME b.example.", "b.example. 1 IN CNAME a.example."), dns.RcodeSuccess, 2, "[1 a.example [] 1s]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := &rules{actions: tc.actions, err: tc.err}
			ask := tc.ask
			if ask == nil {
				ask = func(context.Context, *dns.Msg, string) (*dns.Msg, error) {
					t.Error("asked upstream")
					return nil, errors.New("no")
				}
			}
			b := respond(t.Context(), c, tc.query, "udp", ask)
			var m dns.Msg
			if err := m.Unpack(b); err != nil {
				t.Fatal(err)
			}
			if m.Id != 4711 || !m.Response || m.Rcode != tc.rcode || len(m.Answer) != tc.answers || fmt.Sprint(c.told) != tc.told {
				t.Errorf("told %v, answered %v", c.told, &m)
			}
			for _, rr := range m.Answer {
				if rr.Header().Ttl > maxTTL {
					t.Error("time to live", rr)
				}
			}
		})
	}
	for name, b := range map[string][]byte{"empty": nil, "short": {1, 2, 3}, "an answer": query(t, "a.example", dns.TypeA, func(m *dns.Msg) { m.Response = true })} {
		if got := respond(t.Context(), &rules{}, b, "udp", ok); got != nil {
			t.Errorf("%s was answered", name)
		}
	}
}

// deadUpstream is an address where nothing answers.
func deadUpstream(t *testing.T) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestServerFailsOver(t *testing.T) {
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	up := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		r, _ := zone("a.example. 60 IN A 192.0.2.7")(nil, q, "")
		w.WriteMsg(r)
	})}
	started := make(chan struct{})
	up.NotifyStartedFunc = func() { close(started) }
	go up.ActivateAndServe()
	<-started
	defer up.Shutdown()
	dead := deadUpstream(t)
	client := &rules{}
	s, err := Listen(Config{
		Addr:      netip.MustParseAddrPort("127.0.0.1:0"),
		Upstreams: func() []netip.AddrPort { return []netip.AddrPort{dead, pc.LocalAddr().(*net.UDPAddr).AddrPort()} },
		Client:    func(netip.Addr) (Client, bool) { return client, true },
	})
	if err != nil {
		t.Fatal(err)
	}
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	r, err := dns.Exchange(m, s.Addr().String())
	if err != nil || len(r.Answer) != 1 {
		t.Errorf("%v, %v", r, err)
	}
	// An open but silent TCP connection does not keep Close waiting.
	c, err := net.Dial("tcp4", s.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestStrangersGetNothing(t *testing.T) {
	s, err := Listen(Config{
		Addr:      netip.MustParseAddrPort("127.0.0.1:0"),
		Upstreams: func() []netip.AddrPort { return nil },
		Client:    func(netip.Addr) (Client, bool) { return nil, false },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	cl := dns.Client{Timeout: 200 * time.Millisecond}
	if r, _, err := cl.Exchange(m, s.Addr().String()); err == nil {
		t.Error(r)
	}
}

// FuzzRespond feeds a query of a sandbox and an answer of an upstream, both
// hostile. Whatever comes back must be a message that fits.
func FuzzRespond(f *testing.F) {
	q := query(f, "a.example", dns.TypeA, func(m *dns.Msg) { m.SetEdns0(4096, true) })
	r, _ := zone("a.example. 60 IN A 192.0.2.7", "a.example. 60 IN CNAME a.example.")(nil, func() *dns.Msg {
		m := new(dns.Msg)
		m.SetQuestion("a.example.", dns.TypeA)
		return m
	}(), "")
	up, err := r.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(q, up, byte(1))
	f.Add(q[:20], up[:30], byte(0))
	f.Fuzz(func(t *testing.T, query, upstream []byte, action byte) {
		ask := func(_ context.Context, m *dns.Msg, _ string) (*dns.Msg, error) {
			var r dns.Msg
			if err := r.Unpack(upstream); err != nil {
				return nil, err
			}
			r.Id, r.Response = m.Id, true
			if len(r.Question) == 1 {
				r.Question[0] = m.Question[0] // so that the fuzzer gets past the check
			}
			return &r, nil
		}
		for _, network := range []string{"udp", "tcp"} {
			b := respond(t.Context(), anyName(action%5), query, network, ask)
			if b == nil {
				continue
			}
			if network == "udp" && len(b) > maxUDP || len(b) > dns.MaxMsgSize {
				t.Errorf("%d bytes over %s", len(b), network)
			}
			var m dns.Msg
			if err := m.Unpack(b); err != nil {
				t.Errorf("the answer cannot be read: %v", err)
			}
			if m.Id != uint16(query[0])<<8|uint16(query[1]) || !m.Response {
				t.Error("the answer is to another query")
			}
		}
	})
}

// anyName is a Client that says the same of every name.
type anyName Action

func (a anyName) Judge(string) Action { return Action(a) }

func (a anyName) Resolved(_ context.Context, _ Action, _ string, addrs []netip.Addr, ttl time.Duration) error {
	if len(addrs) > maxAddrs || ttl < 0 || ttl > maxTTL*time.Second {
		return errors.New("out of bounds")
	}
	return nil
}
