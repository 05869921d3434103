package template

import (
	"crypto/rand"
	"encoding/base32"
	"regexp"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// maxName is the longest name of a template or tenant: a DNS label's.
const maxName = 63

var (
	namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)
	idPattern   = regexp.MustCompile(`^tpl[0-9a-z]{17}$`)
	idEncoding  = base32.NewEncoding("0123456789abcdefghjkmnpqrstvwxyz").WithPadding(base32.NoPadding)
)

// newID makes a fresh template ID.
func newID() string {
	var b [12]byte
	rand.Read(b[:]) // never fails: crypto/rand aborts the program instead
	return "tpl" + idEncoding.EncodeToString(b[:])[:17]
}

// CheckName tells whether a new template may be called name. The error has
// CodeInvalid.
func CheckName(name string) error {
	switch {
	case len(name) > maxName:
		return sandbox.Errorf(sandbox.CodeInvalid, "the template name %s has %d characters: the most is %d", layer.Quote(name), len(name), maxName)
	case !namePattern.MatchString(name):
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a template name: use a-z, 0-9, and . _ - between them", layer.Quote(name))
	case idPattern.MatchString(name):
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a template name: it has the form of a template id", layer.Quote(name))
	}
	return nil
}

// check validates t and fills its defaults.
func (t *Target) check() error {
	if t.Tenant == "" {
		t.Tenant = SharedTenant
	}
	if len(t.Tenant) > maxName || !namePattern.MatchString(t.Tenant) {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a tenant name", layer.Quote(t.Tenant))
	}
	if err := CheckName(t.Name); err != nil {
		return err
	}
	if t.Shared && t.Tenant != SharedTenant {
		return sandbox.Errorf(sandbox.CodeForbidden, "only the tenant %q can share a template with all tenants", SharedTenant)
	}
	if t.Resources != (sandbox.Resources{}) {
		return t.Resources.Or(sandbox.DefaultResources()).Validate(0)
	}
	return nil
}

// dirName is a digest as a directory's name.
func dirName(digest string) string { return "sha256-" + digest[len("sha256:"):] }

var (
	digestPattern   = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	layerDirPattern = regexp.MustCompile(`^sha256-[0-9a-f]{64}$`)
)

func digestOf(dir string) string { return "sha256:" + dir[len("sha256-"):] }
