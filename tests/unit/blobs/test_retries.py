"""What is tried again, how often, and what is not."""

import time

import pytest

from kedge.blobs.backoff import Backoff
from kedge.blobs.memory import MemoryBlobs
from kedge.blobs.retries import RetryingBlobs
from kedge.errors import Corrupted, NotFound, StorageError, Unavailable
from kedge.testing.faults import Fault, Plan, inject

AT_ONCE = Backoff(attempts=4, first_s=0.0)
BUSY = Unavailable("busy")


def retrying(*faults: Fault) -> tuple[RetryingBlobs, Plan]:
    plan = Plan(*faults)
    return RetryingBlobs(inject(MemoryBlobs(), plan), AT_ONCE), plan


@pytest.mark.parametrize("method", ["writer", "append", "commit", "read_into", "packs", "remove", "scan", "release"])
def test_what_is_unavailable_is_asked_again(method: str) -> None:
    blobs, plan = retrying(Fault(method, until=3, error=BUSY))
    writer = blobs.writer(4)
    pack, offset = writer.append(b"data")
    writer.commit()
    found = bytearray(4)
    blobs.read_into(pack, offset, memoryview(found))
    assert found == b"data"
    assert [name for name, _ in blobs.packs()] == [pack]
    assert list(blobs.scan(pack, b"da")) == [offset]
    writer.release()
    assert blobs.remove(pack, lambda: True)
    assert len(plan.struck) == 3


def test_patience_ends() -> None:
    blobs, plan = retrying(Fault("read_into", until=99, error=BUSY))
    with pytest.raises(Unavailable):
        blobs.read_into("x", 0, memoryview(bytearray(1)))
    assert plan.calls["read_into"] == AT_ONCE.attempts


@pytest.mark.parametrize("error", [NotFound("no"), Corrupted("bad"), StorageError("broken"), ValueError("bug")])
def test_nothing_else_is_asked_again(error: Exception) -> None:
    blobs, plan = retrying(Fault("read_into", until=99, error=error))
    with pytest.raises(type(error)):
        blobs.read_into("x", 0, memoryview(bytearray(1)))
    assert plan.calls["read_into"] == 1


def test_a_scan_goes_on_where_it_was() -> None:
    class Stuttering(MemoryBlobs):
        failures = 2

        def scan(self, pack: str, magic: bytes):  # type: ignore[no-untyped-def]
            for offset in super().scan(pack, magic):
                yield offset
                if self.failures:
                    self.failures -= 1
                    raise BUSY

    blobs = RetryingBlobs(Stuttering(), AT_ONCE)
    writer = blobs.writer(0)
    places = [writer.append(b"magic") for _ in range(5)]
    assert list(blobs.scan(places[0][0], b"magic")) == [offset for _, offset in places]


def test_pauses_grow_are_drawn_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    blobs = RetryingBlobs(
        inject(MemoryBlobs(), Plan(Fault("seal", until=999, error=BUSY))), Backoff(12, first_s=1.0, most_s=8.0)
    )
    for _ in range(30):
        with pytest.raises(Unavailable):
            blobs.seal()
    by_turn = [pauses[n::11] for n in range(11)]
    for n, turn in enumerate(by_turn):
        most_s = min(8.0, 2.0**n)
        assert most_s / 2 <= min(turn) <= max(turn) <= most_s
    assert len(set(pauses)) == len(pauses)


def test_a_server_that_restarts_has_nine_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the dice fall."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for _ in range(30):
        pauses.clear()
        blobs = RetryingBlobs(inject(MemoryBlobs(), Plan(Fault("seal", until=999, error=BUSY))))
        with pytest.raises(Unavailable):
            blobs.seal()
        assert 9 <= sum(pauses) <= 18.3
