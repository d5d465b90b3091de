"""What `kedge doctor` finds out about stores behind servers: the database, and the object store with the bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from kedge.cli.command import Session
from kedge.cli.findings import Finding, judge
from kedge.errors import CheckpointError
from kedge.terminal.text import size

from .disk import disk_findings, timed
from .store import content_of

if TYPE_CHECKING:
    from kedge.index.postgres.server import Connection

_ROUNDS = 15
_BYTES = 8 << 20
_SKEW_S = 2.0
_SLOW_COMMIT_S = 0.05


def server_findings(url: str) -> Iterator[Finding]:
    """Findings about the servers of a store, whether there is a store yet or not."""
    from kedge.urls import blobs_directory, blobs_of

    try:
        yield from _database(url)
    except CheckpointError as error:
        yield Finding("database", "bad", error.message, error.hint)
    blobs = blobs_of(url)
    if blobs:
        try:
            if blobs.startswith("file:"):
                yield from disk_findings(blobs_directory(blobs))
            else:
                yield from _objects(blobs)
        except CheckpointError as error:
            yield Finding("object store", "bad", error.message, error.hint)


def service_findings(session: Session) -> Iterator[Finding]:
    """Findings about a service: what is under its store, only it can see."""
    try:
        with session.open() as manager:
            content = content_of(manager.stats())
            trip = median(timed(_ROUNDS, lambda _: manager.jobs(limit=1)))
    except CheckpointError as error:
        yield Finding("service", "bad", error.message, error.hint)
        return
    yield Finding("service", "ok", f"{content}, answers in {trip * 1000:.1f} ms")
    yield Finding("store", "note", "its disk and its encryption are the service's", "run kedge doctor where it runs")


def _database(url: str) -> Iterator[Finding]:
    from kedge.urls import open_server

    server = open_server(url)
    try:
        with server.lend() as db:
            yield from _settings(db)
            yield from _speed(db)
    finally:
        server.close()


def _settings(db: Connection) -> Iterator[Finding]:
    def setting(name: str) -> str:
        return str(_value(db, "SELECT current_setting(%s)", name))

    what = f"PostgreSQL {setting('server_version')}, up to {setting('max_connections')} connections"
    yield judge("database", int(setting("server_version_num")) >= 120000, what, "12 or newer is needed", "bad")
    off = [name for name in ("fsync", "full_page_writes", "synchronous_commit") if setting(name) == "off"]
    if off:
        what = f"{', '.join(off)} off: a crash loses saves that returned"
        yield Finding("durability", "bad", what, "turn it on")
    if _value(db, "SELECT pg_is_in_recovery()"):
        what = "this server is a standby, which cannot be written"
        yield Finding("database", "bad", what, "use the primary's address")


def _value(db: Connection, query: str, *arguments: object) -> Any:
    """The only value of a query's only row."""
    (value,) = db.execute(query, arguments).fetchone() or (None,)
    return value


def _speed(db: Connection) -> Iterator[Finding]:
    clock = "SELECT extract(epoch FROM clock_timestamp())::float8"
    trip = median(timed(_ROUNDS, lambda _: _value(db, clock)))
    # The message is something for the commit to sync.
    commit = median(timed(_ROUNDS, lambda _: db.execute("SELECT pg_logical_emit_message(true, 'kedge', '')")))
    before = time.time()
    skew_s = _value(db, clock) - (before + time.time()) / 2
    yield judge(
        "latency",
        commit < _SLOW_COMMIT_S,
        f"a query takes {trip * 1000:.2f} ms, a commit {commit * 1000:.2f} ms",
        "every save waits this long: use a database that is nearer, or a faster disk",
    )
    began = time.perf_counter()
    db.execute("SELECT decode(repeat('00', %s), 'hex')", (_BYTES,), binary=True).fetchone()
    yield Finding("bandwidth", "ok", f"{size(round(_BYTES / (time.perf_counter() - began)))}/s from the database")
    yield _clock("database", skew_s)


def _objects(url: str) -> Iterator[Finding]:
    from kedge.urls import needing

    with needing("obstore", extra="object"):
        from kedge.blobs.objects import connect
        from kedge.blobs.probe import probe
    blobs = connect(url)
    try:
        result = probe(blobs)
    finally:
        blobs.close()
    for problem in result.problems:
        yield Finding("object store", "bad", f"{url}: {problem}", "do not use it for a store: choose another server")
    if not result.problems:
        yield Finding("object store", "ok", f"{url}: of two writers one wins, what is written is seen at once")
    yield Finding(
        "latency", "ok", f"1 KiB is written in {result.put_s * 1000:.1f} ms and read in {result.get_s * 1000:.1f} ms"
    )
    rates = (size(round(rate)) for rate in (result.write_rate, result.read_rate))
    yield Finding("bandwidth", "ok", "{}/s written, {}/s read, four objects at once".format(*rates))
    yield _clock("object store", result.skew_s)


def _clock(whose: str, skew_s: float) -> Finding:
    what = f"the {whose} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine"
    fix = "set both by NTP; order and leases do not depend on it, signatures may"
    return judge("clocks", abs(skew_s) <= _SKEW_S, what, fix)
