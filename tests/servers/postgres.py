"""A PostgreSQL cluster of the tests' own: a socket in a temporary directory, no port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.waiting import wait_for

_QUICKLY = ("-R", "-X", "stream", "--checkpoint=fast", "--no-sync")  # -R: a standby


def programs() -> Path | None:
    """Where initdb and pg_ctl are; Debian keeps them off the PATH."""
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    return Path(found).parent if found else None


class Cluster:
    """A server that can be stopped, killed and started again."""

    def __init__(self, folder: Path, copied_from: Cluster | None = None) -> None:
        """`copied_from`: the primary whose standby this is."""
        bin_folder = programs()
        assert bin_folder is not None
        self._bin = bin_folder
        self.folder = folder
        self._data = folder / "data"
        if copied_from is not None:
            self._run(
                "pg_basebackup", "-D", str(self._data), "-h", str(copied_from.folder), "-U", "postgres", *_QUICKLY
            )
            self.configure(f"unix_socket_directories = '{folder}'\n", reload=False)
            return
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8")
        self.configure(
            f"listen_addresses = ''\nunix_socket_directories = '{folder}'\nmax_connections = 200\n"
            "shared_buffers = 32MB\nautovacuum = off\nrestart_after_crash = on\n"
            "fsync = off\n",  # tests kill the server, not the machine: what it wrote stays in the page cache
            reload=False,
        )

    def configure(self, lines: str, *, reload: bool = True) -> None:
        with open(self._data / "postgresql.conf", "a") as conf:
            conf.write(lines)
        if reload:
            self._run("pg_ctl", "-D", str(self._data), "reload")

    def promote(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", "60", "promote")

    def kill(self, how: signal.Signals) -> None:
        """The server and everything it has started, at once and for good."""
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        children = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True)
        for process in [pid, *map(int, children.stdout.split())]:
            with suppress(ProcessLookupError):
                os.kill(process, how)
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the server does not die")

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-t", "60", "-l", str(self.folder / "log"), "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")

    def crash(self) -> None:
        """SIGQUIT to one backend: the server drops everybody at once, and has recovered when this returns."""
        writer = self._wal_writer()
        if writer is not None:
            with suppress(ProcessLookupError):  # it is crashing already
                os.kill(writer, signal.SIGQUIT)
        wait_for(lambda: self._wal_writer() not in (None, writer), "the server does not recover")

    def _wal_writer(self) -> int | None:
        """It is the server's from when that has recovered until it crashes."""
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        children = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid=,args="], capture_output=True, text=True)
        lines = [line.strip().partition(" ") for line in children.stdout.splitlines()]
        return next((int(number) for number, _, args in lines if "walwriter" in args), None)

    def url(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def empty_database(self, url: str | None = None) -> str:
        """The URL of a database in which nothing of Kedge is left."""
        import psycopg

        url = url or self.url("postgres")
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND datname = 'postgres'"
            )
            db.execute("DROP VIEW IF EXISTS pipeline_checkpoints CASCADE")
            db.execute("DROP SCHEMA IF EXISTS kedge CASCADE")
            db.execute("DROP TABLE IF EXISTS item")  # of examples/kubernetes
        return url

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd="/",
            timeout=90,
            user="postgres" if os.geteuid() == 0 else None,  # the server refuses to run as root
        )
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout.decode(errors='replace')[-2000:]}")


@contextmanager
def postgres_cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: the path of a socket has 107 characters at most
    if os.geteuid() == 0:
        shutil.chown(folder, "postgres")
    try:
        cluster = Cluster(folder)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_until_up(url: str, timeout_s: float = 30.0) -> None:
    import psycopg

    def is_up() -> bool:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return False
        return True

    wait_for(is_up, f"{url} does not answer", timeout_s)
