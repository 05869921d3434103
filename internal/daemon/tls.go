package daemon

import (
	"crypto/tls"
	"net"
	"path/filepath"

	"github.com/warrenhq/warren/internal/api"
	"github.com/warrenhq/warren/internal/certs"
	"github.com/warrenhq/warren/internal/sandbox"
)

// tlsDir keeps, in the state directory, what certs.Own makes.
const tlsDir = "tls"

// apiName is the API's name below the TLS domain: E2B's SDKs call it so. Any
// other that is no sandbox's reaches it, too, sandbox.DOMAIN among them, by
// which the SDKs route with headers.
const apiName = "api"

// secure is the address that is served by TLS.
type secure struct {
	net.Listener             // nil: there is none
	conf         *tls.Config // of it
	names        *api.TLS    // what the API tells of it; nil: no domain for TLS
}

func (s secure) close() {
	if s.Listener != nil {
		s.Close()
	}
}

// listenTLS opens the TLS address, where there is to be one.
func (d *daemon) listenTLS() (s secure, err error) {
	cfg := d.cfg
	invalid := func(msg string) (secure, error) { return secure{}, sandbox.Errorf(sandbox.CodeInvalid, "%s", msg) }
	switch {
	case (cfg.TLSCert == "") != (cfg.TLSKey == ""):
		return invalid("a TLS certificate needs its key: give --tls-cert and --tls-key, or neither")
	case cfg.TLSCert != "" && cfg.TLSListen == "":
		return invalid("a TLS certificate needs an address to be served on: give --tls-listen")
	case cfg.TLSListen != "" && cfg.TLSDomain == "":
		return invalid("an address for TLS needs the domain of its names: give --tls-domain")
	case cfg.TLSDomain == "":
		return secure{}, nil
	}
	domain, port, err := certs.ParseDomain(cfg.TLSDomain)
	if err != nil {
		return secure{}, err
	}
	s.names = &api.TLS{Domain: domain, Port: port}
	if cfg.TLSListen == "" {
		return s, nil
	}
	var source certs.Source
	if cfg.TLSCert != "" {
		source, err = certs.OpenGiven(cfg.TLSCert, cfg.TLSKey, domain, d.log)
	} else {
		source, err = certs.OpenOwn(filepath.Join(cfg.State, tlsDir), domain, d.log)
	}
	if err != nil {
		return secure{}, err
	}
	s.names.CA = source.CA
	s.conf = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: source.Certificate}
	if s.Listener, err = net.Listen("tcp", cfg.TLSListen); err != nil {
		return secure{}, sandbox.Errorf(sandbox.CodeUnavailable, "listen on %s: %w: give another address by --tls-listen", cfg.TLSListen, err)
	}
	if port == 0 {
		s.names.Port = s.Addr().(*net.TCPAddr).Port
	}
	return s, nil
}
