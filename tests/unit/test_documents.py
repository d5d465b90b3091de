"""What the documents show, runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.parts import require

ROOT = Path(__file__).parents[2]


def test_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    require("module:numpy")
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "guide.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    (tmp_path / "guide.py").write_text("\n".join(blocks))
    subprocess.run([sys.executable, "guide.py"], check=True, cwd=tmp_path, timeout=100)


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_invariant_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "design.md").read_text()
    for path in re.findall(r"`(tests/[\w/.*]+)`", table):
        assert list(ROOT.glob(path)), f"docs/design.md names {path}"
