"""How a container ended, for those that ask to be forgotten after a success (KEDGE_KEEP=until-success).

A runtime is never told: the engine's shim waits for the process, and `delete` says nothing. So beside such a container,
and no other, a small process of ours waits until it ends and notes its exit status. It is there before the container
starts. It cannot harm it, and if it is killed the status is not known: then nothing is forgotten.

Started as `python -IS exits.py PID FILE`: nothing but the standard library can be imported here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
import sys
import time

_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO of 64 bytes, whose last four are the exit status
_INFO_EXIT = 8
_WAIT_S = 5.0


def note_of(mark: str) -> str:
    """Where the exit status of a container is noted, beside its mark."""
    return f"{mark}~exit"  # see early.write_mark


def watch(mark: str, pid: int) -> None:
    """Have the end of a process noted. It is watched when this returns."""
    import subprocess

    command = [sys.executable, "-IS", os.path.abspath(__file__), str(pid), note_of(mark)]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=subprocess.PIPE, stderr=null, start_new_session=True)
    process.returncode = 0  # it outlives us
    assert process.stdout is not None
    with process.stdout:
        process.stdout.read(1)


def status_of(mark: str) -> int | None:
    """The exit status, negative for a signal; None when nobody watched, or could not tell."""
    try:
        fd = os.open(note_of(mark), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        deadline = time.monotonic() + _WAIT_S
        while not _is_free(fd):  # it has ended, and who watches it has not written that down yet
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)
        text = os.read(fd, 32)
    finally:
        os.close(fd)
    return os.waitstatus_to_exitcode(int(text)) if text else None


def forget(mark: str) -> None:
    try:
        os.unlink(note_of(mark))
    except FileNotFoundError:
        return


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _main(pid: int, note: str) -> None:
    process = os.pidfd_open(pid)
    began = _stat(pid)[19]
    fd = os.open(note, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(1, b".")
    os.close(1)
    select.select([process], [], [])
    status = _status(process, pid, began)
    if status is not None:
        os.write(fd, b"%d" % status)


def _status(process: int, pid: int, began: bytes) -> int | None:
    """As wait(2) gives it: of one that nobody has waited for yet from /proc, else from the kernel (6.15 and newer)."""
    fields = _stat(pid)
    if len(fields) > 49 and fields[0] == b"Z" and fields[19] == began:
        return int(fields[49])
    try:
        answer = fcntl.ioctl(process, _GET_INFO, struct.pack("<Q56x", _INFO_EXIT))
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):
            return None
        raise
    mask, status = struct.unpack("<Q52xi", answer)
    return status if mask & _INFO_EXIT else None


def _stat(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
