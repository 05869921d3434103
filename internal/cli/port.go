package cli

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/client"
)

func (a *app) portCmd() *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "port ID [LOCAL:]PORT...",
		Short: "Forward local ports to ports of a sandbox",
		Long: "Listens on local ports and carries each connection to a port inside, on the\n" +
			"sandbox's loopback too, until it is interrupted. LOCAL is PORT unless it is given;\n" +
			"0 takes a free one.",
		Example:           "  warren port $id 8000\n  warren port $id 8080:80 5432",
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeID,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if _, err := c.Sandbox(ctx, args[0]); err != nil {
				return err
			}
			var fs []*forwarding
			defer func() {
				for _, f := range fs {
					f.Close()
				}
			}()
			for _, spec := range args[1:] {
				local, port, err := parseForward(spec)
				if err != nil {
					return err
				}
				l, err := net.Listen("tcp", net.JoinHostPort(address, fmt.Sprint(local)))
				if err != nil {
					return err
				}
				fs = append(fs, &forwarding{Listener: l, Local: l.Addr().String(), Port: port})
			}
			if a.json {
				if err := a.printJSON(fs); err != nil {
					return err
				}
			}
			var wg sync.WaitGroup
			for _, f := range fs {
				if !a.json {
					fmt.Fprintf(a.out, "%s -> %s:%d\n", f.Local, args[0], f.Port)
				}
				wg.Go(func() { a.forwardPort(ctx, c, args[0], f) })
			}
			<-ctx.Done()
			for _, f := range fs {
				f.Close()
			}
			wg.Wait()
			return nil
		}),
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "local address to listen on")
	return cmd
}

// forwarding is one local port.
type forwarding struct {
	net.Listener `json:"-"`
	Local        string `json:"local"`
	Port         int    `json:"port"`
}

// parseForward reads [LOCAL:]PORT.
func parseForward(s string) (local, port int, err error) {
	l, p, ok := strings.Cut(s, ":")
	if !ok {
		l, p = s, s
	}
	if port, err = client.ParsePort(p); err != nil {
		return 0, 0, usageError{err}
	}
	if l == "0" {
		return 0, port, nil
	}
	if local, err = client.ParsePort(l); err != nil {
		return 0, 0, usageError{err}
	}
	return local, port, nil
}

// maxForwards bounds the connections of one local port at one time.
const maxForwards = 256

func (a *app) forwardPort(ctx context.Context, c *client.Client, id string, f *forwarding) {
	var wg sync.WaitGroup
	defer wg.Wait()
	turns := make(chan struct{}, maxForwards)
	for {
		conn, err := f.Accept()
		if err != nil {
			return // closed
		}
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			defer conn.Close()
			inside, err := c.Tunnel(ctx, id, f.Port)
			if err != nil {
				if ctx.Err() == nil {
					fmt.Fprintf(a.err, "warren: port %d: %s\n", f.Port, clean(err.Error()))
				}
				return
			}
			defer inside.Close()
			defer context.AfterFunc(ctx, func() { conn.Close(); inside.Close() })()
			var both sync.WaitGroup
			both.Go(func() { pour(inside, conn) })
			pour(conn, inside)
			both.Wait()
		})
	}
}

// pour copies src to dst and passes on the end of it.
func pour(dst, src net.Conn) {
	_, err := io.Copy(struct{ io.Writer }{dst}, struct{ io.Reader }{src})
	if cw, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
		cw.CloseWrite()
		return
	}
	dst.Close()
}
