"""Attempts: the folder of one freeze or thaw. The logs in it stay, with the last fifty; images and copies do not."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from holdfast.errors import Conflict, NotFound, storage_error
from holdfast.model import parse_name

KEPT = 50
_LOGS = ("dump.log", "restore.log", "runtime.log")
_PASSING = ("images", "rootfs", "files", "bin")


def state_directory() -> Path:
    """Where this machine keeps attempts and locks: $HOLDFAST_STATE_DIR, else /var/lib/holdfast. Root's alone."""
    return Path(os.environ.get("HOLDFAST_STATE_DIR") or "/var/lib/holdfast")


@dataclass(frozen=True, slots=True)
class Attempt:
    id: str
    path: Path

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
        """Add to what is known about this attempt."""
        known = self.facts()
        (self.path / "attempt.json").write_text(json.dumps({**known, **facts}))

    def facts(self) -> dict[str, object]:
        try:
            found = json.loads((self.path / "attempt.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@contextmanager
def attempt(action: str, subject: str) -> Iterator[Attempt]:
    """A new attempt. Its images and copies are gone afterwards, also those of attempts that were killed."""
    home = state_directory() / "attempts"
    identity = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"
    path = home / identity
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(mode=0o700)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = Attempt(identity, path)
        new.images.mkdir(mode=0o700)
        new.describe(action=action, subject=subject, started=time.time(), result="under way")
        _tidy(home, identity)
    except OSError as error:
        raise storage_error("write", str(home), error) from error
    try:
        yield new
        new.describe(result="done")
    except BaseException as error:
        _note(new, error)
        raise
    finally:
        _forget(path)
        os.close(lock)


def _note(new: Attempt, error: BaseException) -> None:
    try:
        new.describe(result="failed", error=str(error))
    except OSError:  # the disk is full: the error itself goes to whoever asked
        return


def find_attempt(name: str) -> Attempt:
    """An attempt by its ID, or `latest`."""
    home = state_directory() / "attempts"
    known = sorted(os.listdir(home)) if home.is_dir() else []
    wanted = known[-1] if name == "latest" and known else parse_name("attempt", name)
    if wanted not in known:
        raise NotFound(f"there is no attempt {name}", hint=f"the last {KEPT} are kept in {home}")
    return Attempt(wanted, home / wanted)


def attempts() -> list[Attempt]:
    """Those whose logs are kept, oldest first."""
    home = state_directory() / "attempts"
    return [Attempt(name, home / name) for name in sorted(os.listdir(home))] if home.is_dir() else []


def _tidy(home: Path, newest: str) -> None:
    """Remove what killed attempts left behind, and all but the last ones."""
    known = sorted(os.listdir(home))
    for position, name in enumerate(known):
        if name == newest:
            continue
        try:
            lock = os.open(home / name / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _forget(home / name)
            if position < len(known) - KEPT:
                shutil.rmtree(home / name, ignore_errors=True)
        except BlockingIOError:
            continue  # under way
        finally:
            os.close(lock)


def _forget(path: Path) -> None:
    for name in _PASSING:
        shutil.rmtree(path / name, ignore_errors=True)


@contextmanager
def only_one(*subject: str) -> Iterator[None]:
    """Keep others from freezing or thawing the same thing at the same time: Conflict for the second one."""
    folder = state_directory() / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = sha256("\0".join(subject).encode()).hexdigest()[:32]
        fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise storage_error("write", str(folder), error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(
            f"{subject[-1]} is being frozen or thawed by somebody else", hint="wait until that is done"
        ) from None
    try:
        yield
    finally:
        os.close(fd)
