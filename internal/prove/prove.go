package prove

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/api/wire"
	"github.com/warrenhq/warren/internal/client"
	"github.com/warrenhq/warren/internal/host"
	"github.com/warrenhq/warren/internal/sandbox"
)

// Label is the key of the metadata that every sandbox of a run has; its value
// is the run's own.
const Label = "warren.prove"

const (
	// lifetime ends a run's sandboxes where the program itself was killed.
	lifetime = 30 * time.Minute
	// createLimit and execLimit bound one call of the API.
	createLimit = 2 * time.Minute
	execLimit   = 30 * time.Second
	// killLimit bounds the cleaning up, also after an interrupt.
	killLimit = 60 * time.Second
	// runtimeLimit and quickLimit bound all of one runtime.
	runtimeLimit = 25 * time.Minute
	quickLimit   = 10 * time.Minute
)

// Options are what is asked of a run.
type Options struct {
	Client   *client.Client
	Runtime  string // "": every one that the daemon knows of
	Template string // "": base
	Quick    bool
	Progress func(line string) // nil: nobody wants to know
}

// Run measures. An error means that nothing could be measured, or that ctx
// ended; what goes wrong with one runtime is in its part of the report.
func Run(ctx context.Context, o Options) (*Report, error) {
	if o.Template == "" {
		o.Template = "base"
	}
	if o.Progress == nil {
		o.Progress = func(string) {}
	}
	start := time.Now()
	rep := &Report{Schema: schema, At: start.UTC().Truncate(time.Second), Template: o.Template, Quick: o.Quick, Host: readHost(o.Client.Local())}
	v, err := o.Client.Version(ctx)
	if err != nil {
		return nil, err
	}
	rep.Version = v.Version
	known, err := o.Client.Runtimes(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := o.Client.Template(ctx, o.Template); err != nil {
		return nil, err
	}
	if o.Quick {
		rep.Notes = append(rep.Notes, "a quick run: few samples and no slow work; its figures are to look at, not to quote")
	}
	if !rep.Host.Local {
		rep.Notes = append(rep.Notes, "the daemon is on another machine: what is compared with the host is not known, memory is the daemon's working set")
	} else if os.Geteuid() != 0 {
		rep.Notes = append(rep.Notes, "without root the memory is the daemon's working set, not PSS")
	}
	found := false
	for _, k := range known {
		if o.Runtime != "" && k.Name != o.Runtime {
			continue
		}
		found = true
		rep.Runtimes = append(rep.Runtimes, measure(ctx, o, rep.Host, k))
		if ctx.Err() != nil {
			return nil, sandbox.Errorf(sandbox.CodeCanceled, "interrupted")
		}
	}
	if !found {
		var names []string
		for _, k := range known {
			names = append(names, k.Name)
		}
		return nil, sandbox.Errorf(sandbox.CodeInvalid, "the daemon knows no runtime %q: it has %s", o.Runtime, strings.Join(names, ", "))
	}
	rep.TookMS = millis(time.Since(start))
	return rep, nil
}

// measurement is the measuring of one runtime.
type measurement struct {
	o       Options
	host    Host
	runtime string
	claims  sandbox.Capabilities
	run     string // the value of Label
}

func measure(ctx context.Context, o Options, h Host, k wire.Runtime) Runtime {
	out := Runtime{Name: k.Name, Available: k.Available, Claims: k.Capabilities}
	if !k.Available {
		out.Why = "this host cannot run it"
		if k.Error != nil {
			out.Why = k.Error.Message
		}
		return out
	}
	m := &measurement{o: o, host: h, runtime: k.Name, claims: k.Capabilities, run: rand.Text()}
	limit := runtimeLimit
	if o.Quick {
		limit = quickLimit
	}
	start := time.Now()
	defer m.sweep(ctx) // a call that broke off may have left what nobody knows of
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var errs []error
	// One that fails is no reason not to try the next: each has a sandbox of
	// its own.
	section := func(name string, f func() error) {
		if ctx.Err() != nil {
			return
		}
		m.progress("%s: %s", m.runtime, name)
		if err := f(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
	}
	section("what is seen of the host", func() (err error) { out.Boundary, err = m.boundary(ctx); return })
	section("start and exec", func() (err error) { out.Timings, err = m.timings(ctx); return })
	section("fork and wake", func() error {
		more, err := m.captureTimings(ctx)
		out.Timings = append(out.Timings, more...)
		return err
	})
	section("memory of idle sandboxes", func() (err error) { out.Memory, err = m.memory(ctx); return })
	section("captures", func() (err error) { out.Captures, err = m.captures(ctx); return })
	section("work", func() (err error) { out.Battery, err = m.runBattery(ctx); return })
	if ctx.Err() != nil {
		errs = append(errs, fmt.Errorf("not done after %s", limit))
	}
	if err := errors.Join(errs...); err != nil {
		out.Error = oneLine(err.Error())
	}
	out.TookMS = millis(time.Since(start))
	return out
}

func (m *measurement) progress(format string, args ...any) {
	m.o.Progress(fmt.Sprintf(format, args...))
}

// create makes a sandbox of the run.
func (m *measurement) create(ctx context.Context, r wire.CreateSandbox) (wire.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, createLimit)
	defer cancel()
	if r.Template == "" {
		r.Template = m.o.Template
	}
	r.Runtime, r.Timeout = m.runtime, lifetime.Seconds()
	r.Metadata = map[string]string{Label: m.run}
	return m.o.Client.CreateSandbox(ctx, r)
}

func (m *measurement) exec(ctx context.Context, id string, r wire.Exec) (wire.ExecResult, error) {
	if r.Timeout == 0 {
		r.Timeout = execLimit.Seconds()
	}
	// The daemon ends the command; this is for a daemon that does not answer.
	ctx, cancel := context.WithTimeout(ctx, time.Duration(r.Timeout*float64(time.Second))+execLimit)
	defer cancel()
	return m.o.Client.Exec(ctx, id, r)
}

// end tells why a sandbox has ended, or cannot be used any more; "" where it
// lives.
func (m *measurement) end(ctx context.Context, id string) string {
	err := m.trivial(ctx, id)
	if err == nil || ctx.Err() != nil {
		return ""
	}
	for range 20 { // its end may not be on record yet
		sb, gerr := m.o.Client.Sandbox(ctx, id)
		if gerr != nil {
			break
		}
		if sb.State.Ended() {
			return strings.TrimSpace(string(sb.Reason) + " " + sb.Detail)
		}
		time.Sleep(100 * time.Millisecond)
	}
	return oneLine(err.Error())
}

// kill ends a sandbox, also where ctx has ended.
func (m *measurement) kill(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	if err := m.o.Client.Kill(ctx, id); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
		m.progress("sandbox %s could not be removed: %v", id, err)
	}
}

// sweep ends every sandbox of the run that is left.
func (m *measurement) sweep(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	for sb, err := range m.o.Client.Sandboxes(ctx, client.Filter{Live: true, Metadata: map[string]string{Label: m.run}}) {
		if err != nil {
			m.progress("sandboxes that were left could not be looked for: %v", err)
			return
		}
		m.kill(ctx, sb.ID)
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// readHost reads the facts of this machine; only Local where the daemon is on
// another one.
func readHost(local bool) Host {
	if !local {
		return Host{}
	}
	h := Host{Local: true, Kernel: firstLine("/proc/sys/kernel/osrelease"), CPU: cpuModel(), CPUs: host.CPUs(), Cgroups: string(host.Cgroups())}
	if mem, err := host.ReadMemory(); err == nil {
		h.MemoryMiB = mem.Total >> 20
	}
	h.KVM = hasKVM()
	h.Load1, _ = strconv.ParseFloat(strings.SplitN(firstLine("/proc/loadavg"), " ", 2)[0], 64)
	return h
}

// hasKVM asks the device itself: KVM_GET_API_VERSION is 12 on every kernel
// since 2.6.22 (Documentation/virt/kvm/api.rst).
func hasKVM() bool {
	const getAPIVersion = 0xae00
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	v, err := unix.IoctlRetInt(int(f.Fd()), getAPIVersion)
	return err == nil && v == 12
}

func firstLine(path string) string {
	data, _ := os.ReadFile(path)
	line, _, _ := strings.Cut(string(data), "\n")
	return line
}

func cpuModel() string {
	data, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}
