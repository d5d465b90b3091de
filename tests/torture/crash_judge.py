"""Whether a store on a disk that a power cut left keeps what was promised. A disk is opened and read once, however many
moments may have left it; then what was found is compared with what had been promised at each.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

import kedge
from kedge.ports import digest_of

from .crash import Trace
from .crash_disks import Content, CrashState, Disk
from .crash_lives import Life, key_of
from .crash_views import Read, Views, reads
from .ledger import Ledger, Seen, Violation, about, look
from .states import make

_LINKED_FROM = 64 << 10
_CONTINUED = 16  # of so many opened disks one is also saved to and collected, besides each that looks new
_PROVED = 50  # of so many disks that read like an opened one, one is opened all the same
_NO_STORE = Seen({}, ())
_digest_of_zeros = cache(lambda size: digest_of(bytes(size)))


@dataclass(frozen=True)
class Answer:
    """What there is on a disk."""

    seen: Seen = _NO_STORE
    key: int = -1  # the master key that opened it
    is_absent: bool = False  # no whole store, but one can be made
    error: str = ""


@dataclass
class Judge:
    trace: Trace
    life: Life
    folder: Path  # on a file system in memory, if possible
    newest_key: int = -1
    disks: int = 0
    opened: int = 0
    continued: int = 0
    proved: int = 0
    _answers: dict[bytes, Answer] = field(default_factory=dict)
    _alike: dict[bytes, list[tuple[Answer, tuple[Read, ...]]]] = field(default_factory=dict)
    _views: Views = field(default_factory=Views)
    _compared: set[tuple[int, bytes]] = field(default_factory=set)
    _known: set[Answer | str] = field(default_factory=set)
    _ledgers: dict[int, Ledger] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._noted: list[Read] = []
        self._read: tuple[Read, ...] = ()  # what was read of packs to find the last answer
        keys = [int(str(message[1])) for _, message in self.trace.messages if message[0] == "rekeying"]
        self.newest_key = max([self.life.key, *keys])
        self._draw = random.Random(f"judge {self.life.seed}")
        (self.folder / "contents").mkdir(parents=True)

    def judge(self, state: CrashState) -> Answer:
        """Raise Violation unless the store has all that was promised before the cut, and goes on working."""
        disk = state.disk
        key = disk.key
        try:
            if key not in self._answers:
                self.disks += 1
                self._answers[key] = self._answer(disk)
            if (state.heard, key) not in self._compared:
                self._compared.add((state.heard, key))
                self._compare(self._answers[key], self._ledger(state.heard))
        except Violation as error:
            raise Violation(f"power cut in life {self.life}, at {state}: {error}") from error
        return self._answers[key]

    def _ledger(self, heard: int) -> Ledger:
        if heard not in self._ledgers:
            ledger = self._ledgers[heard] = Ledger()
            for _, message in self.trace.messages[:heard]:
                ledger.note(message)
        return self._ledgers[heard]

    def _compare(self, answer: Answer, ledger: Ledger) -> None:
        if answer.error:
            raise Violation(answer.error)
        if answer.is_absent and "created" in ledger.counts:
            raise Violation("the store is gone")
        if ledger.keys and answer.key not in ledger.keys:
            raise Violation(f"opened by key {answer.key}, not by one of {sorted(ledger.keys)}")
        ledger.compare(answer.seen)

    # --- looking ---

    def _answer(self, disk: Disk) -> Answer:
        """Of a disk that reads as an opened one did, the same."""
        alike = self._alike.setdefault(self._views.key(disk), [])
        known = next((answer for answer, read in alike if self._views.is_read_alike(disk, read)), None)
        if known is not None and self._draw.randrange(_PROVED):
            return known
        little = mock.patch("kedge.blobs.reserve._MOST_BYTES", 4096)  # else filling it is most of the work
        with little, reads(str(self.folder / "disk")) as self._noted:
            answer = self._look(disk)
        if known is None:
            alike.append((answer, self._read))
        else:
            self.proved += 1
            if answer != known:
                raise Violation(f"two disks that should be alike are {known} and {answer}")
        return answer

    def _look(self, disk: Disk) -> Answer:
        root = self.folder / "disk"
        self._write(disk, root)
        self.opened += 1
        self._read = ()
        try:
            return self._open(root)
        except kedge.CheckpointError as error:
            return Answer(error=f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(root)

    def _open(self, root: Path) -> Answer:
        url = self.life.url(root)
        for number in range(self.newest_key, -2, -1):
            if (number >= 0) != (self.newest_key >= 0):
                break
            try:
                store = kedge.open(url, create=False, key=key_of(number) if number >= 0 else None)
            except kedge.NotFound:
                kedge.open(url, key=key_of(number) if number >= 0 else None).close()
                return Answer(key=number, is_absent=True)
            except kedge.Validation as error:
                if number == 0 or "is encrypted under key" not in str(error):
                    raise
                continue
            with store:
                return self._use(store, number)
        raise AssertionError("no key was tried")

    def _use(self, store: kedge.CheckpointManager, key: int) -> Answer:
        seen = look(store, deep=False)
        self._read = tuple(dict.fromkeys(self._noted))
        answer = Answer(seen, key)
        mark = repr(answer)
        if mark not in self._known or self._draw.randrange(_CONTINUED) == 0:
            self._known.add(mark)
            self.continued += 1
            self._continue(store, seen)
        return answer

    def _continue(self, store: kedge.CheckpointManager, seen: Seen) -> None:
        """It takes saves, reuses and moves what it has, and finds nothing wrong with itself."""
        ledger = Ledger()
        for kind in ("packed", "shared", "small"):
            saved = store.save("after", "cut", make(kind, 5), metadata=about(kind, 5))
            ledger.note(("saved", saved, "after", kind, 5))
        store.gc()
        again = look(store)
        ledger.compare(again)
        if lost := seen.present.keys() - again.present.keys():
            raise Violation(f"gone after a save and gc: {sorted(lost)}")

    # --- writing ---

    def _write(self, disk: Disk, root: Path) -> None:
        root.mkdir()
        for directory in disk.directories:
            os.mkdir(root / directory)
        for path, content in disk.files:
            target = f"{root}/{path}"
            if len(content.data) >= _LINKED_FROM and path.endswith(".pack"):
                os.link(self._linked(content), target)  # nobody writes to another process's pack
                continue
            with open(target, "wb", buffering=0) as file:
                if content.digest == _digest_of_zeros(len(content.data)):
                    file.truncate(len(content.data))  # costs no memory
                elif content.data:
                    file.write(content.data)

    def _linked(self, content: Content) -> str:
        path = f"{self.folder}/contents/{content.digest.hex()}"
        if not os.path.exists(path):
            with open(path, "wb", buffering=0) as file:
                file.write(content.data)
        return path

    def end(self) -> None:
        """Prove that no judged store has changed a file that others share, and remove them."""
        for file in (self.folder / "contents").iterdir():
            if digest_of(file.read_bytes()).hex() != file.name:
                raise Violation(f"a pack of another process was changed: {file}")
        shutil.rmtree(self.folder)
