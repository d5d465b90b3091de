"""`kedge demo`: a job is killed with SIGKILL, twice, resumes, and ends as if nothing had happened.

The job (`kedge.cli.demo_job`) runs in a process of its own. This one starts it, watches it, kills it, starts it again
with the same command, and proves that the result equals that of a run without interruption. Then it runs the commands
with which a user would look at what was saved.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any, Self, TypedDict

import click

from kedge.cli.command import Session, is_url, store_command
from kedge.cli.demo_job import WIDTH, expected_digest
from kedge.cli.output import emit
from kedge.errors import Validation
from kedge.manager import CheckpointManager
from kedge.terminal.text import style, terminal_width
from kedge.urls import without_secrets

if TYPE_CHECKING:
    from rich.console import RenderableType


@store_command(
    "demo",
    json_keys='{"equal": bool, "store", "job", "steps", "runs", "kills": [{pid, step, during, exit_code}], '
    '"resumed_from": [IDs], "acknowledged", "lost", "save_ms", "digest", "expected_digest"}',
)
@click.option("--keep", metavar="DIR", type=click.Path(file_okay=False), help="Keep the store in DIR.")
@click.option("--fast", is_flag=True, help="Run a shorter job without pauses.")
def demo_command(session: Session, keep: str | None, fast: bool) -> None:
    """Watch a job being killed with SIGKILL, twice, and resumed.

    The job runs in its own process, with a store in a temporary directory.
    """
    if session.store is not None and not keep and is_url(session.store):
        raise Validation(
            f"demo needs a directory, not {without_secrets(session.store)}",
            hint="it runs in a temporary directory by itself; --keep DIR keeps the store",
        )
    is_live = not session.as_json and (terminal_width() or 0) > WIDTH + 4
    steps, pause_s = (20, 0.0) if fast else (60, 0.1)
    with _directory(keep or session.store) as store:
        account = Account(_free_name(store), steps)
        stage = None if session.as_json else Live(account, is_fast=fast) if is_live else Lines(account)
        if stage is not None:
            click.echo(style("Kedge demo", "head") + ": a job, kill -9, and what is left of it\n")
        with stage or nullcontext():
            for pid, news in perform(store, account, pause_s):
                if stage is not None:
                    stage.show(pid, news)
        if stage is None:
            emit({"equal": account.is_equal, "store": store, **asdict(account)})
        else:
            _tour(store, account.job, pause_s=0.0 if fast or not is_live else 1.0)
            _farewell(store, is_kept=bool(keep or session.store))
    if not account.is_equal:
        click.get_current_context().exit(1)


@contextmanager
def _directory(keep: str | None) -> Iterator[str]:
    if keep is not None:
        yield os.path.abspath(keep)
        return
    with tempfile.TemporaryDirectory(prefix="kedge-demo-") as temporary:
        yield os.path.join(temporary, "store")


def _free_name(store: str) -> str:
    with CheckpointManager(store) as manager:
        taken = {job.name for job in manager.jobs("heat")}
    return next(name for n in count(1) if (name := f"heat-{n}" if n > 1 else "heat") not in taken)


def _tour(store: str, job: str, *, pause_s: float) -> None:
    """The commands a user would type now, really run."""
    for words in (["list", job, "--limit", "6"], ["show", job], ["diff", f"{job}~1", job]):
        time.sleep(pause_s)
        click.echo("\n" + style(f"$ kedge {' '.join(words)}", "head"))
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "kedge", *words], env={**os.environ, "KEDGE_STORE": store}, check=True)


def _farewell(store: str, *, is_kept: bool) -> None:
    if is_kept:
        click.echo(f"\nThe store stays. Look around in it:  export KEDGE_STORE={shlex.quote(store)}")
    else:
        click.echo(style("\nThe store was temporary. To keep it and look around:  kedge demo --keep DIR", "dim"))


# --- killing the job ---


class Kill(TypedDict):
    pid: int
    step: int
    during: str
    exit_code: int


@dataclass(slots=True)
class Account:
    """What happened so far; the fields are the keys of `kedge demo --json`."""

    job: str
    steps: int
    runs: int = 0
    kills: list[Kill] = field(default_factory=list)
    resumed_from: list[str] = field(default_factory=list)
    acknowledged: int = 0
    lost: int = 0
    save_ms: float = 0.0  # the median
    digest: str = ""
    expected_digest: str = ""

    @property
    def is_equal(self) -> bool:
        return self.digest == self.expected_digest and not self.lost


News = dict[str, Any]  # a line of the job (started, saving, saved, finished), or ours (killed, verified)


def perform(store: str, account: Account, pause_s: float) -> Iterator[tuple[int, News]]:
    """Run the job in `store`, kill it twice, and compare; yields what happens, with the ID of the job's process.

    RuntimeError if the job fails for another reason.
    """
    acknowledged: list[str] = []
    save_ms: list[float] = []
    # The first time in the middle of a computation, the second time in the middle of a save.
    for moment in (("saved", round(account.steps * 0.38)), ("saving", round(account.steps * 0.72)), None):
        for pid, news in _run(store, account, pause_s, kill_at=moment):
            if news["what"] == "saved":
                acknowledged.append(news["checkpoint"])
                save_ms.append(news["ms"])
            yield pid, news
    account.expected_digest = expected_digest(account.steps)
    account.acknowledged = len(acknowledged)
    account.save_ms = round(median(save_ms), 3)
    with CheckpointManager(store) as manager:
        account.lost = sum(not manager.exists(checkpoint_id) for checkpoint_id in acknowledged)
    yield 0, {"what": "verified"}


def _run(store: str, account: Account, pause_s: float, kill_at: tuple[str, int] | None) -> Iterator[tuple[int, News]]:
    """Start the job, pass on what it says, kill it at the moment given."""
    account.runs += 1
    words = [store, account.job, str(account.steps), str(pause_s)]
    news: News = {}
    with _child([sys.executable, "-m", "kedge.cli.demo_job", *words]) as child:
        for line in child.stdout or ():
            try:
                news = json.loads(line)
            except ValueError:  # the kill cut it short; what it would have said was not acknowledged to anyone
                break
            if news["what"] == "started" and news["checkpoint"]:
                account.resumed_from.append(news["checkpoint"])
            if news["what"] == "finished":
                account.digest = news["digest"]
            yield child.pid, news
            if (news["what"], news["step"]) == kill_at:
                if news["what"] == "saved":
                    time.sleep(pause_s + 0.004)  # until it computes the next step
                os.kill(child.pid, signal.SIGKILL)
                child.wait()  # and hear what it still said before
    if child.returncode == -signal.SIGKILL:
        during, step = ("save", news["step"]) if news["what"] == "saving" else ("computation", news["step"] + 1)
        account.kills.append(Kill(pid=child.pid, step=step, during=during, exit_code=child.returncode))
        yield child.pid, {"what": "killed", "step": step, "during": during}
    elif child.returncode:
        raise RuntimeError(f"the job of the demonstration failed with exit code {child.returncode}")


@contextmanager
def _child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive this block, whatever happens in it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()


# --- where it is shown ---


class Lines:
    """Lines of text, for pipes and logs."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, pid: int, news: News) -> None:
        steps = self._account.steps
        match news["what"]:
            case "started" if news["checkpoint"] is None:
                job = style(self._account.job, "id")
                self._line(f"{style('▶', 'good')} job {job} started, process {pid}: {steps} steps, each saved")
            case "started":
                step = style(str(news["step"]), "id")
                self._line(f"{style('▶', 'good')} same command again, process {pid}: resumes after step {step}")
            case "saved" if news["step"] % max(1, steps // 12) == 0:
                saved = style(news["checkpoint"], "id")
                self._line(f"  step {news['step']:>3} of {steps}  saved as {saved} in {news['ms']:.1f} ms")
            case "finished":
                self._line(f"{style('■', 'good')} finished after step {news['step']}")
            case "killed":
                doing = "saved" if news["during"] == "save" else "computed"
                self._line(f"{style('✗', 'bad')} kill -9 {pid}, while it {doing} step {news['step']}")
            case "verified":
                self._line("")
                for is_true, claim in _claims(self._account):
                    self._line(f"{style('✓', 'good') if is_true else style('✗', 'bad')} {claim}")

    def _line(self, text: str) -> None:
        click.echo(text)
        sys.stdout.flush()


def _claims(account: Account) -> Iterator[tuple[bool, str]]:
    killed = f"{len(account.kills)} of them killed"
    yield bool(account.digest), f"all {account.steps} steps done, in {account.runs} runs, {killed}"
    saves = f"{account.acknowledged} saves acknowledged, {account.lost} lost"
    yield not account.lost, f"{saves}, {account.save_ms:.1f} ms each (median)"
    is_same = account.digest == account.expected_digest
    verb = "equals" if is_same else "differs from"
    yield is_same, f"the result {verb} a run without interruption (SHA-256 {account.digest[:12]}…)"


class Live(Lines):
    """The plate, live, with lines above it for what happens."""

    def __init__(self, account: Account, *, is_fast: bool) -> None:
        from rich.console import Console
        from rich.live import Live as Region

        super().__init__(account)
        self._console = Console(highlight=False)
        self._region = Region(console=self._console, transient=True, auto_refresh=False)
        self._pause_s = 0.1 if is_fast else 1.3
        self._picture = b""
        self._title = ""
        self._footer = ""

    def __enter__(self) -> Self:
        self._region.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._region.stop()

    def show(self, pid: int, news: News) -> None:
        what = news["what"]
        if what == "verified":
            self._region.update("", refresh=True)
        if what != "saved":
            super().show(pid, news)
        if what == "saved":
            self._picture = bytes.fromhex(news["picture"])
            self._title = f"{self._account.job} · process {pid}"
            done = round(30 * news["step"] / self._account.steps)
            bar = "━" * done + "[dim]" + "─" * (30 - done) + "[/]"
            self._footer = f"step {news['step']} of {self._account.steps} {bar} saved in {news['ms']:.1f} ms"
            self._region.update(self._panel("cyan"), refresh=True)
        elif what in ("killed", "finished"):
            is_killed = what == "killed"
            self._title += " · killed" if is_killed else ""
            self._region.update(self._panel("red" if is_killed else "green", is_grey=is_killed), refresh=True)
            time.sleep(self._pause_s)

    def _line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text))

    def _panel(self, colour: str, *, is_grey: bool = False) -> RenderableType:
        from rich.panel import Panel

        return Panel.fit(_paint(self._picture, is_grey), title=self._title, subtitle=self._footer, border_style=colour)


def _paint(picture: bytes, is_grey: bool) -> RenderableType:
    """The plate in half blocks: two rows of cells in one line of text."""
    from rich.text import Text

    text = Text(no_wrap=True)
    for top in range(0, len(picture), 2 * WIDTH):
        if top:
            text.append("\n")
        for upper, lower in zip(picture[top : top + WIDTH], picture[top + WIDTH : top + 2 * WIDTH], strict=True):
            text.append("▀", style=f"{_colour(upper, is_grey)} on {_colour(lower, is_grey)}")
    return text


def _colour(heat: int, is_grey: bool) -> str:
    """Black, red, orange, yellow, white."""
    if is_grey:
        return f"rgb({heat // 2},{heat // 2},{heat // 2})"
    warm = int(255 * (heat / 255) ** 0.6)
    return f"rgb({min(255, warm * 2)},{min(255, max(0, warm - 70) * 3 // 2)},{max(0, warm - 170) * 2})"
