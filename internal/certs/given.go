package certs

import (
	"crypto/tls"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

// lookEvery is how often a given certificate's files are looked at, at most.
const lookEvery = time.Second

// Given is a certificate in files that somebody else keeps. When they change it
// is read anew, at the next connection; while they hold none that is good, the
// one before is served.
type Given struct {
	certFile, keyFile, domain string
	log                       *slog.Logger
	now                       func() time.Time

	cert atomic.Pointer[tls.Certificate]

	mu     sync.Mutex // whose holder looks at the files; nobody waits for it
	stamps [2]stamp
	looked time.Time
}

// stamp tells one content of a file from another.
type stamp struct {
	mtime time.Time
	size  int64
	dev   uint64
	inode uint64
}

// OpenGiven reads a certificate chain and its key, both PEM. CodeInvalid: they
// are not that, do not fit each other, or are not valid now for *.domain.
func OpenGiven(certFile, keyFile, domain string, log *slog.Logger) (*Given, error) {
	return openGiven(certFile, keyFile, domain, log, time.Now)
}

func openGiven(certFile, keyFile, domain string, log *slog.Logger, now func() time.Time) (*Given, error) {
	g := &Given{certFile: certFile, keyFile: keyFile, domain: domain, log: log, now: now}
	var err error
	if g.stamps, err = g.look(); err != nil {
		return nil, err
	}
	cert, err := g.load()
	if err != nil {
		return nil, err
	}
	g.cert.Store(cert)
	g.looked = now()
	return g, nil
}

// Certificate implements Source.
func (g *Given) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if g.mu.TryLock() {
		defer g.mu.Unlock()
		g.refresh()
	}
	return g.cert.Load(), nil
}

// refresh reads the files anew if they changed. mu is held.
func (g *Given) refresh() {
	now := g.now()
	if d := now.Sub(g.looked); d >= 0 && d < lookEvery {
		return
	}
	g.looked = now
	stamps, err := g.look()
	if stamps == g.stamps {
		return
	}
	// Also where it is not good: it is looked at again when it changes again,
	// such as by the other half of the pair.
	g.stamps = stamps
	var cert *tls.Certificate
	if err == nil {
		cert, err = g.load()
	}
	if err != nil {
		g.log.Error("the changed certificate is not served; the one before is", "cert", g.certFile, "error", err)
		return
	}
	g.cert.Store(cert)
	g.log.Info("serving a changed certificate", "cert", g.certFile, "not_after", cert.Leaf.NotAfter)
}

// CA implements Source.
func (g *Given) CA() []byte { return nil }

func (g *Given) look() (s [2]stamp, err error) {
	for i, path := range []string{g.certFile, g.keyFile} {
		fi, err := os.Stat(path)
		if err != nil {
			return s, sandbox.Errorf(sandbox.CodeInvalid, "the TLS certificate: %w", err)
		}
		s[i] = stamp{mtime: fi.ModTime(), size: fi.Size()}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			s[i].dev, s[i].inode = uint64(st.Dev), st.Ino
		}
	}
	return s, nil
}

func (g *Given) load() (*tls.Certificate, error) {
	cert, err := tls.LoadX509KeyPair(g.certFile, g.keyFile)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the TLS certificate %s with the key %s: %w", g.certFile, g.keyFile, err)
	}
	if err := covers(cert.Leaf, g.domain, g.now()); err != nil {
		return nil, err
	}
	return &cert, nil
}
