"""When containers of a pod were started, by the boot clock: one that ran after its checkpoint has changed its volumes.

A file for each, below /run, in a folder for each pod (its sandbox). Those of pods that are gone are removed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .runtime import early
from .runtime.opt_in import POD, SANDBOX, notes_of


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note_start(root: str, spec: Mapping[str, Any]) -> float:
    """Note that a container is started now; answers when it was before, 0.0 if never. `root`: of its runtime."""
    notes = notes_of(spec)
    sandbox, name = notes.get(SANDBOX), notes.get(POD[2])
    if not sandbox or not name or "/" in sandbox + name:
        return 0.0
    before = starts_in(root, spec).get(name, 0.0)
    home = _home(root)
    for folder in home.iterdir() if home.is_dir() else ():
        if not os.path.exists(f"{root}/{folder.name}"):
            shutil.rmtree(folder, ignore_errors=True)
    early.write_mark(str(home / sandbox / name), str(now_s()))
    return before


def starts_in(root: str, spec: Mapping[str, Any]) -> dict[str, float]:
    """When each container of the same pod was last started, of those that were noted."""
    folder = _home(root) / (notes_of(spec).get(SANDBOX) or "none")
    files = [path for path in folder.iterdir() if "~" not in path.name] if folder.is_dir() else []
    return {path.name: float(path.read_text()) for path in files}


def _home(root: str) -> Path:
    return Path(f"{os.environ.get('KEDGE_RUNC_STATE') or early.STATE}-pods/{root}")
