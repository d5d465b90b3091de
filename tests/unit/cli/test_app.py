"""The commands, through click's runner: what they answer, refuse and leave behind."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kedge
from kedge import CheckpointManager, errors
from kedge.cli.app import NAMES, cli
from tests.parts import require

Run = Callable[..., Result]

CHECKPOINT_KEYS = {
    "id", "job", "seq", "step", "level", "parent", "created_at", "status", "size_bytes", "stored_bytes",
    "digest", "codec", "schema_version", "tags", "pinned", "metadata",
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the store of the test will be; not made yet."""
    place = tmp_path / "store"
    monkeypatch.setenv("KEDGE_STORE", str(place))
    monkeypatch.chdir(tmp_path)
    return place


@pytest.fixture
def run(store: Path) -> Run:
    def call(*words: str, data: str | bytes = "", code: int = 0) -> Result:
        result = CliRunner().invoke(cli, list(words), input=data)
        assert result.exit_code == code, f"{words}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    return call


@pytest.fixture
def manager(store: Path) -> Any:
    with CheckpointManager(store) as opened:
        yield opened


def answer(result: Result) -> Any:
    """The JSON document on stdout; nothing else may be there, and nothing on stderr."""
    assert result.stderr == ""
    return json.loads(result.stdout)


def save(run: Run, step: str, state: object, job: str = "train", *words: str) -> str:
    return run("save", job, step, *words, data=json.dumps(state)).stdout.strip()


# --- help ---


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(run: Run, name: str) -> None:
    shown = run(name, "--help").stdout
    assert shown.startswith(f"Usage: kedge {name}")
    if name != "completion":
        for option in ("--store", "--namespace", "--json"):
            assert option in shown
        assert "JSON:" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_help_lists_every_command_in_sections(run: Run) -> None:
    shown = run("--help").stdout
    for name in NAMES:
        assert f"\n  {name} " in shown


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"kedge {kedge.__version__}\n"


# --- completion ---


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Run, shell: str) -> None:
    assert "_KEDGE_COMPLETE" in run("completion", shell).stdout


def test_completion_knows_jobs_and_ids(run: Run) -> None:
    from click.shell_completion import ShellComplete

    saved = save(run, "one", 1, "training")

    def completions(words: list[str], incomplete: str) -> list[str]:
        complete = ShellComplete(cli, {}, "kedge", "_KEDGE_COMPLETE")
        return [item.value for item in complete.get_completions(words, incomplete)]

    assert completions([], "res") == ["restore"]
    assert completions(["list"], "tr") == ["training"]
    assert completions(["restore", "training"], "one") == [saved]
    assert completions(["show"], "tr") == ["training"]
    assert completions(["list", "--store", "/nowhere"], "") == []


def test_the_help_names_every_exit_code(run: Run) -> None:
    epilog = " ".join(run("--help").stdout.partition("Exit codes:")[2].split())
    told = {int(part.split()[0]) for part in epilog.rstrip(".").split(", ")}
    raised = {error.exit_code for error in vars(errors).values() if getattr(error, "exit_code", None)}
    assert told == {0, 2, 75, 130, 141, 143} | raised


@pytest.mark.parametrize("words", [["gc"], ["token", "create"], ["container", "list"], []])
def test_help_and_a_command(run: Run, words: list[str]) -> None:
    assert run("help", *words).stdout == run(*words, "--help").stdout


def test_help_of_no_command(run: Run) -> None:
    assert "did you mean delete?" in run("help", "delte", code=2).stderr


@pytest.mark.parametrize("option", ["--store", "--key", "--namespace"])
def test_an_empty_option_is_refused(run: Run, store: Path, option: str) -> None:
    """It is a variable that is not set: an empty --key would make a plain store."""
    result = run("save", "job", "step", option, "", data="{}", code=2)
    assert "must not be empty" in result.output
    assert not store.exists()


def test_what_a_service_cannot_do(run: Run) -> None:
    for words in (["demo"], ["migrate"], ["token", "list"]):
        refused = run(*words, "--store", "http://127.0.0.1:9", code=3).stderr
        assert "hint:" in refused, refused
    assert "a service upgrades its own store" in run("migrate", "--store", "https://host", code=3).stderr


def test_tokens_show_when_they_expire(run: Run) -> None:
    run("token", "create", "ci", "--scope", "read", "--expires", "7")
    run("token", "create", "me", "--scope", "admin")
    titles, ci, me = run("token", "list").stdout.splitlines()
    place = titles.index("EXPIRES")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", ci[place:])
    assert me[place:].startswith("never")


def test_a_key_in_a_file_is_private_and_never_replaces_one(run: Run, tmp_path: Path) -> None:
    require("module:cryptography")
    made = answer(run("key", "new", "--out", "key", "--json"))
    text = (tmp_path / "key").read_text()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert made["file"] == "key"
    assert made["id"] not in text
    run("key", "new", "--out", "key", code=5)
    assert (tmp_path / "key").read_text() == text
    with kedge.open(tmp_path / "vault", key=f"file:{tmp_path / 'key'}") as store:
        assert store.encryption is not None
        assert store.encryption["master_key"] == made["id"]
