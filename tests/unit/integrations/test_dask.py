"""`run.map` on a Dask cluster whose workers die."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kedge
from kedge.errors import Validation
from tests.pipeline_work import DieOnce, double, fail_on_odd

if TYPE_CHECKING:
    from distributed import Client

pytestmark = [
    pytest.mark.requires("module:distributed"),
    pytest.mark.xdist_group("dask"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Port .* is already in use"),
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    import logging

    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL) as local,
        Client(local) as client,
    ):
        yield client


def test_a_killed_worker_repeats_nothing_that_was_done(client: Client, tmp_path: Path) -> None:
    work = DieOnce(tmp_path, item=9)
    with kedge.open(tmp_path / "store") as store, kedge.run("r", store=store) as run:
        assert run.map(work, range(24), executor=kedge.dask(client), workers=2) == [2 * n for n in range(24)]
    assert (tmp_path / "died").exists()
    assert work.calls() == list(range(24))  # each was done once: Dask alone does some again
    with kedge.open(tmp_path / "store") as store, kedge.run("r", store=store) as run:
        assert len(run.map(work, range(24), executor=kedge.dask(client))) == 24
    assert len(work.calls()) == 24


class Twice(Executor):
    """Runs each task twice, as Dask does with those that had finished on a worker that died."""

    is_remote = True

    def parallelism(self) -> int:
        return 1

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        fn(*args)
        future.set_result(fn(*args))
        return future

    def death(self, error: BaseException) -> str | None:
        return None


def test_a_task_that_is_run_again_goes_on_behind_what_is_durable(tmp_path: Path) -> None:
    calls: list[int] = []
    with kedge.open(tmp_path / "store") as store, kedge.run("r", store=store) as run:
        assert run.map(lambda n: calls.append(n) or n, range(50), name="m", executor=Twice()) == list(range(50))
    assert sorted(calls) == list(range(50))


@pytest.mark.mutant
def test_a_task_that_does_not_look_what_is_durable_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.pipeline.worker.read_keys", lambda *_: iter(()))
    with pytest.raises(AssertionError):
        test_a_task_that_is_run_again_goes_on_behind_what_is_durable(tmp_path)


def test_failures_and_the_lazy_answer(client: Client, tmp_path: Path) -> None:
    executor = kedge.dask(client)
    with kedge.open(tmp_path / "store") as store, kedge.run("r", store=store) as run:
        assert sorted(run.map(double, range(40), executor=executor, collect=False)) == [2 * n for n in range(40)]
        found = run.map(fail_on_odd, range(4), executor=executor, on_error="collect")
        assert [found[0], found[2]] == [0, 2]
        assert "odd: 1" in found[1].error
        with pytest.raises(ValueError, match="odd"):
            run.map(fail_on_odd, range(4), executor=executor, name="again")


def test_what_is_refused(client: Client) -> None:
    with pytest.raises(Validation, match="no Dask client"):
        kedge.dask("tcp://127.0.0.1:8786")  # type: ignore[arg-type]
    with kedge.run("r", store="memory:") as run, pytest.raises(Validation, match="memory"):
        run.map(double, range(3), executor=kedge.dask(client))
