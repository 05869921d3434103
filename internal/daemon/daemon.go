package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/warrenhq/warren/internal/api"
	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/host/statefs"
	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/network"
	"github.com/warrenhq/warren/internal/runtime/container"
	"github.com/warrenhq/warren/internal/runtime/gvisor"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
	"github.com/warrenhq/warren/internal/version"
)

var (
	pointLocked  = fault.Register("daemon.start.locked")
	pointBuilt   = fault.Register("daemon.start.built")
	pointStarted = fault.Register("daemon.start.started")
	pointStopped = fault.Register("daemon.stop.manager_closed")
)

// runtimes is where a runtime is registered: one line each, in the order in
// which they are told to people.
var runtimes = []struct {
	open   func(oci.Config) (sandbox.Runtime, error)
	binary func(Config) string
}{
	{func(c oci.Config) (sandbox.Runtime, error) { return container.New(c) }, func(c Config) string { return c.OCIRuntime }},
	{func(c oci.Config) (sandbox.Runtime, error) { return gvisor.New(c) }, func(c Config) string { return c.Runsc }},
}

// preferred are the runtimes of a create that names none, the best first: the
// stronger boundary wherever the host can run it.
var preferred = []string{gvisor.Name, container.Name}

// planned are the runtimes that the API knows and that are not built yet.
var planned = []string{"isolate", "microvm", "kata", "libkrun"}

// Run serves until ctx is done, and then stops cleanly: calls under way have
// cfg.Grace to end, and sandboxes go on running for the next daemon to adopt.
// ready, which may be nil, is called once everything is served.
//
// Errors: CodeConflict where another daemon runs on the state directory or
// the socket; CodeUnavailable where the host cannot do it; CodeInvalid for the
// config.
func Run(ctx context.Context, cfg Config, log *slog.Logger, ready func(Info)) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	d := &daemon{cfg: cfg, log: log}
	defer d.unwind()
	if err := d.build(ctx); err != nil {
		return err
	}
	pointBuilt.Hit()
	return d.serve(ctx, ready)
}

// daemon is the parts of a Run. undo holds what takes them down, run last to
// first.
type daemon struct {
	cfg      Config
	log      *slog.Logger
	instance string
	runDir   string
	undo     []func()

	drivers []sandbox.Runtime
	manager *manager.Manager
	started atomic.Bool
}

func (d *daemon) later(what string, f func() error) {
	d.undo = append(d.undo, func() {
		if err := f(); err != nil {
			d.log.Error("stop: "+what, "error", err)
		}
	})
}

func (d *daemon) unwind() {
	for i := len(d.undo) - 1; i >= 0; i-- {
		d.undo[i]()
	}
}

// build opens everything below the API.
func (d *daemon) build(ctx context.Context) error {
	cfg := d.cfg
	if err := d.directories(); err != nil {
		return err
	}
	if err := d.mountState(ctx); err != nil {
		return err
	}
	unlock, err := lockState(cfg.State)
	if err != nil {
		return err
	}
	d.later("unlock the state directory", unlock)
	pointLocked.Hit()

	st, err := store.OpenSQLite(ctx, filepath.Join(cfg.State, "warren.db"), store.Options{Ballast: cfg.Ballast})
	if err != nil {
		return err
	}
	d.later("close the state database", st.Close)

	nw, err := network.Open(ctx, network.Config{
		Instance: d.instance, RunDir: d.runDir, StateDir: cfg.State, PoolSize: cfg.PoolSize, Resolvers: cfg.Resolvers, Log: d.log,
	})
	if err != nil {
		return err
	}
	d.later("close the network", nw.Close)

	memory, err := host.ReadMemory()
	if err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "read the host's memory: %w", err)
	}
	for _, r := range runtimes {
		rt, err := r.open(oci.Config{
			Instance: d.instance, RunDir: d.runDir, AgentPath: cfg.Agent, Binary: r.binary(cfg),
			MemoryBudget: cfg.Budget.MemoryLimit(memory.Total),
		})
		if err != nil {
			return err
		}
		d.drivers = append(d.drivers, rt)
		if c, ok := rt.(interface{ Close(context.Context) error }); ok {
			d.later("close runtime "+rt.Name(), func() error { return c.Close(context.WithoutCancel(ctx)) })
		}
	}

	lib, err := template.Open(filepath.Join(cfg.State, "templates"))
	if err != nil {
		return err
	}
	d.later("close the template library", lib.Close)
	for _, problem := range lib.Problems() {
		d.log.Warn("a template cannot be used", "error", problem)
	}

	d.manager, err = manager.New(manager.Config{
		StateDir: cfg.State, Store: st, Runtimes: d.drivers, Preferred: preferred, Planned: planned,
		Network: nw, Templates: lib, ImageAliases: cfg.ImageAliases, Budget: cfg.Budget, Spares: cfg.Spares, KeepEnded: cfg.KeepEnded,
		Retention: store.Retention{Ended: cfg.MaxEnded}, Log: d.log,
	})
	if err != nil {
		return err
	}
	d.later("close the manager", func() error { // again, where serve did not come to it
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return d.manager.Close(ctx)
	})
	return nil
}

// serve listens, takes over what an earlier daemon left, and serves until ctx
// is done.
func (d *daemon) serve(ctx context.Context, ready func(Info)) error {
	handlers := api.New(d.manager, api.Options{Domain: d.cfg.Domain, Log: d.log, Ready: d.ready})
	defer handlers.Close()

	var servers []*http.Server
	group, failed := errgroup.WithContext(ctx)
	listen := func(l net.Listener, h http.Handler) {
		s := api.NewServer(h, d.log)
		servers = append(servers, s)
		group.Go(func() error {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				return sandbox.Errorf(sandbox.CodeUnavailable, "serve on %s: %w", l.Addr(), err)
			}
			return nil
		})
	}
	stop := func() error {
		d.stop(servers)
		return group.Wait()
	}
	// Both are open before anything is taken over, so that a taken address is
	// told at once, and readiness can be asked for meanwhile.
	unix, err := listenUnix(d.cfg.Socket)
	if err != nil {
		return err
	}
	info := Info{Version: version.Version, State: d.cfg.State, Instance: d.instance, Socket: d.cfg.Socket}
	var tcp net.Listener
	if d.cfg.Listen != NoListen {
		if tcp, err = net.Listen("tcp", d.cfg.Listen); err != nil {
			unix.Close()
			return sandbox.Errorf(sandbox.CodeUnavailable, "listen on %s: %w: give another address by --listen, or %q", d.cfg.Listen, err, NoListen)
		}
		info.Listen = tcp.Addr().String()
	}
	listen(unix, handlers.Unix())
	if tcp != nil {
		listen(tcp, handlers.TCP())
	}

	if err := d.manager.Start(failed); err != nil {
		return errors.Join(err, stop())
	}
	pointStarted.Hit()
	group.Go(func() error {
		handlers.Run(failed) // follows the events; ends with failed
		return nil
	})
	d.started.Store(true)
	_, info.FirstKey, err = d.manager.FirstKey(failed)
	if err != nil {
		return errors.Join(err, stop())
	}
	info.Adopted = d.manager.Capacity(failed).Sandboxes
	d.log.Info("serving", "version", info.Version, "state", info.State, "instance", info.Instance,
		"socket", info.Socket, "listen", info.Listen, "adopted", info.Adopted)
	if ready != nil {
		ready(info)
	}
	<-failed.Done()
	d.log.Info("stopping; sandboxes go on running", "grace", d.cfg.Grace)
	return stop()
}

// ready is what /readyz answers.
func (d *daemon) ready(context.Context) error {
	if d.started.Load() {
		return nil
	}
	return sandbox.Errorf(sandbox.CodeUnavailable, "the daemon is taking over what an earlier one left, or stopping")
}

// stop ends the servers and the manager side by side: streams end with the
// manager's, calls have the grace.
func (d *daemon) stop(servers []*http.Server) {
	d.started.Store(false)
	ctx, cancel := context.WithTimeout(context.Background(), d.cfg.Grace)
	defer cancel()
	var group errgroup.Group
	for _, s := range servers {
		group.Go(func() error {
			if s.Shutdown(ctx) != nil {
				s.Close() // what did not end in time
			}
			return nil
		})
	}
	group.Go(func() error { return d.manager.Close(ctx) })
	if err := group.Wait(); err != nil {
		d.log.Error("stop: close the manager", "error", err)
	}
	pointStopped.Hit()
}

// mountState mounts the state directory's own filesystem, where there is one or
// is to be one, and unmounts it in the end if no sandbox runs.
func (d *daemon) mountState(ctx context.Context) error {
	fs, err := statefs.Open(ctx, statefs.Config{State: d.cfg.State, Kind: d.cfg.StateFS, Size: d.cfg.StateFSSize, Log: d.log})
	if fs == nil || err != nil {
		return err
	}
	d.later("unmount the state directory", func() error {
		if d.drivers == nil && fs.Found {
			return nil // it did not come to know what runs
		}
		for _, rt := range d.drivers {
			if ids, err := rt.List(context.WithoutCancel(ctx)); err != nil || len(ids) > 0 {
				return nil // it stays mounted for them
			}
		}
		return fs.Close()
	})
	return nil
}

// directories makes the state and run directories.
func (d *daemon) directories() error {
	state := d.cfg.State
	if err := os.MkdirAll(state, 0o700); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the state directory cannot be made: %w", err)
	}
	fi, err := os.Stat(state)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the state directory: %w", err)
	}
	if !fi.IsDir() {
		return sandbox.Errorf(sandbox.CodeInvalid, "the state directory %s is no directory", state)
	}
	if fi.Mode().Perm()&0o022 != 0 {
		return sandbox.Errorf(sandbox.CodeInvalid, "others may write to the state directory %s (mode %04o): chmod 700 it, or give another by --state", state, fi.Mode().Perm())
	}
	if d.instance, err = host.Instance(state); err != nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "the state directory: %w", err)
	}
	d.runDir = filepath.Join(runRoot, d.instance)
	// 0711: a sandbox's first process, under its own id, goes through it.
	if err := os.MkdirAll(d.runDir, 0o711); err != nil {
		return sandbox.Errorf(sandbox.CodeUnavailable, "the run directory cannot be made: %w: run as root", err)
	}
	return nil
}
