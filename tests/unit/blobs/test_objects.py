"""Packs in object stores: memory, names, lost answers, and what a writer on another machine may rely on."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from kedge.errors import NotAStore, NotFound, ReadOnly, StorageError, Unavailable, UnsupportedFormat, Validation
from kedge.testing.blobs_suite import never, pattern, put, read
from tests.parts import library

obstore = library("obstore")

from obstore.store import MemoryStore

from kedge.blobs import object_writer, objects, owner
from kedge.blobs.backoff import Backoff
from kedge.blobs.object_writer import PACK_BYTES
from kedge.blobs.objects import ObjectBlobs
from kedge.blobs.owner import take_over
from kedge.blobs.retries import RetryingBlobs


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def blobs(store: MemoryStore) -> Iterator[ObjectBlobs]:
    blobs = ObjectBlobs(store, "p")
    yield blobs
    blobs.close()


def names(store: MemoryStore, prefix: str = "") -> list[str]:
    return sorted(meta["path"] for page in obstore.list(store, prefix) for meta in page)


def test_a_large_save_is_cut_into_packs_of_one_put_each(blobs: ObjectBlobs) -> None:
    datas = [pattern(3_000_000, seed) for seed in range(14)]
    places = put(blobs, *datas)
    sizes = dict(blobs.packs())
    assert len(sizes) == 3
    assert max(sizes.values()) <= PACK_BYTES
    assert [read(blobs, place, 3_000_000) for place in places] == datas


def test_a_bucket_that_is_away_has_lost_no_packs(blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one, and of one that never was, a read says the same; only a listing tells them apart."""
    (place,) = put(blobs, b"one")
    with pytest.raises(NotFound):
        read(blobs, ("f" * 32, 0), 3)

    def away(*_: object, **__: object) -> None:
        raise FileNotFoundError("NoSuchBucket")

    for name in ("get_range", "head", "list_objects"):
        monkeypatch.setattr(objects, name, away)
    with pytest.raises(StorageError, match="bucket"):
        read(blobs, place, 3)
    with pytest.raises(StorageError, match="bucket"):
        list(blobs.packs())


def test_a_prefix_is_one_stores(store: MemoryStore) -> None:
    """To gc of another one its packs would be garbage (I3)."""
    put(first := ObjectBlobs(store, "p"), b"one")  # from before prefixes had owners
    with pytest.raises(NotAStore, match="this database, which is new"):
        ObjectBlobs(store, "p").claim("b" * 32, lambda: False)
    first.claim("a" * 32, lambda: True)
    first.claim("a" * 32, lambda: True)
    with pytest.raises(NotAStore, match=r"another store.*prefix of its own"):
        ObjectBlobs(store, "p").claim("b" * 32, lambda: True)
    ObjectBlobs(store, "q").claim("b" * 32, lambda: False)
    take_over(first, "b" * 32)
    ObjectBlobs(store, "p").claim("b" * 32, lambda: False)


def test_of_two_stores_that_want_a_prefix_one_gets_it(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = owner._create

    def create(blobs: ObjectBlobs, store_id: str) -> str | None:
        real(ObjectBlobs(store, blobs.root), "a" * 32)  # between our look and our put
        return real(blobs, store_id)

    monkeypatch.setattr(owner, "_create", create)
    ObjectBlobs(store, "p").claim("a" * 32, lambda: False)  # a process of the same store, or an answer that was lost
    with pytest.raises(NotAStore):
        ObjectBlobs(store, "q").claim("b" * 32, lambda: False)


def test_nothing_is_written_or_removed_before_the_owner_is_known(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObjectBlobs(store, "p").claim("a" * 32, lambda: False)
    (pack,) = {place[0] for place in put(ObjectBlobs(store, "p"), b"one")}

    def away(blobs: ObjectBlobs) -> str | None:
        raise Unavailable("no network")

    second = ObjectBlobs(store, "p")
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_read", away)
        second.claim("b" * 32, lambda: False)  # what is in the index can be looked at
    for act in (lambda: second.writer(1), second.seal, lambda: second.remove(pack, lambda: True)):
        with pytest.raises(NotAStore):
            act()
    assert [name for name, _ in second.packs()] == [pack]


def test_what_is_larger_than_a_pack_is_a_pack(blobs: ObjectBlobs) -> None:
    before, place, behind = put(blobs, b"before", pattern(PACK_BYTES + 5), b"behind")
    assert read(blobs, place, PACK_BYTES + 5) == pattern(PACK_BYTES + 5)
    assert read(blobs, before, 6) + read(blobs, behind, 6) == b"beforebehind"


def test_memory_is_bounded_when_the_store_is_slow(blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appending waits for puts: at most those under way and the pack being filled are held."""
    sent: list[str] = []
    release = threading.Event()

    def slow(self: ObjectBlobs, pack: str, data: bytes) -> None:
        release.wait(60)
        sent.append(pack)

    monkeypatch.setattr(ObjectBlobs, "create", slow)
    monkeypatch.setattr(object_writer, "PACK_BYTES", 1 << 20)
    threading.Timer(0.5, release.set).start()
    piece = pattern(500_000)
    tracemalloc.start()
    try:
        writer = blobs.writer(0)
        for _ in range(60):
            writer.append(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.commit()
    assert len(sent) == 30
    assert peak < 8 << 20


def test_a_put_whose_answer_was_lost_is_no_conflict(blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lost = objects.put, []

    def losing(store: MemoryStore, path: str, data: bytes, **options: object) -> object:
        answer = real(store, path, data, **options)
        if "/packs/" in path and len(lost) < 3:
            lost.append(path)
            raise obstore.exceptions.GenericError("connection reset")
        return answer

    monkeypatch.setattr(objects, "put", losing)
    retrying = RetryingBlobs(blobs, Backoff(first_s=0.0))
    datas = [pattern(9_000_000, seed) for seed in range(4)]
    places = put(retrying, *datas)
    assert len(lost) == 3
    assert [read(blobs, place, 9_000_000) for place in places] == datas
    assert len(list(blobs.packs())) == 4


def test_a_name_that_somebody_else_has_is_refused(blobs: ObjectBlobs, store: MemoryStore) -> None:
    obstore.put(store, f"p/packs/{'a' * 32}", b"other bytes")
    with pytest.raises(StorageError, match="somebody else"):
        blobs.create("a" * 32, b"mine")
    assert bytes(obstore.get(store, f"p/packs/{'a' * 32}").bytes()) == b"other bytes"


def test_without_retries_an_unreachable_store_fails_the_save(
    blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise obstore.exceptions.GenericError("no route to host\n\nDebug source: …")

    monkeypatch.setattr(objects, "put", broken)
    writer = blobs.writer(0)
    writer.append(b"data")
    with pytest.raises(Unavailable, match="no route to host") as caught:
        writer.commit()
    assert "Debug" not in str(caught.value)
    writer.abort()


def test_missing_rights_are_not_tried_again(blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **options: object) -> None:
        raise obstore.exceptions.PermissionDeniedError("403")

    monkeypatch.setattr(objects, "put", forbidden)
    writer = RetryingBlobs(blobs).writer(0)
    writer.append(b"data")
    with pytest.raises(ReadOnly, match="403"):
        writer.commit()
    writer.abort()


def test_an_aborted_save_takes_its_packs_with_it(blobs: ObjectBlobs, store: MemoryStore) -> None:
    writer = blobs.writer(0)
    for seed in range(10):
        writer.append(pattern(5_000_000, seed))
    writer.abort()
    assert names(store) == []


def test_a_released_writer_leaves_only_its_packs(blobs: ObjectBlobs, store: MemoryStore) -> None:
    ((pack, _),) = put(blobs, b"data")
    assert names(store) == [f"p/packs/{pack}"]


def test_a_crashed_writer_is_believed_for_the_grace_period(store: MemoryStore) -> None:
    """Nothing but its registration, and the store's clock, speaks for a writer on another machine."""
    crashed = ObjectBlobs(store, "p", grace_s=1000)
    writer = crashed.writer(0)
    pack, _ = writer.append(b"data")
    writer.commit()

    assert not ObjectBlobs(store, "p", grace_s=1000).remove(pack, never)
    impatient = ObjectBlobs(store, "p", grace_s=0.0)
    assert impatient.remove(pack, lambda: True)  # as when 1,000 s have passed
    impatient.seal()
    assert not [name for name in names(store) if "/writers/" in name]
    writer.release()


def test_a_long_save_renews_its_registration(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = ObjectBlobs(store, "p", grace_s=1000)
    writer = blobs.writer(0)
    writer.append(b"one")
    writer.commit()
    (registration,) = names(store, "p/writers")
    first = obstore.head(store, registration)["last_modified"]
    long = blobs.writer(0)
    long.append(b"one")
    long._registering.wait()  # type: ignore[union-attr]
    monkeypatch.setattr(blobs, "_registered", {long._id: -1e9})
    long.append(b"two")
    long.commit()
    assert obstore.head(store, f"p/writers/{long._id}")["last_modified"] > first
    writer.release()
    long.release()


def test_the_clock_is_that_of_the_store(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is years ahead must not take living writers for dead (I4)."""
    blobs, other = ObjectBlobs(store, "p"), ObjectBlobs(store, "p")
    writer = blobs.writer(0)
    pack, _ = writer.append(b"data")
    writer.commit()
    monkeypatch.setattr(objects.time, "time", lambda: 9e9)
    assert not other.remove(pack, never)
    writer.release()


def test_two_prefixes_do_not_see_each_other(store: MemoryStore) -> None:
    one, two = ObjectBlobs(store, "one"), ObjectBlobs(store, "/two/")
    (place,) = put(one, b"data")
    assert list(two.packs()) == []
    with pytest.raises(NotFound):
        read(two, place, 4)


def test_foreign_objects_are_left_out(blobs: ObjectBlobs, store: MemoryStore) -> None:
    obstore.put(store, "p/packs/readme.txt", b"hello")
    (place,) = put(blobs, b"data")
    assert [name for name, _ in blobs.packs()] == [place[0]]


def test_a_pack_of_a_newer_format_is_not_scanned(blobs: ObjectBlobs, store: MemoryStore) -> None:
    import struct
    import zlib

    fields = struct.pack("<8sI32s", b"KDPACK1\n", 99, b"b" * 32)
    obstore.put(store, f"p/packs/{'b' * 32}", (fields + struct.pack("<I", zlib.crc32(fields))).ljust(8192, b"\0"))
    with pytest.raises(UnsupportedFormat):
        list(blobs.scan("b" * 32, b"magic"))


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "nonsense"])
def test_addresses_that_lead_nowhere_are_refused(url: str) -> None:
    with pytest.raises(Validation):
        objects.connect(url)
