"""Images whose pages are written while a restore begins: CRIU finds none of them before all are verified (I2)."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import page_writer, snapshot
from kedge.containers.attempts import Attempt
from kedge.containers.criu.pages import validate_images
from kedge.containers.page_writer import written_images
from kedge.errors import NoSpace
from kedge.files import Tree
from tests.unit.containers.test_snapshot import write_pagemap
from tests.waiting import wait_for

PAGES = "pages-1.img"
OTHERS = ("inventory.img", "pstree.img")


@pytest.fixture(name="attempt")
def _attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt("a", tmp_path / "attempt")
    attempt.images.mkdir(parents=True)
    return attempt


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as store:
        yield store


def images(store: kedge.CheckpointManager, tmp_path: Path, pages: int = 4096, others: Sequence[str] = OTHERS) -> Tree:
    """Images of so many pages, in a store."""
    folder = tmp_path / "images"
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    write_pagemap(folder, (0x100000, pages, 4))
    (folder / PAGES).write_bytes(os.urandom((folder / PAGES).stat().st_size))  # nothing compresses them
    store.save("container:a", "a", {"images": snapshot.images_tree(folder)})
    loaded = store.load(store.list("container:a")[-1].id)
    assert isinstance(loaded, dict)
    assert isinstance(loaded["images"], Tree)
    return loaded["images"]


def write_at(moment: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written and verified, then comes that moment."""
    real = Tree.write_to

    def write_to(tree: Tree, *words: Any, **options: Any) -> None:
        real(tree, *words, **options)
        moment()

    monkeypatch.setattr(Tree, "write_to", write_to)


def held_back(hook: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The hook, as the runtime runs it."""
    return subprocess.Popen([hook["path"], *hook["args"][1:]], env={})


def is_waited_for(gate: str) -> bool:
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(f":{Path(gate).stat().st_ino} " in line for line in waiting)


def test_pages_come_when_all_are_verified(
    store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = images(store, tmp_path)
    verified, go_on = threading.Event(), threading.Event()
    write_at(lambda: (verified.set(), go_on.wait(60)), monkeypatch)
    with written_images(tree, attempt) as pages:
        try:
            assert (attempt.images / "inventory.img").read_bytes() == b"inventory.img"
            assert verified.wait(60)
            assert not (attempt.images / PAGES).exists()
            assert validate_images(attempt.images, pages.sizes).keys() == {PAGES}
            hook: Any = pages.hook()
            held = held_back(hook)
            wait_for(lambda: True if is_waited_for(hook["args"][3]) else None, "the hook does not wait", 60)
            assert held.poll() is None
        finally:
            go_on.set()
        assert held.wait(60) == 0
        assert (attempt.images / PAGES).read_bytes() == (tmp_path / "images" / PAGES).read_bytes()
        pages.wait()
    assert validate_images(attempt.images) == validate_images(tmp_path / "images")


def test_the_size_of_pages_to_come_is_compared(
    store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path
) -> None:
    with written_images(images(store, tmp_path), attempt) as pages:
        pages.wait()
        with pytest.raises(kedge.Corrupted, match=PAGES):
            validate_images(attempt.images, {PAGES: 4096})


def test_damaged_pages_get_no_name(store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path) -> None:
    """What waits for them goes on, and finds none; whoever asks hears why."""
    tree = images(store, tmp_path)
    for pack in (tmp_path / "store").rglob("*.pack"):
        data = bytearray(pack.read_bytes())
        half = len(data) // 2
        data[half : half + 4096] = bytes(byte ^ 0xFF for byte in data[half : half + 4096])
        pack.write_bytes(data)
    with written_images(tree, attempt) as pages:
        hook: Any = pages.hook()
        assert held_back(hook).wait(60) == 0
        assert not (attempt.images / PAGES).exists()
        with pytest.raises(kedge.Corrupted):
            pages.wait()


def test_nobody_writes_after_the_end(
    store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the restore fails for another reason, pages are given up, not written to their end."""
    tree = images(store, tmp_path)
    may_begin = threading.Event()
    real = page_writer.PageWriter.give_up

    def give_up(writer: page_writer.PageWriter) -> None:
        writer._is_given_up = True
        may_begin.set()
        real(writer)

    begin = Tree.write_to

    def write_to(tree: Tree, *words: Any, **options: Any) -> None:
        assert may_begin.wait(60)
        begin(tree, *words, **options)

    monkeypatch.setattr(page_writer.PageWriter, "give_up", give_up)
    monkeypatch.setattr(Tree, "write_to", write_to)
    with written_images(tree, attempt):
        pass
    assert sorted(path.name for path in attempt.images.iterdir()) == [
        "gate", "inventory.img", "pagemap-1.img", "pstree.img",
    ]  # fmt: skip


def test_a_hook_that_is_left_does_no_harm(store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path) -> None:
    with written_images(images(store, tmp_path), attempt) as pages:
        hook: Any = pages.hook()
        pages.wait()
    shutil.rmtree(attempt.images)
    assert held_back(hook).wait(60) == 0


@pytest.mark.parametrize(("pages", "others"), [(4, OTHERS), (4096, (*OTHERS, "folder/file"))], ids=["few", "not flat"])
def test_what_is_not_worth_it_is_written_at_once(
    store: kedge.CheckpointManager, attempt: Attempt, tmp_path: Path, pages: int, others: Sequence[str]
) -> None:
    with written_images(images(store, tmp_path, pages, others), attempt) as writer:
        assert writer.hook() is None
        assert not writer.sizes
        assert (attempt.images / PAGES).read_bytes() == (tmp_path / "images" / PAGES).read_bytes()


def test_a_full_disk_is_said_to_be_one_and_where(
    store: kedge.CheckpointManager, tmp_path: Path, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = images(store, tmp_path)

    def full(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NoSpace, match="img"), written_images(tree, attempt):
        raise AssertionError("nothing may begin")
