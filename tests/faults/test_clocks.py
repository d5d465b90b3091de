"""I4: clocks only decorate. Order, latest, retention and leases do not care what time it is said to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge import RetentionPolicy
from tests.waiting import wait_for

pytestmark = [pytest.mark.faults, pytest.mark.requires("faketime")]

BACKWARDS, AHEAD, FROZEN = "-2y", "+1y", "2020-02-29 12:00:00"


def at(clock: str, place: str, code: str) -> object:
    """Run code with `store` open in a process whose wall clock is moved; answers what it assigned to `answer`."""
    program = f"import kedge, json, time\nstore = kedge.open({place!r})\nanswer = None\n{code}\n"
    program += "print(json.dumps(answer))"
    done = subprocess.run(
        ["faketime", "-f", clock, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        # The boot clock runs on, as on a machine whose time somebody sets.
        env={**os.environ, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def test_the_tool_moves_the_clock(place: str) -> None:
    years = [at(clock, place, "answer = time.gmtime().tm_year") for clock in (BACKWARDS, AHEAD)]
    assert years[1] - years[0] == 3  # type: ignore[operator]
    assert at(FROZEN, place, "a = time.time(); sum(range(10**6)); answer = time.time() - a") == 0  # clock: it stands


def test_order_and_latest_follow_the_sequence(place: str) -> None:
    ids = []
    for n, clock in enumerate([AHEAD, BACKWARDS, FROZEN, "+0", BACKWARDS]):
        ids.append(at(clock, place, f"answer = store.save('job', 'step', {n})"))
        assert at(AHEAD, place, "answer = store.load_latest('job')[1]") == n
    with kedge.open(place) as store:
        listed = store.list("job")
        assert [c.id for c in listed] == ids
        assert [c.seq for c in listed] == [1, 2, 3, 4, 5]
        assert store.restore("job") == 4
        times = [c.created_at for c in listed]
        assert times != sorted(times)  # the clocks really were wrong
        assert [e.id for e in store.events()] == sorted(e.id for e in store.events())
        assert store.verify().is_ok


def test_a_frozen_clock_gives_every_save_its_own_id(place: str) -> None:
    saved = at(FROZEN, place, "answer = [store.save('job', 's', n) for n in range(300)]")
    assert isinstance(saved, list)
    assert len(set(saved)) == 300
    with kedge.open(place) as store:
        assert [store.load(i) for i in saved[:3]] == [0, 1, 2]
        assert len({c.created_at for c in store.list("job")}) == 1


@pytest.mark.parametrize("clock", [BACKWARDS, FROZEN, AHEAD])
def test_retention_follows_the_sequence(place: str, clock: str) -> None:
    with kedge.open(place) as store:
        ids = [store.save("job", "step", n) for n in range(5)]
    at(clock, place, "store.save('job', 'step', 5); store.save('job', 'step', 6); store.cleanup('job', keep_last=4)")
    with kedge.open(place) as store:
        assert [store.load(c.id) for c in store.list("job")] == [3, 4, 5, 6]
        assert not store.exists(ids[0])
        # A clock that jumped is no reason to let go of history.
        assert store.apply(RetentionPolicy(keep_within="1d"), job="job").delete == ()
    assert at(clock, place, "answer = store.apply(kedge.RetentionPolicy(keep_within='1d'), job='job').frees_bytes") == 0


@pytest.mark.parametrize("clock", [BACKWARDS, FROZEN, AHEAD])
def test_a_lease_is_not_ended_by_a_wrong_clock(place: str, clock: str) -> None:
    attempt = """
try:
    with store.lease('job', ttl_s=60):
        answer = 'taken'
except kedge.LeaseHeld:
    answer = 'held'
"""
    with kedge.open(place) as store:
        with store.lease("job", ttl_s=60) as lease:
            assert at(clock, place, attempt) == "held"
            store.save("job", "mine", 1, lease=lease)
        assert at(clock, place, attempt) == "taken"


@pytest.mark.parametrize("clock", [BACKWARDS, AHEAD])
def test_a_lease_taken_under_a_wrong_clock_ends_in_time(place: str, clock: str) -> None:
    taken = "store.lease('job', ttl_s=0.5).__enter__()"  # lease: its end is waited for
    at(clock, place, f"import os; {taken}; print('null', flush=True); os._exit(0)")
    with kedge.open(place) as store:

        def is_taken() -> bool:
            try:
                with store.lease("job", ttl_s=60) as lease:
                    store.save("job", "mine", 1, lease=lease)
            except kedge.LeaseHeld:
                return False
            return True

        wait_for(is_taken, "the lease of a dead process never ended")
