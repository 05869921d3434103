-- +goose Up
CREATE TABLE snapshots (
    id         TEXT    PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL DEFAULT '', -- '' is none
    source     TEXT    NOT NULL,            -- the sandbox that it was taken of
    hidden     INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    data       TEXT    NOT NULL             -- JSON of all that no query asks for
) STRICT;
CREATE UNIQUE INDEX snapshots_by_name ON snapshots (tenant, name) WHERE name <> '';
CREATE INDEX snapshots_by_tenant ON snapshots (tenant, created_at DESC, id DESC);

-- +goose Down
DROP TABLE snapshots;
