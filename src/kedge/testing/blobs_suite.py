"""The contract of `ports.Blobs` and `ports.BlobWriter`, sentence by sentence."""

from __future__ import annotations

import array
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kedge.errors import CheckpointError, Corrupted, NotFound
from kedge.ports import Blobs, Buffer

Place = tuple[str, int]

SIZES = [1, 100, 4095, 4096, 4097, 65_536, 1_048_575, 1_048_576, 1_048_577, 3_000_001]


def pattern(size: int, seed: int = 1) -> bytes:
    """Return bytes that differ from block to block and between seeds."""
    block = _pattern(seed % 256)
    return (block * (size // len(block) + 1))[:size]


@functools.cache
def _pattern(seed: int) -> bytes:
    return bytes((i * 7 + (i >> 8) * 13 + seed * 31) & 0xFF for i in range(4099))


def read(blobs: Blobs, place: Place, size: int, skip: int = 0) -> bytes:
    buffer = bytearray(size)
    blobs.read_into(place[0], place[1] + skip, memoryview(buffer))
    return bytes(buffer)


def put(blobs: Blobs, *datas: bytes, hint: int | None = None) -> list[Place]:
    """Save as the store does: append, commit, and release once an index would have committed."""
    writer = blobs.writer(sum(map(len, datas)) if hint is None else hint)
    places = [writer.append(data) for data in datas]
    writer.commit()
    writer.release()
    return places


def never() -> bool:
    pytest.fail("is_garbage was asked although the pack may not be removed")


class BlobsSuite:
    """Derive from this and define how to open the adapter; `other` is a second object on the same storage."""

    shows_unfinished = True  # whether packs take space, and are listed, before their writer commits
    counts_removals = True  # whether exactly one of several concurrent removers is told that it removed a pack
    races = 20  # how many removers compete for one pack

    def open_blobs(self, where: Path) -> Blobs:
        """Return an adapter on the storage for `where`, a directory that only this test uses."""
        raise NotImplementedError

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Iterator[Blobs]:
        blobs = self.open_blobs(tmp_path)
        yield blobs
        blobs.close()

    @pytest.fixture
    def other(self, blobs: Blobs, tmp_path: Path) -> Iterator[Blobs]:
        other = self.open_blobs(tmp_path)
        yield other
        other.close()

    # --- append, commit, read ---

    @pytest.mark.parametrize("size", SIZES)
    def test_what_was_appended_is_read_back(self, blobs: Blobs, other: Blobs, size: int) -> None:
        before, place, behind = put(blobs, b"before", pattern(size), b"behind")
        for reader in (blobs, other):
            assert read(reader, place, size) == pattern(size)
            assert read(reader, before, 6) == b"before"
            assert read(reader, behind, 6) == b"behind"

    def test_any_buffer_can_be_appended(self, blobs: Blobs) -> None:
        data = pattern(8000)
        numbers = array.array("d", data)
        buffers: list[Buffer] = [
            data,
            bytearray(data),
            memoryview(data),
            memoryview(numbers),
            memoryview(data + b"x")[:8000],
        ]
        writer = blobs.writer(0)
        places = [writer.append(buffer) for buffer in buffers]
        writer.commit()
        assert [read(blobs, place, 8000) for place in places] == [data] * len(buffers)

    def test_an_empty_append_has_a_place(self, blobs: Blobs) -> None:
        place, last = put(blobs, b"", b"last")
        assert read(blobs, place, 0) == b""
        assert read(blobs, last, 4) == b"last"

    def test_the_data_may_be_reused_as_soon_as_append_returns(self, blobs: Blobs) -> None:
        writer = blobs.writer(0)
        scratch = bytearray(10_000)
        places = []
        for seed in range(20):
            scratch[:] = pattern(10_000, seed)
            places.append(writer.append(scratch))
        scratch[:] = bytes(10_000)
        writer.commit()
        assert [read(blobs, place, 10_000) for place in places] == [pattern(10_000, seed) for seed in range(20)]

    def test_any_part_can_be_read(self, blobs: Blobs) -> None:
        (place,) = put(blobs, pattern(2_000_000))
        for skip, size in [(1, 10), (4096, 4096), (4095, 700_000), (8192, 1_048_576), (1_999_999, 1)]:
            assert read(blobs, place, size, skip) == pattern(2_000_000)[skip : skip + size]

    def test_any_writable_buffer_can_be_filled(self, blobs: Blobs) -> None:
        (place,) = put(blobs, pattern(800_000))
        numbers = array.array("d", bytes(800_000))
        blobs.read_into(*place, memoryview(numbers))
        assert numbers.tobytes() == pattern(800_000)
        shifted = bytearray(800_003)
        blobs.read_into(*place, memoryview(shifted)[3:])
        assert shifted[3:] == pattern(800_000)

    @pytest.mark.parametrize("hint", [0, 1, 10_000, 1 << 24])
    def test_the_size_hint_need_not_be_right(self, blobs: Blobs, hint: int) -> None:
        datas = [pattern(300_000, seed) for seed in range(5)]
        places = put(blobs, *datas, hint=hint)
        assert [read(blobs, place, 300_000) for place in places] == datas

    def test_nothing_is_added_to_a_sealed_pack(self, blobs: Blobs) -> None:
        (before,) = put(blobs, pattern(5000))
        blobs.seal()
        (after,) = put(blobs, pattern(5000, seed=2))
        assert before[0] != after[0]
        assert read(blobs, before, 5000) == pattern(5000)
        assert read(blobs, after, 5000) == pattern(5000, seed=2)

    def test_a_writer_is_used_by_several_threads(self, blobs: Blobs, other: Blobs) -> None:
        writer = blobs.writer(0)
        datas = [pattern(1 + seed * 9_973 % 300_000, seed) for seed in range(60)]
        with ThreadPoolExecutor(8) as pool:
            places = list(pool.map(writer.append, datas))
        writer.commit()
        assert len(set(places)) == len(places)
        for place, data in zip(places, datas, strict=True):
            assert read(other, place, len(data)) == data

    def test_reads_run_in_several_threads(self, blobs: Blobs) -> None:
        datas = [pattern(600_000 + seed, seed) for seed in range(12)]
        places = put(blobs, *datas)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda i: read(blobs, places[i % 12], 600_000 + i % 12), range(48)))
        assert results == datas * 4

    def test_writers_at_the_same_time_do_not_mix(self, blobs: Blobs, other: Blobs) -> None:
        def save(seed: int) -> tuple[Place, bytes, bool]:
            writer = (blobs, other)[seed % 2].writer(20_000)
            data = pattern(20_000 + seed, seed)
            place = writer.append(data)
            if seed % 3 == 0:
                writer.abort()
            else:
                writer.commit()
                writer.release()
            return place, data, seed % 3 != 0

        with ThreadPoolExecutor(8) as pool:
            saved = list(pool.map(save, range(40)))
        for place, data, is_committed in saved:
            if is_committed:
                assert read(blobs, place, len(data)) == data

    def test_a_commit_with_nothing_appended_is_fine(self, blobs: Blobs) -> None:
        blobs.writer(1000).commit()
        blobs.writer(1000).abort()
        assert list(blobs.packs()) == []

    def test_a_finished_writer_takes_no_more(self, blobs: Blobs) -> None:
        for finish in ("commit", "abort"):
            writer = blobs.writer(0)
            writer.append(b"data")
            getattr(writer, finish)()
            with pytest.raises(CheckpointError):
                writer.append(b"more")
            with pytest.raises(CheckpointError):
                writer.commit()

    def test_abort_leaves_what_is_committed(self, blobs: Blobs, other: Blobs) -> None:
        (first,) = put(blobs, pattern(50_000, 1))
        writer = blobs.writer(0)
        for seed in range(10):
            writer.append(pattern(200_000, seed))
        writer.abort()
        writer.abort()  # as if raised while another failure is handled
        (second,) = put(blobs, pattern(50_000, 2))
        for reader in (blobs, other):
            assert read(reader, first, 50_000) == pattern(50_000, 1)
            assert read(reader, second, 50_000) == pattern(50_000, 2)

    def test_abort_after_commit_is_a_release(self, blobs: Blobs, other: Blobs) -> None:
        """The index may have committed although the response was lost: the bytes must stay until gc judges."""
        writer = blobs.writer(0)
        place = writer.append(pattern(50_000))
        writer.commit()
        writer.abort()
        assert read(other, place, 50_000) == pattern(50_000)
        assert other.remove(place[0], lambda: True)

    def test_committed_bytes_never_change(self, blobs: Blobs, tmp_path: Path) -> None:
        committed: list[tuple[Place, bytes]] = []
        for seed in range(12):
            doomed = blobs.writer(0)
            doomed.append(pattern(30_000, seed + 100))
            data = pattern(5_000 + seed, seed)
            committed += [(place, data) for place in put(blobs, data)]
            doomed.abort()
            for place, expected in committed:
                assert read(blobs, place, len(expected)) == expected
        blobs.close()
        again = self.open_blobs(tmp_path)
        for place, expected in committed:
            assert read(again, place, len(expected)) == expected
        again.close()

    # --- unreadable data ---

    @pytest.mark.parametrize("pack", ["0" * 32, "", ".", "../secret", "a/b", "x\0y", "é" * 32, "0" * 5000])
    def test_a_missing_pack_is_not_found(self, blobs: Blobs, pack: str) -> None:
        with pytest.raises(NotFound):
            blobs.read_into(pack, 0, memoryview(bytearray(10)))

    def test_the_missing_pack_is_named(self, blobs: Blobs) -> None:
        with pytest.raises(NotFound, match="0" * 32):
            blobs.read_into("0" * 32, 0, memoryview(bytearray(10)))

    @pytest.mark.parametrize("size", [10, 1 << 20])
    def test_a_short_pack_is_corrupted(self, blobs: Blobs, size: int) -> None:
        (pack, offset), *_ = put(blobs, pattern(5000))
        with pytest.raises(Corrupted, match=pack):
            blobs.read_into(pack, offset + (1 << 30), memoryview(bytearray(size)))
        blobs.close()  # preallocated space is freed
        with pytest.raises(Corrupted, match=pack):
            blobs.read_into(pack, offset, memoryview(bytearray(size + 8192)))

    # --- packs and their removal ---

    def test_every_pack_is_listed(self, blobs: Blobs, other: Blobs) -> None:
        (place,) = put(blobs, pattern(100_000))
        unfinished = other.writer(0)
        pending = unfinished.append(pattern(200_000))
        for lister in (blobs, other):
            sizes = dict(lister.packs())
            assert sizes[place[0]] >= place[1] + 100_000
            if self.shows_unfinished:
                assert sizes[pending[0]] >= pending[1] + 200_000
        unfinished.commit()
        assert dict(blobs.packs())[pending[0]] >= pending[1] + 200_000

    def test_garbage_is_removed(self, blobs: Blobs, other: Blobs) -> None:
        (place,) = put(blobs, pattern(700_000))
        for reader in (blobs, other):
            assert read(reader, place, 700_000)
        answers = [True]
        assert other.remove(place[0], answers.pop)
        assert answers == []  # asked once
        for reader in (blobs, other):
            assert place[0] not in dict(reader.packs())
            with pytest.raises(NotFound, match=place[0]):
                read(reader, place, 700_000)

    def test_what_is_no_garbage_stays(self, blobs: Blobs) -> None:
        (place,) = put(blobs, b"data")
        assert not blobs.remove(place[0], lambda: False)
        assert read(blobs, place, 4) == b"data"

    def test_an_error_while_asking_removes_nothing(self, blobs: Blobs) -> None:
        (place,) = put(blobs, b"data")

        def ask() -> bool:
            raise Corrupted("the index is gone")

        with pytest.raises(Corrupted, match="the index is gone"):
            blobs.remove(place[0], ask)
        assert read(blobs, place, 4) == b"data"
        assert blobs.remove(place[0], lambda: True)

    def test_removing_again_is_no_error(self, blobs: Blobs, other: Blobs) -> None:
        (place,) = put(blobs, b"data")
        assert blobs.remove(place[0], lambda: True)
        for remover in (blobs, other):
            assert not remover.remove(place[0], never)
        assert not blobs.remove("0" * 32, never)

    def test_a_pack_a_writer_may_add_to_is_not_removed(self, blobs: Blobs, other: Blobs) -> None:
        writer = blobs.writer(0)
        pack, _ = writer.append(b"data")
        assert not blobs.remove(pack, never)
        assert not other.remove(pack, never)
        writer.abort()

    def test_a_pack_the_index_does_not_name_yet_is_not_removed(self, blobs: Blobs, other: Blobs) -> None:
        """Between the commits of blobs and index, the chunks look like garbage (I3)."""
        writer = blobs.writer(0)
        place = writer.append(b"data")
        writer.commit()
        assert not blobs.remove(place[0], never)
        assert not other.remove(place[0], never)
        writer.release()
        writer.release()
        assert other.remove(place[0], lambda: True)

    def test_a_writer_that_is_forgotten_after_its_commit_keeps_its_packs(self, blobs: Blobs, other: Blobs) -> None:
        writer = blobs.writer(0)
        place = writer.append(b"data")
        writer.commit()
        del writer
        assert not blobs.remove(place[0], never)
        assert not other.remove(place[0], never)
        blobs.close()
        assert other.remove(place[0], lambda: True)

    def test_a_writer_that_is_forgotten_before_its_commit_leaves_garbage(self, blobs: Blobs, other: Blobs) -> None:
        (place,) = put(blobs, b"data")
        writer = blobs.writer(0)
        forgotten, _ = writer.append(b"more")
        del writer
        assert other.remove(forgotten, lambda: True) or forgotten not in dict(other.packs())
        assert forgotten == place[0] or read(blobs, place, 4) == b"data"

    def test_writers_are_kept_out_while_asking(self, blobs: Blobs, other: Blobs) -> None:
        (doomed,) = put(blobs, pattern(10_000, 1))
        saved: list[Place] = []

        def ask() -> bool:
            thread = threading.Thread(target=lambda: saved.extend(put(blobs, pattern(10_000, 2))))
            thread.start()
            thread.join()
            return True

        assert other.remove(doomed[0], ask)
        (place,) = saved
        assert place[0] != doomed[0]
        assert read(blobs, place, 10_000) == pattern(10_000, 2)

    def test_saving_goes_on_after_a_removal(self, blobs: Blobs, other: Blobs) -> None:
        for remover in (blobs, other):
            (place,) = put(blobs, pattern(10_000, 1))
            assert remover.remove(place[0], lambda: True)
            (place,) = put(blobs, pattern(10_000, 2))
            assert read(other, place, 10_000) == pattern(10_000, 2)

    def test_only_one_of_many_removers_removes(self, blobs: Blobs, other: Blobs) -> None:
        for _ in range(self.races):
            (place,) = put(blobs, b"data")
            with ThreadPoolExecutor(4) as pool:
                removers = (blobs, other, blobs, other)
                removed = list(pool.map(lambda b, pack=place[0]: b.remove(pack, lambda: True), removers))
            assert removed.count(True) == 1 or (not self.counts_removals and any(removed))

    # --- other ---

    def test_scan_finds_what_begins_with_the_magic(self, blobs: Blobs, other: Blobs) -> None:
        magic = b"\x89RECORD\n"
        datas = [magic + b"one", pattern(5_000_000), magic * 3000, b"\x89RECORD!" * 999, pattern(9), magic]
        places = put(blobs, *datas)
        packs = {pack for pack, _ in places}
        for scanner in (blobs, other):
            hits = {(pack, offset) for pack in packs for offset in scanner.scan(pack, magic)}
            assert {places[0], places[2], places[5]} <= hits
            assert not {places[1], places[3], places[4]} & hits
        for pack in packs:
            offsets = list(blobs.scan(pack, magic))
            assert offsets == sorted(offsets)
        assert list(blobs.scan(places[0][0], b"no such thing")) == []

    def test_what_was_withdrawn_is_not_scanned(self, blobs: Blobs, other: Blobs) -> None:
        magic = b"\x89RECORD\n"
        (remaining,) = put(blobs, magic + b"of another save")
        writer = blobs.writer(0)
        chunk, record = writer.append(pattern(100_000)), writer.append(magic + pattern(10_000))
        writer.commit()
        writer.withdraw(*record)
        writer.release()
        present = {name for name, _ in other.packs()}
        hits = {(pack, at) for pack in {remaining[0], chunk[0], record[0]} & present for at in other.scan(pack, magic)}
        assert remaining in hits
        assert record not in hits

    def test_scanning_a_missing_pack_is_not_found(self, blobs: Blobs) -> None:
        with pytest.raises(NotFound):
            list(blobs.scan("0" * 32, b"magic"))

    def test_the_local_file_if_any_holds_the_bytes(self, blobs: Blobs) -> None:
        (place,) = put(blobs, pattern(10_000))
        path = blobs.file_of(place[0])
        if path is not None:
            assert Path(path).read_bytes()[place[1] :][:10_000] == pattern(10_000)

    def test_closing_twice_is_fine(self, blobs: Blobs) -> None:
        put(blobs, b"data")
        blobs.close()
        blobs.close()
