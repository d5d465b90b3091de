"""Files that a restore of processes replaces: killed at any step, the next attempt puts back what there was."""

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import kedge
from kedge.containers.attempts import NotUndone, attempt, attempts, put_right
from kedge.containers.moved_files import replaced
from tests.torture.durable import watched

CALLS = ("link", "rename", "replace", "unlink", "mkdir", "rmdir", "open", "fsync")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two files as they were: one has changed since, the other is gone."""
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "kept").write_text("as it was")
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", {name: kedge.File(tmp_path / "kept") for name in ("changed", "gone")})
    (tmp_path / "changed").write_text("since")
    return tmp_path


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"store", "state", "kept"}


def killed_at(folder: Path, step: int, *, is_restored: bool = False) -> bool:
    """Replace the files in a process that is killed before it makes that call; whether it came so far."""
    pid = os.fork()
    if pid == 0:
        try:
            replace_files(folder, step, is_restored)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def replace_files(folder: Path, last: int, is_restored: bool) -> None:
    calls = itertools.count()

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            if next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapper

    store = kedge.open(folder / "store")
    files = store.restore("job")
    assert isinstance(files, dict)
    with attempt("restore", "1") as work:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        with replaced({str(folder / name): file for name, file in files.items()}, work):
            if is_restored:
                (work.path / "restore.log").write_text("Restore finished successfully")
        if is_restored:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)


def test_killed_at_each_step(folder: Path) -> None:
    """Whatever state a kill leaves the folder in: what is there afterwards is what was there before."""
    steps = 0
    while killed_at(folder, steps):
        put_right()
        newest = max((done.facts() for done in attempts()), key=lambda facts: float(str(facts["started"])))
        expected = "as it was" if newest.get("is_restored") else "since"
        assert (folder / "changed").read_text() == expected, steps
        (folder / "changed").write_text("since")
        assert names_in(folder) == ({"changed", "gone"} if newest.get("is_restored") else {"changed"}), steps
        (folder / "gone").unlink(missing_ok=True)
        (folder / "gone").unlink(missing_ok=True)  # there only if the kill came before it was noted as ours
        steps += 1
    assert steps > 10


def test_killed_behind_the_restore(folder: Path) -> None:
    """The processes run on the kept files: these stay, and the second names go."""
    assert killed_at(folder, 10**6, is_restored=True)
    put_right()
    assert names_in(folder) == {"changed", "gone"}
    assert (folder / "changed").read_text() == (folder / "gone").read_text() == "as it was"


def test_a_restore_that_fails_puts_all_back(folder: Path) -> None:
    with kedge.open(folder / "store") as store:
        files = store.restore("job")
        with (
            pytest.raises(ZeroDivisionError),
            attempt("restore", "1") as work,
            replaced({str(folder / name): file for name, file in files.items()}, work),
        ):
            assert (folder / "changed").read_text() == "as it was"
            raise ZeroDivisionError
    assert names_in(folder) == {"changed"}
    assert (folder / "changed").read_text() == "since"


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_could_not_be_put_back_is_put_back_the_next_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_restored: bool
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with kedge.open(folder / "store") as store:
        files = {str(folder / name): file for name, file in store.restore("job").items()}
        with (
            pytest.raises(NotUndone, match="Input/output error"),
            attempt("restore", "1") as work,
            replaced(files, work),
        ):
            (work.path / "restore.log").write_text("Restore finished successfully" if is_restored else "")
            monkeypatch.setattr(os, "unlink", broken)
            if not is_restored:
                raise ZeroDivisionError
    monkeypatch.undo()
    monkeypatch.setenv("KEDGE_STATE_DIR", str(folder / "state"))
    put_right()
    assert names_in(folder) == ({"changed", "gone"} if is_restored else {"changed"})
    assert (folder / "changed").read_text() == ("as it was" if is_restored else "since")


def test_a_file_that_somebody_made_since_is_theirs(folder: Path) -> None:
    with kedge.open(folder / "store") as store:
        files = store.restore("job")
        with (
            pytest.raises(ZeroDivisionError),
            attempt("restore", "1") as work,
            replaced({str(folder / "gone"): files["gone"]}, work),
        ):
            (folder / "theirs").write_text("theirs")
            os.replace(folder / "theirs", folder / "gone")
            raise ZeroDivisionError
    assert (folder / "gone").read_text() == "theirs"


def test_what_was_gone_is_there_durably(folder: Path) -> None:
    """Before the restored processes go on with it."""
    with kedge.open(folder / "store") as store, attempt("restore", "1") as work:
        files = {str(folder / name): file for name, file in store.restore("job").items()}
        with watched() as durable, replaced(files, work):
            assert durable.has_names(folder, "gone", "changed")
            assert (folder / "gone").read_text() == "as it was"
