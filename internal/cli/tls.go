package cli

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/sandbox"
)

func (a *app) tlsCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "tls", Short: "Tell what clients of the TLS address need"}
	cmd.AddCommand(&cobra.Command{
		Use: "ca", Short: "Print the certificate of the daemon's authority (PEM)", Args: cobra.NoArgs,
		Long: "Prints the certificate of the authority that signed the daemon's own one, as PEM.\n" +
			"It is good for the names below the TLS domain alone. Clients trust it by\n\n" +
			"    warren tls ca > warren-ca.pem\n" +
			"    export NODE_EXTRA_CA_CERTS=$PWD/warren-ca.pem   # Node.js\n" +
			"    export SSL_CERT_FILE=$PWD/warren-ca.pem         # Python, OpenSSL, Go; in place of the system's\n" +
			"    curl --cacert warren-ca.pem ...",
		RunE: a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			t, err := c.TLS(ctx)
			if err != nil {
				return err
			}
			if t.CA == "" {
				return sandbox.Errorf(sandbox.CodeNotFound, "the daemon's certificate for %s is not of its own authority: clients trust whoever signed it", clean(t.Domain))
			}
			if a.json {
				return a.printJSON(t)
			}
			_, err = io.WriteString(a.out, t.CA)
			return err
		}),
	})
	return cmd
}
