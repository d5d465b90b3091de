-- Saves that are made only if something is so (`ports.Provided`), as `002.sql` has those that always are. No table changes: a
-- Kedge that does not know this function works on beside one that does.

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
    entry bytea, tag_names text[], tag_values text[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    name_ text;
    number bigint;
    old jsonb;
    saved bigint[];
BEGIN
    -- What is seen behind this lock stays so until this commits (I5).
    PERFORM FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    FOREACH name_ IN ARRAY absent_jobs LOOP
        PERFORM FROM kedge.job j WHERE j.ns_no = ns AND j.name = name_;
        IF FOUND THEN
            -- Perhaps this very save landed before: who answers to that is found out elsewhere.
            PERFORM FROM kedge.checkpoint c WHERE c.id = id_;
            RETURN CASE WHEN FOUND THEN NULL ELSE '{}'::bigint[] END;
        END IF;
    END LOOP;
    IF absent_name IS NOT NULL THEN
        SELECT j.no INTO number FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_;
        PERFORM FROM kedge.tag t WHERE t.job_no = number AND t.name = absent_name AND t.value = absent_value;
        IF FOUND THEN
            PERFORM FROM kedge.checkpoint c WHERE c.id = id_;
            RETURN CASE WHEN FOUND THEN NULL ELSE '{}'::bigint[] END;
        END IF;
    END IF;
    IF marked_id IS NOT NULL THEN
        SELECT coalesce(c.tags, '{}')::jsonb INTO old FROM kedge.checkpoint c, LATERAL
            (SELECT FROM kedge.job j WHERE j.no = (c."row" >> 32)::integer AND j.ns_no = ns OFFSET 0) j
        WHERE c.id = marked_id;
        IF old IS NULL OR NOT old @> seen::jsonb OR (SELECT count(*) FROM jsonb_object_keys(old || marks::jsonb)) > most THEN
            RETURN '{}';
        END IF;
    END IF;
    IF holder_ IS NOT NULL THEN
        IF NOT kedge.has_key_1(namespace, key_id, true) THEN
            RETURN NULL;
        END IF;
        PERFORM kedge.lease_1(ns, namespace, job_, holder_, ttl_s, at);
    END IF;
    saved := kedge.save_one_1(ns, namespace, key_id, job_, token_, id_, step_, level_, parent_, created_us_, status_, size_,
        stored_, digest_, codec_, schema_version_, tags_, is_pinned_, metadata_, has_chunks_, manifest_, key_,
        request_digest_, at, actor_, entry, tag_names, tag_values);
    IF saved IS NULL THEN
        IF holder_ IS NOT NULL THEN
            RAISE EXCEPTION USING MESSAGE = 'save must be looked at by itself: ' || id_;  -- with it goes the lease
        END IF;
        RETURN NULL;
    END IF;
    IF marked_id IS NOT NULL THEN
        PERFORM kedge.tag_1(ns, namespace, marked_id, marks, most, at, actor_);
    END IF;
    RETURN saved;
END $$;
