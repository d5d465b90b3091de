"""What makes a step the same step: its path, its inputs and its declared version. Neither position nor code counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import ormsgpack
from blake3 import blake3

from kedge import codec
from kedge.chunks import Deferred
from kedge.errors import CheckpointError, UnsupportedType

from .credentials import has_credentials, without_credentials

Path = tuple[str, ...]

_PREVIEW_CHARACTERS = 200
_PREVIEW_ENTRIES = 6  # of a list or dict
_PREVIEW_NAMES = 20  # of arguments, or of a result that has names
_PLAIN = "pass plain values, such as a path, an ID or a URL, and open what they name inside"
_signatures: WeakKeyDictionary[Callable[..., object], inspect.Signature] = WeakKeyDictionary()


def show(path: Path) -> str:
    return "/".join(path)


def digest_of(value: object, what: str | Callable[[], str], hint: str = _PLAIN) -> bytes:
    """32 bytes that stand for a value: the digest of its encoded form. `what` names it, and `hint` says what to do,
    where it has none; a hint names only options that the caller's function has."""
    if type(value) is str or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        try:
            return blake3(ormsgpack.packb(value)).digest()  # as the codec writes them; maps have millions of these
        except ormsgpack.MsgpackEncodeError:
            pass  # no text: the codec says what is wrong with it
    try:
        encoded = codec.encode(value)
    except CheckpointError as error:
        raise UnsupportedType(
            f"{what() if callable(what) else what}: {error.message.replace('state', 'it', 1)}",
            hint=hint,
            path=getattr(error, "path", "state"),
        ) from error
    hasher = blake3(encoded.tree)
    if not encoded.buffers:
        return hasher.digest()
    for buffer in encoded.buffers:
        inner = blake3(max_threads=blake3.AUTO)
        for piece in (buffer,) if isinstance(buffer, memoryview) else buffer.pieces():
            inner.update(piece.read() if isinstance(piece, Deferred) else piece)
        hasher.update(inner.digest())
    return hasher.digest()


def arguments(
    function: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """The arguments of a call by name, positional ones that have none as "argument 1"; partials are opened."""
    while isinstance(function, partial):
        args, kwargs, function = (*function.args, *args), {**function.keywords, **kwargs}, function.func
    names = _positional(function)
    named: dict[str, object] = {}
    for number, value in enumerate(args):
        named[next(names, f"argument {number + 1}")] = value
    return named | {name: kwargs[name] for name in sorted(kwargs)}


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """To make one takes longer than most of what it is needed for: it is made once."""
    try:
        known = _signatures.get(function)
    except TypeError:  # it has no hash
        return inspect.signature(function)
    if known is None:
        known = _signatures.setdefault(function, inspect.signature(function))
    return known


def parameters_of(function: Callable[..., object]) -> list[str] | None:
    """The names of a function's parameters; None for one that takes any."""
    parameters = signature_of(function).parameters
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if is_open else list(parameters)


def preview(name: str, value: object, depth: int = 2) -> str:
    """A value in a few words, for people; of what is no plain data only its type, so that no code of others runs.

    What is named like a credential is left out, and what looks like one in a text.
    """
    kind: type = type(value)
    if value is not None and kind is not bool and (has_credentials(name) or has_credentials(name.removesuffix("s"))):
        return "(not shown)"
    if value is None or kind in (bool, float) or (kind is int and -(1 << 64) < value < 1 << 64):  # type: ignore[operator]
        return repr(value)
    if isinstance(value, str) and kind is str:
        text = without_credentials(value[: 4 * _PREVIEW_CHARACTERS])
        return repr(text[:_PREVIEW_CHARACTERS]) + ("…" if len(text) > _PREVIEW_CHARACTERS else "")
    if not depth or not isinstance(value, list | tuple | dict) or kind not in (list, tuple, dict):
        return kind.__name__
    if isinstance(value, dict):
        entries = islice(value.items(), _PREVIEW_ENTRIES)
        shown = [
            f"{preview('', key, 0)}: {preview(key if type(key) is str else '', member, depth - 1)}"
            for key, member in entries
        ]
    else:
        shown = [preview("", member, depth - 1) for member in value[:_PREVIEW_ENTRIES]]
    if len(value) > _PREVIEW_ENTRIES:
        shown.append(f"… {len(value):,} in all")
    brackets, text = {list: "[]", tuple: "()"}.get(kind, "{}"), ", ".join(shown)
    text = text if len(text) <= 2 * _PREVIEW_CHARACTERS else text[: 2 * _PREVIEW_CHARACTERS] + "…"
    return brackets[0] + text + brackets[1]


def previews(value: object) -> dict[str, str]:
    """A value for people: each entry of a dict with names in a few words, anything else as a whole, under ""."""
    if type(value) is not dict or not value or not all(type(name) is str for name in islice(value, _PREVIEW_NAMES)):
        return {"": preview("", value)}
    shown = {name[:_PREVIEW_CHARACTERS]: preview(name, entry) for name, entry in islice(value.items(), _PREVIEW_NAMES)}
    return shown | ({"…": f"{len(value):,} in all"} if len(value) > _PREVIEW_NAMES else {})


def _positional(function: Callable[..., object]) -> Iterator[str]:
    bound = getattr(function, "__func__", function)
    code = getattr(getattr(bound, "__wrapped__", bound), "__code__", None)
    if code is None:
        return iter(())
    first = 1 if bound is not function else 0  # a method's own object is no input
    return iter(code.co_varnames[first : code.co_argcount])


def step_key(path: Path, version: str, inputs: Mapping[str, bytes]) -> str:
    """The idempotency key of a step: equal keys are the same work."""
    return "step:" + blake3(ormsgpack.packb([list(path), version, list(inputs.items())])).hexdigest()


def map_key(path: Path, version: str) -> str:
    """What all items of a map share, as a tag."""
    return blake3(ormsgpack.packb([list(path), version])).hexdigest(16)


def imported_tag(path: Path) -> str:
    """By which a run finds the result that an importer brought for a step: older systems recorded no inputs."""
    return blake3(ormsgpack.packb(["imported", *path])).hexdigest(16)
