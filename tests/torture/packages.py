"""Every feature in an environment of its own, with the wheel and its extra alone; needs a package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")

FEATURES = {
    "": "import kedge; s = kedge.open('store'); s.save('j', 's', {'n': 1}); assert s.load('j') == {'n': 1}",
    "client": "from kedge.client import Client; Client('http://127.0.0.1:9')",
    "server": "from kedge.server import create_app; assert create_app('store').openapi()",
    "postgres": "import kedge.index.postgres.index, kedge.blobs.postgres",
    "object": "import kedge.blobs.objects",
    "encryption": "import kedge; s = kedge.open('vault', key=bytes(32)); s.save('j', 's', 1); assert s.load('j') == 1",
    "numpy": "import kedge, numpy as n; s = kedge.open('store'); s.save('j', 's', n.ones(9)); assert s.load('j')[8]",
    "langgraph": "from kedge.integrations.langgraph import KedgeSaver; KedgeSaver('store')",
    "llm": "import kedge.llm.pricing as p; import genai_prices",
    "dask": "import kedge; from distributed import Client; kedge.dask(Client(processes=False, dashboard_address=None))",
}  # fmt: skip


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Not torch: its wheel brings gigabytes. `minutes` is not used: each extra is tried once."""
    _run(ROOT / "dev", "package")
    [wheel] = (ROOT / ".dev" / "dist").glob("*.whl")
    for extra, program in FEATURES.items():
        place = folder / (extra or "base")
        place.mkdir()
        _run(UV, "venv", "--quiet", "--python", sys.executable, place / "venv")
        python = place / "venv" / "bin" / "python"
        _run(UV, "pip", "install", "--quiet", "--python", python, f"{wheel}[{extra}]" if extra else wheel)
        _run(python, "-c", program, folder=place)
        _run(place / "venv" / "bin" / "kedge", "--version", folder=place)
    return {"extras": len(FEATURES) - 1, "failures": 0}


def _run(*command: object, folder: Path = ROOT) -> None:
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-2000:]}")
