"""What the documents show, runs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import kedge
from kedge import errors
from tests.parts import require
from tests.servers.models import ModelServer
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Setting:
    """What the code of a document needs besides Kedge: parts of the machine, and addresses that are real here."""

    needs: tuple[str, ...] = ()
    addresses: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    has_types: bool = False  # passes mypy --strict


SHARED = "postgresql://user@db/kedge?blobs=s3://bucket/prefix"
RUN_HERE = {
    "README.md": Setting(has_types=True),
    "docs/guide.md": Setting(("module:numpy",), has_types=True),
    "docs/encryption.md": Setting(
        ("module:cryptography",), {"file:/run/secrets/kedge": "file:key"}, {"key": f"{bytes(range(32)).hex()}\n"}
    ),
    "docs/machines.md": Setting(
        ("module:distributed",),
        {SHARED: "my-store", 'Client("tcp://scheduler:8786")': "Client(processes=False, dashboard_address=None)"},
    ),
    "docs/adk.md": Setting(("module:google.adk",)),
    "docs/llm.md": Setting(("module:openai",)),
    "docs/pipelines.md": Setting(),
    "docs/pydantic-ai.md": Setting(("module:pydantic_ai",)),
    "docs/tensors.md": Setting(("module:torch",)),
}
# Documents whose code is run by a test with the server or the library that it needs.
RUN_ELSEWHERE = {
    "docs/agents.md": "tests/unit/integrations/langgraph/test_saver.py",
    "docs/coming-from.md": "tests/legacy/test_names.py",
    "docs/container-archives.md": "tests/unit/containers/archive/test_archives.py",
    "docs/service.md": "tests/server/test_client.py",
}
INTERNAL = {"KEDGE_SERVE"}  # between processes of Kedge


def examples(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def program(document: str) -> str:
    """All Python of a document, as somebody would paste it into a file."""
    text = "\n\n".join(examples(document))
    for shown, real in RUN_HERE[document].addresses.items():
        assert shown in text
        text = text.replace(shown, real)
    return text


def test_the_code_of_every_document_is_run() -> None:
    documents = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    with_code = {document for document in documents if examples(document)}
    assert with_code == RUN_HERE.keys() | RUN_ELSEWHERE.keys()
    for document, test in RUN_ELSEWHERE.items():
        assert Path(document).name in (ROOT / test).read_text()


@pytest.mark.parametrize("document", RUN_HERE)
def test_a_document_runs_as_a_script_twice(document: str, tmp_path: Path) -> None:
    setting = RUN_HERE[document]
    for part in setting.needs:
        require(part)
    (tmp_path / "example.py").write_text(program(document))
    for name, content in setting.files.items():
        (tmp_path / name).write_text(content)
    with ModelServer() as models:
        known = {**os.environ, "OPENAI_BASE_URL": f"{models.url}/v1", "OPENAI_API_KEY": "none"}
        for time in ("first", "second"):
            command = [sys.executable, "-W", "ignore", "example.py"]
            done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, f"{document}, the {time} time:\n{done.stderr[-3000:]}"


def titled(document: str, name: str) -> str:
    """A block of a document that is a file of its own."""
    blocks = re.findall(r'^```python title="(.*?)"\n(.*?)^```', (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    return dict(blocks)[name]


def in_shell(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done.stdout


def test_the_release_of_the_pipelines_waits_for_a_person_and_for_rows(tmp_path: Path) -> None:
    (tmp_path / "release.py").write_text(titled("docs/pipelines.md", "release.py"))
    in_shell(tmp_path, "release.py", code=75)
    in_shell(tmp_path, "-m", "kedge", "approve", "release", "--by", "ada", "--store", "my-store")
    in_shell(tmp_path, "release.py", code=75)
    in_shell(tmp_path, "-m", "kedge", "runs", "signal", "release", "rows arrived", "[1, 2]", "--store", "my-store")
    assert in_shell(tmp_path, "release.py") == "ada approved 2 rows\n"


def test_the_nightly_run_of_the_pipelines_is_forked_and_compared(tmp_path: Path) -> None:
    (tmp_path / "nightly.py").write_text(titled("docs/pipelines.md", "nightly.py"))
    in_shell(tmp_path, "-m", "kedge", "run", "nightly.py:nightly", "--id", "monday", "--arg", "day=monday")
    fork = ("-m", "kedge", "runs", "fork", "monday", "--from", "clean", "--key", "again")
    assert "1 step reused, 2 to run again" in in_shell(tmp_path, *fork)
    in_shell(tmp_path, *fork, "--arg", "region=eu", "--apply")
    in_shell(tmp_path, "-m", "kedge", "runs", "resume", "again")
    shown = in_shell(tmp_path, "-m", "kedge", "runs", "diff", "monday", "again")
    assert shown.endswith("the runs differ: 2 steps same, 1 step different\n")


def test_a_worker_executes_what_the_pipelines_submit(tmp_path: Path) -> None:
    (tmp_path / "ocr.py").write_text(titled("docs/pipelines.md", "ocr.py"))
    asking = subprocess.Popen([sys.executable, "ocr.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    with kedge.open(tmp_path / "my-store") as store:
        wait_for(lambda: store.list("queue:ocr"), "nothing is submitted")
    in_shell(tmp_path, "-m", "kedge", "worker", "ocr.py", "--queue", "ocr", "--until-empty", "--store", "my-store")
    assert asking.communicate(timeout=100)[0] == "text of page-7.png\n"


def test_the_first_program_is_killed_and_continues(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(examples("README.md")[0])
    killed = subprocess.Popen([sys.executable, "first.py"], cwd=tmp_path)
    with kedge.open(tmp_path / "my-store") as store:
        wait_for(lambda: len(store.list("count")) >= 3, "the first program saves nothing")
        killed.kill()
        killed.wait()
        acknowledged = len(store.list("count"))
        done = subprocess.run([sys.executable, "first.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [f"continuing after number {acknowledged - 1}", "total 435"]
        assert [checkpoint.step for checkpoint in store.list("count")] == [f"number {n}" for n in range(30)]


def test_the_readme_fits_on_one_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 70
    assert len(examples("README.md")[0].splitlines()) <= 16


@pytest.mark.slow
def test_documents_pass_a_strict_type_check(tmp_path: Path) -> None:
    require("module:mypy")
    typed = [document for document, setting in RUN_HERE.items() if setting.has_types]
    for document in typed:
        (tmp_path / f"{Path(document).stem}.py".lower()).write_text(program(document))
    shutil.copy(Path(__file__).with_name("typed_program.py"), tmp_path)
    # Kedge itself is checked by ./dev check; here only what its annotations mean for a caller counts.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "."]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_errors_page_tells_what_the_code_says() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE
    )
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.CheckpointError)]
    assert rows == [(c.__name__, c.code, str(c.http_status), str(c.exit_code)) for c in classes]


def test_everything_public_says_what_it_does() -> None:
    """The reference is made of docstrings: what has none is missing there."""
    values = {name: getattr(kedge, name) for name in kedge.__all__}
    stores = (kedge.CheckpointManager, kedge.Checkpoint, kedge.Job, kedge.Event, kedge.Lease, kedge.File, kedge.Tree)
    methods = {
        f"{cls.__name__}.{method}": getattr(cls, method)
        for cls in stores
        for method in dir(cls)
        if not method.startswith("_") and inspect.isfunction(inspect.getattr_static(cls, method))
    }
    documented = {name: value for name, value in (values | methods).items() if callable(value)}
    assert len(documented) > 80
    assert [name for name, value in documented.items() if not inspect.getdoc(value)] == []


def test_every_variable_is_documented() -> None:
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".js")]
    used = set(re.findall(r"\bKEDGE_[A-Z_]+", " ".join(path.read_text() for path in files)))
    told = set(re.findall(r"^\| `(KEDGE_[A-Z_]+)`", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))
    assert used - told == INTERNAL
    assert told - used == set()


def test_troubleshooting_quotes_real_errors() -> None:
    """Each text in front of an explanation is made by the code, whatever stands for the dots."""
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    titles = re.findall(r"^(`.+)\n:   ", text, re.MULTILINE)
    quoted = [quote for title in titles for quote in re.findall(r"`([^`]+)`", title)]
    assert len(quoted) > 12
    of_the_system = {"No space left on device", "Address already in use"}
    pieces = [re.split(r"…|state\[.*?\]\S*|'[^']*'|: (?=[A-Z])|; ", quote) for quote in quoted]
    texts = {text.strip(" :") for quote in pieces for text in quote} - of_the_system
    assert [text for text in sorted(texts) if len(text) > 5 and text not in source] == []


@pytest.mark.parametrize("document", ["design.md", "reliability.md"])
def test_every_proof_is_a_test_that_exists(document: str) -> None:
    paths = re.findall(r"`(tests/[\w/.*]+)`", (ROOT / "docs" / document).read_text())
    assert len(paths) > 15
    assert [path for path in paths if not list(ROOT.glob(path))] == []


def test_every_torture_that_is_named_exists() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    names = re.findall(r"^\|.*\| `(\w+)`(?:, `(\w+)`, …)? \|$", text, re.MULTILINE)
    assert len(names) > 15
    tortures = {path.stem for path in (ROOT / "tests" / "torture").iterdir()}
    assert {name for row in names for name in row if name} - tortures - {"model"} == set()


def test_the_design_names_files_that_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    names = set(re.findall(r"`((?:\w+/)*\w+\.(?:py|sql))`", text)) | set(re.findall(r"`((?:[a-z]+/)+)`", text))
    places = {name for name in names if not name.startswith(("tests/", "reserve/"))}
    assert len(places) > 50
    missing = sorted(name for name in places if not (ROOT / "src" / "kedge" / name).exists())
    assert missing == []


def test_the_design_shows_the_dependency_direction_that_is_checked() -> None:
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    section = (ROOT / "docs" / "design.md").read_text().partition("### Dependency direction\n")[2]
    shown = re.search(r"^```text\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == contract["layers"]


def test_modules_that_the_changelog_names_exist() -> None:
    names = set(re.findall(r"`(kedge(?:\.[a-z_]+)+)", (ROOT / "CHANGELOG.md").read_text()))
    assert len(names) > 10
    assert sorted(name for name in names if not exists(name)) == []


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    if not module:
        return True
    try:
        return importlib.util.find_spec(name) is not None or hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), attribute) if exists(module) else False


def test_every_limit_in_the_security_policy_has_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "who | can" not in line]
    assert len(rows) > 10
    for row in rows:
        assert re.search(r"`tests/|\]\(docs/", row), row
    paths = re.findall(r"`(tests/[\w/.]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
