package fsys

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"

	"github.com/warrenhq/warren/internal/agent/session"
	"github.com/warrenhq/warren/internal/agent/users"
	"github.com/warrenhq/warren/proto/filesystem"
	"github.com/warrenhq/warren/proto/filesystem/filesystemconnect"
)

// maxEntries is how many entries one listing gives.
const maxEntries = 100_000

// Service is the filesystem service.
type Service struct {
	session *session.State
	watches *Watches
	polled  polled
}

var _ filesystemconnect.FilesystemHandler = (*Service)(nil)

// NewService makes the service. Close ends its watches.
func NewService(s *session.State) *Service {
	return &Service{session: s, watches: &Watches{}, polled: polled{watchers: map[string]*Watcher{}}}
}

// Close ends all watches.
func (s *Service) Close() {
	s.polled.close()
	s.watches.Close()
}

// Watchers is how many watches are open.
func (s *Service) Watchers() int { return s.watches.count() }

func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// path finds the user of a call and resolves its path.
func (s *Service) path(req connect.AnyRequest, path string) (string, users.User, error) {
	u, err := s.session.RPCUser(req.Header())
	if err != nil {
		return "", u, err
	}
	if path == "" { // the default directory, as the interface has it
		if path = s.session.Workdir(); path == "" {
			path = u.Home
		}
	}
	abs, err := users.Resolve(path, u)
	if err != nil {
		return "", u, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return abs, u, nil
}

// Stat describes a path.
func (s *Service) Stat(ctx context.Context, req *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	path, _, err := s.path(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := Entry(s.session.Users, path)
	if err != nil {
		return nil, rpcError("file not found or not readable", err)
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: e}), nil
}

// MakeDir makes a directory and its parents.
func (s *Service) MakeDir(ctx context.Context, req *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	path, u, err := s.path(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	switch st, err := os.Stat(path); {
	case err == nil && st.IsDir():
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
	case err == nil:
		return nil, invalid("path already exists but it is not a directory: %s", path)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, rpcError("make the directory", err)
	}
	if err := EnsureDirs(path, u.UID, u.GID); err != nil {
		return nil, rpcError("make the directory", err)
	}
	e, err := Entry(s.session.Users, path)
	if err != nil {
		return nil, rpcError("make the directory", err)
	}
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: e}), nil
}

// Move renames a file or directory, making the destination's parents. A file
// at the destination is replaced.
func (s *Service) Move(ctx context.Context, req *connect.Request[filesystem.MoveRequest]) (*connect.Response[filesystem.MoveResponse], error) {
	src, u, err := s.path(req, req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	if req.Msg.GetSource() == "" || req.Msg.GetDestination() == "" {
		return nil, invalid("a move needs a source and a destination")
	}
	dst, err := users.Resolve(req.Msg.GetDestination(), u)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if _, err := os.Lstat(src); err != nil {
		return nil, rpcError("source file not found or not readable", err)
	}
	if err := EnsureDirs(filepath.Dir(dst), u.UID, u.GID); err != nil {
		return nil, rpcError("make the destination's directory", err)
	}
	if err := move(src, dst); err != nil {
		return nil, rpcError("move", err)
	}
	e, err := Entry(s.session.Users, dst)
	if err != nil {
		return nil, rpcError("move", err)
	}
	return connect.NewResponse(&filesystem.MoveResponse{Entry: e}), nil
}

// Remove removes a file, or a directory with all in it. One that is not there
// is no error.
func (s *Service) Remove(ctx context.Context, req *connect.Request[filesystem.RemoveRequest]) (*connect.Response[filesystem.RemoveResponse], error) {
	if req.Msg.GetPath() == "" {
		return nil, invalid("the path is empty")
	}
	path, _, err := s.path(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, invalid("the root directory cannot be removed")
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, rpcError("remove", err)
	}
	return connect.NewResponse(&filesystem.RemoveResponse{}), nil
}

// ListDir lists a directory, depth levels of it, in lexical order, each
// directory before what is in it. Symbolic links are not followed, but path
// may be one.
func (s *Service) ListDir(ctx context.Context, req *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	path, _, err := s.path(req, req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	depth := int(min(req.Msg.GetDepth(), math.MaxInt32))
	if depth == 0 {
		depth = 1
	}
	root, err := directory(path)
	if err != nil {
		return nil, err
	}
	resp := &filesystem.ListDirResponse{}
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if p != root && errors.Is(err, fs.ErrNotExist) {
				return nil // gone meanwhile
			}
			return err
		}
		if p == root {
			return nil
		}
		rel := strings.TrimPrefix(strings.TrimPrefix(p, root), "/")
		st, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if strings.HasPrefix(d.Name(), UploadPrefix) {
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		if len(resp.Entries) == maxEntries {
			return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%s has more than %d entries at depth %d: list less of it, or run find in the sandbox", path, maxEntries, depth))
		}
		resp.Entries = append(resp.Entries, entry(s.session.Users, filepath.Join(path, rel), st))
		if d.IsDir() && strings.Count(rel, "/")+1 >= depth {
			return filepath.SkipDir
		}
		return nil
	})
	if err != nil {
		var ce *connect.Error
		if errors.As(err, &ce) {
			return nil, ce
		}
		return nil, rpcError("list the directory", err)
	}
	return connect.NewResponse(resp), nil
}

// directory checks that path is a directory, and follows the links to it.
func directory(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", rpcError(fmt.Sprintf("path %s not found", path), err)
	}
	if !st.IsDir() {
		return "", invalid("path is not a directory: %s", path)
	}
	root, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", rpcError(fmt.Sprintf("path %s not found", path), err)
	}
	return root, nil
}
