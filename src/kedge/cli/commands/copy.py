"""`kedge copy`: copies a job to a new name, or checkpoints to another store."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from kedge.cli.command import GIVEN, Session, store_command
from kedge.cli.names import JobName, job_named, require_job
from kedge.errors import Corrupted, NotFound
from kedge.terminal.progress import progress, watched
from kedge.terminal.text import count_of, safe, size, style

if TYPE_CHECKING:
    from kedge.care.copy import CopyReport
    from kedge.manager import CheckpointManager

_STORE = re.compile(r"(?:file|files|memory|postgres|postgresql|s3|gs|az):|.*/|[.~]", re.DOTALL)
WRITTEN = (
    "The name of a store contains a slash or a scheme (./backup, file:backup, postgresql://…); that of a job does not."
)
REPORT_KEYS = (
    '{"copied", "present", "changed", "deleted", "chunks_moved", "bytes_moved", "size_bytes", "damaged": [IDs]}'
)


class Transfer(NamedTuple):
    """From which store to which, and what of it."""

    source: str
    target: str
    job: str | None
    since: str | None
    mirror: bool
    into: str | None
    target_key: str | None

    @property
    def is_partial(self) -> bool:
        return bool(self.job or self.since or self.mirror or self.into or self.target_key)

    @contextmanager
    def open(self, session: Session) -> Iterator[tuple[CheckpointManager, CheckpointManager]]:
        """The source, which must exist, and the target, which is made."""
        from kedge.manager import CheckpointManager

        target_key = self.target_key or session.key
        with (
            CheckpointManager(self.source, namespace=session.namespace, create=False, key=session.key) as source,
            CheckpointManager(self.target, namespace=self.into or session.namespace, key=target_key) as target,
        ):
            yield source, target


def transfer_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options of a copy between stores; the command makes a Transfer of them."""
    for option in (
        click.option(
            "--target-key", type=GIVEN, metavar="KEY", help="The target's key; none for a plain one.  [default: --key]"
        ),
        click.option("--into", metavar="NAME", help="The namespace of the target.  [default: the same]"),
        click.option(
            "--delete", "mirror", is_flag=True, help="Also delete from the target what was deleted from the source."
        ),
        click.option(
            "--since", metavar="TIME", help="Only checkpoints saved since then: 36h, 7d, 2026-01-31, 2026-01-31T12:00Z."
        ),
        click.option("--job", type=JobName(), help="Only this job."),
    ):
        function = option(function)
    return function


@store_command(
    "copy",
    note=WRITTEN,
    json_keys='of a job {"job": NEW, "checkpoints": [as in list], "copied": how many are new}; of a store '
    f"{REPORT_KEYS}. Exit code 6 when the source could not read some of its own.",
)
@click.argument("source", metavar="JOB|STORE", type=JobName())
@click.argument("target", metavar="NEW|STORE")
@transfer_options
def copy_command(session: Session, **options: object) -> None:
    """Copy the history of JOB to the job NEW, or checkpoints of one STORE to another.

    Within a store, both jobs share all data, and NEW must not have another history. Between stores of any kind, only
    what the target lacks is transferred, and every byte is verified; IDs, numbers, parents, tags, pins and times are
    preserved. If it is interrupted, run it again: it continues where it stopped.
    """
    transfer = Transfer(**options)  # type: ignore[arg-type]  # the parameters above, by their names
    if bool(_STORE.match(transfer.source)) != bool(_STORE.match(transfer.target)):
        raise click.UsageError(f"{transfer.source!r} and {transfer.target!r} are a job and a store. {WRITTEN}")
    if _STORE.match(transfer.source):
        copy_store(session, transfer)
    elif transfer.is_partial:
        raise click.UsageError(
            "--job, --since, --delete, --into and --target-key are for copies between stores. " + WRITTEN
        )
    else:
        _copy_job(session, transfer.source, transfer.target)


def _copy_job(session: Session, job: str, new: str) -> None:
    with session.open() as manager:
        try:
            total = require_job(manager, job).checkpoints
        except NotFound as error:
            if os.path.isdir(job):
                raise NotFound(error.message, hint=f"for the directory, write ./{job}. {WRITTEN}") from None
            raise

        def count_copies() -> int:
            target = job_named(manager, new)
            return target.checkpoints if target else 0

        present = count_copies()
        with (
            progress(f"copying {job}", unit="checkpoints") as report,
            watched(report, lambda: (min(count_copies(), total), total)),
        ):
            copies = manager.copy(job, new)
    copied = len(copies) - present
    note = f"; {_present(present)}" if present else ""
    session.answer(
        {"job": new, "checkpoints": [c.to_json() for c in copies], "copied": copied},
        f"{count_of(copied, 'checkpoint')} of {job} copied to {style(new, 'id')}{note}",
    )


def copy_store(session: Session, transfer: Transfer) -> None:
    moment = parse_since(transfer.since)
    with transfer.open(session) as (source, target):
        place = target.place
        with progress(f"copying to {place}", unit="bytes") as report:
            done = source.copy_to(target, job=transfer.job, since=moment, mirror=transfer.mirror, progress=report)
    session.answer(asdict(done), summary(done, place))
    if not session.as_json:
        print_damaged(done)
    if done.damaged:
        click.get_current_context().exit(Corrupted.exit_code)


def summary(done: CopyReport, place: str) -> str:
    more = [_present(done.present)] if done.present else []
    more += [f"{done.changed:,} changed"] if done.changed else []
    more += [f"{done.deleted:,} deleted"] if done.deleted else []
    more += [f"{size(done.bytes_moved)} moved of {size(done.size_bytes)}"] if done.copied else []
    return "; ".join([f"{count_of(done.copied, 'checkpoint')} copied to {style(safe(place), 'id')}", *more])


def _present(count: int) -> str:
    return f"{count:,} {'was' if count == 1 else 'were'} there already"


def print_damaged(done: CopyReport) -> None:
    for checkpoint_id in done.damaged:
        click.echo(f"{style('damaged in the source, left out', 'bad')}  {checkpoint_id}", err=True)


def parse_since(text: str | None) -> datetime | None:
    """A time given as an age or as ISO 8601; without a zone it is local."""
    from kedge.care.retention import parse_duration

    if text is None:
        return None
    try:
        return datetime.now(UTC) - parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.UsageError(f"--since: give an age (36h, 7d) or a date (2026-01-31), not {text!r}") from None
