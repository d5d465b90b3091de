-- Format 1 of index.sqlite. Later formats add files; this one never changes (I8).

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE namespace (no INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE job (
    no INTEGER PRIMARY KEY,
    ns_no INTEGER NOT NULL,
    name TEXT NOT NULL,
    last_seq INTEGER NOT NULL,          -- only ever grows, so that a number is never used twice (I4)
    checkpoints INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    updated_us INTEGER NOT NULL,
    retention TEXT,
    UNIQUE (ns_no, name)
);

CREATE TABLE lease (
    job_no INTEGER PRIMARY KEY,
    token INTEGER NOT NULL,             -- only ever grows (I5)
    holder TEXT NOT NULL,
    boot_id TEXT NOT NULL,              -- `until_s` counts from this boot of the machine; another boot: expired
    until_s REAL NOT NULL,
    is_live INTEGER NOT NULL
);

-- row = job number << 32 | sequence number: the table itself is the index by job and order, and nothing else is
-- touched by a save but the unique index of IDs. The manifest comes last so that listing never reads it.
CREATE TABLE checkpoint (
    row INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    step TEXT NOT NULL,
    level TEXT NOT NULL,
    parent TEXT,
    created_us INTEGER NOT NULL,
    status TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    digest BLOB NOT NULL,
    codec TEXT NOT NULL,
    schema_version TEXT NOT NULL,
    tags TEXT,
    is_pinned INTEGER NOT NULL,
    metadata TEXT,
    has_chunks INTEGER NOT NULL,
    manifest BLOB NOT NULL
);
CREATE INDEX checkpoint_with_chunks ON checkpoint (row) WHERE has_chunks;

CREATE TABLE tag (
    job_no INTEGER NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, row INTEGER NOT NULL,
    PRIMARY KEY (job_no, name, value, row)
) WITHOUT ROWID;

CREATE TABLE idempotency (
    job_no INTEGER NOT NULL, key TEXT NOT NULL, row INTEGER NOT NULL UNIQUE, request_digest BLOB NOT NULL,
    PRIMARY KEY (job_no, key)
) WITHOUT ROWID;

CREATE TABLE pack (no INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);

CREATE TABLE chunk (
    ns_no INTEGER NOT NULL,
    digest BLOB NOT NULL,
    size_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL,
    encoding INTEGER NOT NULL,          -- bits: 1 zstd, 2 sealed, 4 the difference from `base`
    is_damaged INTEGER NOT NULL,
    base BLOB,
    pack_no INTEGER,                    -- NULL: the stored bytes are in `data`
    offset INTEGER NOT NULL,
    data BLOB,
    PRIMARY KEY (ns_no, digest)
) WITHOUT ROWID;
CREATE INDEX chunk_in_pack ON chunk (pack_no) WHERE pack_no IS NOT NULL;
CREATE INDEX chunk_base ON chunk (ns_no, base) WHERE base IS NOT NULL;
CREATE INDEX chunk_in_row_alone ON chunk (ns_no) WHERE pack_no IS NULL;

-- The pack that tells of a checkpoint, where the index alone had it. `recorded:<namespace>` in meta is the event up to
-- which all have been told of.
CREATE TABLE record (row INTEGER PRIMARY KEY, pack_no INTEGER NOT NULL, stored_bytes INTEGER NOT NULL);
CREATE INDEX record_in_pack ON record (pack_no);

-- Append-only. chain = SHA-256(previous chain, this entry), so that a changed or missing entry shows.
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    at_us INTEGER NOT NULL,
    ns_no INTEGER NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    job TEXT,
    checkpoint TEXT,
    detail TEXT NOT NULL,
    chain BLOB NOT NULL
);
