"""Marks: what `kedge-runc` remembers of each container that opted in, in a file below /run.

    wish          what it asked for (opting.Wish); "keep" only when it is until-success
    claim         its claim on its key (claims); none yet where nothing was kept under it before
    restored      the generation that it goes on from; None if it started anew
    bundle        where its bundle is
    environment   what its engine said about the store, so that others keep it where its engine would
    started, killed, ended     when it went on; whether it was signalled; when it was frozen, and so ended
    ending        since when it is being frozen for good: if runc does not know it any more, it was

The shell script in front reads them too, with grep: they are JSON, so no text in one can look like the name of a fact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import early
from .early import PLACES as PLACES

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


def mark_of(root: str, identity: str) -> Path:
    """Where it is remembered that a container opted in."""
    return Path(early.mark_path(root, identity))


def marks() -> list[Path]:
    """All that is remembered on this machine, as `root/identity`."""
    home = Path(os.environ.get("KEDGE_RUNC_STATE") or early.STATE)
    found = [path for path in home.rglob("*") if path.is_file() and "~" not in path.name]
    return sorted(Path("/", path.relative_to(home)) for path in found)


def read_mark(mark: Path) -> dict[str, Any]:
    try:
        found = json.loads(mark.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_mark(mark: Path, facts: Mapping[str, Any]) -> None:
    early.write_mark(str(mark), json.dumps(facts))


def store_of(environment: Mapping[str, str]) -> CheckpointManager:
    """The store that an engine with this environment keeps containers in."""
    from kedge.manager import CheckpointManager

    key_file = environment.get("KEDGE_KEY_FILE")
    is_ours = key_file in (None, "", os.environ.get("KEDGE_KEY_FILE"))
    return CheckpointManager(early.store_url(environment), key=None if is_ours else f"file:{key_file}")
