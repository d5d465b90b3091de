"""save_async: order, cancellation, errors nobody asked for, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge.chunks import allocate
from kedge.store.background import PIECE_BYTES, touch


def test_a_cancelled_save_does_not_disturb_the_others() -> None:
    with kedge.open("memory:") as store:
        pending = [store.save_async("job", "step", n) for n in range(20)]
        cancelled = [future.cancel() for future in pending]
        saved = [future.result(60) for future, was in zip(pending, cancelled, strict=True) if not was]
        assert [c.id for c in store.list("job")] == saved
        store.save("job", "after", 1)
        assert store.save_async("job", "last", 2).result(60) == store.list("job")[-1].id


def test_saves_are_committed_in_the_order_given() -> None:
    with kedge.open("memory:") as store:
        pending = [store.save_async("job", f"step {n}", {"n": n}) for n in range(30)]
        assert [future.result(60) for future in pending] == [c.id for c in store.list("job")]


def test_the_state_may_be_changed_at_once() -> None:
    with kedge.open("memory:") as store:
        state = {"buffer": bytearray(b"a" * 3_000_000)}
        pending = store.save_async("job", "step", state)
        state["buffer"][:] = b"b" * 3_000_000
        assert store.load(pending.result(60)) == {"buffer": bytearray(b"a" * 3_000_000)}


def test_an_error_nobody_asked_for_comes_up_at_the_next_save() -> None:
    with kedge.open("memory:") as store:
        failed = store.save_async("job", "step", 1, parent="nobody")
        while not failed.done():
            pass
        with pytest.raises(kedge.NotFound):
            store.save("job", "next", 2)
        store.save("job", "next", 2)  # once is enough
        seen = store.save_async("job", "step", 1, parent="nobody")
        with pytest.raises(kedge.NotFound):
            seen.result(60)
        store.save("job", "next", 3)  # it was asked for: no second time


def test_what_was_staged_is_saved_when_the_process_ends(tmp_path: Path) -> None:
    program = (
        "import kedge, sys\n"
        "store = kedge.open(sys.argv[1])\n"
        "for n in range(5): store.save_async('job', 'step', {'n': n, 'bytes': bytes(1_000_000)})\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], check=True, timeout=60)
    with kedge.open(tmp_path / "store") as store:
        assert [store.load(c.id)["n"] for c in store.list("job")] == list(range(5))  # type: ignore[index]


def test_a_save_after_a_save_async_is_the_newest() -> None:
    with kedge.open("memory:") as store:
        store.save_async("job", "first", {"n": 1, "bytes": bytes(30_000_000)})
        store.save("job", "second", {"n": 2})
        assert store.restore("job") == {"n": 2}


def test_a_lease_lasts_until_its_pending_saves_are_done() -> None:
    with kedge.open("memory:") as store:
        with store.lease("job") as lease:
            pending = store.save_async("job", "step", {"bytes": bytes(30_000_000)}, lease=lease)
        assert store.get(pending.result(60)).job == "job"


def test_a_watcher_that_saves_while_the_store_is_closed() -> None:
    """It runs in the thread that commits, which must not wait for itself."""
    store = kedge.open("memory:")
    saved: list[str] = []

    def again(_: str, checkpoint: kedge.Checkpoint) -> None:
        if checkpoint.job == "job":
            saved.append(store.save("watcher", "step", 1))

    store.watch(again)
    for n in range(4):
        store.save_async("job", "step", n)
    store.close()
    assert len(saved) == 4


@pytest.mark.parametrize("is_writable", [True, False], ids=["writable", "read-only"])
def test_a_large_state_is_copied_whole_by_several_threads(is_writable: bool) -> None:
    """Sizes around the pieces that a thread takes; the last byte counts."""
    sizes = [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 4097]
    with kedge.open("memory:") as store:
        state = [bytearray(os.urandom(4096) * (size // 4096) + b"z" * (size % 4096)) for size in sizes]
        expected = [bytes(buffer) for buffer in state]
        given = [buffer if is_writable else bytes(buffer) for buffer in state]
        pending = store.save_async("job", "step", given)
        for buffer in state:
            buffer[:] = bytes(len(buffer))
        assert [bytes(buffer) for buffer in store.load(pending.result(60))] == expected


def test_new_memory_is_written_to_before_it_is_locked() -> None:
    """By several threads: an accelerator's driver makes missing pages one after the other."""
    memory = allocate(2 * PIECE_BYTES + 4096)
    memory[:] = b"\1" * len(memory)
    touch(memory)
    assert not any(memory[at] for at in range(0, len(memory), 4096))
