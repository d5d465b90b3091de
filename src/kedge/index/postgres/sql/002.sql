-- What is asked for most, as functions: their statements are planned once for each connection of the server, whoever
-- pgbouncer lends that to, and whatever waits together is one round trip (`batch.py`). They change no table: a Kedge that
-- does not know them works on beside one that does. A later form of one gets a name of its own.
--
-- Plans are made while tables are empty, and last while they grow (I6). So a join names the order of its steps: LATERAL
-- with OFFSET is one look into an index for each row, whatever the planner believes.

-- A number as MessagePack has it, for the chain of events.
CREATE OR REPLACE FUNCTION kedge.packed(number bigint) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN number < 128 THEN substring(int8send(number) FROM 8)
                WHEN number < 256 THEN '\xcc'::bytea || substring(int8send(number) FROM 8)
                WHEN number < 65536 THEN '\xcd'::bytea || substring(int8send(number) FROM 7)
                WHEN number < 4294967296 THEN '\xce'::bytea || substring(int8send(number) FROM 5)
                ELSE '\xcf'::bytea || int8send(number) END
$$;

-- A text as MessagePack has it, for the chain of events.
CREATE OR REPLACE FUNCTION kedge.packed_text(value text) RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    data bytea := convert_to(value, 'UTF8');
    size bytea := int4send(length(data));
BEGIN
    RETURN CASE WHEN value IS NULL THEN '\xc0'::bytea
                WHEN length(data) < 32 THEN set_byte('\x00'::bytea, 0, 160 + length(data)) || data
                WHEN length(data) < 256 THEN '\xd9'::bytea || substring(size FROM 4) || data
                WHEN length(data) < 65536 THEN '\xda'::bytea || substring(size FROM 3) || data
                ELSE '\xdb'::bytea || size || data END;
END $$;

-- The locks of a transaction, all at its beginning: what it sees behind them stays so until it has committed (I3, I5).
--
-- Ordinary writes share the lock of their namespace. Each takes a lock for every job and every checkpoint that it changes,
-- or that must stay absent; it shares those of parents. They are numbers that clients derive from names, so that they are
-- there before the job is. They come in ascending order: transactions that cross do not wait for each other in a circle.
-- Without any (`keys` is NULL) the namespace belongs to this transaction alone: nobody else changes anything in it.
--
-- Behind these a transaction may wait only for rows of packs, then of chunks, each in the order of their names.
CREATE OR REPLACE FUNCTION kedge.lock_1(ns integer, is_plain boolean, keys bigint[], are_shared boolean[]) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- Each lock is a condition that never holds: a condition is computed, a PERFORM is a statement that begins and ends.
    IF keys IS NULL THEN
        IF pg_advisory_xact_lock(1801806951, ns) IS NULL THEN END IF;
        RETURN true;
    END IF;
    IF pg_advisory_xact_lock_shared(1801806951, ns) IS NULL THEN END IF;
    IF is_plain THEN -- until this has committed nobody makes the store an encrypted one (I10)
        IF pg_advisory_xact_lock_shared(1801806951, 0) IS NULL THEN END IF;
    END IF;
    FOR i IN 1..cardinality(keys) LOOP
        IF are_shared[i] THEN
            IF pg_advisory_xact_lock_shared(keys[i]) IS NULL THEN END IF;
        ELSE
            IF pg_advisory_xact_lock(keys[i]) IS NULL THEN END IF;
        END IF;
    END LOOP;
    RETURN true;
END $$;

-- Append an event, which gets its number later.
CREATE OR REPLACE FUNCTION kedge.append_1(
    ns integer, at bigint, actor_ text, action_ text, job_ text, checkpoint_ text, detail_ text
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    VALUES (ns, at, actor_, action_, job_, checkpoint_, detail_);
END $$;

-- Number the events that have committed, at most so many: in a transaction of its own, which is durable before anybody
-- reads a number. Numbers have no gaps, and each event contains the digest of the one before. Answers whether there are more.
CREATE OR REPLACE FUNCTION kedge.number_1(ns integer, most integer) RETURNS boolean LANGUAGE plpgsql
    SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    head bigint;
    link bytea;
    new record;
    numbered integer := 0;
BEGIN
    PERFORM FROM kedge.unnumbered u WHERE u.ns_no = ns LIMIT 1;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- One at a time. The next statement sees what was committed by then.
    SELECT s.last_event, s.chain INTO STRICT head, link FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    FOR new IN
        WITH moved AS (
            DELETE FROM kedge.unnumbered u WHERE u.ns_no = ns
                AND u.no = ANY (ARRAY(SELECT o.no FROM kedge.unnumbered o WHERE o.ns_no = ns ORDER BY o.no LIMIT most))
            RETURNING *
        )
        SELECT * FROM moved ORDER BY no
    LOOP
        head := head + 1;
        numbered := numbered + 1;
        link := sha256(link || '\x98'::bytea || kedge.packed(head) || kedge.packed(new.at_us) || kedge.packed(ns::bigint)
            || kedge.packed_text(new.actor) || kedge.packed_text(new.action) || kedge.packed_text(new.job)
            || kedge.packed_text(new.checkpoint) || kedge.packed_text(new.detail));
        INSERT INTO kedge.event (ns_no, id, at_us, actor, action, job, checkpoint, detail, chain)
        VALUES (ns, head, new.at_us, new.actor, new.action, new.job, new.checkpoint, new.detail, link);
    END LOOP;
    UPDATE kedge.namespace s SET last_event = head, chain = link WHERE s.no = ns;
    RETURN numbered = most;
END $$;

-- Take what was deleted off the counters of some jobs: of those whose rows nobody has locked, so that this waits for nobody.
CREATE OR REPLACE FUNCTION kedge.fold_1(most integer) RETURNS void LANGUAGE plpgsql
    SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer;
BEGIN
    FOR job_no_ IN
        SELECT j.no FROM kedge.job j
        WHERE j.no = ANY (ARRAY(SELECT d.job_no FROM (SELECT * FROM kedge.deleted LIMIT 1000) d GROUP BY 1 LIMIT most))
        FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        WITH folded AS (DELETE FROM kedge.deleted d WHERE d.job_no = job_no_ RETURNING *)
        UPDATE kedge.job j
        SET checkpoints = j.checkpoints - f.n, size_bytes = (j.size_bytes - f.size)::bigint,
            stored_bytes = (j.stored_bytes - f.stored)::bigint
        FROM (SELECT count(*) AS n, coalesce(sum(size_bytes), 0) AS size, coalesce(sum(stored_bytes), 0) AS stored
              FROM folded) f
        WHERE j.no = job_no_;
    END LOOP;
END $$;

-- Whether somebody waits for events of a namespace.
CREATE OR REPLACE FUNCTION kedge.is_awaited_1(ns integer) RETURNS boolean LANGUAGE plpgsql
    SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM kedge.awaited a WHERE a.ns_no = ns AND a.until > clock_timestamp());
END $$;

-- Whether a save may be committed under this key, or without one; `is_first`: it may be the first of its job.
CREATE OR REPLACE FUNCTION kedge.has_key_1(namespace text, key_id text, is_first boolean) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    IF key_id IS NOT NULL THEN
        RETURN key_id IS NOT DISTINCT FROM (SELECT m.value FROM kedge.meta m WHERE m.key = 'key:' || namespace);
    ELSIF is_first THEN
        PERFORM FROM kedge.meta m WHERE m.key = 'encrypted' AND m.value = 'no';
        RETURN FOUND;
    END IF;
    RETURN true;
END $$;

-- The functions below are called behind `lock_1`. Each statement in them sees what was committed when the locks were taken.

-- Saves, all or none: the rows they got, or NULL if any of them must be looked at by itself; then nothing was saved. What
-- the database refuses (an ID or a key that is taken) fails all of them.
CREATE OR REPLACE FUNCTION kedge.save_1(
    ns integer, namespace text, key_id text,
    -- for each save
    jobs text[], tokens bigint[], ids text[], steps text[], levels text[], parents text[], created_us bigint[],
    statuses text[], sizes bigint[], stored bigint[], digests bytea[], codecs text[], schema_versions text[],
    tags text[], are_pinned boolean[], metadata text[], have_chunks boolean[], manifests bytea[],
    keys text[], request_digests bytea[], at_us bigint[], actors text[],
    -- for each tag: the number of its save, from 1 on
    tag_of integer[], tag_names text[], tag_values text[],
    -- for each chunk; `chunk_packs` are places in `packs`, NULL for those in the index, which are in `chunk_data` one after
    -- the other from `chunk_starts` on: an array of them would be copied again and again
    packs text[], chunk_digests bytea[], chunk_sizes bigint[], chunk_stored bigint[], chunk_encodings smallint[],
    chunk_bases bytea[], chunk_packs integer[], chunk_offsets bigint[], chunk_starts integer[], chunk_data bytea,
    reused bytea[]
) RETURNS bigint[] LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    n integer := cardinality(ids);
    is_sure boolean;
    has_first boolean;
    has_new boolean;
    rows_ bigint[];
    pack_nos bigint[];
    damaged bytea[];
BEGIN
    -- Nobody else's lease is there.
    SELECT array_agg(found.no::bigint << 32 | found.last_seq + found.nth ORDER BY found.i), bool_and(found.is_sure),
        bool_or(coalesce(found.last_seq, 0) = 0), bool_or(found.no IS NULL)
    INTO rows_, is_sure, has_first, has_new
    FROM (
        SELECT new.i, j.no, j.last_seq, row_number() OVER (PARTITION BY new.name ORDER BY new.i) AS nth,
            CASE WHEN new.token IS NULL THEN l.is_live IS NOT TRUE
                 ELSE coalesce(l.is_live AND l.token = new.token, false) END AS is_sure
        FROM (SELECT i, jobs[i] AS name, tokens[i] AS token FROM generate_series(1, n) i) new
        LEFT JOIN LATERAL (SELECT * FROM kedge.job j WHERE j.ns_no = ns AND j.name = new.name OFFSET 0) j ON true
        LEFT JOIN LATERAL (SELECT * FROM kedge.lease l WHERE l.job_no = j.no OFFSET 0) l ON true
    ) found;
    IF NOT is_sure THEN
        RETURN NULL;
    END IF;
    IF NOT kedge.has_key_1(namespace, key_id, has_first) THEN
        RETURN NULL;
    END IF;
    IF parents IS NOT NULL AND EXISTS (
        SELECT FROM unnest(parents) AS wanted (id)
        LEFT JOIN LATERAL (SELECT c."row" FROM kedge.checkpoint c WHERE c.id = wanted.id OFFSET 0) c ON true
        LEFT JOIN LATERAL (SELECT j.ns_no FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer OFFSET 0) j ON true
        WHERE wanted.id IS NOT NULL AND j.ns_no IS DISTINCT FROM ns
    ) THEN
        RETURN NULL;
    END IF;
    IF reused IS NOT NULL AND EXISTS (
        SELECT FROM unnest(reused) AS wanted (digest)
        LEFT JOIN LATERAL (
            SELECT c.is_damaged FROM kedge.chunk c WHERE c.ns_no = ns AND c.digest = wanted.digest OFFSET 0
        ) c ON true
        WHERE c.is_damaged IS NOT FALSE
    ) THEN
        RETURN NULL;
    END IF;
    IF packs IS NOT NULL THEN
        -- Locked against being condemned, and heard of if they are (I3). Savers share the lock.
        INSERT INTO kedge.pack (name)
        SELECT wanted.name FROM unnest(packs) AS wanted (name)
        LEFT JOIN LATERAL (SELECT p.no FROM kedge.pack p WHERE p.name = wanted.name OFFSET 0) p ON true
        WHERE p.no IS NULL ON CONFLICT DO NOTHING;
        SELECT array_agg(named.no ORDER BY wanted.i), NOT bool_or(named.is_condemned) INTO pack_nos, is_sure
        FROM unnest(packs) WITH ORDINALITY AS wanted (name, i), LATERAL (
            SELECT p.no, p.is_condemned FROM kedge.pack p WHERE p.name = wanted.name FOR SHARE
        ) named;
        IF NOT is_sure THEN
            RETURN NULL;
        END IF;
    END IF;

    IF has_new THEN
        INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, updated_us)
        SELECT ns, new.name, 0, 0, 0, 0, min(new.at), min(new.at)
        FROM unnest(jobs, created_us) WITH ORDINALITY AS new (name, at, i)
        LEFT JOIN LATERAL (SELECT j.no FROM kedge.job j WHERE j.ns_no = ns AND j.name = new.name OFFSET 0) j ON true
        WHERE j.no IS NULL GROUP BY new.name ORDER BY min(new.i);
        SELECT array_agg(j.no::bigint << 32 | j.last_seq + new.nth ORDER BY new.i) INTO rows_
        FROM (SELECT i, jobs[i] AS name, row_number() OVER (PARTITION BY jobs[i] ORDER BY i) AS nth
              FROM generate_series(1, n) i) new,
            LATERAL (SELECT * FROM kedge.job j WHERE j.ns_no = ns AND j.name = new.name OFFSET 0) j;
    END IF;
    UPDATE kedge.job j
    SET last_seq = greatest(j.last_seq, new.newest), checkpoints = j.checkpoints + new.added,
        size_bytes = j.size_bytes + new.size, stored_bytes = j.stored_bytes + new.stored, updated_us = new.at
    FROM (
        SELECT (rows_[i] >> 32)::integer AS no, max(rows_[i] & 4294967295) AS newest, count(*) AS added,
            sum(sizes[i])::bigint AS size, sum(stored[i])::bigint AS stored, max(created_us[i]) AS at
        FROM generate_series(1, n) i GROUP BY 1
    ) new
    WHERE j.no = new.no;
    IF chunk_digests IS NOT NULL THEN
        -- The first copy of a chunk stays, unless it is damaged. Others may insert the same one between looking and
        -- inserting; then this waits for them. All do so in the order of digests.
        SELECT array_agg(u.d) INTO damaged
        FROM unnest(chunk_digests) AS u (d), LATERAL (
            SELECT FROM kedge.chunk c WHERE c.ns_no = ns AND c.digest = u.d AND c.is_damaged OFFSET 0
        ) c;
        IF damaged IS NOT NULL THEN
            DELETE FROM kedge.chunk c WHERE c.ns_no = ns AND c.digest = ANY(damaged);
        END IF;
        INSERT INTO kedge.chunk
        SELECT ns, u.d, u.s, u.t, u.e, false, u.f, pack_nos[u.p], u.o, substring(chunk_data FROM u.b FOR u.t::integer)
        FROM unnest(chunk_digests, chunk_sizes, chunk_stored, chunk_encodings, chunk_bases, chunk_packs, chunk_offsets,
            chunk_starts) AS u (d, s, t, e, f, p, o, b)
        LEFT JOIN LATERAL (
            SELECT true AS is_there FROM kedge.chunk c WHERE c.ns_no = ns AND c.digest = u.d OFFSET 0
        ) c ON true
        WHERE c.is_there IS NULL
        ON CONFLICT DO NOTHING;
    END IF;
    INSERT INTO kedge.checkpoint
    SELECT rows_[i], ids[i], steps[i], levels[i], parents[i], created_us[i], statuses[i], sizes[i], stored[i], digests[i],
        codecs[i], schema_versions[i], tags[i], are_pinned[i], metadata[i], have_chunks[i], manifests[i]
    FROM generate_series(1, n) i;
    IF tag_of IS NOT NULL THEN
        INSERT INTO kedge.tag
        SELECT (rows_[tag_of[i]] >> 32)::integer, tag_names[i], tag_values[i], rows_[tag_of[i]]
        FROM generate_series(1, cardinality(tag_of)) i;
    END IF;
    IF keys IS NOT NULL THEN
        INSERT INTO kedge.idempotency
        SELECT (rows_[i] >> 32)::integer, keys[i], rows_[i], request_digests[i] FROM generate_series(1, n) i
        WHERE keys[i] IS NOT NULL;
    END IF;
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    SELECT ns, at_us[i], actors[i], 'save', jobs[i], ids[i], '{}' FROM generate_series(1, n) i;
    RETURN rows_;
END $$;

-- One save alone, without chunks: what a step of a run is. The same as `save_1`, by the plainest statements there are: to
-- begin and end those of a batch takes longer than the save itself.
CREATE OR REPLACE FUNCTION kedge.save_one_1(
    ns integer, namespace text, key_id text,
    job_ text, token_ bigint, id_ text, step_ text, level_ text, parent_ text, created_us_ bigint, status_ text,
    size_ bigint, stored_ bigint, digest_ bytea, codec_ text, schema_version_ text, tags_ text, is_pinned_ boolean,
    metadata_ text, has_chunks_ boolean, manifest_ bytea, key_ text, request_digest_ bytea, at bigint, actor_ text,
    tag_names text[], tag_values text[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer;
    seq bigint;
    current_token bigint;
    row_ bigint;
BEGIN
    SELECT j.no, j.last_seq + 1, l.token INTO job_no_, seq, current_token
    FROM kedge.job j
    LEFT JOIN LATERAL (SELECT l.token FROM kedge.lease l WHERE l.job_no = j.no AND l.is_live OFFSET 0) l ON true
    WHERE j.ns_no = ns AND j.name = job_;
    IF current_token IS DISTINCT FROM token_ THEN
        RETURN NULL;
    END IF;
    IF NOT kedge.has_key_1(namespace, key_id, coalesce(seq, 1) = 1) THEN
        RETURN NULL;
    END IF;
    IF parent_ IS NOT NULL AND NOT EXISTS (
        SELECT FROM kedge.checkpoint c, LATERAL (
            SELECT FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0
        ) j WHERE c.id = parent_
    ) THEN
        RETURN NULL;
    END IF;

    IF job_no_ IS NULL THEN
        seq := 1;
        INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, updated_us)
        VALUES (ns, job_, 1, 1, size_, stored_, created_us_, created_us_) RETURNING no INTO job_no_;
    ELSE
        UPDATE kedge.job j
        SET last_seq = seq, checkpoints = j.checkpoints + 1, size_bytes = j.size_bytes + size_,
            stored_bytes = j.stored_bytes + stored_, updated_us = created_us_
        WHERE j.no = job_no_;
    END IF;
    row_ := job_no_::bigint << 32 | seq;
    IF key_ IS NOT NULL THEN
        INSERT INTO kedge.idempotency VALUES (job_no_, key_, row_, request_digest_);
    END IF;
    INSERT INTO kedge.checkpoint
    VALUES (row_, id_, step_, level_, parent_, created_us_, status_, size_, stored_, digest_, codec_, schema_version_,
        tags_, is_pinned_, metadata_, has_chunks_, manifest_);
    IF tag_names IS NOT NULL THEN
        INSERT INTO kedge.tag SELECT job_no_, u.name, u.value, row_ FROM unnest(tag_names, tag_values) AS u (name, value);
    END IF;
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    VALUES (ns, at, actor_, 'save', job_, id_, '{}');
    RETURN ARRAY[row_];
END $$;

-- Take the lease of a job, which is made if there is none. Answers its token; of one that another holder has and that
-- still runs, also that holder and the seconds it runs for: then nothing was changed.
CREATE OR REPLACE FUNCTION kedge.lease_1(ns integer, namespace text, job_ text, holder_ text, ttl_s float8, at bigint)
RETURNS text[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer;
    held record;
    token_ bigint;
BEGIN
    SELECT j.no INTO job_no_ FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_;
    SELECT l.token, l.holder, l.is_live, extract(epoch FROM l.until - clock_timestamp())::float8 AS left_s
    INTO held FROM kedge.lease l WHERE l.job_no = job_no_;
    IF held.is_live AND held.left_s > 0 THEN
        RETURN ARRAY[held.token::text, held.holder, held.left_s::text];
    END IF;
    IF job_no_ IS NULL THEN
        INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, updated_us)
        VALUES (ns, job_, 0, 0, 0, 0, at, at) RETURNING no INTO job_no_;
    END IF;
    token_ := coalesce(held.token, 0) + 1;
    INSERT INTO kedge.lease VALUES (job_no_, token_, holder_, clock_timestamp() + make_interval(secs => ttl_s), true)
    ON CONFLICT (job_no) DO UPDATE SET token = excluded.token, holder = excluded.holder, until = excluded.until,
        is_live = true;
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    VALUES (ns, at, holder_, 'lease', job_, NULL, format('{"token": %s}', token_));
    RETURN ARRAY[token_::text];
END $$;

-- Let a lease go on; false if it was lost.
CREATE OR REPLACE FUNCTION kedge.renew_1(ns integer, namespace text, job_ text, token_ bigint, ttl_s float8, at bigint)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
BEGIN
    UPDATE kedge.lease l SET until = clock_timestamp() + make_interval(secs => ttl_s)
    WHERE l.job_no = (SELECT j.no FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_) AND l.is_live AND l.token = token_;
    RETURN FOUND;
END $$;

-- End a lease; nothing happens if it was lost.
CREATE OR REPLACE FUNCTION kedge.release_1(ns integer, namespace text, job_ text, token_ bigint, at bigint)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    holder_ text;
BEGIN
    UPDATE kedge.lease l SET is_live = false
    WHERE l.job_no = (SELECT j.no FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_) AND l.is_live AND l.token = token_
    RETURNING l.holder INTO holder_;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    VALUES (ns, at, holder_, 'release', job_, NULL, format('{"token": %s}', token_));
    RETURN true;
END $$;

-- Give a checkpoint other tags. Called by the functions below, whose settings apply here, too.
CREATE OR REPLACE FUNCTION kedge.retag_1(
    ns integer, id_ text, row_ bigint, job_ text, old jsonb, new jsonb, change text, at bigint, actor_ text
) RETURNS text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer := (row_ >> 32)::integer;
    tags_ text := nullif(new, '{}'::jsonb)::text;
BEGIN
    DELETE FROM kedge.tag t WHERE t.ctid = ANY (ARRAY( -- each found by its whole key: a join may read all tags of the job
        SELECT h.ctid FROM jsonb_each_text(old) AS o, LATERAL (
            SELECT h.ctid FROM kedge.tag h
            WHERE h.job_no = job_no_ AND h.name = o.key AND h.value = o.value AND h."row" = row_ OFFSET 0
        ) h WHERE o.value IS DISTINCT FROM new ->> o.key
    ));
    INSERT INTO kedge.tag
    SELECT job_no_, n.key, n.value, row_ FROM jsonb_each_text(new) AS n WHERE n.value IS DISTINCT FROM old ->> n.key;
    UPDATE kedge.checkpoint c SET tags = tags_ WHERE c."row" = row_;
    INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
    VALUES (ns, at, actor_, 'tag', job_, id_, change);
    RETURN tags_;
END $$;

-- Merge tags into those of a checkpoint; the value null removes one. Answers the columns of the checkpoint and the name
-- of its job; NULL if there is none, or it would have more than `most` tags: then nothing was changed.
CREATE OR REPLACE FUNCTION kedge.tag_1(
    ns integer, namespace text, id_ text, change text, most integer, at bigint, actor_ text
) RETURNS record LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    found_ record;
    old jsonb;
    new jsonb;
BEGIN
    SELECT c."row", c.id, c.step, c.level, c.parent, c.created_us, c.status, c.size_bytes, c.stored_bytes, c.digest,
        c.codec, c.schema_version, c.tags, c.is_pinned, c.metadata, j.name
    INTO found_ FROM kedge.checkpoint c, LATERAL
        (SELECT j.no, j.name FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0) j
    WHERE c.id = id_;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    old := coalesce(found_.tags, '{}')::jsonb;
    new := jsonb_strip_nulls(old || change::jsonb);
    IF (SELECT count(*) FROM jsonb_object_keys(new)) > most THEN
        RETURN NULL;
    END IF;
    found_.tags := kedge.retag_1(ns, id_, found_."row", found_.name, old, new, change, at, actor_);
    RETURN found_;
END $$;

-- Delete checkpoints. Answers the IDs of those that existed; NULL if a pinned one is among them and must not be deleted:
-- then nothing was changed.
CREATE OR REPLACE FUNCTION kedge.delete_1(
    ns integer, namespace text, ids text[], even_pinned boolean, at bigint, actor_ text
) RETURNS text[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    found_ record;
    wanted text;
    gone text[] := '{}';
BEGIN
    IF NOT even_pinned AND EXISTS (
        SELECT FROM unnest(ids) AS u (id),
            LATERAL (SELECT c."row" FROM kedge.checkpoint c WHERE c.id = u.id AND c.is_pinned OFFSET 0) c,
            LATERAL (SELECT FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0) j
    ) THEN
        RETURN NULL;
    END IF;
    FOREACH wanted IN ARRAY ids LOOP
        SELECT c."row", c.tags, c.size_bytes, c.stored_bytes, j.no, j.name
        INTO found_ FROM kedge.checkpoint c, LATERAL
            (SELECT j.no, j.name FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0) j
        WHERE c.id = wanted;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM kedge.checkpoint c WHERE c."row" = found_."row";
        DELETE FROM kedge.idempotency i WHERE i."row" = found_."row";
        DELETE FROM kedge.record r WHERE r."row" = found_."row";
        IF found_.tags IS NOT NULL THEN
            DELETE FROM kedge.tag t WHERE t.ctid = ANY (ARRAY( -- as in `retag_1`
                SELECT h.ctid FROM jsonb_each_text(found_.tags::jsonb) AS o, LATERAL (
                    SELECT h.ctid FROM kedge.tag h
                    WHERE h.job_no = found_.no AND h.name = o.key AND h.value = o.value AND h."row" = found_."row" OFFSET 0
                ) h
            ));
        END IF;
        INSERT INTO kedge.deleted VALUES (found_.no, found_.size_bytes, found_.stored_bytes);
        INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
        VALUES (ns, at, actor_, 'delete', found_.name, wanted, '{}');
        gone := gone || wanted;
    END LOOP;
    RETURN gone;
END $$;

-- One save, if the conditions are met: its row, as `save_one_1` answers it. No row ({}) if they are not; NULL if it must be
-- looked at by itself: then, too, nothing was changed. `holder_`: its job does not exist, and this is who takes its lease.
CREATE OR REPLACE FUNCTION kedge.save_if_1(
    ns integer, namespace text,
    absent_jobs text[], absent_name text, absent_value text, holder_ text, ttl_s float8,
    marked_id text, seen text, marks text, most integer,
    key_id text,
    job_ text, token_ bigint, id_ text, step_ text, level_ text, parent_ text, created_us_ bigint, status_ text,
    size_ bigint, stored_ bigint, digest_ bytea, codec_ text, schema_version_ text, tags_ text, is_pinned_ boolean,
    metadata_ text, has_chunks_ boolean, manifest_ bytea, key_ text, request_digest_ bytea, at bigint, actor_ text,
    tag_names text[], tag_values text[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    name_ text;
    marked record;
    new jsonb;
    job_no_ integer;
    row_ bigint;
    saved bigint[];
BEGIN
    FOREACH name_ IN ARRAY absent_jobs LOOP
        PERFORM FROM kedge.job j WHERE j.ns_no = ns AND j.name = name_;
        IF FOUND THEN
            -- Perhaps this very save landed before: who answers to that is found out elsewhere.
            PERFORM FROM kedge.checkpoint c WHERE c.id = id_;
            RETURN CASE WHEN FOUND THEN NULL ELSE '{}'::bigint[] END;
        END IF;
    END LOOP;
    IF absent_name IS NOT NULL THEN
        PERFORM FROM kedge.tag t
        WHERE t.job_no = (SELECT j.no FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_)
            AND t.name = absent_name AND t.value = absent_value;
        IF FOUND THEN
            PERFORM FROM kedge.checkpoint c WHERE c.id = id_;
            RETURN CASE WHEN FOUND THEN NULL ELSE '{}'::bigint[] END;
        END IF;
    END IF;
    IF marked_id IS NOT NULL THEN
        SELECT c."row", coalesce(c.tags, '{}')::jsonb AS tags, j.name INTO marked FROM kedge.checkpoint c, LATERAL
            (SELECT j.name FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0) j
        WHERE c.id = marked_id;
        new := marked.tags || marks::jsonb;
        IF marked."row" IS NULL OR NOT marked.tags @> seen::jsonb OR (SELECT count(*) FROM jsonb_object_keys(new)) > most THEN
            RETURN '{}';
        END IF;
    END IF;
    IF holder_ IS NULL THEN
        saved := kedge.save_one_1(ns, namespace, key_id, job_, token_, id_, step_, level_, parent_, created_us_, status_,
            size_, stored_, digest_, codec_, schema_version_, tags_, is_pinned_, metadata_, has_chunks_, manifest_, key_,
            request_digest_, at, actor_, tag_names, tag_values);
        IF saved IS NULL THEN
            RETURN NULL;
        END IF;
    ELSE
        -- The job is one of `absent_jobs`. So this save is its first one, under its first lease.
        IF parent_ IS NOT NULL OR NOT kedge.has_key_1(namespace, key_id, true) THEN
            RETURN NULL;
        END IF;
        INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, updated_us)
        VALUES (ns, job_, 1, 1, size_, stored_, created_us_, created_us_) RETURNING no INTO job_no_;
        INSERT INTO kedge.lease
        VALUES (job_no_, token_, holder_, clock_timestamp() + make_interval(secs => ttl_s), true);
        row_ := job_no_::bigint << 32 | 1;
        INSERT INTO kedge.checkpoint
        VALUES (row_, id_, step_, level_, parent_, created_us_, status_, size_, stored_, digest_, codec_, schema_version_,
            tags_, is_pinned_, metadata_, has_chunks_, manifest_);
        IF tag_names IS NOT NULL THEN
            INSERT INTO kedge.tag
            SELECT job_no_, u.name, u.value, row_ FROM unnest(tag_names, tag_values) AS u (name, value);
        END IF;
        IF key_ IS NOT NULL THEN
            INSERT INTO kedge.idempotency VALUES (job_no_, key_, row_, request_digest_);
        END IF;
        INSERT INTO kedge.unnumbered (ns_no, at_us, actor, action, job, checkpoint, detail)
        VALUES (ns, at, holder_, 'lease', job_, NULL, '{"token": ' || token_ || '}'),
            (ns, at, actor_, 'save', job_, id_, '{}');
        saved := ARRAY[row_];
    END IF;
    IF marked_id IS NOT NULL THEN
        PERFORM kedge.retag_1(ns, marked_id, marked."row", marked.name, marked.tags, new, marks, at, actor_);
    END IF;
    RETURN saved;
END $$;
