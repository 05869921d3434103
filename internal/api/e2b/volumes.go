package e2b

import (
	"context"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/volume"
)

// VolumesBackend is what the routes of volumes need.
type VolumesBackend interface {
	CreateVolume(ctx context.Context, tenant, name string) (store.Volume, error)
	Volumes(ctx context.Context, tenant string) ([]store.Volume, error)
	Volume(ctx context.Context, tenant, idOrName string) (store.Volume, error)
	RemoveVolume(ctx context.Context, tenant, idOrName string) error
	VolumeContent(ctx context.Context, id, token string) (*volume.Dir, error)
}

var _ VolumesBackend = (*manager.Manager)(nil)

// contentPath begins the paths of volumes' content, which a volume's own token
// opens.
const contentPath = "/volumecontent/"

// OwnToken tells of a path whose requests carry a token of their own and need
// no API key.
func OwnToken(path string) bool {
	return strings.HasPrefix(path, UploadPath) || strings.HasPrefix(path, contentPath)
}

func (f *facade) registerVolumes() {
	f.add("POST /volumes", f.createVolume)
	f.add("GET /volumes", f.listVolumes)
	f.add("GET /volumes/{id}", f.getVolume)
	f.add("DELETE /volumes/{id}", f.removeVolume)
	f.content("GET", "dir", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		depth, err := number(r, "depth", 1, 1000)
		if err != nil {
			return err
		}
		list, err := d.List(r.Context(), r.URL.Query().Get("path"), depth)
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, list)
	})
	f.content("POST", "dir", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		a, force, err := attributes(r)
		if err != nil {
			return err
		}
		return entry(w, http.StatusCreated)(d.MakeDir(r.URL.Query().Get("path"), a, force))
	})
	f.content("GET", "path", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		return entry(w, http.StatusOK)(d.Stat(r.URL.Query().Get("path")))
	})
	f.content("PATCH", "path", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		f.TimeBody(w, r, false)
		var in struct {
			UID  *uint32 `json:"uid"`
			GID  *uint32 `json:"gid"`
			Mode *uint32 `json:"mode"`
		}
		if err := readJSON(r, &in); err != nil {
			return err
		}
		return entry(w, http.StatusOK)(d.Set(r.URL.Query().Get("path"), volume.Attributes(in)))
	})
	f.content("DELETE", "path", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		if err := d.Remove(r.URL.Query().Get("path")); err != nil {
			return err
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})
	f.content("GET", "file", readVolume)
	f.content("PUT", "file", func(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
		f.TimeBody(w, r, true)
		a, force, err := attributes(r)
		if err != nil {
			return err
		}
		return entry(w, http.StatusCreated)(d.Write(r.URL.Query().Get("path"), r.Body, a, force))
	})
}

// content adds a route of a volume's content, for whom shows the volume's
// token.
func (f *facade) content(method, what string, h func(http.ResponseWriter, *http.Request, *volume.Dir) error) {
	f.mux.HandleFunc(method+" "+contentPath+"{id}/"+what, func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") {
			token = "" // no volume's
		}
		d, err := f.Back.VolumeContent(r.Context(), r.PathValue("id"), token)
		if err == nil {
			err = h(w, r, d)
			d.Close()
		}
		if err != nil {
			f.Fail(w, r, err)
		}
	})
}

func entry(w http.ResponseWriter, status int) func(volume.Entry, error) error {
	return func(e volume.Entry, err error) error {
		if err != nil {
			return err
		}
		return writeJSON(w, status, e)
	}
}

func readVolume(w http.ResponseWriter, r *http.Request, d *volume.Dir) error {
	file, size, err := d.Read(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	defer file.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.FormatInt(size, 10))
	w.WriteHeader(http.StatusOK)
	if _, err := io.CopyN(w, file, size); err != nil {
		panic(http.ErrAbortHandler) // it was cut short, or nobody reads any more: the answer must not look whole
	}
	return nil
}

// attributes reads what a new entry is to be.
func attributes(r *http.Request) (a volume.Attributes, force bool, err error) {
	q := r.URL.Query()
	for _, o := range []struct {
		name string
		to   **uint32
	}{{"uid", &a.UID}, {"gid", &a.GID}, {"mode", &a.Mode}} {
		s := q.Get(o.name)
		if s == "" {
			continue
		}
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return a, false, sandbox.Errorf(sandbox.CodeInvalid, "%s is not a number of 32 bits", o.name)
		}
		v := uint32(n)
		*o.to = &v
	}
	if s := q.Get("force"); s != "" {
		if force, err = strconv.ParseBool(s); err != nil {
			return a, false, sandbox.Errorf(sandbox.CodeInvalid, "force is neither true nor false")
		}
	}
	return a, force, nil
}

func toVolume(v store.Volume) map[string]any {
	return map[string]any{"volumeID": v.ID, "name": v.Name, "token": v.Token}
}

func (f *facade) createVolume(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Name string `json:"name"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	v, err := f.Back.CreateVolume(r.Context(), tenant, in.Name)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, toVolume(v))
}

func (f *facade) listVolumes(w http.ResponseWriter, r *http.Request, tenant string) error {
	all, err := f.Back.Volumes(r.Context(), tenant)
	if err != nil {
		return err
	}
	out := make([]map[string]any, 0, len(all))
	for _, v := range all {
		out = append(out, map[string]any{"volumeID": v.ID, "name": v.Name})
	}
	return writeJSON(w, http.StatusOK, out)
}

func (f *facade) getVolume(w http.ResponseWriter, r *http.Request, tenant string) error {
	v, err := f.Back.Volume(r.Context(), tenant, r.PathValue("id"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, toVolume(v))
}

func (f *facade) removeVolume(w http.ResponseWriter, r *http.Request, tenant string) error {
	if err := f.Back.RemoveVolume(r.Context(), tenant, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
