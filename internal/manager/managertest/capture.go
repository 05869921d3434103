package managertest

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"

	"github.com/warrenhq/warren/internal/agent/control"
	"github.com/warrenhq/warren/internal/sandbox"
)

var (
	_ sandbox.Suspender    = (*instance)(nil)
	_ sandbox.DiskCapturer = (*instance)(nil)
	_ sandbox.Restorer     = (*MemoryRuntime)(nil)
	_ sandbox.Preparer     = (*MemoryRuntime)(nil)
	_ sandbox.Checkpointer = (*memoryInstance)(nil)
)

// MemoryRuntime is a Runtime whose sandboxes' memory can be captured.
type MemoryRuntime struct {
	*Runtime
	// Version is CaptureVersion.
	Version string
	// Hooks; nil does nothing.
	OnCheckpoint func(ctx context.Context, id sandbox.ID) error
	OnRestore    func(ctx context.Context, spec sandbox.Spec) error
	OnPrepare    func(ctx context.Context, spec sandbox.Spec) error
}

// NewMemoryRuntime makes an empty one.
func NewMemoryRuntime(name string) *MemoryRuntime {
	r := &MemoryRuntime{Runtime: NewRuntime(name), Version: "1"}
	r.caps.FullCapture, r.caps.Suspend = true, true
	return r
}

// image is the file of a capture.
type image struct {
	Memory, Disk, Token string
	Frozen              bool
}

const (
	imageName = "memory.img"
	diskName  = "disk"
)

// Create implements sandbox.Runtime.
func (r *MemoryRuntime) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	i, err := r.Runtime.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &memoryInstance{i.(*instance), r}, nil
}

// Adopt implements sandbox.Runtime.
func (r *MemoryRuntime) Adopt(ctx context.Context, spec sandbox.Spec) (sandbox.Instance, error) {
	i, err := r.Runtime.Adopt(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &memoryInstance{i.(*instance), r}, nil
}

// CaptureVersion implements sandbox.Restorer.
func (r *MemoryRuntime) CaptureVersion() string { return r.Version }

// Restore implements sandbox.Restorer.
func (r *MemoryRuntime) Restore(ctx context.Context, dir string, spec sandbox.Spec) (sandbox.Instance, error) {
	if r.OnRestore != nil {
		if err := r.OnRestore(ctx, spec); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(filepath.Join(dir, imageName))
	if err != nil {
		return nil, err
	}
	var img image
	if err := json.Unmarshal(data, &img); err != nil {
		return nil, err
	}
	i, err := r.enter(&Box{Spec: spec, memory: img.Memory, disk: img.Disk, token: img.Token, frozen: img.Frozen})
	if err != nil {
		return nil, err
	}
	return &memoryInstance{i, r}, nil
}

// Prepare implements sandbox.Preparer.
func (r *MemoryRuntime) Prepare(ctx context.Context, spec sandbox.Spec) (sandbox.Prepared, error) {
	if r.OnPrepare != nil {
		if err := r.OnPrepare(ctx, spec); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.ready[spec.ID] = true
	r.mu.Unlock()
	return &prepared{r, spec}, nil
}

// Ready gives the sandboxes that are prepared and have nothing that runs.
func (r *Runtime) Ready() []sandbox.ID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.ready))
}

type prepared struct {
	r    *MemoryRuntime
	spec sandbox.Spec
}

// Restore implements sandbox.Prepared.
func (p *prepared) Restore(ctx context.Context, dir, hostname string) (sandbox.Instance, error) {
	p.r.mu.Lock()
	there := p.r.ready[p.spec.ID]
	delete(p.r.ready, p.spec.ID)
	p.r.mu.Unlock()
	if !there {
		return nil, sandbox.Errorf(sandbox.CodeUnavailable, "box %s is not prepared any more", p.spec.ID)
	}
	spec := p.spec
	spec.Hostname = hostname
	return p.r.Restore(ctx, dir, spec)
}

// Discard implements sandbox.Prepared.
func (p *prepared) Discard(ctx context.Context) error { return p.r.Clean(ctx, p.spec.ID) }

type memoryInstance struct {
	*instance
	of *MemoryRuntime
}

// Checkpoint implements sandbox.Checkpointer.
func (i *memoryInstance) Checkpoint(ctx context.Context, dir string, o sandbox.CheckpointOptions) error {
	if i.of.OnCheckpoint != nil {
		if err := i.of.OnCheckpoint(ctx, i.Spec.ID); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	i.mu.Lock()
	img := image{Memory: i.memory, Disk: i.disk, Token: i.token, Frozen: i.frozen}
	ended := i.ended()
	i.mu.Unlock()
	if ended {
		return sandbox.Errorf(sandbox.CodeUnavailable, "box %s has ended", i.Spec.ID)
	}
	if err := writeJSON(dir, imageName, img); err != nil {
		return err
	}
	if !o.LeaveRunning {
		i.Crash(sandbox.ReasonRuntimeCrashed, "captured")
	}
	return nil
}

// CaptureDisk implements sandbox.DiskCapturer.
func (i *instance) CaptureDisk(ctx context.Context, dir string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	i.mu.Lock()
	disk := i.disk
	i.mu.Unlock()
	return writeJSON(dir, diskName, disk)
}

func writeJSON(dir, name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), data, 0o600)
}

// readLayers takes the disk that the topmost captured layer has.
func (b *Box) readLayers() {
	for _, l := range b.Spec.Layers {
		if data, err := os.ReadFile(filepath.Join(l, diskName)); err == nil {
			json.Unmarshal(data, &b.disk)
			return
		}
	}
}

// Suspend implements sandbox.Suspender.
func (i *instance) Suspend(context.Context) error { i.setSuspended(true); return nil }

// Unsuspend implements sandbox.Suspender.
func (i *instance) Unsuspend(context.Context) error { i.setSuspended(false); return nil }

func (b *Box) setSuspended(s bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.suspended = s
}

// Write changes memory and disk, as a command inside would; false: all
// commands are stopped.
func (b *Box) Write(value string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.frozen || b.suspended || b.ended() {
		return false
	}
	b.memory, b.disk = value, value
	return true
}

// Holds gives what is in memory and on the disk.
func (b *Box) Holds() (memory, disk string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.memory, b.disk
}

// Stopped tells whether no command inside can run.
func (b *Box) Stopped() (frozen, suspended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.frozen, b.suspended
}

// capture answers the agent's calls around captures.
func (b *Box) capture(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.token != "" && r.Header.Get(control.TokenHeader) != b.token {
		http.Error(w, `{"code":401,"message":"another token"}`, http.StatusUnauthorized)
		return
	}
	switch r.URL.Path {
	case control.PathFreeze:
		b.frozen = true
	case control.PathThaw:
		b.frozen = false
	case control.PathRestore:
		var req control.RestoredRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		b.Restores = append(b.Restores, req)
		b.token, b.frozen = req.AccessToken, false
	}
	w.WriteHeader(http.StatusNoContent)
}

// Freeze stops all commands, as a daemon leaves them that ends in the middle of
// a capture.
func (b *Box) Freeze() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.frozen = true
}
