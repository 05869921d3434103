package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
)

var quiet = slog.New(slog.DiscardHandler)

// clock is a time that a test sets.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time      { c.mu.Lock(); defer c.mu.Unlock(); return c.t }
func (c *clock) add(d time.Duration) { c.mu.Lock(); c.t = c.t.Add(d); c.mu.Unlock() }

func TestParseDomain(t *testing.T) {
	for _, tc := range []struct {
		in, domain string
		port       int
		bad        bool
	}{
		{in: "box.test", domain: "box.test"},
		{in: "Box.Test.", domain: "box.test"},
		{in: "a-b.c1.example:8443", domain: "a-b.c1.example", port: 8443},
		{in: "warren.localhost:1", domain: "warren.localhost", port: 1},
		{in: "", bad: true}, {in: ".", bad: true}, {in: "localhost", bad: true}, {in: "box..test", bad: true},
		{in: "*.box.test", bad: true}, {in: "-a.test", bad: true}, {in: "a-.test", bad: true}, {in: "a_b.test", bad: true},
		{in: "box.test:0", bad: true}, {in: "box.test:", bad: true}, {in: "box.test:65536", bad: true}, {in: "box.test:08", bad: true},
		{in: "box.test:+8", bad: true}, {in: "box.test:1:2", bad: true}, {in: "127.0.0.1", bad: true}, {in: "[::1]:80", bad: true},
		{in: "../etc", bad: true}, {in: "box.test/x", bad: true}, {in: "b\u00fcx.test", bad: true}, {in: "box.test\n", bad: true},
		{in: strings.Repeat("a", 64) + ".test", bad: true}, {in: strings.Repeat("a.", 120) + "test", bad: true}, {in: "https://box.test", bad: true},
	} {
		domain, port, err := ParseDomain(tc.in)
		if (err != nil) != tc.bad || domain != tc.domain || port != tc.port {
			t.Errorf("%q: %q, %d, %v", tc.in, domain, port, err)
		}
		if err != nil && sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%q: %v", tc.in, err)
		}
	}
}

func FuzzParseDomain(f *testing.F) {
	f.Add("box.test:8443")
	f.Add("..\x00:")
	f.Fuzz(func(t *testing.T, s string) {
		domain, port, err := ParseDomain(s)
		if err != nil {
			return
		}
		if !filepath.IsLocal(domain) || strings.ContainsAny(domain, "/:*\x00 ") || port < 0 || port > 65535 || len(domain) > maxDomain {
			t.Fatalf("%q became %q, %d", s, domain, port)
		}
		if again, _, err := ParseDomain(domain); err != nil || again != domain {
			t.Fatalf("%q became %q, which becomes %q, %v", s, domain, again, err)
		}
	})
}

// trusts tells whether a client that trusts ca takes cert for a name at a time.
func trusts(t *testing.T, ca []byte, cert *tls.Certificate, name string, at time.Time) error {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		t.Fatalf("no certificate in %q", ca)
	}
	_, err := cert.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: pool, CurrentTime: at})
	return err
}

func TestOwn(t *testing.T) {
	c := &clock{t: time.Now()}
	dir := filepath.Join(t.TempDir(), "tls")
	open := func() *Own {
		t.Helper()
		o, err := openOwn(dir, "box.test", quiet, c.now)
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	cert := func(o *Own) *tls.Certificate {
		t.Helper()
		got, err := o.Certificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	o := open()
	ca, first := o.CA(), cert(o)
	for name, ok := range map[string]bool{
		"box.test": true, "8080-sbxabc.box.test": true, "api.box.test": true, "sandbox.box.test": true,
		"a.b.box.test": false, "box.test.example": false, "example.test": false, "127.0.0.1": false,
	} {
		if err := trusts(t, ca, first, name, c.now()); (err == nil) != ok {
			t.Errorf("for %s: %v", name, err)
		}
	}
	for _, name := range []string{caFile, leafFile} {
		path := filepath.Join(dir, "box.test", name)
		fi, err := os.Stat(path)
		if err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
		os.Chmod(path, 0o644)
	}
	again := open()
	if !bytes.Equal(again.CA(), ca) || !bytes.Equal(cert(again).Certificate[0], first.Certificate[0]) {
		t.Error("opened again it is another")
	}
	if fi, err := os.Stat(filepath.Join(dir, "box.test", caFile)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("a key that others could read: %v, %v", fi, err)
	}

	// The authority can sign for nothing else.
	leaf := again.leafTemplate()
	leaf.DNSNames = []string{"bank.example"}
	forged, err := again.make("forged.pem", leaf, again.ca.Load())
	if err != nil {
		t.Fatal(err)
	}
	if trusts(t, ca, forged, "bank.example", c.now()) == nil {
		t.Error("its authority is trusted for bank.example")
	}

	// Renewed before it expires, under the same authority, without a restart.
	c.add(leafLife - renewAt - time.Hour)
	if !bytes.Equal(cert(o).Certificate[0], first.Certificate[0]) {
		t.Error("renewed too early")
	}
	c.add(2 * time.Hour)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() { o.Certificate(nil) })
	}
	wg.Wait()
	second := cert(o)
	if bytes.Equal(second.Certificate[0], first.Certificate[0]) || !bytes.Equal(o.CA(), ca) {
		t.Error("not renewed, or by another authority")
	}
	if err := trusts(t, ca, second, "x.box.test", c.now().Add(leafLife-time.Hour)); err != nil {
		t.Error(err)
	}

	// And so is the authority, while what it signed is good.
	c.add(caLife - leafLife)
	third := cert(o)
	if bytes.Equal(o.CA(), ca) {
		t.Error("the authority is not renewed")
	}
	if err := trusts(t, o.CA(), third, "x.box.test", c.now()); err != nil {
		t.Error(err)
	}

	// Another domain has another authority; the first one's stays.
	other, err := openOwn(dir, "other.test", quiet, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(other.CA(), o.CA()) || trusts(t, other.CA(), cert(other), "x.other.test", c.now()) != nil {
		t.Error("the other domain's certificate")
	}

	// A broken certificate is replaced, a broken authority is not.
	if err := os.WriteFile(filepath.Join(dir, "box.test", leafFile), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if fixed := open(); trusts(t, o.CA(), cert(fixed), "x.box.test", c.now()) != nil {
		t.Error("a broken certificate is not replaced by a good one")
	}
	if err := os.WriteFile(filepath.Join(dir, "box.test", caFile), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openOwn(dir, "box.test", quiet, c.now); sandbox.CodeOf(err) != sandbox.CodeInvalid || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("with a broken authority: %v", err)
	}
	if cert(o) == nil {
		t.Error("what is served is lost with it")
	}
}

// The files of a given certificate, made by an authority of the test's.
func issue(t *testing.T, c *clock, domain string) (certPEM, keyPEM []byte) {
	t.Helper()
	o, err := openOwn(t.TempDir(), domain, quiet, c.now)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(o.dir, leafFile))
	if err != nil {
		t.Fatal(err)
	}
	i := bytes.Index(data, []byte("-----BEGIN PRIVATE"))
	return data[:i], data[i:]
}

func TestGiven(t *testing.T) {
	c := &clock{t: time.Now()}
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	write := func(cert, key []byte) {
		t.Helper()
		for path, data := range map[string][]byte{certFile: cert, keyFile: key} {
			if data == nil {
				continue
			}
			// As those who renew certificates do: another file in its place.
			if err := errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	cert1, key1 := issue(t, c, "box.test")
	cert2, key2 := issue(t, c, "box.test")
	certOther, keyOther := issue(t, c, "other.test")
	if _, err := openGiven(certFile, keyFile, "box.test", quiet, c.now); sandbox.CodeOf(err) != sandbox.CodeInvalid {
		t.Errorf("without files: %v", err)
	}
	for what, pair := range map[string][2][]byte{
		"another's key": {cert1, key2}, "no PEM": {[]byte("x"), key1}, "another domain": {certOther, keyOther},
	} {
		write(pair[0], pair[1])
		if _, err := openGiven(certFile, keyFile, "box.test", quiet, c.now); sandbox.CodeOf(err) != sandbox.CodeInvalid {
			t.Errorf("%s: %v", what, err)
		}
	}
	write(cert1, key1)
	expired := &clock{t: c.now().Add(leafLife + time.Hour)}
	if _, err := openGiven(certFile, keyFile, "box.test", quiet, expired.now); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("expired: %v", err)
	}
	var log bytes.Buffer
	g, err := openGiven(certFile, keyFile, "box.test", slog.New(slog.NewTextHandler(io.Writer(&log), nil)), c.now)
	if err != nil {
		t.Fatal(err)
	}
	is := func(what string, want []byte) {
		t.Helper()
		c.add(2 * lookEvery)
		got, err := g.Certificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		wanted, err := tls.X509KeyPair(want, map[bool][]byte{true: key1, false: key2}[bytes.Equal(want, cert1)])
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Certificate[0], wanted.Certificate[0]) {
			t.Errorf("%s: another certificate is served", what)
		}
	}
	is("at first", cert1)
	write(cert2, nil)
	is("with half of the pair", cert1)
	write(nil, key2)
	is("with all of it", cert2)
	write(certOther, keyOther)
	is("for another domain", cert2)
	is("looked at again", cert2)
	if err := os.Remove(certFile); err != nil {
		t.Fatal(err)
	}
	is("without the file", cert2)
	write(cert1, key1)
	is("with the first again", cert1)
	if n := strings.Count(log.String(), "is not served"); n != 3 {
		t.Errorf("it was told %d times, want 3:\n%s", n, &log)
	}
	if g.CA() != nil {
		t.Error("it has an authority")
	}
}
