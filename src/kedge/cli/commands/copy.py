"""`kedge copy`, `sync`: a job under another name, a store in another place."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kedge.cli.naming import JobName, job_named, require_job
from kedge.cli.session import Session, emit, store_command
from kedge.terminal.progress import progress, watched
from kedge.terminal.text import count_of, safe, size, style

if TYPE_CHECKING:
    from datetime import datetime

    from kedge.care.copy import CopyReport
    from kedge.manager import CheckpointManager

_STORE = re.compile(r"(?:file|files|memory|postgres|postgresql|s3|gs|az):|.*/|[.~]", re.DOTALL)
_WRITTEN = "A store has a slash or a scheme in its name (./backup, file:backup, postgresql://…), a job has none."
_REPORT = '{"copied", "present", "changed", "deleted", "chunks_moved", "bytes_moved", "size_bytes", "damaged": [IDs]}'

_job_option = click.option("--job", type=JobName(), help="Only this job.")
_since_option = click.option(
    "--since", metavar="TIME", help="Only what was saved since: 36h, 7d, 2026-01-31, …T12:00Z."
)
_mirror_option = click.option("--delete", "mirror", is_flag=True, help="Delete in the target what the source deleted.")
_into_option = click.option("--into", metavar="NAME", help="The namespace of the target.  [default: the same]")

_target_key_option = click.option(
    "--target-key", metavar="KEY", help="The key of the target; none for a plain one.  [default: as --key]"
)


@store_command(
    "copy",
    note=_WRITTEN,
    json_keys='of a job {"job": NEW, "checkpoints": [as in list], "copied": how many are new}; of a store '
    f"{_REPORT}. Exit code 6 when the source could not read some of its own.",
)
@click.argument("source", metavar="JOB|STORE", type=JobName())
@click.argument("target", metavar="NEW|STORE")
@_job_option
@_since_option
@_mirror_option
@_into_option
@_target_key_option
def copy_command(
    session: Session,
    source: str,
    target: str,
    job: str | None,
    since: str | None,
    mirror: bool,
    into: str | None,
    target_key: str | None,
) -> None:
    """Copy the history of JOB to the job NEW, or what one STORE holds to another.

    Within a store both jobs share all bytes. Between stores, of any kind, only what the target lacks is moved and
    every byte is verified; IDs, numbers, parents, tags, pins and times stay. Running it again after an
    interruption goes on and copies nothing twice.
    """
    if bool(_STORE.match(source)) != bool(_STORE.match(target)):
        raise click.UsageError(f"{source!r} and {target!r} are a job and a store. {_WRITTEN}")
    if _STORE.match(source):
        _copy_store(session, source, target, job, since, mirror, into, target_key)
    elif job or since or mirror or into or target_key:
        raise click.UsageError(
            "--job, --since, --delete, --into and --target-key are for copies between stores. " + _WRITTEN
        )
    else:
        _copy_job(session, source, target)


def _copy_job(session: Session, job: str, new: str) -> None:
    from kedge.errors import NotFound

    with session.open() as manager:
        try:
            total = require_job(manager, job).checkpoints
        except NotFound as error:
            if os.path.isdir(job):
                raise NotFound(error.message, hint=f"for the directory, write ./{job}. {_WRITTEN}") from None
            raise

        def look() -> tuple[int, int]:
            copied = job_named(manager, new)
            return min(copied.checkpoints if copied else 0, total), total

        known = {c.id for c in manager.walk(new)}
        with progress(f"copying {job}", unit="checkpoints") as report, watched(report, look):
            copies = manager.copy(job, new)
        copied = sum(c.id not in known for c in copies)
    if session.as_json:
        emit({"job": new, "checkpoints": [c.to_json() for c in copies], "copied": copied})
    else:
        there = f"; {len(copies) - copied:,} were there already" if copied < len(copies) else ""
        click.echo(f"{count_of(copied, 'checkpoint')} of {job} copied to {style(new, 'id')}{there}")


def _copy_store(
    session: Session,
    source: str,
    target: str,
    job: str | None,
    since: str | None,
    mirror: bool,
    into: str | None,
    target_key: str | None,
) -> None:
    moment = _moment(since)
    with (
        _open(session, source, None, session.key) as here,
        _open(session, target, into or session.namespace, target_key or session.key) as there,
    ):
        with progress(f"copying to {there.place}", unit="bytes") as report:
            done = here.copy_to(there, job=job, since=moment, mirror=mirror, progress=report)
        place = there.place
    _tell(session, done, place)


@store_command(
    "sync",
    note=_WRITTEN,
    json_keys=f"{_REPORT}; with --follow, one such object per line and round. Exit code 6 as with copy.",
)
@click.argument("source", metavar="STORE")
@click.argument("target", metavar="STORE")
@click.option("--follow", "-f", is_flag=True, help="Go on with every change, until Ctrl-C.")
@_job_option
@_since_option
@_mirror_option
@_into_option
@_target_key_option
def sync_command(
    session: Session,
    source: str,
    target: str,
    follow: bool,
    job: str | None,
    since: str | None,
    mirror: bool,
    into: str | None,
    target_key: str | None,
) -> None:
    """Bring the second STORE up to the first, as copy does, and with --follow keep it there.

    The second one always holds a beginning of each job's history, whole and verified: it can take over at any moment.
    Without --delete it keeps what the first one deletes.
    """
    if not follow:
        _copy_store(session, source, target, job, since, mirror, into, target_key)
        return
    from threading import Event

    moment = _moment(since)
    stop = Event()
    with (
        _open(session, source, None, session.key) as here,
        _open(session, target, into or session.namespace, target_key or session.key) as there,
    ):
        place = there.place

        def tell(done: CopyReport) -> None:
            if session.as_json:
                emit(asdict(done), indent=None)
            elif done.copied or done.changed or done.deleted or done.damaged:
                _print(done, place)

        with progress(f"copying to {place}", unit="bytes") as report:
            here.follow_to(there, stop=stop, job=job, since=moment, mirror=mirror, changed=tell, progress=report)


def _open(session: Session, url: str, target_namespace: str | None, key: str | None) -> CheckpointManager:
    """The source, which must exist, or the target, which is made."""
    from kedge.manager import CheckpointManager

    if target_namespace is None:
        return CheckpointManager(url, namespace=session.namespace, create=False, key=key)
    return CheckpointManager(url, namespace=target_namespace, key=key)


def _tell(session: Session, done: CopyReport, place: str) -> None:
    if session.as_json:
        emit(asdict(done))
    else:
        _print(done, place)
    if done.damaged:
        from kedge.errors import Corrupted

        click.get_current_context().exit(Corrupted.exit_code)


def _print(done: CopyReport, place: str) -> None:
    more = [f"{done.present:,} were there already"] if done.present else []
    more += [f"{done.changed:,} changed"] if done.changed else []
    more += [f"{done.deleted:,} deleted"] if done.deleted else []
    more += [f"{size(done.bytes_moved)} moved of {size(done.size_bytes)}"] if done.copied else []
    what = f"{count_of(done.copied, 'checkpoint')} copied to {style(safe(place), 'id')}"
    click.echo("; ".join([what, *more]))
    for checkpoint_id in done.damaged:
        click.echo(f"{style('damaged in the source, left out', 'bad')}  {checkpoint_id}", err=True)


def _moment(text: str | None) -> datetime | None:
    """A time given as an age or as ISO 8601; without a zone it is local."""
    from datetime import UTC, datetime

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
        raise click.UsageError(f"--since {text!r} is no time: use an age (36h, 7d) or a date (2026-01-31)") from None
