package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/renameio/v2"

	"github.com/warrenhq/warren/internal/sandbox"
)

// How long what Own makes is good. A certificate is renewed when a third of
// its time is left, so a client's wrong clock does not matter.
const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	renewAt  = leafLife / 3
	backdate = 24 * time.Hour
)

// The files of an Own: each has a certificate and its key, so that one rename
// replaces both.
const (
	caFile   = "ca.pem"
	leafFile = "server.pem"
)

// Own is a certificate authority of the daemon's own and a certificate that it
// signed. Whoever trusts the authority trusts it for the names of one domain
// and nothing else.
type Own struct {
	dir, domain string
	log         *slog.Logger
	now         func() time.Time

	ca, leaf atomic.Pointer[tls.Certificate]
	mu       sync.Mutex // whose holder renews; nobody waits for it
}

// OpenOwn reads the authority and the certificate for *.domain that are kept
// below dir, or makes them there. dir is only ever the daemon's own.
func OpenOwn(dir, domain string, log *slog.Logger) (*Own, error) {
	return openOwn(dir, domain, log, time.Now)
}

func openOwn(dir, domain string, log *slog.Logger, now func() time.Time) (*Own, error) {
	// One for each domain: an authority is bound to its own. ParseDomain let
	// through nothing that is not a plain name.
	o := &Own{dir: filepath.Join(dir, domain), domain: domain, log: log, now: now}
	if err := os.MkdirAll(o.dir, 0o700); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "the directory of TLS keys: %w", err)
	}
	if err := o.ensure(); err != nil {
		return nil, err
	}
	return o, nil
}

// Certificate implements Source. It renews what is about to expire.
func (o *Own) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if !o.fresh(o.leaf.Load(), renewAt) && o.mu.TryLock() {
		defer o.mu.Unlock()
		if err := o.ensure(); err != nil {
			o.log.Error("renew the TLS certificate; it is tried again", "error", err)
		}
	}
	return o.leaf.Load(), nil
}

// CA implements Source.
func (o *Own) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: o.ca.Load().Certificate[0]})
}

// fresh tells whether c is good for a time yet.
func (o *Own) fresh(c *tls.Certificate, rest time.Duration) bool {
	now := o.now()
	return c != nil && !now.Before(c.Leaf.NotBefore) && now.Add(rest).Before(c.Leaf.NotAfter)
}

// ensure sees to an authority and a certificate that are good for long enough.
func (o *Own) ensure() error {
	ca, err := o.read(caFile)
	if err != nil {
		// Clients trust it: it is not replaced because it cannot be read.
		return sandbox.Errorf(sandbox.CodeInvalid, "the certificate authority in %s cannot be used: %w: restore the file, or remove it to have another, which clients must then be given", filepath.Join(o.dir, caFile), err)
	}
	if ca == nil || !o.fresh(ca, leafLife) {
		if ca, err = o.make(caFile, o.caTemplate(), nil); err != nil {
			return err
		}
		o.log.Info("made a certificate authority: `warren tls ca` gives clients its certificate", "domain", o.domain, "not_after", ca.Leaf.NotAfter)
	}
	o.ca.Store(ca)
	leaf, err := o.read(leafFile)
	if err != nil {
		o.log.Warn("the TLS certificate is made anew", "error", err)
	}
	if leaf == nil || !o.fresh(leaf, renewAt) || leaf.Leaf.CheckSignatureFrom(ca.Leaf) != nil || covers(leaf.Leaf, o.domain, o.now()) != nil {
		if leaf, err = o.make(leafFile, o.leafTemplate(), ca); err != nil {
			return err
		}
		o.log.Info("made a TLS certificate", "domain", o.domain, "not_after", leaf.Leaf.NotAfter)
	}
	o.leaf.Store(leaf)
	return nil
}

// read reads one of the files; nil where there is none.
func (o *Own) read(name string) (*tls.Certificate, error) {
	path := filepath.Join(o.dir, name)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, err
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return nil, err
	}
	if name == caFile && (!cert.Leaf.IsCA || !slices.Equal(cert.Leaf.PermittedDNSDomains, []string{o.domain})) {
		return nil, errors.New("it is not an authority for " + o.domain)
	}
	return &cert, nil
}

// make makes a certificate with a new key and keeps it. A nil ca signs itself.
func (o *Own) make(name string, template *x509.Certificate, ca *tls.Certificate) (*tls.Certificate, error) {
	fail := func(err error) (*tls.Certificate, error) {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "make a TLS certificate: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	// RFC 5280, section 4.1.2.2: positive, and at most 20 bytes.
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return fail(err)
	}
	parent, signer := template, any(key)
	if ca != nil {
		parent, signer = ca.Leaf, ca.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return fail(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fail(err)
	}
	data := slices.Concat(
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}))
	if err := renameio.WriteFile(filepath.Join(o.dir, name), data, 0o600, renameio.IgnoreUmask()); err != nil {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "keep the TLS certificate: %w", err)
	}
	cert, err := tls.X509KeyPair(data, data)
	if err != nil {
		return fail(err)
	}
	return &cert, nil
}

func (o *Own) caTemplate() *x509.Certificate {
	now := o.now()
	return &x509.Certificate{
		Subject:   pkix.Name{Organization: []string{"Warren"}, CommonName: "Warren of " + o.shortDomain()},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage:                    x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		ExtKeyUsage:                 []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         []string{o.domain},
		ExcludedIPRanges: []*net.IPNet{
			{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, {IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		},
	}
}

func (o *Own) leafTemplate() *x509.Certificate {
	now := o.now()
	return &x509.Certificate{
		Subject:   pkix.Name{CommonName: "*." + o.shortDomain()},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(leafLife),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:              []string{o.domain, "*." + o.domain},
	}
}

// shortDomain fits a common name's 64 characters (RFC 5280, appendix A.1);
// names that count are in DNSNames.
func (o *Own) shortDomain() string {
	if len(o.domain) > 40 {
		return o.domain[:40]
	}
	return o.domain
}
