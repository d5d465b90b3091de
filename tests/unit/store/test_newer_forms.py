"""What a newer Kedge has written is refused by name, not taken for damage (I8)."""

from __future__ import annotations

import pytest

from kedge.blobs.memory import MemoryBlobs
from kedge.errors import UnsupportedFormat
from kedge.index.rows import chunk_of
from kedge.ports import digest_of
from kedge.store.manifest import parse_manifest
from kedge.store.record import PackRecord, pack_record, read_records


def records(data: bytes) -> list[PackRecord]:
    blobs = MemoryBlobs()
    writer = blobs.writer(0)
    pack, _ = writer.append(data)
    writer.commit()
    return list(read_records(blobs, pack))


def sealed_again(data: bytes, at: int, value: int) -> bytes:
    """A record with another number in its header, and a digest that fits."""
    head = data[:at] + value.to_bytes(2, "little") + data[at + 2 : 32]
    return head + digest_of(head + data[64:]) + data[64:]


def test_unknown_encodings_forms_and_kinds_name_their_writer() -> None:
    with pytest.raises(UnsupportedFormat, match=r"encoding 0x4.* Kedge 9\.8"):
        chunk_of((b"d" * 32, 1, 1, 4, None, 0, b"x", 0, None), "9.8")
    with pytest.raises(UnsupportedFormat, match=r"form 6.* Kedge 9\.8"):
        parse_manifest(b"\x06?", lambda *_: b"", "9.8")
    record = pack_record(PackRecord("default", (), ()))
    assert records(record) == [PackRecord("default", [], [])]
    for at, value in ((8, 2), (10, 8)):
        with pytest.raises(UnsupportedFormat, match="wrote it"):
            records(sealed_again(record, at, value))
    assert records(sealed_again(record, 8, 0x8001)) == []  # of a kind that may be passed over
    assert records(record[:-1] + b"?") == []
