package template

import (
	"regexp"
	"slices"
	"strings"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/template/layer"
)

// maxName is the longest name of a template or tenant: a DNS label's.
const maxName = 63

var (
	namePattern = regexp.MustCompile(`^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$`)
	idPattern   = regexp.MustCompile(`^tpl[0-9a-z]{17}$`)
)

// NewID makes a fresh template ID.
func NewID() string { return sandbox.RandomID("tpl") }

// IsID tells whether s has the form of an ID of NewID. It says nothing of
// whether there is such a template.
func IsID(s string) bool { return idPattern.MatchString(s) }

// CheckName tells whether a new template may be called name. The error has
// CodeInvalid.
func CheckName(name string) error {
	switch {
	case len(name) > maxName:
		return sandbox.Errorf(sandbox.CodeInvalid, "the template name %s has %d characters: the most is %d", layer.Quote(name), len(name), maxName)
	case !namePattern.MatchString(name):
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a template name: use a-z, 0-9, and . _ - between them", layer.Quote(name))
	case IsID(name):
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a template name: it has the form of a template id", layer.Quote(name))
	}
	return nil
}

// DefaultTag is the tag of a template that is known by its name alone.
const DefaultTag = "default"

var tagPattern = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]*$`)

// CheckTag tells whether a template may have that tag. The error has
// CodeInvalid.
func CheckTag(tag string) error {
	if len(tag) > maxName || !tagPattern.MatchString(tag) {
		return sandbox.Errorf(sandbox.CodeInvalid, "%s is not a tag: use at most %d of a-z, A-Z, 0-9, and . _ - after the first", layer.Quote(tag), maxName)
	}
	return nil
}

// Tagged is the name under which the library has a template's tag.
func Tagged(name, tag string) string {
	if tag == "" || tag == DefaultTag {
		return name
	}
	return name + ":" + tag
}

// SplitTag takes "name:tag" apart; a name alone has DefaultTag.
func SplitTag(ref string) (name, tag string) {
	name, tag, ok := strings.Cut(ref, ":")
	if !ok {
		tag = DefaultTag
	}
	return name, tag
}

// names are those under which the result is recorded.
func (t *Target) names() []string {
	if len(t.Tags) == 0 {
		return []string{t.Name}
	}
	var out []string
	for _, tag := range t.Tags {
		if n := Tagged(t.Name, tag); !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
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
	for _, tag := range t.Tags {
		if err := CheckTag(tag); err != nil {
			return err
		}
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
