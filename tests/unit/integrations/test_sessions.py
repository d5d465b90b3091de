"""Sessions by the protocol of the OpenAI Agents SDK, as documented: the package itself is not needed."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.integrations.sessions import KedgeSession
from kedge.integrations.threads import Threads


@pytest.fixture
def session(tmp_path: Path) -> Iterator[KedgeSession]:
    with KedgeSession("customer-7", tmp_path / "store") as opened:
        yield opened


def said(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"message {number}"}


def test_items_are_added_popped_and_cleared(session: KedgeSession, tmp_path: Path) -> None:
    async def talk() -> None:
        assert await session.get_items() == []
        assert await session.pop_item() is None
        await session.add_items([said(1), said(2)])
        await session.add_items([said(3)])
        assert await session.get_items(limit=2) == [said(2), said(3)]
        assert await session.get_items(limit=0) == []
        assert await session.pop_item() == said(3)
        async with KedgeSession("customer-7", tmp_path / "store") as another_process:
            assert await another_process.get_items() == [said(1), said(2)]
        await session.clear_session()
        assert await session.get_items() == []

    asyncio.run(talk())
    steps = [checkpoint.step for checkpoint in session.manager.list("session:customer-7")]
    assert steps == ["add", "add", "pop", "clear"], "the history of a session is that of its job"


def test_an_item_added_twice_is_there_twice(session: KedgeSession) -> None:
    async def talk() -> list[Any]:
        for _ in range(2):
            await session.add_items([said(1)])
        return await session.get_items()

    assert asyncio.run(talk()) == [said(1), said(1)]


def test_nothing_is_lost_when_several_add_at_once(tmp_path: Path) -> None:
    def add(who: int) -> None:
        with KedgeSession("s", tmp_path / "store") as session:
            for n in range(5):
                asyncio.run(session.add_items([said(100 * who + n)]))

    with ThreadPoolExecutor(4) as pool:
        for added in [pool.submit(add, who) for who in range(4)]:
            added.result()
    with KedgeSession("s", tmp_path / "store") as session:
        numbers = [int(item["content"].split()[1]) for item in session.messages()]
    assert sorted(numbers) == [100 * who + n for who in range(4) for n in range(5)]
    assert [n for n in numbers if n < 100] == [0, 1, 2, 3, 4], "each in its order"


def test_sessions_are_apart_and_bad_input_changes_nothing(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as manager:
        one, other = KedgeSession("1", manager), KedgeSession("2", manager)
        one.replace([said(1)])
        assert other.messages() == []
        with pytest.raises(kedge.Validation):
            KedgeSession("a b/..", manager)
        with pytest.raises(kedge.Validation):
            one.messages(limit=-1)
        with pytest.raises(kedge.UnsupportedType):
            asyncio.run(one.add_items([object()]))
        assert one.messages() == [said(1)]


def test_the_same_change_by_two_at_once_is_made_twice(tmp_path: Path) -> None:
    """Both read the same state and add the same message: neither is taken for a repetition of the other."""
    with Threads(tmp_path / "store") as first, Threads(tmp_path / "store") as second:

        def added(before: dict[str, Any]) -> dict[str, Any]:
            return {"items": [*before.get("items", []), "message"]}

        def add_behind_another(before: dict[str, Any]) -> dict[str, Any]:
            if not before:
                second.change("thread", "add", added)
            return added(before)

        first.change("thread", "add", add_behind_another)
        assert first.read("thread")["items"] == ["message", "message"]


def test_a_session_goes_on_although_its_newest_checkpoint_is_damaged(session: KedgeSession) -> None:
    for n in (1, 2):
        session.replace([said(n)])
    manager, calls = session.manager, 0
    manager.set_status(manager.list(session.job)[-1].id, "corrupted")

    def change(before: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        assert calls == 1, "the same state again and again"
        return {"items": [*before["items"], said(3)]}

    with pytest.warns(UserWarning, match="damaged"):
        session.change(session.job, "add", change)
    assert session.messages() == [said(1), said(3)]
    session.replace([said(4)])
    assert session.messages() == [said(4)]


def test_a_thread_that_is_deleted_during_a_change_does_not_come_back(tmp_path: Path) -> None:
    with Threads(tmp_path) as threads:
        threads.change("thread", "begin", lambda _: {"items": ["a"]})
        seen: list[dict[str, Any]] = []

        def change(before: dict[str, Any]) -> dict[str, Any] | None:
            if not seen:
                threads.manager.delete_job("thread")
            seen.append(before)
            return {"items": [*before["items"], "b"]} if before else None

        assert threads.change("thread", "add", change) == {}
        assert [before.get("items") for before in seen] == [["a"], None]
        assert threads.read("thread") == {}
