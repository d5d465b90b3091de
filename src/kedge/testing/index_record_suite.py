"""Part of `IndexSuite`: what packs know of an index for a rebuild, and forms that a newer Kedge writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kedge.errors import UnsupportedFormat
from kedge.ports import Chunk, ChunksGone, Encoding, Index, RecordPlace, SavedRow, digest_of
from kedge.version import __version__

from .index_fixtures import IndexFixtures, chunk, record, references, save, with_chunks


def in_row(data: bytes) -> Chunk:
    return Chunk(digest_of(data), len(data), len(data), Encoding.RAW, data=data)


def places(rows: Sequence[SavedRow], pack: str) -> list[RecordPlace]:
    return [RecordPlace(saved.id, digest, pack, 100) for saved, digest in rows]


class IndexRecordSuite(IndexFixtures):
    """`unrecorded`, `set_recorded`, `recorded_in`, bases and unknown encodings."""

    def test_what_is_in_the_index_alone_is_copied_once(self, index: Index, peer: Index, tenant: Index) -> None:
        data = in_row(b"a chunk that is a row")
        keyed = with_chunks(data, idempotency_key="k", request_digest=b"asked")
        saved = save(index, keyed, record("other job"))
        save(tenant, record(), with_chunks(in_row(b"theirs")))
        batch = peer.unrecorded(10)
        assert [(row.id, row.job, row.seq) for row, _ in batch.rows] == [(c.id, c.job, c.seq) for c in saved]
        assert [row.manifest for row, _ in batch.rows] == [index.read(c.id)[1] for c in saved]
        assert [(row.idempotency_key, row.request_digest) for row, _ in batch.rows] == [("k", b"asked"), (None, b"")]
        assert batch.chunks == [data]
        copied = replace(data, pack="p1", offset=4096)
        peer.set_recorded(places(batch.rows, "p1"), [copied], up_to=batch.up_to)
        again = index.unrecorded(10)
        assert (again.rows, again.chunks, again.up_to) == ([], [], 0)
        assert index.locate([data.digest]) == {data.digest: copied}
        assert {row.id for row, _ in index.recorded_in("p1")} == {c.id for c in saved}
        assert len(tenant.unrecorded(10).rows) == 2
        assert tenant.recorded_in("p1") == []

    def test_the_mark_goes_no_further_than_what_was_looked_at(self, index: Index) -> None:
        saved = save(index, *(record() for _ in range(5)))
        first = index.unrecorded(2)
        save(index, record())  # after the look
        index.set_recorded(places(first.rows, "p1"), [], up_to=first.up_to)
        rest = index.unrecorded(10)
        assert [row.id for row, _ in first.rows] == [c.id for c in saved[:2]]
        assert [row.seq for row, _ in rest.rows] == [3, 4, 5, 6]
        index.set_recorded(places(rest.rows, "p1"), [], up_to=rest.up_to)
        index.set_recorded([], [], up_to=first.up_to)  # by a slower one: it never decreases
        assert index.unrecorded(10).rows == []

    def test_a_pack_stays_for_the_records_of_what_lives(self, index: Index) -> None:
        saved = save(index, record(), record())
        batch = index.unrecorded(10)
        index.set_recorded(places(batch.rows, "p1"), [], up_to=batch.up_to)
        assert [(use.pack, use.live_chunks, use.live_bytes) for use in index.packs()] == [("p1", 2, 200)]
        index.delete([saved[0].id], actor="t")
        index.sweep(references)
        assert not index.condemn("p1")
        index.delete([saved[1].id], actor="t")
        index.sweep(references)
        assert index.packs() == []
        assert index.condemn("p1")

    def test_a_row_that_changed_since_gets_no_record(self, index: Index) -> None:
        saved = save(index, record(), record())
        batch = index.unrecorded(10)
        index.delete([saved[0].id], actor="t")
        _, changed = places(batch.rows, "p1")
        changed = replace(changed, digest=digest_of(b"as it was before it was encrypted anew"))
        index.set_recorded([*places(batch.rows, "p1")[:1], changed], [], up_to=batch.up_to)
        assert index.packs() == []

    def test_records_move_with_their_pack(self, index: Index) -> None:
        save(index, with_chunks(moving := chunk("moving", "p1", 4096)))
        batch = index.unrecorded(10)
        index.set_recorded(places(batch.rows, "p1"), [], up_to=batch.up_to)
        moved = replace(moving, pack="p2", offset=8192)
        records = places(index.recorded_in("p1"), "p2")
        assert index.relocate([moved], from_pack="p1", records=records) == 1
        assert index.relocate([moved], from_pack="p1", records=records) == 0
        assert index.recorded_in("p1") == []
        assert len(index.recorded_in("p2")) == 1
        assert index.condemn("p1")

    def test_a_condemned_pack_records_nothing(self, index: Index) -> None:
        save(index, record())
        batch = index.unrecorded(10)
        assert index.condemn("p1")
        try:
            index.set_recorded(places(batch.rows, "p1"), [], up_to=batch.up_to)
        except ChunksGone:
            assert len(index.unrecorded(10).rows) == 1  # for packs that cannot be locked

    def test_the_base_of_a_chunk_stays_as_long_as_the_chunk(self, index: Index) -> None:
        base = chunk("base")
        saved = save(index, with_chunks(base))[0]
        save(index, with_chunks(replace(chunk("difference"), base=base.digest)))
        index.delete([saved.id], actor="t")
        assert index.sweep(references) == (0, 0)
        assert index.locate([digest_of(b"difference")])[digest_of(b"difference")].base == base.digest
        index.delete([c.id for c in index.list("job")], actor="t")
        index.sweep(references)
        index.sweep(references)
        assert index.locate([base.digest, digest_of(b"difference")]) == {}

    def test_an_encoding_that_is_not_known_is_refused_by_name(self, index: Index) -> None:
        newer = replace(chunk("newer"), encoding=Encoding(1 << 6))
        save(index, with_chunks(newer))
        with pytest.raises(UnsupportedFormat, match=f"encoding 0x40.*Kedge {__version__} wrote it"):
            index.locate([newer.digest])
