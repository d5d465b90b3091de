"""`kedge doctor`: what this machine and this store give, each finding with what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from kedge.cli.session import Session, emit, is_url, store_command
from kedge.terminal.text import age, count_of, pad, pieces, safe, size, style, terminal_width

_KEPT = "memory:DIR keeps it in a directory when it is closed"
_MARKS = {"ok": ("✓", "good"), "note": ("·", "dim"), "warn": ("!", "warn"), "bad": ("✗", "bad")}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `status` is ok, note, warn or bad; `fix` says what to do, if anything."""

    subject: str
    status: str
    what: str
    fix: str = ""


@store_command(
    "doctor",
    json_keys='{"ok": bool, "store": …, "findings": [{subject, status: ok|note|warn|bad, what, fix}]}. '
    "Exit code 7 when a finding is bad.",
)
def doctor_command(session: Session) -> None:
    """Look at Python, SQLite, the disk or the servers under the store, their speed and clocks, and the store itself.

    Writes and removes a small test file beside the store's files, or a few objects beside those of its object store,
    where two writers race to create the same one; changes nothing else.
    """
    place, findings = _findings(session)
    is_ok = all(finding.status != "bad" for finding in findings)
    if session.as_json:
        emit({"ok": is_ok, "store": place, "findings": [asdict(finding) for finding in findings]})
    else:
        click.echo(f"{style('store', 'dim')}  {safe(place)}\n")
        for finding in findings:
            print_finding(finding)
    if not is_ok:
        from kedge.errors import StorageError

        click.get_current_context().exit(StorageError.exit_code)


def _findings(session: Session) -> tuple[str, list[Finding]]:
    if is_url(session.url):
        from kedge.manager import without_secrets

        from .doctor_servers import look_at, look_at_service

        place = without_secrets(session.url)
        if session.url.startswith(("http://", "https://")):
            return place, [*_machine(), *look_at_service(session)]
        return place, [*_machine(), *look_at(session.url), *_store(session, None)]
    from kedge.urls import directory_of, reachable

    where = directory_of(session.url)
    if where is None:
        return session.url, [*_machine(), Finding("store", "note", "it is in memory, and gone with its process", _KEPT)]
    return reachable(session.url), [
        *_machine(),
        *(_foreign(session.url, where) or [*disk(where), *_store(session, where)]),
    ]


def print_finding(finding: Finding) -> None:
    mark, look = _MARKS[finding.status]
    indent = 16
    room = (terminal_width() or 10_000) - indent
    first, *more = pieces(safe(finding.what), room)
    click.echo(f"{style(mark, look)} {pad(finding.subject, indent - 2)}{first}")
    if finding.fix:
        lines = list(pieces(safe(finding.fix), room - 2))
        more += [f"→ {lines[0]}", *(f"  {line}" for line in lines[1:])]
    for line in more:
        click.echo(" " * indent + style(line, "dim"))


# --- the machine ---


def _machine() -> Iterator[Finding]:
    from importlib.metadata import version
    from importlib.util import find_spec

    packages = ("kedge", "blake3", "ormsgpack", "zstandard")
    yield Finding("kedge", "ok", ", ".join(f"{name} {version(name)}" for name in packages))
    yield Finding("python", "ok", f"{platform.python_implementation()} {platform.python_version()}")
    import sqlite3

    found = tuple(map(int, sqlite3.sqlite_version.split(".")))
    yield Finding(
        "sqlite",
        "ok" if found >= (3, 37) else "bad",
        sqlite3.sqlite_version,
        "" if found >= (3, 37) else "3.37 or newer is needed: use a newer Python",
    )
    known = [name for name in ("numpy", "torch", "pandas", "polars", "pyarrow") if find_spec(name)]
    yield Finding("libraries", "note", f"states may hold values of {', '.join(known)}" if known else "no array library")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("machine", "ok", f"{sys.platform}, {count_of(cores, 'core')}, {size(memory)} memory")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY:
        yield Finding("limits", "warn", f"no file may grow beyond {size(largest)}", "raise it: ulimit -f unlimited")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 256:
        yield Finding("limits", "warn", f"only {files} files may be open at once", "raise it: ulimit -n 1024")


# --- the disk ---


def disk(where: Path) -> Iterator[Finding]:
    from .doctor_disk import has_locks, measure_direct, measure_rename, measure_sync, mount_of

    place = where
    while not place.exists() and place != place.parent:
        place = place.parent
    mount = mount_of(place)
    yield _file_system(mount.kind, mount.point, mount.options)
    yield from _space(place)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield Finding(
            "writing", "bad", f"{place} may not be written", "check its owner and mode, and how it is mounted"
        )
        return
    try:
        latencies, skew_s = measure_sync(place)
        middle, worst = latencies[len(latencies) // 2], latencies[-1]
        yield Finding(
            "sync",
            "ok" if middle < 0.02 else "warn",
            f"4 KiB written and synced in {middle * 1000:.2f} ms (slowest of {len(latencies)}: {worst * 1000:.1f} ms)",
            "" if middle < 0.02 else "every save waits this long: a local SSD is 10 to 100 times faster",
        )
        renames = measure_rename(place)
        what = f"a file is replaced, whole and durably, in {renames[len(renames) // 2] * 1000:.2f} ms"
        yield Finding("rename", "ok", what)
        yield (
            Finding("locks", "ok", "a lock of one process keeps another one out")
            if has_locks(place)
            else Finding("locks", "bad", "two processes get the same lock", "use a local disk of this machine")
        )
        rate, is_direct = measure_direct(place)
        yield Finding(
            "throughput",
            "ok" if is_direct else "note",
            f"{size(round(rate))}/s durably, " + ("O_DIRECT works" if is_direct else "O_DIRECT is not supported here"),
            "" if is_direct else "large states are written through the page cache, which takes more CPU time",
        )
    except OSError as error:
        yield Finding("writing", "bad", f"a test file could not be written: {error}", "free space? quota? disk errors?")
        return
    if abs(skew_s) > 2:
        what = f"the file system's clock is {skew_s:+.1f} s from this machine's"
        yield Finding("clocks", "warn", what, "set both by NTP; order in the store does not depend on it")


def _file_system(kind: str, point: str, options: tuple[str, ...]) -> Finding:
    what = f"{kind or 'unknown'} at {point}"
    if kind in ("tmpfs", "ramfs"):
        return Finding("file system", "warn", what, "it is memory: the store is gone after a reboot")
    if kind.startswith(("nfs", "cifs", "smb", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs")):
        return Finding("file system", "bad", what, "locks cannot be trusted over a network: use a local disk")
    if {"nobarrier", "barrier=0"} & set(options):
        return Finding(
            "file system",
            "warn",
            f"{what}, mounted without barriers",
            "a power cut can lose saves: mount it with barriers",
        )
    if "ro" in options:
        return Finding("file system", "bad", f"{what}, mounted read-only", "mount it read-write")
    if kind == "overlay":
        return Finding(
            "file system", "note", what, "the layer of a container: use a volume to keep the store beyond it"
        )
    return Finding("file system", "ok", what)


def _space(place: Path) -> Iterator[Finding]:
    room = os.statvfs(place)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    is_short = free < 1 << 30 or free < total * 0.03
    yield Finding(
        "free space",
        "warn" if is_short else "ok",
        f"{size(free)} of {size(total)}",
        "kedge cleanup and kedge gc give some back" if is_short else "",
    )
    if room.f_files and room.f_favail < 1000:
        yield Finding("free space", "warn", f"only {room.f_favail} files more can be made", "remove files nobody needs")


# --- the store ---


def _foreign(url: str, where: Path) -> list[Finding]:
    """A place that is no store and cannot become one is left alone: nothing is tried there."""
    from kedge.errors import NotAStore
    from kedge.store.directory import MARKER, refuse_foreign
    from kedge.store.readable_files import is_files, refuse_others

    try:
        if url.startswith("files:") and not is_files(where):
            refuse_others(where)
        if not url.startswith("files:") and not (where / MARKER).is_file():
            refuse_foreign(where)
    except NotAStore as error:
        return [Finding("store", "bad", f"{error.message}: it cannot become one", error.hint)]
    except OSError as error:
        return [Finding("store", "bad", f"{where} cannot be read: {error.strerror}", "check its owner and mode")]
    return []


def _store(session: Session, where: Path | None) -> Iterator[Finding]:
    from datetime import UTC, datetime

    from kedge.errors import CheckpointError, NotFound
    from kedge.ports import ENCRYPTED_FORMAT_VERSION, FORMAT_VERSION

    started = time.perf_counter()
    try:
        with session.open() as manager:
            opened_ms = (time.perf_counter() - started) * 1000
            numbers = manager.stats()
            encryption = manager.encryption
            newest = max((job.updated_at for job in manager.jobs(limit=1000)), default=None)
    except NotFound:
        yield Finding("store", "note", "there is none yet", "the first kedge save, or kedge.open() in Python, makes it")
        return
    except CheckpointError as error:
        yield Finding("store", "bad", error.message, error.hint)
        return
    content = f"{count_of(numbers['jobs'], 'job')}, {count_of(numbers['checkpoints'], 'checkpoint')}"
    form = FORMAT_VERSION if encryption is None else ENCRYPTED_FORMAT_VERSION
    yield Finding("store", "ok", f"format {form}, {content}, opened in {opened_ms:.0f} ms")
    yield from _encryption(encryption)
    if where is not None:
        yield from _files(where)
    if newest is not None and newest > datetime.now(UTC):
        what = f"the newest save is {age(newest)} ({newest.isoformat()})"
        yield Finding(
            "clocks", "warn", what, "this machine's clock was set back, or another's is ahead; order is not affected"
        )
    else:
        yield Finding("clocks", "ok", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, after every save")


def _encryption(found: Mapping[str, object] | None) -> Iterator[Finding]:
    if found is None:
        yield Finding("encryption", "note", "none: whoever can read the files can read the states")
        return
    names = "names hidden" if found["encrypts_names"] else "names of jobs and steps readable"
    yield Finding("encryption", "ok", f"{found['cipher']}, master key {found['master_key']}, {names}")
    if found["old_data_keys"]:
        yield Finding("encryption", "warn", "a change of the data key is not finished", "kedge rekey --rewrite")


def _files(where: Path) -> Iterator[Finding]:
    from kedge.store.directory import MARKER, read_marker

    waiting = None
    if (where / MARKER).is_file():
        waiting = where / f"{read_marker(where).index}-wal"
    state = where.stat()
    if state.st_mode & 0o007:
        yield Finding("permissions", "note", "other users of this machine can read the store", f"chmod o= {where}")
    if state.st_uid != os.geteuid() and os.geteuid() != 0:
        yield Finding("permissions", "warn", f"the store belongs to user {state.st_uid}", "run as that user")
    if waiting is not None and waiting.exists() and waiting.stat().st_size > 256 << 20:
        what = f"the write-ahead log has grown to {size(waiting.stat().st_size)}"
        yield Finding("index", "warn", what, "a reader has been open for long: end it, the next save shrinks the log")
