"""The body of a save: JSON, or multipart with large buffers in parts of their own."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request as HttpRequest

from kedge import codec
from kedge.codec.json_view import from_json
from kedge.codec.plain import BytesView
from kedge.codec.summaries import dtype_size, shape_of
from kedge.errors import TooLarge, Validation
from kedge.model import Checkpoint, Lease
from kedge.store.request import Request, parse_request

from .limits import Limits, headers_of
from .schemas import Save, SaveOptions

if TYPE_CHECKING:
    from .auth import Access

SMALL_BYTES = 64 << 10  # of JSON: quick to read, so that such saves share a thread and a commit
_MAX_PARTS = 1000
_ENVELOPE = "checkpoint"
_OPTIONS = SaveOptions.model_fields.keys() - {"step", "lease"}

S = TypeVar("S", bound=SaveOptions)


class _Parser(MultiPartParser):
    """Starlette's, with less of each part in memory: of 300 that are a little smaller than its 1 MiB, none is held."""

    spool_max_size = 16 << 10


class Upload:
    """What was sent, not looked into yet. `open` is for a worker thread."""

    def __init__(self, text: bytes, form: FormData | None, limits: Limits) -> None:
        self._text = text
        self._form = form
        self._limits = limits

    @property
    def is_small(self) -> bool:
        return self._form is None and len(self._text) <= SMALL_BYTES

    def open(self, stack: ExitStack) -> tuple[Save, codec.Encoded]:
        """The wishes and the encoded state; `stack` keeps the memory it lies in. Validation for anything wrong."""
        if self._form is None:
            wish = parse_save(self._text, Save)
            return wish, codec.encode(wish.state)
        parts = dict(self._form.multi_items())
        if len(parts) != len(self._form.multi_items()):
            raise Validation("two parts have the same name", hint="give each a name of its own")
        envelope = parts.pop(_ENVELOPE, None)
        wish = parse_save(envelope.encode() if isinstance(envelope, str) else _bytes_of(envelope), Save)
        if any(not isinstance(part, UploadFile) for part in parts.values()):
            raise Validation("a part without a file name", hint="send buffers as files")
        files = {name: part.file for name, part in parts.items() if isinstance(part, UploadFile)}
        views = {name: _view(file, stack) for name, file in files.items()}
        used: set[str] = set()
        state = _fill(wish.state, views, used)
        if unused := sorted(views.keys() - used):
            raise Validation(f'no {{"$part": …}} names part {unused[0][:80]}', hint="leave it out, or name it")
        return wish, codec.encode(state)

    async def close(self) -> None:
        if self._form is not None:
            await self._form.close()


async def receive(request: HttpRequest, limits: Limits) -> Upload:
    """Take the body in: JSON into memory up to a limit, parts to disk."""
    kind = headers_of(request).get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if kind == "application/json":
        pieces, size = [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > limits.json_bytes:
                raise TooLarge(f"more than {limits.json_bytes:,} bytes of JSON", hint="send buffers as multipart")
            pieces.append(piece)
        return Upload(b"".join(pieces), None, limits)
    if kind == "multipart/form-data":
        most: dict[str, int] = {"max_files": _MAX_PARTS, "max_fields": 8, "max_part_size": limits.json_bytes}
        async with aclosing(request.stream()) as stream:
            try:
                return Upload(b"", await _Parser(request.headers, stream, **most).parse(), limits)
            except MultiPartException as error:
                raise HTTPException(400, error.message) from error
    raise HTTPException(415, "send application/json or multipart/form-data")


@dataclass(frozen=True, slots=True)
class UploadedSave:
    """A save with its body, which is not read yet."""

    access: Access
    job: str
    key: str | None
    upload: Upload

    def read(self, stack: ExitStack) -> tuple[Request, codec.Encoded, str]:
        wish, encoded = self.upload.open(stack)
        request = request_of_save(self.job, wish, self.key)
        return request, encoded, self.access.caller.actor


class WaitingSave(Protocol):
    """A save that may share a commit with others."""

    @property
    def access(self) -> Access: ...

    def read(self, stack: ExitStack) -> tuple[Request, codec.Encoded, str]: ...


def save_each(saves: Sequence[WaitingSave]) -> list[Checkpoint | BaseException]:
    """Make them durable together, those of a namespace in one commit; for each its checkpoint, or what is wrong."""
    outcomes: dict[int, Checkpoint | BaseException] = {}
    by_namespace: dict[str, dict[int, tuple[Request, codec.Encoded, str]]] = {}
    with ExitStack() as stack:
        for n, save in enumerate(saves):
            try:
                by_namespace.setdefault(save.access.namespace, {})[n] = save.read(stack)
            except Exception as error:  # noqa: BLE001 - of this save alone: those it came with are not to suffer
                outcomes[n] = error
        for namespace, requests in by_namespace.items():
            try:
                results = saves[0].access.service.manager(namespace).save_many(list(requests.values()))
                outcomes.update(zip(requests, results, strict=True))
            except Exception as error:  # noqa: BLE001 - of this namespace alone
                outcomes.update(dict.fromkeys(requests, error))
    return [outcomes[n] for n in range(len(saves))]


def save_alone(save: WaitingSave) -> Checkpoint:
    [outcome] = save_each([save])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def parse_save(text: bytes, model: type[S]) -> S:
    try:
        return model.model_validate(from_json(text))
    except ValidationError as error:
        raise RequestValidationError(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        ) from None


def request_of_save(job: str, wish: SaveOptions, key: str | None) -> Request:
    lease = None if wish.lease is None else Lease(job, wish.lease, "", 0)
    options = {name: getattr(wish, name) for name in _OPTIONS}
    return parse_request(job, wish.step, **options, lease=lease, idempotency_key=key)


def _bytes_of(part: object) -> bytes:
    if not isinstance(part, UploadFile):
        raise Validation(f"there is no part {_ENVELOPE}", hint="send the JSON of the checkpoint in it")
    return part.file.read()


def _view(file: BinaryIO, stack: ExitStack) -> memoryview:
    """The bytes of a part: of a file on disk without bringing it into memory."""
    size = file.seek(0, 2)
    file.seek(0)
    rolled = getattr(file, "_rolled", False)
    if not rolled or not size:
        return memoryview(file.read())
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    stack.callback(_unmap, mapped)
    return memoryview(mapped)


def _unmap(mapped: mmap.mmap) -> None:
    try:
        mapped.close()
    except BufferError:
        pass  # a view of it still lives; the memory goes with that


def _fill(value: object, parts: Mapping[str, memoryview], used: set[str]) -> object:
    """`value` with the bytes of parts, and arrays of them, in their places."""
    if isinstance(value, list):
        return [_fill(item, parts, used) for item in value]
    if not isinstance(value, dict):
        return value
    if "$part" not in value:
        return {key: _fill(item, parts, used) for key, item in value.items()}
    name = value["$part"]
    if not isinstance(name, str) or name not in parts:
        raise Validation(f"there is no part {str(name)[:80]!r}", hint="send it with that name")
    used.add(name)
    if value.keys() == {"$part"}:
        part = parts[name]
        return BytesView(part) if part.nbytes >= SMALL_BYTES else bytes(part)
    if value.keys() != {"$part", "dtype", "shape"}:
        raise Validation('beside "$part" only "dtype" and "shape" are known', hint='{"$part": "w", "dtype": "<f4", …}')
    return _array(parts[name], value["dtype"], value["shape"])


def _array(data: memoryview, dtype: object, shape: object) -> object:
    try:
        import numpy as np
    except ModuleNotFoundError:
        raise Validation("this service cannot take arrays: it has no numpy", hint="send bytes, or install it") from None
    try:
        size = dtype_size(dtype)
        lengths = shape_of(shape)
        return np.frombuffer(data, dtype=np.dtype(str(dtype))).reshape(lengths) if size else _no_size(dtype)
    except (ValueError, TypeError) as error:
        raise Validation(
            f"the part is no array of {str(dtype)[:40]} and {str(shape)[:40]}: {error}",
            hint="the bytes of the part must be as many as dtype and shape say",
        ) from None


def _no_size(dtype: object) -> object:
    raise ValueError(f"{dtype} has no size")
