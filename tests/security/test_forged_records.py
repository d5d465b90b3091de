"""What a state contains is never taken for a record of Kedge's own, by a rebuild, a repair or gc."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import ormsgpack
import pytest

import kedge
from kedge.care.repair import repair
from kedge.ports import digest_of

BLOCK = 4096


def forged(kind: int, pack: str, namespace: str = "victim", id_: str = "forged_1_00000000") -> bytes:
    """A record as docs/format.md describes it, of a checkpoint that nobody has saved."""
    tree = ormsgpack.packb("forged")
    manifest = b"\x01" + tree
    save = {
        "id": id_, "job": "forged", "seq": 1, "step": "s", "level": "step", "parent": None, "created_us": 1,
        "size_bytes": len(tree), "stored_bytes": len(manifest), "digest": digest_of(manifest), "codec": "kedge-1",
        "schema_version": "1", "tags": {}, "pinned": False, "metadata": "{}", "key": None, "request_digest": b"",
        "has_chunks": False, "manifest": manifest,
    }  # fmt: skip
    payload = ormsgpack.packb({"namespace": namespace, "saves": [save], "chunks": []})
    head = struct.pack("<8sHHI16s", b"KDREC1\n\0", kind, 0, len(payload), kedge.__version__.encode())
    return head + digest_of(pack.encode() + head + payload) + payload


def hostile(content: bytes) -> bytes:
    """The content at every block of a state that does not shrink."""
    return b"".join(content + os.urandom(-len(content) % BLOCK) for _ in range(128))


def lose_index(place: Path) -> None:
    for part in place.glob("index*"):
        part.unlink()
    repair(place, actor="t")


@pytest.mark.parametrize("kind", [1, 2, 3, 0x7FFF])
def test_a_state_that_contains_a_record(tmp_path: Path, kind: int) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        own = store.save("own", "large", hostile(forged(kind, "")))
        store.save("own", "another", hostile(forged(kind, "0" * 32)))
        with pytest.raises(kedge.NotFound):  # refused: its own record is withdrawn, and its chunks are nobody's
            store.save("own", "refused", hostile(forged(kind, "", "default")), parent="no_1_00000000")
        with pytest.raises(kedge.Validation):
            store.save("own", "replaced", hostile(forged(kind, "", "default", own)), idempotency_key="")
    lose_index(place)
    with kedge.open(place) as store:
        assert [job.name for job in store.jobs()] == ["own"]
        assert [c.step for c in store.list("own")] == ["large", "another"]
        assert store.verify().is_ok
        assert store.rebuild().found == 2
    with kedge.open(place, namespace="victim") as store:
        assert store.jobs() == []


def test_a_store_inside_a_store(tmp_path: Path) -> None:
    """A backup of one store in another: the packs of the inner one are content, whoever saved them."""
    with kedge.open(tmp_path / "inner") as inner:
        for n in range(3):
            inner.save("inner", f"step {n}", os.urandom(100_000))
    packs = [path.read_bytes() for path in (tmp_path / "inner" / "packs").iterdir()]
    place = tmp_path / "outer"
    with kedge.open(place) as outer:
        saved = outer.save("outer", "backup", packs)
    lose_index(place)
    with kedge.open(place) as outer:
        assert [job.name for job in outer.jobs()] == ["outer"]
        assert outer.load(saved) == packs
        assert outer.gc().damaged == ()


def test_a_record_that_moved_to_another_pack(tmp_path: Path) -> None:
    """A record belongs to the pack that it was written to: its bytes say nothing anywhere else."""
    with kedge.open(tmp_path / "s") as store:
        store.save("job", "step", os.urandom(100_000))
        (pack,) = (name for name, _ in store.store.blobs.packs())
        (offset,) = store.store.blobs.scan(pack, b"KDREC1\n\0")
    data = (tmp_path / "s" / "packs" / f"{pack}.pack").read_bytes()
    with kedge.open(tmp_path / "s") as store:
        store.save("job", "copy", hostile(data[offset : offset + BLOCK]))
    lose_index(tmp_path / "s")
    with kedge.open(tmp_path / "s") as store:
        assert [c.step for c in store.list("job")] == ["step", "copy"]
