package e2e

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/sandbox"
)

// secureAddr is where the daemon serves TLS.
func (l *lab) secureAddr(t *testing.T) string {
	t.Helper()
	m := regexp.MustCompile(`serves on .* and https://api\.box\.test:([0-9]+)\n`).FindStringSubmatch(l.d.output())
	if m == nil {
		t.Fatalf("the daemon tells of no TLS address:\n%s", l.d.output())
	}
	return "127.0.0.1:" + m[1]
}

// resolved is a transport for which every name is at addr, as a wildcard in the
// DNS makes it.
func resolved(t *testing.T, addr string, ca []byte, h2 bool) *http.Transport {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		t.Fatalf("there is no certificate in %q", ca)
	}
	tr := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		},
		TLSClientConfig: &tls.Config{RootCAs: pool},
		Protocols:       new(http.Protocols),
	}
	if h2 {
		tr.Protocols.SetHTTP2(true)
	} else {
		tr.Protocols.SetHTTP1(true)
	}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

// TestTLS reaches sandboxes and the API by the wildcard names of getHost(), as
// a client does that trusts the daemon's own authority and knows no address.
func TestTLS(t *testing.T) {
	t.Parallel()
	l := newLab(t, withFlags("--tls-listen", "127.0.0.1:0", "--tls-domain", "Box.Test"))
	addr := l.secureAddr(t)
	_, port, err := net.SplitHostPort(addr)
	must(t, err)
	domain := "box.test:" + port
	ca := l.cli(t, "tls", "ca")
	if ca.code != 0 {
		t.Fatalf("warren tls ca: %s", ca.stderr)
	}
	told, err := l.cl.TLS(t.Context())
	must(t, err)
	if told.Domain != domain || told.CA != string(ca.stdout) {
		t.Errorf("the API tells %+v", told)
	}
	key := http.Header{"X-Api-Key": {l.key}}

	l.each(t, func(t *testing.T, runtime string) {
		sb := l.create(t, wire.CreateSandbox{Runtime: runtime})
		sb = l.get(t, sb.ID)
		serve(t, l, sb.ID, "0.0.0.0:8080")
		info := send(t, &http.Client{}, "GET", l.tcp+"/sandboxes/"+sb.ID, key, nil)
		var e2b struct{ Domain, EnvdAccessToken string }
		if err := json.Unmarshal(info.body, &e2b); err != nil || info.status != 200 || e2b.Domain != domain {
			t.Fatalf("E2B's API tells %d %s; the domain is %s", info.status, info.body, domain)
		}
		host := func(port int) string { return fmt.Sprintf("https://%d-%s.%s", port, sb.ID, e2b.Domain) } // getHost()
		for _, h2 := range []bool{false, true} {
			t.Run(fmt.Sprintf("HTTP/2 %v", h2), func(t *testing.T) {
				c := &http.Client{Transport: resolved(t, addr, ca.stdout, h2)}
				a := send(t, c, "POST", host(8080)+"/a?b=c", http.Header{"E2b-Traffic-Access-Token": {sb.TrafficToken}}, strings.NewReader("body"))
				var s said
				if err := json.Unmarshal(a.body, &s); err != nil || s.Body != "body" || s.Path != "/a?b=c" {
					t.Fatalf("the program answers %d %s", a.status, a.body)
				}
				if s.Host != fmt.Sprintf("8080-%s.%s", sb.ID, domain) || s.Headers.Get("X-Forwarded-Proto") != "https" {
					t.Errorf("the program got the host %q and %v", s.Host, s.Headers)
				}
				for _, tc := range []struct {
					what, url string
					header    http.Header
					status    int
					phrase    string
				}{
					{"no credentials", host(8080), nil, 403, "private"},
					{"a closed port", host(8081), key, 502, "port is not open"},
					{"no sandbox", "https://80-sbx00000000000000000." + domain, key, 502, "not found"},
					{"a bad port", fmt.Sprintf("https://70000-%s.%s", sb.ID, domain), key, 400, "port"},
					{"the agent", host(sandbox.AgentPort) + "/health", nil, 204, ""},
					{"the agent, by headers", "https://sandbox." + domain + "/health", http.Header{"E2b-Sandbox-Id": {sb.ID}, "E2b-Sandbox-Port": {"49983"}}, 204, ""},
					{"the API", "https://api." + domain + "/v1/sandboxes/" + sb.ID, key, 200, sb.ID},
					{"E2B's API", "https://api." + domain + "/v2/sandboxes", key, 200, sb.ID},
					{"the API without a key", "https://api." + domain + "/v2/sandboxes", nil, 401, "key"},
				} {
					a := send(t, c, "GET", tc.url, tc.header, nil)
					if a.status != tc.status || !strings.Contains(strings.ToLower(string(a.body)), strings.ToLower(tc.phrase)) {
						t.Errorf("%s: %d %.300s; want %d and %q", tc.what, a.status, a.body, tc.status, tc.phrase)
					}
				}
			})
		}
		t.Run("WebSocket", func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), longest)
			defer cancel()
			ws, _, err := websocket.Dial(ctx, strings.Replace(host(8080), "https", "wss", 1)+"/ws", &websocket.DialOptions{
				HTTPClient: &http.Client{Transport: resolved(t, addr, ca.stdout, false)}, HTTPHeader: key,
			})
			must(t, err)
			defer ws.CloseNow()
			must(t, ws.Write(ctx, websocket.MessageBinary, []byte("ping")))
			if _, got, err := ws.Read(ctx); err != nil || string(got) != "ping" {
				t.Errorf("back comes %q, %v", got, err)
			}
		})
	})

	// By who is no such client.
	if c, err := tls.Dial("tcp", addr, &tls.Config{ServerName: "api.box.test"}); err == nil {
		c.Close()
		t.Error("a client that was not told of the authority trusts it")
	}
	if c, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
		c.Close()
		t.Error("TLS 1.1 is spoken")
	}
	if a := send(t, &http.Client{}, "GET", "http://"+addr+"/", nil, nil); a.status != 400 {
		t.Errorf("without TLS: %d %s", a.status, a.body)
	}

	// The authority is the same after a restart.
	l.d.terminate(t)
	l.start(t)
	if again := l.cli(t, "tls", "ca"); !bytes.Equal(again.stdout, ca.stdout) {
		t.Error("after a restart the authority is another")
	}
	c := &http.Client{Transport: resolved(t, l.secureAddr(t), ca.stdout, true)}
	if a := send(t, c, "GET", "https://api."+domain+"/healthz", nil, nil); a.status != 200 {
		t.Errorf("after a restart: %d %s", a.status, a.body)
	}
}

// TestTLSGiven serves a certificate that was given, and another when it changes.
func TestTLSGiven(t *testing.T) {
	t.Parallel()
	l := openLab(t)
	cert, key := filepath.Join(l.dir, "cert.pem"), filepath.Join(l.dir, "key.pem")
	first := giveCert(t, cert, key)
	l.flags = append(l.flags, "--tls-listen", "127.0.0.1:0", "--tls-domain", "box.test", "--tls-cert", cert, "--tls-key", key)
	l.start(t)
	asks := func(ca []byte) error {
		tr := resolved(t, l.secureAddr(t), ca, false)
		tr.DisableKeepAlives = true
		res, err := (&http.Client{Transport: tr, Timeout: longest}).Get("https://api.box.test/healthz")
		if err == nil {
			res.Body.Close()
		}
		return err
	}
	must(t, asks(first))
	second := giveCert(t, cert, key)
	if !eventually(func() bool { return asks(second) == nil }, 15*time.Second) {
		t.Errorf("the changed certificate is not served: %v\n%s", asks(second), l.d.output())
	}
	if asks(first) == nil {
		t.Error("the one before is served, too")
	}
	res := l.cli(t, "tls", "ca")
	if res.code != 1 || !bytes.Contains(res.stderr, []byte("not of its own authority")) {
		t.Errorf("warren tls ca: %d %s", res.code, res.stderr)
	}
}

// giveCert makes files of a certificate for *.box.test that signed itself.
func giveCert(t *testing.T, certFile, keyFile string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		DNSNames: []string{"*.box.test"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for path, data := range map[string][]byte{certFile: cert, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})} {
		must(t, errors.Join(os.WriteFile(path+".new", data, 0o600), os.Rename(path+".new", path)))
	}
	return cert
}

// TestTLSRefusals starts daemons whose TLS cannot be.
func TestTLSRefusals(t *testing.T) {
	t.Parallel()
	l := openLab(t)
	cert, key := filepath.Join(l.dir, "cert.pem"), filepath.Join(l.dir, "key.pem")
	giveCert(t, cert, key)
	own := []string{"--tls-listen", "127.0.0.1:0", "--tls-domain"}
	for _, tc := range []struct {
		flags  []string
		phrase string
	}{
		{own[:2], "--tls-domain"},
		{append(own, "localhost"), "two parts"},
		{append(own, "10.0.0.1"), "address"},
		{append(own, "box.test:0"), "port"},
		{append(own, "box.test", "--tls-cert", cert), "--tls-key"},
		{[]string{"--tls-domain", "box.test", "--tls-cert", cert, "--tls-key", key}, "--tls-listen"},
		{append(own, "other.test", "--tls-cert", cert, "--tls-key", key), "not valid for *.other.test"},
		{append(own, "box.test", "--tls-cert", cert, "--tls-key", cert), "key"},
		{[]string{"--tls-listen", "127.0.0.1:99999", "--tls-domain", "box.test"}, "--tls-listen"},
	} {
		res := l.cli(t, append([]string{"serve", "--state", l.state, "--socket", l.socket, "--listen", "none"}, tc.flags...)...)
		if res.code != 1 || !strings.Contains(string(res.stderr), tc.phrase) {
			t.Errorf("serve %v: exit %d, %s; want %q", tc.flags, res.code, res.stderr, tc.phrase)
		}
	}
	// Behind somebody else's TLS, the domain is told and nothing is served.
	l.flags = append(l.flags, "--tls-domain", "box.test:8443")
	l.start(t)
	told, err := l.cl.TLS(t.Context())
	if err != nil || told.Domain != "box.test:8443" || told.CA != "" {
		t.Errorf("the API tells %+v, %v", told, err)
	}
}
