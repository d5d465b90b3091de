"""A save that was refused does not come back when an index is rebuilt from packs (I5)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import kedge
from kedge.care.repair import repair
from kedge.care.repair_files import refile
from kedge.store.chunk_writer import ChunkWriter

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

LARGE = 300_000  # goes to a pack, with a record

Refused = Callable[[kedge.CheckpointManager], None]


def fenced(store: kedge.CheckpointManager) -> None:
    """A worker whose lease another one took over goes on."""
    lease = store.catalogue.acquire_lease("job", "first", 30)
    store.catalogue.release_lease(lease)
    later = store.catalogue.acquire_lease("job", "second", 30)
    with pytest.raises(kedge.LeaseLost):
        store.save("job", "refused", os.urandom(LARGE), lease=lease)
    store.catalogue.release_lease(later)


def of_a_leased_job(store: kedge.CheckpointManager) -> None:
    lease = store.catalogue.acquire_lease("job", "another", 30)
    with pytest.raises(kedge.LeaseHeld):
        store.save("job", "refused", os.urandom(LARGE))
    store.catalogue.release_lease(lease)


def without_its_parent(store: kedge.CheckpointManager) -> None:
    with pytest.raises(kedge.NotFound):
        store.save("job", "refused", os.urandom(LARGE), parent="gone_1700000000_00000000")


def under_a_used_key(store: kedge.CheckpointManager) -> None:
    with pytest.raises(kedge.Conflict):
        store.save("job", "refused", os.urandom(LARGE), idempotency_key="once")


REFUSALS: list[Refused] = [fenced, of_a_leased_job, without_its_parent, under_a_used_key]
PLACES = ["file", "files", pytest.param("postgresql", marks=pytest.mark.requires("postgres", "s3"))]

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("postgres")]


class Drill:
    """A store, and how its index is lost and rebuilt."""

    def __init__(self, kind: str, folder: Path, request: pytest.FixtureRequest) -> None:
        self.kind = kind
        self.folder = folder / "store"
        if kind == "postgresql":
            self._cluster: Cluster = request.getfixturevalue("postgres")
            request.getfixturevalue("s3")
            self._bucket = f"&blobs=s3://kedge/{folder.name}"
            self.url = self._cluster.empty_database() + self._bucket
        else:
            self.url = f"{kind}:{self.folder}"

    def rebuild(self) -> None:
        if self.kind == "file":
            for file in self.folder.glob("index.sqlite*"):
                file.unlink()
            repair(self.folder, actor="test")
        elif self.kind == "files":
            for path in self.folder.iterdir():
                if path.name != ".kedge":
                    shutil.rmtree(path)
            (self.folder / ".kedge" / "journal").unlink()
            refile(self.folder, actor="test")
        else:
            from kedge.urls import take_over

            self.url = self._cluster.empty_database() + self._bucket
            take_over(self.url)
            with kedge.open(self.url) as store:
                store.rebuild()


@pytest.fixture(params=PLACES)
def drill(request: pytest.FixtureRequest, tmp_path: Path) -> Drill:
    return Drill(request.param, tmp_path, request)


def look(drill: Drill, refused: Refused) -> None:
    before, after = os.urandom(LARGE), os.urandom(LARGE)
    with kedge.open(drill.url) as store:
        ids = [store.save("job", "before", before, idempotency_key="once")]
        refused(store)
        ids.append(store.save("job", "after", after))
    drill.rebuild()
    with kedge.open(drill.url) as store:
        assert [(c.id, c.step) for c in store.list("job")] == list(zip(ids, ["before", "after"], strict=True))
        assert [store.load(i) for i in ids] == [before, after]
        assert store.verify(deep=True).problems == ()


@pytest.mark.parametrize("refused", REFUSALS)
def test_a_refused_save_stays_refused(drill: Drill, refused: Refused) -> None:
    look(drill, refused)


@pytest.mark.mutant
@pytest.mark.parametrize("refused", REFUSALS)
def test_a_record_that_stays_is_noticed(tmp_path: Path, request: pytest.FixtureRequest, refused: Refused) -> None:
    def keep(self: Any) -> None:
        self.release()

    with mock.patch.object(ChunkWriter, "withdraw", keep), pytest.raises(AssertionError):
        look(Drill("file", tmp_path, request), refused)
