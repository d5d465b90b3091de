"""Whether a job has checkpoints, or is about to, asked of a store in a directory without opening it.

Opening a store makes it ready for everything: it reads much code, moves the log on, may sync. A container that is being
created waits for one answer only, mostly no. So this is imported before anything else of Kedge, and imports nothing
that costs more than the question (typing, json and dataclasses do). It decides nothing that it is not sure of: a store
that is new, encrypted, of another format, damaged or elsewhere is left to whoever opens it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from types import ModuleType

FORMAT = 1  # as in ports: that of plain stores
APPLICATION_ID = 0x6B656467  # as in index.sqlite.database
MARKER = "kedge-store"  # as in store.directory
INDEX = "index.sqlite"
_ROOM_BYTES = 1 << 20  # with less than this on the disk, mapping SQLite's shared memory could kill us
_WAIT_S = 1.0
_NOT_FOR_URI = frozenset("%?#\0")
_LOCAL = frozenset(("overlay", "tmpfs", "btrfs", "zfs", "bcachefs"))  # on no device of their own, yet of this machine


def has_checkpoints(url: str, job: str, namespace: str = "default") -> bool | None:
    """Also when somebody holds the right to write the first one (I5). None: only opening the store can tell, or can
    tell what is the matter with it."""
    path = url.removeprefix("file:")
    is_locked = os.environ.get("KEDGE_KEY") or os.environ.get("KEDGE_KEY_FILE")
    if is_locked or not path.startswith("/") or _NOT_FOR_URI & set(path):
        return None
    if not os.path.lexists(path):
        return False
    _sqlite3 = sqlite()
    try:
        with open(f"{path}/{MARKER}", "rb") as file:
            lines = file.read(1024).decode().split("\n")
        if len(lines) < 7 or lines[1] != f"format: {FORMAT}" or lines[3:5] != [f"index: {INDEX}", "encrypted: no"]:
            return None
        if _is_full(path) or not _is_local(path) or not _is_sound(path):
            return None
        index = _sqlite3.connect(f"file:{path}/{INDEX}?mode=ro", uri=True, timeout=_WAIT_S)
    except (OSError, ValueError, _sqlite3.Error):
        return None
    try:
        return _ask(index, lines[2].removeprefix("id: "), job, namespace)
    except _sqlite3.Error:
        return None
    finally:
        index.close()


def _is_sound(path: str) -> bool:
    """Whether nothing speaks against asking SQLite: a lost log, or a file whose shared memory is not for us to make."""
    if not os.access(f"{path}/{INDEX}", os.W_OK) or not os.access(path, os.W_OK):
        return False
    with open(f"{path}/{INDEX}-state", "rb") as file:
        return b"state: closed\n" in file.read(256) or os.path.exists(f"{path}/{INDEX}-wal")


def sqlite() -> ModuleType:
    """What `sqlite3` is made of, without the rest of it.

    Its C part asks `functools` for `lru_cache` when it is imported, to cache statements, and nothing else of it. That
    module takes 7 ms to import, twice as long as SQLite itself, and a container waits for that: so it is given one that
    caches nothing, for the time of the import only. Nobody else sees it, as there is one thread.
    """
    if "functools" in sys.modules:
        import _sqlite3

        return _sqlite3
    without_cache = type(sys)("functools")
    vars(without_cache)["lru_cache"] = lambda size: lambda call: call
    sys.modules["functools"] = without_cache
    try:
        import _sqlite3
    finally:
        del sys.modules["functools"]
    return _sqlite3


def _ask(index: Connection, store_id: str, job: str, namespace: str) -> bool | None:
    index.execute("BEGIN")
    identity = (
        index.execute("PRAGMA application_id").fetchone()[0],
        index.execute("PRAGMA user_version").fetchone()[0],
        index.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone(),
        index.execute("SELECT value FROM meta WHERE key = 'encrypted'").fetchone(),
    )
    if identity != (APPLICATION_ID, FORMAT, (store_id,), ("no",)):
        return None
    row = index.execute(
        "SELECT 1 FROM job WHERE name = ? AND ns_no = (SELECT no FROM namespace WHERE name = ?)"
        " AND (checkpoints > 0 OR EXISTS (SELECT 1 FROM lease WHERE job_no = job.no AND is_live))",
        (job, namespace),
    ).fetchone()
    return row is not None


def _is_full(path: str) -> bool:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _ROOM_BYTES


def _is_local(path: str) -> bool:
    """Whether locks of files there mean anything (see `store.directory.refuse_network`)."""
    device = os.stat(path).st_dev
    if os.major(device):
        return True
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if before.split(" ", 3)[2] == f"0:{os.minor(device)}":
                return after.split(" ", 1)[0] in _LOCAL
    return False
