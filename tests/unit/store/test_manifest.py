"""Compressed data: what is wrong with it is damage, what is wrong with the machine is not."""

import subprocess
import sys

import pytest
import zstandard

from kedge.errors import Corrupted
from kedge.store.manifest import decompress

LARGE = 256 << 20

_WITH_LITTLE_MEMORY = f"""
import resource, sys
from kedge.store.manifest import decompress

data = sys.stdin.buffer.read()
resource.setrlimit(resource.RLIMIT_AS, ({LARGE}, {LARGE}))
try:
    decompress(data, {LARGE})
except MemoryError:
    print("too little memory")
"""


def test_what_is_damaged_is_corrupted() -> None:
    data = bytearray(zstandard.compress(b"hello" * 1000))
    assert decompress(data, 5000) == b"hello" * 1000
    with pytest.raises(Corrupted, match="claims 5,000 bytes, at most 4,999 fit"):
        decompress(data, 4999)
    data[-1] ^= 1
    data[len(data) // 2] ^= 1
    with pytest.raises(Corrupted, match="is damaged"):
        decompress(data, 5000)
    with pytest.raises(Corrupted, match="is damaged"):
        decompress(b"no frame", 5000)


def test_a_machine_without_memory_is_no_damage() -> None:
    data = zstandard.compress(bytes(LARGE), 1)
    command = [sys.executable, "-c", _WITH_LITTLE_MEMORY]
    done = subprocess.run(command, input=data, capture_output=True, check=True, timeout=120)
    assert done.stdout == b"too little memory\n"
