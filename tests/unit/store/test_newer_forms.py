"""What a newer Kedge has written is refused by name, not taken for damage (I8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kedge.blobs.memory import MemoryBlobs
from kedge.errors import UnsupportedFormat
from kedge.index.rows import chunk_of
from kedge.store.manifest import parse_manifest
from kedge.store.record import Draft, PackRecord, append_record, pack_record, read_records


def records(draft: Draft) -> list[PackRecord]:
    blobs = MemoryBlobs()
    writer = blobs.writer(0)
    pack, _ = append_record(writer, draft)
    writer.commit()
    return list(read_records(blobs, pack))


def with_number(draft: Draft, at: int, value: int) -> Draft:
    """A record with another number in its header."""
    return replace(draft, head=draft.head[:at] + value.to_bytes(2, "little") + draft.head[at + 2 :])


class Damaged(Draft):
    def bound_to(self, pack: str) -> bytes:
        return super().bound_to(pack)[:-1] + b"?"


def test_unknown_encodings_forms_and_kinds_name_their_writer() -> None:
    with pytest.raises(UnsupportedFormat, match=r"encoding 0x4.* Kedge 9\.8"):
        chunk_of((b"d" * 32, 1, 1, 4, None, 0, b"x", 0, None), "9.8")
    with pytest.raises(UnsupportedFormat, match=r"form 6.* Kedge 9\.8"):
        parse_manifest(b"\x06?", lambda *_: b"", "9.8")
    record = pack_record(PackRecord("default", (), ()))
    assert records(record) == [PackRecord("default", [], [])]
    for at, value in ((8, 1), (8, 3), (10, 8)):
        with pytest.raises(UnsupportedFormat, match="wrote it"):
            records(with_number(record, at, value))
    assert records(with_number(record, 8, 0x8001)) == []  # of a kind that may be passed over
    assert records(Damaged(record.head, record.payload)) == []
