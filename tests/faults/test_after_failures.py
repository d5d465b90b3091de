"""After a call of the operating system has failed: a typed error, nothing half done, and the same again works."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli import cli
from kedge.containers.attempts import Attempt
from kedge.errors import NoSpace, OutcomeUnknown, StorageError
from kedge.index.files import index as files_index
from kedge.index.files.journal import Journal
from kedge.index.sqlite.closed_mark import IndexState

pytestmark = pytest.mark.faults

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = StorageError("the device is broken", hint="replace it")


@contextmanager
def failing_once(owner: Any, name: str, error: Exception, *, is_done: bool = False) -> Iterator[None]:
    """The next call of it fails, before it has done anything or after it has done all."""
    real: Callable[..., Any] = getattr(owner, name)
    left = [error]

    def call(*arguments: Any, **options: Any) -> Any:
        if left and not is_done:
            raise left.pop()
        answer = real(*arguments, **options)
        if left:
            raise left.pop()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield
    assert not left, f"{name} was not called"


def test_what_is_committed_is_not_refused(tmp_path: Path) -> None:
    """The first commit of a process is followed by a note, which may fail."""
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", 0)
    with kedge.open(tmp_path / "store") as store, failing_once(IndexState, "mark_open", BROKEN):
        saved = store.save("job", "step", 1)
    with kedge.open(tmp_path / "store") as store:
        assert [checkpoint.id for checkpoint in store.list("job")][1:] == [saved]
        with failing_once(IndexState, "mark_open", BROKEN), pytest.raises(OutcomeUnknown, match="the device is broken"):
            store.delete("job", saved)
        assert not store.exists(saved)


@pytest.mark.parametrize("scheme", ["", "files:"])
@pytest.mark.parametrize("what", ["acquire_lease", "set_keyring"])
def test_a_change_of_keys_that_failed_when_it_was_done_is_made_again(tmp_path: Path, scheme: str, what: str) -> None:
    url = f"{scheme}{tmp_path / 'store'}"
    with kedge.open(url, key=bytes(32)) as store:
        saved = store.save("job", "step", 1)
        index = store.store.index.inner  # type: ignore[attr-defined]
        with failing_once(index, what, OutcomeUnknown("lost"), is_done=True), pytest.raises(OutcomeUnknown):
            store.rekey(bytes(range(32)), rewrite=True)
        assert store.rekey(bytes(range(32)), rewrite=True).unreadable == ()
    with kedge.open(url, key=bytes(range(32))) as store:
        assert store.load(saved) == 1
        assert not (store.encryption or {})["old_data_keys"]


def test_a_store_of_files_goes_on_when_it_could_not_begin_anew(tmp_path: Path) -> None:
    """Such as when descriptors have run out: what it holds in memory is not half a journal."""
    with kedge.open(f"files:{tmp_path / 'store'}") as store:
        first = store.save("job", "step", 1)
        with (
            failing_once(Journal, "append", BROKEN),
            failing_once(files_index, "migrate", BROKEN),
            suppress(StorageError),
        ):
            store.save("job", "step", 2)
        second = store.save("job", "step", 3)
        found = [checkpoint.id for checkpoint in store.list("job")]
        assert (found[0], found[-1]) == (first, second)
    with kedge.open(f"files:{tmp_path / 'store'}") as store:
        assert [checkpoint.id for checkpoint in store.list("job")] == found


@pytest.mark.parametrize(("scheme", "step"), [("", "write_marker"), ("", "salvage"), ("files:", "_read_files")])
def test_a_repair_that_finds_no_room_says_so_and_is_made_again(tmp_path: Path, scheme: str, step: str) -> None:
    from kedge.care import repair, repair_files

    with kedge.open(f"{scheme}{tmp_path / 'store'}") as store:
        saved = store.save("job", "step", "x" * 100_000)
    module, mend = (repair_files, repair_files.refile) if scheme else (repair, repair.repair)
    with failing_once(module, step, FULL), pytest.raises(NoSpace):
        mend(tmp_path / "store", actor="test")
    assert mend(tmp_path / "store", actor="test").checkpoints == 1
    with kedge.open(f"{scheme}{tmp_path / 'store'}") as store:
        assert store.load(saved) == "x" * 100_000


def test_a_key_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    words = ["key", "new", "--out", str(tmp_path / "key")]
    with failing_once(os, "fsync", FULL):
        refused = CliRunner().invoke(cli, words)
    assert (refused.exit_code, os.listdir(tmp_path)) == (NoSpace.exit_code, [])
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_notes_of_an_attempt_fail_as_ours(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*attempt\.json"):
        Attempt("one", tmp_path / "gone").describe(result="done")
