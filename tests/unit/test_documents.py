"""What the documents show, runs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kedge
from tests.parts import require

ROOT = Path(__file__).parents[2]


def examples(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    """Its first example, stopped half-way and started again."""
    example = examples("README.md")[0]
    (tmp_path / "half.py").write_text(example.replace("range(first, 100)", "range(first, 50)"))
    (tmp_path / "whole.py").write_text(example)
    for program in ("half.py", "whole.py"):
        subprocess.run([sys.executable, program], check=True, cwd=tmp_path, timeout=100)
    with kedge.open(tmp_path / "my-store", create=False) as store:
        assert [checkpoint.step for checkpoint in store.list("training")] == [f"epoch {n}" for n in range(100)]


@pytest.mark.slow
def test_the_readme_passes_a_strict_type_check(tmp_path: Path) -> None:
    require("module:mypy")
    (tmp_path / "example.py").write_text(examples("README.md")[0])
    # Kedge itself is checked by ./dev check; here only what its annotations mean for a caller counts.
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "example.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    require("module:numpy")
    blocks = examples("docs/guide.md")
    assert len(blocks) > 10
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    subprocess.run([sys.executable, "guide.py"], check=True, cwd=tmp_path, timeout=100)


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


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
