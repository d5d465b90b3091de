"""strace on a running child: see the system calls of one operation, kill it at one of them, or fail one."""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Every call that changes what is on disk, or makes a change durable.
MUTATING = (
    "openat", "creat", "write", "writev", "pwrite64", "pwritev", "pwritev2", "ftruncate", "truncate", "fallocate",
    "fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir",
    "mkdirat", "rmdir", "link", "linkat", "symlink", "symlinkat", "mknod", "mknodat", "copy_file_range", "sendfile",
    "fchmod", "chmod", "fchmodat", "fchown", "chown", "lchown", "fchownat", "utimensat",
    "setxattr", "lsetxattr", "fsetxattr", "removexattr",
)  # fmt: skip

_READ_ONLY_OPEN = re.compile(r"openat\(.*O_RDONLY")


@dataclass(frozen=True)
class Call:
    """The `number`-th call of `name` in one thread, from 1: what strace counts by."""

    name: str
    number: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.name} #{self.number}"


@contextmanager
def attached(pid: int, output: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """strace on a process that waits for us, and on the threads it starts from now on."""
    command = ["strace", "-f", "-e", "signal=none", "-o", str(output), *options, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        line = tracer.stderr.readline()
        if "attached" not in line:
            raise AssertionError(f"strace: {line}{tracer.stderr.read()}")
        yield tracer
    finally:
        detach(tracer)


def detach(tracer: subprocess.Popen[str]) -> None:
    """Let go of the tracee, which runs on. strace may wait for ever for threads of a process that was killed."""
    if tracer.poll() is None:
        tracer.send_signal(signal.SIGINT)
    try:
        tracer.communicate(timeout=5)  # limit: then it is killed
    except subprocess.TimeoutExpired:
        tracer.kill()
        tracer.communicate()


def mutating_calls(log: Path, place: str) -> list[Call]:
    """The calls in a log that touch files below `place`, each once, in order."""
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], Call] = {}
    for line in log.read_text(errors="replace").splitlines():
        thread, _, text = line.partition(" ")
        text = text.lstrip()
        name = text.partition("(")[0]
        if name not in MUTATING:
            continue  # the end of a call that another thread interrupted, or an exit
        counts[thread, name] += 1
        if place in text and not _READ_ONLY_OPEN.match(text):
            call = Call(name, counts[thread, name], text)
            found.setdefault((call.name, call.number), call)
    return list(found.values())
