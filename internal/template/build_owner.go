package template

import (
	"bytes"
	"strconv"
	"strings"

	"github.com/moby/sys/user"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// maxAccounts bounds an image's /etc/passwd and /etc/group.
const maxAccounts = 4 << 20

// maxOwnerID is the greatest id that a sandbox can have.
const maxOwnerID = 65535

// owner resolves "user", "user:group", "uid" or "uid:gid" by the image's own
// account files. A name without a group has its account's, and a number the
// group of the same number. Source: Dockerfile reference, COPY --chown.
func (d *dockerBuild) owner(s *stage, spec, what string) (layer.Owner, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	v, err := layer.OpenView(d.dirs(s.layers))
	if err != nil {
		return layer.Owner{}, err
	}
	defer v.Close()
	var o layer.Owner
	if id, ok := number(name); ok {
		o = layer.Owner{UID: id, GID: id}
	} else {
		data, err := accounts(v, "/etc/passwd")
		if err != nil {
			return o, err
		}
		users, err := user.ParsePasswdFilter(bytes.NewReader(data), func(u user.User) bool { return u.Name == name })
		if err != nil || len(users) == 0 {
			return o, sandbox.Errorf(sandbox.CodeInvalid, "%s=%s: the image has no user %s: make one by RUN useradd, or give a number", what, layer.Quote(spec), layer.Quote(name))
		}
		o = layer.Owner{UID: users[0].Uid, GID: users[0].Gid}
	}
	if hasGroup && group != "" {
		if id, ok := number(group); ok {
			o.GID = id
		} else {
			data, err := accounts(v, "/etc/group")
			if err != nil {
				return o, err
			}
			groups, err := user.ParseGroupFilter(bytes.NewReader(data), func(g user.Group) bool { return g.Name == group })
			if err != nil || len(groups) == 0 {
				return o, sandbox.Errorf(sandbox.CodeInvalid, "%s=%s: the image has no group %s", what, layer.Quote(spec), layer.Quote(group))
			}
			o.GID = groups[0].Gid
		}
	}
	if o.UID < 0 || o.GID < 0 || o.UID > maxOwnerID || o.GID > maxOwnerID {
		return o, sandbox.Errorf(sandbox.CodeInvalid, "%s=%s: ids go from 0 to %d in a sandbox", what, layer.Quote(spec), maxOwnerID)
	}
	return o, nil
}

func number(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 31)
	return int(n), err == nil
}

func accounts(v *layer.View, file string) ([]byte, error) {
	data, err := v.ReadFile(file, maxAccounts)
	if sandbox.CodeOf(err) == sandbox.CodeNotFound {
		return nil, nil
	}
	return data, err
}
