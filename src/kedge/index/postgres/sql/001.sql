-- Format 1 of a store in PostgreSQL. Later formats add files; this one never changes (I8).
-- Nothing here or in the code needs more of a session than one transaction: pgbouncer may share connections.

CREATE TABLE kedge.meta (key text PRIMARY KEY, value text NOT NULL);

-- Which locks writers take is said at `kedge.lock_1`. The row of a namespace is locked by who numbers its events alone.
CREATE TABLE kedge.namespace (
    no integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    last_event bigint NOT NULL DEFAULT 0,
    chain bytea NOT NULL DEFAULT decode(repeat('00', 32), 'hex')
);

CREATE TABLE kedge.job (
    no integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ns_no integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    last_seq bigint NOT NULL,           -- only ever grows, so that a number is never used twice (I4)
    checkpoints bigint NOT NULL,
    size_bytes bigint NOT NULL,
    stored_bytes bigint NOT NULL,
    created_us bigint NOT NULL,
    updated_us bigint NOT NULL,
    retention text,
    UNIQUE (ns_no, name)
);

-- Checkpoints that were deleted, and that the counters of their job still count: who deletes does not lock the job, so that
-- the workers of a queue, whose entries are one job, do not wait for each other. `kedge.fold_1` removes them.
CREATE TABLE kedge.deleted (job_no integer NOT NULL, size_bytes bigint NOT NULL, stored_bytes bigint NOT NULL);
CREATE INDEX deleted_of_job ON kedge.deleted (job_no);

CREATE VIEW kedge.counted AS
SELECT j.no, j.ns_no, j.name, j.checkpoints - d.n AS checkpoints, j.last_seq, (j.size_bytes - d.size)::bigint AS size_bytes,
       (j.stored_bytes - d.stored)::bigint AS stored_bytes, j.created_us, j.updated_us, j.retention
FROM kedge.job j CROSS JOIN LATERAL (
    SELECT count(*) AS n, coalesce(sum(d.size_bytes), 0) AS size, coalesce(sum(d.stored_bytes), 0) AS stored
    FROM kedge.deleted d WHERE d.job_no = j.no OFFSET 0
) d;

CREATE TABLE kedge.lease (
    job_no integer PRIMARY KEY,
    token bigint NOT NULL,              -- only ever grows (I5)
    holder text NOT NULL,
    until timestamptz NOT NULL,         -- by the clock of this server
    is_live boolean NOT NULL
);

-- row = job number << 32 | sequence number, as in SQLite. The manifest is kept out of line when it is long.
CREATE TABLE kedge.checkpoint (
    "row" bigint PRIMARY KEY,
    id text COLLATE "C" NOT NULL UNIQUE,
    step text NOT NULL,
    level text NOT NULL,
    parent text,
    created_us bigint NOT NULL,
    status text NOT NULL,
    size_bytes bigint NOT NULL,
    stored_bytes bigint NOT NULL,
    digest bytea NOT NULL,
    codec text NOT NULL,
    schema_version text NOT NULL,
    tags text,                          -- JSON as it was given, like metadata: jsonb would change numbers
    is_pinned boolean NOT NULL,
    metadata text,
    has_chunks boolean NOT NULL,
    manifest bytea NOT NULL
);
ALTER TABLE kedge.checkpoint ALTER COLUMN manifest SET STORAGE EXTERNAL;
CREATE INDEX checkpoint_with_chunks ON kedge.checkpoint ("row") WHERE has_chunks;

CREATE TABLE kedge.tag (
    job_no integer NOT NULL, name text NOT NULL, value text NOT NULL, "row" bigint NOT NULL,
    PRIMARY KEY (job_no, name, value, "row")
);

CREATE TABLE kedge.idempotency (
    job_no integer NOT NULL, key text NOT NULL, "row" bigint NOT NULL UNIQUE, request_digest bytea NOT NULL,
    PRIMARY KEY (job_no, key)
);

-- A row stays when its pack is gone: a condemned pack is never named again (Index.condemn).
CREATE TABLE kedge.pack (
    no bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    is_condemned boolean NOT NULL DEFAULT false
);

CREATE TABLE kedge.chunk (
    ns_no integer NOT NULL,
    digest bytea NOT NULL,
    size_bytes bigint NOT NULL,
    stored_bytes bigint NOT NULL,
    encoding smallint NOT NULL,         -- bits: 1 zstd, 2 sealed, 4 the difference from `base`
    is_damaged boolean NOT NULL,
    base bytea,
    pack_no bigint,                     -- NULL: the stored bytes are in `data`
    "offset" bigint NOT NULL,
    data bytea,
    PRIMARY KEY (ns_no, digest)
);
ALTER TABLE kedge.chunk ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE INDEX chunk_in_pack ON kedge.chunk (pack_no) WHERE pack_no IS NOT NULL;
CREATE INDEX chunk_base ON kedge.chunk (ns_no, base) WHERE base IS NOT NULL;
CREATE INDEX chunk_in_row_alone ON kedge.chunk (ns_no) WHERE pack_no IS NULL;

-- The pack that tells of a checkpoint, where the index alone had it. `recorded:<namespace>` in meta is the event up to
-- which all have been told of.
CREATE TABLE kedge.record ("row" bigint PRIMARY KEY, pack_no bigint NOT NULL, stored_bytes bigint NOT NULL);
CREATE INDEX record_in_pack ON kedge.record (pack_no);

-- Append-only, one chain for each namespace. chain = SHA-256(previous chain, this entry).
CREATE TABLE kedge.event (
    ns_no integer NOT NULL,
    id bigint NOT NULL,
    at_us bigint NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    job text,
    checkpoint text,
    detail text NOT NULL,
    chain bytea NOT NULL,
    PRIMARY KEY (ns_no, id)
);

-- Events of transactions that have committed, until `kedge.number_1` moves them to `event`.
CREATE TABLE kedge.unnumbered (
    ns_no integer NOT NULL,
    no bigint GENERATED ALWAYS AS IDENTITY,  -- the order, for what one lock protects
    at_us bigint NOT NULL,
    actor text NOT NULL,
    action text NOT NULL,
    job text,
    checkpoint text,
    detail text NOT NULL,
    PRIMARY KEY (ns_no, no)
);

-- Until when somebody waits for events of a namespace. After a crash of the server nobody does.
CREATE UNLOGGED TABLE kedge.awaited (ns_no integer PRIMARY KEY, until timestamptz NOT NULL);

-- Packs of small installations that have no object store: one row for each append.
CREATE TABLE kedge.blob (
    pack text COLLATE "C" NOT NULL,
    "offset" bigint NOT NULL,
    size_bytes bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (pack, "offset")
);
ALTER TABLE kedge.blob ALTER COLUMN data SET STORAGE EXTERNAL;

-- Writers between the commit of their bytes and that of the index.
CREATE TABLE kedge.writer (pack text COLLATE "C" PRIMARY KEY, since timestamptz NOT NULL DEFAULT clock_timestamp());

-- What readers of an older system look for. Where that system's own table still is, it stays.
DO $$
BEGIN
    IF to_regclass('pipeline_checkpoints') IS NULL THEN
        CREATE VIEW pipeline_checkpoints AS
        SELECT md5(c.id)::uuid AS id,
               c.id::varchar(255) AS checkpoint_id,
               (CASE c.level WHEN 'stage' THEN 'phase' ELSE c.level END)::varchar(50) AS level,
               c.parent::varchar(255) AS parent_id,
               j.name::varchar(255) AS processor_name,
               -- jsonb has no U+0000
               (CASE WHEN c.metadata LIKE '%\\u0000%' THEN '{}' ELSE coalesce(c.metadata, '{}') END)::jsonb AS data_summary,
               'kedge:' || c.id AS file_path,
               c.size_bytes AS file_size_bytes,
               'zstd'::varchar(50) AS compression_type,
               (CASE c.status WHEN 'archived' THEN 'valid' ELSE c.status END)::varchar(50) AS status,
               encode(c.digest, 'hex')::varchar(64) AS validation_checksum,
               NULL::jsonb AS validation_result,
               NULL::text AS error_message,
               to_timestamp(c.created_us / 1000000.0) AS created_at,
               to_timestamp(c.created_us / 1000000.0) AS updated_at
        FROM kedge.checkpoint c JOIN kedge.job j ON j.no = c."row" >> 32;
    END IF;
END $$;
