"""Short forms of `./dev torture s3_faults database_crashes partitions indexed_job`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers.fault_proxy import HARSH
from tests.torture.ledger import Violation
from tests.torture.partitions import part_and_refuse
from tests.torture.s3_faults import through_faults

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("postgres")]


@pytest.mark.requires("postgres", "s3")
def test_a_store_through_faults(postgres: Cluster, s3: str) -> None:
    numbers = through_faults(postgres.empty_database(), s3, runs=25)
    assert numbers["runs"] == 25
    assert all(numbers[fault] for fault in HARSH), numbers


@pytest.mark.mutant
@pytest.mark.requires("postgres", "s3")
def test_puts_without_a_checksum_are_noticed(postgres: Cluster, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.blobs import objects

    real = objects.from_url

    def without(url: str, *, checksum_algorithm: str = "", **options: Any) -> Any:
        return real(url, **options)

    monkeypatch.setattr(objects, "from_url", without)
    with pytest.raises(Violation):
        through_faults(postgres.empty_database(), s3, runs=100, faults=("spoilt request",))


@pytest.fixture(scope="module")
def networked() -> Iterator[Cluster]:
    """A server of its own, which is made to listen to hosts."""
    from tests.servers.postgres import postgres_cluster

    with postgres_cluster() as cluster:
        yield cluster


@pytest.mark.requires("postgres", "netns")
def test_a_host_that_was_cut_off_is_refused(networked: Cluster) -> None:
    assert part_and_refuse(networked, rounds=5)["stale leases refused"] == 5
    with pytest.raises(Violation, match="stale lease"):
        part_and_refuse(networked, rounds=1, mutant="lease token not checked by PostgreSQL")


@pytest.mark.requires("postgres", "netns", "module:yaml")
def test_the_pods_of_an_indexed_job(networked: Cluster, tmp_path: Path) -> None:
    from tests.torture.indexed_job import held, run_job

    go = tmp_path / "go"
    done = run_job(networked, tmp_path, pods=3, items=18, kills=2, app=held(tmp_path, go), go=go)
    assert (done["killed"], done["started"]) == (2, 5)
    assert done["pods that kept items"] > 1


@pytest.mark.mutant
@pytest.mark.requires("postgres", "netns", "module:yaml")
def test_pods_that_do_not_look_are_noticed(networked: Cluster, tmp_path: Path) -> None:
    from tests.torture.indexed_job import CARELESS, held, run_job

    go = tmp_path / "go"
    with pytest.raises(Violation):
        run_job(networked, tmp_path, pods=2, items=40, kills=0, app=held(tmp_path, go, CARELESS), go=go)
