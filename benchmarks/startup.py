"""How long `import holdfast` and `holdfast --help` take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .harness import Bench, Row, interleave, milliseconds, timed

TIMED_IMPORT = "import time; t = time.perf_counter(); import holdfast; print(time.perf_counter() - t)"


def run(bench: Bench) -> list[Row]:
    program = Path(sys.executable).with_name("holdfast")
    help_command = [str(program)] if program.exists() else [sys.executable, "-m", "holdfast"]

    def importing() -> float:
        answer = subprocess.run([sys.executable, "-c", TIMED_IMPORT], check=True, stdout=subprocess.PIPE)
        return float(answer.stdout)

    samples = interleave(
        5 * bench.rounds,
        {
            "python": lambda: _process([sys.executable, "-c", "pass"]),
            "import": importing,
            "help": lambda: _process([*help_command, "--help"]),
        },
    )
    empty = ("python -c pass", samples["python"])
    return [
        Row("import holdfast, in a running Python", samples["import"], *empty, 0.060, "limit", milliseconds),
        Row("holdfast --help, whole process", samples["help"], *empty, 0.150, "limit", milliseconds),
    ]


def _process(command: list[str]) -> float:
    return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
