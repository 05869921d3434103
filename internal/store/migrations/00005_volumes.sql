-- +goose Up
CREATE TABLE volumes (
    id         TEXT    PRIMARY KEY,
    tenant     TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    token      TEXT    NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (tenant, name)
) STRICT;

-- +goose Down
DROP TABLE volumes;
