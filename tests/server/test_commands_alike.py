"""Every command that looks or changes says and does the same on a directory and on the same one behind a service."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli.app import cli
from kedge.pipeline.consumer import Worker
from kedge.server import create_app
from tests.server.conftest import listening

_OWN = re.compile(
    r"[\w@+.:-]*_\d{10}_[0-9a-f]{8}|\d+:[0-9a-f]{64}|\b[0-9a-f]{12,64}\b…?|\d+(\.\d+)? ?(ns|µs|ms|s)\b( ago)?|\bnow\b"
    r"|\d+(\.\d+)? ([KMG]iB|B)\b|\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00|Z)?"
    r"|\"?(started_at|seconds|took_s|stored_bytes)\"?: [\d.]+"
)


@kedge.pipeline(name="convert")
def convert(n: int) -> int:
    run = kedge.current_run()
    run.log("converting", n=n)
    if n == 3:
        run.step("break", lambda: 1 // 0)
    return int(run.step("double", lambda: 2 * n))


def fill(store: kedge.CheckpointManager) -> None:
    """What a small team has: checkpoints with numbers and tags, runs of each status, a queue, a schedule."""
    ids = [
        store.save(
            "train", f"epoch {n}", {"n": n, "list": list(range(n))}, metadata={"loss": 1 / n}, tags={"odd": str(n % 2)}
        )
        for n in range(1, 5)
    ]
    store.save("train", "again", {"n": 2.5, "text": "ü"}, parent=ids[1], pin=True)
    store.save("odd:with@signs", "step", {"value": [None, True, (1, b"x")]})
    for key, n in (("fine", 1), ("broken", 3)):
        try:
            convert.at(key, store=store, progress=False, signals=False)(n)
        except ZeroDivisionError:
            pass
    try:
        with kedge.run("asks", store=store, progress=False, signals=False) as run:
            run.approval("go", prompt="Go?", wait_s=0)
    except kedge.Paused:
        pass
    queue = kedge.queue("q", store=store)
    queue.submit(convert, 3, key="dead")
    Worker(store, ["q"], {"convert": convert}, lease_s=60).serve(until_empty=True)
    queue.submit(convert, 1, key="waits", priority=7)
    kedge.schedule(queue, "nightly", convert, 1, cron="0 3 * * *")


LOOKING = [
    "jobs", "jobs --json", "list train", "list train --json", "list train --limit 2", "list train --tag odd=1",
    "list nobody", "show train", "show train~1", "show train#2 --json", "show train#99", "show train --path list",
    "diff train#1 train#3", "diff train#1 train#3 --json", "plot train", "plot train --json",
    "plot train --metric nothing", "stats train", "events --limit 5", "events --limit 50 --json", "restore train",
    "restore train#1 --path n", "runs list", "runs list --json", "runs list --status failed", "runs show fine",
    "runs show broken", "runs show nobody", "runs explain fine", "runs explain broken --json",
    "runs diff fine broken", "runs fork fine --from double", "runs show asks --json", "queue list q",
    "queue list q --json", "queue list q --dead", "queue list nobody", "queue workers q", "schedule list q",
    "schedule list q --json", "llm stats", "llm stats --json", "audit verify", "cleanup train --keep-last 2",
    "gc --dry-run", "check", "check --json",
]  # fmt: skip

CHANGING = [
    ["tag train best=yes", "tag train --remove odd", "show train"],
    ["pin train#1", "pin train#1", "pin train#1 --unpin", "list train"],
    ["delete train#1 --yes", "delete train#1 --yes", "delete train#5 --yes", "list train"],
    ["cleanup train --keep-last 1 --yes", "list train", "cleanup nobody --keep-last 1 --yes"],
    ["copy train other", "copy train other", "copy nobody new", "list other"],
    ["approve asks go", "approve asks go", "approve asks nothing", "runs show asks"],
    ["runs cancel asks", "runs cancel asks", "runs cancel fine", "runs list"],
    ["runs signal asks x 7", "runs signal fine x 7", "runs signal asks x {", "runs show asks"],
    ["runs delete broken --yes", "runs delete broken --yes", "runs list"],
    ["queue retry q dead", "queue retry q dead", "queue retry q nobody", "queue list q"],
    ["queue limit q --concurrency 3 --rate 0.5", "queue limit q --concurrency 0", "queue limit q"],
    [
        "schedule pause q nightly",
        "schedule pause q nobody",
        "schedule list q",
        "schedule resume q nightly",
        "schedule list q",
    ],
    [
        "runs fork fine --from double --new-key again --apply",
        "runs show again",
        "runs fork fine --from double --new-key again --apply",
    ],
    ["gc", "jobs", "check"],
]  # fmt: skip


def said(text: str, place: str) -> str:
    """What was printed, without times, sizes and IDs, where the store is, and blanks, of which JSON may have more."""
    return re.sub(r"\s+", "", _OWN.sub("…", text.replace(place, "STORE").replace("$KEDGE_STORE", "STORE")))


def outcome(place: str, command: str) -> tuple[str, int, object, str]:
    words = command.split(" ")
    result = CliRunner().invoke(cli, [*words, "--store", place])
    return command, result.exit_code, said(result.stdout, place), said(result.stderr, place)


@contextmanager
def both(folder: Path) -> Iterator[tuple[str, str]]:
    """A directory, and the URL of a service on its twin."""
    for name in ("here", "there"):
        with kedge.open(folder / name) as store:
            fill(store)
    with kedge.open(folder / "there") as store, listening(create_app(store)) as url:
        yield str(folder / "here"), url


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with both(tmp_path_factory.mktemp("alike")) as places:
        yield places


@pytest.mark.parametrize("command", LOOKING)
def test_looking_says_the_same(stores: tuple[str, str], command: str) -> None:
    here, there = (outcome(place, command) for place in stores)
    assert here == there


@pytest.mark.parametrize("commands", CHANGING, ids=lambda commands: commands[0])
def test_changing_does_and_says_the_same(tmp_path: Path, commands: list[str]) -> None:
    with both(tmp_path) as places:
        here, there = ([outcome(place, command) for command in commands] for place in places)
    assert here == there
