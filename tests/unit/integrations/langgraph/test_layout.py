"""How lists of a thread are laid out: exact after any edit, in blocks, shared where they are alike."""

import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.parts import require

require("module:langgraph")

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint

import kedge
from kedge.codec.fragments import encode_fragment as encode
from kedge.integrations.langgraph import KedgeSaver
from kedge.integrations.langgraph.blocks import LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES, Block
from kedge.integrations.langgraph.layout import ListChannel, lay_list

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
KIB = 1024


def put(saver: KedgeSaver, parent: Any, items: list[Any]) -> Any:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"items": items}
    checkpoint["channel_versions"] = {"items": checkpoint["id"]}  # a new one each time
    return saver.put(parent, checkpoint, {"source": "loop", "step": 1}, {"items": checkpoint["id"]})


def text(rnd: random.Random, size: int) -> str:
    return rnd.randbytes((size + 1) // 2).hex()[:size]


def some_item(rnd: random.Random) -> Any:
    size = rnd.choice([1, 30, 300, 800, 2000, 9000] if rnd.random() < 0.1 else [300, 800])
    made = text(rnd, size)
    return rnd.choice([made, made, HumanMessage(made, id="1"), {"t": made, "n": 1}, (made, 2.0), made.encode(), size])


def edited(items: list[Any], rnd: random.Random) -> list[Any]:
    """The list with a change such as graphs make."""
    items = list(items)
    at = rnd.randrange(len(items) + 1)
    match rnd.choice(["few", "few", "many", "all", "change", "change", "in place", "insert", "drop", "window", "swap"]):
        case "few":
            items += [some_item(rnd) for _ in range(rnd.randint(1, 3))]
        case "many":
            items[at:at] = [some_item(rnd) for _ in range(150)]
        case "all":
            items = [some_item(rnd) for _ in items]
        case "change" if at < len(items):
            items[at] = some_item(rnd)
        case "in place":
            for item in rnd.sample(items, min(10, len(items))):
                if isinstance(item, HumanMessage):
                    item.content += "!"
                elif isinstance(item, dict):
                    item["n"] = True  # equal to 1, and not the same
        case "insert":
            items.insert(at, some_item(rnd))
        case "drop":
            del items[at : at + rnd.choice([1, 1, 20])]
        case "window":
            items = [*items[2:], some_item(rnd), some_item(rnd)]
        case "swap" if at + 1 < len(items):
            items[at], items[at + 1] = items[at + 1], items[at]
    return items


@settings(max_examples=10)
@given(st.integers(0, 1 << 32))
def test_any_edits_and_restarts_give_back_what_was_put(seed: int) -> None:
    rnd = random.Random(seed)
    with kedge.open("memory:") as store, kedge.open("memory:") as other:
        saver, head, items = KedgeSaver(store), CONFIG, [some_item(rnd) for _ in range(rnd.choice([0, 5, 200]))]
        put_so_far: list[tuple[Any, bytes]] = []
        for _ in range(8):
            if rnd.random() < 0.2:
                saver = KedgeSaver(store)  # which remembers nothing
            elif put_so_far and rnd.random() < 0.2:
                head = rnd.choice(put_so_far)[0]  # a branch
            head = put(saver, head, items)
            put_so_far.append((head, encode(items)))
            items = edited(items, rnd)
        gone = put_so_far.pop(rnd.randrange(len(put_so_far)))[0]["configurable"]["checkpoint_id"]
        store.delete("thread:t", next(found.id for found in store.list("thread:t") if found.id.startswith(gone)))
        store.gc()
        assert store.verify().problems == ()
        store.copy_to(other)
        for config, expected in put_so_far:
            for fresh in KedgeSaver(store), KedgeSaver(other):
                found = fresh.get_tuple(config)
                assert found is not None
                assert encode(found.checkpoint["channel_values"]["items"]) == expected


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_an_edit_stores_what_is_new_and_the_blocks_it_is_in(seed: int) -> None:
    """Each new item by itself and in a block; on top come the digests above, for a few levels at each save."""
    rnd = random.Random(seed)
    with kedge.open("memory:") as store:
        saver, head, items = KedgeSaver(store), CONFIG, [text(rnd, 700) for _ in range(150)]
        new, stored, edits = 0, 0, 0
        known: set[str] = set()
        for _ in range(12):
            head = put(saver, head, items)
            stored += store.list("thread:t")[-1].stored_bytes
            new += sum(len(item) for item in set(items) - known)
            known |= set(items)
            for _ in range(rnd.randint(1, 3)):
                at = rnd.randrange(len(items))
                items[at : at + rnd.choice([0, 1, 1, 60])] = [text(rnd, 700) for _ in range(rnd.choice([0, 1, 1, 60]))]
                items = items[rnd.choice([0, 0, 2]) :] or ["x" * 700]
                edits += 1
        hex_share = 0.6  # digits shrink to 0.55 of their length
        assert stored < hex_share * (2 * new + edits * 2 * MOST_BLOCK_BYTES) + 12 * 6 * KIB


@pytest.fixture
def store(tmp_path: Path):
    with kedge.open(tmp_path / "store") as manager:
        yield manager


def chunks(store: kedge.CheckpointManager) -> int:
    return store.stats()["chunks"]


def test_much_that_is_new_takes_few_chunks(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver = KedgeSaver(store)
    head = put(saver, CONFIG, [text(rnd, 2000) for _ in range(500)])
    assert chunks(store) < 200
    before = chunks(store)
    put(saver, head, [text(rnd, 2000) for _ in range(500)])
    assert chunks(store) - before < 200, "all of it changed at once"


def test_a_long_conversation_is_read_from_few_chunks(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver, head, items = KedgeSaver(store), CONFIG, list[Any]()
    for n in range(300):
        items = [*items, HumanMessage(text(rnd, 1000), id=f"{n}")]
        head = put(saver, head, items)
    assert len([*store.store.contents(store.catalogue.read(store.list("thread:t")[-1].id)[1])]) < 150
    found = KedgeSaver(store).get_tuple(CONFIG)
    assert found is not None
    assert found.checkpoint["channel_values"]["items"] == items


def test_a_changed_item_stores_its_block_again(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver, items = KedgeSaver(store), [text(rnd, 500) for _ in range(200)]
    head = put(saver, CONFIG, items)
    for at in (50, 51, 150):
        items[at] = text(rnd, 500)
        head = put(saver, head, items)
        assert store.list("thread:t")[-1].stored_bytes < MOST_BLOCK_BYTES


def test_a_window_that_moves_stores_what_comes_in(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver, items = KedgeSaver(store), [text(rnd, 500) for _ in range(200)]
    head = put(saver, CONFIG, items)
    added = []
    for _ in range(30):
        items = [*items[1:], text(rnd, 500)]
        head = put(saver, head, items)
        added.append(store.list("thread:t")[-1].stored_bytes)
    assert sum(added) / len(added) < 6 * KIB


def test_the_same_items_elsewhere_are_the_same_blocks(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    items = [text(rnd, 500) for _ in range(1000)]
    put(KedgeSaver(store), CONFIG, items)
    saver = KedgeSaver(store)
    other: Any = {"configurable": {"thread_id": "other", "checkpoint_ns": ""}}
    put(saver, other, [text(rnd, 500), *items])
    assert store.list("thread:other")[-1].stored_bytes < 64 * KIB, "blocks end where the items say"


def test_writes_share_their_blocks_with_the_channel(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver, items = KedgeSaver(store), [text(rnd, 500) for _ in range(300)]
    head = put(saver, CONFIG, ["first"])
    saver.put_writes(head, [("items", items)], "task")
    put(saver, head, ["first", *items])
    assert store.list("thread:t")[-1].stored_bytes < 4 * KIB


def test_a_list_that_is_written_whole_each_time_stores_what_is_new(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    saver, items = KedgeSaver(store), [text(rnd, 500) for _ in range(200)]
    head = put(saver, CONFIG, items)
    added = []
    for step in range(5):
        items = [*items, text(rnd, 500)]
        saver.put_writes(head, [("items", items)], f"task {step}")
        head = put(saver, head, items)
        added.append(sum(saved.stored_bytes for saved in store.list("thread:t")[-2:]))
    assert max(added) < 8 * KIB


def test_the_input_of_a_graph_is_in_the_blocks_of_its_channels(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    items = [text(rnd, 500) for _ in range(300)]
    given = {"question": text(rnd, 3000), "items": items, "numbers": list(range(40)), "last": text(rnd, 20000)}
    saver = KedgeSaver(store)
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"__start__": given}
    head = saver.put(CONFIG, checkpoint, {"source": "input", "step": -1}, {"__start__": 1})
    assert chunks(store) < 60
    put(saver, head, items)
    assert store.list("thread:t")[-1].stored_bytes < 4 * KIB
    found = KedgeSaver(store).get_tuple(head)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"__start__": given}


def test_who_remembers_nothing_makes_the_same_blocks(store: kedge.CheckpointManager) -> None:
    rnd = random.Random(1)
    items = [text(rnd, 500) for _ in range(200)]
    head = put(KedgeSaver(store), CONFIG, items)
    added = []
    for n in range(60):
        items = [*items[n % 2 :], text(rnd, 500)]
        head = put(KedgeSaver(store), head, items)
        added.append(store.list("thread:t")[-1].stored_bytes)
    assert sum(added) / len(added) < 6 * KIB


def test_a_block_is_of_items_in_a_row() -> None:
    items = lay_list([f"{n:03}" + "x" * 997 for n in range(200)], 896).items
    whole = ListChannel(items)
    blocks = [unit for unit in whole.blocks.units if isinstance(unit, Block)]
    assert 8 < len(blocks) < 50
    assert all(LEAST_BLOCK_BYTES <= len(block.piece.data) <= MOST_BLOCK_BYTES for block in blocks)
    pieces, left = whole.pieces()
    assert b"".join([*[piece.data for piece in pieces], left]) == b"".join([item.data for item in items])
    swapped = ListChannel([*items[:100], items[101], items[100], *items[102:]], whole)
    assert {block.piece.digest for block in blocks} - {
        unit.piece.digest for unit in swapped.blocks.units if isinstance(unit, Block)
    }


def test_a_list_like_an_earlier_one_is_laid_as_by_itself() -> None:
    """What is taken over from an earlier list makes no difference."""
    rnd = random.Random(1)
    items = [some_item(rnd) for _ in range(300)]
    laid = lay_list(items, 896)
    for _ in range(40):
        items = edited(items, rnd)
        laid = lay_list(items, 896, laid)
        alone = ListChannel(laid.items)
        first, run, rest = laid.parts
        again, other, end = alone.parts
        assert (first, rest) == (again, end)
        assert run is not None
        assert other is not None
        assert [piece.digest for piece in run.pieces] == [piece.digest for piece in other.pieces]
        assert run.tops == other.tops


def test_a_small_list_that_is_put_often_keeps_no_earlier_one_in_memory() -> None:
    first = last = lay_list(["a"], 896)
    gone = weakref.ref(first)
    for n in range(3):
        last = lay_list(["a", n], 896, last)
        assert last.size_bytes(896) == len(encode("a")) + 1
    del first
    assert gone() is None


def test_a_list_that_is_laid_twice_is_in_the_same_blocks() -> None:
    """As by a task that writes it whole, and then by the checkpoint; or by two branches."""
    rnd = random.Random(1)
    items, laid = [text(rnd, 900)], lay_list([], 896)
    for _ in range(100):
        items = [*items, text(rnd, 900)]
        written, laid = lay_list(items, 896, laid), lay_list(items, 896, laid)
        pieces = [piece.digest for piece in written.pieces()[0]]
        assert [piece.digest for piece in laid.pieces()[0]] == pieces
        assert laid.parts
    assert [piece.digest for piece in lay_list(items, 896).pieces()[0]] == pieces
