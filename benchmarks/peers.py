"""The peers, each as durable as Kedge: what returns is on the disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .harness import Missing

_DIRECT_BYTES = 1 << 20
_DIRECT_THREADS = 6


def sync_file(path: Path) -> None:
    """fsync a file and its name."""
    for name in (path, path.parent):
        handle = os.open(name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def torch() -> Any:
    try:
        import torch
    except ImportError:
        raise Missing("torch is not installed") from None
    return torch


def torch_save(state: Mapping[str, Any], path: Path) -> None:
    torch().save(state, path)
    sync_file(path)


def need(command: str) -> None:
    if shutil.which(command) is None:
        raise Missing(f"{command} is not installed")


def _call(*command: str | Path, **variables: str) -> None:
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **variables}
    )


class Restic:
    """Defaults: encrypted, compression auto. restic syncs its own files and directories."""

    def __init__(self, repository: Path) -> None:
        need("restic")
        self._variables = {
            "RESTIC_REPOSITORY": str(repository / "repository"),
            "RESTIC_CACHE_DIR": str(repository / "cache"),
            "RESTIC_PASSWORD": "benchmark",
        }
        _call("restic", "init", **self._variables)

    def backup(self, source: Path) -> None:
        _call("restic", "backup", "--quiet", source, **self._variables)


class Borg:
    """Without encryption; compression lz4, its default. borg syncs its segments."""

    def __init__(self, repository: Path) -> None:
        need("borg")
        self._repository = repository / "repository"
        self._variables = {
            "BORG_BASE_DIR": str(repository / "base"),
            "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        }
        self._count = 0
        _call("borg", "init", "--encryption=none", self._repository, **self._variables)

    def backup(self, source: Path) -> None:
        self._count += 1
        _call("borg", "create", f"{self._repository}::{self._count}", source, **self._variables)


def tar(source: Path, archive: Path, compressor: str) -> None:
    _call("tar", "--create", f"--use-compress-program={compressor}", "--file", archive, "--directory", source, ".")
    sync_file(archive)


class SqliteTable:
    """The simplest durable table of states: one commit, one sync an insert."""

    def __init__(self, path: Path) -> None:
        self._path = path
        connection = self.connect()
        connection.execute("CREATE TABLE states (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, job TEXT, state BLOB)")
        connection.execute("CREATE INDEX latest ON states (job, seq)")
        connection.close()

    def connect(self) -> sqlite3.Connection:
        return connect(self._path)


def connect(path: Path) -> sqlite3.Connection:
    """A connection that syncs at every commit, for any thread."""
    connection = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def write_direct(path: Path, views: list[memoryview]) -> None:
    """The disk's own rate: O_DIRECT from page-aligned memory into space that exists, several threads, one sync."""
    handle = os.open(path, os.O_WRONLY | os.O_DIRECT)
    parts: list[tuple[memoryview, int]] = []
    offset = 0
    for view in views:
        parts += [(view[at : at + _DIRECT_BYTES], offset + at) for at in range(0, len(view), _DIRECT_BYTES)]
        offset += len(view)
    try:
        with ThreadPoolExecutor(_DIRECT_THREADS) as pool:
            for written in pool.map(lambda part: os.pwrite(handle, *part), parts):
                if written != _DIRECT_BYTES:
                    raise OSError(f"a direct write of 1 MiB wrote {written} bytes")
        os.fdatasync(handle)
    finally:
        os.close(handle)


def reserve(path: Path, size: int) -> None:
    """An empty file with its space allocated."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        os.fsync(file.fileno())
