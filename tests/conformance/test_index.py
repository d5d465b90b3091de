"""Every adapter of `ports.Index` keeps the port's contract."""

from pathlib import Path

from holdfast.index.sqlite import SqliteIndex
from holdfast.ports import Index
from holdfast.testing.index_suite import IndexSuite


class TestSqliteIndex(IndexSuite):
    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return SqliteIndex(str(where / "index.sqlite"), namespace=namespace)


class TestSqliteIndexInMemory(IndexSuite):
    is_shared = False

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return SqliteIndex(None, namespace=namespace)
