"""The kinds of stores a history runs on, and the servers below them, which can be restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import s3
from tests.servers.ports import free_port
from tests.servers.postgres import Cluster, postgres_cluster, wait_until_up

from .worker import Access, add_key

KINDS = ("dir", "files", "memory", "postgres", "postgres+s3", "http")


@dataclass
class Place:
    """A store, how each worker reaches it, and what can be done to the servers below."""

    kind: str
    direct: Access  # for the controller, and for workers that need no service
    remote: Access | None = None
    restarts: dict[str, Callable[[], None]] = field(default_factory=dict)  # each returns when the server is back

    def access(self, slot: int) -> Access:
        return self.remote if self.remote is not None and slot else self.direct

    @property
    def directory(self) -> Path | None:
        """Where a store that is a directory lies."""
        return Path(self.direct.url.removeprefix("files:")) if "://" not in self.direct.url else None


class Servers:
    """PostgreSQL and S3, started when first asked for, shared by the histories of one run."""

    def __init__(self, folder: Path, stack: ExitStack, cluster: Cluster | None = None) -> None:
        self._folder = folder
        self._stack = stack
        self._cluster = cluster
        self._s3_server: s3.Server | None = None
        self._prefixes = 0

    def cluster(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._stack.enter_context(postgres_cluster())
        return self._cluster

    def objects(self) -> s3.Server:
        if self._s3_server is None:
            folder = self._folder / "s3"
            folder.mkdir()
            self._s3_server = self._stack.enter_context(s3.restartable_server(folder))
        return self._s3_server

    def prefix(self) -> str:
        self._prefixes += 1
        return f"s3://{s3.BUCKET}/histories-{os.getpid()}-{self._prefixes}"


@contextmanager
def place(kind: str, folder: Path, servers: Servers, *, is_encrypted: bool) -> Iterator[Place]:
    """An empty store of a kind."""
    (folder / "scratch").mkdir(parents=True)
    keys = str(folder / "keys") if is_encrypted else ""
    if keys:
        add_key(keys, os.urandom(32))
    url, environment, restarts = str(folder / "store"), {}, {}
    if kind in ("files", "memory"):
        url = f"{kind}:{url}"
    elif kind.startswith("postgres"):
        cluster = servers.cluster()
        url = cluster.empty_database()
        restarts["database"] = lambda: _restart_database(cluster)
        if kind == "postgres+s3":
            objects = servers.objects()
            environment = s3.environment(objects.address)
            os.environ.update(environment)
            url += f"&blobs={servers.prefix()}"
            restarts["object store"] = objects.restart
    elif kind not in ("dir", "http"):
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    direct = Access(
        url,
        str(folder / "target"),
        str(folder / "scratch"),
        keys,
        tuple(environment.items()),
        owns_jobs=kind == "memory",
        changes_master=is_encrypted and kind != "http",
        keeps_files=kind != "http",
    )
    made = Place(kind, direct, restarts=restarts)
    if kind != "http":
        yield made
        return
    with serving(url, keys) as service:
        made.remote = Access(service.url, direct.target, direct.scratch, keys, is_remote=True, keeps_files=False)
        restarts["service"] = service.restart
        yield made


def _restart_database(cluster: Cluster) -> None:
    cluster.stop()
    cluster.start()
    wait_until_up(cluster.url("postgres"))


class Service:
    """`kedge serve` on a port of its own, so that clients find it again."""

    def __init__(self, place: str, keys: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "kedge", "serve", "--store", place, "--port", str(port), "--drain", "2",
        ]  # fmt: skip
        self._environment = dict(os.environ)
        if keys:
            self._environment["KEDGE_KEY"] = Path(keys).read_text().split()[-1]
        self._is_kind = True
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        stderr = self._process.stderr
        assert stderr is not None
        lines = []
        for line in stderr:
            lines.append(line)
            if "running on" in line:
                break
        else:
            raise AssertionError(f"the service did not start: {''.join(lines)}")
        self._drain = threading.Thread(target=stderr.read, daemon=True)
        self._drain.start()

    def restart(self) -> None:
        """By SIGTERM, the next time by SIGKILL, and so on."""
        self.stop(signal.SIGTERM if self._is_kind else signal.SIGKILL)
        self._is_kind = not self._is_kind
        self.start()

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(how)
        self._process.wait(60)
        self._drain.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


@contextmanager
def serving(place: str, keys: str) -> Iterator[Service]:
    service = Service(place, keys)
    try:
        yield service
    finally:
        service.stop()
