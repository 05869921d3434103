-- +goose Up
CREATE TABLE pools (
    id         TEXT    PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    capture    TEXT    NOT NULL DEFAULT '', -- the snapshot that members are restored from
    data       TEXT    NOT NULL             -- JSON of all that no query asks for
) STRICT;
CREATE INDEX pools_by_tenant ON pools (tenant, created_at, id);

-- +goose Down
DROP TABLE pools;
