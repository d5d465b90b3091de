"""What the packages declare: each feature imports what its extra brings, and the packages hold what they should.

`./dev torture packages` tries every feature in an environment with its extra alone.
"""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts import require

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kedge"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Which part of the source may import what an extra brings; a longer path comes before a shorter one.
FEATURES = {
    "client": "client",
    "server": "server",
    "index/postgres": "postgres",
    "blobs/postgres.py": "postgres",
    "legacy/importers/databases.py": "postgres",
    "blobs/object": "object",
    "blobs/owner.py": "object",
    "blobs/probe.py": "object",
    "crypto": "encryption",
    "integrations/langgraph": "langgraph",
    "legacy/importers/langgraph": "langgraph",
    "integrations/adk.py": "adk",
    "integrations/crewai.py": "crewai",
    "integrations/dask.py": "dask",
    "integrations/pydantic_ai.py": "pydantic-ai",
    "integrations/torch": "torch",
    "llm/pricing.py": "llm",
}
# Modules whose name differs from the distribution that brings them, or that come with another one.
BROUGHT_BY = {
    "markupsafe": "jinja2",
    "starlette": "fastapi",
    "pydantic": "fastapi",
    "prometheus_client": "prometheus-client",
    "langchain_core": "langgraph",
    "genai_prices": "genai-prices",
    "google": "google-adk",
    "pydantic_ai": "pydantic-ai-slim",
}
# What the application brings if it uses it: imported only to look at values that the application made with it, or in a
# suite of tests.
OPTIONAL = {
    "accelerate", "anyio", "httpx", "httpx2", "hypothesis", "jax", "lightning", "lightning_fabric", "msgspec", "numpy",
    "opentelemetry", "pandas", "polars", "psycopg", "pyarrow", "pydantic", "pytest", "pytorch_lightning", "torch",
    "transformers",
}  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """The top-level names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def distributions(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}  # type: ignore[index]


def extra_of(path: Path) -> str | None:
    name = str(path.relative_to(SOURCE))
    return next((extra for part, extra in FEATURES.items() if name.startswith(part)), None)


def test_every_feature_imports_what_its_extra_brings() -> None:
    base = distributions(PROJECT["dependencies"])
    own = {*sys.stdlib_module_names, "kedge", "__future__"}
    strangers = []
    for path in SOURCE.rglob("*.py"):
        extra = extra_of(path)
        brought = base | (distributions(PROJECT["optional-dependencies"][extra]) if extra else set())
        modules = {*imports(path)} - own - OPTIONAL
        strangers += [
            f"{path.relative_to(SOURCE)} imports {module}; {extra or 'the base'} does not bring it"
            for module in modules
            if BROUGHT_BY.get(module, module).lower() not in brought
        ]
    assert strangers == []


def test_no_extra_brings_what_nothing_imports() -> None:
    used = {BROUGHT_BY.get(module, module).lower() for path in SOURCE.rglob("*.py") for module in imports(path)}
    started_by_uvicorn = {"httptools", "uvloop"}
    parsed_by_fastapi = {"python-multipart"}
    of_langgraph = {"langgraph-checkpoint"}
    for extra, requirements in PROJECT["optional-dependencies"].items():
        if extra != "all":
            unused = distributions(requirements) - used - started_by_uvicorn - parsed_by_fastapi - of_langgraph
            assert unused == set(), extra


def test_all_is_every_extra_that_fits() -> None:
    [everything] = PROJECT["optional-dependencies"]["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    assert named == PROJECT["optional-dependencies"].keys() - {"all", "crewai", "torch"}


def test_every_extra_is_explained() -> None:
    text = (ROOT / "docs" / "installation.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("statement", "blocked", "extra"),
    [
        ("from kedge.integrations.langgraph import KedgeSaver", "langgraph", "langgraph"),
        ("from kedge.integrations.torch import Training", "torch", "torch"),
        ("from kedge.client import Client", "httpx", "client"),
        ("from kedge.server import create_app", "fastapi", "server"),
    ],
)
def test_an_import_without_its_extra_says_which(statement: str, blocked: str, extra: str) -> None:
    program = f"import sys\nsys.modules[{blocked!r}] = None\n{statement}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert f"needs {blocked}" in last
    assert f"[{extra}]" in last


@pytest.mark.slow
def test_wheel_and_source_distribution_are_complete(tmp_path: Path) -> None:
    require("module:hatchling")
    script = SOURCE / "server" / "page" / "static" / "vendor" / "htmx.min.js"
    shell = runpy.run_path(str(ROOT / "tools" / "shell"))
    for name, text in shell["files"]().items():
        target = ROOT / "deploy" / "share" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    if not script.exists():
        assert done.returncode != 0
        assert "./dev package" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "kedge/server/page/static/vendor/htmx.min.js" in names
    for path in shell["files"]():
        assert any(name.endswith(f"data/share/{path}") for name in names), path
    assert "# Kedge" in metadata
    for version in ("3.11", "3.12", "3.13", "3.14"):
        assert f"Programming Language :: Python :: {version}" in metadata
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as source:
        packed = {name.partition("/")[2] for name in source.getnames()}
    for path in ("CHANGELOG.md", "examples/tiles.py", "tests/unit/test_packages.py", "dev", "hatch_build.py"):
        assert path in packed


def test_the_manual_has_every_command() -> None:
    from kedge.cli.app import NAMES

    manual = runpy.run_path(str(ROOT / "tools" / "shell"))["manual"]()
    sections = set(re.findall(r"^\.SS kedge ([\w-]+)$", manual, re.MULTILINE))
    assert sections >= set(NAMES)
