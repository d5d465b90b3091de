"""Every method of every port is exercised by its suite, and every adapter runs its suite."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from kedge.ports import Blobs, BlobWriter, Index
from tests.parts import require

require("module:cryptography")

HERE = Path(__file__).parent
PORTS = {"plain": Index, "sealed": Index, "blobs": Blobs, "writer": BlobWriter}


def methods_of(port: type) -> set[str]:
    return {name for name, member in vars(port).items() if callable(member) and not name.startswith("_")}


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Which methods the suites have called, by port; in a process of its own, where all of them run."""
    noted = tmp_path_factory.mktemp("ports") / "called.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "recorded.py")]
    ran = subprocess.run(
        command, env={**os.environ, "CALLED": str(noted)}, cwd=HERE.parent.parent, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    return {name: set(names) for name, names in json.loads(noted.read_text()).items()}


@pytest.mark.parametrize("port", PORTS)
def test_every_method_is_exercised(called: dict[str, set[str]], port: str) -> None:
    assert methods_of(PORTS[port]) - called[port] == set()


def test_a_method_that_is_not_would_show(called: dict[str, set[str]]) -> None:
    class Grown(Index):
        def forgotten(self) -> None: ...

    assert methods_of(Grown) - called["plain"] == {"forgotten"}


def adapters(package: str, port: type) -> set[str]:
    """Classes of a package that have all methods of a port."""
    found = set()
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        for name, member in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if member.__module__ == module.name and all(hasattr(member, method) for method in methods_of(port)):
                found.add(name)
    return found


@pytest.mark.requires("module:psycopg", "module:obstore")
def test_every_adapter_runs_its_suite() -> None:
    plain, sealed = (HERE / "test_index.py").read_text(), (HERE / "test_encrypted_index.py").read_text()
    blobs = (HERE / "test_blobs.py").read_text()
    indexes = adapters("kedge.index", Index)
    assert {"SqliteIndex", "FilesIndex", "PostgresIndex", "EncryptedIndex"} <= indexes
    for name in indexes - {"EncryptedIndex"}:  # which wraps each of the others in the second file
        assert f"{name}(" in plain
        assert f"{name}(" in sealed
    for name in adapters("kedge.blobs", Blobs):
        assert f"{name}(" in blobs
