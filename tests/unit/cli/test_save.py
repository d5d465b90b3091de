"""`kedge save`, `restore`, `export`: what goes in comes out."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import json
import os
import socket
import stat
import zipfile
from pathlib import Path

import pytest

import kedge
from kedge import CheckpointManager
from tests.parts import library
from tests.unit.cli.test_app import CHECKPOINT_KEYS, Run, answer, manager, run, save, store  # noqa: F401 - fixtures


def test_json_comes_back_as_it_was(run: Run) -> None:
    state = {"epoch": 3, "loss": 0.25, "names": ["ä", "日本"], "none": None, "big": 2**70, "deep": {"a": [1, [2]]}}
    saved = save(run, "epoch 3", state)
    assert saved.startswith("epoch-3_")
    assert json.loads(run("restore", "train").stdout) == state
    assert json.loads(run("restore", "train", saved).stdout) == state
    assert json.loads(run("restore", saved).stdout) == state


def test_save_reads_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"x": 1}')
    run("save", "job", "one", str(tmp_path / "state.json"))
    run("save", "job", "two", "-", data="[1, 2]")
    assert json.loads(run("restore", "job~1").stdout) == {"x": 1}
    assert json.loads(run("restore", "job").stdout) == [1, 2]


def test_save_takes_all_options(run: Run) -> None:
    first = save(run, "one", {})
    words = (
        "--level",
        "stage",
        "--parent",
        first,
        "--tag",
        "best=yes",
        "--metadata",
        "loss=0.5",
        "--metadata",
        "n=small",
    )
    saved = answer(run("save", "train", "two", *words, "--pin", "--json", data="{}"))
    assert saved.keys() == CHECKPOINT_KEYS
    assert (saved["level"], saved["parent"], saved["pinned"]) == ("stage", first, True)
    assert saved["tags"] == {"best": "yes"}
    assert saved["metadata"] == {"loss": 0.5, "n": "small"}


def test_an_idempotency_key_saves_once(run: Run) -> None:
    words = ("train", "one", "--idempotency-key", "k")
    assert run("save", *words, data="1").stdout == run("save", *words, data="1").stdout
    run("save", *words, data="2", code=5)
    assert len(answer(run("list", "train", "--json"))["checkpoints"]) == 1


@pytest.mark.parametrize(
    "data", ["", "{", "nul", '{"a": 1, "a": 2}', "[" * 5000 + "]" * 5000, b"\xff\xfe", '{"a": 1} x']
)
def test_what_is_no_json_is_refused(run: Run, store: Path, data: str) -> None:
    result = run("save", "job", "step", data=data, code=3)
    assert result.stderr.startswith("error: ")
    assert not store.exists()


def test_files_come_back(run: Run, tmp_path: Path) -> None:
    content = os.urandom(300_000)
    (tmp_path / "weights.bin").write_bytes(content)
    (tmp_path / "a=b").write_bytes(b"equals")
    run("save", "job", "files", "--file", "weights.bin", "--file", "notes=a=b", "--file", "a=b")
    run("restore", "job", "--path", "weights.bin", "--to", "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == content
    assert run("restore", "job", "--path", "notes").stdout_bytes == b"equals"
    assert run("restore", "job", "--path", "a=b").stdout_bytes == b"equals"


def test_files_join_a_json_object(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    run("save", "job", "both", "-", "--file", "x", data='{"step": 1}')
    shown = answer(run("show", "job", "--json"))["state"]
    assert shown == {"step": 1, "x": {"$type": "File", "entries": 1, "size_bytes": 3}}
    assert run("restore", "job", "--path", "step").stdout == "1\n"
    assert "files" in run("restore", "job", code=3).stderr
    run("save", "job", "both", "-", "--file", "x", data='{"x": 1}', code=3)
    run("save", "job", "both", "-", "--file", "x", data="[1]", code=3)
    run("save", "job", "missing", "--file", "nowhere", code=4)


def test_trees_come_back(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "a.txt").write_text("alpha")
    (source / "b.bin").write_bytes(os.urandom(2_000_000))
    (source / "skip.tmp").write_text("not this")
    os.symlink("b.bin", source / "link")
    run("save", "job", "tree", "--tree", "data", "--exclude", "*.tmp", "--metadata", "n=1")
    run("restore", "job", "--path", "data", "--to", "back")
    assert sorted(p.relative_to(tmp_path / "back").as_posix() for p in (tmp_path / "back").rglob("*")) == [
        "b.bin", "deep", "deep/a.txt", "link",
    ]  # fmt: skip
    assert (tmp_path / "back" / "b.bin").read_bytes() == (source / "b.bin").read_bytes()
    assert run("restore", "job", "--path", "data/deep/a.txt").stdout == "alpha"
    run("restore", "job", "--path", "data/deep/a.txt", "--to", "a.txt")
    assert (tmp_path / "a.txt").read_text() == "alpha"
    run("restore", "job", "--path", "data", "--to", "back", code=5)
    run("restore", "job", "--path", "data", "--to", "back", "--force")
    run("restore", "job", "--path", "data", code=3)
    run("restore", "job", "--path", "data/nothing", code=4)


def test_trees_are_shown_compared_and_exported(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.mkdir()
    for name in ("a", "b", "c"):
        (source / name).write_text(name)
    run("save", "job", "one", "--tree", "data")
    (source / "b").write_text("changed")
    (source / "c").unlink()
    (source / "d").write_text("new")
    run("save", "job", "two", "--tree", "data")
    shown = run("show", "job").stdout
    assert "data: Tree · 3 entries" in shown
    assert "drw" in run("show", "job", "--path", "data").stdout or "-rw" in run("show", "job", "--path", "data").stdout
    entries = answer(run("show", "job", "--path", "data", "--json"))["entries"]
    assert [(e["path"], e["kind"]) for e in entries] == [("a", "file"), ("b", "file"), ("d", "file")]
    changes = answer(run("diff", "job~1", "job", "--json"))["changes"]
    assert [(f["path"], f["what"]) for f in changes[0]["files"]] == [("b", "changed"), ("c", "removed"), ("d", "added")]
    shown = run("diff", "job~1", "job").stdout
    assert "1 changed, 1 added, 1 removed" in shown
    assert "    + d  3 B" in shown
    run("export", "job", "out")
    (folder, *_) = sorted(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    state = json.loads((folder / "state.json").read_text())
    assert (folder / state["data"]["file"] / "b").read_text() == "b"
    run("export", "job", "out.zip", code=3)


def test_restore_refuses_to_overwrite(run: Run, tmp_path: Path) -> None:
    save(run, "one", {"x": 1})
    target = tmp_path / "out.json"
    target.write_text("precious")
    run("restore", "train", "--to", "out.json", code=5)
    assert target.read_text() == "precious"
    run("restore", "train", "--to", "out.json", "--force")
    assert json.loads(target.read_text()) == {"x": 1}
    assert sorted(os.listdir(tmp_path)) == ["out.json", "store"]
    run("restore", "train", "--to", "no/such/place", code=4)


def test_only_files_are_replaced(run: Run, tmp_path: Path) -> None:
    """As root, replacing /dev/null by a file would harm the whole machine."""
    (tmp_path / "blob").write_bytes(b"content")
    (tmp_path / "tree").mkdir()
    save(run, "json", {"x": 1}, "json")
    run("save", "file", "one", "--file", "blob")
    run("save", "tree", "one", "--tree", "tree")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for job in ("json", "file", "tree"):
            for target in ("socket", "tree/../socket", *(["tree"] if job != "tree" else ["blob"])):
                assert "is not a " in run("restore", job, "--to", target, "--force", code=5).stderr
        run("export", "json", "socket", "--force", code=5)
        run("export", "json", "socket", "--force", "--format", "json", code=5)
    assert stat.S_ISSOCK(os.stat("socket").st_mode)
    run("export", "json", str(tmp_path / "store"), "--force", code=5)


def test_streams_are_written_into(run: Run, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    run("save", "job", "file", "--file", "blob")
    assert run("restore", "job", "--to", "/dev/stdout").stdout == "content"
    assert run("restore", "job", "--to", "-").stdout == "content"
    assert answer(run("restore", "job", "--to", "/dev/null", "--json"))["bytes"] == 7
    run("export", "job", "/dev/null", "--format", "zip")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo("fifo")
    reader = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    run("restore", "job", "--to", "fifo", "--force")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert stat.S_ISFIFO(os.stat("fifo").st_mode)


def test_a_state_of_one_tree_or_file_needs_no_path(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("alpha")
    run("save", "job", "tree", "--tree", "tree")
    run("restore", "job", "--to", "out")
    assert (tmp_path / "out" / "a").read_text() == "alpha"
    assert "--to DIR" in run("restore", "job", code=3).stderr
    run("save", "job", "both", "--file", "tree/a", "-", data='{"step": 1}')
    assert "only the files at a;" in run("restore", "job", "--to", "a").stderr
    assert (tmp_path / "a").read_text() == "alpha"
    run("restore", "job", "--to", "a.json", code=3)
    run("save", "job", "two", "--file", "tree/a", "--file", "b=tree/a")
    run("restore", "job", "--to", "b", code=3)
    for form in ("zip", "json"):
        assert "export it to a directory" in run("export", "job~2", f"out.{form}", code=3).stderr


def test_restore_answers_json(run: Run) -> None:
    saved = save(run, "one", {"a": {"b": [10, 20]}})
    found = answer(run("restore", "train", "--path", "a/b/1", "--json"))
    assert found["checkpoint"]["id"] == saved
    assert (found["path"], found["state"]) == ("a/b/1", 20)
    placed = answer(run("restore", "train", "--to", "x.json", "--json"))
    assert (placed["to"], placed["format"]) == ("x.json", "json")
    assert placed["bytes"] == os.path.getsize("x.json")


def test_an_id_must_belong_to_the_job(run: Run) -> None:
    saved = save(run, "one", {})
    save(run, "one", {}, "other")
    assert "belongs to job train" in run("restore", "other", saved, code=4).stderr
    run("delete", "other", saved, code=4)
    assert len(answer(run("list", "train", "--json"))["checkpoints"]) == 1


def test_paths_that_are_not_there(run: Run) -> None:
    save(run, "one", {"model": {"weights": 1}})
    assert "model" in run("restore", "train", "--path", "modle", code=4).stderr
    assert "single value" in run("restore", "train", "--path", "model/weights/x", code=4).stderr


def test_keys_with_slashes_can_be_named(run: Run) -> None:
    save(run, "one", {"a/b": {"c": 5}, "a": 1})
    assert run("restore", "train", "--path", "a/b/c").stdout == "5\n"


def test_the_name_of_a_registered_type_is_no_obstacle(run: Run, manager: CheckpointManager) -> None:
    """The command line has not registered what the application has; it must show and restore it all the same."""
    from dataclasses import dataclass

    @kedge.register("test-cli.Point")
    @dataclass
    class Point:
        x: int
        y: bytes

    manager.save("app", "one", {"at": Point(1, b"\0" * 20_000), "when": (1, {2})})
    shown = run("show", "app").stdout
    assert "test-cli.Point" in shown
    found = answer(run("show", "app", "--json"))["state"]
    assert found["at"]["$type"] == "test-cli.Point"
    assert found["at"]["fields"]["x"] == 1
    assert found["when"] == {"$type": "tuple", "items": [1, {"$type": "set", "items": [2]}]}
    assert run("restore", "app", "--path", "at/y").stdout_bytes == b"\0" * 20_000


@pytest.mark.parametrize("form", ["dir", "zip", "json"])
def test_export(run: Run, manager: CheckpointManager, tmp_path: Path, form: str) -> None:
    numpy = library("numpy")
    array = numpy.arange(9000.0).reshape(90, 100)
    for n in range(2):
        manager.save("app", f"s{n}", {"n": n, "array": array + n, "blob": b"x" * 10_000, "nan": float("nan")})
    done = answer(run("export", "app", "out", "--format", form, "--json"))
    assert len(done["checkpoints"]) == 2
    out = tmp_path / "out"
    if form == "json":
        document = json.loads(out.read_text())
        state = document["checkpoints"][1]["state"]
        assert state["n"] == 1
        assert state["array"]["shape"] == [90, 100]
        return
    if form == "zip":
        with zipfile.ZipFile(out) as archive:
            archive.extractall(tmp_path / "unpacked")
        out = tmp_path / "unpacked"
    assert "state.json" in (out / "README.txt").read_text()
    listed = json.loads((out / "checkpoints.json").read_text())["checkpoints"]
    assert [c["step"] for c in listed] == ["s0", "s1"]
    folder = out / f"{listed[1]['seq']:06}"
    state = json.loads((folder / "state.json").read_text())
    assert state["nan"] == {"$type": "float", "value": "nan"}
    assert numpy.array_equal(numpy.load(folder / state["array"]["file"]), array + 1)
    assert (folder / state["blob"]["file"]).read_bytes() == b"x" * 10_000


def test_export_of_one_and_onto_something(run: Run, tmp_path: Path) -> None:
    save(run, "one", {"a": 1})
    save(run, "two", {"a": 2})
    run("export", "train~1", "one.json")
    assert [c["state"] for c in json.loads((tmp_path / "one.json").read_text())["checkpoints"]] == [{"a": 1}]
    run("export", "train", "one.json", code=5)
    run("export", "train", "one.json", "--force")
    run("export", "train", "folder")
    (tmp_path / "folder" / "mine").write_text("mine")
    run("export", "train", "folder", code=5)
    assert (tmp_path / "folder" / "mine").exists()
    run("export", "train", "folder", "--force")
    assert not (tmp_path / "folder" / "mine").exists()
    run("export", "nobody", "x", code=4)
    assert sorted(os.listdir(tmp_path)) == ["folder", "one.json", "store"]
