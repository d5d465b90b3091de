"""A lease is renewed while its holder works, whatever one renewal comes to."""

from __future__ import annotations

import threading

import pytest

import kedge
from kedge.errors import LeaseHeld, LeaseLost, Unauthorized, Unavailable
from kedge.model import Lease
from kedge.store.lease import hold
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
