"""The directory of an embedded store: who makes it, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kedge
from kedge.store import directory as embedded


def test_another_process_may_finish_making_the_store_while_we_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "store"
    place.mkdir()
    listdir = os.listdir

    def made_by_another(path: Path) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        with kedge.open(place) as other:
            other.save("job", "step", 1)
        return listdir(path)

    monkeypatch.setattr(embedded.os, "listdir", made_by_another)
    with kedge.open(place) as store:
        assert store.load_latest("job")[1] == 1  # type: ignore[index]
