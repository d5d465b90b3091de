"""`kedge tag`, `pin`, `copy`, `delete`, `cleanup`."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import grp
import json
import os
from pathlib import Path

import pytest

from tests.unit.cli.test_app import Run, answer, run, save, store  # noqa: F401 - fixtures


def test_tags_and_pins(run: Run) -> None:
    saved = save(run, "one", 1)
    assert answer(run("tag", saved, "a=1", "b=x=y", "--json"))["tags"] == {"a": "1", "b": "x=y"}
    assert answer(run("tag", "train", "c=3", "--remove", "a", "--json"))["tags"] == {"b": "x=y", "c": "3"}
    run("tag", saved, code=2)
    run("tag", saved, "novalue", code=3)
    run("tag", saved, "bad name=1", code=3)
    run("tag", saved, "a=1", "--remove", "a", code=3)
    assert answer(run("pin", saved, "--json"))["pinned"] is True
    run("delete", "train", saved, code=5)
    assert answer(run("pin", saved, "--off", "--json"))["pinned"] is False
    assert answer(run("delete", "train", saved, "--json"))["deleted"] == [saved]


def test_delete_is_all_or_nothing(run: Run) -> None:
    ids = [save(run, f"s{n}", n) for n in range(3)]
    run("delete", "train", ids[0], "s_1_00000000", code=4)
    run("delete", "train", "train", code=4)
    assert len(answer(run("list", "train", "--json"))["checkpoints"]) == 3
    done = run("delete", "train", ids[0], "s_1_00000000", "train~1", "--missing-ok", "--json")
    assert answer(done)["deleted"] == ids[:2]


def test_copy(run: Run) -> None:
    for n in range(3):
        save(run, f"s{n}", n)
    copied = answer(run("copy", "train", "again", "--json"))
    assert [c["job"] for c in copied["checkpoints"]] == ["again"] * 3
    assert copied["copied"] == 3
    assert "0 checkpoints of train copied to again; 3 were there already" in run("copy", "train", "again").stdout
    assert json.loads(run("restore", "again").stdout) == 2
    run("copy", "train", "train", code=5)
    run("copy", "nobody", "x", code=4)
    save(run, "own", 9, job="taken")
    assert "job taken exists and is not a copy of job train" in run("copy", "train", "taken", code=5).stderr
    assert len(answer(run("list", "taken", "--json"))["checkpoints"]) == 1


def test_delete_a_job(run: Run) -> None:
    ids = [save(run, f"s{n}", n) for n in range(2)]
    run("pin", ids[0])
    plan = run("delete", "train", "--all").stdout
    assert plan.startswith("would delete job train (2 checkpoints, ")
    assert plan.endswith("run it again with --apply\n")
    assert answer(run("delete", "train", "--all", "--json")) == {"job": "train", "deleted": []}
    assert len(answer(run("list", "train", "--json"))["checkpoints"]) == 2
    assert "--even-pinned" in run("delete", "train", "--all", "--apply", code=5).stderr
    run("delete", "train", code=2)
    run("delete", "train", ids[1], "--all", code=2)
    run("delete", "train", ids[1], "--even-pinned", code=2)
    deleted = answer(run("delete", "train", "--all", "--even-pinned", "--apply", "--json"))
    assert deleted == {"job": "train", "deleted": ids}
    assert answer(run("jobs", "--json"))["jobs"] == []
    run("delete", "train", "--all", code=4)
    assert "nothing to delete" in run("delete", "train", "--all", "--missing-ok", "--apply").stdout


def test_cleanup_shows_before_it_deletes(run: Run) -> None:
    ids = [save(run, f"s{n}", n) for n in range(5)]
    run("pin", ids[0])
    plan = run("cleanup", "train", "--keep-last", "2").stdout
    assert "would delete 2 checkpoints" in plan
    assert "pinned" in plan
    found = answer(run("cleanup", "train", "--keep-last", "2", "--json"))
    assert not found["applied"]
    assert [c["id"] for c in found["delete"]] == ids[1:3]
    assert found["policy"] == {"keep_last": 2}
    assert found["keep"][0]["reasons"] == ["pinned"]
    done = run("cleanup", "train", "--keep-last", "2", "--apply").stdout
    assert "2 checkpoints deleted" in done
    assert len(answer(run("list", "train", "--json"))["checkpoints"]) == 3
    assert "nothing to delete" in run("cleanup", "train", "--keep-last", "2", "--yes").stdout


def test_cleanup_stores_a_policy(run: Run) -> None:
    for n in range(3):
        save(run, f"s{n}", n)
    run("cleanup", "train", code=2)
    stored = answer(run("cleanup", "train", "--keep-last", "1", "--min-per-level", "step=2", "--set", "--json"))
    assert stored.keys() == {"job", "policy", "applied", "delete", "keep", "frees_bytes"}
    assert answer(run("jobs", "--json"))["jobs"][0]["retention"] == {"keep_last": 1, "min_per_level": {"step": 2}}
    assert [c["seq"] for c in answer(run("cleanup", "train", "--json"))["delete"]] == [1]
    assert answer(run("cleanup", "train", "--unset", "--json")) == {"job": "train", "policy": None}
    assert answer(run("jobs", "--json"))["jobs"][0]["retention"] is None


def test_cleanup_of_all_jobs(run: Run) -> None:
    for job in ("a", "b"):
        for n in range(3):
            save(run, f"s{n}", n, job)
    found = answer(run("cleanup", "--all-jobs", "--keep-last", "1", "--apply", "--json"))
    assert found["job"] is None
    assert len(found["delete"]) == 4


def test_cleanup_of_llm_records_has_to_name_them(run: Run) -> None:
    for n in range(2):
        save(run, f"s{n}", n, "llm:calls")
    assert "nothing to delete" in run("cleanup", "--all-jobs", "--keep-last", "1", "--apply").stdout
    named = run("cleanup", "llm:calls", "--keep-last", "1", "--apply")
    assert "llm:calls is the costs of LLM calls" in named.stderr
    assert "1 checkpoint deleted" in named.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--keep-last", "0"), 2),
        (("--keep-last", "x"), 2),
        (("--keep-within", "soon"), 3),
        (("--min-per-level", "step=many"), 3),
        (("--min-per-level", "floor=1"), 3),
        (("--keep-last", "1", "--all-jobs"), 2),
        (("--keep-last", "1", "--set", "--unset"), 2),
    ],
)
def test_bad_policies(run: Run, words: tuple[str, ...], code: int) -> None:
    save(run, "one", 1)
    run("cleanup", "train", *words, code=code)


def test_a_store_that_a_group_shares(run: Run, tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    place = tmp_path / "shared"
    run("migrate", "--store", str(place), "--shared-group", group)
    assert place.stat().st_mode & 0o7777 == 0o2770
    assert (place / "index.sqlite").stat().st_mode & 0o777 == 0o660
    run("migrate", "--store", str(place), "--shared-group", group)  # it may have been interrupted
    save(run, "one", 1)
    run("migrate", "--shared-group", group, code=5)  # that is its owner's alone
    run("migrate", "--store", str(tmp_path / "other"), "--shared-group", "no such group", code=3)
    run("migrate", "--store", "memory:", "--shared-group", group, code=3)
