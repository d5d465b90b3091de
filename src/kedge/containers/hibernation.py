"""Hibernation: workloads that are checkpointed, gone from the machine, and not restored before somebody says so.

What restarts a container (a kubelet, by the pod's restartPolicy) does so at once and knows nothing of us. So that a
workload sleeps is a tag of its newest generation, in the store, committed together with it: from the moment when the
container may end, no `create` of that workload, on whichever machine, gets further than being told. Waking removes the
tag; the next `create` restores it. Deleting the generation, or a newer one, wakes it too.
"""

from __future__ import annotations

from collections.abc import Iterator

from kedge.errors import Conflict
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import snapshot

ASLEEP = "asleep"


def refuse_asleep(manager: CheckpointManager, key: str) -> None:
    """Conflict if the workload sleeps."""
    if asleep(manager, snapshot.job_of("container", key)) is not None:
        raise Conflict(f"workload {key} hibernates", hint=f"wake it: kedge pod wake {key}")


def asleep(manager: CheckpointManager, job: str) -> Checkpoint | None:
    """The generation that a workload sleeps in; None when it does not."""
    newest = manager.list(job, limit=1)
    return newest[0] if newest and ASLEEP in newest[0].tags else None


def sleepers(manager: CheckpointManager, prefix: str = "") -> Iterator[Checkpoint]:
    """All that sleep, of the keys that begin with `prefix`."""
    for job in manager.jobs(f"container:{prefix}"):
        if (checkpoint := asleep(manager, job.name)) is not None:
            yield checkpoint
