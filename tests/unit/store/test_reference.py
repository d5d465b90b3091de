"""Names of checkpoints: an ID, a job, a number, some steps back."""

from __future__ import annotations

from pathlib import Path

import pytest

import kedge


def test_loading_by_any_name(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        ids = [store.save("train", f"epoch {n}", {"n": n}) for n in range(4)]
        for reference, n in (
            (ids[1], 1),
            ("train", 3),
            ("train~", 2),
            ("train~2", 1),
            ("train#1", 0),
            ("train#3~1", 1),
            (f"{ids[3]}~3", 0),
        ):
            assert store.load(reference) == {"n": n}, reference
            assert store.find(reference).id == ids[n]
        assert store.load("train", only="n") == {"n": 3}


def test_names_of_nothing(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        store.save("train", "epoch", 0)
        for reference in ("trian", "train~1", "train#2", "epoch_1_00000000"):
            with pytest.raises(kedge.NotFound):
                store.load(reference)
        for reference in ("", "a b", "train~~1", "#1", "~", "train#x", "../train", 7, None):
            with pytest.raises(kedge.InvalidName):
                store.load(reference)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_is_passed_over_by_the_name_of_its_job(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        sound = store.save("train", "epoch", 0)
        damaged = store.save("train", "epoch", 1)
        store.set_status(damaged, "corrupted")
        assert store.find("train").id == sound
        store.set_status(sound, "corrupted")
        with pytest.raises(kedge.Corrupted, match="every checkpoint of job train"):
            store.load("train")


def test_an_id_comes_before_a_job_of_that_name(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        saved = store.save("train", "epoch", "of train")
        store.save(saved, "epoch", "of the other job")
        assert store.load(saved) == "of train"
