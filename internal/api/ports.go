package api

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/warrenhq/warren/internal/proxy"
	"github.com/warrenhq/warren/internal/sandbox"
)

// TunnelProtocol is the Upgrade token of GET /v1/sandboxes/{id}/tunnel.
const TunnelProtocol = "warren-tcp"

func (a *API) registerPorts() {
	op := huma.Operation{
		OperationID: "port", Method: anyMethod, Path: "/v1/sandboxes/{id}/ports/{port}/{path}", Tags: []string{"inside"},
		Summary: "Call a program that listens inside", Description: "HTTP and WebSocket; any method. The path and the query pass as they are, the caller's API key does not.",
		Parameters: []*huma.Param{idParam(), pathParam("port", "TCP port"), pathParam("path", "Path of the program's")},
		Responses:  bytesResponse("200", "*/*", "What the program answers"),
	}
	a.stream(op, a.port)
	a.stream(huma.Operation{
		OperationID: "tunnel", Method: http.MethodGet, Path: "/v1/sandboxes/{id}/tunnel", Tags: []string{"inside"},
		Summary:     "Open a TCP connection to a port inside",
		Description: "HTTP/1.1 with `Connection: Upgrade` and `Upgrade: " + TunnelProtocol + "`; after the 101 the connection carries the port's bytes. Reaches listeners on the sandbox's loopback, too.",
		Parameters:  []*huma.Param{idParam(), queryParam("port", "integer", "TCP port, 1 to 65535", true)},
		Responses:   map[string]*huma.Response{"101": {Description: "Connected"}},
	}, a.tunnel)
}

// portRoute is what the access log calls the route of portPath.
const portRoute = "/v1/sandboxes/{id}/ports/{port}/{path...}"

// portPath takes the path of a call to a port apart. It goes before the mux,
// which would redirect paths that it does not find clean (//, ..): they are
// the program's.
func portPath(r *http.Request) (id, port, rest string, ok bool) {
	p, ok := strings.CutPrefix(r.URL.EscapedPath(), "/v1/sandboxes/")
	if !ok {
		return "", "", "", false
	}
	id, p, ok = strings.Cut(p, "/")
	if !ok {
		return "", "", "", false
	}
	if p, ok = strings.CutPrefix(p, "ports/"); !ok {
		return "", "", "", false
	}
	port, rest, _ = strings.Cut(p, "/")
	return id, port, "/" + rest, true
}

func (a *API) port(w http.ResponseWriter, r *http.Request) error {
	idText, portText, rest, ok := portPath(r)
	if !ok {
		return sandbox.Errorf(sandbox.CodeNotFound, "no such route")
	}
	id, err := sandbox.ParseID(idText)
	if err != nil {
		return err
	}
	port, err := proxy.ParsePort(portText)
	if err != nil {
		return err
	}
	if port == sandbox.AgentPort {
		return sandbox.Errorf(sandbox.CodeInvalid, "port %d is the agent's: use /v1/sandboxes/%s/agent/", port, id)
	}
	// The proxy does so, too, but its errors are not of this API's form.
	release, err := a.back.Use(r.Context(), tenantOf(r.Context()), id)
	if err != nil {
		return err
	}
	defer release()
	sb, err := a.back.Get(r.Context(), tenantOf(r.Context()), id)
	if err != nil {
		return err
	}
	if sb.State != sandbox.Running {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is %s", id, sb.State)
	}
	u := *r.URL
	if u.Path, err = url.PathUnescape(rest); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the path is not percent-encoded well")
	}
	u.RawPath = rest
	r2 := r.Clone(r.Context())
	r2.URL = &u
	r2.Header.Set("X-Forwarded-Prefix", "/v1/sandboxes/"+idText+"/ports/"+portText)
	a.proxy.Serve(w, r2, sb, port)
	return nil
}

func (a *API) tunnel(w http.ResponseWriter, r *http.Request) error {
	id, err := sandbox.ParseID(r.PathValue("id"))
	if err != nil {
		return err
	}
	port, err := proxy.ParsePort(r.URL.Query().Get("port"))
	if err != nil {
		return err
	}
	if port == sandbox.AgentPort {
		return sandbox.Errorf(sandbox.CodeInvalid, "port %d is the agent's: use /v1/sandboxes/%s/agent/", port, id)
	}
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), TunnelProtocol) {
		w.Header().Set("Upgrade", TunnelProtocol)
		return sandbox.Errorf(sandbox.CodeInvalid, "a tunnel needs HTTP/1.1 with Connection: Upgrade and Upgrade: %s", TunnelProtocol)
	}
	release, err := a.back.Use(r.Context(), tenantOf(r.Context()), id)
	if err != nil {
		return err
	}
	defer release()
	inside, err := a.back.Dial(r.Context(), tenantOf(r.Context()), id, port)
	if err != nil {
		return err
	}
	defer inside.Close()
	client, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "take over the connection: %w", err)
	}
	infoOf(r.Context()).switched = true
	defer client.Close()
	client.SetDeadline(time.Time{})
	if _, err := io.WriteString(client, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+TunnelProtocol+"\r\n\r\n"); err != nil {
		return nil
	}
	// What came behind the request is already in the reader's buffer.
	early := io.LimitReader(rw.Reader, int64(rw.Reader.Buffered()))
	splice(r.Context(), client, io.MultiReader(early, client), inside)
	return nil
}

// splice carries bytes both ways until both sides have ended, passing on each
// side's end of writing by itself.
func splice(ctx context.Context, client net.Conn, fromClient io.Reader, inside net.Conn) {
	defer context.AfterFunc(ctx, func() { client.Close(); inside.Close() })()
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := copyStream(inside, fromClient, nil)
		closeWrite(inside, err)
	})
	_, err := copyStream(client, inside, nil)
	closeWrite(client, err)
	wg.Wait()
}

// closeWrite ends a connection's writing side after a clean end of what was
// copied to it, and all of it after an error or where it has no such side.
func closeWrite(c net.Conn, err error) {
	if cw, ok := c.(interface{ CloseWrite() error }); ok && err == nil {
		cw.CloseWrite()
		return
	}
	c.Close()
}
