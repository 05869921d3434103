package api

import (
	"context"
	"net"
	"net/http"
	"os"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/e2b"
	"github.com/warrenhq/warren/internal/proxy"
	"github.com/warrenhq/warren/internal/sandbox"
)

// HeaderTenant names the tenant on the unix socket.
const HeaderTenant = "X-Warren-Tenant"

var tenantPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

type peerKey struct{}

// peer is who is at the other end of a unix socket.
type peer struct {
	uid uint32
	ok  bool
}

// connContext reads the peer's credentials once per connection.
func connContext(ctx context.Context, c net.Conn) context.Context {
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return ctx
	}
	var p peer
	if raw, err := uc.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) {
			if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				p = peer{uid: cred.Uid, ok: true}
			}
		})
	}
	return context.WithValue(ctx, peerKey{}, p)
}

// peerOnly lets root and the daemon's own user in.
func (a *API) peerOnly(next http.Handler) http.Handler {
	self := uint32(os.Geteuid())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, _ := r.Context().Value(peerKey{}).(peer)
		if !p.ok || (p.uid != 0 && p.uid != self) {
			a.fail(w, r, sandbox.Errorf(sandbox.CodeForbidden, "the daemon's socket is for root: use sudo, or the TCP address with an API key"))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// asTenant takes the tenant from its header.
func (a *API) asTenant(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tenant := r.Header.Get(HeaderTenant)
		if tenant == "" {
			tenant = DefaultTenant
		}
		if !tenantPattern.MatchString(tenant) {
			a.fail(w, r, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a tenant's name: give up to 63 of a-z, 0-9, _ and -", HeaderTenant))
			return
		}
		infoOf(r.Context()).become(tenant, true)
		next.ServeHTTP(w, r)
	})
}

// withKey takes the tenant from the API key, which all but health needs.
func (a *API) withKey(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/healthz" || r.URL.Path == "/readyz" || e2b.OwnToken(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		key := proxy.BearerOrKey(r.Header)
		if key == "" {
			w.Header().Set("WWW-Authenticate", `Bearer realm="warren"`)
			a.failAs(w, r, sandbox.Errorf(sandbox.CodeUnauthenticated, "this address needs an API key: send it as X-API-Key or as a bearer token (`warren key create` makes one)"))
			return
		}
		var tenant string
		err := error(sandbox.Errorf(sandbox.CodeUnauthenticated, "the API key is not valid: keys are e2b_ and 40 hex digits, `warren key ls` lists them"))
		if proxy.IsKey(key) {
			tenant, err = a.back.Authenticate(r.Context(), key)
		}
		if err != nil {
			w.Header().Set("WWW-Authenticate", `Bearer realm="warren", error="invalid_token"`)
			a.failAs(w, r, err)
			return
		}
		infoOf(r.Context()).become(tenant, false)
		next.ServeHTTP(w, r)
	})
}
