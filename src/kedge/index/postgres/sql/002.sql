-- What savers ask for most, as a function: its statements are planned once for each connection of the server, whoever
-- pgbouncer lends that to, and a whole batch of saves is one round trip. It changes no table: a Kedge that does not
-- know it works on beside one that does. A later form of it gets a name of its own.

-- A number as MessagePack has it, for the chain of events.
CREATE FUNCTION kedge.packed(number bigint) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN number < 128 THEN substring(int8send(number) FROM 8)
                WHEN number < 256 THEN '\xcc'::bytea || substring(int8send(number) FROM 8)
                WHEN number < 65536 THEN '\xcd'::bytea || substring(int8send(number) FROM 7)
                WHEN number < 4294967296 THEN '\xce'::bytea || substring(int8send(number) FROM 5)
                ELSE '\xcf'::bytea || int8send(number) END
$$;

-- Saves of jobs that are there, all or none: the rows they got, or NULL if any of them must be looked at by itself; then
-- nothing was saved. What the database refuses (an ID or a key that is taken) fails all of them.
--
-- The first statement waits for the lock that every writer of the namespace holds until it has committed. Each of those
-- behind it sees what was committed by then, so that what they check stays true until this commits (I3, I5).
CREATE FUNCTION kedge.save_1(
    ns integer, namespace text, key_id text,
    -- for each save
    jobs text[], tokens bigint[], ids text[], steps text[], levels text[], parents text[], created_us bigint[],
    statuses text[], sizes bigint[], stored bigint[], digests bytea[], codecs text[], schema_versions text[],
    tags text[], are_pinned boolean[], metadata text[], have_chunks boolean[], manifests bytea[],
    keys text[], request_digests bytea[], at_us bigint[], actors text[],
    entries bytea[],  -- of the events, as they are chained, behind their number
    -- for each tag: the number of its save, from 1 on
    tag_of integer[], tag_names text[], tag_values text[],
    -- for each chunk; `chunk_packs` are places in `packs`, NULL for those in the index
    packs text[], chunk_digests bytea[], chunk_sizes bigint[], chunk_stored bigint[], chunk_encodings smallint[],
    chunk_bases bytea[], chunk_packs integer[], chunk_offsets bigint[], chunk_data bytea[],
    reused bytea[]
) RETURNS bigint[] LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off  -- plans last while tables grow
    SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    n integer := cardinality(ids);
    head bigint;
    link bytea;
    entry bytea;
    is_sure boolean;
    has_first boolean;
    rows_ bigint[];
    links bytea[];
    pack_nos bigint[];
BEGIN
    SELECT s.last_event, s.chain INTO STRICT head, link FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;

    -- Jobs are there, and nobody else's lease is.
    SELECT array_agg(found.no::bigint << 32 | found.last_seq + found.nth ORDER BY found.i), bool_and(found.is_sure),
        bool_or(found.last_seq = 0)
    INTO rows_, is_sure, has_first
    FROM (
        SELECT new.i, j.no, j.last_seq, row_number() OVER (PARTITION BY new.name ORDER BY new.i) AS nth,
            j.no IS NOT NULL
            AND CASE WHEN new.token IS NULL THEN l.is_live IS NOT TRUE
                     ELSE coalesce(l.is_live AND l.token = new.token, false) END AS is_sure
        FROM (SELECT i, jobs[i] AS name, tokens[i] AS token FROM generate_series(1, n) i) new
        -- OFFSET: one look into the index for each, whatever the planner believes of tables that it met empty (I6).
        LEFT JOIN LATERAL (SELECT * FROM kedge.job j WHERE j.ns_no = ns AND j.name = new.name OFFSET 0) j ON true
        LEFT JOIN LATERAL (SELECT * FROM kedge.lease l WHERE l.job_no = j.no OFFSET 0) l ON true
    ) found;
    IF NOT is_sure THEN
        RETURN NULL;
    END IF;
    IF key_id IS NULL AND has_first THEN
        -- Locked: until this has committed nobody makes the store an encrypted one (I10).
        PERFORM FROM kedge.meta m WHERE m.key = 'encrypted' AND m.value = 'no' FOR SHARE;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
    END IF;
    IF key_id IS NOT NULL
        AND key_id IS DISTINCT FROM (SELECT m.value FROM kedge.meta m WHERE m.key = 'key:' || namespace) THEN
        RETURN NULL;
    END IF;
    IF parents IS NOT NULL AND (SELECT count(*) FROM kedge.checkpoint c
            JOIN kedge.job j ON j.no = (c."row" >> 32)::integer AND j.ns_no = ns
            WHERE c.id IN (SELECT unnest(parents))) < (SELECT count(DISTINCT p) FROM unnest(parents) p) THEN
        RETURN NULL;
    END IF;
    IF reused IS NOT NULL AND (SELECT count(*) FROM unnest(reused) AS wanted (digest)
            JOIN kedge.chunk c ON c.ns_no = ns AND c.digest = wanted.digest AND NOT c.is_damaged)
            < cardinality(reused) THEN
        RETURN NULL;
    END IF;
    IF packs IS NOT NULL THEN
        -- Locked against being condemned, and heard of if they are (I3).
        WITH named AS (
            INSERT INTO kedge.pack (name) SELECT unnest(packs)
            ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING no, name, is_condemned
        )
        SELECT array_agg(named.no ORDER BY wanted.i), NOT bool_or(named.is_condemned) INTO pack_nos, is_sure
        FROM unnest(packs) WITH ORDINALITY AS wanted (name, i) JOIN named ON named.name = wanted.name;
        IF NOT is_sure THEN
            RETURN NULL;
        END IF;
    END IF;

    FOREACH entry IN ARRAY entries LOOP
        head := head + 1;
        link := sha256(link || '\x98'::bytea || kedge.packed(head) || entry);
        links := links || link;
    END LOOP;
    UPDATE kedge.namespace s SET last_event = head, chain = link WHERE s.no = ns;
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
        -- The first copy of a chunk stays, unless it is damaged. Nobody else inserts here meanwhile, so that nothing can
        -- come between looking and inserting, and ON CONFLICT, which costs as much again, is not needed.
        DELETE FROM kedge.chunk c USING unnest(chunk_digests) AS u (d)
        WHERE c.ns_no = ns AND c.digest = u.d AND c.is_damaged;
        INSERT INTO kedge.chunk
        SELECT ns, u.d, u.s, u.t, u.e, false, u.f, pack_nos[u.p], u.o, u.b
        FROM unnest(chunk_digests, chunk_sizes, chunk_stored, chunk_encodings, chunk_bases, chunk_packs, chunk_offsets,
            chunk_data) AS u (d, s, t, e, f, p, o, b)
        WHERE NOT EXISTS (SELECT FROM kedge.chunk c WHERE c.ns_no = ns AND c.digest = u.d);
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
    INSERT INTO kedge.event
    SELECT ns, head - n + i, at_us[i], actors[i], 'save', jobs[i], ids[i], '{}', links[i] FROM generate_series(1, n) i;
    PERFORM pg_notify('kedge', namespace || ':' || head);
    RETURN rows_;
END $$;
