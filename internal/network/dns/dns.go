// Package dns is the resolver that sandboxes ask: it forwards to the host's
// resolvers, and tells a policy what each name opened before the answer goes
// back.
//
// Whoever asks is hostile, and so is whoever answers. Queries are told apart
// by their source address, which the host's firewall has checked; their size,
// rate and number at once are bounded, for each sandbox and in all.
package dns

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Action is what a policy says of a name.
type Action int

// The actions.
const (
	Forward Action = iota // answer, and open nothing
	Open                  // answer, after Client.Resolved has opened the addresses
	Close                 // answer, after Client.Resolved has closed the addresses
	Block                 // say that the name does not exist, after Client.Resolved has closed the addresses
	Refuse                // do not even ask: the sandbox may resolve only names that it is allowed
)

// Client is the policy of one sandbox.
type Client interface {
	// Judge decides on a name: lower case, without the final dot.
	Judge(name string) Action
	// Resolved is told the addresses of a name that Judge wanted to Open,
	// Close or Block, before the answer is sent. An error keeps the answer back.
	Resolved(ctx context.Context, a Action, name string, addrs []netip.Addr, ttl time.Duration) error
}

// Exchange sends a query upstream. network is "udp" or "tcp".
type Exchange func(ctx context.Context, m *dns.Msg, network string) (*dns.Msg, error)

const (
	maxUDP    = 1232             // bytes; DNS Flag Day 2020: never fragmented
	maxTTL    = 3600             // seconds; what a client may keep an answer for
	maxAddrs  = 64               // addresses of one answer that are looked at
	queryTime = 10 * time.Second // for one query, all upstreams together
)

// respond answers one query. It returns nil for what deserves no answer.
func respond(ctx context.Context, c Client, query []byte, network string, ask Exchange) []byte {
	var q dns.Msg
	// A header that says "answer" is not answered, lest two resolvers talk to
	// each other for ever.
	if len(query) < 12 || query[2]&0x80 != 0 {
		return nil
	}
	if err := q.Unpack(query); err != nil {
		var h dns.Msg
		h.Id = uint16(query[0])<<8 | uint16(query[1])
		return pack(fail(&h, dns.RcodeFormatError), maxUDP)
	}
	size := clientSize(&q, network)
	m := answer(ctx, c, &q, network, ask)
	if m.IsEdns0() == nil && q.IsEdns0() != nil {
		m.SetEdns0(maxUDP, false)
	}
	return pack(m, size)
}

func clientSize(q *dns.Msg, network string) int {
	if network == "tcp" {
		return dns.MaxMsgSize
	}
	size := dns.MinMsgSize
	if o := q.IsEdns0(); o != nil {
		size = max(size, min(int(o.UDPSize()), maxUDP))
	}
	return size
}

func pack(m *dns.Msg, size int) []byte {
	m.Compress = true
	m.Truncate(size)
	b, err := m.Pack()
	if err != nil || len(b) > size {
		// An upstream's answer that cannot be written again.
		if b, err = fail(m, dns.RcodeServerFailure).Pack(); err != nil {
			return nil
		}
	}
	return b
}

// fail is an answer of only a code.
func fail(q *dns.Msg, rcode int) *dns.Msg {
	m := new(dns.Msg)
	m.Id, m.Response, m.Opcode, m.RecursionDesired, m.RecursionAvailable = q.Id, true, q.Opcode, q.RecursionDesired, true
	m.Rcode = rcode
	if len(q.Question) == 1 {
		m.Question = q.Question
	}
	return m
}

// explained adds why, as RFC 8914's extended error.
func explained(m *dns.Msg, code uint16, why string) *dns.Msg {
	o := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
	o.SetUDPSize(maxUDP)
	o.Option = append(o.Option, &dns.EDNS0_EDE{InfoCode: code, ExtraText: why})
	m.Extra = append(m.Extra, o)
	return m
}

func answer(ctx context.Context, c Client, q *dns.Msg, network string, ask Exchange) *dns.Msg {
	if q.Opcode != dns.OpcodeQuery {
		return fail(q, dns.RcodeNotImplemented)
	}
	if len(q.Question) != 1 {
		return fail(q, dns.RcodeFormatError)
	}
	question := q.Question[0]
	name := Normalize(question.Name)
	switch {
	case question.Qclass != dns.ClassINET:
		return fail(q, dns.RcodeRefused)
	case question.Qtype == dns.TypeAXFR || question.Qtype == dns.TypeIXFR || question.Qtype == dns.TypeANY:
		return fail(q, dns.RcodeNotImplemented) // RFC 8482 for ANY
	}
	action := c.Judge(name)
	if action == Refuse {
		return refused(q, name)
	}
	if action != Block && noAddressV6(question.Qtype) {
		return fail(q, dns.RcodeSuccess)
	}
	up := new(dns.Msg)
	up.SetQuestion(question.Name, question.Qtype)
	if action == Block {
		// Whatever was asked, what counts is where the name leads.
		up.Question[0].Qtype = dns.TypeA
	}
	up.SetEdns0(maxUDP, false)
	r, err := ask(ctx, up, network)
	if err != nil || !sameQuestion(up, r) {
		if action == Block {
			return blocked(q, name)
		}
		return explained(fail(q, dns.RcodeServerFailure), dns.ExtendedErrorCodeNetworkError, "the host's resolvers did not answer")
	}
	// An alias may lead to a name that is blocked.
	chain, addrs, ttl := follow(r, name)
	subject := name
	for _, alias := range chain[1:] {
		if a := c.Judge(alias); action == Forward && (a == Block || a == Close) {
			action, subject = a, alias
		}
	}
	if action != Forward {
		if err := c.Resolved(ctx, action, subject, addrs, ttl); err != nil {
			return explained(fail(q, dns.RcodeServerFailure), dns.ExtendedErrorCodeOther, "the sandbox's rules could not be changed")
		}
	}
	if action == Block {
		return blocked(q, name)
	}
	m := fail(q, r.Rcode)
	m.Truncated = r.Truncated
	m.Answer, m.Ns = clampTTL(r.Answer), clampTTL(r.Ns)
	return m
}

func refused(q *dns.Msg, name string) *dns.Msg {
	return explained(fail(q, dns.RcodeRefused), dns.ExtendedErrorCodeProhibited, "the network policy allows no such name")
}

func blocked(q *dns.Msg, name string) *dns.Msg {
	return explained(fail(q, dns.RcodeNameError), dns.ExtendedErrorCodeFiltered, "the network policy denies this name")
}

// noAddressV6 tells the types that lead a client to an IPv6 address, or to an
// address beside the A records that a policy sees. Sandboxes have no IPv6.
func noAddressV6(t uint16) bool {
	return t == dns.TypeAAAA || t == dns.TypeHTTPS || t == dns.TypeSVCB
}

func sameQuestion(up, r *dns.Msg) bool {
	return r != nil && r.Response && len(r.Question) == 1 && r.Id == up.Id &&
		strings.EqualFold(r.Question[0].Name, up.Question[0].Name) &&
		r.Question[0].Qtype == up.Question[0].Qtype && r.Question[0].Qclass == up.Question[0].Qclass
}

// Normalize gives a name as policies have it.
func Normalize(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// follow walks an answer's aliases from name: the names on the way, name
// first, the addresses at their end, and the least time to live. Records that
// are not on the way count for nothing.
func follow(r *dns.Msg, name string) (chain []string, addrs []netip.Addr, ttl time.Duration) {
	chain = []string{name}
	least := uint32(maxTTL)
	for at := name; len(chain) <= 16; {
		next := ""
		for _, rr := range r.Answer {
			if Normalize(rr.Header().Name) != at || rr.Header().Class != dns.ClassINET {
				continue
			}
			switch v := rr.(type) {
			case *dns.CNAME:
				next = Normalize(v.Target)
			case *dns.A:
				if a, ok := netip.AddrFromSlice(v.A.To4()); ok && len(addrs) < maxAddrs {
					addrs = append(addrs, a)
				}
			default:
				continue
			}
			least = min(least, rr.Header().Ttl)
		}
		if next == "" || len(addrs) > 0 {
			break
		}
		chain = append(chain, next)
		at = next
	}
	return chain, addrs, time.Duration(least) * time.Second
}

func clampTTL(rrs []dns.RR) []dns.RR {
	out := rrs[:0]
	for _, rr := range rrs {
		if rr == nil || rr.Header().Rrtype == dns.TypeOPT {
			continue
		}
		rr.Header().Ttl = min(rr.Header().Ttl, maxTTL)
		out = append(out, rr)
	}
	return out
}
