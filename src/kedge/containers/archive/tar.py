"""Tar archives, read as if an enemy had written them, and written so that GNU tar and Go read everything.

Python's own module believes sizes and follows links, loses extended attributes and holes, and has had one such hole
after the other. This one knows ustar, GNU long names, pax, extended attributes (SCHILY.xattr) and sparse files (old
GNU, pax 0.1 and 1.0). It never touches a disk: `extraction` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kedge.errors import Corrupted, Validation

from .compression import Reader

BLOCK = 512
_PIECE_BYTES = 1 << 20
_XATTR = b"SCHILY.xattr."

FILE, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
DEVICES = (CHARACTER, BLOCK_DEVICE)
_SPARSE = b"S"
KINDS = {
    FILE: "file", HARD_LINK: "hard link", SYMLINK: "symlink", CHARACTER: "character device",
    BLOCK_DEVICE: "block device", DIRECTORY: "directory", FIFO: "fifo",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a stranger's archive is taken."""

    members: int = 1_000_000
    total_bytes: int = 1 << 36  # decompressed, and of files with their holes
    path_bytes: int = 4096
    depth: int = 256
    header_bytes: int = 1 << 20  # of one member: long names, attributes
    ranges: int = 1_000_000  # of data in sparse files, all together


LIMITS = Limits()


@dataclass(slots=True)
class Member:
    """One entry. `ranges` are the parts of a sparse file that are there: (offset, length); None: all of it."""

    name: bytes
    kind: bytes = FILE
    size: int = 0
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    link: bytes = b""
    device: tuple[int, int] = (0, 0)
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    ranges: list[tuple[int, int]] | None = None

    def parts(self, limits: Limits) -> tuple[bytes, ...]:
        """The path as names; one that leads out, or is too long or deep, is refused."""
        return path_parts(self.name, limits)

    @property
    def data_bytes(self) -> int:
        if self.kind != FILE:
            return 0
        return self.size if self.ranges is None else sum(length for _, length in self.ranges)


def path_parts(name: bytes, limits: Limits) -> tuple[bytes, ...]:
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts or b"\0" in name or len(name) > limits.path_bytes or len(parts) > limits.depth:
        raise Validation(
            f"the archive has a member named {name[:200]!r}", hint="it leads out of the archive, or is too long or deep"
        )
    if any(len(part) > 255 for part in parts):
        raise Validation(
            f"the archive has a name of more than 255 bytes: {name[:40]!r}…", hint="no file system accepts it"
        )
    return parts


class TarReader:
    """The members of a tar stream. What is not read of one is passed over when the next is asked for."""

    def __init__(self, stream: Reader, *, name: str, limits: Limits = LIMITS) -> None:
        self._stream = stream
        self._name = name
        self.limits = limits
        self._padded = 0  # bytes of the present member that are left, with padding
        self._data = 0  # without
        self._ranges = 0
        self._total = 0

    def __iter__(self) -> Iterator[Member]:
        extra: dict[bytes, bytes] = {}
        every: dict[bytes, bytes] = {}
        count = 0
        while (block := self._next_header()) is not None:
            kind = block[156:157]
            size = _number(block, 124, 136)
            if kind in b"xgLK" and kind:
                text = self._long(size)
                if kind == b"L":
                    extra[b"path"] = text.rstrip(b"\0")
                elif kind == b"K":
                    extra[b"linkpath"] = text.rstrip(b"\0")
                else:
                    (every if kind == b"g" else extra).update(self._records(text))
                continue
            count += 1
            if count > self.limits.members:
                raise Validation(f"{self._name} has more than {self.limits.members:,} members", hint="allow more")
            member = self._member(block, {**every, **extra}, size)
            extra = {}
            yield member

    def pieces(self) -> Iterator[bytes]:
        """The data of the member just given, holes left out."""
        while self._data:
            piece = self._stream.read(min(self._data, _PIECE_BYTES))
            if not piece:
                raise self._cut_off()
            self._data -= len(piece)
            self._padded -= len(piece)
            yield piece

    def _member(self, block: bytes, extra: dict[bytes, bytes], size: int) -> Member:
        kind = block[156:157]
        kind = FILE if kind in (b"\0", b"7", b"") else kind
        is_ustar = block[257:263] == b"ustar\0"
        name = _text(block, 0, 100)
        if is_ustar and block[345]:
            name = _text(block, 345, 500) + b"/" + name
        size = _decimal(extra.get(b"size"), size)
        self._begin(size)
        member = Member(
            name=extra.get(b"path", name),
            kind=FILE if kind == _SPARSE else kind,
            size=size,
            mode=_number(block, 100, 108) & 0o7777,
            uid=_decimal(extra.get(b"uid"), _number(block, 108, 116)),
            gid=_decimal(extra.get(b"gid"), _number(block, 116, 124)),
            mtime_ns=_nanoseconds(extra.get(b"mtime"), _number(block, 136, 148)),
            link=extra.get(b"linkpath", _text(block, 157, 257)),
            device=(_number(block, 329, 337), _number(block, 337, 345))
            if kind in (CHARACTER, BLOCK_DEVICE)
            else (0, 0),
            attributes={key[len(_XATTR) :]: value for key, value in extra.items() if key.startswith(_XATTR)},
        )
        if member.kind not in KINDS:
            raise Validation(f"{self._name} has a member of kind {kind!r}", hint="it is not an archive of files")
        if member.kind == FILE:
            self._find_holes(member, block, extra, kind)
        elif kind in (HARD_LINK, SYMLINK, DIRECTORY, FIFO, CHARACTER, BLOCK_DEVICE):
            self._data = 0  # some writers give a hard link the size of its file, with or without bytes
            self._padded = 0 if kind == HARD_LINK else self._padded
            member.size = 0
        if not 0 <= member.uid < 1 << 32 or not 0 <= member.gid < 1 << 32 or _number(block, 100, 108) < 0:
            raise Corrupted(f"{self._name} has an owner or a mode that no file has", hint="get it again")
        self._total += member.size
        if self._total > self.limits.total_bytes:
            raise Validation(
                f"the files of {self._name} have more than {self.limits.total_bytes:,} bytes",
                hint="if that is right, allow it with --max-bytes",
            )
        return member

    # Sparse files

    def _find_holes(self, member: Member, block: bytes, extra: dict[bytes, bytes], kind: bytes) -> None:
        major = extra.get(b"GNU.sparse.major")
        if kind == _SPARSE:
            member.ranges = self._old_gnu_ranges(block)
            member.size = _number(block, 483, 495)
        elif major == b"1" and extra.get(b"GNU.sparse.minor") == b"0":
            member.ranges = self._ranges_in_data()
            member.size = _decimal(extra.get(b"GNU.sparse.realsize"), 0)
        elif b"GNU.sparse.map" in extra:
            member.ranges = self._pairs(extra[b"GNU.sparse.map"].split(b","))
            member.size = _decimal(extra.get(b"GNU.sparse.size"), 0)
        elif major is not None or b"GNU.sparse.offset" in extra:
            raise Validation(
                f"{self._name} has a sparse file of an old kind", hint="write it with GNU tar 1.16 or newer"
            )
        else:
            return
        member.name = extra.get(b"GNU.sparse.name", member.name)
        self._check_ranges(member)

    def _check_ranges(self, member: Member) -> None:
        end = 0
        ranges = [pair for pair in member.ranges or [] if pair[1]]
        for offset, length in ranges:
            if offset < end or length < 0 or offset + length > member.size:
                raise Corrupted(
                    f"{self._name}: the holes of {member.name[:100]!r} are out of order", hint="get it again"
                )
            end = offset + length
        member.ranges = ranges
        self._ranges += len(ranges)
        if sum(length for _, length in ranges) != self._data or self._ranges > self.limits.ranges:
            raise Corrupted(f"{self._name}: the holes of {member.name[:100]!r} do not fit", hint="get it again")

    def _pairs(self, numbers: list[bytes]) -> list[tuple[int, int]]:
        if len(numbers) % 2 or len(numbers) > 2 * self.limits.ranges:
            raise Corrupted(f"{self._name} has a sparse file with too many or too few numbers", hint="get it again")
        values = [_decimal(number, 0) for number in numbers]
        return list(zip(values[::2], values[1::2], strict=True))

    def _old_gnu_ranges(self, block: bytes) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        at, many, more = 386, 4, block[482]
        while True:
            starts = (start for start in range(at, at + 24 * many, 24) if block[start])
            ranges += [(_number(block, start, start + 12), _number(block, start + 12, start + 24)) for start in starts]
            if not more or len(ranges) > self.limits.ranges:
                return ranges
            block = self._exactly(BLOCK)
            at, many, more = 0, 21, block[504]

    def _ranges_in_data(self) -> list[tuple[int, int]]:
        """Numbers in lines at the beginning of the data, padded to blocks."""
        text = b""
        while True:
            numbers = text.split(b"\n")[:-1]
            if numbers and len(numbers) > 2 * _decimal(numbers[0], 0):
                return self._pairs(numbers[1 : 1 + 2 * _decimal(numbers[0], 0)])
            if len(text) > 64 * self.limits.header_bytes or self._data < BLOCK:
                raise Corrupted(f"{self._name} has a sparse file without a map", hint="get it again")
            text += self._exactly(BLOCK)
            self._data -= BLOCK
            self._padded -= BLOCK

    # Blocks

    def _next_header(self) -> bytes | None:
        while self._padded:
            piece = self._stream.read(min(self._padded, _PIECE_BYTES))
            if not piece:
                raise self._cut_off()
            self._padded -= len(piece)
        block = self._exactly(BLOCK, may_end=True)
        if not block or not any(block):
            return None
        given = _number(block, 148, 156)
        blank = block[:148] + b" " * 8 + block[156:]
        if given not in (sum(blank), sum(blank) - 256 * sum(1 for byte in blank if byte > 127)):
            raise Corrupted(f"{self._name} is not a tar archive, or is damaged", hint="get it again")
        return block

    def _begin(self, size: int) -> None:
        if not 0 <= size <= self.limits.total_bytes:
            raise Validation(f"{self._name} has a member of {size:,} bytes", hint="allow more with --max-bytes")
        self._data = size
        self._padded = -(-size // BLOCK) * BLOCK

    def _long(self, size: int) -> bytes:
        if size > self.limits.header_bytes:
            raise Validation(f"{self._name} has a header of {size:,} bytes", hint="no real archive has one")
        self._begin(size)
        return b"".join(self.pieces())

    def _records(self, text: bytes) -> dict[bytes, bytes]:
        """pax: "<length> <key>=<value>\\n" each."""
        records = {}
        while text.strip(b"\0"):
            length, space, _ = text[:20].partition(b" ")
            size = _decimal(length, 0)
            record = text[len(length) + 1 : size - 1]
            key, equals, value = record.partition(b"=")
            if not space or size <= len(length) or size > len(text) or text[size - 1 : size] != b"\n" or not equals:
                raise Corrupted(f"{self._name} has a damaged header", hint="get it again")
            records[key] = value
            text = text[size:]
        return records

    def _exactly(self, size: int, *, may_end: bool = False) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._stream.read(size - len(data))
            if not piece:
                if may_end and not data:
                    return b""
                raise self._cut_off()
            data += piece
        return data

    def _cut_off(self) -> Corrupted:
        return Corrupted(f"{self._name} is cut off", hint="get it again")


def _text(block: bytes, start: int, end: int) -> bytes:
    return block[start:end].partition(b"\0")[0]


def _number(block: bytes, start: int, end: int) -> int:
    """Octal text or, with the first bit set, binary; what is neither is -1, which no size or sum is."""
    data = block[start:end]
    if data[0] & 0x80:
        return int.from_bytes(bytes([data[0] & 0x7F]) + data[1:], "big") if data[0] == 0x80 else -1
    text = data.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        return -1


def _decimal(text: bytes | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdigit() or len(text) > 20:
        raise Corrupted(f"{text[:40]!r} is not a number", hint="get the archive again")
    return int(text)


def _nanoseconds(text: bytes | None, seconds: int) -> int:
    if text is None:
        return max(seconds, 0) * 10**9
    whole, _, fraction = text.partition(b".")
    sign = -1 if whole.startswith(b"-") else 1
    value = _decimal(whole.removeprefix(b"-") or b"0", 0) * 10**9 + _decimal((fraction[:9] + b"0" * 9)[:9], 0)
    return max(-(1 << 63), min(sign * value, (1 << 63) - 1))
