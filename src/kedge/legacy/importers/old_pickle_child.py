"""The process in which old pickles are read; `old_pickles` starts it.

Nothing that a pickle names is imported or called. A few names stand for values that are rebuilt here; any other one, of
a class or a function, becomes a `Record`, which takes down what it was given and is kept as data.

Defences, each enough for most: that; arrays rebuilt from their description (`old_pickle_numpy`); limits on memory,
files and their sizes; no root; a network name space of its own where the machine allows one; and a filter that lets it
read from its parent, answer, and ask for memory, no more. All that reading needs is imported before.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import io
import json
import os
import pickle  # nosec B403 # the point of this module
import platform
import resource
import struct
import sys
import uuid
import zlib
from collections.abc import Callable, Hashable
from decimal import Decimal
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, Self

import ormsgpack

from kedge import codec
from kedge.errors import CheckpointError

from . import old_pickle_numpy

MEMORY_BYTES = 1536 << 20
MAX_PLAIN_BYTES = 256 << 20  # of a pickle that was gzipped
MAX_VALUES = 2_000_000
MAX_DEPTH = 200
MAX_DIGITS = 10_000  # of a Decimal
MAX_NAMES = 50  # that are reported
HEAD = struct.Struct("<BQ")
OK, FAILED = 0, 1
CLASS = "$class"  # the key under which a dictionary says which class it was
NAME = "$name"  # and of which a dictionary stands for a class or a function itself

KNOWN = (
    "src.base.tile_processor.ProcessingCheckpoint",
    "src.processors.data_preparation.analysis_checkpoint.AnalysisCheckpoint",
)

_PLAIN: dict[str, tuple[type[Any], ...]] = {
    "builtins": (
        bool, bytearray, bytes, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple,
    ),
    "collections": (collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    "datetime": (datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
}  # fmt: skip
_NUMPY_MODULES = (
    "numpy.core.multiarray",
    "numpy._core.multiarray",
    "numpy.core.numeric",
    "numpy._core.numeric",
    "numpy",
)


class Record:
    """What stands for an object of a class that is known by name only."""

    name = ""

    def __new__(cls, *args: object, **fields: object) -> Self:
        record = object.__new__(cls)
        record.__dict__ = {"args": args, "fields": dict(fields)}
        return record

    def __init__(self, *args: object, **fields: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        if all(part is None or isinstance(part, dict) for part in parts):
            for part in parts:
                self.__dict__["fields"] |= part or {}
        else:
            self.__dict__["state"] = state

    def append(self, item: object) -> None:
        self.__dict__.setdefault("items", []).append(item)

    add = append

    def __setitem__(self, key: object, value: object) -> None:
        self.__dict__.setdefault("pairs", []).append((key, value))


class Uuid:
    """Stands for uuid.UUID."""

    def __init__(self) -> None:
        self._number: object = None

    def __setstate__(self, state: object) -> None:
        self._number = state.get("int") if isinstance(state, dict) else None

    def real(self) -> uuid.UUID:
        if not isinstance(self._number, int):
            raise ValueError("a UUID without a number")
        return uuid.UUID(int=self._number)


def _decimal(text: object) -> Decimal:
    if not isinstance(text, str) or len(text) > MAX_DIGITS:
        raise ValueError(f"a Decimal that is no text of up to {MAX_DIGITS:,} characters")
    return Decimal(text)


def _path(kind: type[PurePath]) -> Callable[..., PurePath]:
    def path(*parts: object) -> PurePath:
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise ValueError("a path of something else than text")
        return kind(*texts)

    return path


def _reconstruct(cls: Any, base: object, state: object) -> object:
    """Stands for copyreg._reconstructor, by which protocols 0 and 1 rebuild an object."""
    if cls is Uuid:
        return Uuid()
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise pickle.UnpicklingError("it rebuilds an object of a builtin class")
    return cls() if state is None else cls(state)  # of a subclass of a builtin, its value


def _encode(text: Any, encoding: object) -> bytes:
    """Stands for _codecs.encode, by which protocols 0 to 2 write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError("it calls a text encoder")
    return text.encode("latin-1")


# On Linux nobody can have a WindowsPath; of a path elsewhere only the words are of use.
_PATHS: dict[str, type[PurePath]] = {
    "Path": PosixPath, "PosixPath": PosixPath, "WindowsPath": PureWindowsPath,
    "PurePath": PurePosixPath, "PurePosixPath": PurePosixPath, "PureWindowsPath": PureWindowsPath,
}  # fmt: skip
_REBUILT: dict[str, Callable[..., object]] = {
    "builtins.object": Record,  # protocols 0 and 1 name it as the base of what they rebuild
    "copyreg._reconstructor": _reconstruct,
    "_codecs.encode": _encode,
    "decimal.Decimal": _decimal,
    "uuid.UUID": Uuid,
    "numpy.ma.core._mareconstruct": old_pickle_numpy.MaskedArray.reconstruct,
    "numpy.ma.core.MaskedArray": old_pickle_numpy.MaskedArray,
    "numpy.ma.MaskedArray": old_pickle_numpy.MaskedArray,
    **{f"{module}.{name}": _path(kind) for name, kind in _PATHS.items() for module in ("pathlib", "pathlib._local")},
    **{f"{module}.{name}": made for module in _NUMPY_MODULES for name, made in old_pickle_numpy.NAMES.items()},
    **{f"{module}.{plain.__name__}": plain for module, types in _PLAIN.items() for plain in types},
}
_NAMES = {id(made): name for name, made in _REBUILT.items()}


class Reader(pickle.Unpickler):
    """Rebuilds what the table above names; the rest becomes Records, and `unknown` lists it."""

    def __init__(self, file: io.BytesIO, expected: frozenset[str]) -> None:
        super().__init__(file)
        self._expected = expected
        self.unknown: dict[str, None] = {}
        self._records: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        home = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (made := _REBUILT.get(f"{home}.{name}")) is not None:
            return made
        full = f"{module}.{name}"
        if full not in self._expected:
            self.unknown[full] = None
        if full not in self._records:
            self._records[full] = type("Record", (Record,), {"name": full})
        return self._records[full]

    def persistent_load(self, pid: Any) -> object:
        raise pickle.UnpicklingError("it refers to objects outside of it")


class Converter:
    """Records as dictionaries; counts values, because a small pickle may repeat one list a billion times."""

    def __init__(self) -> None:
        self._count = 0

    def plain(self, value: Any, depth: int = 0) -> object:
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values, or is nested more than {MAX_DEPTH} deep")
        if isinstance(value, Record):
            return self._record(value, depth)
        if isinstance(value, old_pickle_numpy.MaskedArray):
            return {CLASS: "numpy.ma.MaskedArray", **self._fields(value.parts(), depth)}
        if isinstance(value, type) and issubclass(value, Record) and value is not Record:
            return {NAME: value.name}
        if callable(value):
            return {NAME: _NAMES.get(id(value), "a function")}
        if isinstance(value, dict):
            return self._dict(value, depth)
        if isinstance(value, collections.deque):
            return collections.deque([self.plain(item, depth + 1) for item in value], value.maxlen)
        if isinstance(value, list | tuple | set | frozenset):
            items = [self.plain(item, depth + 1) for item in value]
            if isinstance(value, set | frozenset) and not all(isinstance(item, Hashable) for item in items):
                return {CLASS: f"builtins.{type(value).__name__}", "$items": items}
            return type(value)(items)
        if isinstance(value, old_pickle_numpy.Array):
            return value.real(lambda item: self.plain(item, depth + 1))
        return value.real() if isinstance(value, Uuid | old_pickle_numpy.Dtype) else value

    def _dict(self, value: dict[Any, object], depth: int) -> object:
        pairs = [(self.plain(key, depth + 1), self.plain(item, depth + 1)) for key, item in value.items()]
        if not all(isinstance(key, Hashable) for key, _ in pairs):
            return {CLASS: f"builtins.{type(value).__name__}", "$pairs": pairs}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, pairs)
        return type(value)(dict(pairs))

    def _record(self, record: Record, depth: int) -> dict[str, Any]:
        inside = record.__dict__
        fields = {CLASS: record.name, **self._fields(inside["fields"], depth)}
        for part in ("args", "state", "items", "pairs"):
            if inside.get(part):
                fields[f"${part}"] = self.plain(inside[part], depth + 1)
        return fields

    def _fields(self, fields: dict[Any, Any], depth: int) -> dict[str, Any]:
        return {
            key if isinstance(key, str) else repr(key)[:200]: self.plain(value, depth + 1)
            for key, value in fields.items()
        }


def read(data: bytes, expected: frozenset[str]) -> tuple[int, bytes]:
    try:
        if data[:2] == b"\x1f\x8b":
            data = _unzip(data)
            if len(data) > MAX_PLAIN_BYTES:
                return FAILED, f"unpacked it takes more than {MAX_PLAIN_BYTES:,} bytes".encode()
        reader = Reader(io.BytesIO(data), expected)
        encoded = codec.encode(Converter().plain(reader.load()))
        buffers = [bytes(buffer) for buffer in encoded.buffers if isinstance(buffer, memoryview)]
        return OK, ormsgpack.packb([encoded.tree, buffers, list(reader.unknown)[:MAX_NAMES]])
    except CheckpointError as error:
        return FAILED, f"it holds something that cannot be kept: {error.message}".encode("utf-8", "replace")
    except (EOFError, zlib.error) as error:
        return FAILED, f"it is cut off or damaged: {error}".encode("utf-8", "replace")
    except MemoryError:
        return FAILED, f"reading it takes more than {MEMORY_BYTES:,} bytes of memory".encode()
    except Exception as error:  # noqa: BLE001 - whatever a damaged pickle leads to
        return FAILED, f"no readable pickle: {type(error).__name__}: {error}".encode("utf-8", "replace")


def _unzip(data: bytes) -> bytes:
    """The content of gzip members, as far as it is allowed."""
    plain = bytearray()
    while data and len(plain) <= MAX_PLAIN_BYTES:
        member = zlib.decompressobj(wbits=31)
        plain += member.decompress(data, MAX_PLAIN_BYTES + 1 - len(plain))
        if not member.eof and not member.unconsumed_tail:
            raise EOFError("the file ends too early")
        data = member.unused_data.lstrip(b"\0")
    return bytes(plain)


def prepare() -> None:
    """Import all that reading may need, by reading something: afterwards no file can be opened."""
    sample = [{"a": (1, 2.0)}, {3}, frozenset({4}), b"x", 1j, datetime.datetime.now(datetime.UTC), range(3)]
    for value in (sample, collections.Counter("a"), collections.deque([1]), Decimal(1)):
        codec.encode(value)
    try:
        import numpy as np
    except ModuleNotFoundError:
        return  # then no array of a pickle can be read
    plain = (np.zeros(1), np.zeros(1, "i4,f8"), np.array(["a"]), np.array([None]), np.zeros(1, "M8[s]"))
    for array in (*plain, np.ma.MaskedArray([1.0], [False])):
        status, reason = read(pickle.dumps([array, array[0]]), frozenset())
        if status != OK:
            raise OSError(f"arrays cannot be read: {reason.decode()}")


def confine() -> None:
    """From here on this process can compute, and answer its parent. Raises OSError where that cannot be had."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x40000000)  # CLONE_NEWNET, where allowed; the filter refuses sockets in any case
    _drop_root()
    _filter_calls(libc)


def _drop_root() -> None:
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:
        pass  # a container without the right to: the filter holds all the same


_NOBODY = 65534

# The architecture as the kernel names it, the numbers of read and write, and of what may be called with any arguments:
# memory (mmap, mprotect, munmap, brk, mremap, madvise), futex, signals of its own, clocks, getrandom, its own numbers,
# and to end. Those of x32 are others, and so refused.
_ALLOWED = {
    "x86_64": (
        0xC000003E, 0, 1,
        (9, 10, 11, 12, 25, 28, 202, 13, 14, 15, 131, 24, 39, 186, 228, 96, 201, 318, 60, 231),
    ),
    "aarch64": (
        0xC00000B7, 63, 64,
        (222, 226, 215, 214, 216, 233, 98, 134, 135, 139, 132, 124, 172, 178, 113, 169, 278, 93, 94),
    ),
}  # fmt: skip


def _filter_calls(libc: Any) -> None:
    """Allow few calls, and reading and writing on the two pipes to the parent alone."""
    if platform.machine() not in _ALLOWED:
        raise OSError(f"no list of system calls for {platform.machine()}")
    arch, read_call, write_call, others = _ALLOWED[platform.machine()]
    load, jump, ret = 0x20, 0x15, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050001, 0x80000000
    number, first_argument = 0, 16  # where they are in what the kernel shows; of the argument the low half
    lines = [(load, 0, 0, 4), (jump, 1, 0, arch), (ret, 0, 0, kill), (load, 0, 0, number)]
    for other in others:
        lines += [(jump, 0, 1, other), (ret, 0, 0, allow)]
    for call, pipe in ((read_call, 0), (write_call, 1)):
        lines += [(jump, 0, 4, call), (load, 0, 0, first_argument), (jump, 0, 1, pipe), (ret, 0, 0, allow)]
        lines += [(ret, 0, 0, deny)]
    lines += [(ret, 0, 0, deny)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    program = Program(len(lines), ctypes.cast(code, ctypes.c_void_p))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):  # no new privileges; seccomp
        raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def serve() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    expected = frozenset((*KNOWN, *json.loads(_take(source))))
    try:
        prepare()
        confine()
    except OSError as error:
        _give(sink, FAILED, str(error).encode())
        return
    _give(sink, OK, b"")
    while data := _take(source):
        _give(sink, *read(data, expected))
    os._exit(0)  # what an interpreter does at its end is not allowed


def _take(source: Any) -> bytes:
    head = source.read(HEAD.size)
    if len(head) < HEAD.size:
        return b""
    data: bytes = source.read(HEAD.unpack(head)[1])
    return data


def _give(sink: Any, status: int, answer: bytes) -> None:
    sink.write(HEAD.pack(status, len(answer)))
    sink.write(answer)
    sink.flush()
