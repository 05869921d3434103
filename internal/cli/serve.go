package cli

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/warrenhq/warren/internal/daemon"
)

func (a *app) serveCmd() *cobra.Command {
	var cfg daemon.Config
	var memReserve, diskReserve, stateFSSize, level, format string
	var resolvers []string
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the daemon",
		Long: "Runs the daemon until SIGTERM or SIGINT. Sandboxes go on running when it ends;\n" +
			"the next one on the same state directory takes them over.\n\n" +
			"The first start makes an API key for the TCP address and prints it, this once,\n" +
			"on standard error.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := newLog(a.err, level, format)
			if err != nil {
				return err
			}
			for _, r := range []struct {
				flag string
				into *int64
			}{{memReserve, &cfg.Budget.MemoryReserve}, {diskReserve, &cfg.Budget.DiskReserve}, {stateFSSize, &cfg.StateFSSize}} {
				if r.flag == "" {
					continue
				}
				mib, err := parseMemory(r.flag)
				if err != nil {
					return err
				}
				*r.into = int64(mib) << 20
			}
			for _, r := range resolvers {
				ap, err := parseResolver(r)
				if err != nil {
					return err
				}
				cfg.Resolvers = append(cfg.Resolvers, ap)
			}
			return daemon.Run(cmd.Context(), cfg, log, func(i daemon.Info) {
				if i.FirstKey != "" {
					fmt.Fprintf(a.err, "\nThe first API key, shown this once:\n\n    %s\n\n", i.FirstKey)
				}
				at := "unix://" + i.Socket
				if i.Listen != "" {
					at += " and http://" + i.Listen
				}
				fmt.Fprintf(a.err, "warren %s serves on %s\n", i.Version, at)
			})
		},
	}
	fl := cmd.Flags()
	fl.StringToStringVar(&cfg.ImageAliases, "image-alias", map[string]string{"e2bdev/base": "base"},
		"template that a template build starts from instead of an image, `IMAGE=TEMPLATE` (repeatable)")
	fl.StringVar(&cfg.State, "state", daemon.DefaultState, "directory of all that is to last")
	fl.StringVar(&cfg.StateFS, "state-fs", "", "xfs: keep the state directory on an XFS in an image file beside it, where its filesystem has no reflinks")
	fl.StringVar(&stateFSSize, "state-fs-size", "", "how large that XFS is to be, such as 200G; it can be given more later (default: 64G, or 4/5 of what is free)")
	fl.StringVar(&cfg.Socket, "socket", daemon.DefaultSocket, "path of the unix socket")
	fl.StringVar(&cfg.Listen, "listen", daemon.DefaultListen, "ADDRESS:PORT of the TCP API, or \""+daemon.NoListen+"\"")
	fl.StringVar(&cfg.Domain, "domain", daemon.DefaultDomain, "domain under which sandboxes have host names: <port>-<id>.DOMAIN")
	fl.StringVar(&cfg.Agent, "agent", "", "path of warren-agent (default: beside this program)")
	fl.StringVar(&cfg.Runsc, "runsc", "", "path of runsc (default: beside this program)")
	fl.StringVar(&cfg.OCIRuntime, "oci-runtime", "", "crun, runc or a path (default: what is installed)")
	fl.IntVar(&cfg.PoolSize, "pool", 0, "network slots kept ready (0: the default; below 0: none)")
	fl.StringArrayVar(&resolvers, "resolver", nil, "DNS server to forward to, ADDRESS or ADDRESS:PORT (repeatable; default: the host's)")
	fl.StringVar(&memReserve, "mem-reserve", "", "memory kept for the host itself, such as 2G (default: the larger of 1G and 5 %)")
	fl.Float64Var(&cfg.Budget.MemoryOvercommit, "mem-overcommit", 0, "how many times the rest may be promised to sandboxes (default 4)")
	fl.StringVar(&diskReserve, "disk-reserve", "", "free disk below which no sandbox is made (default 1G)")
	fl.Float64Var(&cfg.Budget.ProcessOvercommit, "process-overcommit", 0, "how many times the host's processes may be promised to sandboxes (default 16)")
	fl.IntVar(&cfg.Budget.Creates, "creates", 0, "creates at work at one time (default: 2 per CPU, at least 4)")
	fl.IntVar(&cfg.Spares, "spares", daemon.DefaultSpares, "sandboxes kept prepared for forks and wakes, at most (0: none)")
	fl.DurationVar(&cfg.KeepEnded, "keep-ended", 7*24*time.Hour, "how long records of ended sandboxes are kept")
	fl.IntVar(&cfg.MaxEnded, "max-ended", 10_000, "how many records of ended sandboxes are kept")
	fl.DurationVar(&cfg.Grace, "grace", 10*time.Second, "time for calls under way when it ends")
	fl.StringVar(&level, "log-level", "info", "debug, info, warn or error")
	fl.StringVar(&format, "log-format", "text", "text or json")
	cmd.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.RegisterFlagCompletionFunc("log-format", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newLog(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, usagef("--log-level %q: give debug, info, warn or error", level)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, usagef("--log-format %q: give text or json", format)
}

// dnsPort is where DNS servers listen (RFC 1035, section 4.2).
const dnsPort = 53

func parseResolver(s string) (netip.AddrPort, error) {
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap, nil
	}
	addr, err := netip.ParseAddr(strings.Trim(s, "[]"))
	if err != nil {
		return netip.AddrPort{}, usagef("--resolver %q: give ADDRESS or ADDRESS:PORT", s)
	}
	return netip.AddrPortFrom(addr, dnsPort), nil
}
