"""The faults that other tests rely on do happen, where and when they were planned."""

import subprocess
import sys
import time

import pytest

from kedge.blobs.memory import MemoryBlobs
from kedge.errors import StorageError
from kedge.testing.blobs_suite import pattern, put, read
from kedge.testing.faults import Fault, Plan, inject


def test_a_call_fails_before_its_effect() -> None:
    inner = MemoryBlobs()
    plan = Plan(Fault("append", 2, error=StorageError("planned")))
    writer = inject(inner, plan).writer(0)
    pack, _ = writer.append(b"one")
    with pytest.raises(StorageError, match="planned"):
        writer.append(b"two")
    assert dict(inner.packs()) == {pack: 4096}
    writer.append(b"three")
    assert plan.calls == {"writer": 1, "append": 3}
    assert plan.struck == plan.faults


def test_a_call_fails_after_its_effect() -> None:
    inner = MemoryBlobs()
    blobs = inject(inner, Plan(Fault("remove", after=True, error=StorageError("lost answer"))))
    (place,) = put(blobs, b"data")
    with pytest.raises(StorageError, match="lost answer"):
        blobs.remove(place[0], lambda: True)
    assert list(inner.packs()) == []


def test_a_fault_may_stay() -> None:
    blobs = inject(MemoryBlobs(), Plan(Fault("commit", 2, until=3, error=StorageError("full"))))
    put(blobs, b"1")
    for _ in range(2):
        with pytest.raises(StorageError):
            put(blobs, b"2")
    put(blobs, b"3")


def test_read_bytes_are_damaged() -> None:
    blobs = inject(MemoryBlobs(), Plan(Fault("read_into", 2, flip_bit=8 * 10 + 3)))
    (place,) = put(blobs, pattern(100))
    assert read(blobs, place, 100) == pattern(100)
    damaged = read(blobs, place, 100)
    assert [(i, a ^ b) for i, (a, b) in enumerate(zip(damaged, pattern(100), strict=True)) if a != b] == [(10, 8)]
    assert read(blobs, place, 100) == pattern(100)


def test_a_call_is_delayed() -> None:
    blobs = inject(MemoryBlobs(), Plan(Fault("packs", delay_s=0.05)))
    begin = time.monotonic()
    list(blobs.packs())
    assert time.monotonic() - begin >= 0.05  # clock: it took at least so long


def test_the_process_dies() -> None:
    code = """
from kedge.testing.faults import Fault, Plan, inject
from kedge.blobs.memory import MemoryBlobs
writer = inject(MemoryBlobs(), Plan(Fault("commit", kill=True, after=True))).writer(0)
writer.append(b"x")
print("alive", flush=True)
writer.commit()
print("still alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "alive\n")


def test_anything_can_be_wrapped() -> None:
    class Register:
        name = "register"

        def __init__(self) -> None:
            self.values: list[int] = []

        def put(self, value: int, *, twice: bool = False) -> int:
            self.values += [value] * (2 if twice else 1)
            return len(self.values)

    plan = Plan(Fault("put", 2, after=True, error=StorageError("lost answer")))
    register = inject(Register(), plan)
    assert register.name == "register"
    assert register.put(1) == 1
    with pytest.raises(StorageError):
        register.put(2, twice=True)
    assert register.values == [1, 2, 2]
