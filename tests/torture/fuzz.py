"""Mutated input for everything that reads bytes of strangers: refused by an error of ours, or read; nothing else.

A seeded mutational fuzzer: it flips, cuts, repeats and splices sound input. It does not follow coverage, as atheris
does; a finding is repeated by its target, seed and number.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import ormsgpack

from kedge import codec
from kedge.codec.json_view import from_json, to_json_view
from kedge.containers import protobuf
from kedge.containers.runtime import arguments
from kedge.errors import CheckpointError
from kedge.files.table import parse_table
from kedge.store.manifest import parse_manifest

MOST = 1_000_000  # inputs for each target
_INTERESTING = [0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xC7, 0xC9, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF]


@dataclass(frozen=True, slots=True)
class Target:
    seeds: tuple[bytes, ...]
    read: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = (CheckpointError,)


def _states() -> tuple[bytes, ...]:
    values: list[Any] = [
        {"a": [1, 2.5, "x", None, True], "b": {"c": b"bytes" * 9}},
        [(1, 2), {3}, frozenset({4}), range(5), slice(1, 2), 10**40, 1j],
        [datetime(2026, 1, 2, tzinfo=UTC), date(2026, 1, 2), UUID(int=7), Path("a/b"), Decimal("1.5"), Fraction(1, 3)],
        {(1, "k"): ZoneInfo("UTC"), 2**70: {}, b"k": []},
        [[[[[[["deep"]]]]]]] * 3,
    ]
    return tuple(bytes(codec.encode(value).tree) for value in values)


def _read_tree(data: bytes) -> None:
    to_json_view(codec.outline(data))
    codec.decode(data, lambda number: memoryview(b""))


def _read_message(data: bytes) -> None:
    for _, value in protobuf.fields(memoryview(data)):
        if isinstance(value, memoryview):
            try:
                list(protobuf.fields(value))
            except protobuf.NotAMessage:
                continue


def targets() -> dict[str, Target]:
    trees = _states()
    table = ormsgpack.packb([trees[0], -1, b"", []])
    message = protobuf.encode([(1, 5), (2, b"abc"), (3, protobuf.encode([(1, 7), (2, "x")]))])
    texts = [b'{"a": [1, 2.5e3, "\\u00e4", null], "b": {"c": -0.1}}', b"[[1], {}, true]", b'"x"']
    calls = [b"--root\0/run\0create\0--bundle\0/b\0name", b"checkpoint\0--image-path\0/i\0name", b"delete\0--force\0n"]
    return {
        "codec": Target(trees, _read_tree),
        "json": Target(tuple(texts), from_json),
        "manifest": Target((b"\x01" + trees[0], b"\x03" + table), lambda data: parse_manifest(data, lambda *_: b"")),
        "files": Target(
            (ormsgpack.packb([1, [], []]), *trees),
            lambda data: parse_table(data, content_bytes=1 << 20, is_tree=True),
        ),
        "protobuf": Target((message,), _read_message, (protobuf.NotAMessage,)),
        "runtime arguments": Target(
            tuple(calls), lambda data: arguments.parse(data.decode("utf-8", "replace").split("\0"))
        ),
    }


def mutations(seeds: tuple[bytes, ...], seed: int) -> Iterator[bytes]:
    """For ever, the same for the same seed."""
    chance = random.Random(seed)
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data) + 1)
            width = chance.choice((1, 1, 2, 4, 8, 64))
            match chance.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << chance.randrange(8)
                case 1 if at < len(data):
                    data[at] = chance.choice(_INTERESTING)
                case 2:
                    del data[at : at + width]
                case 3:
                    data[at:at] = data[at : at + width] * chance.randint(1, 8)
                case 4:
                    data[at:at] = chance.randbytes(width)
                case _:
                    other = chance.choice(seeds)
                    data[at:] = other[chance.randrange(len(other) + 1) :]
        yield bytes(data)


def fuzz(name: str, target: Target, seed: int, count: int, until: float = float("inf")) -> int:
    """How many inputs were tried; AssertionError with the input for what is neither read nor refused."""
    tried = 0
    for data in itertools.islice(mutations(target.seeds, seed), count):
        tried += 1
        try:
            target.read(data)
        except target.refusals:
            pass
        except Exception as error:
            raise AssertionError(
                f"{name}, seed {seed}, input {tried}: {type(error).__name__}: {error}; {data.hex()[:2000]}"
            ) from error
        if tried % 256 == 0 and time.monotonic() > until:
            break
    return tried


def torture(minutes: float, folder: Path) -> dict[str, float]:
    each_s = minutes * 60 / len(targets())
    seed = int(time.time())
    (folder / "seed").write_text(json.dumps(seed))
    return {name: fuzz(name, target, seed, MOST, time.monotonic() + each_s) for name, target in targets().items()}
