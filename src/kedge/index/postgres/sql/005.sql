-- One save alone, without chunks: what a step of a run is. The same as `save_1`, by the plainest statements there are: to
-- begin and end those of a batch takes longer than the save itself.
CREATE OR REPLACE FUNCTION kedge.save_one_1(
    ns integer, namespace text, key_id text,
    job_ text, token_ bigint, id_ text, step_ text, level_ text, parent_ text, created_us_ bigint, status_ text,
    size_ bigint, stored_ bigint, digest_ bytea, codec_ text, schema_version_ text, tags_ text, is_pinned_ boolean,
    metadata_ text, has_chunks_ boolean, manifest_ bytea, key_ text, request_digest_ bytea, at bigint, actor_ text,
    entry bytea, tag_names text[], tag_values text[]
) RETURNS bigint[] LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    head bigint;
    link bytea;
    job_no_ integer;
    seq bigint;
    current_token bigint;
    row_ bigint;
BEGIN
    SELECT s.last_event + 1, s.chain INTO STRICT head, link FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    SELECT j.no, j.last_seq + 1 INTO job_no_, seq FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_;
    IF job_no_ IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT l.token INTO current_token FROM kedge.lease l WHERE l.job_no = job_no_ AND l.is_live;
    IF current_token IS DISTINCT FROM token_ THEN
        RETURN NULL;
    END IF;
    IF key_id IS NULL AND seq = 1 THEN
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
    IF parent_ IS NOT NULL AND NOT EXISTS (
        SELECT FROM kedge.checkpoint c JOIN kedge.job j ON j.no = (c."row" >> 32)::integer
        WHERE c.id = parent_ AND j.ns_no = ns
    ) THEN
        RETURN NULL;
    END IF;

    row_ := job_no_::bigint << 32 | seq;
    link := sha256(link || '\x98'::bytea || kedge.packed(head) || entry);
    UPDATE kedge.namespace s SET last_event = head, chain = link WHERE s.no = ns;
    UPDATE kedge.job j
    SET last_seq = seq, checkpoints = j.checkpoints + 1, size_bytes = j.size_bytes + size_,
        stored_bytes = j.stored_bytes + stored_, updated_us = created_us_
    WHERE j.no = job_no_;
    INSERT INTO kedge.checkpoint
    VALUES (row_, id_, step_, level_, parent_, created_us_, status_, size_, stored_, digest_, codec_, schema_version_,
        tags_, is_pinned_, metadata_, has_chunks_, manifest_);
    IF tag_names IS NOT NULL THEN
        INSERT INTO kedge.tag SELECT job_no_, u.name, u.value, row_ FROM unnest(tag_names, tag_values) AS u (name, value);
    END IF;
    IF key_ IS NOT NULL THEN
        INSERT INTO kedge.idempotency VALUES (job_no_, key_, row_, request_digest_);
    END IF;
    INSERT INTO kedge.event VALUES (ns, head, at, actor_, 'save', job_, id_, '{}', link);
    PERFORM pg_notify('kedge', namespace || ':' || head);
    RETURN ARRAY[row_];
END $$;

-- Nobody waits for a lease that is not there any more: it is only released under the lock.
CREATE OR REPLACE FUNCTION kedge.release_1(ns integer, namespace text, job_ text, token_ bigint, at bigint)
RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer;
    holder_ text;
BEGIN
    SELECT j.no INTO job_no_ FROM kedge.job j WHERE j.ns_no = ns AND j.name = job_;
    PERFORM FROM kedge.lease l WHERE l.job_no = job_no_ AND l.is_live AND l.token = token_;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    UPDATE kedge.lease l SET is_live = false WHERE l.job_no = job_no_ AND l.is_live AND l.token = token_
    RETURNING l.holder INTO holder_;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM kedge.append_1(ns, namespace, at, holder_, 'release', job_, NULL, format('{"token": %s}', token_));
    RETURN true;
END $$;
