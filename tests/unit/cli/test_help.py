"""The help of every command: complete, and in the words of rules that can be checked."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from kedge.cli.app import cli

# Words that have a usual one: see what a reader of restic's or git's help expects.
UNUSUAL = re.compile(
    r"\b(go(es)? on|by the clock|so often|so long|what becomes of|carry out|say no|thaw|freeze|kept back"
    r"|answers? of (a )?models?|calls? of models?)\b",
    re.IGNORECASE,
)


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands(cli, "kedge"))


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_of_a_command_is_complete(path: str) -> None:
    command = COMMANDS[path]
    text = command.help or ""
    first = " ".join(text.split("\n\n")[0].split())
    assert re.match(r"[A-Z][\w$ ,.:()'|/-]+", first), first
    assert first.endswith("."), first
    assert not UNUSUAL.search(text), text
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            help_text = parameter.help or ""
            assert re.match(r"[A-Z`.\"-]|containerd", help_text), (parameter.name, help_text)
            assert not UNUSUAL.search(help_text), (parameter.name, help_text)
        elif isinstance(parameter, click.Argument):
            assert "%" not in parameter.make_metavar(click.Context(command)), parameter.name


def test_the_list_of_commands_says_the_same_as_their_help() -> None:
    listed = cli.get_help(click.Context(cli, info_name="kedge", terminal_width=120))
    for path, command in COMMANDS.items():
        if path.count(" ") == 1:
            assert re.search(rf"^  {path.split()[1]} +[A-Z].*\.$", listed, re.MULTILINE), path
            assert command.help
