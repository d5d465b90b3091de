"""How a command is declared: the options all commands share, the Session each one gets, and groups of commands.

Part of every start: what `kedge --help` does not need is imported where it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.terminal.tables import Column

T = TypeVar("T")
Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_OF_NO_STORE = ("key", "doctor", "completion", "demo", "copy", "sync", "pod", "process", "preempt")
LEVELS = click.Choice(["pipeline", "stage", "step", "substep"])


class Session(NamedTuple):
    """The shared options of a command: where it works, and how it answers."""

    store: str | None = None
    namespace: str = "default"
    as_json: bool = False
    key: str | None = None

    def open(self, *, create: bool = False) -> CheckpointManager:
        """The store. Only commands that save may create one; for others a missing store is NotFound."""
        from kedge.manager import CheckpointManager

        if not self.as_json:
            self._warn_of_open_key()
        return CheckpointManager(self.store, namespace=self.namespace, create=create, key=self.key)

    def _warn_of_open_key(self) -> None:
        """Warn if every user of the machine can read the key file."""
        key = self.key or os.environ.get("KEDGE_KEY") or f"file:{os.environ.get('KEDGE_KEY_FILE', '')}"
        path = key.removeprefix("file:")
        try:
            if path and path != key and os.stat(path).st_mode & 0o004:
                click.echo(f"warning: every user can read the key file {path}; chmod 600 {path}", err=True)
        except (OSError, ValueError):
            pass  # reading it says why

    def of_memory(self) -> Session:
        """The same session in the namespace of checkpointed containers and processes, unless another one was named.

        No token for another namespace opens it.
        """
        from kedge.containers.runtime.early import NAMESPACE

        return self._replace(namespace=NAMESPACE) if self.namespace == "default" else self

    def in_this_store(self, text: str) -> str:
        """A text for people whose `kedge COMMAND` is completed by the options that name the store of this command."""
        from .app import NAMES

        if not (options := self._options()) or "--store" in text:
            return text
        names = "|".join(name for name in NAMES if name not in _OF_NO_STORE)
        return re.sub(rf"(?<![\w/.-])kedge (?=(?:{names})\b)", lambda _: f"kedge {options} ", text)

    def _options(self) -> str:
        """The options as they were given, without secrets; nothing from the environment or a default."""
        from shlex import join

        from kedge.urls import without_secrets

        words: list[str] = []
        if self.store is not None:
            words += ["--store", self.store if without_secrets(self.store) == self.store else "URL"]
        if self.namespace != "default":
            words += ["--namespace", self.namespace]
        if self.key is not None and self.key.startswith(("file:", "command:")):
            words += ["--key", self.key]
        return join(words)

    @property
    def url(self) -> str:
        from kedge.urls import default_url

        return self.store or default_url()

    def export_key(self) -> None:
        """Export the key for code that opens the store by itself, in this process and its children."""
        if self.key is not None:
            os.environ["KEDGE_KEY"] = self.key
            os.environ.pop("KEDGE_KEY_FILE", None)

    def at_rest(self) -> Session:
        """The same session for the directory that a store in memory is saved to."""
        is_saved = self.url.startswith("memory:") and self.url != "memory:"
        return self._replace(store=f"file:{self.url.removeprefix('memory:')}") if is_saved else self

    def answer(self, document: object, *lines: str) -> None:
        """`document` with --json, else the lines."""
        if self.as_json:
            _emit(document)
            return
        for line in lines:
            click.echo(line)

    def answer_facts(self, document: object, facts: Iterable[tuple[str, str]]) -> None:
        """`document` with --json, else the facts with their labels."""
        if self.as_json:
            _emit(document)
        else:
            from kedge.terminal.tables import print_facts

            print_facts(facts)

    def answer_list(
        self,
        name: str,
        values: Sequence[T],
        columns: Sequence[Column[T]],
        to_json: Callable[[T], object],
        *,
        empty: str = "",
    ) -> None:
        """`{name: [values]}` with --json, else a table; on stderr `empty` where there is none."""
        if self.as_json:
            _emit({name: [to_json(value) for value in values]})
        elif values:
            from kedge.terminal.tables import print_table

            print_table(columns, values)
        elif empty:
            click.echo(empty, err=True)


def _emit(document: object) -> None:
    from .output import emit

    emit(document)


def is_url(store: str) -> bool:
    """Whether a store is behind a server, not in a directory."""
    return "://" in store


def store_command(name: str, *, note: str = "", json_keys: str) -> Callable[[Callable[..., None]], click.Command]:
    """A click command with the shared options; the function gets a Session first.

    Its docstring is the help, `note` the last paragraph of it, `json_keys` says what --json answers.
    """

    def decorate(function: Callable[..., None]) -> click.Command:
        own: list[click.Parameter] = function.__dict__.pop("__click_params__", [])  # the last decorator comes first

        def call(
            store: str | None, namespace: str | None, as_json: bool, store_key: str | None = None, **rest: Any
        ) -> None:
            from kedge.errors import CheckpointError

            session = _session(store, namespace, store_key, as_json)
            try:
                function(session, **rest)
            except CheckpointError as error:
                error.hint = session.in_this_store(error.hint)
                raise

        taken = {spelling for param in own for spelling in param.opts}
        # A command may use the word for something of its own; the shared option then stands before the command.
        shared = [param for param in shared_options() if taken.isdisjoint(param.opts)]
        params = [*reversed(own), *shared]
        text = "\n\n".join(filter(None, (cleandoc(function.__doc__ or ""), note)))
        return click.Command(name, callback=call, params=params, help=text, epilog=f"JSON: {json_keys}")

    return decorate


def shared_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--store"], type=GIVEN, metavar="DIR|URL", help="The store.  [default: $KEDGE_STORE, else ./.kedge]"
        ),
        click.Option(["--namespace"], type=GIVEN, metavar="NAME", help="The namespace (tenant).  [default: default]"),
        click.Option(
            ["--key", "store_key"],
            type=GIVEN,
            metavar="KEY",
            help="The key of an encrypted store: file:PATH or command:PROGRAM.  [default: $KEDGE_KEY, $KEDGE_KEY_FILE]",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
    ]


def remember(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    """The callback of every group: the shared options may stand before its commands too."""
    click.get_current_context().obj = _session(store, namespace, store_key, as_json)


def _session(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> Session:
    before: Session = click.get_current_context().obj or Session()
    return Session(
        store or before.store, namespace or before.namespace, as_json or before.as_json, store_key or before.key
    )


class _Group(click.Group):
    """Lists its commands in the order in which they were given."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def command_group(
    name: str, commands: Sequence[click.Command], *, text: str, callback: Callable[..., None] = remember
) -> click.Group:
    """A group of few commands, all in one module."""
    note = f"JSON: see kedge {name} COMMAND --help"
    return _Group(name, commands=commands, callback=callback, params=shared_options(), help=text, epilog=note)


def apply_option(text: str) -> Decorator:
    """For commands that show their plan and execute it only with --apply."""
    return click.option("--apply", "--yes", "-y", "is_applied", is_flag=True, help=text)


class _Given(click.ParamType[str]):
    """Text that is not empty: an empty one is usually a variable of a script that is not set."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).strip():
            self.fail("must not be empty; leave the option out for its default", param, ctx)
        return str(value)


GIVEN = _Given()


class Number(click.ParamType[int]):
    """A whole number of at least `least`."""

    name = "n"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"must be a whole number (got {value!r})", param, ctx)
        if number < self.least:
            self.fail(f"must be at least {self.least} (got {number})", param, ctx)
        if number >= 1 << 63:
            self.fail("is too large", param, ctx)
        return number
