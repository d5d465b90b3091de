"""Leases wait together until they are due; each that lasts gets a thread of its own then."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

import kedge
from kedge.store import renewal
from kedge.store.lease import Holding, hold, hold_taken
from kedge.store.renewal import Renewals
from tests.waiting import wait_for

NAME = "test-renewal"
LONG_S = 3600


def threads(name: str = NAME) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_each_begins_when_it_is_due_and_none_waits_for_another() -> None:
    renewals, stop, begun = Renewals(), threading.Event(), list[str]()

    def begin(name: str) -> Callable[[], None]:
        def run() -> None:
            begun.append(name)
            stop.wait(60)  # as one whose store does not answer

        return run

    never = renewals.add(begin("never"), NAME, LONG_S)
    late = renewals.add(begin("late"), NAME, 0.2)
    soon = renewals.add(begin("soon"), NAME, 0.01)  # sooner than what is waited for
    wait_for(lambda: len(begun) == 2, "they do not begin")
    assert begun == ["soon", "late"]
    assert len(threads()) == 2
    stop.set()
    for one in (soon, late, never):
        renewals.end(one)
    assert not threads()


def test_what_has_ended_does_not_begin_and_keeps_nothing_alive() -> None:
    class Store:
        def renew(self) -> None:
            begun.append(self)

    renewals, begun = Renewals(), list[Store]()
    stores = [Store() for _ in range(1000)]
    seen = [weakref.ref(store) for store in stores]
    waiting = [renewals.add(store.renew, NAME, LONG_S) for store in stores]
    stores.clear()
    for one in waiting:
        renewals.end(one)
    gc.collect()
    assert not any(store() for store in seen)
    last = renewals.add(lambda: begun.append(Store()), NAME, 0.01)
    renewals.end(renewals.add(lambda: begun.append(Store()), NAME, 0.0))
    wait_for(lambda: begun, "the last one does not begin")
    renewals.end(last)


def test_those_that_end_early_are_forgotten_early() -> None:
    renewals = Renewals()
    lasting = [renewals.add(lambda: None, NAME, LONG_S) for _ in range(500)]
    for _ in range(5000):
        assert renewals.add(lambda: None, NAME, LONG_S).drop()
    assert len(renewals._coming) <= 2 * len(lasting)
    for one in lasting:
        renewals.end(one)


def test_the_thread_that_waits_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewal, "_IDLE_S", 0.01)
    renewals = Renewals()
    for _ in range(3):
        is_begun = threading.Event()
        renewals.end(renewals.add(is_begun.set, NAME, LONG_S))
        renewals.add(is_begun.set, NAME, 0.01)
        assert is_begun.wait(60)
        wait_for(lambda: not renewals._is_watched, "it does not end")


def test_a_thread_that_is_not_given_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, list[int]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == NAME and len(refused) < 2:
            refused.append(1)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    is_begun = threading.Event()
    Renewals().add(is_begun.set, NAME, 0.0)
    assert is_begun.wait(60)
    assert len(refused) == 2


def test_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own leases are renewed; one that its parent holds ends there, whoever waited for what when it forked."""
    with kedge.open("memory:") as store:
        take = partial(store.take_lease, "parent", "parent", 60)
        with hold_taken(store.catalogue, take) as holding, renewal.renewals()._changed:
            child = os.fork()
            if not child:
                status = 1
                try:
                    signal.alarm(60)
                    status = 0 if is_renewed_in_child(store, holding, monkeypatch) else 1
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_renewed_in_child(store: kedge.CheckpointManager, inherited: Holding, monkeypatch: pytest.MonkeyPatch) -> bool:
    inherited.end()
    is_renewed = threading.Event()
    monkeypatch.setattr(store.catalogue, "renew_lease", lambda _: is_renewed.set())
    with hold(store.catalogue, "child", ttl_s=0.1):  # lease: nobody else wants it when it ends
        return is_renewed.wait(60)
