package proxy

import (
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
)

// The headers that route a request and that let it pass.
const (
	HeaderSandboxID     = "Warren-Sandbox-Id"
	HeaderSandboxPort   = "Warren-Sandbox-Port"
	HeaderE2BSandboxID  = "E2b-Sandbox-Id"
	HeaderE2BPort       = "E2b-Sandbox-Port"
	HeaderTrafficToken  = "E2b-Traffic-Access-Token"
	HeaderAPIKey        = "X-Api-Key"
	maxHostLen          = 253 // RFC 1035, section 2.3.4, less the root label
	defaultSandboxPort  = sandbox.AgentPort
	keyPrefix, keyChars = "e2b_", 40
)

// Target is a port of a sandbox.
type Target struct {
	ID   sandbox.ID
	Port int
}

// ParseHost reads `<port>-<id>.<domain>` with an optional ":port" of the
// listener's own behind it. ok tells whether host has that form at all; where
// it does, an error of CodeInvalid says what is wrong with its port or id.
func ParseHost(host, domain string) (t Target, ok bool, err error) {
	if h, _, e := net.SplitHostPort(host); e == nil {
		host = h
	}
	host = strings.TrimSuffix(host, ".")
	if host == "" || len(host) > maxHostLen || domain == "" {
		return Target{}, false, nil
	}
	label, rest, found := strings.Cut(host, ".")
	if !found || !strings.EqualFold(rest, domain) {
		return Target{}, false, nil
	}
	portText, idText, found := strings.Cut(label, "-")
	if !found || !allDigits(portText) {
		return Target{}, false, nil
	}
	port, err := ParsePort(portText)
	if err != nil {
		return Target{}, true, err
	}
	id, err := sandbox.ParseID(strings.ToLower(idText))
	if err != nil {
		return Target{}, true, err
	}
	return Target{ID: id, Port: port}, true, nil
}

// ParsePort reads a TCP port: 1 to 65535 in plain decimal digits. The error
// has CodeInvalid.
func ParsePort(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || s[0] == '0' || s[0] == '+' {
		shown := s
		if len(shown) > 16 {
			shown = shown[:16] + "…"
		}
		return 0, sandbox.Errorf(sandbox.CodeInvalid, "%q is not a port: give 1 to 65535", strings.ToValidUTF8(shown, "?"))
	}
	return int(n), nil
}

// Match tells whether r is meant for a sandbox, and for which port. Where it
// is but names it wrongly, the error has CodeInvalid.
func Match(r *http.Request, domains ...string) (t Target, ok bool, err error) {
	for _, domain := range domains {
		if t, ok, err := ParseHost(r.Host, domain); ok {
			return t, true, err
		}
	}
	id, port := r.Header.Get(HeaderSandboxID), r.Header.Get(HeaderSandboxPort)
	if id == "" {
		id, port = r.Header.Get(HeaderE2BSandboxID), r.Header.Get(HeaderE2BPort)
	}
	if id == "" {
		return Target{}, false, nil
	}
	if t.ID, err = sandbox.ParseID(strings.ToLower(id)); err != nil {
		return Target{}, true, err
	}
	if port == "" {
		t.Port = defaultSandboxPort
		return t, true, nil
	}
	t.Port, err = ParsePort(port)
	return t, true, err
}

// BearerOrKey gives the API key that r carries, "" where there is none.
func BearerOrKey(h http.Header) string {
	if k := h.Get(HeaderAPIKey); k != "" {
		return k
	}
	if k, ok := bearer(h); ok {
		return k
	}
	return ""
}

func bearer(h http.Header) (string, bool) {
	scheme, k, ok := strings.Cut(h.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return "", false
	}
	return strings.TrimSpace(k), true
}

// IsKey tells whether s has the form of an API key of Warren's: "e2b_" and 40
// hex digits.
func IsKey(s string) bool {
	hex, ok := strings.CutPrefix(s, keyPrefix)
	if !ok || len(hex) != keyChars {
		return false
	}
	for _, c := range []byte(hex) {
		if !('0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F') {
			return false
		}
	}
	return true
}

func allDigits(s string) bool {
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return false
		}
	}
	return s != ""
}

// stripSecrets removes from h what is Warren's and not the workload's: the
// routing headers, the traffic token and anything that looks like one of
// Warren's keys.
func stripSecrets(h http.Header) {
	for _, name := range []string{HeaderSandboxID, HeaderSandboxPort, HeaderE2BSandboxID, HeaderE2BPort, HeaderTrafficToken, "X-Warren-Tenant"} {
		h.Del(name)
	}
	for _, v := range h.Values(HeaderAPIKey) {
		if IsKey(v) {
			h.Del(HeaderAPIKey)
			break
		}
	}
	if k, ok := bearer(h); ok && IsKey(k) {
		h.Del("Authorization")
	}
}
