"""Every adapter of `ports.Blobs` keeps the port's contract."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kedge.blobs.memory import MemoryBlobs
from kedge.blobs.packs import PackBlobs
from kedge.blobs.retries import RetryingBlobs
from kedge.ports import Blobs
from kedge.testing.blobs_suite import BlobsSuite
from kedge.testing.faults import Plan, inject
from tests.parts import lack

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster


class TestPackBlobs(BlobsSuite):
    def open_blobs(self, where: Path) -> Blobs:
        return PackBlobs(str(where / "packs"))


class TestPackBlobsThroughThePageCache(BlobsSuite):
    def open_blobs(self, where: Path) -> Blobs:
        return PackBlobs(str(where / "packs"), direct=False)


class TestPackBlobsThatRollOften(BlobsSuite):
    def open_blobs(self, where: Path) -> Blobs:
        return PackBlobs(str(where / "packs"), roll_bytes=100_000)


class TestPackBlobsOnTmpfs(BlobsSuite):
    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        if not Path("/dev/shm").is_dir():
            lack("tmpfs", "no /dev/shm")
        folder = tempfile.mkdtemp(dir="/dev/shm")
        yield Path(folder)
        shutil.rmtree(folder)

    def open_blobs(self, where: Path) -> Blobs:
        return PackBlobs(str(where / "packs"))


class TestMemoryBlobs(BlobsSuite):
    @pytest.fixture(autouse=True)
    def _storage(self) -> None:
        self.storage = MemoryBlobs()  # what one object holds is all there is

    def open_blobs(self, where: Path) -> Blobs:
        return self.storage


class TestInjectedBlobsWithoutFaults(BlobsSuite):
    def open_blobs(self, where: Path) -> Blobs:
        return inject(PackBlobs(str(where / "packs")), Plan())


class TestRetryingBlobsWithoutFaults(BlobsSuite):
    def open_blobs(self, where: Path) -> Blobs:
        return RetryingBlobs(PackBlobs(str(where / "packs")))


@pytest.mark.requires("module:obstore")
class TestObjectBlobsInMemory(BlobsSuite):
    shows_unfinished = False
    counts_removals = False

    @pytest.fixture(autouse=True)
    def _storage(self) -> None:
        from obstore.store import MemoryStore

        self.storage = MemoryStore()

    def open_blobs(self, where: Path) -> Blobs:
        from kedge.blobs.objects import ObjectBlobs

        return ObjectBlobs(self.storage, "some/prefix")


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
class TestPostgresBlobs(BlobsSuite):
    shows_unfinished = False

    @pytest.fixture(autouse=True)
    def _database(self, postgres: Cluster) -> Iterator[None]:
        from kedge.index.postgres.server import Server

        self.server = Server(postgres.empty_database())
        self.server.migrate()
        yield
        self.server.close()

    def open_blobs(self, where: Path) -> Blobs:
        from kedge.blobs.postgres import PostgresBlobs

        return PostgresBlobs(self.server)


@pytest.mark.xdist_group("s3")
@pytest.mark.requires("s3")
class TestObjectBlobsOnS3(BlobsSuite):
    shows_unfinished = False
    counts_removals = False
    races = 2  # SeaweedFS takes a second for each

    @pytest.fixture(autouse=True)
    def _storage(self, s3: str) -> None:
        self.address = s3

    def open_blobs(self, where: Path) -> Blobs:
        from kedge.blobs.objects import connect

        return RetryingBlobs(connect(f"s3://kedge/{where.name}"))
