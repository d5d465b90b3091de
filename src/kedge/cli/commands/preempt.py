"""`kedge preempt`: keep what runs on this machine before the machine is taken away."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.session import Session, emit, store_command
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import safe, size

if TYPE_CHECKING:
    from kedge.containers.preemption import Outcome


@store_command(
    "preempt",
    json_keys='{"notice": what said so, "containers": [{id, root, key, memory_bytes, result: '
    "kept|signalled|ended|unfinished|late, seconds, reason}]}",
)
@click.option("--now", is_flag=True, help="Do not wait for a notice.")
@click.option("--on-file", "files", multiple=True, metavar="PATH", help="A file that appears is the notice.")
@click.option("--on-url", "urls", multiple=True, metavar="URL", help="An address that answers with 200 is the notice.")
@click.option("--answer", default="", metavar="TEXT", help="The answer must hold this text, such as TRUE.")
@click.option("--on-signal", is_flag=True, help="SIGTERM to this command is the notice.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 3600), default=1, show_default=True, metavar="SECONDS",
              help="How often files and addresses are looked at.")  # fmt: skip
@click.option("--deadline", "deadline_s", type=click.FloatRange(1, 86400), default=25, show_default=True,
              metavar="SECONDS", help="How long after the notice another container is still begun.")  # fmt: skip
def preempt_command(
    session: Session,
    now: bool,
    files: tuple[str, ...],
    urls: tuple[str, ...],
    answer: str,
    on_signal: bool,
    every_s: float,
    deadline_s: float,
) -> None:
    """Wait for the notice that this machine must go, then keep every container that opted in, the small ones first.

    Each is frozen into the store of its engine and ends; one that cannot be kept gets its SIGTERM. Exit code 1 when not
    all of them were kept.
    """
    from kedge.containers.preemption import preempt, wait_for_notice
    from kedge.errors import Validation

    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise Validation(f"{url!r} is no address", hint="give one that begins with http:// or https://")
    if not (now or files or urls or on_signal):
        raise Validation("nothing to wait for", hint="give --now, --on-file, --on-url or --on-signal")
    signalled = threading.Event()
    if on_signal:
        signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    notice = "now" if now else wait_for_notice([Path(one) for one in files], urls, answer, every_s, signalled)
    outcomes = preempt(deadline_s, None if session.as_json else _tell)
    if session.as_json:
        emit({"notice": notice, "containers": [asdict(one) for one in outcomes]})
    elif outcomes:
        columns = [Column("container"), Column("key"), Column("memory"), Column("result"), Column("time")]
        rows = [
            [safe(one.id), safe(one.key), size(one.memory_bytes), one.result, f"{one.seconds:.1f} s"]
            for one in outcomes
        ]
        print_table(columns, rows)
    else:
        click.echo("no container that opted in runs here")
    if any(one.result != "kept" for one in outcomes):
        click.get_current_context().exit(1)


def _tell(outcome: Outcome) -> None:
    reason = f": {safe(outcome.reason)}" if outcome.reason else ""
    click.echo(f"  {safe(outcome.id)} {outcome.result}{reason}", err=True)
