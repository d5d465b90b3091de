"""Attacks on containers: what a user of the machine, the author of a pod, or who writes images must not get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kedge
from kedge.containers import attempts
from kedge.containers.runtime import early, marks


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a machine's own state, which does not exist yet."""
    place = tmp_path / "lib" / "kedge"
    monkeypatch.setenv("KEDGE_STATE_DIR", str(place))
    return place


def loose(root: Path) -> list[Path]:
    """What others than the owner can do anything with."""
    return [path for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077]


# --- a user of the machine reads the memory of containers ---


def test_the_store_of_containers_is_roots_alone(state: Path) -> None:
    before = os.umask(0o000)
    try:
        with attempts.only_one("x"), attempts.attempt("checkpoint", "x"), marks.store_of({}) as manager:
            manager.save("container:a", "a", os.urandom(300_000))
    finally:
        os.umask(before)
    assert loose(state / "containers") == loose(state / "attempts") == loose(state / "locks") == []
    assert state.stat().st_mode & 0o077 == 0


def test_a_store_from_before_is_tightened_when_it_is_opened(state: Path) -> None:
    with kedge.open(f"file:{state}/containers") as manager:
        manager.save("container:a", "a", os.urandom(300_000))
    for path in (state / "containers", *(state / "containers").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with marks.store_of({}) as manager:
        assert manager.list("container:a")
    assert loose(state / "containers") == []


def test_a_store_that_a_group_shares_stays_shared(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "containers").mkdir()
    (state / "containers").chmod(0o2775)
    with marks.store_of({}) as manager:
        manager.save("container:a", "a", os.urandom(300_000))
    assert (state / "containers").stat().st_mode & 0o7777 == 0o2770
    assert (state / "containers" / "index.sqlite").stat().st_mode & 0o777 == 0o660


def test_marks_are_roots_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        early.write_mark(f"{tmp_path}/run/kedge/runc//run/containerd/x", "{}")
    finally:
        os.umask(before)
    assert loose(tmp_path / "run") == []
