"""Every adapter of `ports.Index` keeps the port's contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kedge.index.files.index import FilesIndex, make_folder
from kedge.index.sqlite.index import SqliteIndex
from kedge.ports import Index
from kedge.testing.index_suite import IndexSuite

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster


class TestSqliteIndex(IndexSuite):
    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return SqliteIndex(str(where / "index.sqlite"), namespace=namespace)


class TestSqliteIndexInMemory(IndexSuite):
    is_shared = False

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return SqliteIndex(None, namespace=namespace)


class TestFilesIndex(IndexSuite):
    many = 60

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        make_folder(where / "store")
        return FilesIndex(where / "store", namespace=namespace)


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
class TestPostgresIndex(IndexSuite):
    @pytest.fixture(autouse=True)
    def _database(self, postgres: Cluster) -> None:
        self.url = postgres.empty_database()

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        from kedge.index.postgres.index import PostgresIndex
        from kedge.index.postgres.server import Server

        server = Server(self.url)
        server.migrate()
        return PostgresIndex(server, namespace=namespace)
