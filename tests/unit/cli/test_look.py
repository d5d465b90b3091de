"""`kedge list`, `jobs`, `show`, `diff`, `stats`, `events`, `check`, `gc`, `doctor`."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import json
import os
from pathlib import Path

import pytest

from kedge import CheckpointManager
from tests.parts import library
from tests.unit.cli.test_app import CHECKPOINT_KEYS, Run, answer, manager, run, save, store  # noqa: F401 - fixtures


def test_list_filters_and_pages(run: Run) -> None:
    ids = [save(run, f"s{n}", n, "train", "--tag", f"odd={n % 2}", "--metadata", f'm={{"n": {n}}}') for n in range(5)]
    listed = answer(run("list", "train", "--json"))
    assert listed["job"] == "train"
    assert [c["id"] for c in listed["checkpoints"]] == ids
    assert all(c.keys() == CHECKPOINT_KEYS for c in listed["checkpoints"])

    def of(*words: str) -> list[int]:
        return [c["seq"] for c in answer(run("list", "train", "--json", *words))["checkpoints"]]

    first = listed["checkpoints"][0]["seq"]
    assert of("--tag", "odd=1") == [first + 1, first + 3]
    assert of("--metadata", "m.n=4") == [first + 4]
    assert of("--limit", "2") == [first + 3, first + 4]
    assert of("--before", ids[2]) == [first, first + 1]
    assert of("--before", f"#{first + 2}", "--limit", "1") == [first + 1]
    assert of("--level", "stage") == []
    run("list", "train", "--limit", "0", code=2)
    run("list", "nobody", code=4)


def test_integers_that_python_does_not_write_are_shown(run: Run, manager: CheckpointManager) -> None:
    long = 7**9000
    ids = [manager.save("long", "s", value) for value in (long, [long, 1], {long: {"a": [long] * 20}}, range(long), 0)]
    for each in ids:
        run("show", each)
        run("diff", each, each)
    assert "0x" in run("show", ids[0]).stdout
    assert "0x" in run("diff", ids[0], ids[-1]).stdout


def test_references(run: Run) -> None:
    ids = [save(run, f"s{n}", n) for n in range(4)]
    first = answer(run("list", "train", "--json"))["checkpoints"][0]["seq"]
    for ref, n in (
        ("train", 3),
        ("train~", 2),
        ("train~3", 0),
        (f"train#{first + 1}", 1),
        (f"{ids[2]}~2", 0),
        (ids[0], 0),
    ):
        assert answer(run("show", ref, "--json"))["checkpoint"]["id"] == ids[n], ref
    for ref in ("train~4", "train#99", "nobody", "~1", "#1", "train~x"):
        run("show", ref, code=3 if ref in ("~1", "#1", "train~x") else 4)


def test_jobs(run: Run) -> None:
    for job in ("a1", "a2", "b"):
        save(run, "one", 1, job)
    found = answer(run("jobs", "a", "--json"))["jobs"]
    assert [job["name"] for job in found] == ["a1", "a2"]
    assert found[0]["checkpoints"] == 1
    assert "b" in run("jobs").stdout
    assert run("jobs", "zz").stdout == ""


def test_show_draws_a_tree_without_reading_arrays(run: Run, manager: CheckpointManager) -> None:
    numpy = library("numpy")
    manager.save(
        "arrays",
        "one",
        {
            "weights": numpy.zeros((500, 20), "<f4"),
            "small": numpy.arange(3),
            "list": list(range(100)),
            "deep": [[[[1] * 99]]],
            "scalar": numpy.float32(1.5),
        },
    )
    shown = run("show", "arrays", "--items", "8").stdout
    assert "weights: ndarray float32 · 500 × 20 · 39 KiB" in shown
    assert "[0, 1, 2]" in shown
    assert "list of 100 · 0, 1, 2, 3, 4, 5, …" in shown
    assert "1.5 (float32)" in shown
    part = run("show", "arrays", "--path", "list", "--items", "2").stdout
    assert part.startswith("list: list of 100")
    assert "… 98 more" in part


def test_arrays_come_back_as_npy(run: Run, manager: CheckpointManager, tmp_path: Path) -> None:
    numpy = library("numpy")
    fields = numpy.dtype([("a", "<i4"), ("b", "<f8", (2,))], align=True)
    arrays = {
        "c": numpy.arange(6000, dtype="<f4").reshape(20, 300),
        "fortran": numpy.asfortranarray(numpy.arange(12_000, dtype=">i8").reshape(3, 4000)),
        "small_fortran": numpy.asfortranarray(numpy.arange(6).reshape(2, 3)),
        "fields": numpy.zeros(700, fields),
        "times": numpy.array(["2026-01-01", "NaT"], "M8[s]"),
        "empty": numpy.zeros((0, 5)),
        "scalar_array": numpy.array(3.5),
    }
    manager.save("arrays", "one", arrays)
    for name, array in arrays.items():
        run("restore", "arrays", "--path", name, "--to", f"{name}.npy")
        loaded = numpy.load(tmp_path / f"{name}.npy")
        assert loaded.dtype == array.dtype, name
        assert loaded.shape == array.shape, name
        assert loaded.tobytes() == array.tobytes(), name
    with_arrays = json.loads(run("restore", "arrays").stdout)
    assert with_arrays["fortran"]["order"] == "F"
    run("restore", "arrays", "--format", "npy", code=3)
    run("restore", "arrays", "--to", "all.npy", code=3)
    run("restore", "arrays", "--path", "times", "--to", "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["$type"] == "ndarray"
    run("restore", "arrays", "--path", "c", "--to", "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == arrays["c"].tobytes()


def test_diff(run: Run) -> None:
    save(run, "one", {"step": 1, "gone": True, "text": "a\nb\nc"})
    save(run, "two", {"step": 2, "new": [1], "text": "a\nB\nc"})
    found = answer(run("diff", "train~1", "train", "--json"))
    assert not found["same"]
    assert {(c["path"], c["kind"]) for c in found["changes"]} == {
        ("step", "changed"), ("gone", "removed"), ("new", "added"), ("text", "changed"),
    }  # fmt: skip
    shown = run("diff", "train~1", "train").stdout
    assert "~ step  1 → 2" in shown
    assert "- gone  True" in shown
    assert "+B" in shown
    assert "2 changed, 1 added, 1 removed" in shown
    assert "the same" in run("diff", "train", "train").stdout


def test_stats(run: Run) -> None:
    save(run, "one", list(range(100)))
    assert answer(run("stats", "--json"))["checkpoints"] == 1
    assert answer(run("stats", "train", "--json"))["checkpoints"] == 1
    assert "checkpoints" in run("stats").stdout
    run("stats", "nobody", code=4)


def test_events(run: Run) -> None:
    for n in range(3):
        save(run, f"s{n}", n)
    run("pin", "train")
    events = answer(run("events", "--json"))["events"]
    assert [e["action"] for e in events].count("save") == 3
    assert events[-1]["action"] == "pin"
    later = answer(run("events", "--after", str(events[1]["id"]), "--limit", "1", "--json"))["events"]
    assert [e["id"] for e in later] == [events[2]["id"]]
    assert answer(run("events", "--limit", "1", "--json"))["events"] == events[-1:]
    assert "pin" in run("events").stdout


def test_check_and_gc(run: Run, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    saved = run("save", "train", "big", "--file", "big").stdout.strip()
    found = answer(run("check", "--json"))
    assert found["ok"]
    assert found["checkpoints"] == 1
    assert found["bytes_read"] >= 3_000_000
    assert "all is well" in run("check", "--quick").stdout
    assert "all is well" in run("check", "train").stdout
    assert "job trian not found" in run("check", "trian", code=4).stderr
    run("delete", "train", saved)
    foreseen = answer(run("gc", "--dry-run", "--json"))
    freed = answer(run("gc", "--json"))
    assert foreseen == freed
    assert freed["chunks_removed"] >= 1
    assert freed["bytes_freed"] >= 3_000_000
    assert "nothing to free" in run("gc").stdout


def test_check_finds_damage(run: Run, store: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    saved = run("save", "train", "big", "--file", "big").stdout.strip()
    (pack,) = [file for file in (store / "packs").rglob("*") if file.is_file() and file.stat().st_size > 2_000_000]
    with open(pack, "r+b") as file:
        file.seek(1_500_000)
        byte = file.read(1)
        file.seek(1_500_000)
        file.write(bytes([byte[0] ^ 1]))
    found = json.loads(run("check", "--json", code=6).stdout)
    assert not found["ok"]
    assert found["corrupted"] == [saved]
    assert {"subject", "what", "fix"} == found["problems"][0].keys()
    shown = run("check", code=6).stdout
    assert "cannot be loaded" in shown
    assert len(set(shown.splitlines())) == len(shown.splitlines())
    run("restore", "train", saved, "--path", "big", "--to", "out", code=6)
    assert not (tmp_path / "out").exists()


def test_doctor(run: Run, store: Path) -> None:
    before = answer(run("doctor", "--json"))
    assert before["ok"]
    assert {f["subject"] for f in before["findings"]} >= {
        "python",
        "sqlite",
        "file system",
        "free space",
        "sync",
        "store",
    }
    assert not store.exists()
    save(run, "one", 1)
    shown = run("doctor").stdout
    assert "format 1, 1 job, 1 checkpoint" in shown
    assert sorted(os.listdir(store.parent)) == ["store"]
    assert not [name for name in os.listdir(store) if "doctor" in name]


@pytest.mark.parametrize("scheme", ["files", "memory"])
def test_doctor_looks_at_every_kind_of_directory(run: Run, tmp_path: Path, scheme: str) -> None:
    place = tmp_path / "kept"
    url = f"{scheme}:{place}"
    subjects = {f["subject"]: f["status"] for f in answer(run("doctor", "--store", url, "--json"))["findings"]}
    assert {subjects[name] for name in ("file system", "rename", "locks", "free space")} <= {"ok", "note", "warn"}
    assert subjects["store"] == "note"
    assert {"sync", "throughput"} <= subjects.keys()
    assert not place.exists()
    run("save", "one", "step", "--store", url, data="1")
    assert "format 1, 1 job, 1 checkpoint" in run("doctor", "--store", url).stdout
    assert not list(tmp_path.rglob("*doctor*"))
    assert "in memory" in run("doctor", "--store", "memory:").stdout
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    assert "it cannot become one" in run("doctor", "--store", f"{scheme}:mine", code=7).stdout


def test_doctor_refuses_a_disk_without_locks(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.cli.commands.doctor.disk.fcntl.flock", lambda *_: None)
    found = json.loads(run("doctor", "--json", code=7).stdout)["findings"]
    assert [f["subject"] for f in found if f["status"] == "bad"] == ["locks"]


def test_doctor_leaves_foreign_places_alone(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    monkeypatch.setattr("kedge.cli.commands.doctor.disk.measure_sync", lambda _: pytest.fail("written"))
    for place in ("mine", "mine/file"):
        found = json.loads(run("doctor", "--store", place, "--json", code=7).stdout)["findings"]
        assert [f["what"].endswith("it cannot become one") for f in found if f["status"] == "bad"] == [True]


def test_repair_makes_a_new_index(run: Run, store: Path, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    run("save", "train", "big", "--file", "big")
    assert answer(run("check", "--repair", "--json"))["repaired"] is None
    for name in os.listdir(store):
        if name.startswith("index.sqlite"):
            (store / name).unlink()
    (store / "index.sqlite").write_bytes(b"garbage" * 1000)
    run("list", "train", code=6)
    run("check", "train", "--repair", code=2)
    mended = answer(run("check", "--repair", "--json", code=6))
    assert not mended["ok"]
    assert not mended["repaired"]["is_index_complete"]
    assert mended["repaired"]["from_packs"] == 1
    assert os.path.exists(mended["repaired"]["old_index"])
    run("restore", "train", "--path", "big", "--to", "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "big").read_bytes()


def test_a_repair_says_what_may_be_lost(run: Run, store: Path) -> None:
    save(run, "small", 1)
    for name in os.listdir(store / "packs"):
        (store / "packs" / name).unlink()
    for name in os.listdir(store):
        if name.startswith("index.sqlite"):
            (store / name).unlink()
    shown = run("check", "--repair", code=6).stdout
    assert "all is well" not in shown
    assert "small states that were not copied to packs yet are lost" in shown
    assert "0 came back" in shown
    assert "all is well: 0 checkpoints" in run("check").stdout


def test_check_says_where_the_data_is(run: Run, tmp_path: Path) -> None:
    save(run, "small", 1)
    assert "all is well: 1 checkpoint, with all data in the index" in run("check").stdout
    (tmp_path / "big").write_bytes(os.urandom(300_000))
    run("save", "train", "big", "--file", "big")
    assert "2 checkpoints, with 1 chunk in packs (293 KiB read), other data in the index" in run("check").stdout
    assert "(there, not read)" in run("check", "--quick").stdout


def test_repair_needs_a_store(run: Run, store: Path) -> None:
    run("check", "--repair", code=4)
    assert not store.exists()


def test_long_runs_of_items_are_shown_together(run: Run) -> None:
    save(run, "one", {"losses": [1, 2]})
    save(run, "two", {"losses": list(range(1, 50))})
    assert "+ losses/2…48  47 items: 3, 4, 5, 6, 7, 8, …" in run("diff", "train~1", "train").stdout


def test_one_byte_differs(run: Run, manager: CheckpointManager) -> None:
    manager.save("train", "one", {"blob": b"a" * 9000})
    manager.save("train", "two", {"blob": b"a" * 8999 + b"b"})
    assert "~ blob  bytes · 8.8 KiB: 1 byte differs" in run("diff", "train~1", "train").stdout


def test_long_texts_are_shown_in_part(run: Run) -> None:
    save(run, "one", {})
    save(run, "two", {"text": "word " * 100})
    assert f"+ text  {('word ' * 20)!r}… · 500 characters" in run("diff", "train~1", "train").stdout


def test_jobs_show_their_policies(run: Run) -> None:
    save(run, "one", 1)
    run("cleanup", "train", "--keep-last", "5", "--daily", "7", "--set")
    assert "keep last 5, daily 7" in run("jobs").stdout


def test_plot_draws_and_names_the_best(run: Run, manager: CheckpointManager) -> None:
    for job, factor in (("a", 1), ("b", 2)):
        for n in range(6):
            manager.save(job, f"epoch {n}", n, metadata={"loss": factor / (n + 1), "lr": 0.1})
    shown = run("plot", "a", "b", "--metric", "loss", "--best", "min").stdout
    assert "a: lowest 0.1667 at #6 epoch 5" in shown
    assert "--metric shows 1 other: lr" in shown
    found = answer(run("plot", "a", "--metric", "loss", "--best", "max", "--json"))
    assert found["metrics"] == ["loss", "lr"]
    assert [point["seq"] for point in found["series"][0]["points"]] == [1, 2, 3, 4, 5, 6]
    assert found["series"][0]["best"]["seq"] == 1
    assert "there are: loss, lr" in run("plot", "a", "--metric", "acc", code=4).stderr
    run("plot", "nobody", code=4)
    run("plot", *"abcdefg", code=3)
