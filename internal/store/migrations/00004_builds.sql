-- +goose Up
CREATE TABLE named_templates (
    id         TEXT    PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (tenant, name)
) STRICT;

CREATE TABLE builds (
    id         TEXT    PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    template   TEXT    NOT NULL REFERENCES named_templates (id) ON DELETE CASCADE,
    state      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    data       TEXT    NOT NULL -- JSON of all that no query asks for
) STRICT;
CREATE INDEX builds_by_template ON builds (template, created_at, id);
CREATE INDEX builds_by_state ON builds (state);

-- +goose Down
DROP TABLE builds;
DROP TABLE named_templates;
