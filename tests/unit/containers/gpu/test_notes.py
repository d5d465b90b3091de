"""Notes of processes that are about to be locked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kedge.containers.gpu import memory


def test_a_note_is_there_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "state_directory", lambda: tmp_path)
    memory.write_note(os.getpid(), "hibernate")
    assert [(note["pid"], note["why"]) for note in memory.notes()] == [(os.getpid(), "hibernate")]
    memory.remove_note(os.getpid())
    assert [*memory.notes()] == []
