"""Processes that write to one index take turns, and whoever has the turn commits the small saves of those who wait.

`<index>-queue` is made when processes first get in each other's way. Whoever holds its lock has the turn. Who waits
writes its save into a place of its own in this file; who has the turn commits the saves found there with its own, in
one transaction and one sync, and then writes into each place the number that the save got.

The file decides nothing: SQLite's lock and the transaction do, and what is not answered, for whatever reason, is done
by its process when it has the turn. If it was committed all the same, because who had the turn was killed before it
answered, the index knows the ID (`SqlWrites._taken`). Nothing here is synced, and the file may be lost at any time.

Who was suspended in its turn keeps nobody waiting for long: the others go on without one. They leave alone only a save
that it may have in hand, which it shows by a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ormsgpack

from kedge.blobs.group_files import OWN_FILE, share
from kedge.errors import CheckpointError, OutcomeUnknown, storage_error
from kedge.index.group_commit import Save, Waiting
from kedge.model import Checkpoint
from kedge.ports.record import small_record, small_values
from kedge.version import __version__

from .writes import Writes

SUFFIX = "-queue"

_PLACES = 64
_PLACE_BYTES = 8192
_TURN = struct.Struct("<QQQ")  # who had the last turn, when it ended, and the token of who is to have the next one
_ENTRY = struct.Struct("<QQQ")  # for each place: token of who waits, or 0; number that its save got, number ^ token
_TOKENS = struct.Struct("<" + "Q16x" * _PLACES)  # those of all entries
_LOCK = struct.Struct("hhqqi4x")  # struct flock of Linux
_HEAD = struct.Struct("<Q16sII")  # in front of what is asked: its token, by whom it can be read, its size and CRC
_FRONT_BYTES = _TURN.size + _PLACES * _ENTRY.size
_ASKED_AT = 4096  # behind turn and entries
_LEAST_S, _MOST_S = 0.0002, 0.005  # until somebody who waits looks again
_FIRST_LOOK = 0.75  # of the time that it took the last time
_BACK_NS = 500_000  # who had the last turn gets the next one if it is back by then: it knows what the index holds
_TURNS_NS = 5_000_000  # that who had the last turn may have in a row while others want one of their own
_NEXT_NS = 2_000_000  # who is to have the next turn has to take it by then
_PATIENCE_S = 0.05  # then whoever waits takes the turn when it can
_STUCK_S = 1.0  # a turn that takes longer is waited for no more
_LONE_TURNS = 16  # then nobody else is taken to write any more
_dice = random.Random()  # nosec B311 - not the generator that users seed, and it makes no system call
os.register_at_fork(after_in_child=_dice.seed)


class Asked(NamedTuple):
    """What another process waits for."""

    place: int
    token: int
    save: Save | None  # None: it wants a turn of its own


class ProcessQueue:
    """One process's part in the queue of an index. The caller sees to it that threads come one at a time."""

    def __init__(self, index: str, inode: int, ns_no: int) -> None:
        self._path = index + SUFFIX
        # Only who writes to the same namespace of the same file can commit for another, and reads its saves.
        self._readers = hashlib.sha256(f"{__version__} {inode} {ns_no}".encode()).digest()[:16]
        self._fd: int | None = None
        self._place: int | None = None
        self._me = 0
        self._lone_turns = 0  # in a row, ours, in which nobody waited
        self._took_s = 0.0  # until our last turn came, or our last save was committed by another process
        self._is_ours = False  # the turn
        self._unserved: dict[int, int] = {}  # who waits for a turn of its own, by token, and since when
        self._was_last = False  # in our turn: nobody had one since our last
        self._is_offered = False  # our save: somebody may commit it, and not answer
        self._has_claims = False  # on saves of others, which we have in hand
        self._before = b""  # how the last turn ended before we waited
        self._stuck: bytes | None = None  # the same, before a turn that took too long

    def run(self, batch: Sequence[Waiting[Any]], writes: Writes, confirm: Callable[[], None], wait_s: float) -> None:
        """Run the operations of our process, durably: in our turn, or in that of another process.

        `confirm` is called when they are committed, before anybody is told.
        """
        operation = batch[0].operation
        save = operation if len(batch) == 1 and isinstance(operation, Save) else None
        unserved: list[Asked] = []
        try:
            number = self.wait(save, wait_s)
            if number and save is not None:
                batch[0].result = [new.saved(number, new.digest.hex()) for new in save.records]
                confirm()
                return
            if self._is_offered and save is not None and (landed := writes.landed(save.records[0])) is not None:
                batch[0].result = [landed]
                confirm()
                return
            if not self._is_ours:
                writes.run_all(batch)
                confirm()
                return
            asked = self.asked()
            others = _waiting(asked)
            if not (self._was_last and writes.save_together([*batch, *others])):  # False if anybody wrote since
                writes.begin()
                asked = self.asked()  # again: nobody overtakes now those who still wait
                others = _waiting(asked)
                writes.run_all([*batch, *others])
            confirm()
            numbers = iter([_number_of(waiting) for waiting in others])
            unserved = self.answer(asked, [next(numbers) if request.save is not None else 0 for request in asked])
            self._lone_turns = 0 if asked or not self._was_last else self._lone_turns + 1
            writes.others_write = self._lone_turns < _LONE_TURNS
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error("use", self._path, error) from error
        finally:
            self.end_turn(unserved)

    def wait(self, save: Save | None, wait_s: float) -> int:
        """Until it is our turn: 0. Or until another process has committed `save`: the number that it got.

        Also 0, without a turn, when somebody is stuck in one. OutcomeUnknown if that one has `save` in hand.
        """
        if self._fd is None:
            self._open()
        self._is_offered = False
        began = time.monotonic()
        front = self._read(0, _FRONT_BYTES)
        self._before = front[: _TURN.size]
        waited_s, pause_s, token = 0.0, self._took_s * _FIRST_LOOK, 0
        try:
            while not self._has_turn(token, front, is_patient=self._place is not None and waited_s < _PATIENCE_S):
                waited_s = time.monotonic() - began
                if not token:
                    token = self._ask(save)
                is_late = waited_s >= wait_s
                if (is_late or self._is_stuck(front, waited_s)) and self._withdraw(token):
                    return 0
                if is_late:
                    raise OutcomeUnknown(
                        f"{self._path}: another process has had its turn, and this save, for {wait_s:.0f} s",
                        hint="it may still commit it: look whether it was done, then save again",
                    )
                time.sleep(min(max(pause_s, _LEAST_S), _MOST_S) * (0.8 + 0.4 * _dice.random()))
                pause_s = self._took_s / 4
                front = self._read(0, _FRONT_BYTES)
                if token and (number := self._answer(token, front)):
                    self._took_s = time.monotonic() - began
                    return number
        except BaseException:
            self._withdraw(token)
            raise
        self._took_s = waited_s
        if token and (number := self._answer(token, self._read(0, _FRONT_BYTES))):
            self.end_turn()
            return number
        self._withdraw(token)
        return 0

    def _is_stuck(self, front: bytes, waited_s: float) -> bool:
        """Whether somebody has had the turn for too long; also one of whom we know that already."""
        before = front[: _TURN.size]
        if before != self._before:
            self._before, self._stuck = before, None  # others had turns meanwhile
        elif waited_s >= _STUCK_S:
            self._stuck = before
        return self._stuck == before

    def asked(self) -> list[Asked]:
        """In our turn: what others wait for. Nobody commits what a process that has ended had asked for."""
        asked = {
            place: token
            for place, token in enumerate(self._tokens())
            if token and place != self._place and self._is_taken(place) and self._claim(place)
        }
        if not asked:
            return []
        tokens = self._tokens()  # again: what was given up before we claimed it is left alone
        return [
            Asked(place, token, self._read_save(place, token))
            for place, token in asked.items()
            if tokens[place] == token
        ]

    def _tokens(self) -> tuple[int, ...]:
        return _TOKENS.unpack_from(self._read(0, _FRONT_BYTES), _TURN.size)

    def _claim(self, place: int) -> bool:
        """Have in hand what is asked for there until our turn ends: so its process knows, and does not give it up."""
        if self._fd is None or not _lock_byte(self._fd, fcntl.F_OFD_SETLK, _PLACES + place):
            return False
        self._has_claims = True
        return True

    def answer(self, asked: Sequence[Asked], numbers: Sequence[int]) -> list[Asked]:
        """Once their saves are durable. Answers those without a number: they need turns, in which they hear why."""
        for (place, token, _), number in zip(asked, numbers, strict=True):
            if number:
                with suppress(OSError):
                    self._write(_ENTRY.pack(0, number, number ^ token), _entry_at(place))
        return [request for request, number in zip(asked, numbers, strict=True) if not number]

    def end_turn(self, unserved: Sequence[Asked] = ()) -> None:
        """If it is ours. One of these is to have the next one, if it has waited for some of ours."""
        if self._fd is None:
            return
        if self._is_ours:
            now_ns = time.monotonic_ns()
            self._unserved = {request.token: self._unserved.get(request.token, now_ns) for request in unserved}
            due = [
                request.token
                for request in unserved
                if request.save or now_ns - self._unserved[request.token] > _TURNS_NS
            ]
            token = _dice.choice(due) if due else 0
            with suppress(OSError):
                self._write(_TURN.pack(self._me, now_ns, token), 0)
            self._is_ours = False
        if self._has_claims:
            _unlock_bytes(self._fd, _PLACES, _PLACES)
            self._has_claims = False
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._place = self._stuck = None
        self._is_ours = self._has_claims = False

    def remove(self) -> None:
        """By the last user of the index, when nobody opens it."""
        with suppress(OSError):  # one that stays says nothing to anybody: whoever asked there has ended
            os.unlink(self._path)

    def _open(self) -> None:
        """Where that fails, because the disk is full or the file belongs to another user, we do as if alone."""
        self._me = int.from_bytes(os.urandom(8))
        with suppress(OSError):
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_FILE)
            share(self._path)

    def _has_turn(self, token: int, front: bytes, *, is_patient: bool) -> bool:
        """Whether the turn is ours now. Who is patient leaves it to who comes before, if that comes soon."""
        if self._fd is None:
            return True
        if is_patient:
            last, ended_ns, following = _TURN.unpack_from(front)
            is_ours = following == token if following else last == self._me
            if not is_ours and 0 <= time.monotonic_ns() - ended_ns < (_NEXT_NS if following else _BACK_NS):
                return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._is_ours = True
        last, _, _ = _TURN.unpack(self._read(0, _TURN.size))
        self._was_last = last == self._me
        if self._place is None:
            self._take_place(self._fd)
        return True

    def _take_place(self, handle: int) -> None:
        """In our turn, so that nobody takes for ours what somebody before us asked for there."""
        if sys.platform == "linux":
            with suppress(OSError):
                place = next((place for place in range(_PLACES) if _lock_byte(handle, fcntl.F_OFD_SETLK, place)), None)
                if place is not None:
                    self._write(bytes(8), _entry_at(place))
                self._place = place

    def _is_taken(self, place: int) -> bool:
        if sys.platform != "linux" or self._fd is None:
            return False
        return not _lock_byte(self._fd, fcntl.F_OFD_GETLK, place)

    def _ask(self, save: Save | None) -> int:
        """A token: of our save, or of our wish for a turn; 0 where there is no place for it."""
        if self._place is None:
            return 0
        data = b"" if save is None or self._is_in_hand() else _packed(save)
        token = _dice.getrandbits(64) or 1
        head = _HEAD.pack(token, self._readers, len(data), zlib.crc32(data))
        try:
            self._is_offered = bool(data)
            if data:
                self._write(head + data, _ASKED_AT + self._place * _PLACE_BYTES)
            self._write(token.to_bytes(8, "little"), _entry_at(self._place))
        except OSError:
            return 0  # the disk is full
        return token

    def _is_in_hand(self) -> bool:
        """Whether somebody has, of our place, what we have asked for there before."""
        assert self._fd is not None
        assert self._place is not None
        return sys.platform == "linux" and not _lock_byte(self._fd, fcntl.F_OFD_GETLK, _PLACES + self._place)

    def _withdraw(self, token: int) -> bool:
        """Ask no more; whether nobody commits our save from now on. It may have been committed before."""
        if not token or self._fd is None or self._place is None:
            return True
        is_free = not self._is_offered or _lock_byte(self._fd, fcntl.F_OFD_SETLK, _PLACES + self._place)
        try:
            self._write(bytes(8), _entry_at(self._place))
        except OSError:
            return not self._is_offered
        if self._is_offered and is_free:
            _unlock_bytes(self._fd, _PLACES + self._place, 1)
        return is_free

    def _answer(self, token: int, front: bytes) -> int:
        """A number, only if it was written whole and for this token."""
        assert self._place is not None
        _, number, check = _ENTRY.unpack_from(front, _entry_at(self._place))
        return number if number and number ^ check == token else 0

    def _read_save(self, place: int, token: int) -> Save | None:
        content = self._read(_ASKED_AT + place * _PLACE_BYTES, _PLACE_BYTES)
        written, readers, size, crc = _HEAD.unpack_from(content)
        data = content[_HEAD.size : _HEAD.size + size]
        if written != token or readers != self._readers or zlib.crc32(data) != crc:
            return None  # nothing that we can do for it
        try:
            return _unpacked(data)
        except (ValueError, KeyError, TypeError):
            return None

    def _read(self, offset: int, size: int) -> bytes:
        """With zeros where nothing was written yet."""
        data = b"" if self._fd is None else os.pread(self._fd, size, offset)
        return data if len(data) == size else data.ljust(size, b"\0")

    def _write(self, data: bytes, offset: int) -> None:
        assert self._fd is not None
        os.pwrite(self._fd, data, offset)


def _entry_at(place: int) -> int:
    return _TURN.size + place * _ENTRY.size


class _Remote(Waiting[Any]):
    """A save of another process, which needs no more than the number that it got."""

    needs_checkpoints = False


def _waiting(asked: Sequence[Asked]) -> list[_Remote]:
    return [_Remote(request.save) for request in asked if request.save is not None]


def _number_of(waiting: _Remote) -> int:
    """What a save of another process has become; 0 if it is refused, or was saved before under another ID."""
    if waiting.error is not None or not isinstance(waiting.operation, Save):
        return 0
    ((new,), (saved,)) = waiting.operation.records, waiting.result
    if isinstance(saved, Checkpoint):
        return saved.seq if saved.id == new.id else 0
    return int(saved)


def _packed(save: Save) -> bytes:
    """Empty if it does not fit, or needs a look at the database; or is encrypted: old keys leave nothing here (I10)."""
    if len(save.records) != 1:
        return b""
    (new,) = save.records
    if new.tags or new.has_chunks or new.new_chunks or new.reused_chunks or new.seq or new.takes_key_from or new.key_id:
        return b""
    if new.then is not None or new.provided is not None or len(new.manifest) > _PLACE_BYTES:
        return b""
    try:
        data = ormsgpack.packb((save.actor, small_values(new)))
    except TypeError:  # text that is not Unicode, a number that is too large: the index refuses it
        return b""
    return data if len(data) <= _PLACE_BYTES - _HEAD.size else b""


def _unpacked(data: bytes) -> Save:
    actor, values = ormsgpack.unpackb(data)
    return Save((small_record(values),), actor)


def _lock_byte(handle: int, command: int, place: int) -> bool:
    """Lock a place, until it is closed or its process ends; or ask whether that could be done."""
    try:
        answer = fcntl.fcntl(handle, command, _BYTES[place])
    except BlockingIOError:
        return False
    return command != fcntl.F_OFD_GETLK or _LOCK.unpack(answer)[0] == fcntl.F_UNLCK


_BYTES = [_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0) for place in range(2 * _PLACES)]


def _unlock_bytes(handle: int, first: int, count: int) -> None:
    with suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, first, count, 0))
