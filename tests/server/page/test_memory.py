"""What the page remembers belongs to one application: two in a process share nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy

import kedge
from kedge.server import create_app
from tests.server.conftest import client_of


def test_two_applications_with_the_same_checkpoint(tmp_path: Path) -> None:
    """The second reads from its own store, also when the first, which showed the same checkpoint, is closed."""
    with kedge.open(tmp_path / "a") as store:
        saved = store.save("j", "s", {"w": numpy.arange(300_000.0)})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("a", "b"):
        with client_of(create_app(tmp_path / name)) as client:
            assert client.get(f"/checkpoints/{saved}").status_code == 200
            shown = client.get(f"/checkpoints/{saved}/array", params={"path": "w"})
            assert shown.status_code == 200, shown.text
        shutil.rmtree(tmp_path / name)
