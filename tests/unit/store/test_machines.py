"""PostgreSQL and S3 together: what many machines share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import kedge
from kedge.care.copy import CopyReport
from tests.unit.care.test_copy import fill, same

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres", "s3")]


def test_a_store_of_a_database_and_a_bucket(postgres: Cluster, s3: str) -> None:
    url = postgres.empty_database() + "&blobs=s3://kedge/machines"
    weights = np.arange(3_000_000, dtype="f8")
    with kedge.open(url) as one, kedge.open(url) as two:
        first = one.save("training", "epoch 1", {"w": weights, "epoch": 1})
        weights[5] = -1
        one.save("training", "epoch 2", {"w": weights, "epoch": 2})
        found = two.load_latest("training")
        assert found is not None
        assert found[1]["epoch"] == 2  # type: ignore[index]
        assert np.array_equal(found[1]["w"], weights)  # type: ignore[index]
        assert two.get(found[0].id).stored_bytes < 2_000_000  # one chunk of 23 changed
        two.delete("training", first)
        report = two.gc()
        assert report.chunks_removed == 1
        assert one.verify().is_ok
        assert np.array_equal(one.restore("training")["w"], weights)  # type: ignore[index]
        two.delete("training", found[0].id)
        assert two.gc().packs_kept == 0


def test_a_store_goes_to_a_database_and_back(postgres: Cluster, s3: str, tmp_path: Path) -> None:
    url = postgres.empty_database() + "&blobs=s3://kedge/copies"
    with kedge.open(tmp_path / "here") as here, kedge.open(url) as there, kedge.open(tmp_path / "b") as back:
        ids = fill(here)
        assert here.copy_to(there).copied == 4
        same(here, there)
        assert here.copy_to(there) == CopyReport(present=4)
        assert there.copy_to(back).copied == 4
        same(here, back)
        here.tag(ids[0], seen="yes")
        assert here.copy_to(there, mirror=True).changed == 1
