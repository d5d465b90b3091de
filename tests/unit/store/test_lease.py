"""A lease is renewed while its holder works, whatever one renewal comes to."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import LeaseHeld, LeaseLost, Unauthorized, Unavailable, Validation
from kedge.model import Lease
from kedge.store.lease import hold
from kedge.store.request import Request
from tests.waiting import wait_for

REFUSALS = [Unavailable("no answer"), Unauthorized("the token has expired"), MemoryError(), RuntimeError("no thread")]
JOB = "renewed"


def is_renewing() -> bool:
    return any(thread.name == f"kedge-lease-{JOB}" for thread in threading.enumerate())


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_renewal_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    refusals, renewed = [error, error], threading.Event()
    with kedge.open("memory:") as store:

        def renew(_: Lease) -> None:
            if refusals:
                raise refusals.pop()
            renewed.set()

        monkeypatch.setattr(store.catalogue, "renew_lease", renew)
        with hold(store.catalogue, JOB, ttl_s=0.1):  # lease: nobody else wants it when it ends
            wait_for(renewed.is_set, "nobody renews it any more")
    assert refusals == []


def test_nobody_renews_what_was_lost_or_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: Lease) -> None:
        raise LeaseLost("somebody else has it")

    with kedge.open("memory:") as store:
        with hold(store.catalogue, JOB, ttl_s=60):
            assert not is_renewing()  # it is not due yet
            with pytest.raises(LeaseHeld):
                store.take_lease(JOB, "other", 60)
        with hold(store.catalogue, JOB, ttl_s=0.1):  # lease: nobody else wants it when it ends
            wait_for(is_renewing, "nobody renews it")
        assert not is_renewing()
        store.break_lease(store.take_lease(JOB, "other", 60))
        monkeypatch.setattr(store.catalogue, "renew_lease", lost)
        with hold(store.catalogue, JOB, ttl_s=0.1):  # lease: nobody else wants it when it ends
            wait_for(lambda: not is_renewing(), "it is still renewed")


@pytest.mark.parametrize("nonsense", [None, 1, "token", {}], ids=repr)
def test_only_a_lease_is_renewed_or_given_back(nonsense: Any) -> None:
    with kedge.open("memory:") as store:
        for call in (store.renew_lease, store.break_lease):
            with pytest.raises(Validation, match="lease="):
                call(nonsense)


def test_the_lease_of_another_job_gives_no_right_to_write(tmp_path: Path) -> None:
    """Tokens count the leases of one job: the first of any other job has the same (I5)."""
    with kedge.open(tmp_path / "store") as store:
        source = store.save("mine", "step", 1)
        mine, theirs = store.take_lease("mine", "me", 60), store.take_lease("theirs", "somebody", 60)
        assert mine.token == theirs.token
        for write in (
            lambda: store.save("theirs", "step", 2, lease=mine),
            lambda: store.save_async("theirs", "step", 2, lease=mine).result(),
            lambda: store.resume_from(source, "theirs", lease=mine),
            lambda: store.save_request(Request("theirs", "step", lease=mine), 2),
        ):
            with pytest.raises(Validation, match="is for job mine, not theirs"):
                write()
        assert store.list("theirs") == []
