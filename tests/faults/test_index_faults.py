"""The SQLite index under kills, forks, full disks, failing syncs and damage."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.errors import CheckpointError, NoSpace, StorageError
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.salvage import salvage
from kedge.model import Checkpoint
from kedge.ports import NEWEST_INTACT, Selection
from kedge.testing.index_suite import chunk, record, references, save, with_chunks

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]

# Saves in threads and says, line by line, what was acknowledged.
SAVING = """
import os, sys, threading
from kedge.index.sqlite.index import SqliteIndex
from kedge.testing.index_suite import record, save
path, name, threads, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
index = SqliteIndex(path, busy_timeout_s=60)
def keep_saving(thread):
    for n in range(rounds):
        new = record(f"{name}-{thread}", id=f"{name}_{thread}_{n:08x}", manifest=b"x" * 1000)
        seq = save(index, new)[0].seq
        os.write(1, f"{new.id} {new.job} {seq}\\n".encode())
all_ = [threading.Thread(target=keep_saving, args=(n,)) for n in range(threads)]
[t.start() for t in all_]
[t.join() for t in all_]
index.close()
"""


def saving(path: Path, name: str, threads: int, rounds: int, *before: str) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, "-c", SAVING, str(path), name, str(threads), str(rounds)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)


def acknowledged(output: bytes) -> list[tuple[str, str, int]]:
    whole = output[: output.rfind(b"\n") + 1].decode().splitlines()
    return [(i, job, int(seq)) for i, job, seq in (line.split() for line in whole)]


def assert_kept(index: SqliteIndex, lines: list[tuple[str, str, int]]) -> None:
    for checkpoint_id, job, seq in lines:
        found, manifest = index.read(checkpoint_id)
        assert (found.job, found.seq, len(manifest)) == (job, seq, 1000)
    assert index.integrity_problems() == []


def test_kill_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path, lines, draw = tmp_path / "index.sqlite", [], random.Random(1)
    for n in range(4):
        child = saving(path, f"life{n}", 8, 10**6)
        assert child.stdout is not None
        assert child.stderr is not None
        head = b"".join(child.stdout.readline() for _ in range(draw.randrange(15, 100)))
        child.send_signal(signal.SIGKILL)
        lines += acknowledged(head + child.stdout.read())
        child.stdout.close()
        child.stderr.close()
        child.wait()
    index = SqliteIndex(str(path))
    assert len(lines) > 50
    assert_kept(index, lines)
    index.close()


def test_processes_and_threads_share_one_index(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    SqliteIndex(str(path)).close()
    children = [saving(path, f"p{n}", 6, 25) for n in range(2)]
    lines = []
    for child in children:
        output, errors = child.communicate(timeout=90)
        assert child.returncode == 0, errors.decode()
        lines += acknowledged(output)
    assert len(lines) == 2 * 6 * 25
    index = SqliteIndex(str(path))
    assert_kept(index, lines)
    assert all(job.last_seq == job.checkpoints == 25 for job in index.jobs())
    index.close()


# Forks

FORKING = """
import os, sys, threading
from kedge.index.sqlite.index import SqliteIndex
from kedge.ports import NEWEST_INTACT, Selection
from kedge.testing.index_suite import record, references, save, with_chunks, chunk
index = SqliteIndex(sys.argv[1], busy_timeout_s=60)
stop = threading.Event()
failures = []
def keep(work):
    try:
        while not stop.is_set():
            work()
    except BaseException as error:
        failures.append(error)
busy = [
    lambda: save(index, record("parent")),
    lambda: save(index, with_chunks(chunk("x"), job="parent")),
    lambda: index.list("parent", Selection(limit=50)),
    lambda: index.sweep(references),
]
threads = [threading.Thread(target=keep, args=(work,)) for work in busy]
[t.start() for t in threads]
children = []
for n in range(8):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for k in range(3):
                save(index, record(f"child-{n}", id=f"child_{n}_{k:08x}"))
            assert [c.seq for c in index.list(f"child-{n}")] == [1, 2, 3]
            held = open("/proc/locks").read().split()
            assert str(os.getpid()) in held, "the child holds no lock on what it has open"
            code = 0
        finally:
            os._exit(code)
    children.append(pid)
codes = [os.waitpid(pid, 0)[1] for pid in children]
stop.set()
[t.join() for t in threads]
print(codes, failures, index.integrity_problems(), len(index.jobs("child-")))
index.close()
sys.exit(any(codes) or bool(failures))
"""


def test_parent_and_children_go_on_after_forks(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(path)],
        capture_output=True, timeout=90, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert b"[] [] 8" in done.stdout
    index = SqliteIndex(str(path))
    assert len(index.jobs("child-")) == 8
    assert index.integrity_problems() == []
    index.close()


def test_memory_is_copied_by_a_fork() -> None:
    code = (
        "import os; from kedge.index.sqlite.index import SqliteIndex; from kedge.testing.index_suite import save\n"
        "index = SqliteIndex(None); save(index); pid = os.fork(); save(index)\n"
        "assert len(index.list('job')) == 2\n"
        "pid and os._exit(os.waitpid(pid, 0)[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"})  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.requires("tmpfs")
def test_a_full_disk_is_said_and_harms_nothing(small_disk: Path) -> None:
    index = SqliteIndex(str(small_disk / "index.sqlite"))
    saved: list[Checkpoint] = []
    with pytest.raises(NoSpace):
        while len(saved) < 1000:
            saved += save(index, record(manifest=os.urandom(5000)))
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            save(index, record(manifest=os.urandom(200_000)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [NoSpace] * 6
    assert [c.id for c in index.list("job")] == [c.id for c in saved]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert save(index)[0].seq == len(saved) + 1  # the failed saves have used no number
    index.close()
    index = SqliteIndex(str(small_disk / "index.sqlite"))
    assert save(index)[0].seq == len(saved) + 2
    assert index.integrity_problems() == []
    index.close()


@pytest.mark.requires("strace")
@pytest.mark.parametrize("call", ["fsync,fdatasync", "pwrite64"], ids=["sync", "write"])
def test_a_failing_disk_acknowledges_nothing_it_did_not_keep(tmp_path: Path, call: str) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(str(path))
    save(index, record("first"))
    index.close()
    inject = f"inject={call}:error=EIO:when={6 if 'sync' in call else 60}+4"  # counted for each thread
    child = saving(path, "io", 4, 20, "strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    output, errors = child.communicate(timeout=90)
    assert b"StorageError" in errors
    assert b"sqlite3." not in errors.split(b"The above exception")[-1].splitlines()[-1]
    index = SqliteIndex(str(path))
    assert_kept(index, acknowledged(output))
    save(index)
    index.close()


# Damage


def test_what_a_damaged_file_still_says_is_salvaged(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(str(path))
    saved = {}
    for n in range(400):
        new = record(f"job-{n % 4}", manifest=os.urandom(900), tags={"n": str(n)})
        save(index, new)
        saved[new.id] = new
    save(index, with_chunks(*(chunk(str(n)) for n in range(50))))
    index.close()
    whole = salvage(path)
    assert whole.is_complete
    assert {r.id: r.manifest for r in whole.checkpoints["default"] if r.id in saved} == {
        i: r.manifest for i, r in saved.items()
    }
    assert len(whole.chunks["default"]) == 50
    damaged = tmp_path / "damaged.sqlite"
    shutil.copyfile(path, damaged)
    with damaged.open("r+b") as file:
        file.seek(path.stat().st_size // 4096 // 2 * 4096)  # a page in the middle
        file.write(b"\xff" * 4096)
    before = damaged.read_bytes()
    rest = salvage(damaged)
    assert damaged.read_bytes() == before
    found = {r.id: r for r in rest.checkpoints["default"] if r.id in saved}
    assert len(found) > 300
    assert all(saved[i].manifest == r.manifest and saved[i].tags == r.tags for i, r in found.items())


def test_no_raw_error_escapes_whatever_page_is_damaged(tmp_path: Path) -> None:
    path, draw = tmp_path / "index.sqlite", random.Random(2)
    index = SqliteIndex(str(path))
    ids = [save(index, record(tags={"a": "b"}))[0].id for _ in range(60)]
    save(index, with_chunks(*(chunk(str(n)) for n in range(40))))
    index.close()
    good = path.read_bytes()
    for page in range(len(good) // 4096):
        data = bytearray(good)
        for _ in range(40):
            data[page * 4096 + draw.randrange(4096)] = draw.randrange(256)
        path.write_bytes(data)
        attempts = [
            lambda i: i.list("job", Selection(tags={"a": ["b"]})), lambda i: i.list_stored("job", NEWEST_INTACT),
            lambda i: i.read(ids[30]),
            lambda i: list(i.manifests(with_chunks=False)), lambda i: i.events(), lambda i: i.packs(),
            lambda i: i.totals(), lambda i: i.integrity_problems(), lambda i: i.jobs(),
            lambda i: i.sweep(references), save, lambda i: i.delete(ids[:3], actor="t"),
        ]  # fmt: skip
        try:
            opened = SqliteIndex(str(path))
        except CheckpointError:
            continue
        for attempt in attempts:
            try:
                attempt(opened)
            except CheckpointError:
                pass
        try:
            opened.close()
        except CheckpointError:
            pass
        for suffix in ("-wal", "-shm"):
            Path(str(path) + suffix).unlink(missing_ok=True)


def test_another_process_that_holds_the_lock_is_named_in_the_hint(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    index = SqliteIndex(str(path), busy_timeout_s=0.2)  # limit: it is to be reached
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match="another process"):
        save(index)
    assert index.list("job") == []  # readers never wait for writers (I6)
    holder.execute("ROLLBACK")
    assert save(index)[0].seq == 1
    holder.close()
    index.close()
