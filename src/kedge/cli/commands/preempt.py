"""`kedge preempt`: checkpoint what runs on this machine before the machine is taken away."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.output import emit
from kedge.errors import Validation
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import safe, size

if TYPE_CHECKING:
    from kedge.containers.preemption import Outcome

_COLUMNS: tuple[Column[Outcome], ...] = (
    Column("CONTAINER", lambda outcome: outcome.id),
    Column("KEY", lambda outcome: outcome.key),
    Column("MEMORY", lambda outcome: size(outcome.memory_bytes)),
    Column("RESULT", lambda outcome: outcome.result),
    Column("TIME", lambda outcome: f"{outcome.seconds:.1f} s"),
)


@store_command(
    "preempt",
    json_keys='{"notice": what said so, "containers": [{id, root, key, memory_bytes, result: '
    "checkpointed|signalled|ended|unfinished|late, seconds, reason}]}",
)
@click.option("--now", is_flag=True, help="Do not wait for a notice.")
@click.option("--on-file", "files", multiple=True, metavar="PATH", help="Wait until this file appears.")
@click.option("--on-url", "urls", multiple=True, metavar="URL", help="Wait until this URL returns status 200.")
@click.option("--answer", default="", metavar="TEXT", help="The response must also contain this text, such as TRUE.")
@click.option("--on-signal", is_flag=True, help="Wait for a SIGTERM to this command.")
@click.option("--every", "every_s", type=click.FloatRange(0.1, 3600), default=1, show_default=True, metavar="SECONDS",
              help="How often to look at files and URLs.")  # fmt: skip
@click.option("--deadline", "deadline_s", type=click.FloatRange(1, 86400), default=25, show_default=True,
              metavar="SECONDS", help="For how long after the notice to start checkpoints.")  # fmt: skip
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
    """Wait for notice that this machine will be taken away, then checkpoint every opted-in container.

    Small containers come first. Each one is saved to the store of its engine, and then ends; one that cannot be
    checkpointed gets its SIGTERM. Exit code 1 if any of them could not be checkpointed.
    """
    from kedge.containers.preemption import preempt, wait_for_notice

    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise Validation(f"{url!r} is not a URL", hint="give one that begins with http:// or https://")
    if not (now or files or urls or on_signal):
        raise Validation("there is no notice to wait for", hint="give --now, --on-file, --on-url or --on-signal")
    signalled = threading.Event()
    if on_signal:
        signal.signal(signal.SIGTERM, lambda *_: signalled.set())
    notice = "now" if now else wait_for_notice([Path(file) for file in files], urls, answer, every_s, signalled)
    outcomes = preempt(deadline_s, None if session.as_json else _tell)
    if session.as_json:
        emit({"notice": notice, "containers": [asdict(outcome) for outcome in outcomes]})
    elif outcomes:
        print_table(_COLUMNS, outcomes)
    else:
        click.echo("no opted-in container is running here")
    if any(outcome.result != "checkpointed" for outcome in outcomes):
        click.get_current_context().exit(1)


def _tell(outcome: Outcome) -> None:
    reason = f": {safe(outcome.reason)}" if outcome.reason else ""
    click.echo(f"  {safe(outcome.id)} {outcome.result}{reason}", err=True)
