"""When containers of a pod were started, by the boot clock: one that ran after its checkpoint has changed its volumes.

A file for each, below /run, in a folder for each pod (its sandbox). Those of pods that are gone are removed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from .runtime import early
from .runtime.opt_in import POD, SANDBOX, notes_of


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note_start(root: str, spec: Mapping[str, object]) -> None:
    """Note that a container may run from now on. `root`: of its runtime."""
    if (path := _path(root, spec)) is None:
        return
    home = _home(root)
    for folder in home.iterdir() if home.is_dir() else ():
        if not os.path.exists(f"{root}/{folder.name}"):
            shutil.rmtree(folder, ignore_errors=True)
    early.write_mark(str(path), str(now_s()))


def take_back_start(root: str, spec: Mapping[str, object], before_s: float) -> None:
    """It did not run: its last start is the one before, 0.0 if there was none."""
    if (path := _path(root, spec)) is None:
        return
    if before_s:
        early.write_mark(str(path), str(before_s))
    else:
        path.unlink(missing_ok=True)


def last_start_s(root: str, spec: Mapping[str, object]) -> float:
    """When a container was last started in its pod, 0.0 if never."""
    return starts_in(root, spec).get(notes_of(spec).get(POD[2], ""), 0.0)


def starts_in(root: str, spec: Mapping[str, object]) -> dict[str, float]:
    """When each container of the same pod was last started, of those that were noted."""
    folder = _home(root) / (notes_of(spec).get(SANDBOX) or "none")
    files = [path for path in folder.iterdir() if "~" not in path.name] if folder.is_dir() else []
    return {path.name: float(path.read_text()) for path in files}


def _path(root: str, spec: Mapping[str, object]) -> Path | None:
    """Of a container's note; None for one that is of no pod."""
    notes = notes_of(spec)
    sandbox, name = notes.get(SANDBOX), notes.get(POD[2])
    return _home(root) / sandbox / name if sandbox and name and "/" not in sandbox + name else None


def _home(root: str) -> Path:
    return Path(f"{os.environ.get('KEDGE_RUNC_STATE') or early.STATE}-pods/{root}")
