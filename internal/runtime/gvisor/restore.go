package gvisor

import (
	"context"
	"debug/buildinfo"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/warrenhq/warren/internal/fault"
	"github.com/warrenhq/warren/internal/runtime/oci"
	"github.com/warrenhq/warren/internal/sandbox"
)

// The fault points of a restore.
var (
	pointPrepared = fault.Register("gvisor.capture.prepared")
	pointRestored = fault.Register("gvisor.capture.restored")
)

// captureFormat counts the changes of what Warren itself adds to a capture.
const captureFormat = "2"

// CaptureVersion implements sandbox.Restorer: the runsc, the platform and the
// architecture. A Sentry reads the state of its own build only.
func (d *Driver) CaptureVersion() string { return d.version() }

// versionOf names the build of a runsc binary: by its module's version where
// it was built from that, else by its content.
func versionOf(binary string) func() string {
	return sync.OnceValue(func() string {
		if binary == "" {
			return ""
		}
		v := ""
		if info, err := buildinfo.ReadFile(binary); err == nil {
			for _, m := range append(info.Deps, &info.Main) {
				if m.Path == "gvisor.dev/gvisor" && m.Sum != "" {
					v = m.Version
				}
			}
		}
		if v == "" {
			sum, err := digest(binary)
			if err != nil {
				return ""
			}
			v = "sha256:" + sum[:16]
		}
		return strings.Join([]string{"gvisor", v, "systrap", runtime.GOARCH, captureFormat}, " ")
	})
}

// Restore implements sandbox.Restorer.
func (d *Driver) Restore(ctx context.Context, dir string, spec sandbox.Spec) (sandbox.Instance, error) {
	if d.binary == "" {
		return nil, d.Probe(ctx)
	}
	c, err := d.readCapture(dir)
	if err != nil {
		return nil, err
	}
	p, err := d.prepare(ctx, spec, dir, c)
	if err != nil {
		return nil, err
	}
	return p.restore(ctx, dir, c, spec.Hostname)
}

// Prepare implements sandbox.Preparer: a Sentry and a gofer wait for a capture.
func (d *Driver) Prepare(ctx context.Context, spec sandbox.Spec) (sandbox.Prepared, error) {
	if d.binary == "" {
		return nil, d.Probe(ctx)
	}
	p, err := d.prepare(ctx, spec, "", nil)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// prepared is a sandbox that `runsc create` made.
type prepared struct {
	d *Driver
	i *oci.Instance
}

// prepare makes a sandbox for a capture; c of nil is one that is not yet there.
func (d *Driver) prepare(ctx context.Context, spec sandbox.Spec, dir string, c *capture) (*prepared, error) {
	i, err := d.begin(ctx, spec, func(cpus []int) (*oci.Instance, error) {
		start, err := d.start(spec, cpus, dir, c)
		if err != nil {
			return nil, err
		}
		i, err := d.eng.Prepare(ctx, start)
		if err != nil {
			return nil, err
		}
		if err := d.connect(ctx, spec); err != nil {
			i.Release()
			return nil, runError(ctx, "make the network of", spec.ID, err, "")
		}
		return i, nil
	})
	if err != nil {
		return nil, err
	}
	pointPrepared.Hit()
	return &prepared{d: d, i: i}, nil
}

// Restore implements sandbox.Prepared.
func (p *prepared) Restore(ctx context.Context, dir, hostname string) (sandbox.Instance, error) {
	spec := p.i.Spec()
	c, err := p.d.readCapture(dir)
	if err == nil {
		err = c.matches(spec)
	}
	if err != nil {
		return nil, p.discarded(ctx, err)
	}
	fits, err := p.fits(c)
	if err != nil {
		return nil, p.discarded(ctx, err)
	}
	if !fits {
		// The source is of another build of Warren.
		if err := p.Discard(ctx); err != nil {
			return nil, err
		}
		spec.Hostname = hostname
		return p.d.Restore(ctx, dir, spec)
	}
	return p.restore(ctx, dir, c, hostname)
}

// fits tells whether the capture can go on in what was prepared without having
// seen it.
func (p *prepared) fits(c *capture) (bool, error) {
	spec := p.i.Spec()
	agent, err := p.d.agentOf(spec)
	if err != nil {
		return false, err
	}
	fresh, err := readSpec(filepath.Join(p.d.eng.BundleDir(spec.ID), "config.json"))
	if err != nil {
		return false, sandbox.Errorf(sandbox.CodeInternal, "restore sandbox %s: %w", spec.ID, err)
	}
	return agent == c.Agent && c.same(fresh), nil
}

func (p *prepared) restore(ctx context.Context, dir string, c *capture, hostname string) (sandbox.Instance, error) {
	spec := p.i.Spec()
	// What the sandbox is called once it goes on.
	has := spec.Hostname
	if c.Named != "" {
		has = c.Named
	}
	if err := p.d.noteName(spec.ID, c.Named); err != nil {
		return nil, p.discarded(ctx, err)
	}
	named := make(chan error, 1)
	named <- nil
	err := p.i.Complete(ctx, p.d.binary, func(ctx context.Context) error {
		err := p.d.load(ctx, spec.ID, dir)
		if err == nil && hostname != has {
			<-named
			go func() { named <- p.d.rename(ctx, spec.ID, hostname) }() // while the agent wakes up
		}
		return err
	})
	if nameErr := <-named; err == nil {
		err = nameErr
	}
	if err != nil {
		return nil, p.discarded(ctx, err)
	}
	pointRestored.Hit()
	return &Instance{Instance: p.i, d: p.d}, nil
}

// Discard implements sandbox.Prepared.
func (p *prepared) Discard(ctx context.Context) error { return p.i.Kill(ctx) }

func (p *prepared) discarded(ctx context.Context, err error) error {
	return p.d.cleaned(ctx, p.i.Spec().ID, err)
}

// writeCaptured writes the bundle of a sandbox that goes on from a capture.
func (d *Driver) writeCaptured(id sandbox.ID, c *capture) error {
	path := filepath.Join(d.eng.BundleDir(id), "config.json")
	fresh, err := readSpec(path)
	if err != nil {
		return sandbox.Errorf(sandbox.CodeInternal, "restore sandbox %s: %w", id, err)
	}
	spec, err := c.adapt(fresh)
	if err != nil {
		return err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}
