"""The suites on adapters that note which methods are called. Run by test_ports.py, which reads what they noted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kedge.blobs.memory import MemoryBlobs
from kedge.index.sqlite.index import SqliteIndex
from kedge.ports import Blobs, Index
from kedge.testing.blobs_suite import BlobsSuite
from kedge.testing.index_suite import IndexSuite
from tests.conformance.test_encrypted_index import sealed

CALLED: dict[str, set[str]] = {}


class Recorded:
    """An adapter, or a writer of one, in front of which every call is noted under `name`."""

    def __init__(self, adapter: Any, name: str) -> None:
        self._adapter = adapter
        self._name = name

    def __getattr__(self, method: str) -> Any:
        found = getattr(self._adapter, method)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            CALLED.setdefault(self._name, set()).add(method)
            answer = found(*arguments, **options)
            return Recorded(answer, "writer") if method == "writer" else answer

        return call


class TestIndex(IndexSuite):
    is_shared = False  # what is exercised here, no adapter is spared

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return Recorded(SqliteIndex(None, namespace=namespace), "plain")  # type: ignore[return-value]


class TestSealedIndex(IndexSuite):
    is_shared = False
    seals = True

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        return Recorded(sealed(SqliteIndex(None, namespace=namespace), hides_names=True), "sealed")  # type: ignore[return-value]


class TestBlobs(BlobsSuite):
    races = 1

    @pytest.fixture(autouse=True)
    def _storage(self) -> None:
        self.storage = MemoryBlobs()

    def open_blobs(self, where: Path) -> Blobs:
        return Recorded(self.storage, "blobs")  # type: ignore[return-value]


@pytest.fixture(scope="session", autouse=True)
def _written() -> Iterator[None]:
    yield
    Path(os.environ["CALLED"]).write_text(json.dumps({name: sorted(called) for name, called in CALLED.items()}))
