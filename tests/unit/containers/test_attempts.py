"""Attempts of checkpoints and restores: their order."""

from pathlib import Path

import pytest

from kedge.containers.attempts import attempt, attempts, find_attempt


def test_the_latest_is_the_last_one_also_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path))
    begun = []
    for number in range(8):
        with attempt("restore", f"k{number}") as new:
            begun.append(new.id)
    assert [known.id for known in attempts()] == begun
    assert find_attempt("latest").facts()["subject"] == "k7"
