package manager

import (
	"context"
	"crypto/subtle"
	"errors"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/volume"
)

// maxVolumes is the most volumes of one sandbox.
const maxVolumes = 16

// volumeName is E2B's form of a volume's name.
var volumeName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`)

// noVolumeAt are where nothing of a sandbox's own can be replaced.
var noVolumeAt = []string{"/proc", "/sys", "/dev", "/.warren"}

func (m *Manager) volumes() string            { return filepath.Join(m.cfg.StateDir, "volumes") }
func (m *Manager) volumeDir(id string) string { return filepath.Join(m.volumes(), id, "data") }

// startVolumes removes the directories of volumes that are not on record.
func (m *Manager) startVolumes(ctx context.Context) error {
	// Sandboxes make set-id files in them: nobody but root may come near,
	// whatever made the directory.
	if err := errors.Join(os.MkdirAll(m.volumes(), 0o700), os.Chmod(m.volumes(), 0o700)); err != nil {
		return diskError("make the volumes' directory", err)
	}
	all, err := m.store.ListVolumes(ctx, "")
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(m.volumes())
	if err != nil {
		return diskError("list the volumes' directories", err)
	}
	for _, e := range entries {
		if !slices.ContainsFunc(all, func(v store.Volume) bool { return v.ID == e.Name() }) {
			if err := os.RemoveAll(filepath.Join(m.volumes(), e.Name())); err != nil {
				m.log.WarnContext(ctx, "remove a volume that is not on record", "volume", e.Name(), "error", err)
			}
		}
	}
	return nil
}

// CreateVolume makes an empty volume. CodeExists: the tenant has one of that
// name.
func (m *Manager) CreateVolume(ctx context.Context, tenant, name string) (store.Volume, error) {
	if err := m.ready(); err != nil {
		return store.Volume{}, err
	}
	if !volumeName.MatchString(name) {
		return store.Volume{}, invalid("%q is no name for a volume: give up to 128 letters, digits, _ and -", short(name))
	}
	v := store.Volume{ID: sandbox.RandomID("vol"), Tenant: tenant, Name: name, Token: secret(), CreatedAt: m.now()}
	// The directory first: what is on record is there. One without a record is
	// removed by the next daemon.
	if err := os.MkdirAll(m.volumeDir(v.ID), 0o755); err != nil {
		return v, diskError("make the volume", err)
	}
	err := os.Chmod(m.volumeDir(v.ID), 0o777) // as the sandboxes' users are to write to it
	if err == nil {
		err = m.store.InsertVolume(ctx, v)
	}
	if err != nil {
		return v, errors.Join(err, os.RemoveAll(filepath.Dir(m.volumeDir(v.ID))))
	}
	return v, nil
}

// Volumes lists a tenant's volumes, by name.
func (m *Manager) Volumes(ctx context.Context, tenant string) ([]store.Volume, error) {
	return m.store.ListVolumes(ctx, tenant)
}

// Volume gives a tenant's volume by ID or name.
func (m *Manager) Volume(ctx context.Context, tenant, idOrName string) (store.Volume, error) {
	if v, err := m.store.GetVolume(ctx, idOrName); err == nil && v.Tenant == tenant {
		return v, nil
	}
	return m.store.VolumeNamed(ctx, tenant, idOrName)
}

// VolumeContent opens a volume's content, whoever's it is, for whom has its
// token; the caller closes it.
func (m *Manager) VolumeContent(ctx context.Context, id, token string) (*volume.Dir, error) {
	v, err := m.store.GetVolume(ctx, id)
	if sandbox.CodeOf(err) == sandbox.CodeNotFound || err == nil && subtle.ConstantTimeCompare([]byte(token), []byte(v.Token)) != 1 {
		return nil, sandbox.Errorf(sandbox.CodeUnauthenticated, "there is no such volume, or this is not its token")
	}
	if err != nil {
		return nil, err
	}
	return volume.Open(m.volumeDir(v.ID))
}

// RemoveVolume removes a volume and all that is in it. CodeConflict: a live
// sandbox has it.
func (m *Manager) RemoveVolume(ctx context.Context, tenant, idOrName string) error {
	m.tasks.begin()
	defer m.tasks.end()
	if err := m.ready(); err != nil {
		return err
	}
	v, err := m.Volume(ctx, tenant, idOrName)
	if err != nil {
		return err
	}
	if err := m.volumeFree(v); err != nil {
		return err
	}
	if err := m.store.DeleteVolume(ctx, v.ID); err != nil {
		return err
	}
	// A create that came between is seen now, or does not find it any more.
	if err := m.volumeFree(v); err != nil {
		return errors.Join(err, m.store.InsertVolume(context.WithoutCancel(ctx), v))
	}
	if err := os.RemoveAll(filepath.Dir(m.volumeDir(v.ID))); err != nil {
		return diskError("remove the volume; the next daemon does", err)
	}
	return nil
}

// volumeFree is CodeConflict where a live sandbox has v.
func (m *Manager) volumeFree(v store.Volume) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, l := range m.live {
		if slices.ContainsFunc(l.record().Volumes, func(o sandbox.VolumeMount) bool { return o.ID == v.ID }) {
			return sandbox.Errorf(sandbox.CodeConflict, "volume %q is mounted in sandbox %s: end it first", v.Name, id)
		}
	}
	return nil
}

// resolveVolumes checks what a create asks for and finds the volumes.
func (m *Manager) resolveVolumes(ctx context.Context, tenant string, asked []sandbox.VolumeMount) ([]sandbox.VolumeMount, error) {
	if len(asked) > maxVolumes {
		return nil, invalid("%d volumes: at most %d", len(asked), maxVolumes)
	}
	var out []sandbox.VolumeMount
	for _, a := range asked {
		if !path.IsAbs(a.Path) || path.Clean(a.Path) != a.Path || a.Path == "/" || len(a.Path) > maxWorkdir || !clean(a.Path) {
			return nil, invalid("a volume at %q: give an absolute path without . and .. in it", short(a.Path))
		}
		for _, no := range noVolumeAt {
			if a.Path == no || strings.HasPrefix(a.Path, no+"/") {
				return nil, invalid("no volume can be at %s: choose a path outside of %s", short(a.Path), no)
			}
		}
		for _, o := range out {
			if a.Path == o.Path || strings.HasPrefix(a.Path, o.Path+"/") || strings.HasPrefix(o.Path, a.Path+"/") {
				return nil, invalid("the volumes at %s and %s lie in each other", short(o.Path), short(a.Path))
			}
		}
		by := a.ID
		if by == "" {
			by = a.Name
		}
		v, err := m.Volume(ctx, tenant, by)
		if err != nil {
			return nil, err
		}
		a.ID, a.Name = v.ID, v.Name
		out = append(out, a)
	}
	return out, nil
}

// volumesThere tells whether none of them was removed.
func (m *Manager) volumesThere(ctx context.Context, mounts []sandbox.VolumeMount) error {
	for _, v := range mounts {
		if _, err := m.store.GetVolume(ctx, v.ID); err != nil {
			return describe(err, "volume "+v.Name)
		}
	}
	return nil
}

// mounts is what a runtime is told of them.
func (m *Manager) mounts(in []sandbox.VolumeMount) []sandbox.Volume {
	var out []sandbox.Volume
	for _, v := range in {
		out = append(out, sandbox.Volume{Source: m.volumeDir(v.ID), Path: v.Path, ReadOnly: v.ReadOnly})
	}
	return out
}
