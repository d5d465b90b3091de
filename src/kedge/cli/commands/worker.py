"""`kedge worker`: carries out what was submitted to queues."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command

from .run import errors_as_python_shows_them, load_program

if TYPE_CHECKING:
    from kedge.pipeline.consumer import Worker

EXIT_PAUSED = 75


@store_command("worker", json_keys="nothing; what becomes of each run is a line on stderr")
@click.argument("file", metavar="FILE.py")
@click.option("--queue", "queues", metavar="NAME", multiple=True, required=True, help="Work on this queue; repeatable.")
@click.option("--concurrency", type=Number(1), default=1, show_default=True, help="Carry out this many runs at a time.")
@click.option("--lease", "lease_s", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True,
              metavar="SECONDS", help="Others take over the runs of a worker that is silent for so long.")  # fmt: skip
@click.option("--grace", "grace_s", type=click.FloatRange(0, 86_400), default=30.0, show_default=True,
              metavar="SECONDS", help="Let runs end for this long when the worker is told to stop.")  # fmt: skip
@click.option("--max-takeovers", type=Number(0), default=5, show_default=True, metavar="N",
              help="Give a run up when more than N workers have died at it.")  # fmt: skip
@click.option("--until-empty", is_flag=True, help="End when there is nothing left to do.")
@click.pass_context
def worker_command(
    ctx: click.Context,
    session: Session,
    file: str,
    queues: tuple[str, ...],
    concurrency: int,
    lease_s: float,
    grace_s: float,
    max_takeovers: int,
    until_empty: bool,
) -> None:
    """Carry out the runs of queues, with the pipelines that FILE.py defines.

    Start it on as many machines as you like. It takes over the runs of workers that died. SIGTERM and Ctrl-C stop it:
    runs at work end, or pause before their next step and go back to the queue; a second one stops it at once.
    """
    from kedge.blobs.backoff import Backoff
    from kedge.errors import NotFound
    from kedge.pipeline import Pipeline
    from kedge.pipeline.consumer import Worker

    session.export_key()
    with errors_as_python_shows_them(ctx):
        program = load_program(file)
    pipelines = {value.name: value for value in vars(program).values() if isinstance(value, Pipeline)}
    if not pipelines:
        raise NotFound(f"{file} has no pipelines", hint="decorate functions with @kedge.pipeline")
    with Backoff().run(lambda: session.open(create=True)) as manager:  # the database may come up later than this
        worker = Worker(
            manager,
            queues,
            pipelines,
            concurrency=concurrency,
            lease_s=lease_s,
            grace_s=grace_s,
            max_takeovers=max_takeovers,
            report=lambda run, text: click.echo(f"kedge: {run} {text}", err=True),
        )
        _stop_on_signals(worker)
        worker.serve(until_empty=until_empty)


def _stop_on_signals(worker: Worker) -> None:
    count = 0

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            os._exit(EXIT_PAUSED)  # what is durable stays durable; others take over
        worker.stop(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
