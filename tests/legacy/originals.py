"""Run the tests of the original systems on Kedge's old names, with only their import lines changed.

    python tests/legacy/originals.py DIR

DIR has checkouts of the originals, by the names of their repositories: artemis, salesforce, content-generator, ARCH.
Nothing is fetched, and nothing in DIR is written. CI has no checkouts and does not run this: tests/legacy restates what
these tests ask for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

LOCAL_CLIENT = '''
from fastapi import testclient

class TestClient(testclient.TestClient):
    """Calls from this machine, as the service wants it of who has no token."""

    def __init__(self, app):
        super().__init__(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000))
'''


@dataclass(frozen=True, slots=True)
class Original:
    repository: str
    test: str
    imports: dict[str, str]  # a line of it → the line instead


ORIGINALS = (
    Original(
        "artemis",
        "src/test_checkpoint.py",
        {"from checkpoint_manager import": "from kedge.legacy.artemis import"},
    ),
    Original(
        "salesforce",
        ".agents/agile/test_checkpoint.py",
        {"from checkpoint_manager import": "from kedge.legacy.artemis import"},
    ),
    Original(
        "content-generator",
        "tests/integration/test_checkpoints_api.py",
        {
            "from fastapi.testclient import TestClient": "from local_client import TestClient",
            "from src.web.app import create_app": "from kedge.server.older_service import create_app",
            "from src.orchestration.checkpoint_manager import": "from kedge.legacy.jobs import",
            "from src.web.routes import checkpoints": "from kedge.server import older_service as checkpoints",
        },
    ),
    Original(
        "ARCH",
        "tests/unit/test_checkpoint_handler.py",
        {"from src.checkpoint_handler import": "from kedge.legacy.arch import"},
    ),
)


def run(original: Original, checkouts: Path, work: Path) -> bool:
    source = checkouts / original.repository / original.test
    if not source.is_file():
        print(f"{original.repository}: there is no {source}")
        return False
    text = source.read_text()
    for old, new in original.imports.items():
        if old not in text:
            print(f"{original.repository}: {original.test} has no line {old!r}")
            return False
        text = text.replace(old, new)
    folder = work / original.repository
    folder.mkdir()
    (folder / "test_original.py").write_text(text)
    (folder / "local_client.py").write_text(LOCAL_CLIENT)
    environment = {
        **os.environ,
        "ARTEMIS_CHECKPOINT_DIR": str(folder / "cards"),
        "CHECKPOINT_DIR": str(folder / "jobs"),
    }
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-500:]]
    print(f"{original.repository}: {lines[-1]}")
    if done.returncode:
        print("\n".join(lines[-60:]))
    return done.returncode == 0


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory(prefix="kedge-originals-") as work:
        passed = [run(original, Path(sys.argv[1]), Path(work)) for original in ORIGINALS]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
