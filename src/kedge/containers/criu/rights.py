"""What each dumped thread may do: its users, groups, capabilities, and what confines it.

CRIU gives a restored process the rights that its images name. Images may come from anyone, so whoever restores them
compares these rights with what the new container is allowed. What CRIU could read otherwise than we do, such as a part
that is there twice, is Corrupted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kedge.containers.protobuf import Message, NotAMessage

from .image_files import ImageFiles
from .images import damage, first_record, image_files, records

_DEAD = (2, 6)  # states of a task: it runs no more
_FILTER = 2  # a mode of seccomp
_SYNC = 1  # a flag of a filter: set it for all threads of the process
_USERS, _GROUPS = (1, 3, 5, 7), (2, 4, 6, 8)  # real, effective, saved, of files
_SETS = {"inheritable": 9, "permitted": 10, "effective": 11, "bounding": 12, "ambient": 19}
_CORE = re.compile(r"core-(\d{1,10})\.img")


@dataclass(frozen=True, slots=True)
class Rights:
    """Of one thread. Capabilities by their numbers."""

    thread: int
    users: frozenset[int]
    groups: frozenset[int]
    active: frozenset[int]  # capabilities it has, or may pass on
    bounding: frozenset[int]  # those it could still get
    has_no_new_privileges: bool
    is_filtered: bool  # by seccomp
    label: str  # of AppArmor or SELinux
    user_namespace: int | None  # None: that of its process; 0: not told


@dataclass(frozen=True, slots=True)
class Mapping:
    """A line of a user namespace's map of users or groups."""

    inside: int
    outside: int
    count: int


def rights(source: str | os.PathLike[str] | ImageFiles) -> Iterator[Rights]:
    """The rights of each thread that will run."""
    files = image_files(source)
    names = files.names()
    synced = _synced(files, names)
    for name in sorted(names):
        if core_of := _CORE.fullmatch(name):
            with damage(files, name):
                core = first_record(files, name, "core")
                task = _only(core, 3)
                if task.number(1) in _DEAD:
                    continue
                thread = int(core_of[1])
                yield _rights(thread, core, task, _ids(files, names, thread, core), is_synced=thread in synced)


def user_maps(source: str | os.PathLike[str] | ImageFiles) -> tuple[list[Mapping], list[Mapping]] | None:
    """The maps of users and of groups of the dumped user namespace; None when there was none."""
    files = image_files(source)
    names = [name for name in files.names() if re.fullmatch(r"userns-\d+\.img", name)]
    if not names:
        return None
    with damage(files, names[0]):
        if len(names) > 1:
            raise NotAMessage("one of several user namespaces")
        record = first_record(files, names[0], "userns")
        users, groups = (
            [Mapping(line.number(1), line.number(2), line.number(3)) for line in record.messages(field)]
            for field in (1, 2)
        )
        return users, groups


def _rights(thread: int, core: Message, task: Message, ids: Message, *, is_synced: bool) -> Rights:
    own = _only(core, 5)
    if own.count(10) != 1:
        raise NotAMessage("no credentials")
    credentials = own.message(10)
    sets = {name: _capabilities(credentials, field) for name, field in _SETS.items()}
    return Rights(
        thread=thread,
        users=frozenset(credentials.number(field) for field in _USERS),
        groups=frozenset((*(credentials.number(field) for field in _GROUPS), *credentials.numbers(14))),
        active=sets["inheritable"] | sets["permitted"] | sets["effective"] | sets["ambient"],
        bounding=sets["bounding"],
        has_no_new_privileges=credentials.number(18) == 1,
        is_filtered=is_synced or _mode(own, task) == _FILTER,
        label=credentials.text(15),
        user_namespace=ids.number(10) if 3 in core else None,
    )


def _mode(own: Message, task: Message) -> int:
    """Of seccomp. Old images have it in the task's part, which CRIU prefers."""
    return task.number(11) if 11 in task else own.number(11)


def _synced(files: ImageFiles, names: frozenset[str]) -> frozenset[int]:
    """Threads that get the filters of their process's first thread. Where all threads of a process have the same
    filters, CRIU writes them for the first one only, with a flag, and the others as if they had none."""
    if not {"pstree.img", "seccomp.img"} <= names:
        return frozenset()
    with damage(files, "seccomp.img"):
        filters = [rule for record in records(files, "seccomp.img", "seccomp") for rule in record.messages(1)]
    with damage(files, "pstree.img"):
        processes = list(records(files, "pstree.img", "pstree"))
    threads: set[int] = set()
    for process in processes:
        name = f"core-{process.number(1)}.img"
        if name in names:
            with damage(files, name):
                if _sets_for_all(first_record(files, name, "core"), filters):
                    threads.update(process.numbers(5))
    return frozenset(threads)


def _sets_for_all(core: Message, filters: list[Message]) -> bool:
    own, task = _only(core, 5), _only(core, 3)
    if _mode(own, task) != _FILTER:
        return False
    if 12 in task:  # an old image: CRIU always sets these for all
        return True
    at, last = own.number(12), len(filters)
    while at < last and filters[at].number(3) & _SYNC:
        if 2 not in filters[at]:
            return True
        at, last = filters[at].number(2), at  # the one before it
    return False


def _only(message: Message, field: int) -> Message:
    """A part that may be missing but not be there twice: CRIU would join both."""
    if message.count(field) > 1:
        raise NotAMessage(f"part {field} is there twice")
    return message.message(field)


def _ids(files: ImageFiles, names: frozenset[str], thread: int, core: Message) -> Message:
    if 4 in core:
        return _only(core, 4)
    return first_record(files, f"ids-{thread}.img", "ids") if f"ids-{thread}.img" in names else Message()


def _capabilities(credentials: Message, field: int) -> frozenset[int]:
    words = credentials.numbers(field)
    if len(words) > 2:
        raise NotAMessage("more capabilities than there are")
    bits = sum(word << 32 * number for number, word in enumerate(words))
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)
