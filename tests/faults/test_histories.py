"""Random histories on every kind of store: the short form of `./dev torture histories`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.torture.histories.controller import run_history
from tests.torture.histories.places import Servers

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.slow]

_OPERATIONS = 100


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.parametrize("kind", ["dir", "files", "memory", "http"])
def test_no_history_breaks_a_promise(tmp_path: Path, kind: str, is_encrypted: bool) -> None:
    with ExitStack() as stack:
        _run(kind, tmp_path, Servers(tmp_path, stack), is_encrypted)


@pytest.mark.requires("postgres", "s3")
@pytest.mark.xdist_group("postgres")
@pytest.mark.parametrize("kind", ["postgres", "postgres+s3"])
def test_no_history_of_many_machines_breaks_a_promise(tmp_path: Path, kind: str, postgres: Cluster) -> None:
    with ExitStack() as stack:
        servers = Servers(tmp_path, stack, postgres)
        _run(kind, tmp_path / "plain", servers, is_encrypted=False)
        _run(kind, tmp_path / "sealed", servers, is_encrypted=True)


def _run(kind: str, folder: Path, servers: Servers, is_encrypted: bool) -> None:
    numbers = run_history(
        kind, 1, folder / "history", servers,
        is_encrypted=is_encrypted, operations=_OPERATIONS, rounds=1, with_repair=False,
    )  # fmt: skip
    assert numbers["operations"] >= _OPERATIONS
