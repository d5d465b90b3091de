"""What `kedge doctor` finds in the store itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from kedge.cli.command import Session
from kedge.cli.findings import Finding
from kedge.errors import CheckpointError, NotAStore, NotFound
from kedge.terminal.text import age, count_of, size

_LONG_LOG_BYTES = 256 << 20


def foreign_findings(url: str, directory: Path) -> list[Finding]:
    """A place that is no store and cannot become one is left alone: nothing is tried there."""
    from kedge.store.directory import MARKER, refuse_foreign
    from kedge.store.readable_files import is_files, refuse_others

    try:
        if url.startswith("files:") and not is_files(directory):
            refuse_others(directory)
        if not url.startswith("files:") and not (directory / MARKER).is_file():
            refuse_foreign(directory)
    except NotAStore as error:
        return [Finding("store", "bad", f"{error.message}: it cannot become one", error.hint)]
    except OSError as error:
        return [Finding("store", "bad", f"{directory} cannot be read: {error.strerror}", "check its owner and mode")]
    return []


def content_of(numbers: Mapping[str, int]) -> str:
    return f"{count_of(numbers['jobs'], 'job')}, {count_of(numbers['checkpoints'], 'checkpoint')}"


def store_findings(session: Session, directory: Path | None) -> Iterator[Finding]:
    from kedge.ports import FORMAT_VERSION

    started = time.perf_counter()
    try:
        with session.open() as manager:
            opened_ms = (time.perf_counter() - started) * 1000
            content = content_of(manager.stats())
            encryption = manager.encryption
            newest = max((job.updated_at for job in manager.jobs(limit=1000)), default=None)
    except NotFound:
        fix = "the first kedge save, or kedge.open() in Python, creates it"
        yield Finding("store", "note", "there is none yet", fix)
        return
    except CheckpointError as error:
        yield Finding("store", "bad", error.message, error.hint)
        return
    yield Finding("store", "ok", f"format {FORMAT_VERSION}, {content}, opened in {opened_ms:.0f} ms")
    yield from _encryption(encryption)
    if directory is not None:
        yield from _files(directory)
    now = datetime.now(UTC)
    if newest is not None and newest > now:
        what = f"the newest save is {age(newest)} ({newest.isoformat()})"
        fix = "this machine's clock was set back, or another's is ahead; order is not affected"
        yield Finding("clocks", "warn", what, fix)
    else:
        yield Finding("clocks", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC, after every save")


def _encryption(encryption: Mapping[str, object] | None) -> Iterator[Finding]:
    if encryption is None:
        yield Finding("encryption", "note", "none: whoever can read the files can read the states")
        return
    names = "names hidden" if encryption["encrypts_names"] else "names of jobs and steps readable"
    yield Finding("encryption", "ok", f"{encryption['cipher']}, master key {encryption['master_key']}, {names}")
    if encryption["old_data_keys"]:
        yield Finding("encryption", "warn", "a change of the data key is not finished", "kedge rekey --rewrite")


def _files(directory: Path) -> Iterator[Finding]:
    from kedge.store.directory import MARKER, read_marker

    state = directory.stat()
    if state.st_mode & 0o007:
        yield Finding("permissions", "note", "other users of this machine can read the store", f"chmod o= {directory}")
    if state.st_uid != os.geteuid() and os.geteuid() != 0:
        yield Finding("permissions", "warn", f"the store belongs to user {state.st_uid}", "run as that user")
    if not (directory / MARKER).is_file():
        return
    log = directory / f"{read_marker(directory).index}-wal"
    if log.exists() and log.stat().st_size > _LONG_LOG_BYTES:
        what = f"the write-ahead log has grown to {size(log.stat().st_size)}"
        yield Finding("index", "warn", what, "a reader has been open for long: end it, the next save shrinks the log")
