"""The types the codec knows: a table of kinds, by class for saving and by Ext tag for loading.

A kind is a Leaf (its encoder writes the payload itself) or a Structure (it only names its children; the packer and the
unpacker walk them, so that paths, depth, `only` and `into` work the same in all of them). Kinds of other libraries are
in separate modules, imported when a value first needs them.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Protocol, TypeAlias

from kedge.blobs.shelter import sheltered
from kedge.chunks import Deferred, DeviceMemory, StoredStream
from kedge.errors import CheckpointError, Corrupted, UnsupportedType, Validation
from kedge.ports import Buffer

from .shared_memory import Shares

MAX_DEPTH = 10_000  # levels of containers in a state, on save and on load
PART_DEPTH = 200  # of these, packed and unpacked by recursion: deeper states are cut into parts
LEAF_DEPTH = 40  # further levels that a leaf may use
FIRST_FREE_TAG = 40  # tags below are fixed here; others are for register_builtin


class Tag(IntEnum):
    """Numbers of the Ext types. They are the format (I8): never renumber, never reuse."""

    INT = 1
    STR = 2
    COMPLEX = 3
    BYTES = 4
    BYTEARRAY = 5
    TUPLE = 7
    SET = 8
    FROZENSET = 9
    DICT = 10
    ORDERED_DICT = 11
    COUNTER = 12
    DEFAULT_DICT = 13
    DEQUE = 14
    RANGE = 15
    SLICE = 16
    DECIMAL = 17
    FRACTION = 18
    DATETIME = 19
    DATE = 20
    TIME = 21
    TIMEDELTA = 22
    TIMEZONE = 23
    ZONEINFO = 24
    UUID = 25
    PATH = 26
    FIELDS = 27
    VALUE = 28
    SPARSE_TENSOR = 29
    NDARRAY = 30
    OBJECT_ARRAY = 31
    NUMPY_SCALAR = 32
    NUMPY_DTYPE = 33
    TENSOR = 34
    TORCH_VALUE = 35
    PANDAS = 36
    PANDAS_SCALAR = 37
    POLARS = 38
    ARROW = 39
    JAX = 42
    DEEP = 43
    PART = 44


class ChunkedSource(Protocol):
    """A buffer that is not in memory, such as a file. Each piece becomes one chunk; read again after a failure.

    It is loaded as a StoredStream.
    """

    @property
    def size_bytes(self) -> int: ...

    def pieces(self) -> Iterator[Buffer | Deferred]: ...


Source: TypeAlias = memoryview | DeviceMemory | ChunkedSource
Fetch: TypeAlias = Callable[[int], Buffer | DeviceMemory | StoredStream]
Raw: TypeAlias = Any  # msgpack as ormsgpack reads it; an Ext is a tuple (tag, payload)


@dataclass(frozen=True, slots=True)
class BufferSummary:
    """An array, tensor or long byte string in an outline.

    Two of them have equal content if all fields and the bytes of `ordinals` are equal. Small content is in the tree,
    and so in `data`.
    """

    kind: str  # ndarray, tensor, bytes, bytearray, polars.DataFrame, …
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    ordinals: tuple[int, ...] = ()
    data: bytes = field(default=b"", repr=False)
    order: str = "C"  # of an array's elements in its bytes: "F" means the first index varies fastest


@dataclass(frozen=True, slots=True, eq=False)
class TypeSummary:
    """A value of a registered type, or of a library, in an outline: not constructed.

    `fields` maps names to values; a type with its own encoder has its one value under "value".
    """

    name: str
    version: int
    fields: Mapping[str, object]

    # Hashable without `fields`, because Enum members and frozen values may be dictionary keys or set elements.
    def __hash__(self) -> int:
        return hash((self.name, self.version, tuple(self.fields)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypeSummary):
            return NotImplemented
        return (self.name, self.version, self.fields) == (other.name, other.version, other.fields)


class Problem(Exception):
    """Why a value cannot be packed or unpacked. Collects the path on its way up; `typed` makes the error."""

    def __init__(self, message: str, hint: str = "", error: type[CheckpointError] = Corrupted) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.error = error
        self.steps: list[tuple[str, object]] = []  # (segment, container it leads out of), innermost first

    def under(self, segment: str, container: object = None) -> Problem:
        self.steps.append((segment, container))
        return self

    def typed(self) -> CheckpointError:
        path = "state" + "".join(segment for segment, _ in reversed(self.steps))
        message = self.message.replace("{path}", path) if "{path}" in self.message else f"{path}: {self.message}"
        if issubclass(self.error, UnsupportedType):
            return self.error(message, hint=self.hint, path=path)
        return self.error(message, hint=self.hint)


def unsupported(what: str, hint: str) -> Problem:
    """Return the problem of a value that cannot be saved and restored exactly; `what` follows its path."""
    return Problem(f"{{path}} {what}", hint, UnsupportedType)


def key_name(key: object) -> str:
    """Return how a path names a key. Python itself writes no integer of more than 4,300 digits."""
    try:
        return str(key)
    except ValueError:
        return hex(key) if isinstance(key, int) else f"<{type(key).__name__}>"


class TooDeep(Problem):
    """Too many levels. The containers in the path tell whether it is a cycle."""

    def __init__(self, error: type[CheckpointError], levels: int = MAX_DEPTH) -> None:
        super().__init__(f"more than {levels:,} levels deep", "save it in a flatter form", error)

    @property
    def is_cycle(self) -> bool:
        containers = [id(container) for _, container in self.steps if container is not None]
        return len(set(containers)) < len(containers)

    def typed(self) -> CheckpointError:
        outermost_first = self.steps[::-1]
        seen: dict[int, int] = {}
        for position, (_, container) in enumerate(outermost_first):
            first = seen.setdefault(id(container), position)
            if first != position and container is not None:
                path, again = ("state" + "".join(s for s, _ in outermost_first[:n]) for n in (first, position))
                return UnsupportedType(
                    f"{path} contains itself (at {again})", hint="remove the cycle before saving", path=again
                )
        del self.steps[:-5]  # the first few segments say where; 200 would not
        return super().typed()


class Shape(StrEnum):
    """The layout of a Structure's children in its payload, and their names in a path."""

    ITEMS = "items"  # [head…, child, child, …]               path: [0]
    PAIRS = "pairs"  # [head…, key, child, key, child, …]      path: ["key"]
    FIELDS = "fields"  # like PAIRS, keys are attribute names    path: .name


class EncodeContext(Protocol):
    """What a leaf's encoder may use."""

    out_of_band_bytes: int
    shares: Shares

    def add_buffer(self, source: Source) -> int:
        """Keep `source` out of the tree; return its ordinal."""
        ...

    def place_bytes(self, view: memoryview) -> int | bytes:
        """Return the reference for these bytes: the bytes themselves if they are few, otherwise their ordinal."""
        ...

    def pack(self, value: object) -> bytes:
        """Return the payload for `value`, which may be anything the codec knows."""
        ...


@dataclass(slots=True)
class DeviceTargets:
    """An accelerator to load onto. Decoders add memory for buffers; the caller of `decode` fills it afterwards."""

    name: str
    sizes: Sequence[int]  # of all buffers
    targets: dict[int, DeviceMemory] = field(default_factory=dict)

    def check(self, ordinal: int, size_bytes: int) -> None:
        """Check a size before memory is allocated, so that a damaged tree cannot take all of it."""
        if not 0 <= ordinal < len(self.sizes) or self.sizes[ordinal] != size_bytes:
            raise Problem(f"it names {size_bytes:,} bytes of buffer {ordinal}, which has others")


class DecodeContext(Protocol):
    """What a leaf's decoder may use. Its exceptions are reported as Corrupted, except errors.*."""

    device: DeviceTargets | None  # where tensors go; None: main memory
    shared: dict[int, Any]  # for values that share a buffer: what was made of it, by its number

    def fetch(self, ordinal: object, size_bytes: int | None = None) -> memoryview:
        """Return the bytes of a buffer, which must be `size_bytes` long."""
        ...

    def stream(self, ordinal: object) -> StoredStream:
        """Return a buffer that was saved from a ChunkedSource, not read yet."""
        ...

    def bytes_of(self, reference: object, size_bytes: int) -> memoryview:
        """Return the bytes for a reference from `place_bytes`; writable if the store's buffer is."""
        ...

    def unpack(self, payload: bytes) -> Any:
        """Return the value that `pack` was given."""
        ...


@dataclass(frozen=True, slots=True)
class Leaf:
    tag: int
    name: str
    encode: Callable[[Any, EncodeContext], bytes]
    decode: Callable[[bytes, DecodeContext], object]
    # For leaves that load into memory the caller owns: returns the reference to the bytes, and that writable memory.
    # Raises Problem if the caller's value does not have the saved form. If it returns None, load the value, then
    # `fill`.
    target: Callable[[bytes, DecodeContext, Any], tuple[int | bytes, memoryview | DeviceMemory] | None] | None = None
    fill: Callable[[Any, Any], None] | None = None  # copies a loaded value into the caller's


@dataclass(frozen=True, slots=True)
class Structure:
    tag: int
    name: str
    shape: Shape
    head: int  # number of values before the children
    take: Callable[[Any], tuple[Sequence[object], Sequence[Any]]]  # value → (head, children or pairs)
    build: Callable[[Sequence[Any], list[Any]], object]  # the inverse; pairs come as (key, child)
    is_unordered: bool = False  # written in the order of the encoded items, so that equal sets encode equally


Kind: TypeAlias = Leaf | Structure


@dataclass(frozen=True, slots=True)
class Choice:
    """A class whose values are of different kinds, such as arrays of numbers and arrays of objects."""

    choose: Callable[[Any], Kind]


by_class: dict[type, Kind | Choice] = {}
by_tag: dict[int, Kind] = {}
# What walks and summaries need to know of a tag, without the library of its values.
layouts: dict[int, tuple[Shape, int]] = {Tag.OBJECT_ARRAY: (Shape.ITEMS, 3), Tag.PANDAS: (Shape.FIELDS, 1)}
leaf_outlines: dict[int, Callable[[bytes, DecodeContext], object]] = {}
structure_outlines: dict[int, Callable[[Sequence[Any], list[Any]], object]] = {}

# Where kinds of other libraries are: top-level package of the class → our module, and tag → package.
_HOMES = {
    **dict.fromkeys(("decimal", "fractions", "zoneinfo"), "rare_types"),
    "numpy": "numpy_types",
    "torch": "torch_types",
    **dict.fromkeys(("jax", "jaxlib"), "jax_types"),
    "pandas": "pandas_types",
    "polars": "polars_types",
    "pyarrow": "arrow_types",
}
_PACKAGES: dict[int, str] = {
    Tag.DECIMAL: "decimal",
    Tag.FRACTION: "fractions",
    Tag.ZONEINFO: "zoneinfo",
    **dict.fromkeys((Tag.NDARRAY, Tag.OBJECT_ARRAY, Tag.NUMPY_SCALAR, Tag.NUMPY_DTYPE), "numpy"),
    **dict.fromkeys((Tag.TENSOR, Tag.SPARSE_TENSOR, Tag.TORCH_VALUE), "torch"),
    **dict.fromkeys((Tag.PANDAS, Tag.PANDAS_SCALAR), "pandas"),
    Tag.JAX: "jax",
    Tag.POLARS: "polars",
    Tag.ARROW: "pyarrow",
    **dict.fromkeys((40, 41), "kedge"),  # Tree and File, which add themselves
}


def add(kind: Kind, *classes: type) -> None:
    """Add a kind: loaded by its tag, saved for exactly these classes."""
    by_tag[kind.tag] = kind
    if isinstance(kind, Structure):
        layouts[kind.tag] = kind.shape, kind.head
    for cls in classes:
        by_class[cls] = kind


def register_builtin(
    tag: int,
    cls: type,
    encode: Callable[[Any, EncodeContext], bytes],
    decode: Callable[[bytes, DecodeContext], object],
    *,
    outline: Callable[[bytes, DecodeContext], object] | None = None,
) -> None:
    """Add a type of Kedge's own to the codec, under a fixed tag of 40 or more.

    `encode` returns the Ext payload, `decode` takes it. A kind with buffers needs `outline`, which must not fetch.
    """
    if not FIRST_FREE_TAG <= tag <= 127 or tag in by_tag:
        raise Validation(f"Ext tag {tag} is not free", hint=f"use another one from {FIRST_FREE_TAG} to 127")
    add(Leaf(tag, cls.__name__, encode, decode), cls)
    if outline is not None:
        leaf_outlines[tag] = outline


def kind_of(value: object) -> Kind | None:
    """Return the kind for saving `value`. Never imports a library: one that is not loaded has no values."""
    cls = type(value)
    kind = by_class.get(cls)
    if kind is None:
        package = cls.__module__.partition(".")[0] if isinstance(cls.__module__, str) else ""
        if package in _HOMES and package in sys.modules:
            _bring_in(_HOMES[package])
            kind = by_class.get(cls)
    return kind.choose(value) if isinstance(kind, Choice) else kind


@sheltered
def _bring_in(module: str) -> None:
    """Elsewhere than in the main thread: a signal handler that saves would find the module half imported."""
    with _importing:
        importlib.import_module(f".{module}", __package__)


# Python locks each module during its import. A child forked meanwhile would wait for that lock forever.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


def kind_for(tag: int) -> Kind:
    """Return the kind for an Ext tag; imports its library, one of a fixed set (I7)."""
    kind = by_tag.get(tag)
    if kind is not None:
        return kind
    package = _PACKAGES.get(tag)
    if package is None:
        raise Problem(f"unknown Ext tag {tag}")
    try:
        _bring_in(_HOMES.get(package, ".files"))
    except ImportError as error:
        hint = f"pip install {package}, or look at it with kedge show"
        raise unsupported(f"was saved from {package}, which cannot be imported here ({error})", hint) from error
    return by_tag[tag]
