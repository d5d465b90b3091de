"""What the command line refuses, and how it says so."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge import CheckpointManager, errors
from kedge.cli import cli
from kedge.cli.command import Session
from kedge.cli.failures import IN_OUR_WORDS
from kedge.errors import CheckpointError
from tests.parts import require
from tests.unit.cli.test_app import Run, answer, run, save, store  # noqa: F401 - fixtures

READS = [
    ("list", "x"), ("jobs",), ("show", "x"), ("restore", "x"), ("delete", "x", "y"), ("diff", "x", "y"),
    ("cleanup", "x", "--keep-last", "1"), ("tag", "x", "a=b"), ("pin", "x"), ("copy", "x", "y"),
    ("export", "x", "out"), ("check",), ("gc",), ("stats",), ("events",),
]  # fmt: skip


@pytest.mark.parametrize("words", READS, ids=lambda words: words[0])
def test_only_saving_makes_a_store(run: Run, store: Path, words: tuple[str, ...]) -> None:
    result = run(*words, code=4)
    assert result.stdout == ""
    assert result.stderr.startswith("error: there is no store at ")
    failure = json.loads(run(*words, "--json", code=4).stderr)
    assert failure.keys() == {"code", "message", "hint"}
    assert failure["code"] == "not_found"
    assert not store.exists()


def test_options_before_and_after_the_command(run: Run, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    run("--store", other, "--namespace", "team", "save", "job", "one", data="1")
    assert answer(run("jobs", "--store", other, "--namespace", "team", "--json"))["jobs"][0]["name"] == "job"
    assert answer(run("--json", "--store", other, "jobs"))["jobs"] == []


@pytest.mark.parametrize("name", ["../up", "a/b", "", "x" * 129, "-x", "a\nb", "\x1b[2J"])
def test_names_outside_the_grammar(run: Run, name: str) -> None:
    save(run, "one", 1)
    result = run("save", "--", name, "step", "-", data="1", code=3)
    assert "\x1b" not in result.stderr
    assert result.stderr.count("\n") == 2


def test_hostile_text_reaches_no_terminal(run: Run) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202egnp\x9b31m\r\n"
    state = {hostile: hostile, "list": [hostile, {hostile: 1}]}
    saved = save(run, hostile, state, "train", "--tag", f"t={hostile}", "--metadata", f"m={json.dumps(hostile)}")
    save(run, hostile, {hostile: hostile + "!", "list": [], "more": hostile * 20})
    for words in (
        ("list", "train"), ("show", saved), ("diff", "train~1", "train"), ("events",), ("tag", saved, f"u={hostile}"),
        ("cleanup", "train", "--keep-last", "1"), ("show", saved, "--path", hostile),
        ("restore", "train", "--path", hostile * 2),
    ):  # fmt: skip
        for more in ((), ("--json",)):
            result = CliRunner().invoke(cli, [*words, *more])
            for text in (result.stdout, result.stderr):
                assert not set(text) & set("\x1b\x07\x9b\u202e\r"), words
    assert json.loads(run("restore", saved).stdout) == state


def test_unknown_commands_and_options(run: Run) -> None:
    assert run(code=2).stderr == run("--help").stdout
    assert json.loads(run("--json", code=2).stderr)["code"] == "usage"
    assert "did you mean restore?" in run("restor", "x", code=2).stderr
    assert "kedge list --help" in run("list", code=2).stderr
    assert json.loads(run("list", "--bogus", "--json", code=2).stderr)["code"] == "usage"


def test_every_error_has_its_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]
    save(run, "one", 1)
    assert {kind.exit_code for kind in every} == {1, 3, 4, 5, 6, 7, 8, 9, 10}
    for kind in every:
        error = kind("it failed\x1b[2J", hint="do this")
        monkeypatch.setattr(CheckpointManager, "walk", lambda *_, failure=error, **__: (_ for _ in ()).throw(failure))
        result = run("list", "train", code=kind.exit_code)
        assert result.stderr == "error: it failed\\x1b[2J\n hint: do this\n"
        failure = json.loads(run("list", "train", "--json", code=kind.exit_code).stderr)
        assert failure == {"code": kind.code, "message": "it failed\x1b[2J", "hint": "do this"}


def test_the_unexpected_is_short_unless_asked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, "one", 1)
    monkeypatch.setattr(CheckpointManager, "walk", lambda *_, **__: 1 / 0)
    shown = run("list", "train", code=1).stderr
    assert "ZeroDivisionError" in shown
    assert "KEDGE_DEBUG=1" in shown
    assert "Traceback" not in shown
    monkeypatch.setenv("KEDGE_DEBUG", "1")
    assert "Traceback" in run("list", "train", code=1).stderr


def test_ctrl_c_is_quiet(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    save(run, "one", 1)
    monkeypatch.setattr(CheckpointManager, "walk", interrupt)
    assert run("list", "train", code=130).stderr.strip() == "interrupted"


def test_hints_speak_of_options(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("alpha")
    run("save", "job", "tree", "--tree", "tree")
    run("save", "file", "file", "--file", "tree/a")
    for words, option in (
        (("restore", "job", "--to", "tree"), "--force"),
        (("restore", "file", "--to", "tree/a"), "--force"),
        (("save", "job", "x", "--file", "tree"), "--tree"),
        (("save", "job", "x", "--tree", "tree/a"), "--file"),
        (("save", "job", "x" * 2000, "--tree", "tree"), "--metadata"),
        (("save", "job", "x", "--tree", "tree", "--tag", "t=" + "x" * 2000), "--metadata"),
    ):
        result = CliRunner().invoke(cli, words)
        hint = result.stderr.partition(" hint: ")[2]
        assert option in hint, words
        assert "=True" not in hint
        assert "kedge." not in hint


def test_translated_words_are_still_said() -> None:
    source = Path(kedge.__file__).parent
    said = "".join(file.read_text() for file in source.rglob("*.py") if "cli" not in file.parts)
    for theirs in IN_OUR_WORDS:
        assert theirs.replace("another 0 s", "another {left_s:.0f} s") in said, theirs


def test_a_job_of_damaged_checkpoints_is_not_missing(run: Run) -> None:
    saved = save(run, "one", 1)
    with CheckpointManager() as manager:
        manager.set_status(saved, "corrupted")
    assert "marked as damaged" in run("restore", "train", code=6).stderr


def test_wrong_usage_is_one_line(run: Run) -> None:
    assert "Choose from: read, write, admin\n" in run("token", "create", "x", code=2).stderr
    Path("p.py").write_text("")
    both = run("schedule", "add", "q", "n", "p.py:f", "--cron", "* * * * *", "--every", "5", code=2).stderr
    assert "either --cron or --every" in both


def test_what_is_not_there_is_said_to_be(run: Run) -> None:
    save(run, "one", 1)
    assert "there is no job zz" in run("stats", "zz", code=4).stderr
    assert "there is no /proc" not in run("export", "train", "/proc/x", code=7).stderr


def test_a_store_is_not_copied_to_itself(run: Run, store: Path) -> None:
    save(run, "one", 1)
    for command in ("copy", "sync"):
        assert "to itself" in run(command, f"./{store.name}", str(store), code=5).stderr


def test_commands_in_hints_name_the_store_that_was_meant(run: Run, tmp_path: Path) -> None:
    other = str(tmp_path / "other store")
    run("save", "train", "one", "--store", other, data="1")
    for words in (["delete", "tain", "--all"], ["runs", "show", "tain"], ["show", "tain"], ["runs", "cancel", "tain"]):
        assert f"kedge --store '{other}' " in run("--store", other, *words, code=4).stderr
    team = json.loads(run("list", "x", "--store", other, "--namespace", "team", "--json", code=4).stderr)["hint"]
    assert team == f"kedge --store '{other}' --namespace team jobs lists the jobs"
    assert Session("postgresql://me:secret@db/kedge").in_this_store("run kedge check") == "run kedge --store URL check"
    assert Session("s", key="file:k").in_this_store("kedge gc") == "kedge --store s --key file:k gc"
    assert (
        Session("s", key="kdk1_x").in_this_store("see kedge key new, kedge gc")
        == "see kedge key new, kedge --store s gc"
    )
    assert Session().in_this_store("kedge gc") == "kedge gc"


def test_only_what_is_near_is_meant(run: Run) -> None:
    assert "did you mean" not in run("remove", "x", code=2).stderr.lower()
    assert "did you mean" not in run("jobs", "--force", code=2).stderr.lower()
    assert "--store" in run("jobs", "--stor", "x", code=2).stderr


def test_json_in_the_place_of_a_file(run: Run, store: Path) -> None:
    refused = run("save", "train", "one", '{"a": 1}', code=3).stderr
    assert "is not a file" in refused
    assert "| kedge save JOB STEP" in refused
    assert not store.exists()


@pytest.mark.parametrize("name", ["KEDGE_KEY", "KEDGE_KEY_FILE"])
def test_an_empty_key_in_the_environment_is_refused(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    assert f"${name} is empty" in run("save", "train", "one", data="1", code=3).stderr
    assert not store.exists()
    assert run("save", "train", "one", "--key", "none", data="1").stdout


def test_a_key_file_that_everybody_can_read_is_warned_about(run: Run, tmp_path: Path) -> None:
    require("module:cryptography")
    key = tmp_path / "key"
    key.write_text("00" * 32)
    key.chmod(0o644)
    words = ("save", "train", "one", "--key", f"file:{key}")
    assert f"every user can read the key file {key}" in run(*words, data="1").stderr
    key.chmod(0o600)
    assert run(*words, data="1").stderr == ""
