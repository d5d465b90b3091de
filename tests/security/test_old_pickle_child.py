"""The process that reads old pickles: what a pickle that took it over could still do, and what it can make numpy do."""

from __future__ import annotations

import pickle
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.legacy.importers.common import Unreadable
from kedge.legacy.importers.old_pickles import Pickles

CODE = """
import ctypes, os, socket, subprocess, sys
from kedge.legacy.importers import old_pickle_child
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
word = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))
part = Part(ctypes.addressof(word), 8)
old_pickle_child.prepare()
old_pickle_child.confine()
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments) != -1
X32 = 0x40000000
ATTACKS = {
    "open": lambda: call(2, b"/etc/passwd", 0), "openat": lambda: call(257, -100, b"/etc/passwd", 0, 0),
    "openat2": lambda: call(437, -100, b"/etc/passwd", word, 24), "socket": lambda: call(41, 2, 1, 0),
    "execve": lambda: call(59, b"/bin/true", None, None), "fork": lambda: call(57), "vfork": lambda: call(58),
    "clone": lambda: call(56, 17, 0, 0, 0, 0), "clone3": lambda: call(435, word, 64),
    "ptrace": lambda: call(101, 16, parent, 0, 0), "kill": lambda: call(62, parent, 0),
    "tgkill": lambda: call(234, parent, parent, 0), "pidfd_open": lambda: call(434, parent, 0),
    "process_vm_writev": lambda: call(311, parent, ctypes.byref(part), 1, ctypes.byref(part), 1, 0),
    "process_vm_readv": lambda: call(310, parent, ctypes.byref(part), 1, ctypes.byref(part), 1, 0),
    "prlimit of the parent": lambda: call(302, parent, 7, word, None), "io_uring": lambda: call(425, 1, word),
    "unlink": lambda: call(87, b"/tmp/kedge-nothing"), "mkdir": lambda: call(83, b"/tmp/kedge-made", 0o700),
    "chmod": lambda: call(90, b"/dev/null", 0o666), "mount": lambda: call(165, b"x", b"/", b"x", 0, None),
    "bpf": lambda: call(321, 0, word, 8), "userfaultfd": lambda: call(323, 0),
    "keyctl": lambda: call(250, 0, 0, 0, 0, 0),
    "memfd": lambda: call(319, b"x", 0), "dup": lambda: call(32, 1), "perf": lambda: call(298, word, 0, -1, -1, 0),
    "setuid": lambda: call(105, 0), "unshare": lambda: call(272, 0x10000000),
    "write to another descriptor": lambda: call(1, 2, b"x", 1), "read another descriptor": lambda: call(0, 2, word, 1),
    "x32 open": lambda: call(X32 | 2, b"/etc/passwd", 0), "x32 read": lambda: call(X32 | 0, 0, word, 0),
    "x32 execve": lambda: call(X32 | 520, b"/bin/true", None, None), "module import": lambda: __import__("sndhdr"),
}
for name in sys.argv[1:]:
    try:
        done = bool(ATTACKS[name]())
    except (OSError, ImportError):
        done = False
    print(name, done)
sys.stdout.flush()
os._exit(0)
"""


def attacks() -> list[str]:
    """Their numbers are those of one architecture."""
    return re.findall(r'"([a-z0-9_ ]+)": lambda', CODE) if platform.machine() == "x86_64" else []


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *attacks()], capture_output=True, text=True, check=False, stdin=subprocess.PIPE
    )
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("attack", attacks())
def test_the_child_cannot(outcomes: dict[str, str], attack: str) -> None:
    assert outcomes.get(attack) == "False"


@pytest.fixture(scope="module")
def reader() -> Iterator[Pickles]:
    with Pickles() as opened:
        yield opened


def test_the_child_is_not_root(reader: Pickles) -> None:
    reader.read(pickle.dumps(1))
    assert reader._child is not None
    lines = Path(f"/proc/{reader._child.pid}/status").read_text().splitlines()
    about = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert "0" not in about["Uid"].split()
    assert (about["NoNewPrivs"], about["Seccomp"]) == ("1", "2")


def raw(*opcodes: bytes) -> bytes:
    return b"".join(opcodes) + b"."


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def dtype(name: str, order: str, inner: bytes = b"N", size: int = -1) -> bytes:
    made = b"cnumpy\ndtype\n(" + text(name) + b"\x89\x88tR"
    return made + b"(" + number(3) + text(order) + inner + b"NN" + number(size) + number(-1) + number(63) + b"tb"


def array(kind: bytes, shape: int, data: bytes) -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"tC\x01btR"
    content = b"C" + len(data).to_bytes(1, "little") + data
    return raw(b"\x80\x03", made, b"(", number(1), b"(", number(shape), b"t", kind, b"\x89", content, b"tb")


HOSTILE = {
    "pointers as objects": array(dtype("O8", "|"), 1, b"\x41" * 8),
    "objects of another size": array(dtype("O8", "|", size=1), 8, b"\x41" * 8),
    "more elements than bytes": array(dtype("f8", "<"), 1 << 30, b"\x41" * 8),
    "a size that is no type's": array(dtype("f8", "<", size=1 << 30), 1, b"\x41" * 8),
    "a type that is none": array(dtype("Z9", "<"), 1, b"\x41" * 8),
    "a wide void": array(dtype("V2000000000", "|"), 1, b"\x41" * 8),
    "an array of itself": raw(b"\x80\x03cnumpy.core.multiarray\n_reconstruct\n(cbuiltins\nlist\n(tC\x01btR"),
    "no dtype": array(b"N", 1, b"\x41" * 8),
    "text as a shape": raw(
        b"\x80\x03cnumpy.core.numeric\n_frombuffer\n(C\x01a", dtype("u1", "|"), text("x"), text("C"), b"tR"
    ),
    "scalar of too few bytes": raw(b"\x80\x03cnumpy.core.multiarray\nscalar\n(", dtype("f8", "<"), b"C\x01atR"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arrays_that_are_none(reader: Pickles, name: str) -> None:
    """Told as unreadable by the same child: none of them makes it crash."""
    reader.read(pickle.dumps(1))
    child = reader._child
    if name == "a size that is no type's":  # what it claims is not used: the type says it
        assert reader.read(HOSTILE[name]).value.nbytes == 8
    else:
        with pytest.raises(Unreadable):
            reader.read(HOSTILE[name])
    assert reader._child is child


def values() -> list[Any]:
    import numpy as np

    return [
        np.arange(6).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.float32(3.5), np.array(["ä", "bb"]), np.zeros(0),
        np.zeros(2, [("a", "<M8[ns]"), ("b", ">i2", (2, 3))]), np.datetime64("2020-01-01T00:00:00", "s"),
        np.timedelta64(5, "25s"), np.array(True), np.dtype([("x", "f4"), ("y", "i8")], align=True), np.zeros(1, "V5"),
        np.array([[1, 2], [3, 4]], order="F", dtype=">u2"), np.str_(""), np.complex128(1j),
    ]  # fmt: skip


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_that_are_some_come_back(reader: Pickles, protocol: int) -> None:
    for value in values():
        loaded = reader.read(pickle.dumps(value, protocol)).value
        assert type(loaded) is type(value)
        if hasattr(value, "tobytes"):
            assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (value.dtype, value.shape, value.tobytes())
        else:
            assert loaded == value
