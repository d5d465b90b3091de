"""`kedge demo`: the demonstration of `kedge.demo` on a terminal, then the real commands on what it left."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.session import Session, emit, store_command
from kedge.terminal.text import style, terminal_width

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kedge.cli.demo_job import Account


@store_command(
    "demo",
    json_keys='{"equal": bool, "store", "job", "steps", "runs", "kills": [{pid, step, during, exit_code}], '
    '"resumed_from": [IDs], "acknowledged", "lost", "save_ms", "digest", "expected_digest"}',
)
@click.option(
    "--keep", metavar="DIR", type=click.Path(file_okay=False), help="Keep the store there, to look around in it."
)
@click.option("--fast", is_flag=True, help="A shorter job without pauses.")
def demo_command(session: Session, keep: str | None, fast: bool) -> None:
    """Watch a job being killed with SIGKILL, twice, and going on where it was.

    The job runs in a process of its own on a store in a temporary directory.
    """
    from kedge.cli.demo_job import WIDTH, perform

    is_live = not session.as_json and (terminal_width() or 0) > WIDTH + 4
    steps, pause_s = (20, 0.0) if fast else (60, 0.1)
    with _directory(keep or session.store) as store:
        if session.as_json:
            stage: Silent = Silent()
        else:
            stage = Live(is_fast=fast) if is_live else Plain()
            click.echo(style("Kedge demo", "head") + ": a job, kill -9, and what is left of it\n")
        with stage:
            account = perform(store, stage, steps=steps, pause_s=pause_s)
        if session.as_json:
            emit({"equal": account.is_equal, "store": store, **asdict(account)})
        else:
            _tour(store, account, pause_s=0.0 if fast or not is_live else 1.0)
            _farewell(store, account, is_kept=bool(keep or session.store))
    if not account.is_equal:
        click.get_current_context().exit(1)


@contextmanager
def _directory(keep: str | None) -> Iterator[str]:
    if keep is not None:
        yield os.path.abspath(keep)
        return
    with tempfile.TemporaryDirectory(prefix="kedge-demo-") as made:
        yield os.path.join(made, "store")


def _tour(store: str, account: Account, *, pause_s: float) -> None:
    """The commands a user would type now, really run."""
    job = account.job
    for words in (["list", job, "--limit", "6"], ["show", job], ["diff", f"{job}~1", job]):
        time.sleep(pause_s)
        click.echo("\n" + style(f"$ kedge {' '.join(words)}", "head"))
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "kedge", *words], env={**os.environ, "KEDGE_STORE": store}, check=True)


def _farewell(store: str, account: Account, *, is_kept: bool) -> None:
    where = shlex.quote(store)
    if is_kept:
        click.echo(f"\nThe store stays. Look around in it:  export KEDGE_STORE={where}")
    else:
        click.echo(style("\nThe store was temporary. To keep it and look around:  kedge demo --keep DIR", "dim"))


# --- where it is shown ---


class Silent:
    """Shows nothing: for --json."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def news(self, account: Account, pid: int, news: Mapping[str, Any]) -> None:
        return None

    def killed(self, account: Account) -> None:
        return None

    def verdict(self, account: Account) -> None:
        return None


class Plain(Silent):
    """Lines of text, for pipes and logs."""

    def news(self, account: Account, pid: int, news: Mapping[str, Any]) -> None:
        if news["what"] == "started":
            self._line(_start_line(account, pid, news))
        elif news["what"] == "saved" and news["step"] % max(1, account.steps // 12) == 0:
            saved = style(news["checkpoint"], "id")
            self._line(f"  step {news['step']:>3} of {account.steps}  saved as {saved} in {news['ms']:.1f} ms")
        elif news["what"] == "finished":
            self._line(style("■", "good") + f" finished after step {news['step']}")

    def killed(self, account: Account) -> None:
        kill = account.kills[-1]
        doing = "saved" if kill["during"] == "save" else "computed"
        self._line(style("✗", "bad") + f" kill -9 {kill['pid']}, while it {doing} step {kill['step']}")

    def verdict(self, account: Account) -> None:
        def claim(is_true: bool, text: str) -> None:
            self._line((style("✓", "good") if is_true else style("✗", "bad")) + " " + text)

        self._line("")
        claim(
            bool(account.digest),
            f"all {account.steps} steps done, in {account.runs} runs, {len(account.kills)} of them killed",
        )
        claim(
            not account.lost,
            f"{account.acknowledged} saves acknowledged, {account.lost} lost, {account.save_ms:.1f} ms each (median)",
        )
        same = account.digest == account.expected_digest
        claim(
            same,
            f"the result {'equals' if same else 'differs from'} a run without interruption "
            f"(SHA-256 {account.digest[:12]}…)",
        )

    def _line(self, text: str) -> None:
        click.echo(text)
        sys.stdout.flush()


def _start_line(account: Account, pid: int, news: Mapping[str, Any]) -> str:
    mark = style("▶", "good")
    if news["checkpoint"] is None:
        job = style(account.job, "id")
        return f"{mark} job {job} started, process {pid}: {account.steps} steps, each saved"
    return f"{mark} same command again, process {pid}: goes on after step {style(str(news['step']), 'id')}"


class Live(Plain):
    """The plate, live, with lines above it for what happens."""

    def __init__(self, *, is_fast: bool) -> None:
        from rich.console import Console
        from rich.live import Live as Region

        self._console = Console(highlight=False)
        self._region = Region(console=self._console, transient=True, auto_refresh=False)
        self._pause_s = 0.1 if is_fast else 1.3
        self._picture = b""
        self._title = ""
        self._footer = ""

    def __enter__(self) -> None:
        self._region.start()

    def __exit__(self, *_: object) -> None:
        self._region.stop()

    def news(self, account: Account, pid: int, news: Mapping[str, Any]) -> None:
        super().news(account, pid, {**news, "what": "" if news["what"] == "saved" else news["what"]})
        if news["what"] == "saved":
            self._picture = bytes.fromhex(news["picture"])
            self._title = f"{account.job} · process {pid}"
            done = round(30 * news["step"] / account.steps)
            bar = "━" * done + "[dim]" + "─" * (30 - done) + "[/]"
            self._footer = f"step {news['step']} of {account.steps} {bar} saved in {news['ms']:.1f} ms"
            self._region.update(self._panel("cyan"), refresh=True)
        elif news["what"] == "finished":
            self._region.update(self._panel("green"), refresh=True)
            time.sleep(self._pause_s)

    def killed(self, account: Account) -> None:
        super().killed(account)
        self._title += " · killed"
        self._region.update(self._panel("red", is_grey=True), refresh=True)
        time.sleep(self._pause_s)

    def verdict(self, account: Account) -> None:
        self._region.update("", refresh=True)
        super().verdict(account)

    def _line(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text.from_ansi(text))

    def _panel(self, colour: str, *, is_grey: bool = False) -> RenderableType:
        from rich.panel import Panel

        return Panel.fit(_paint(self._picture, is_grey), title=self._title, subtitle=self._footer, border_style=colour)


def _paint(picture: bytes, is_grey: bool) -> RenderableType:
    """The plate in half blocks: two rows of cells in one line of text."""
    from rich.text import Text

    from kedge.cli.demo_job import WIDTH

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
