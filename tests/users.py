"""Programs that run as another user, in a fork of the test: our own files may not be theirs to read."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import kedge


@cache
def _import_all() -> None:
    """What a store imports only when it is used."""
    for scheme in ("file", "files"):
        with tempfile.TemporaryDirectory() as place, kedge.open(f"{scheme}:{place}/warm") as store:
            store.save("job", "small", 1)
            store.save("job", "large", os.urandom(200_000))
            store.cleanup("job", keep_last=1)
            store.gc()
            store.verify()
            store.restore("job")


def run_as(user: int, program: str, *arguments: str, group: int, also_in: int, umask: int = 0o022) -> str:
    """Run a program as `user`, whose first group is `group`, and who is in the group `also_in` too.

    Answers what it printed. It may be killed, by itself; if it fails otherwise, this fails.
    """
    _import_all()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(writing, 1)
            os.setgroups([also_in])
            os.setgid(group)
            os.setuid(user)
            os.umask(umask)
            os.chdir("/")
            sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
            exec(compile(program, "program", "exec"), {"kedge": kedge, "os": os, "arguments": arguments})
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    with open(reading) as output:
        printed = output.read()
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -9), printed
    return printed


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that all users can reach; those of pytest are for one user alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
