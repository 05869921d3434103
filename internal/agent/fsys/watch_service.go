package fsys

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/proto/filesystem"
)

// maxPolled is how many watchers without a stream there may be: nobody but
// RemoveWatcher ends them.
const maxPolled = 256

// network holds the filesystems on which inotify does not see what other hosts
// do, by their magic numbers (linux/magic.h). 9P is not among them: it is the
// root of some gVisor sandboxes, and nobody else's.
var network = map[int64]string{0x6969: "NFS", 0xFF534D42: "CIFS", 0x517B: "SMB", 0xFE534D42: "SMB2", 0x65735546: "FUSE"}

// watch checks and begins a watch.
func (s *Service) watch(req connect.AnyRequest, path string, recursive, allowNetwork bool) (*Watcher, error) {
	path, _, err := s.path(req, path)
	if err != nil {
		return nil, err
	}
	root, err := directory(path)
	if err != nil {
		return nil, err
	}
	if !allowNetwork {
		var st unix.Statfs_t
		if err := unix.Statfs(root, &st); err != nil {
			return nil, rpcError("watch", err)
		}
		if name, ok := network[int64(uint32(st.Type))]; ok {
			return nil, invalid("cannot watch path on network filesystem (%s): %s: changes by other hosts are not seen; allow_network_mounts watches it nevertheless", name, path)
		}
	}
	w, err := s.watches.Watch(root, recursive)
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EMFILE):
		return nil, connect.NewError(connect.CodeResourceExhausted, err)
	case err != nil:
		return nil, rpcError("watch", err)
	}
	w.shown = path
	return w, nil
}

// message makes the interface's event.
func (s *Service) message(w *Watcher, e Event, withEntry bool) *filesystem.FilesystemEvent {
	m := &filesystem.FilesystemEvent{Name: valid(e.Name), Type: e.Type}
	if withEntry {
		// Without an entry where it is gone already.
		if entry, err := Entry(s.session.Users, filepath.Join(w.shown, e.Name)); err == nil {
			m.Entry = entry
		}
	}
	return m
}

func lost(w *Watcher, err error) error {
	return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%w (in %s): look at the directory anew", err, w.shown))
}

// WatchDir streams changes. If more come than the client takes the stream ends
// with resource_exhausted.
func (s *Service) WatchDir(ctx context.Context, req *connect.Request[filesystem.WatchDirRequest], stream *connect.ServerStream[filesystem.WatchDirResponse]) error {
	w, err := s.watch(req, req.Msg.GetPath(), req.Msg.GetRecursive(), req.Msg.GetAllowNetworkMounts())
	if err != nil {
		return err
	}
	defer w.Close()
	if err := stream.Send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Start{Start: &filesystem.WatchDirResponse_StartEvent{}}}); err != nil {
		return err
	}
	every := session.Keepalive(req.Header())
	quiet := time.NewTicker(every)
	defer quiet.Stop()
	for {
		events, err := w.Next(ctx, quiet.C)
		switch {
		case errors.Is(err, ErrLost):
			return lost(w, err)
		case errors.Is(err, context.DeadlineExceeded):
			return connect.NewError(connect.CodeDeadlineExceeded, err)
		case err != nil:
			return connect.NewError(connect.CodeCanceled, err)
		}
		if len(events) == 0 {
			if err := stream.Send(&filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Keepalive{Keepalive: &filesystem.WatchDirResponse_KeepAlive{}}}); err != nil {
				return err
			}
			continue
		}
		for _, e := range events {
			msg := &filesystem.WatchDirResponse{Event: &filesystem.WatchDirResponse_Filesystem{Filesystem: s.message(w, e, req.Msg.GetIncludeEntry())}}
			if err := stream.Send(msg); err != nil {
				return err
			}
		}
		quiet.Reset(every)
	}
}

// polled is the watchers of CreateWatcher.
type polled struct {
	mu       sync.Mutex
	watchers map[string]*Watcher
}

func (p *polled) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, w := range p.watchers {
		w.Close()
		delete(p.watchers, id)
	}
}

func (p *polled) get(id string) (*Watcher, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w := p.watchers[id]; w != nil {
		return w, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("watcher with id %.64q not found", id))
}

// CreateWatcher begins a watch whose events GetWatcherEvents takes.
func (s *Service) CreateWatcher(ctx context.Context, req *connect.Request[filesystem.CreateWatcherRequest]) (*connect.Response[filesystem.CreateWatcherResponse], error) {
	w, err := s.watch(req, req.Msg.GetPath(), req.Msg.GetRecursive(), req.Msg.GetAllowNetworkMounts())
	if err != nil {
		return nil, err
	}
	w.withEntry = req.Msg.GetIncludeEntry()
	id := "w" + rand.Text()
	s.polled.mu.Lock()
	full := len(s.polled.watchers) >= maxPolled
	if !full {
		s.polled.watchers[id] = w
	}
	s.polled.mu.Unlock()
	if full {
		w.Close()
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("there are %d watchers already: remove those that are not used any more", maxPolled))
	}
	return connect.NewResponse(&filesystem.CreateWatcherResponse{WatcherId: id}), nil
}

// GetWatcherEvents takes what came since the last call. Where more came than
// the watcher could hold, the call after the last event that it held fails
// once with resource_exhausted.
func (s *Service) GetWatcherEvents(ctx context.Context, req *connect.Request[filesystem.GetWatcherEventsRequest]) (*connect.Response[filesystem.GetWatcherEventsResponse], error) {
	w, err := s.polled.get(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	w.Sync()
	events, err := w.Take()
	if errors.Is(err, ErrLost) {
		return nil, lost(w, err)
	}
	if err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	resp := &filesystem.GetWatcherEventsResponse{}
	for _, e := range events {
		resp.Events = append(resp.Events, s.message(w, e, w.withEntry))
	}
	return connect.NewResponse(resp), nil
}

// RemoveWatcher ends a watch.
func (s *Service) RemoveWatcher(ctx context.Context, req *connect.Request[filesystem.RemoveWatcherRequest]) (*connect.Response[filesystem.RemoveWatcherResponse], error) {
	w, err := s.polled.get(req.Msg.GetWatcherId())
	if err != nil {
		return nil, err
	}
	s.polled.mu.Lock()
	delete(s.polled.watchers, req.Msg.GetWatcherId())
	s.polled.mu.Unlock()
	w.Close()
	return connect.NewResponse(&filesystem.RemoveWatcherResponse{}), nil
}
