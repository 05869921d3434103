// Command warren-agent is PID 1 in a sandbox: it reaps orphans and serves
// commands, files and control calls on one TCP port. See internal/agent. With
// the argument "attributes" it tells of files instead, with "hostname" it sets
// the sandbox's: see internal/agent/attrs and internal/agent/identity.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent"
	"github.com/warrenhq/warren/internal/agent/attrs"
	"github.com/warrenhq/warren/internal/agent/identity"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The agent is paid for in every sandbox, so it trades CPU for memory: it
// collects early, and runs on few threads.
const (
	gcPercent = 50
	maxProcs  = 4
	// termGrace is what commands have between SIGTERM and SIGKILL when the
	// sandbox is stopped.
	termGrace = 2 * time.Second
)

func main() {
	port := flag.Int("port", portFromEnv(), "TCP port to serve on, on all IPv4 addresses; also WARREN_AGENT_PORT")
	version := flag.Bool("version", false, "print the version of the interface and exit")
	flag.Parse()
	if *version {
		fmt.Println(agent.EnvdVersion)
		return
	}
	var err error
	switch flag.Arg(0) {
	case attrs.Mode:
		err = attrs.Serve("/", os.Stdin, os.Stdout)
	case identity.HostnameMode:
		err = identity.SetHostname(flag.Arg(1))
	default:
		err = run(*port)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "warren-agent:", err)
		os.Exit(1)
	}
}

func portFromEnv() int {
	if p, err := strconv.Atoi(os.Getenv("WARREN_AGENT_PORT")); err == nil {
		return p
	}
	return sandbox.AgentPort
}

func run(port int) error {
	debug.SetGCPercent(gcPercent)
	if runtime.GOMAXPROCS(0) > maxProcs {
		runtime.GOMAXPROCS(maxProcs)
	}
	syscall.Umask(0o022)
	// The agent traces processes to freeze them. Commands do not get that
	// capability from it: one that root executes has no more than the bounding
	// set. It fails where the agent does not have the capability either.
	syscall.AllThreadsSyscall(syscall.SYS_PRCTL, unix.PR_CAPBSET_DROP, unix.CAP_SYS_PTRACE, 0)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	a, err := agent.New(agent.Config{ReapOrphans: true})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp4", ":"+strconv.Itoa(port))
	if err != nil {
		return err
	}
	served := make(chan error, 1)
	go func() { served <- a.Serve(l) }()
	select {
	case <-stop:
	case err := <-served:
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), termGrace)
	defer cancel()
	a.Close(ctx)
	return nil
}
