package oci

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/console"
	"github.com/warrenhq/warren/internal/sandbox"
)

// An Instance is one sandbox that an OCI runtime started. The drivers embed it
// and add their abilities.
type Instance struct {
	eng  *Engine
	spec sandbox.Spec
	grp  *Cgroup
	proc *Process
	cpus []int // see record

	watch context.CancelFunc // stops the watcher
	ended chan struct{}      // closed when the first process has ended or the watcher was stopped

	ending atomic.Bool // by this daemon: nobody asks why

	mu   sync.Mutex
	exit sandbox.Exit
	rec  *console.Recorder
}

func newInstance(e *Engine, spec sandbox.Spec, p *Process, g *Cgroup, rec *console.Recorder, cpus []int) *Instance {
	ctx, cancel := context.WithCancel(context.Background())
	i := &Instance{eng: e, spec: spec, grp: g, proc: p, cpus: cpus, rec: rec, watch: cancel, ended: make(chan struct{})}
	go i.watcher(ctx)
	return i
}

// Adopt finds a running sandbox by its record. CodeNotFound: it does not run.
func (e *Engine) Adopt(_ context.Context, spec sandbox.Spec) (*Instance, error) {
	r, err := readRecord(e.BundleDir(spec.ID))
	if err == nil && r.Prepared {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "sandbox %s was not restored to its end", spec.ID)
	}
	p, err := e.find(spec.ID)
	if errors.Is(err, errGone) {
		return nil, sandbox.Errorf(sandbox.CodeNotFound, "sandbox %s does not run any more", spec.ID)
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.CodeInternal, "adopt sandbox %s: %w", spec.ID, err)
	}
	if err := e.Open(); err != nil {
		p.Close()
		return nil, err
	}
	g, err := e.Cgroup(spec.ID)
	if err != nil {
		p.Close()
		return nil, err
	}
	rec, err := console.Record(spec.Dir)
	if err != nil {
		p.Close()
		return nil, sandbox.Errorf(sandbox.CodeInternal, "adopt sandbox %s: %w", spec.ID, err)
	}
	return newInstance(e, spec, p, g, rec, r.CPUs), nil
}

// Boost lets the sandbox have all of the host's CPUs, for work that the daemon
// waits for and its programs cannot use: a quota makes a kernel in user space
// that writes or reads its state with several threads wait for its next
// period.
func (i *Instance) Boost() error { return i.grp.SetCPU(0, nil) }

// Unboost gives the sandbox its own limits again.
func (i *Instance) Unboost() error { return i.grp.SetCPU(i.spec.Resources.CPUs, i.cpus) }

// watcher waits for the first process's end and tells why.
func (i *Instance) watcher(ctx context.Context) {
	defer close(i.ended)
	err := i.proc.Wait(ctx)
	exit := sandbox.Exit{Reason: sandbox.ReasonRuntimeCrashed, At: time.Now()}
	if err != nil {
		exit.Detail = "it was let go of before it ended"
	} else {
		kills, _ := i.grp.OOMKills()
		status, known := i.proc.exitStatus(!i.ending.Load())
		exit.Reason, exit.Detail = explain(status, known, kills)
		if tell := i.eng.LastWords; tell != nil && exit.Reason == sandbox.ReasonRuntimeCrashed && !i.ending.Load() {
			if said := tell(i.spec.ID); said != "" {
				exit.Detail += ": " + said
			}
		}
	}
	i.mu.Lock()
	i.exit = exit
	rec := i.rec
	i.rec = nil
	i.mu.Unlock()
	if rec != nil {
		rec.Close()
	}
	i.proc.Close()
}

// explain says why the first process ended. Kernels before 6.15 tell its
// status to its parent alone; there, any OOM kill in the group counts.
func explain(status unix.WaitStatus, known bool, oomKills int64) (sandbox.Reason, string) {
	switch {
	case oomKills > 0 && (!known || (status.Signaled() && status.Signal() == unix.SIGKILL)):
		return sandbox.ReasonOOM, "the kernel ended its first process at the memory limit"
	case !known:
		return sandbox.ReasonRuntimeCrashed, "its first process ended"
	case status.Signaled():
		return sandbox.ReasonRuntimeCrashed, fmt.Sprintf("its first process was ended by signal %d (%s)", status.Signal(), unix.SignalName(status.Signal()))
	default:
		return sandbox.ReasonRuntimeCrashed, fmt.Sprintf("its first process exited with status %d", status.ExitStatus())
	}
}

// stop ends the watching, not the sandbox.
func (i *Instance) stop() {
	i.watch()
	<-i.ended
}

// Release lets go of a sandbox that goes on running: it ends what the daemon
// has of it in its own process. Nothing else of the Instance is to be used
// afterwards.
func (i *Instance) Release() { i.stop() }

// Spec is what the sandbox was made from.
func (i *Instance) Spec() sandbox.Spec { return i.spec }

// Cgroup is the sandbox's control group.
func (i *Instance) Cgroup() *Cgroup { return i.grp }

// Done is closed when the sandbox has ended.
func (i *Instance) Done() <-chan struct{} { return i.ended }

// PID is the first process's, on the host.
func (i *Instance) PID() int { return i.proc.PID }

// Dial implements sandbox.Instance.
func (i *Instance) Dial(ctx context.Context, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "port %d: give 1 to 65535", port)
	}
	select {
	case <-i.ended:
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "sandbox %s has ended", i.spec.ID)
	default:
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", i.addr(port))
	if err == nil {
		return c, nil
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "nothing listens on port %d of sandbox %s", port, i.spec.ID)
	}
	return nil, sandbox.Errorf(sandbox.CodeUnavailable, "port %d of sandbox %s: %w", port, i.spec.ID, err)
}

func (i *Instance) addr(port int) string {
	return netip.AddrPortFrom(i.spec.Link.Address.Addr(), uint16(port)).String()
}

// Stats implements sandbox.Instance.
func (i *Instance) Stats(context.Context) (sandbox.Stats, error) {
	s, err := i.grp.Stats()
	if err != nil {
		return s, sandbox.Errorf(sandbox.CodeUnavailable, "sandbox %s: %w", i.spec.ID, err)
	}
	return s, nil
}

// Wait implements sandbox.Instance.
func (i *Instance) Wait(ctx context.Context) (sandbox.Exit, error) {
	select {
	case <-i.ended:
		i.mu.Lock()
		defer i.mu.Unlock()
		return i.exit, nil
	case <-ctx.Done():
		return sandbox.Exit{}, ctx.Err()
	}
}

// Ending says that the sandbox's end, which follows, is the daemon's doing.
func (i *Instance) Ending() { i.ending.Store(true) }

// Kill implements sandbox.Instance.
func (i *Instance) Kill(ctx context.Context) error {
	i.Ending()
	if err := i.eng.Clean(ctx, i.spec.ID); err != nil {
		return err
	}
	<-i.ended
	return nil
}

// waitReady polls the agent until it answers GET /health with 204, the
// sandbox ends, or ctx is done.
func (i *Instance) waitReady(ctx context.Context) error {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: time.Second}).DialContext}
	client := &http.Client{Transport: tr, Timeout: 2 * time.Second}
	url := "http://" + i.addr(sandbox.AgentPort) + "/health"
	var last error
	for start := time.Now(); ; {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusNoContent {
				return nil
			}
			err = fmt.Errorf("GET /health gave %s", resp.Status)
		}
		last = err
		select {
		case <-i.ended:
			i.mu.Lock()
			defer i.mu.Unlock()
			return fmt.Errorf("the agent did not come to answer: %s", i.exit.Detail)
		case <-ctx.Done():
			return fmt.Errorf("the agent does not answer: %w", last)
		case <-time.After(pollStep(time.Since(start))):
		}
	}
}

// pollStep is how long to wait before the next look at what did not come
// about for some time: a sixteenth of that, so that looking adds little to
// fast and slow ones alike.
func pollStep(since time.Duration) time.Duration {
	return min(max(since/16, 500*time.Microsecond), 50*time.Millisecond)
}
