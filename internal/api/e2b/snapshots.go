package e2b

import (
	"net/http"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template"
)

// Snapshots are removed as templates are: see removeTemplate.
func (f *facade) registerSnapshots() {
	f.add("POST /sandboxes/{id}/snapshots", f.createSnapshot)
	f.add("GET /snapshots", f.listSnapshots)
}

type snapshotInfo struct {
	SnapshotID string   `json:"snapshotID"`
	Names      []string `json:"names"`
}

func toSnapshot(n sandbox.Snapshot) snapshotInfo {
	s := snapshotInfo{SnapshotID: n.ID, Names: []string{}}
	if n.Name != "" {
		s.Names = append(s.Names, n.Name)
	}
	return s
}

func (f *facade) createSnapshot(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Name string `json:"name"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	n, err := f.Back.Snapshot(r.Context(), tenant, sb.ID, manager.SnapshotRequest{Name: in.Name})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, toSnapshot(n))
}

func (f *facade) listSnapshots(w http.ResponseWriter, r *http.Request, tenant string) error {
	q := r.URL.Query()
	filter := manager.SnapshotFilter{Name: q.Get("name"), Token: q.Get("nextToken")}
	if name, tag := template.SplitTag(filter.Name); tag == template.DefaultTag {
		filter.Name = name
	}
	var err error
	if filter.Limit, err = pageLimit(r); err != nil {
		return err
	}
	if s := q.Get("sandboxID"); s != "" {
		// One that has ended has snapshots still; one that never was has none.
		if filter.Source, err = sandbox.ParseID(s); err != nil {
			return writeJSON(w, http.StatusOK, []snapshotInfo{})
		}
	}
	page, next, err := f.Back.Snapshots(r.Context(), tenant, filter)
	if err != nil {
		return err
	}
	out := make([]snapshotInfo, 0, len(page))
	for _, n := range page {
		out = append(out, toSnapshot(n))
	}
	setNext(w, next)
	return writeJSON(w, http.StatusOK, out)
}
