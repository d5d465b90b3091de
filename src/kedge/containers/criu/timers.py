"""Periodic timers that expired while everything stood still.

Such a timer of timerfd is armed again by the kernel when it is read. A dump finds it expired and not armed, and CRIU
restores it so: it would never fire again. So it is given its next period in the images, before CRIU reads them.
"""

from __future__ import annotations

import struct
from pathlib import Path

from kedge.containers.protobuf import Message, encode, fields

from .images import damage, image_files, raw_records

_TIMER = 17  # the kind of an open file, in files.img
_ENTRY = 12  # where that is in its record
_TICKS, _NEXT, _PERIOD = 5, (7, 8), (9, 10)  # expirations not read yet; seconds and nanoseconds


def arm_periodic(directory: Path) -> int:
    """Arm what expired in the images of a directory; how many timers that were."""
    path = directory / "files.img"
    if not path.is_file():
        return 0
    files = image_files(directory)
    with damage(files, path.name):
        head, records = raw_records(files, path.name, "files")
        armed = [_armed(record) for record in records]
    count = sum(record is not None for record in armed)
    if count:
        bodies = [bytes(record) if new is None else new for record, new in zip(records, armed, strict=True)]
        path.write_bytes(bytes(head) + b"".join(struct.pack("<I", len(body)) + body for body in bodies))
    return count


def _armed(record: memoryview) -> bytes | None:
    """The record with its timer armed; None where there is nothing to do."""
    message = Message(record)
    if message.number(1) != _TIMER or _ENTRY not in message:
        return None
    timer = message.message(_ENTRY)
    if not timer.number(_TICKS) or any(map(timer.number, _NEXT)) or not any(map(timer.number, _PERIOD)):
        return None
    next_at = dict(zip(_NEXT, map(timer.number, _PERIOD), strict=True))
    entry = encode(
        (number, next_at.get(number, _plain(value))) for number, value in fields(memoryview(message.bytes(_ENTRY)))
    )
    return encode((number, entry if number == _ENTRY else _plain(value)) for number, value in fields(record))


def _plain(value: int | memoryview) -> int | bytes:
    return value if isinstance(value, int) else bytes(value)
