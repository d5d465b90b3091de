"""Attempts: the folder of one checkpoint or restore. The last fifty keep their logs, none its images and copies.

An attempt says what it is about to change outside its folder, before it does: a network that CRIU locks, files that
change places, processes that are made. If it is killed, the next attempt finds that, and puts it right (`put_right`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kedge.blobs.group_files import make_own_folder
from kedge.errors import CheckpointError, Conflict, NotFound, StorageError, storage_errors
from kedge.model import parse_name

from .criu import leftovers

KEPT = 50
_LOGS = ("dump.log", "restore.log", "runtime.log")
_PASSING = ("images", "rootfs", "files", "bin")
_RESTORED = "Restore finished successfully"


def state_directory() -> Path:
    """Where this machine keeps attempts and locks: $KEDGE_STATE_DIR, else /var/lib/kedge. Root's alone."""
    return Path(os.environ.get("KEDGE_STATE_DIR") or "/var/lib/kedge")


class NotUndone(StorageError):
    """What an attempt had changed could not be changed back: it stays as if killed, and the next one tries again."""


@contextmanager
def undoing() -> Iterator[None]:
    """Around what changes something back, so that a failure there is not taken for the end of it."""
    failed = sys.exc_info()[1]  # why it is changed back
    try:
        yield
    except (CheckpointError, OSError) as error:
        causes = [_message(error), *([] if failed is None else [_message(failed)])]
        hint = "mend the cause, then run any checkpoint or restore: it changes back what is left"
        raise NotUndone(", after: ".join(filter(None, causes)), hint=hint) from error


def _message(error: BaseException) -> str:
    return error.message if isinstance(error, CheckpointError) else str(error)


@dataclass(frozen=True, slots=True)
class Attempt:
    """`held`: descriptors of its locks. Programs that it starts hold them too: it is under way as long as they are."""

    id: str
    path: Path
    subject: str = ""
    held: tuple[int, ...] = ()

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def rootfs(self) -> Path:
        return self.path / "rootfs"

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def bin(self) -> Path:
        """Programs that a runtime finds first, and the socket where they ask before CRIU lets go (see relay)."""
        return self.path / "bin"

    def log(self) -> str:
        """The last log with something in it; "" if there is none."""
        for name in _LOGS:
            try:
                if text := (self.path / name).read_text(errors="replace"):
                    return text
            except FileNotFoundError:
                continue
        return ""

    def describe(self, **facts: object) -> None:
        """Add to what is known about this attempt: all of it or nothing, whenever we are killed."""
        new = self.path / ".attempt.json"
        with storage_errors("write", new):
            new.touch(mode=0o600)
            new.write_text(json.dumps({**self.facts(), **facts}))
            new.rename(self.path / "attempt.json")

    def facts(self) -> dict[str, object]:
        try:
            facts = json.loads((self.path / "attempt.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}


@contextmanager
def attempt(action: str, subject: str, lock: int | None = None) -> Iterator[Attempt]:
    """A new attempt, under a lock of `only_one`. Its images and copies are gone afterwards, as those of killed ones."""
    home = state_directory() / "attempts"
    identity = _new_id()
    path = home / identity
    with storage_errors("write", home):
        make_own_folder(home)
        path.mkdir(mode=0o700)
        own = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(own, fcntl.LOCK_EX)
        new = Attempt(identity, path, subject, (own,) if lock is None else (own, lock))
        new.images.mkdir(mode=0o700)
        new.describe(action=action, subject=subject, started=time.time(), result="under way")
        _tidy(home, identity)
    is_undone = True
    try:
        yield new
        new.describe(result="done")
    except BaseException as error:
        is_undone = not isinstance(error, NotUndone)
        with suppress(OSError):  # the disk is full: the error itself goes to whoever asked
            new.describe(**({"result": "failed"} if is_undone else {}), error=str(error))
        raise
    finally:
        if is_undone:  # else its copies are what is needed
            _forget(path)
        os.close(own)


def _new_id() -> str:
    """In the order of attempts, also within a second: the last of them is `latest`."""
    seconds, microseconds = divmod(time.time_ns() // 1000, 1_000_000)
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{moment}-{microseconds:06}{os.urandom(1).hex()}"


def find_attempt(name: str) -> Attempt:
    """An attempt by its ID, or `latest`."""
    known = {attempt.id: attempt for attempt in attempts()}
    attempt_id = max(known) if name == "latest" and known else parse_name("attempt", name)
    if attempt_id not in known:
        raise NotFound(f"there is no attempt {name}", hint=f"kedge container logs lists the last {KEPT}")
    return known[attempt_id]


def attempts() -> list[Attempt]:
    """Those whose logs are kept, oldest first."""
    home = state_directory() / "attempts"
    return [Attempt(name, home / name) for name in sorted(os.listdir(home))] if home.is_dir() else []


def put_right() -> None:
    """Undo what killed attempts left behind."""
    _tidy(state_directory() / "attempts", "")


def _tidy(home: Path, newest: str) -> None:
    """Put right what killed attempts left behind, and remove all but the last ones."""
    known = sorted(os.listdir(home)) if home.is_dir() else []
    for position, name in enumerate(known):
        if name == newest:
            continue
        try:
            lock = os.open(home / name / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            attempt = Attempt(name, home / name)
            if attempt.facts().get("result") == "under way" and not _is_put_right(attempt):
                continue
            _forget(home / name)
            if position < len(known) - KEPT:
                shutil.rmtree(home / name, ignore_errors=True)
        except BlockingIOError:  # under way
            if Attempt(name, home / name).facts().get("action") == "restore":
                leftovers.end_if_nobody_asks(home / name / "lock")
        finally:
            os.close(lock)


def _is_put_right(killed: Attempt) -> bool:
    """Undo what it said it would change: what is half made ends, the network is unlocked, and files that had changed
    places change back.

    What cannot be undone is noted and tried again next time: it must not stand in the way of others.
    """
    from . import moved_files, network, rootfs, volumes

    facts = killed.facts()
    if isinstance(makes := facts.get("makes"), dict) and _RESTORED not in killed.log():
        leftovers.end_unfinished(**makes)
    files, net = facts.get("replaces"), facts.get("network")
    moved, made = facts.get("moved"), facts.get("made")
    try:
        if isinstance(moved, dict) and isinstance(made, dict):
            is_restored = bool(facts.get("is_restored")) or _RESTORED in killed.log()
            moved_files.put_back(moved, made, is_restored=is_restored)
        if isinstance(files, dict):
            rootfs.put_back(files, is_restored=_RESTORED in killed.log())
        if isinstance(in_volumes := facts.get("volumes"), dict):
            volumes.put_back(in_volumes, is_restored=_RESTORED in killed.log())
        if isinstance(net, dict):
            locked = network.Network(mode=str(net.get("mode")), path=str(net.get("path") or ""))
            # A namespace that is gone has no lock.
            with suppress(FileNotFoundError), network.namespace_of(None, locked) as namespace:
                network.remove_lock(namespace)
    except CheckpointError as error:
        killed.describe(error=str(error))
        return False
    killed.describe(result="killed")
    return True


def _forget(path: Path) -> None:
    for name in _PASSING:
        shutil.rmtree(path / name, ignore_errors=True)


@contextmanager
def only_one(*subject: str, wait_s: float = 0.0) -> Iterator[int]:
    """Keep others from checkpointing or restoring the same thing at the same time: Conflict for the second one, if it
    may not wait, or not so long. Answers the descriptor of the lock."""
    fd = _open_lock(subject)
    deadline, look_s = time.monotonic() + wait_s, 0.0
    while not _is_locked(fd):
        if time.monotonic() >= look_s:
            put_right()  # what nobody looks after any more has it for ever
            look_s = time.monotonic() + leftovers.LOOK_S
            continue
        if time.monotonic() >= deadline:
            os.close(fd)
            raise Conflict(
                f"{subject[-1]} is being checkpointed or restored by somebody else", hint="wait until that is done"
            )
        time.sleep(0.02)
    try:
        yield fd
    finally:
        os.close(fd)


def is_busy(*subject: str) -> bool:
    """Whether somebody checkpoints or restores it just now, or what a killed one had started still does."""
    fd = _open_lock(subject)
    try:
        return not _is_locked(fd)
    finally:
        os.close(fd)


def _open_lock(subject: tuple[str, ...]) -> int:
    folder = state_directory() / "locks"
    with storage_errors("write", folder):
        make_own_folder(folder)
        name = sha256("\0".join(subject).encode()).hexdigest()[:32]
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
