"""How users name checkpoints.

ID        a checkpoint            JOB#7     the checkpoint of JOB with sequence number 7
JOB       its newest checkpoint   REF~2     the one two before REF, in the same job
"""

from __future__ import annotations

import re

from kedge.errors import Corrupted, InvalidName, NotFound
from kedge.model import Checkpoint, parse_name
from kedge.ports import NEWEST_INTACT, Catalogue, Selection

REFERENCE_HELP = "ID, JOB (its newest), JOB#7 (by number), or any of these with ~1 for the one before."

_REFERENCE = re.compile(r"(?P<base>[^~#]+)(?:#(?P<seq>\d{1,15}))?(?:~(?P<back>\d{0,9}))?")


def resolve(catalogue: Catalogue, reference: str) -> Checkpoint:
    """Return the checkpoint a user names. Raises NotFound. An ID takes precedence over a job of that name."""
    parts = _REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if parts is None:
        raise InvalidName(f"{str(reference)[:80]!r} does not name a checkpoint", hint=REFERENCE_HELP)
    base, seq = parse_name("checkpoint or job", parts["base"]), parts["seq"]
    checkpoint = _by_name(catalogue, base) if seq is None else _by_number(catalogue, base, int(seq))
    if parts["back"] is None:
        return checkpoint
    return _earlier(catalogue, checkpoint, int(parts["back"] or 1))


def _by_name(catalogue: Catalogue, name: str) -> Checkpoint:
    try:
        return catalogue.get(name)
    except NotFound:
        pass
    for latest in catalogue.list(name, NEWEST_INTACT):
        return latest
    if damaged := catalogue.list(name, Selection(limit=1)):
        raise Corrupted(
            f"every checkpoint of job {name} is marked as damaged, such as {damaged[0].id}",
            hint="run kedge check; put lost files back, or load one by its ID to see what is wrong",
        )
    raise NotFound(
        f"no checkpoint and no job is called {name}",
        hint="kedge jobs lists the jobs, kedge list JOB the checkpoints of one",
    )


def _by_number(catalogue: Catalogue, job: str, seq: int) -> Checkpoint:
    near = catalogue.list(job, Selection(limit=1, before=seq + 1))
    if not near or near[0].seq != seq:
        raise NotFound(f"job {job} has no checkpoint #{seq}", hint=f"kedge list {job} shows what it has")
    return near[0]


def _earlier(catalogue: Catalogue, checkpoint: Checkpoint, back: int) -> Checkpoint:
    if not back:
        return checkpoint
    earlier = catalogue.list(checkpoint.job, Selection(limit=back, before=checkpoint.seq))
    if len(earlier) < back:
        count = "only 1 checkpoint" if len(earlier) == 1 else f"only {len(earlier)} checkpoints"
        raise NotFound(
            f"job {checkpoint.job} has {count} before #{checkpoint.seq}",
            hint=f"kedge list {checkpoint.job} shows what it has",
        )
    return earlier[0]
