// Command warren-bench measures Warren on this host against the bare tools
// that it drives, in the same run, and keeps every sample as JSON.
//
//	go run ./bench/warren-bench [-out bench/results] [-n 30] [NAME…]
//
// It starts a daemon of its own, with its own state directory, and needs root.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/warrenhq/warren/bench/internal/report"
)

// A benchmark fills one report.
type benchmark struct {
	name, about string
	run         func(ctx context.Context, l *lab, r *report.Report) error
}

var benchmarks = []benchmark{
	{"coldstart", "create from a template to the first exec answered, beside a bare run of the same bundle", coldStart},
	{"exec", "an exec of /bin/true through the HTTP API in a running sandbox", execs},
	{"transfer", "1 GiB into a file of a sandbox and out of it, through the HTTP API", transfer},
	{"proxy", "2 GiB into a file of a sandbox and out of it, through the proxy as E2B's SDKs do", proxied},
	{"density", "many idle sandboxes at once: memory of each, and of the daemon", density},
	{"creates", "sequential, staggered and burst creates", creates},
	{"claims", "creates that a pool serves, to the first exec answered, beside a bare run of the same bundle", claims},
	{"captures", "live forks, hibernation and waking on gVisor, beside runsc's own commands", captures},
	{"diskcost", "what forks take of the disk, with and without reflinks", diskCost},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "warren-bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	var o options
	flags := flag.NewFlagSet("warren-bench", flag.ContinueOnError)
	out := flags.String("out", "bench/results", "directory for the JSON reports")
	flags.StringVar(&o.bin, "bin", "bin", "directory of warren, warren-agent and runsc")
	flags.StringVar(&o.state, "state", ".state/bench", "state directory; its template is kept for the next run")
	flags.StringVar(&o.template, "template", "base", "template to measure with; base is built if it is missing")
	flags.IntVar(&o.n, "n", 30, "samples of each series that takes a create")
	runtimes := flags.String("runtimes", "container,gvisor", "runtimes to measure")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: warren-bench [flags] [NAME…]\n\nbenchmarks:")
		for _, b := range benchmarks {
			fmt.Fprintf(flags.Output(), "  %-10s %s\n", b.name, b.about)
		}
		fmt.Fprintln(flags.Output(), "\nflags:")
		flags.PrintDefaults()
	}
	if err := flags.Parse(args); err != nil {
		return err
	}
	o.runtimes = strings.Split(*runtimes, ",")
	for _, name := range flags.Args() {
		if !slices.ContainsFunc(benchmarks, func(b benchmark) bool { return b.name == name }) {
			return fmt.Errorf("there is no benchmark %q; see -help", name)
		}
	}
	if os.Getuid() != 0 {
		return fmt.Errorf("needs root: sandboxes are made of namespaces, cgroups and mounts")
	}

	l, err := newLab(ctx, o)
	if err != nil {
		return err
	}
	defer l.close()
	for _, b := range benchmarks {
		if flags.NArg() > 0 && !slices.Contains(flags.Args(), b.name) {
			continue
		}
		r := report.New(b.name, b.about)
		if err := b.run(ctx, l, r); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
		r.Print(os.Stdout)
		if err := r.Save(filepath.Clean(*out)); err != nil {
			return err
		}
	}
	return nil
}
