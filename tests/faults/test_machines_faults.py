"""Short forms of `./dev torture s3_faults database_crashes partitions`."""

from __future__ import annotations

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
    from holdfast.blobs import objects

    real = objects.from_url

    def without(url: str, *, checksum_algorithm: str = "", **options: Any) -> Any:
        return real(url, **options)

    monkeypatch.setattr(objects, "from_url", without)
    with pytest.raises(Violation):
        through_faults(postgres.empty_database(), s3, runs=100, faults=("spoilt request",))


@pytest.mark.requires("postgres", "netns")
def test_a_host_that_was_cut_off_is_refused() -> None:
    from tests.servers.postgres import postgres_cluster

    with postgres_cluster() as cluster:
        assert part_and_refuse(cluster, rounds=5)["stale leases refused"] == 5
        with pytest.raises(Violation, match="stale lease"):
            part_and_refuse(cluster, rounds=1, mutant="lease token not checked by PostgreSQL")
