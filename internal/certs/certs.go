// Package certs keeps the certificate of the daemon's TLS address: one that it
// makes by a certificate authority of its own, or one that it was given.
//
// Either is valid for every name directly below a domain (RFC 6125, section
// 6.4.3), as sandboxes' host names are.
package certs

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// Source gives the certificate of the moment.
type Source interface {
	// Certificate is for tls.Config.GetCertificate. It is safe for concurrent
	// use.
	Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// CA gives the certificate, as PEM, that clients have to trust; nil where
	// the certificate was given.
	CA() []byte
}

// maxDomain leaves room for `65535-<id>.` in a host name's 253 bytes (RFC 1035,
// section 2.3.4).
const maxDomain = 200

// ParseDomain reads DOMAIN or DOMAIN:PORT, where port is 0 if there is none.
// The domain comes in lower case. Errors have CodeInvalid.
func ParseDomain(s string) (domain string, port int, err error) {
	invalid := func(why string) (string, int, error) {
		shown := s
		if len(shown) > 100 {
			shown = shown[:100] + "…"
		}
		return "", 0, sandbox.Errorf(sandbox.CodeInvalid, "%q is not a domain for TLS: %s", strings.ToValidUTF8(shown, "?"), why)
	}
	domain = s
	if strings.Contains(s, ":") {
		var text string
		if domain, text, err = net.SplitHostPort(s); err != nil {
			return invalid("give DOMAIN or DOMAIN:PORT")
		}
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 || text[0] == '0' || text[0] == '+' {
			return invalid("its port is not one of 1 to 65535")
		}
		port = int(n)
	}
	domain = strings.ToLower(strings.TrimSuffix(domain, "."))
	if domain == "" || len(domain) > maxDomain {
		return invalid("it must have 1 to " + strconv.Itoa(maxDomain) + " characters")
	}
	labels := strings.Split(domain, ".")
	for _, l := range labels {
		if !isLabel(l) {
			return invalid("its parts must be 1 to 63 of a-z, 0-9 and -, without - at an end")
		}
	}
	if len(labels) < 2 {
		return invalid("clients refuse a certificate for *." + domain + ": give one of two parts at least, such as warren." + domain)
	}
	if net.ParseIP(domain) != nil || !strings.ContainsAny(labels[len(labels)-1], "abcdefghijklmnopqrstuvwxyz") {
		return invalid("an address has no names below it")
	}
	return domain, port, nil
}

// isLabel tells whether l is a label of a host name (RFC 1123, section 2.1).
func isLabel(l string) bool {
	if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
		return false
	}
	for _, c := range []byte(l) {
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-') {
			return false
		}
	}
	return true
}

// covers tells why a certificate cannot be served for the names below domain
// at a time.
func covers(leaf *x509.Certificate, domain string, now time.Time) error {
	switch {
	case leaf.VerifyHostname("x."+domain) != nil:
		return sandbox.Errorf(sandbox.CodeInvalid, "the certificate is not valid for *.%s: its names are %s", domain, strings.Join(leaf.DNSNames, ", "))
	case now.After(leaf.NotAfter):
		return sandbox.Errorf(sandbox.CodeInvalid, "the certificate expired at %s", leaf.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(leaf.NotBefore):
		return sandbox.Errorf(sandbox.CodeInvalid, "the certificate is not valid before %s: is this host's clock right?", leaf.NotBefore.UTC().Format(time.RFC3339))
	}
	return nil
}
