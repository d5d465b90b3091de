"""All disks that a power cut may leave, of one trace: which unsynced changes survived, whole or torn (see crash.py).

A state is a moment and a set of survivors. States of the same content are one disk: contents are put together once,
and known by their digests, so that going through many states costs little.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kedge.ports import digest_of

from .crash import Inode, Op, Trace

SECTOR = 512
ALL_BELOW = 10  # of so many unsynced changes every subset is drawn

Tears = tuple[tuple[int, int, int], ...]  # of an open change: which one, and the bytes of it that survived, from and to


@dataclass(frozen=True, slots=True)
class Content:
    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """Files and directories below the root."""

    files: tuple[tuple[str, Content], ...]
    directories: tuple[str, ...]

    @property
    def key(self) -> bytes:
        """The same for the same names and bytes."""
        parts = [path.encode() + b"\0" + content.digest for path, content in self.files]
        return digest_of(b"\n".join([*parts, *(path.encode() for path in self.directories)]))


@dataclass(frozen=True, slots=True)
class CrashState:
    moment: int
    heard: int  # how many messages were out by then
    survivors: int  # a bit for each change that was not durable
    tears: Tears
    epoch: Epoch

    @property
    def disk(self) -> Disk:
        return self.epoch.disk(self.survivors, self.tears)

    def __str__(self) -> str:
        lost = [str(op) for n, op in enumerate(self.epoch.open) if not self.survivors >> n & 1]
        torn = [f"{self.epoch.open[n]} has only bytes {begin} to {end}" for n, begin, end in self.tears]
        total = len(self.epoch.open)
        some = "; ".join([*torn, *lost][:12])
        return f"moment {self.moment}, {total - len(lost)} of {total} unsynced changes survive; lost or torn: {some}"


class Epoch:
    """A moment: what is durable, and what may or may not survive."""

    def __init__(self, trace: Trace, moment: int) -> None:
        self.moment = moment
        self.heard = bisect_right([at for at, _ in trace.messages], moment)
        self._trace = trace
        ops = [op for op in trace.ops if op.issued <= moment]
        self.open = [op for op in ops if op.durable > moment]
        bits = {id(op): n for n, op in enumerate(self.open)}
        self._names = [(op, bits.get(id(op), -1)) for op in ops if op.is_name]
        self._changes: dict[Inode, list[tuple[Op, int]]] = {}
        for op in ops:
            if not op.is_name:
                self._changes.setdefault(op.files[0], []).append((op, bits.get(id(op), -1)))
        self._masks = {i: _mask(changes) for i, changes in self._changes.items()}
        self._name_mask = _mask(self._names)
        self._trees: dict[int, tuple[list[tuple[str, Inode]], tuple[str, ...]]] = {}
        self._contents: dict[tuple[Inode, int, Tears], Content] = {}
        self._bases: dict[Inode, tuple[int, bytes]] = {}

    @cached_property
    def unsynced(self) -> int:
        return (1 << len(self.open)) - 1

    def disk(self, survivors: int, tears: Tears = ()) -> Disk:
        names = survivors & self._name_mask
        if names not in self._trees:
            self._trees[names] = self._tree(names)
        files, directories = self._trees[names]
        return Disk(tuple((path, self._content(inode, survivors, tears)) for path, inode in files), directories)

    def _tree(self, survivors: int) -> tuple[list[tuple[str, Inode]], tuple[str, ...]]:
        names = dict(self._trace.names)
        for op, bit in self._names:
            if bit < 0 or survivors >> bit & 1:
                if op.remove:
                    names.pop(op.remove, None)
                if op.add:
                    names[op.add[0], op.add[1]] = op.add[2]
        below: dict[Inode, list[tuple[str, Inode]]] = {}
        for (parent, name), inode in names.items():
            below.setdefault(parent, []).append((name, inode))
        files: list[tuple[str, Inode]] = []
        directories: list[str] = []

        def walk(parent: Inode, path: str) -> None:
            for name, inode in below.get(parent, ()):
                if inode.is_directory:
                    directories.append(path + name)
                    walk(inode, path + name + "/")
                else:
                    files.append((path + name, inode))

        walk(self._trace.root, "")
        return sorted(files, key=lambda file: file[0]), tuple(sorted(directories))

    def _content(self, inode: Inode, survivors: int, tears: Tears) -> Content:
        mask = self._masks.get(inode, 0)
        torn = tuple(tear for tear in tears if mask >> tear[0] & 1)
        key = (inode, survivors & mask, torn)
        found = self._contents.get(key)
        if found is None:
            data = self._bytes(inode, survivors, torn)
            found = self._contents[key] = Content(data, digest_of(data))
        return found

    def _bytes(self, inode: Inode, survivors: int, tears: Tears) -> bytes:
        changes = self._changes.get(inode, [])
        if inode not in self._bases:
            first = next((n for n, (_, bit) in enumerate(changes) if bit >= 0), len(changes))
            base = bytearray(inode.content)
            for op, _ in changes[:first]:
                _apply(base, op, 0, None)
            self._bases[inode] = first, bytes(base)
        first, start = self._bases[inode]
        kept = {n: (begin, end) for n, begin, end in tears}
        body = bytearray(start)
        for op, bit in changes[first:]:
            if bit < 0 or survivors >> bit & 1:
                _apply(body, op, *kept.get(bit, (0, None)))
        return bytes(body)


def _mask(changes: list[tuple[Op, int]]) -> int:
    return sum(1 << bit for _, bit in changes if bit >= 0)


def _apply(body: bytearray, op: Op, begin: int, end: int | None) -> None:
    """One change of a file, of a write only these bytes."""
    if op.data is not None:
        data = op.data[begin:end]
        at = op.offset + begin
        if data and len(body) < at:
            body.extend(bytes(at - len(body)))
        body[at : at + len(data)] = data
    elif op.size is not None:
        if len(body) < op.size:
            body.extend(bytes(op.size - len(body)))
        elif not op.grow:
            del body[op.size :]


def crash_states(trace: Trace, *, seed: int = 1, extra: int = 4) -> Iterator[CrashState]:
    """Cuts just before each sync completes, and at the end: the moments with most at stake. The latest come first,
    because most was promised by then.
    """
    draw = random.Random(f"crash {seed}")
    for moment in sorted({*(sync - 1 for sync in trace.syncs), trace.end}, reverse=True):
        epoch = Epoch(trace, moment)
        seen: set[tuple[int, Tears]] = set()
        for chosen in _choices(epoch, draw, extra):
            if chosen not in seen:
                seen.add(chosen)
                yield CrashState(moment, epoch.heard, *chosen, epoch)


def _choices(epoch: Epoch, draw: random.Random, extra: int) -> Iterator[tuple[int, Tears]]:
    """None, all, kinds of changes, all but one, one only, those up to one, with that one torn, and `extra` random ones
    for each; of few changes every subset.
    """
    ops, every = epoch.open, epoch.unsynced
    yield 0, ()
    yield every, ()
    yield sum(1 << n for n, op in enumerate(ops) if op.is_name), ()
    yield sum(1 << n for n, op in enumerate(ops) if not op.is_name), ()
    yield sum(1 << n for n, op in enumerate(ops) if op.data is None), ()
    if len(ops) <= ALL_BELOW:
        for survivors in range(every):
            yield survivors, ()
    for n, op in enumerate(ops):
        before = (1 << n) - 1
        yield every & ~(1 << n), ()
        yield 1 << n, ()
        yield before, ()
        if op.data is not None and len(op.data) > SECTOR:
            for survivors in (before | 1 << n, every):
                yield survivors, (_tear(n, op, draw),)
    for _ in range(extra * len(ops)):
        share = draw.choice((0.2, 0.5, 0.8, 0.95))
        survivors = sum(1 << n for n in range(len(ops)) if draw.random() < share)
        torn = [n for n, op in enumerate(ops) if op.data is not None and len(op.data) > SECTOR and survivors >> n & 1]
        yield survivors, tuple(_tear(n, ops[n], draw) for n in torn if draw.random() < 0.15)


def _tear(n: int, op: Op, draw: random.Random) -> tuple[int, int, int]:
    """A write of which only the first sectors reached the disk, or only the last."""
    assert op.data is not None
    cut = draw.randrange(len(op.data) // SECTOR + 1) * SECTOR
    return (n, 0, cut) if draw.random() < 0.7 else (n, cut, len(op.data))
