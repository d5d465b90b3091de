"""What every command shares: --store, --namespace, --json; opening the store; naming checkpoints."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import click

from kedge.terminal.text import replace_unsafe

if TYPE_CHECKING:
    from pathlib import Path

    from kedge.manager import CheckpointManager


class Session(NamedTuple):
    """Where a command works and how it answers."""

    store: str | None
    namespace: str
    as_json: bool
    key: str | None = None

    def open(self, *, create: bool = False) -> CheckpointManager:
        """The store. Only commands that save may create one; for others a missing store is NotFound."""
        from kedge.manager import CheckpointManager

        return CheckpointManager(self.store, namespace=self.namespace, create=create, key=self.key)

    @property
    def url(self) -> str:
        from kedge.manager import default_url

        return self.store or default_url()

    def export_key(self) -> None:
        """For code that opens the store by itself, here and in processes started from here."""
        if self.key is not None:
            os.environ["KEDGE_KEY"] = self.key
            os.environ.pop("KEDGE_KEY_FILE", None)

    def directory(self) -> Path:
        """Where the embedded store is, whether it exists or not."""
        from kedge.errors import Validation
        from kedge.urls import directory_of

        path = directory_of(self.url)
        if path is None or self.url.startswith("files:"):
            raise Validation("this looks at stores in directories only", hint="kedge check looks at any store")
        return path

    def at_rest(self) -> Session:
        """The same for the directory that a store in memory is kept in."""
        is_kept = self.url.startswith("memory:") and self.url != "memory:"
        return self._replace(store=f"file:{self.url.removeprefix('memory:')}") if is_kept else self


def is_url(store: str) -> bool:
    """Whether a store is behind a server, not in a directory."""
    return "://" in store


def emit(document: object, *, indent: int | None = 2) -> None:
    """One JSON document on stdout, harmless on a terminal."""
    sys.stdout.flush()
    write_all(sys.stdout.buffer, to_json(document, indent=indent).encode() + b"\n")
    sys.stdout.buffer.flush()


def emit_lists(head: Mapping[str, object], lists: Mapping[str, Iterable[object]]) -> None:
    """`emit` of a document whose last members are lists, each written while it is read."""
    sys.stdout.flush()
    for piece in pieces_of(head, lists, to_json):
        write_all(sys.stdout.buffer, piece.encode())
    sys.stdout.buffer.flush()


def pieces_of(
    head: Mapping[str, object], lists: Mapping[str, Iterable[object]], to_text: Callable[[object], str]
) -> Iterator[str]:
    """The text of a document whose last members are lists, piece by piece; `to_text` indents by two."""
    import textwrap

    yield to_text(head).removesuffix("\n}")
    for name, items in lists.items():
        yield f',\n  "{name}": ['
        comma, end = "\n", "]"
        for item in items:
            yield comma + textwrap.indent(to_text(item), "    ")
            comma, end = ",\n", "\n  ]"
        yield end
    yield "\n}\n"


def write_all(out: BinaryIO, data: bytes | memoryview) -> None:
    """Write every byte. Where Python runs unbuffered, stdout is a raw file, which may take only a part at once."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[out.write(rest[: 16 << 20]) :]


def to_json(document: object, *, indent: int | None = 2) -> str:
    import json

    is_utf8 = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = json.dumps(document, indent=indent, ensure_ascii=not is_utf8, allow_nan=False)
    return replace_unsafe(_json_escape, text) if is_utf8 or "\x7f" in text else text


def _json_escape(found: re.Match[str]) -> str:
    """A character as JSON writes it; line breaks are those json.dumps itself puts between the values."""
    if found[0] == "\n":
        return "\n"
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))


def store_command(name: str, *, note: str = "", json_keys: str) -> Callable[[Callable[..., None]], click.Command]:
    """A click command with the shared options; the function gets a Session first.

    Its docstring is the help, `note` the last paragraph of it, `json_keys` says what --json answers.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        own: list[click.Parameter] = function.__dict__.pop("__click_params__", [])  # the last decorator comes first

        def call(
            store: str | None, namespace: str | None, as_json: bool, store_key: str | None = None, **rest: Any
        ) -> None:
            given = click.get_current_context().obj or {}  # the same options before the command
            session = Session(
                store=store or given.get("store"),
                namespace=namespace or given.get("namespace") or "default",
                as_json=as_json or bool(given.get("as_json")),
                key=store_key or given.get("store_key"),
            )
            function(session, **rest)

        taken = {spelling for param in own for spelling in param.opts}
        # A command may use the word for something of its own; the shared option then stands before the command.
        shared = [param for param in shared_options() if taken.isdisjoint(param.opts)]
        params = [*reversed(own), *shared]
        text = "\n\n".join(filter(None, (cleandoc(function.__doc__ or ""), note)))
        return click.Command(name, callback=call, params=params, help=text, epilog=f"JSON: {json_keys}")

    return decorate


def shared_options() -> list[click.Parameter]:
    return [
        click.Option(["--store"], metavar="DIR", help="The store.  [default: $KEDGE_STORE, else ./.kedge]"),
        click.Option(["--namespace"], metavar="NAME", help="The tenant whose jobs are meant.  [default: default]"),
        click.Option(
            ["--key", "store_key"],
            metavar="KEY",
            help="Of an encrypted store: file:PATH or command:PROGRAM.  [default: $KEDGE_KEY, $KEDGE_KEY_FILE]",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Answer with one JSON document."),
    ]


def pass_on(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    """The callback of a group: the shared options, which may stand before its commands too."""
    ctx = click.get_current_context()
    before = ctx.obj or {}
    ctx.obj = {
        "store": store or before.get("store"),
        "namespace": namespace or before.get("namespace"),
        "store_key": store_key or before.get("store_key"),
        "as_json": as_json or bool(before.get("as_json")),
    }


class Number(click.ParamType[int]):
    """A whole number from `least` on."""

    name = "n"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            number = self.least - 1
        if not self.least <= number < 1 << 63:
            self.fail(f"{value!r} is not a whole number from {self.least} on", param, ctx)
        return number
