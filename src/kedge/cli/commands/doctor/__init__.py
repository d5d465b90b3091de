"""`kedge doctor`: what this machine and this store can do, each finding with what to do about it."""

from __future__ import annotations

import os
import platform
import resource
import sqlite3
import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import click

from kedge.cli.command import Session, is_url, store_command
from kedge.cli.findings import Finding, answer_findings, judge
from kedge.errors import StorageError
from kedge.terminal.text import count_of, safe, size, style

from .disk import disk_findings
from .servers import server_findings, service_findings
from .store import foreign_findings, store_findings

_SQLITE = (3, 37)


@store_command(
    "doctor",
    json_keys='{"ok": bool, "store": …, "findings": [{subject, status: ok|note|warn|bad, what, fix}]}. '
    "Exit code 7 when a finding is bad.",
)
def doctor_command(session: Session) -> None:
    """Test Python, SQLite, the store's disk or servers, their speed and clocks, and the store itself.

    Writes and removes a small test file beside the store's files, or a few objects in its object store, where two
    writers race to create the same one. Changes nothing else.
    """
    place, findings = _findings(session)
    if not session.as_json:
        click.echo(f"{style('store', 'dim')}  {safe(place)}\n")
    answer_findings(session, [*_machine(), *findings], StorageError.exit_code, store=place)


def _findings(session: Session) -> tuple[str, list[Finding]]:
    """The store as it is shown, and what is found under it."""
    from kedge.urls import directory_of, reachable, without_secrets

    url = session.url
    if url.startswith(("http://", "https://")):
        return without_secrets(url), list(service_findings(session))
    if is_url(url):
        return without_secrets(url), [*server_findings(url), *store_findings(session, None)]
    directory = directory_of(url)
    if directory is None:
        fix = "memory:DIR saves it to a directory when it is closed"
        return url, [Finding("store", "note", "it is in memory, and gone with its process", fix)]
    foreign = foreign_findings(url, directory)
    return reachable(url), foreign or [*disk_findings(directory), *store_findings(session, directory)]


def _machine() -> Iterator[Finding]:
    packages = ("kedge", "blake3", "ormsgpack", "zstandard")
    yield Finding("kedge", "ok", ", ".join(f"{name} {version(name)}" for name in packages))
    yield Finding("python", "ok", f"{platform.python_implementation()} {platform.python_version()}")
    is_new = sqlite3.sqlite_version_info >= _SQLITE
    yield judge("sqlite", is_new, sqlite3.sqlite_version, "3.37 or newer is needed: use a newer Python", "bad")
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
