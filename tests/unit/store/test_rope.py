"""Trees in parts: exact, shared, collected, verified."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kedge
from kedge.codec import encode
from kedge.ports import digest_of
from kedge.store.request import Request
from kedge.store.rope import PartedTree, Piece, Pieces, parts_of, read_parts


def tree_of(texts: list[str]) -> PartedTree:
    """{"texts": texts} in parts, as an integration would lay it out."""
    head = b"\x81" + encode("texts").tree + b"\xdd" + len(texts).to_bytes(4, "big")
    return PartedTree([head, Pieces([Piece(encode(text).tree) for text in texts])])


def save(store: kedge.CheckpointManager, texts: list[str]) -> kedge.Checkpoint:
    return store.commit(Request("job", "step"), tree_of(texts))


def texts(count: int, seed: int = 0) -> list[str]:
    rnd = random.Random(seed)
    return [rnd.randbytes(150).hex() for _ in range(count)]


@pytest.fixture
def store(tmp_path: Path):
    with kedge.open(tmp_path / "store") as manager:
        yield manager


@given(st.lists(st.text(max_size=40), max_size=200))
def test_what_is_saved_in_parts_is_loaded_whole(items: list[str]) -> None:
    with kedge.open("memory:") as store:
        assert store.load(save(store, items).id) == {"texts": items}


def test_a_longer_run_stores_little_more(store: kedge.CheckpointManager) -> None:
    items = texts(500)
    added = [save(store, items[:count]).stored_bytes for count in range(450, 501)]
    assert max(added[1:]) < 2500, "an item of 300 bytes, a few groups of digests, the manifest"
    assert store.verify().problems == ()


def test_a_run_that_lost_its_beginning_shares_the_rest(store: kedge.CheckpointManager) -> None:
    items = texts(1000)
    save(store, items)
    assert save(store, items[7:]).stored_bytes < 5000


def test_outlines_diffs_copies_and_branches_know_parts(store: kedge.CheckpointManager) -> None:
    items = texts(50)
    a, b = save(store, items), save(store, [*items, "new"])
    assert store.outline(b.id) == {"texts": [*items, "new"]}
    assert [str(change.path) for change in store.diff(a.id, b.id).changes] == ["texts/50"]
    copies = store.copy("job", "other")
    store.resume_from(b.id, "third")
    for checkpoint in store.list("job"):
        store.delete("job", checkpoint.id)
    store.gc()
    assert store.load(copies[-1].id) == store.restore("third") == {"texts": [*items, "new"]}


def test_gc_takes_what_no_run_has_and_the_next_save_brings_it_back(store: kedge.CheckpointManager) -> None:
    items = texts(300)
    first = save(store, items)
    store.delete("job", first.id)
    assert store.gc().chunks_removed > 300
    again = save(store, items)  # this process believes that all of it is stored
    assert store.load(again.id) == {"texts": items}
    assert store.verify().problems == ()


def test_a_part_that_is_gone_deep_below_is_found_out(store: kedge.CheckpointManager) -> None:
    items = texts(300)
    kept, gone = save(store, items[:150]), save(store, items)
    store.delete("job", gone.id)
    store.gc()
    assert store.load(save(store, [*items, "more"]).id) == {"texts": [*items, "more"]}
    assert store.load(kept.id) == {"texts": items[:150]}


def test_a_changed_chunk_is_noticed(store: kedge.CheckpointManager) -> None:
    saved = save(store, texts(100))
    _, packed = store.store.index.read(saved.id)
    parts = parts_of(packed)
    _, digest = next(part for part in parts if not isinstance(part, bytes) and part[0] > 0)
    db = store.store.index._connection
    db.execute("UPDATE chunk SET data = ?, encoding = 0 WHERE digest = ?", (digest_of(b"x") * 4, digest))
    with pytest.raises(kedge.Corrupted):
        store.load(saved.id)
    assert store.verify().problems


@pytest.mark.parametrize(
    "packed", [b"\x05\x91\x01", b"\x05\x91\x92\x7f\xc4\x01x", b"\x05\xc0", b"\x05", b"\x05\x91\x92\x00\xc4\x01x"]
)
def test_nonsense_is_corrupted(packed: bytes) -> None:
    with pytest.raises(kedge.Corrupted):
        parts_of(packed)


@given(st.data())
def test_a_run_made_from_an_earlier_one_is_the_same_run(data: st.DataObject) -> None:
    rnd = random.Random(data.draw(st.integers(0, 1 << 32)))
    pieces = [Piece(rnd.randbytes(rnd.randint(1, 20))) for _ in range(rnd.randint(0, 300))]
    run = Pieces(pieces)
    for _ in range(6):
        at, gone = rnd.randint(0, len(pieces)), rnd.choice([0, 0, 1, 1, 2, 40])
        new = [Piece(rnd.randbytes(9)) for _ in range(rnd.choice([0, 1, 1, 2, 30]))]
        pieces = [*pieces[:at], *new, *pieces[at + gone :]]
        run, whole = Pieces(pieces, run), Pieces(pieces)
        assert (run.tops, run.size_bytes) == (whole.tops, whole.size_bytes)
        waiting = whole.tops
        while waiting:
            height, digest = waiting.pop()
            data_of = run.data_of(digest, height)
            assert data_of == whole.data_of(digest, height)
            waiting += [(height - 1, data_of[n : n + 32]) for n in range(0, len(data_of), 32)] if height else []


def test_each_height_is_read_at_once(store: kedge.CheckpointManager) -> None:
    items = texts(300)
    checkpoint, packed = store.catalogue.read(save(store, items).id)
    parts = parts_of(packed)
    assert parts is not None
    heights = [part[0] for part in parts if isinstance(part, tuple)]
    asked: list[int] = []

    def read(digests: Sequence[bytes]) -> dict[bytes, bytes]:
        asked.append(len(digests))
        return store.store.reader.read_named(digests, of=checkpoint.id)

    assert read_parts(parts, read) == store.store.tree((checkpoint, packed))
    assert len(asked) == max(heights) + 1 < len(heights)
