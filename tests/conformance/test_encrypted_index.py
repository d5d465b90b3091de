"""An index whose rows are sealed keeps the same contract as the one inside it, names hidden or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kedge.index.files.index import FilesIndex, make_folder
from kedge.index.sqlite.index import SqliteIndex
from kedge.ports import Index
from kedge.store.local import LocalStore
from kedge.store.readable_files import view
from kedge.testing.index_suite import IndexSuite
from kedge.urls import Lock, unlock
from tests.parts import require

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

require("module:cryptography")
from kedge.blobs.memory import MemoryBlobs
from kedge.crypto import parse_master

MASTER = parse_master(bytes(range(32)))


def sealed(index: Index, *, hides_names: bool) -> Index:
    return unlock(LocalStore(index, MemoryBlobs()), Lock(MASTER, hides_names), "tester").index


class TestEncryptedSqlite(IndexSuite):
    seals = True

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return sealed(SqliteIndex(str(where / "index.sqlite"), namespace=namespace), hides_names=True)


class TestEncryptedInMemory(IndexSuite):
    is_shared = False
    seals = True

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return sealed(SqliteIndex(None, namespace=namespace), hides_names=False)


class TestEncryptedFiles(IndexSuite):
    many = 60
    seals = True

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        make_folder(where / "store")
        return sealed(FilesIndex(where / "store", namespace=namespace, view=view), hides_names=True)


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
class TestEncryptedPostgres(IndexSuite):
    seals = True

    @pytest.fixture(autouse=True)
    def _database(self, postgres: Cluster) -> None:
        self.url = postgres.empty_database()

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        from kedge.index.postgres.index import PostgresIndex
        from kedge.index.postgres.server import Server

        server = Server(self.url)
        server.migrate()
        return sealed(PostgresIndex(server, namespace=namespace), hides_names=True)
