"""`kedge doctor` on stores behind servers."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import kedge
from tests.servers.careless_s3 import careless_s3
from tests.servers.s3 import environment
from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.requires("postgres", "s3")]


def findings(document: Any) -> dict[str, str]:
    return {f"{f['subject']}: {f['what']}": f["status"] for f in document["findings"]}


def test_a_database_and_a_bucket(postgres: Cluster, s3: str, run: Run) -> None:
    url = postgres.empty_database() + "&blobs=s3://kedge/doctor"
    found = answer(run("doctor", "--store", url, "--json", code=7))
    assert [f["subject"] for f in found["findings"] if f["status"] == "bad"] == [
        "durability"
    ]  # tests run with fsync=off
    subjects = [f["subject"] for f in found["findings"]]
    assert subjects.count("latency") == subjects.count("bandwidth") == 2
    assert subjects.count("clocks") == 2
    assert any("of two writers one wins" in text for text in findings(found))
    assert any("there is none yet" in text for text in findings(found))  # it made nothing
    with kedge.open(url) as opened:
        opened.save("a", "b", 1)
        blobs: Any = opened.store.blobs
        assert [m for page in _listed(blobs) for m in page if "/probe/" in m["path"]] == []
    assert any("1 checkpoint" in text for text in findings(answer(run("doctor", "--store", url, "--json", code=7))))


def _listed(blobs: Any) -> Any:
    import obstore

    return obstore.list(blobs.inner.store)


def test_a_store_that_ignores_preconditions_is_refused(
    postgres: Cluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with careless_s3() as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        found = answer(run("doctor", "--store", postgres.empty_database() + "&blobs=s3://b/p", "--json", code=7))
    (bad,) = (f for f in found["findings"] if f["subject"] == "object store")
    assert bad["status"] == "bad"
    assert "ignores preconditions" in bad["what"]


def test_servers_that_are_not_there(run: Run) -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    found = run("doctor", "--store", url, "--json", code=7)
    assert "secret" not in found.output
    assert "bad" in {f["status"] for f in answer(found)["findings"]}


def test_migrate(postgres: Cluster, run: Run, store: Path) -> None:
    url = postgres.empty_database()
    run("list", "a", "--store", url, code=4)
    assert answer(run("migrate", "--store", url, "--json")) | {"store": ""} == {"store": "", "from": 0, "to": 1}
    assert "already" in run("migrate", "--store", url).stdout
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("UPDATE kedge.meta SET value = '99' WHERE key = 'format'")
    run("migrate", "--store", url, code=8)
    assert "none → 1" in run("migrate").stdout
    assert (store / "kedge-store").exists()
    assert "already" in run("migrate").stdout
