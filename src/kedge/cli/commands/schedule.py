"""`kedge schedule`: runs that are submitted to a queue on a schedule."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, command_group, store_command
from kedge.cli.pairs import parse_json_pairs
from kedge.terminal.tables import Column
from kedge.terminal.text import count_of

from .run import arg_option, errors_as_python_shows_them, load_pipeline

if TYPE_CHECKING:
    from kedge.pipeline.schedules import Schedule

_SCHEDULES: tuple[Column[Schedule], ...] = (
    Column("SCHEDULE", lambda schedule: schedule.name, is_whole=True, look="name"),
    Column("WHEN", lambda schedule: schedule.cron or f"every {schedule.every_s:g} s"),
    Column("ZONE", lambda schedule: schedule.zone, drop=2),
    Column("NEXT (UTC)", lambda schedule: "paused" if schedule.is_paused else f"{schedule.due_at:%Y-%m-%d %H:%M:%S}"),
    Column("PIPELINE", lambda schedule: schedule.pipeline, drop=1),
)
_KEYS = "name, queue, pipeline, cron, every_s, zone, catch_up, jitter_s, retries, due_at, is_paused"


@store_command("add", json_keys="{" + _KEYS + "}")
@click.argument("queue")
@click.argument("name")
@click.argument("target", metavar="FILE.py:PIPELINE")
@click.option("--cron", metavar="EXPRESSION", help='Minute, hour, day, month, weekday: "0 3 * * 1-5".')
@click.option(
    "--every", "every_s", type=float, metavar="SECONDS", help="Submit a run at this interval, instead of --cron."
)
@click.option("--tz", default="UTC", show_default=True, help="The time zone of --cron.")
@click.option("--catch-up", type=click.Choice(["all", "last", "none"]), default="last", show_default=True,
              help="Which missed times to run, if no worker was running then.")  # fmt: skip
@click.option(
    "--jitter",
    "jitter_s",
    type=float,
    default=0.0,
    metavar="SECONDS",
    help="Delay each run by a random time up to this.",
)
@click.option("--retries", type=int, default=0, show_default=True, help="Retry a failed run this many times.")
@arg_option
@click.pass_context
def add_command(
    ctx: click.Context, /, session: Session, queue: str, name: str, target: str, args: tuple[str, ...], **rule: object
) -> None:
    """Submit a pipeline to QUEUE on a schedule, or replace the schedule NAME.

    The workers of QUEUE submit the runs (`kedge worker`).
    """
    from kedge.pipeline.queues import Queue
    from kedge.pipeline.schedules import Rule, schedule_call

    if (rule["cron"] is None) == (rule["every_s"] is None):
        raise click.UsageError("give either --cron or --every")
    with errors_as_python_shows_them(ctx):
        pipeline = load_pipeline(target)
    arguments = parse_json_pairs("--arg", args)
    when = Rule(**rule)  # type: ignore[arg-type]  # the options above, by their names
    with session.open(create=True) as manager:
        made = schedule_call(Queue(queue, store=manager), name, pipeline, (), arguments, when)
    is_due = f"is next due on {made.due_at:%Y-%m-%d %H:%M:%S} UTC"
    session.answer(made.to_json(), f"{name} {'is as it was, and paused' if made.is_paused else is_due}")


@store_command("list", json_keys='{"schedules": [{' + _KEYS + "}]}")
@click.argument("queue")
def list_command(session: Session, queue: str) -> None:
    """List the schedules of QUEUE."""
    from kedge.pipeline.entries import check_queue
    from kedge.pipeline.schedules import schedules

    with session.open() as manager:
        check_queue(manager, queue)
        listed = list(schedules(manager, queue))
    empty = f"queue {queue} has no schedules"
    session.answer_list("schedules", listed, _SCHEDULES, lambda schedule: schedule.to_json(), empty=empty)


def _change(verb: str, done: str, text: str) -> click.Command:
    """A command that changes one schedule."""

    @store_command(verb, json_keys='{"queue": …, "schedule": …}')
    @click.argument("queue")
    @click.argument("name")
    def command(session: Session, queue: str, name: str) -> None:
        from kedge.pipeline import schedules

        changes = {"pause": schedules.pause, "resume": schedules.resume, "delete": schedules.unschedule}
        with session.open() as manager:
            changes[verb](manager, queue, name)
        session.answer({"queue": queue, "schedule": name}, f"{name} is {done}")

    command.help = text
    return command


@store_command("backfill", json_keys='{"queue": …, "schedule": …, "runs": [keys]}')
@click.argument("queue")
@click.argument("name")
@click.argument("start", metavar="START", type=click.DateTime())
@click.argument("end", metavar="END", type=click.DateTime())
def backfill_command(session: Session, queue: str, name: str, start: datetime, end: datetime) -> None:
    """Submit a run for every scheduled time from START up to, but not including, END.

    START and END are dates, or times such as 2026-01-31T12:00:00, in the schedule's time zone. Times that already have
    a run are left alone.
    """
    from kedge.pipeline.cron import parse_zone
    from kedge.pipeline.schedules import backfill, find_schedule

    with session.open() as manager:
        zone = parse_zone(find_schedule(manager, queue, name).zone)
        keys = backfill(manager, queue, name, start.replace(tzinfo=zone), end.replace(tzinfo=zone))
    answer = {"queue": queue, "schedule": name, "runs": keys}
    session.answer(answer, f"{count_of(len(keys), 'run')} of {name} submitted, or run before")


schedule_command = command_group(
    "schedule",
    [
        add_command,
        list_command,
        _change("pause", "paused", "Pause a schedule: submit no runs until it is resumed."),
        _change("resume", "resumed", "Resume a paused schedule. Missed times run as its --catch-up says."),
        _change("delete", "deleted", "Delete a schedule. Its runs stay."),
        backfill_command,
    ],
    text="Submit runs to a queue on a schedule: add, list, pause, resume, delete and backfill schedules.",
)
