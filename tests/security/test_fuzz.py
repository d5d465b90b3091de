"""A short form of `./dev torture fuzz`: the same inputs every time."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest

from tests.torture.fuzz import fuzz, targets


@pytest.mark.parametrize("name", targets())
def test_mutated_input_is_read_or_refused(name: str) -> None:
    assert fuzz(name, targets()[name], seed=17, count=1500) == 1500


FOUND = [
    ("OCI config", b'{"process": "h"}'),
    ("OCI config", b'{"mounts": [{"type": ["rw"]}]}'),
    ("OCI config", b'{"annotations": {"kedge.dev/checkpoint": "yes", "kedge.dev/wait": "%s"}}' % (b"7" * 5000)),
    ("pack", struct.pack("<8sHHI16s", b"KDREC1\n\0", 2, 0, 1, b"") + b"\x05"),
]


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_was_found_before(name: str, data: bytes) -> None:
    target = targets()[name]
    with suppress(*target.refusals):
        target.read(data)
