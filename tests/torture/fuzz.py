"""Mutated input for everything that reads bytes of strangers: refused by an error of ours, or read; nothing else.

A seeded mutational fuzzer flips, cuts, repeats and splices sound input; a finding is repeated by its target, seed and
number. Where atheris is installed, `python -m tests.torture.fuzz TARGET [options of libFuzzer]` follows coverage.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import ormsgpack
from fastapi.exceptions import RequestValidationError

import kedge
from kedge import codec
from kedge.blobs.memory import MemoryBlobs
from kedge.codec.json_view import from_json, to_json_view
from kedge.containers import protobuf
from kedge.containers.archive.compression import Plain
from kedge.containers.archive.layout import Config, format_of, parse_json, safe_spec
from kedge.containers.archive.tar import Limits, TarReader, path_parts
from kedge.containers.criu.images import check_inventory, command_line, environment, pagemap, processes, statistics
from kedge.containers.runtime import arguments
from kedge.containers.runtime.opt_in import wish_of
from kedge.errors import CheckpointError, NotFound
from kedge.files.table import parse_table
from kedge.model import CheckpointId, CheckpointLevel, mapping_of
from kedge.ports import Chunk, Encoding, NewCheckpoint
from kedge.server.schemas import Save, SentSave
from kedge.server.uploads import parse_save, request_of_save
from kedge.store.local import LocalStore
from kedge.store.manifest import parse_manifest
from kedge.store.record import Draft, NoKeys, PackRecord, append_record, pack_record, read_records
from kedge.store.transfer import IncomingState, SendAgain
from tests.unit.containers.criu_writer import write_dump

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
        "pack": Target(tuple(_records()), _read_pack),
        "HTTP save": Target(tuple(_heads()), _read_head),
        "HTTP manifest": Target((b"\x01" + trees[0], b"\x03" + table), _read_sent),
        "archive": Target(tuple(_archives()), _read_archive),
        "CRIU images": Target(tuple(_images()), _read_images),
        "OCI config": Target(tuple(_configs()), _read_config),
    }


def _records() -> Iterator[bytes]:
    record = NewCheckpoint(
        id=CheckpointId("s_1_00000000"), job="j", step="s", level=CheckpointLevel.STEP, created_us=1, size_bytes=1,
        stored_bytes=2, digest=bytes(32), codec="c", schema_version="1", manifest=b"\x01\xc0",
    )  # fmt: skip
    chunk = Chunk(bytes(32), 1, 1, Encoding.RAW, "0" * 32, 4096)
    for draft in (pack_record(PackRecord("default", [record] * n, [chunk] * n)) for n in (1, 3, 40)):
        yield draft.head + draft.payload


def _read_pack(data: bytes) -> None:
    """A record whose digest is right, whatever it says, among bytes that are none."""
    blobs = MemoryBlobs()
    writer = blobs.writer(0)
    writer.append(data)
    pack, _ = append_record(writer, Draft(data[:32].ljust(32, b"\0"), data[32:]))
    writer.commit()
    for found in read_records(blobs, pack, NoKeys().unwrap_record):
        assert isinstance(found, PackRecord)


def _heads() -> Iterator[bytes]:
    full = {
        "step": "s", "level": "step", "parent": "a_1_00000000", "tags": {"k": "v"}, "pin": True, "metadata": {"m": [1]},
        "schema_version": "1", "lease": 7, "idempotency_key": "key", "id": "b_1_00000000", "created_us": 1,
    }  # fmt: skip
    yield json.dumps(full).encode()
    yield b'{"step": "s", "state": {"a": {"$bytes": "YQ=="}, "b": [1, 2.5, null]}}'


def _read_head(data: bytes) -> None:
    for model in (SentSave, Save):
        with suppress(RequestValidationError, CheckpointError):
            request_of_save("job", parse_save(data, model), None)


def _read_sent(data: bytes) -> None:
    received = IncomingState(_memory())
    try:
        with suppress(SendAgain):
            received.describe(data[:512], data[512:])
    finally:
        received.abort()


@cache
def _memory() -> LocalStore:
    store = kedge.open("memory:").store
    assert isinstance(store, LocalStore)
    return store


def _archives() -> Iterator[bytes]:
    for how in ("w:", "w:gz"):
        for layout in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
            target = io.BytesIO()
            with tarfile.open(fileobj=target, mode=how, format=layout) as archive:  # type: ignore[call-overload]
                for name, kind in (("a/" + "n" * 120, tarfile.REGTYPE), ("l", tarfile.SYMTYPE), ("d", tarfile.DIRTYPE)):
                    member = tarfile.TarInfo(name)
                    member.type, member.linkname = kind, "a"
                    member.size = 700 if kind == tarfile.REGTYPE else 0
                    archive.addfile(member, io.BytesIO(b"x" * 700))
            yield target.getvalue()[:8192]


def _read_archive(data: bytes) -> None:
    reader = TarReader(Plain(io.BytesIO(data), name="a", limit_bytes=1 << 20), name="a", limits=Limits())
    for member in reader:
        path_parts(member.name, reader.limits)
        sum(map(len, reader.pieces()))


def _images() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_dump(Path(folder))
        _dump().update({path.name: path.read_bytes() for path in Path(folder).iterdir()})
    for name, content in sorted(_dump().items()):
        if not name.startswith("pages"):
            yield name.encode() + b"\0" + content


@cache
def _dump() -> dict[str, bytes]:
    return {}


class _Images:
    """Sound images but for one."""

    place = "a dump"

    def __init__(self, name: str, content: bytes) -> None:
        self._files = {**_dump(), name: content}

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def read(self, name: str, offset: int, size: int) -> bytes:
        if name not in self._files:
            raise NotFound(f"there is no {name}")
        return self._files[name][offset : offset + size]


def _read_images(data: bytes) -> None:
    name, _, content = data.partition(b"\0")
    images = _Images(name.decode("latin-1"), content)
    check_inventory(images)
    for process in processes(images):
        command_line(images, process.pid)
        environment(images, process.pid)
    pagemap(images)
    statistics(images)


def _configs() -> Iterator[bytes]:
    notes = {"kedge.dev/checkpoint": "yes", "kedge.dev/policy": "retry:3", "io.kubernetes.cri.sandbox-namespace": "ns"}
    process = {"args": ["a"], "env": ["A=b", "KEDGE_WAIT=5"], "cwd": "/", "user": {"uid": 0}, "noNewPrivileges": True}
    mounts = [{"type": "tmpfs", "options": ["rw"]}, {"type": "bind", "source": "/"}]
    linux = {"namespaces": [{"type": "pid", "path": "/p"}], "seccomp": {}, "sysctl": {"a": "b"}}
    spec = {"ociVersion": "1.1.0", "process": process, "mounts": mounts, "linux": linux, "annotations": notes}
    yield json.dumps(spec | {"hostname": "h", "root": {"path": "r", "readonly": True}}).encode()
    yield json.dumps({"process": process, "annotations": notes | {"kedge.dev/wait": "7" * 5000}}).encode()


def _read_config(data: bytes) -> None:
    spec = mapping_of(parse_json(data, "config.json"))
    json.dumps(safe_spec(spec))
    format_of(spec)
    Config.of(spec)
    wish_of(spec)


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


def follow_coverage(name: str, options: list[str]) -> None:
    """libFuzzer, by atheris; it ends the process itself."""
    import atheris  # type: ignore[import-not-found]

    atheris.instrument_all()
    target = targets()[name]

    def read(data: bytes) -> None:
        with suppress(*target.refusals):
            target.read(data)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            Path(corpus, str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], corpus, *options], read)
        atheris.Fuzz()


def torture(minutes: float, folder: Path) -> dict[str, float]:
    each_s = minutes * 60 / len(targets())
    seed = int(time.time())
    (folder / "seed").write_text(json.dumps(seed))
    return {name: fuzz(name, target, seed, MOST, time.monotonic() + each_s) for name, target in targets().items()}


if __name__ == "__main__":
    follow_coverage(sys.argv[1], sys.argv[2:])
