"""Timers in the images: those that expired while frozen are armed again, and no others."""

from pathlib import Path

import pytest

from kedge.containers.criu.image_files import Directory
from kedge.containers.criu.images import records
from kedge.containers.criu.timers import arm_periodic
from kedge.containers.protobuf import encode
from kedge.errors import Corrupted
from tests.unit.containers.criu_writer import image


def timer(
    identity: int, *, ticks: int, next_at: tuple[int, int], period: tuple[int, int]
) -> list[tuple[int, int | bytes]]:
    times = zip((7, 8, 9, 10), (*next_at, *period), strict=True)
    entry = encode([(1, identity), (2, 2), (3, encode([(1, 0)])), (4, 1), (5, ticks), (6, 0), *times])
    return [(1, 17), (2, identity), (12, entry)]


def test_what_expired_fires_again(tmp_path: Path) -> None:
    cases = [
        (1, 3, (0, 0), (0, 50_000_000), (0, 50_000_000)),  # expired, periodic
        (2, 3, (0, 20), (0, 50_000_000), (0, 20)),  # armed
        (3, 1, (0, 0), (0, 0), (0, 0)),  # expired, once
        (4, 0, (0, 0), (5, 0), (0, 0)),  # disarmed
    ]
    file = [(1, 1), (2, 9), (3, encode([(1, 9), (2, 0), (6, "/x")]))]
    timers = [timer(n, ticks=ticks, next_at=next_at, period=period) for n, ticks, next_at, period, _ in cases]
    (tmp_path / "files.img").write_bytes(image("files", [file, *timers]))
    assert arm_periodic(tmp_path) == 1
    first, *found = records(Directory(tmp_path), "files.img", "files")
    assert first.message(3).text(6) == "/x"
    for (identity, ticks, _, period, expected), record in zip(cases, found, strict=True):
        entry = record.message(12)
        assert (entry.number(1), entry.number(5), entry.number(4)) == (identity, ticks, 1)
        assert (entry.number(7), entry.number(8)) == expected
        assert (entry.number(9), entry.number(10)) == period
        assert entry.message(3).number(1) == 0
    before = (tmp_path / "files.img").read_bytes()
    assert arm_periodic(tmp_path) == 0
    assert (tmp_path / "files.img").read_bytes() == before


def test_images_without_files_or_damaged(tmp_path: Path) -> None:
    assert arm_periodic(tmp_path) == 0
    (tmp_path / "files.img").write_bytes(image("files", [timer(1, ticks=1, next_at=(0, 0), period=(1, 0))])[:-3])
    with pytest.raises(Corrupted):
        arm_periodic(tmp_path)
