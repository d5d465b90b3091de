"""Marks: what `kedge-runc` remembers of each container that opted in, in a file of JSON below /run.

The shell script in front reads them too, with patterns: they are JSON, so no text in one can look like the name of a
fact. `early` writes the first one of a container by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.model import Lease

from . import early
from .early import PLACES as PLACES
from .opt_in import Wish

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


@dataclass(frozen=True, slots=True)
class Mark:
    """What is remembered of one container. The times are `time.time()`."""

    wish: Wish  # what it asked for
    bundle: str = ""
    # What its engine said about the store, so that others use the same.
    environment: Mapping[str, str] = field(default_factory=dict)
    claim: Lease | None = None  # on its key (claims); none yet where no checkpoint had that key before
    restored: str | None = None  # the checkpoint that it was restored from; None if it started anew
    started: float | None = None
    killed: bool = False  # whether it was signalled
    ending: float | None = None  # since when it is being checkpointed for good: if runc has forgotten it, it was
    ended: float | None = None  # when it was checkpointed, and so ended

    @property
    def key(self) -> str:
        return self.wish.key

    @property
    def awaits_start(self) -> bool:
        """Whether it was restored and, as far as is noted, not started: runc calls it paused."""
        return self.restored is not None and not self.started

    def to_json(self) -> str:
        """`restored` is always there; of the others what is known."""
        optional = {"environment": self.environment, "started": self.started, "killed": self.killed,
                    "ending": self.ending, "ended": self.ended,
                    "claim": None if self.claim is None else asdict(self.claim)}  # fmt: skip
        facts = {"wish": self.wish.facts(), "restored": self.restored, "bundle": self.bundle}
        return json.dumps(facts | {name: value for name, value in optional.items() if value})

    @classmethod
    def from_json(cls, text: str) -> Mark | None:
        """None for what is not the mark of a container that opted in."""
        try:
            facts = json.loads(text)
            claim, environment = facts.get("claim"), facts.get("environment") or {}
            return cls(
                wish=Wish.of(facts["wish"]),
                bundle=str(facts.get("bundle") or ""),
                environment={str(name): str(value) for name, value in environment.items()},
                claim=Lease(**claim) if claim else None,
                restored=facts.get("restored"),
                started=facts.get("started"),
                killed=bool(facts.get("killed")),
                ending=facts.get("ending"),
                ended=facts.get("ended"),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def mark_of(root: str, identity: str) -> Path:
    """Where it is remembered that a container opted in."""
    return Path(early.mark_path(root, identity))


def marks() -> list[Path]:
    """All that is remembered on this machine, as `root/identity`."""
    home = Path(os.environ.get("KEDGE_RUNC_STATE") or early.STATE)
    files = [path for path in home.rglob("*") if path.is_file() and "~" not in path.name]
    return sorted(Path("/", path.relative_to(home)) for path in files)


def read_mark(path: Path) -> Mark | None:
    """None where there is none, or nothing that one can read."""
    try:
        return Mark.from_json(path.read_text())
    except FileNotFoundError:
        return None


def find_mark(container: Path) -> Mark | None:
    """The mark of a container that is given as `root/identity`."""
    return read_mark(mark_of(str(container.parent), container.name))


def write_mark(path: Path, mark: Mark) -> None:
    early.write_mark(str(path), mark.to_json())


def is_leaving(container: Path) -> bool:
    """Whether a container, as `root/identity`, was told to stop; the front notes that before anything else."""
    return os.path.exists(f"{mark_of(str(container.parent), container.name)}~leaving")


def remove_mark(path: Path) -> None:
    path.with_name(f"{path.name}~leaving").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def store_of(environment: Mapping[str, str]) -> CheckpointManager:
    """The store that an engine with this environment uses."""
    from kedge.containers.snapshot import keep_private  # start time
    from kedge.manager import CheckpointManager

    key_file = environment.get("KEDGE_KEY_FILE")
    is_ours = key_file in (None, "", os.environ.get("KEDGE_KEY_FILE"))
    url = early.store_url(environment)
    keep_private(url)
    return CheckpointManager(url, namespace=early.NAMESPACE, key=None if is_ours else f"file:{key_file}")
