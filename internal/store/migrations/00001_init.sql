-- +goose Up
-- Times are Unix nanoseconds, 0 where not set.
CREATE TABLE sandboxes (
    id          TEXT    PRIMARY KEY,
    version     INTEGER NOT NULL,           -- grows by 1 with each update
    tenant      TEXT    NOT NULL,
    state       TEXT    NOT NULL,
    op          TEXT    NOT NULL DEFAULT '', -- the intent being carried out
    internal    INTEGER NOT NULL DEFAULT 0,
    reason      TEXT    NOT NULL DEFAULT '',
    detail      TEXT    NOT NULL DEFAULT '',
    runtime     TEXT    NOT NULL,
    template    TEXT    NOT NULL,
    template_id TEXT    NOT NULL,
    metadata    TEXT    NOT NULL DEFAULT '{}', -- JSON object of strings
    oom_kills   INTEGER NOT NULL DEFAULT 0,
    created_at  INTEGER NOT NULL,
    started_at  INTEGER NOT NULL DEFAULT 0,
    expires_at  INTEGER NOT NULL DEFAULT 0,
    ended_at    INTEGER NOT NULL DEFAULT 0,
    data        TEXT    NOT NULL             -- JSON of all that no query asks for
) STRICT;
CREATE INDEX sandboxes_by_tenant ON sandboxes (tenant, created_at DESC, id DESC);
CREATE INDEX sandboxes_unfinished ON sandboxes (id) WHERE state NOT IN ('killed', 'failed') OR op <> '';
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE state IN ('killed', 'failed');

CREATE TABLE consoles (
    id   TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    tail BLOB NOT NULL                       -- the end of the console of an ended sandbox
) STRICT;

CREATE TABLE events (
    seq     INTEGER PRIMARY KEY AUTOINCREMENT,
    at      INTEGER NOT NULL,
    sandbox TEXT    NOT NULL,
    tenant  TEXT    NOT NULL,
    type    TEXT    NOT NULL,
    "from"  TEXT    NOT NULL DEFAULT '',
    "to"    TEXT    NOT NULL DEFAULT '',
    reason  TEXT    NOT NULL DEFAULT '',
    detail  TEXT    NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX events_by_tenant ON events (tenant, seq);

CREATE TABLE keys (
    id           TEXT    PRIMARY KEY,
    tenant       TEXT    NOT NULL,
    name         TEXT    NOT NULL,
    prefix       TEXT    NOT NULL,
    hash         BLOB    NOT NULL UNIQUE,    -- SHA-256 of the secret
    created_at   INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX keys_by_tenant ON keys (tenant, created_at, id);

-- +goose Down
DROP TABLE keys;
DROP TABLE events;
DROP TABLE consoles;
DROP TABLE sandboxes;
