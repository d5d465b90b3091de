"""How long `import kedge` and `kedge --help` take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .harness import Bench, Row, interleave, milliseconds, timed

TIMED_IMPORT = "import time; t = time.perf_counter(); import kedge; {}; print(time.perf_counter() - t)"
OPEN = "kedge.open('memory:')"  # the import is lazy: what a program needs in any case


def run(bench: Bench) -> list[Row]:
    program = Path(sys.executable).with_name("kedge")
    # Bytecode as an installed program has it, whatever this environment says about writing it.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(bench.fresh("bytecode"))
    help_command = [str(program)] if program.exists() else [sys.executable, "-m", "kedge"]

    def importing(then: str) -> float:
        command = [sys.executable, "-c", TIMED_IMPORT.format(then)]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)

    def process(*command: str) -> float:
        return timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment))

    importing(OPEN), process(*help_command, "--help")

    samples = interleave(
        5 * bench.rounds,
        {
            "python": lambda: process(sys.executable, "-c", "pass"),
            "import": lambda: importing("pass"),
            "open": lambda: importing(OPEN),
            "help": lambda: process(*help_command, "--help"),
        },
    )
    empty = ("python -c pass", samples["python"])
    return [
        Row("import kedge, in a running Python", samples["import"], *empty, 0.060, "limit", milliseconds),
        Row("import and open a store, in a running Python", samples["open"], *empty, show=milliseconds, kind="share"),
        Row("kedge --help, whole process", samples["help"], *empty, 0.150, "limit", milliseconds),
    ]
