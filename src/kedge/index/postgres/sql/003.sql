-- A lease taken or given back, as a function: one round trip, beside saves or alone (`batch.py`). It changes no table.

-- Take (`token_` is NULL) or release the lease of a job, which is made if there is none. Answers its token; of one that
-- another holder has and that still runs, also that holder and the seconds it runs for: then nothing was changed. NULL
-- if what is released was lost before. `entry` is that of the event, as it is chained, between its number and detail.
CREATE OR REPLACE FUNCTION kedge.lease_1(
    ns integer, namespace text, job text, token_ bigint, holder_ text, ttl_s float8, at bigint, entry bytea
) RETURNS text[] LANGUAGE plpgsql SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    job_no_ integer;
    found_ record;
    head bigint;
    link bytea;
    said text;
BEGIN
    SELECT s.last_event + 1, s.chain INTO STRICT head, link FROM kedge.namespace s WHERE s.no = ns FOR UPDATE;
    SELECT j.no INTO job_no_ FROM kedge.job j WHERE j.ns_no = ns AND j.name = job;
    SELECT l.token, l.holder, l.is_live, extract(epoch FROM l.until - clock_timestamp())::float8 AS left_s
    INTO found_ FROM kedge.lease l WHERE l.job_no = job_no_;
    IF token_ IS NOT NULL THEN
        IF NOT coalesce(found_.is_live AND found_.token = token_, false) THEN
            RETURN NULL;
        END IF;
        UPDATE kedge.lease l SET is_live = false WHERE l.job_no = job_no_;
    ELSIF found_.is_live AND found_.left_s > 0 THEN
        RETURN ARRAY[found_.token::text, found_.holder, found_.left_s::text];
    ELSE
        IF job_no_ IS NULL THEN
            INSERT INTO kedge.job (ns_no, name, last_seq, checkpoints, size_bytes, stored_bytes, created_us, updated_us)
            VALUES (ns, job, 0, 0, 0, 0, at, at) RETURNING no INTO job_no_;
        END IF;
        token_ := coalesce(found_.token, 0) + 1;
        INSERT INTO kedge.lease VALUES (job_no_, token_, holder_, clock_timestamp() + make_interval(secs => ttl_s), true)
        ON CONFLICT (job_no) DO UPDATE SET token = excluded.token, holder = excluded.holder, until = excluded.until,
            is_live = true;
    END IF;
    said := format('{"token": %s}', token_);  -- less than 32 characters, of which MessagePack says so in one byte
    link := sha256(link || '\x98'::bytea || kedge.packed(head) || entry
        || set_byte('\x00'::bytea, 0, 160 + length(said)) || convert_to(said, 'UTF8'));
    UPDATE kedge.namespace s SET last_event = head, chain = link WHERE s.no = ns;
    INSERT INTO kedge.event (ns_no, id, at_us, actor, action, job, checkpoint, detail, chain)
    VALUES (ns, head, at, holder_, CASE WHEN ttl_s IS NULL THEN 'release' ELSE 'lease' END, job, NULL, said, link);
    PERFORM pg_notify('kedge', namespace || ':' || head);
    RETURN ARRAY[token_::text];
END $$;
