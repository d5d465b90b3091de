"""The codec: any state as a tree of msgpack with numbered Ext types, plus the large buffers beside it.

    state ── encode ──▶ tree (bytes) + buffers ── chunks, packs, index … ──▶ tree + fetch(n) ── decode ──▶ state

What is loaded equals what was saved, in type and in value. What could not be restored exactly is refused when it is
saved, with its path (I2). Loading builds only the types below and those the application registered under a name or
allowed (`by_name`), from data. It imports nothing and runs nothing the application did not register (I7).

None, bool, int of 64 bits, float, str, bytes, list and dict with str keys are msgpack's own. The rest is Ext:

    tag  type                     payload (a list: msgpack array; its items may be Ext again)
      1  int beyond 64 bits       two's complement, big-endian
      2  str with lone surrogates UTF-8 of each code point
      3  complex                  two big-endian float64
      4  bytes, out of band       [size, reference]     reference: the number of a buffer, or bin = the bytes
      5  bytearray                [size, reference]
      7  tuple                    [item…]
      8  set                      [item…] in the order of the encoded items
      9  frozenset                same
     10  dict, not all keys str   [key, value, …] in insertion order
     11  OrderedDict              [attributes or nil, key, value, …]
     12  Counter                  [key, count, …]
     13  defaultdict              [name of the factory, key, value, …]
     14  deque                    [maxlen or nil, item…]
     15  range                    [start, stop, step]
     16  slice                    [start, stop, step]
     17  Decimal                  its text, ASCII
     18  Fraction                 [numerator, denominator]
     19  datetime                 [year, month, day, hour, minute, second, µs, fold, zone or nil]
     20  date                     YYYY-MM-DD
     21  time                     [hour, minute, second, µs, fold, zone or nil]
     22  timedelta                [days, seconds, µs]
     23  timezone                 [offset] or [offset, name]
     24  ZoneInfo                 its key, UTF-8
     25  UUID                     16 bytes, and one for is_safe: 0 unknown, 1 safe, 2 unsafe
     26  paths                    [name of the class, text]
     27  registered, by fields    [name, version, more or nil, field, value, …]
     28  registered, one value    [name, version, value]
                                  of both, version 0: not registered, the name is module:qualname (`by_name`)
     29  torch, sparse tensors    [layout, [length…], requires_grad, indices, values, is_coalesced], or
                                  [layout, [length…], requires_grad, compressed indices, plain indices, values]
     30  numpy.ndarray            [dtype, [length…], "C" or "F", reference]
     31  numpy.ndarray of object  [dtype, [length…], "C" or "F", item…]
     32  numpy scalar             [dtype, reference], or ["U", str], ["S", bytes]
     33  numpy.dtype              [dtype]
     34  torch.Tensor, Parameter  [class, dtype, [length…], requires_grad, reference]; of tensors that overlap:
                                  […, reference to their memory, [stride…], offset in bytes, size of the memory]
     35  torch Size, device, dtype  [class, value]
     36  pandas                   [class, field, value, …]
     37  pandas scalars           ["NaT"], ["NA"], [class, unit, count, …]
     38  polars                   [class, {shape, columns}, size, reference to Arrow IPC]
     39  pyarrow                  [class, {shape, columns}, size, reference to Arrow IPC]
    40…  Kedge's own kinds     register_builtin
     42  jax arrays, random keys  [dtype, [length…], kind of key or "", reference]
     43  a state of over 200 levels  [[first buffer, [size…], part], …]: see `deep`
     44  in a part of one         the number of the part that stands here
"""

from __future__ import annotations

from collections.abc import Sequence

from kedge.chunks import DeviceMemory
from kedge.errors import Validation
from kedge.ports import Buffer

from . import deep, plain, summaries  # noqa: F401 - they enter their kinds
from .decoder import Unpacker, load
from .encoder import Encoded, encode
from .kinds import (
    MAX_DEPTH,
    PART_DEPTH,
    BufferSummary,
    ChunkedSource,
    DecodeContext,
    DeviceTargets,
    EncodeContext,
    Fetch,
    Source,
    TypeSummary,
    register_builtin,
)
from .registry import register
from .selection import Branches, Placement

__all__ = [
    "encode", "decode", "outline", "buffer_targets", "parse_device", "register", "register_builtin",
    "Encoded", "Source", "ChunkedSource", "Fetch", "BufferSummary", "TypeSummary",
    "EncodeContext", "DecodeContext", "DeviceTargets", "CODEC", "MAX_DEPTH", "PART_DEPTH",
]  # fmt: skip

CODEC = "kedge1"


def decode(
    tree: Buffer,
    fetch: Fetch,
    *,
    only: Sequence[str] | None = None,
    into: object | None = None,
    device: DeviceTargets | None = None,
) -> object:
    """Return the state, or the part of it that `only` selects.

    `fetch(n)` must return exactly the bytes of buffer n. Arrays are built on that memory, and are read-only if it is.
    `only`: glob patterns over '/'-joined paths ("model/layer3/*"). Dictionaries keep the branches with a match; any
    other container is whole or absent; nothing else is fetched. In a state of more than PART_DEPTH levels, everything
    below half of that is fetched anyway, and patterns do not reach it. Raises NotFound for a pattern without a match.
    `into`: a state of the same form, or with some of its dictionary keys. Its arrays and tensors are filled and become
    part of the result. Raises Validation if one does not fit. Nothing is copied if `fetch` returns their own memory,
    as listed by `buffer_targets`.
    `device`: tensors are created there, on memory that is yet to be filled: see its `targets` afterwards.

    Raises Corrupted for a tree that nothing could have encoded, UnsupportedType for types that are not registered or
    need a missing library, and what `fetch` raises.
    """
    if only is None and into is None:
        return load(tree, fetch, device=device)

    def walk(raw: object, unpacker: Unpacker) -> object:
        if only is not None:
            raw = Branches(only, unpacker).prune(raw)
        return unpacker.lift(raw, 0) if into is None else Placement(unpacker).lift(raw, into, 0)

    return load(tree, fetch, walk, device)


def parse_device(device: object) -> str:
    """Return the name of a device for tensors. Raises Validation for any other text, or without torch."""
    try:
        from .torch_memory import parse_device
    except ImportError as error:
        raise Validation(f"device={device!r} needs torch ({error})", hint="pip install torch") from error
    return parse_device(device)


def outline(tree: Buffer) -> object:
    """Return the state with a BufferSummary for each array and long byte string.

    Each registered value is a TypeSummary. In a state of more than PART_DEPTH levels, everything below half of that is
    a TypeSummary, too. Fetches nothing, constructs only builtin types, needs no library and no registration.
    """
    return load(tree, None)


def buffer_targets(tree: Buffer, into: object) -> dict[int, memoryview | DeviceMemory]:
    """Return each buffer's memory in `into`, by number. Raises Validation naming the path of a misfit."""
    targets: dict[int, memoryview | DeviceMemory] = {}
    load(tree, None, lambda raw, unpacker: Placement(unpacker, targets).lift(raw, into, 0))
    return targets
