package e2b

import (
	"context"
	"net/http"
	"time"

	"github.com/warrenhq/warren/internal/manager"
	"github.com/warrenhq/warren/internal/sandbox"
)

func (f *facade) registerLives() {
	f.add("DELETE /sandboxes/{id}", f.kill)
	f.add("POST /sandboxes/{id}/connect", f.connect)
	f.add("POST /v2/sandboxes/{id}/connect", f.connect)
	f.add("POST /sandboxes/{id}/resume", f.resume)
	f.add("POST /sandboxes/{id}/timeout", f.setTimeout)
	f.add("POST /sandboxes/{id}/refreshes", f.refresh)
	f.add("POST /sandboxes/{id}/pause", f.pause)
	f.add("POST /sandboxes/{id}/fork", f.fork)
}

func (f *facade) kill(w http.ResponseWriter, r *http.Request, tenant string) error {
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	if err := f.Back.Kill(r.Context(), tenant, sb.ID); err != nil {
		return err
	}
	f.Ended(sb.ID)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

type connectRequest struct {
	Timeout *int  `json:"timeout"` // seconds
	Memory  *bool `json:"memory"`  // false: boot instead of restoring
}

func asleep(sb sandbox.Sandbox) bool {
	return sb.State == sandbox.Hibernated || sb.State == sandbox.Suspended
}

// connect gives a client what it needs to speak to a sandbox, and wakes it
// (201, else 200). Of one that runs the time to live is only ever made longer.
func (f *facade) connect(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in connectRequest
	if err := readJSON(r, &in); err != nil {
		return err
	}
	d, err := lifetime(in.Timeout, defaultTimeout)
	if err != nil {
		return err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if asleep(sb) {
		status = http.StatusCreated
		if sb, err = f.wake(r.Context(), tenant, sb, d); err != nil {
			return err
		}
		if in.Memory != nil && !*in.Memory {
			// Of a pause with memory the disk alone cannot be read: it boots
			// from the disk that it has when it is awake. One that kept none
			// boots once more.
			if err := f.Back.Hibernate(r.Context(), tenant, sb.ID, sandbox.SnapshotDisk); err != nil {
				return err
			}
			if err := f.Back.Wake(r.Context(), tenant, sb.ID); err != nil {
				return err
			}
		}
	} else if !sb.ExpiresAt.IsZero() && sb.ExpiresAt.Before(time.Now().Add(d)) {
		if sb, err = f.Back.SetTimeout(r.Context(), tenant, sb.ID, d); err != nil {
			return err
		}
	}
	return writeJSON(w, status, f.toMade(r, sb))
}

// wake lets a sandbox that is asleep go on, for d from now.
func (f *facade) wake(ctx context.Context, tenant string, sb sandbox.Sandbox, d time.Duration) (sandbox.Sandbox, error) {
	if sb.State == sandbox.Hibernated && sb.OnTimeout == sandbox.OnTimeoutHibernate {
		// Its time begins when it wakes: what was left of it might be nothing.
		if _, err := f.Back.SetTimeout(ctx, tenant, sb.ID, d); err != nil {
			return sb, err
		}
	}
	wake := f.Back.Wake
	if sb.State == sandbox.Suspended {
		wake = f.Back.Unsuspend
	}
	if err := wake(ctx, tenant, sb.ID); err != nil {
		return sb, err
	}
	return f.Back.SetTimeout(ctx, tenant, sb.ID, d)
}

// resume is connect's elder: one that runs is a conflict.
func (f *facade) resume(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in connectRequest
	if err := readJSON(r, &in); err != nil {
		return err
	}
	d, err := lifetime(in.Timeout, defaultTimeoutV1)
	if err != nil {
		return err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	if !asleep(sb) {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s runs already", sb.ID)
	}
	if sb, err = f.wake(r.Context(), tenant, sb, d); err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, f.toMade(r, sb))
}

func (f *facade) setTimeout(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Timeout *int `json:"timeout"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	if in.Timeout == nil {
		return sandbox.Errorf(sandbox.CodeInvalid, "timeout is missing: give seconds")
	}
	return f.live(w, r, tenant, in.Timeout, false)
}

// refresh makes the time to live longer, never shorter.
func (f *facade) refresh(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Duration *int `json:"duration"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	return f.live(w, r, tenant, in.Duration, true)
}

func (f *facade) live(w http.ResponseWriter, r *http.Request, tenant string, seconds *int, longer bool) error {
	d, err := lifetime(seconds, defaultTimeoutV1)
	if err != nil {
		return err
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	if !longer || !sb.ExpiresAt.IsZero() && sb.ExpiresAt.Before(time.Now().Add(d)) {
		if _, err := f.Back.SetTimeout(r.Context(), tenant, sb.ID, d); err != nil {
			return err
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// pause hibernates. A paused sandbox of E2B's has no time to live: it stays
// until it is resumed or killed, whatever is to happen at its timeout.
func (f *facade) pause(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Memory *bool `json:"memory"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	kind := sandbox.SnapshotFull
	if in.Memory != nil && !*in.Memory {
		kind = sandbox.SnapshotDisk
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	if sb.State == sandbox.Hibernated {
		return sandbox.Errorf(sandbox.CodeConflict, "sandbox %s is paused already", sb.ID)
	}
	ends := sb.OnTimeout != sandbox.OnTimeoutHibernate && !sb.ExpiresAt.IsZero()
	if ends {
		// Before, so that it cannot end in its sleep.
		if _, err := f.Back.SetTimeout(r.Context(), tenant, sb.ID, 0); err != nil {
			return err
		}
	}
	if err := f.Back.Hibernate(r.Context(), tenant, sb.ID, kind); err != nil {
		if ends {
			f.Back.SetTimeout(context.WithoutCancel(r.Context()), tenant, sb.ID, max(time.Until(sb.ExpiresAt), time.Millisecond)) // err tells more
		}
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (f *facade) fork(w http.ResponseWriter, r *http.Request, tenant string) error {
	var in struct {
		Timeout *int `json:"timeout"`
		Count   *int `json:"count"`
	}
	if err := readJSON(r, &in); err != nil {
		return err
	}
	d, err := lifetime(in.Timeout, defaultTimeoutV1)
	if err != nil {
		return err
	}
	count := 1
	if in.Count != nil {
		count = *in.Count
	}
	if count < 1 || count > 100 {
		return sandbox.Errorf(sandbox.CodeInvalid, "count is %d: give 1 to 100", count)
	}
	sb, err := f.find(r, tenant)
	if err != nil {
		return err
	}
	results, err := f.Back.Fork(r.Context(), tenant, sb.ID, manager.ForkRequest{Count: count, Timeout: d})
	if err != nil {
		return err
	}
	type result struct {
		Sandbox *made  `json:"sandbox,omitempty"`
		Error   *Error `json:"error,omitempty"`
	}
	out := make([]result, len(results))
	for i, one := range results {
		if one.Err != nil {
			out[i].Error = &Error{http.StatusInternalServerError, one.Err.Message, one.Err.Code}
			continue
		}
		m := f.toMade(r, one.Sandbox)
		out[i].Sandbox = &m
	}
	return writeJSON(w, http.StatusCreated, out)
}
