package manager

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/warrenhq/warren/internal/sandbox"
	"github.com/warrenhq/warren/internal/store"
	"github.com/warrenhq/warren/internal/template"
)

// A TemplateTag is a name under which a build of a template is to be had.
type TemplateTag struct {
	Tag       string
	BuildID   string
	CreatedAt time.Time
}

// templateRef is the library's name for what a client calls a template: its
// name or the ID that it has through all builds, either with ":tag".
func (m *Manager) templateRef(ctx context.Context, tenant, ref string) string {
	head, tag := template.SplitTag(ref)
	if template.IsID(head) {
		if n, err := m.store.FindNamed(ctx, tenant, head); err == nil {
			head = n.Name
		}
	}
	return template.Tagged(head, tag)
}

// resolveTemplate is Templates.Resolve of what a client calls a template.
func (m *Manager) resolveTemplate(ctx context.Context, tenant, ref string) (template.Template, []string, error) {
	return m.cfg.Templates.Resolve(ctx, tenant, m.templateRef(ctx, tenant, ref))
}

// NamedTemplate gives the template that tenant means, which need not have a
// build that is ready. One that was not made by RequestBuild goes by its ID in
// the library.
func (m *Manager) NamedTemplate(ctx context.Context, tenant, nameOrID string) (store.NamedTemplate, error) {
	head, _ := template.SplitTag(nameOrID)
	n, err := m.store.FindNamed(ctx, tenant, head)
	if sandbox.CodeOf(err) != sandbox.CodeNotFound {
		return n, err
	}
	t, err := m.cfg.Templates.Get(ctx, tenant, head)
	return store.NamedTemplate{ID: t.ID, Tenant: t.Tenant, Name: t.Name, CreatedAt: t.CreatedAt}, err
}

// TemplateBuilds lists a template's builds, the newest first.
func (m *Manager) TemplateBuilds(ctx context.Context, tenant, nameOrID string) ([]store.Build, error) {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return nil, err
	}
	return m.store.ListBuilds(ctx, n.ID, "")
}

// TemplateTags lists a template's tags, by name.
func (m *Manager) TemplateTags(ctx context.Context, tenant, nameOrID string) ([]TemplateTag, error) {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return nil, err
	}
	all, err := m.cfg.Templates.List(ctx, n.Tenant)
	if err != nil {
		return nil, err
	}
	tags := []TemplateTag{}
	for _, t := range all {
		if name, tag := template.SplitTag(t.Name); name == n.Name && t.Tenant == n.Tenant && (t.Tenant == tenant || t.Shared) {
			tags = append(tags, TemplateTag{Tag: tag, BuildID: t.BuildID, CreatedAt: t.CreatedAt})
		}
	}
	return tags, nil
}

// TagTemplate gives the template that target means more tags.
func (m *Manager) TagTemplate(ctx context.Context, tenant, target string, tags []string) (template.Template, error) {
	ref := m.templateRef(ctx, tenant, target)
	t, err := m.cfg.Templates.Get(ctx, tenant, ref)
	if err != nil {
		return t, err
	}
	if len(tags) == 0 || len(tags) > maxBuildTags {
		return t, invalid("give 1 to %d tags", maxBuildTags)
	}
	for _, tag := range tags {
		if err := template.CheckTag(tag); err != nil {
			return t, err
		}
	}
	name, _ := template.SplitTag(t.Name)
	for _, tag := range tags {
		if _, err := m.cfg.Templates.Tag(ctx, tenant, t.ID, name, tag); err != nil {
			return t, err
		}
	}
	return t, nil
}

// UntagTemplate takes tags from a template. Sandboxes of it go on.
func (m *Manager) UntagTemplate(ctx context.Context, tenant, nameOrID string, tags []string) error {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return err
	}
	if len(tags) == 0 {
		return invalid("give at least one tag")
	}
	for _, tag := range tags {
		if err := template.CheckTag(tag); err != nil {
			return err
		}
		if _, err := m.cfg.Templates.Remove(ctx, tenant, template.Tagged(n.Name, tag)); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return err
		}
	}
	return nil
}

// RemoveNamed removes a template with its tags and builds. CodeConflict: a
// live sandbox uses it.
func (m *Manager) RemoveNamed(ctx context.Context, tenant, nameOrID string) error {
	n, err := m.NamedTemplate(ctx, tenant, nameOrID)
	if err != nil {
		return err
	}
	if n.Tenant != tenant {
		return m.RemoveTemplate(ctx, tenant, n.Name) // which says why not
	}
	if b, err := m.store.ListBuilds(ctx, n.ID, store.BuildBuilding); err != nil {
		return err
	} else if len(b) > 0 {
		return sandbox.Errorf(sandbox.CodeConflict, "the template %q is being built: wait for the build %s", n.Name, b[0].ID)
	}
	tags, err := m.TemplateTags(ctx, tenant, n.Name)
	if err != nil {
		return err
	}
	for _, tag := range tags {
		if err := m.RemoveTemplate(ctx, tenant, template.Tagged(n.Name, tag.Tag)); err != nil && sandbox.CodeOf(err) != sandbox.CodeNotFound {
			return err
		}
	}
	builds, err := m.store.ListBuilds(ctx, n.ID, "")
	if err != nil {
		return err
	}
	if err := m.store.ForgetNamed(ctx, tenant, n.ID); err != nil {
		return err
	}
	for _, b := range builds {
		if err := os.Remove(m.buildLogPath(b.ID)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return diskError("remove a build's log", err)
		}
	}
	return nil
}
