"""`kedge worker`: executes the runs in queues."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command

from .run import errors_as_python_shows_them, load_program

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.pipeline.consumer import Worker

EXIT_PAUSED = 75


@store_command("worker", json_keys="nothing; stderr has a line for each run")
@click.argument("file", metavar="FILE.py")
@click.option("--queue", "queues", metavar="NAME", multiple=True, help="The queue to take runs from; repeatable.")
@click.option("--concurrency", type=Number(1), default=1, show_default=True, help="Execute this many runs at a time.")
@click.option("--lease", "lease_s", type=click.FloatRange(0.1, 3600), default=10.0, show_default=True,
              metavar="SECONDS", help="Other workers take over a worker's runs after this much silence.")  # fmt: skip
@click.option("--grace", "grace_s", type=click.FloatRange(0, 86_400), default=30.0, show_default=True,
              metavar="SECONDS", help="On SIGTERM, give runs this long to finish.")  # fmt: skip
@click.option("--max-takeovers", type=Number(0), default=5, show_default=True, metavar="N",
              help="Declare a run dead after more than N workers died while executing it.")  # fmt: skip
@click.option("--until-empty", is_flag=True, help="Exit when the queues are empty.")
@click.pass_context
def worker_command(
    ctx: click.Context, /, session: Session, file: str, queues: tuple[str, ...], until_empty: bool, **options: object
) -> None:
    """Execute the runs in queues, with the pipelines that FILE.py defines.

    Start workers on as many machines as you like. The store must exist. A worker takes over the runs of workers that
    died, and those of pipelines with recover=True whose process died; without --queue, only these. On SIGTERM or
    Ctrl-C, it takes no more runs; those in progress finish, or pause before their next step and go back to the queue.
    A second signal stops it at once.
    """
    from kedge.blobs.backoff import Backoff
    from kedge.errors import NotFound
    from kedge.pipeline import Pipeline
    from kedge.pipeline.consumer import Worker
    from kedge.pipeline.entries import RECOVERY
    from kedge.pipeline.progress import write_line

    session.export_key()
    with errors_as_python_shows_them(ctx):
        program = load_program(file)
    pipelines = {value.name: value for value in vars(program).values() if isinstance(value, Pipeline)}
    if not pipelines:
        raise NotFound(f"{file} has no pipelines", hint="decorate functions with @kedge.pipeline")
    with Backoff().run(session.open) as manager:  # the database may come up later than this
        for queue in queues:
            _say_if_new(manager, queue, waits=not until_empty)
        worker = Worker(
            manager,
            [*dict.fromkeys((*queues, RECOVERY))],
            pipelines,
            report=lambda run, text: write_line(sys.stderr, session.in_this_store(f"{run} {text}")),
            **options,  # type: ignore[arg-type]  # the options above, by their names
        )
        _stop_on_signals(worker)
        worker.serve(until_empty=until_empty)


def _say_if_new(manager: CheckpointManager, queue: str, *, waits: bool) -> None:
    """Warn about a queue that has no runs yet: its name may be misspelt."""
    from kedge.errors import NotFound
    from kedge.pipeline.entries import check_queue
    from kedge.pipeline.progress import write_line

    try:
        check_queue(manager, queue)
    except NotFound as error:
        write_line(
            sys.stderr, f"{error.message} yet ({error.hint}){'; this worker waits for its first run' if waits else ''}"
        )


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
