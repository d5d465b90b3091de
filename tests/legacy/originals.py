"""Run the original systems' own tests, first on the originals, then with their checkpoint modules replaced by ours.

    python tests/legacy/originals.py DIR [NAME…]

DIR has clones of the originals, by the names of their repositories: artemis, salesforce, content-generator,
Geo_process, ARCH. The Python that runs this needs Kedge and what the tests import. Nothing is fetched, and nothing in
DIR is written. CI has no clones and does not run this: tests/legacy restates what these tests ask for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

# Their import lines, changed for all of their code: a module of theirs is ours. What their tests never use, and few
# machines have, is a mock: GDAL, and the pool of connections to a database that only mocks are asked of.
PLUGIN = """
import importlib, sys
from unittest.mock import MagicMock

for name in {missing!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = MagicMock()
if {mocks_database!r}:
    import psycopg2.pool
    psycopg2.pool.ThreadedConnectionPool = MagicMock()
for theirs, ours in {modules!r}.items():
    module = sys.modules[theirs] = importlib.import_module(ours)
    package, _, name = theirs.rpartition(".")
    if package:
        setattr(importlib.import_module(package), name, module)
if {is_ours!r} and {calls_service!r}:  # without a token, only programs on this machine are answered
    from fastapi import testclient

    class LocalClient(testclient.TestClient):
        def __init__(self, app, **options):
            super().__init__(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000), **options)

    testclient.TestClient = LocalClient
"""


@dataclass(frozen=True, slots=True)
class Original:
    repository: str
    tests: tuple[str, ...]
    modules: dict[str, str]  # theirs → ours
    trees: tuple[tuple[str, tuple[str, ...]], ...]  # a commit, and which of its paths are needed
    chosen: str = ""  # of the tests: those that work on checkpoints
    missing: tuple[str, ...] = ()
    mocks_database: bool = False
    calls_service: bool = False
    differs: dict[str, str] = field(default_factory=dict)  # a test that judges the original's own files → why


ORIGINALS = (
    Original(
        "artemis",
        ("src/test_checkpoint.py",),
        {"checkpoint_manager": "kedge.legacy.artemis"},
        (("HEAD", ("src/test_checkpoint.py", ":(glob)src/*.py", "src/persistence", "src/core")),),
    ),
    Original(
        "salesforce",
        (".agents/agile/test_checkpoint.py",),
        {"checkpoint_manager": "kedge.legacy.artemis"},
        (("HEAD", (".agents/agile/test_checkpoint.py", ".agents/agile/checkpoint_manager.py")),),
    ),
    Original(
        "content-generator",
        tuple(
            f"tests/{name}.py"
            for name in (
                "integration/test_checkpoints_api",
                "integration/test_web_api_parity",
                "integration/test_full_pipeline",
                "integration/test_mcp_integration",
                "e2e_mock/test_web_routes_smoke",
                "e2e_mock/test_mcp_http_smoke",
            )
        ),
        {
            "src.orchestration.checkpoint_manager": "kedge.legacy.jobs",
            "src.web.routes.checkpoints": "kedge.server.older_service",
        },
        (("HEAD", ("src", "tests", "templates", "config", "pytest.ini")),),
        chosen="checkpoint or Checkpoint or parity",
        calls_service=True,
    ),
    Original(
        "Geo_process",
        ("tests/integration/test_progress_checkpointing.py", "tests/recovery/test_failure_scenarios.py"),
        {"src.core.checkpoint_manager": "kedge.legacy.core"},
        # No commit has both the manager that the tests ask for and the pipeline that they run: two together do.
        (("03fc307", (".",)), ("03fc307^", ("src/pipelines/unified_resampling",))),
        missing=("osgeo", "osgeo.gdal", "osgeo.osr", "osgeo.ogr"),
        mocks_database=True,
        differs={
            "test_checkpoint_compression": "a million random floats: 8.4 MB by zstd 1, 7.9 MB by gzip; it wants < 8 MB",
            "test_corrupted_checkpoint_handling": "it writes to the manager's pickles; ours has none",
        },
    ),
    Original(
        "ARCH",
        ("tests/unit/test_checkpoint_handler.py",),
        {"src.checkpoint_handler": "kedge.legacy.arch"},
        (("HEAD", ("src", "tests")),),
    ),
)


def run(original: Original, clone: Path, work: Path, *, is_ours: bool) -> dict[str, str]:
    """What became of each test: PASSED, FAILED, …"""
    for commit, paths in original.trees:
        words = ["git", f"--git-dir={clone / '.git'}", f"--work-tree={work}", "checkout", commit, "--", *paths]
        subprocess.run(words, check=True, cwd=work, env={**os.environ, "GIT_INDEX_FILE": str(work / "index")})
    plugin = PLUGIN.format(
        missing=original.missing,
        mocks_database=original.mocks_database,
        modules=original.modules if is_ours else {},
        is_ours=is_ours,
        calls_service=original.calls_service,
    )
    (work / "kedge_plugin.py").write_text(plugin)
    paths = [str(work), *{str((work / test).parent) for test in original.tests}]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "ARTEMIS_CHECKPOINT_DIR": str(work / "cards"),
        "CHECKPOINT_DIR": str(work / "jobs"),
    }
    words = [sys.executable, "-m", "pytest", "-rA", "-q", "-Wignore", "-p", "no:cacheprovider", "-p", "kedge_plugin"]
    words += ["-k", original.chosen] if original.chosen else []
    done = subprocess.run(
        [*words, *original.tests], cwd=work, env=environment, capture_output=True, text=True, check=False
    )
    outcomes = {test: word for word, test in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)}
    if not outcomes:
        print(done.stdout[-3000:], done.stderr[-3000:])
    return outcomes


def compare(original: Original, clone: Path) -> bool:
    outcomes = []
    for is_ours in (False, True):
        with tempfile.TemporaryDirectory(prefix="kedge-originals-") as work:
            outcomes.append(run(original, clone, Path(work), is_ours=is_ours))
    theirs, ours = outcomes
    wanted = [test for test, word in theirs.items() if word == "PASSED"]
    failed = [test for test in wanted if ours.get(test) != "PASSED"]
    print(f"{original.repository}: {len(wanted) - len(failed)} of the {len(wanted)} that pass on the original")
    for test in failed:
        print(f"  {test}: {original.differs.get(test.rpartition('::')[2], ours.get(test, 'not run'))}")
    return bool(wanted) and all(test.rpartition("::")[2] in original.differs for test in failed)


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    chosen = [original for original in ORIGINALS if not sys.argv[2:] or original.repository in sys.argv[2:]]
    outcomes = [compare(original, Path(sys.argv[1], original.repository)) for original in chosen]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
