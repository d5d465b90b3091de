"""`kedge queue`: the runs in queues, workers, limits, and dead runs."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, command_group, store_command
from kedge.terminal.tables import Column
from kedge.terminal.text import age, safe

if TYPE_CHECKING:
    from kedge.pipeline.entries import Entry
    from kedge.pipeline.heartbeat import WorkerInfo

_ENTRIES: tuple[Column[Entry], ...] = (
    Column("RUN", lambda entry: entry.key, is_whole=True, look="name"),
    Column("STATE", lambda entry: entry.state, looks={"dead": "bad", "running": "good"}),
    Column("PIPELINE", lambda entry: entry.pipeline, drop=2),
    Column("GROUP", lambda entry: entry.group, drop=4),
    Column("PRIORITY", lambda entry: f"{entry.priority}", ">", drop=5),
    Column("ATTEMPTS", lambda entry: f"{entry.attempts}", ">", drop=3),
    Column("NOTE", lambda entry: entry.note, drop=1),
)
_WORKERS: tuple[Column[WorkerInfo], ...] = (
    Column("WORKER", lambda worker: f"{worker.host}:{worker.pid}", is_whole=True, look="name"),
    Column("STATUS", lambda worker: worker.status, looks={"alive": "good", "silent": "warn", "gone": "bad"}),
    Column("SEEN", lambda worker: age(worker.seen_at), drop=2),
    Column("QUEUES", lambda worker: ", ".join(worker.queues), drop=3),
    Column("BUSY", lambda worker: f"{len(worker.runs)}/{worker.concurrency}", ">"),
    Column("RUNS", lambda worker: ", ".join(f"{run.key} ({age(run.since)})" for run in worker.runs), drop=1),
)


@store_command(
    "list",
    json_keys='{"entries": [{id, seq, key, pipeline, state, priority, due_at, attempts, retries, takeovers, note, '
    "group, sessions}]}",
)
@click.argument("name")
@click.option("--dead", is_flag=True, help="Only dead runs: those with no retries left.")
@click.option("--limit", type=Number(1), help="Show at most this many.")
def list_command(session: Session, name: str, dead: bool, limit: int | None) -> None:
    """List the runs in queue NAME: waiting, running and dead ones."""
    from kedge.pipeline.entries import DEAD, check_queue
    from kedge.pipeline.queues import Queue

    with session.open() as manager:
        check_queue(manager, name)
        entries = list(islice(Queue(name, store=manager).entries(DEAD if dead else None), limit))
    empty = f"nothing in queue {name} was given up" if dead else f"queue {name} is empty"
    session.answer_list("entries", entries, _ENTRIES, lambda entry: entry.to_json(), empty=empty)


@store_command("retry", json_keys='{"queue": …, "run": …}')
@click.argument("name")
@click.argument("run")
@click.option("--retry-failed", is_flag=True, help="Also run the steps whose failure the pipeline handled.")
def retry_command(session: Session, name: str, run: str, retry_failed: bool) -> None:
    """Put the dead RUN back into queue NAME. It resumes where it stopped.

    A completed run can be put back if items of its maps failed, or with --retry-failed.
    """
    from kedge.pipeline.entries import check_queue
    from kedge.pipeline.queues import Queue

    with session.open() as manager:
        check_queue(manager, name)
        for path in Queue(name, store=manager).retry(run, retry_failed=retry_failed):
            click.echo(f"{safe(path)} will run again", err=True)
    session.answer({"queue": name, "run": run}, f"{run} is in queue {name} again")


_RATE = click.FloatRange(0.0001, 10_000)


@store_command(
    "limit",
    json_keys='{"queue": …, "concurrency": …, "rate_per_s": …, "max_queued": …, "group_concurrency": …, '
    '"group_rate_per_s": …}; null: no limit',
)
@click.argument("name")
@click.option("--concurrency", type=Number(1), help="Execute at most this many runs at a time, over all workers.")
@click.option("--rate", "rate_per_s", type=_RATE, help="Start at most this many runs per second.")
@click.option("--max-queued", type=Number(1), help="Refuse submissions while the queue holds this many runs.")
@click.option(
    "--group-concurrency", type=Number(1), help="Execute this many runs of a group at a time, instead of one."
)
@click.option(
    "--group-rate", "group_rate_per_s", type=_RATE, help="Start at most this many runs of a group per second."
)
def limit_command(session: Session, name: str, **limits: object) -> None:
    """Set the limits of queue NAME. An option that is not given removes its limit."""
    from kedge.pipeline.queues import Queue

    with session.open() as manager:
        document = Queue(name, store=manager).limit(**limits).to_json()  # type: ignore[arg-type]  # the options above
    shown = ", ".join(f"{part} {value:g}" for part, value in document.items() if isinstance(value, int | float))
    session.answer({"queue": name, **document}, f"limits of queue {name}: {shown or 'none'}")


@store_command(
    "workers",
    json_keys='{"workers": [{id, host, pid, queues, concurrency, started_at, seen_at, status, '
    "runs: [{key, pipeline, queue, since}]}]}; status: alive, silent or gone",
)
@click.argument("name", required=False)
def workers_command(session: Session, name: str | None) -> None:
    """List the workers, or those of queue NAME: where they are, when they were last seen, and what they execute.

    A worker reports every 30 s. It is silent after 90 s without a report, and gone if its process no longer exists.
    """
    from kedge.pipeline.entries import check_queue
    from kedge.pipeline.heartbeat import find_workers

    with session.open() as manager:
        workers = find_workers(manager, name)
        if name is not None and not workers:
            check_queue(manager, name)
    empty = "no workers" + (f" of queue {name}" if name else "")
    session.answer_list("workers", workers, _WORKERS, lambda worker: worker.to_json(), empty=empty)


queue_command = command_group(
    "queue",
    [list_command, retry_command, limit_command, workers_command],
    text="List the runs in a queue and its workers, limit it, retry dead runs.",
)
