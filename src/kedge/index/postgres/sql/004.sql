-- Tags that change, checkpoints that are deleted, and leases that end with a save, as functions: one round trip, beside
-- saves and leases (`batch.py`). They change no table.

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

-- Append an event. The caller has the lock of the namespace.
CREATE OR REPLACE FUNCTION kedge.append_1(
    ns integer, namespace text, at bigint, actor_ text, action_ text, job_ text, checkpoint_ text, detail_ text
) RETURNS void LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    head bigint;
    link bytea;
BEGIN
    SELECT s.last_event + 1, s.chain INTO STRICT head, link FROM kedge.namespace s WHERE s.no = ns;
    link := sha256(link || '\x98'::bytea || kedge.packed(head) || kedge.packed(at) || kedge.packed(ns::bigint)
        || kedge.packed_text(actor_) || kedge.packed_text(action_) || kedge.packed_text(job_)
        || kedge.packed_text(checkpoint_) || kedge.packed_text(detail_));
    UPDATE kedge.namespace s SET last_event = head, chain = link WHERE s.no = ns;
    INSERT INTO kedge.event (ns_no, id, at_us, actor, action, job, checkpoint, detail, chain)
    VALUES (ns, head, at, actor_, action_, job_, checkpoint_, detail_, link);
    PERFORM pg_notify('kedge', namespace || ':' || head);
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
    PERFORM FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    SELECT c."row", c.id, c.step, c.level, c.parent, c.created_us, c.status, c.size_bytes, c.stored_bytes, c.digest,
        c.codec, c.schema_version, c.tags, c.is_pinned, c.metadata, j.name
    INTO found_ FROM kedge.checkpoint c JOIN kedge.job j ON j.no = (c."row" >> 32)::integer
    WHERE c.id = id_ AND j.ns_no = ns;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    old := coalesce(found_.tags, '{}')::jsonb;
    new := jsonb_strip_nulls(old || change::jsonb);
    IF (SELECT count(*) FROM jsonb_object_keys(new)) > most THEN
        RETURN NULL;
    END IF;
    DELETE FROM kedge.tag t USING jsonb_each_text(old) AS o
    WHERE t.job_no = (found_."row" >> 32)::integer AND t.name = o.key AND t.value = o.value AND t."row" = found_."row"
        AND o.value IS DISTINCT FROM new ->> o.key;
    INSERT INTO kedge.tag
    SELECT (found_."row" >> 32)::integer, n.key, n.value, found_."row" FROM jsonb_each_text(new) AS n
    WHERE n.value IS DISTINCT FROM old ->> n.key;
    found_.tags := nullif(new, '{}'::jsonb)::text;
    UPDATE kedge.checkpoint c SET tags = found_.tags WHERE c."row" = found_."row";
    PERFORM kedge.append_1(ns, namespace, at, actor_, 'tag', found_.name, id_, change);
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
    PERFORM FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    IF NOT even_pinned AND EXISTS (
        SELECT FROM unnest(ids) AS u (id) JOIN kedge.checkpoint c ON c.id = u.id
        JOIN kedge.job j ON j.no = (c."row" >> 32)::integer WHERE j.ns_no = ns AND c.is_pinned
    ) THEN
        RETURN NULL;
    END IF;
    FOREACH wanted IN ARRAY ids LOOP
        SELECT c."row", c.tags, c.size_bytes, c.stored_bytes, j.no, j.name
        INTO found_ FROM kedge.checkpoint c JOIN kedge.job j ON j.no = (c."row" >> 32)::integer
        WHERE c.id = wanted AND j.ns_no = ns;
        CONTINUE WHEN NOT FOUND;
        DELETE FROM kedge.checkpoint c WHERE c."row" = found_."row";
        DELETE FROM kedge.idempotency i WHERE i."row" = found_."row";
        DELETE FROM kedge.record r WHERE r."row" = found_."row";
        IF found_.tags IS NOT NULL THEN
            DELETE FROM kedge.tag t USING jsonb_each_text(found_.tags::jsonb) AS o
            WHERE t.job_no = found_.no AND t.name = o.key AND t.value = o.value AND t."row" = found_."row";
        END IF;
        UPDATE kedge.job j
        SET checkpoints = j.checkpoints - 1, size_bytes = j.size_bytes - found_.size_bytes,
            stored_bytes = j.stored_bytes - found_.stored_bytes
        WHERE j.no = found_.no;
        PERFORM kedge.append_1(ns, namespace, at, actor_, 'delete', found_.name, wanted, '{}');
        gone := gone || wanted;
    END LOOP;
    RETURN gone;
END $$;

-- End a lease behind the save that was its last. Nothing happens if it was lost.
CREATE OR REPLACE FUNCTION kedge.release_1(ns integer, namespace text, job_ text, token_ bigint, at bigint)
RETURNS boolean LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    holder_ text;
BEGIN
    PERFORM FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    UPDATE kedge.lease l SET is_live = false FROM kedge.job j
    WHERE j.ns_no = ns AND j.name = job_ AND l.job_no = j.no AND l.is_live AND l.token = token_
    RETURNING l.holder INTO holder_;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM kedge.append_1(ns, namespace, at, holder_, 'release', job_, NULL, format('{"token": %s}', token_));
    RETURN true;
END $$;
