"""Each tutorial, followed word by word: its files are saved, its commands run, and they print what it shows.

```sh``` blocks are commands, ```python title="FILE"``` blocks are files, and a ```text``` block is the output of the
commands before it: `…` stands for anything, a line of its own for any number of lines. A block with
`title="second terminal"` keeps running in the background, and the reader goes on once it has printed what it shows.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from kedge.cli.app import cli
from tests.lab import lab
from tests.parts import library, require
from tests.servers.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
DEPLOY = ROOT / "deploy" / "kubernetes"
# What a tutorial needs besides Kedge; that of containers has a test of its own.
NEEDS = {
    "agent.md": ("module:langgraph",),
    "pipeline.md": (),
    "service.md": ("module:fastapi", "module:httpx"),
    "training.md": ("module:torch",),
}
WITH_A_CLUSTER = "kubernetes.md"  # only read


# Three seconds are over when the program has counted to three, however slow the machine is.
TIMEOUT = """#!/bin/bash
shift 2
"$@" &
until [ "$(wc -l < numbers.txt)" -ge 3 ]; do sleep 0.05; done 2> /dev/null
kill -TERM $!
wait $!
"""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(document: Path) -> list[Block]:
    pattern = r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$'
    return [Block(*parts) for parts in re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)]


def shown(text: str) -> re.Pattern[str]:
    """What output has to look like; how columns are aligned does not count."""
    lines = [re.escape(" ".join(line.split())).replace("…", ".*") for line in text.strip().splitlines()]
    return re.compile("\n".join(r"(?:.*\n)*?.*" if line == ".*" else line for line in lines))


def plain(output: str) -> str:
    without_colours = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return "\n".join(" ".join(line.split()) for line in without_colours.strip().splitlines())


class Reader:
    """Somebody with a shell in an empty directory, who does what a tutorial says."""

    def __init__(self, directory: Path, shell: Sequence[str] = ("bash",)) -> None:
        self.directory = directory
        self._shell = shell
        # The `export` lines so far: each block has a shell of its own.
        self._settings = f"cd {shlex.quote(str(directory))}\n"
        self._port = free_port()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
        self.programs = directory / ".programs"
        self.programs.mkdir()
        path = f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}

    def save(self, file: Block) -> None:
        (self.directory / file.title).write_text(self._here(file.text))

    def run(self, commands: str) -> str:
        done = subprocess.run(
            [*self._shell, "-c", self._settings + self._here(commands)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self._settings += "".join(re.findall(r"^export .*\n", commands, re.MULTILINE))
        output = done.stdout.replace(str(self._port), "7420")
        was_killed = done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        return output + ("Killed\n" if was_killed else "")

    @contextmanager
    def keep_running(self, commands: str, expected: str) -> Iterator[None]:
        """`commands` on a terminal of their own, from when they have printed what is expected until the end."""
        ours, theirs = pty.openpty()
        script = f"{self._settings}exec {self._here(commands)}"
        process = subprocess.Popen(
            [*self._shell, "-c", script],
            env={**self._environment, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        printed = b""

        def has_printed() -> bool:
            nonlocal printed
            try:
                printed += os.read(ours, 65_536)
            except BlockingIOError:
                assert process.poll() is None, printed.decode()
            text = plain(printed.decode().replace(str(self._port), "7420"))
            return shown(expected).search(text) is not None

        try:
            wait_for(has_printed, f"{commands.strip()} does not print {expected.strip()}")
            yield
        finally:
            process.terminate()
            process.wait(60)
            os.close(ours)

    def _here(self, text: str) -> str:
        """The service of a test has a port of its own, and its container a cgroup."""
        port = str(self._port)
        here = {"kedge serve": f"kedge serve --port {port}", ":7420": f":{port}", "/kedge-tutorial": f"/kedge-{port}"}
        for written, real in here.items():
            text = text.replace(written, real)
        return text


def follow(document: Path, reader: Reader, stack: ExitStack) -> None:
    todo = blocks(document)
    for number, block in enumerate(todo):
        following = todo[number + 1] if number + 1 < len(todo) else Block("", "", "")
        expected = following.text if following.language == "text" else ""
        if block.language in ("python", "json"):
            reader.save(block)
        elif block.language == "sh" and block.title == "second terminal":
            stack.enter_context(reader.keep_running(block.text, expected))
        elif block.language == "sh":
            output = plain(reader.run(block.text))
            assert not expected or shown(expected).fullmatch(output), f"{block.text}\nprints\n\n{output}"


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    require(*NEEDS[name])
    with ExitStack() as stack:
        follow(TUTORIALS / name, Reader(tmp_path), stack)


@pytest.mark.slow
@pytest.mark.requires("criu")
@pytest.mark.xdist_group("containers")
def test_the_tutorial_of_containers_does_what_it_says(tmp_path: Path) -> None:
    """On a machine whose runtimes have no containers yet."""
    with lab(tmp_path) as machine, ExitStack() as stack:
        for place in ("/run/runc", "/var/lib/kedge"):
            Path(place).mkdir(parents=True, exist_ok=True)
            machine.run("mount", "-t", "tmpfs", "tmpfs", place)
        desk = tmp_path / "desk"
        desk.mkdir()
        reader = Reader(desk, machine.enter(["bash"]))
        (reader.programs / "timeout").write_text(TIMEOUT)
        (reader.programs / "timeout").chmod(0o755)
        follow(TUTORIALS / "containers.md", reader, stack)


def test_every_tutorial_is_followed() -> None:
    assert {path.name for path in TUTORIALS.glob("*.md")} == NEEDS.keys() | {"containers.md", WITH_A_CLUSTER}
    for path in TUTORIALS.glob("*.md"):
        kinds = {block.language for block in blocks(path)}
        assert kinds <= {"sh", "text", "python", "yaml", "json"}, path.name
        assert all(block.title for block in blocks(path) if block.language in ("python", "json"))
        assert path.read_text().count("```") == 2 * len(blocks(path))


def test_the_tutorial_of_kubernetes_asks_for_what_is_there() -> None:
    yaml = library("yaml")
    parts = blocks(TUTORIALS / WITH_A_CLUSTER)
    [manifest] = [yaml.safe_load(block.text) for block in parts if block.language == "yaml"]
    [installed] = list(yaml.safe_load_all((DEPLOY / "runtimeclass.yaml").read_text()))
    example = yaml.safe_load((DEPLOY / "examples" / "deployment.yaml").read_text())
    pod = manifest["spec"]["template"]
    assert manifest["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert pod["spec"]["runtimeClassName"] == installed["metadata"]["name"]
    assert pod["spec"]["containers"][0]["env"] == example["spec"]["template"]["spec"]["containers"][0]["env"]
    assert manifest["spec"]["strategy"] == example["spec"]["strategy"]
    commands = "".join(block.text for block in parts if block.language == "sh")
    for words in re.findall(r"/opt/kedge/bin/kedge (\w+ \w+)", commands):
        group, name = words.split()
        assert name in cli.get_command(click.Context(cli), group).list_commands(click.Context(cli))  # type: ignore[union-attr]
