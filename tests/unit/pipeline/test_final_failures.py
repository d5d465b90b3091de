"""A failure that the pipeline handled stays failed, across kills; one that ended the run is tried again."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager
from kedge.pipeline.final_failures import retry_failed
from kedge.pipeline.history import explain, find_run


class CardError(Exception):
    """As vendors write them: it cannot be pickled, and its text is made by the constructor."""

    def __init__(self, code: str, *, amount: int) -> None:
        super().__init__(f"card refused: {code}")
        self.code = code
        self.amount = amount


REFUSED = "card refused: expired, expired, 3"


class Killed(BaseException):
    """The process ends here."""


class Bank:
    """Refuses the first charge and would accept the second."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def reserve(self) -> str:
        self.log.append("reserve")
        return "seat 7"

    def charge(self) -> str:
        self.log.append("charge")
        if self.log.count("charge") == 1:
            raise CardError("expired", amount=3)
        return "paid"

    def release(self, *, dies: bool = False) -> None:
        self.log.append("release")
        if dies:
            raise Killed


@pytest.fixture
def store() -> Iterator[CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


def book(store: CheckpointManager, bank: Bank, *, dies: bool = False, raises: bool = False) -> str:
    with kedge.run("booking", store=store) as run:
        run.step("reserve", bank.reserve)
        try:
            run.step("charge", bank.charge)
        except CardError as error:
            run.step("release", bank.release, dies=dies, inputs=None)
            if raises:
                raise
            return f"{error}, {error.code}, {error.amount}"
        return "booked"


def kill(store: CheckpointManager, bank: Bank, **options: Any) -> None:
    with pytest.raises(Killed):
        book(store, bank, dies=True, **options)


def test_a_handled_failure_is_raised_again_after_a_kill(store: CheckpointManager) -> None:
    bank = Bank()
    kill(store, bank)
    assert book(store, bank) == book(store, bank) == REFUSED
    assert bank.log == ["reserve", "charge", "release", "release"]
    (charge,) = [step for step in explain(store, "booking") if step.path == "charge"]
    assert charge.verdict == "failed"
    assert "the failure is kept" in charge.reason


def test_compensating_and_raising_on_is_handling_too(store: CheckpointManager) -> None:
    bank = Bank()
    for _ in range(3):
        with pytest.raises(CardError):
            book(store, bank, raises=True)
    assert bank.log == ["reserve", "charge", "release"]


def test_a_kept_failure_is_tried_again_when_somebody_asks(store: CheckpointManager) -> None:
    bank = Bank()
    assert book(store, bank) == REFUSED
    with pytest.raises(kedge.NotFound, match="no failure of step reserve"):
        retry_failed(store, "booking", ["reserve"])
    assert retry_failed(store, "booking", ["charge"]) == ["charge"]
    assert book(store, bank) == "booked"
    assert bank.log == ["reserve", "charge", "release", "charge"]
    assert retry_failed(store, "booking") == []


def test_a_failure_that_ended_the_run_is_tried_again(store: CheckpointManager) -> None:
    calls: list[str] = []

    def flaky() -> int:
        calls.append("flaky")
        if len(calls) == 1:
            raise OSError(2, "no file", "rows.csv")
        return 1

    def pipeline() -> Any:
        with kedge.run("r", store=store) as run:
            return run.step("outer", lambda: run.step("flaky", flaky))

    with pytest.raises(OSError, match=r"rows\.csv"):
        pipeline()
    with pytest.raises(Killed), kedge.run("r", store=store):
        raise Killed  # before it came to the step: what is to be tried again is not forgotten
    assert pipeline() == 1
    assert calls == ["flaky", "flaky"]


def test_steps_of_others_that_go_on_beside_a_failure_do_not_handle_it(store: CheckpointManager) -> None:
    calls: list[int] = []

    async def fetch(number: int) -> int:
        calls.append(number)
        if number == 0 and calls.count(0) == 1:
            raise ValueError("first time")
        return number

    async def pipeline() -> list[int]:
        async with kedge.run("r", store=store) as run:
            first = asyncio.Event()

            async def one(number: int) -> Any:
                if number:
                    await first.wait()  # these begin after the failure
                try:
                    return await run.step(f"fetch {number}", fetch, number)
                finally:
                    first.set()

            tasks = [asyncio.ensure_future(one(number)) for number in range(3)]
            await asyncio.wait(tasks)
            return [task.result() for task in tasks]

    with pytest.raises(ValueError, match="first time"):
        asyncio.run(pipeline())
    assert asyncio.run(pipeline()) == [0, 1, 2]
    assert sorted(calls) == [0, 0, 1, 2]


def test_threads_go_on_beside_a_failure(store: CheckpointManager) -> None:
    calls: list[int] = []

    def fetch(number: int) -> int:
        calls.append(number)
        if number == 0 and calls.count(0) == 1:
            raise ValueError("first time")
        return number

    def pipeline() -> list[int]:
        with kedge.run("r", store=store) as run, ThreadPoolExecutor(1) as pool:
            futures = [pool.submit(run.step, f"fetch {number}", fetch, number) for number in range(3)]
            return [future.result() for future in futures]

    with pytest.raises(ValueError, match="first time"):
        pipeline()
    assert pipeline() == [0, 1, 2]


def test_a_step_that_handles_a_failure_inside_itself_does_so_again(store: CheckpointManager) -> None:
    bank = Bank()
    attempts: list[int] = []

    def outer(run: kedge.Run) -> str:
        attempts.append(1)
        try:
            run.step("charge", bank.charge)
        except CardError:
            run.step("release", bank.release)
        if len(attempts) == 1:
            raise OSError("later")
        return "refused"

    with kedge.run("r", store=store) as run:
        assert run.step("outer", outer, run, inputs=None, retries=kedge.Retry(times=1, delay_s=0)) == "refused"
    assert bank.log == ["charge", "release"]


def test_failed_items_of_a_map_are_tried_again_with_the_steps_inside(store: CheckpointManager) -> None:
    calls: list[str] = []

    def charge() -> str:
        calls.append("charge")
        if len(calls) == 1:
            raise OSError("first time")
        return "paid"

    def pipeline() -> Any:
        with kedge.run("r", store=store) as run:
            return run.map(lambda _: run.step("charge", charge), [1], name="m", on_error="collect")

    (failed,) = pipeline()
    assert isinstance(failed, kedge.ItemError)
    assert find_run(store, "r").status == "completed"
    assert pipeline() == ["paid"]


def test_an_item_error_may_be_an_input_and_a_result(store: CheckpointManager) -> None:
    def work(item: int) -> int:
        if item:
            raise CardError("expired", amount=item)
        return item

    def report(results: list[Any]) -> list[Any]:
        return results[::-1]

    for _ in range(2):
        with kedge.run("r", store=store) as run:
            results = run.map(work, [0, 1], key=str, on_error="collect", name="m")
            error, _ = run.step("report", report, results, inputs=[type(result).__name__ for result in results])
            assert (error.key, error.error) == ("1", "CardError: card refused: expired")
            assert isinstance(error.exception, CardError)
            assert error.exception.amount == 1
    with kedge.run("s", store=store) as run:
        assert run.step("count", len, results) == 2
