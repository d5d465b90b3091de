-- Schema 1 of the SQLite index (docs/format.md). The numbered files of this folder run in order, in one
-- transaction; PRAGMA user_version is the number of the last one. A published file never changes (I8).

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE namespace (
  ns_no        INTEGER PRIMARY KEY,
  name         TEXT    NOT NULL UNIQUE,
  chunks       INTEGER NOT NULL DEFAULT 0,
  chunk_bytes  INTEGER NOT NULL DEFAULT 0, -- stored, inline ones included
  inline_bytes INTEGER NOT NULL DEFAULT 0
);

-- Job rows are never deleted, so that sequence numbers and lease tokens are never used twice.
CREATE TABLE job (
  job_no         INTEGER PRIMARY KEY,
  ns_no          INTEGER NOT NULL,
  last_seq       INTEGER NOT NULL DEFAULT 0,
  checkpoints    INTEGER NOT NULL DEFAULT 0,
  size_bytes     INTEGER NOT NULL DEFAULT 0,
  stored_bytes   INTEGER NOT NULL DEFAULT 0,
  created_us     INTEGER NOT NULL,
  updated_us     INTEGER NOT NULL,
  lease_token    INTEGER NOT NULL DEFAULT 0, -- the last one given
  lease_until_us INTEGER,                    -- boot clock of the kernel boot `lease_boot`
  lease_ttl_us   INTEGER,
  lease_boot     TEXT,
  lease_holder   TEXT,                       -- NULL: not leased
  name           TEXT    NOT NULL,
  retention      TEXT,
  UNIQUE (ns_no, name)
);

-- The table itself is the (job, sequence) index; the manifest comes last, so that listing never reads it.
CREATE TABLE checkpoint (
  row            INTEGER PRIMARY KEY, -- job_no << 32 | seq
  id             TEXT    NOT NULL UNIQUE,
  level          INTEGER NOT NULL,
  status         INTEGER NOT NULL,
  is_pinned      INTEGER NOT NULL,
  has_chunks     INTEGER NOT NULL,
  created_us     INTEGER NOT NULL,
  size_bytes     INTEGER NOT NULL,
  stored_bytes   INTEGER NOT NULL,
  step           TEXT    NOT NULL,
  parent         TEXT,
  digest         BLOB    NOT NULL,
  codec          TEXT    NOT NULL,
  schema_version TEXT    NOT NULL,
  tags           TEXT,                -- JSON; NULL: none
  metadata       TEXT,                -- JSON; NULL: {}
  manifest       BLOB    NOT NULL
);

-- Partial: a save of the usual level without chunks writes to neither.
CREATE INDEX checkpoint_by_level ON checkpoint (level) WHERE level <> 2;
CREATE INDEX checkpoint_with_chunks ON checkpoint (has_chunks) WHERE has_chunks = 1;

CREATE TABLE tag (
  job_no INTEGER NOT NULL,
  key    TEXT    NOT NULL,
  value  TEXT    NOT NULL,
  seq    INTEGER NOT NULL,
  PRIMARY KEY (job_no, key, value, seq)
) WITHOUT ROWID;

-- Outlives its checkpoint, so that a retry never becomes a newer save; gc forgets old ones.
CREATE TABLE idempotency (
  job_no         INTEGER NOT NULL,
  key            TEXT    NOT NULL,
  seq            INTEGER NOT NULL,
  id             TEXT    NOT NULL,
  request_digest BLOB    NOT NULL,
  PRIMARY KEY (job_no, key)
) WITHOUT ROWID;

CREATE TABLE pack (
  pack_no INTEGER PRIMARY KEY,
  name    TEXT NOT NULL UNIQUE
);

-- Digests arrive in random order. An index over their first eight bytes dirties less than half the pages that
-- one over whole digests does; a lookup compares the digest in the row.
CREATE TABLE chunk (
  chunk_no     INTEGER PRIMARY KEY,
  ns_no        INTEGER NOT NULL,
  prefix       INTEGER NOT NULL, -- first eight bytes of the digest, big endian, signed
  digest       BLOB    NOT NULL,
  pack_no      INTEGER,          -- NULL: inline
  offset       INTEGER NOT NULL,
  size_bytes   INTEGER NOT NULL,
  stored_bytes INTEGER NOT NULL,
  encoding     INTEGER NOT NULL,
  data         BLOB
);
CREATE INDEX chunk_by_prefix ON chunk (ns_no, prefix);
CREATE INDEX chunk_by_pack ON chunk (pack_no) WHERE pack_no IS NOT NULL;

-- One row per change, never changed or deleted. chain = SHA-256(previous chain ‖ entry), see events.py.
CREATE TABLE event (
  row        INTEGER PRIMARY KEY, -- ns_no << 44 | number
  at_us      INTEGER NOT NULL,
  action     TEXT    NOT NULL,
  actor      TEXT    NOT NULL,
  job        TEXT,
  checkpoint TEXT,
  detail     TEXT,                -- JSON; NULL: {}
  chain      BLOB    NOT NULL
);
