"""How much one workload, and one namespace of a cluster, may keep in the store of a machine.

Whoever writes a pod could fill the disk with generations, or with workloads. KEDGE_KEEP_LAST generations of each stay
(ten; 0 for all), by a rule of its job that `kedge cleanup` shows and an administrator can change. A namespace that has
KEDGE_NAMESPACE_GENERATIONS of them (a thousand) gets no new workload; those it has go on.
"""

from __future__ import annotations

from kedge.care.retention import RetentionPolicy
from kedge.containers import snapshot
from kedge.errors import Conflict
from kedge.manager import CheckpointManager

from .settings import whole_number

KEEP_LAST = 10
NAMESPACE_GENERATIONS = 1000


def keep_within(manager: CheckpointManager, key: str) -> None:
    """Called before a generation of `key` is saved; Conflict when it would be the first of one too many."""
    job = snapshot.job_of("container", key)
    known = manager.catalogue.job(job)
    namespace, plus, _ = key.partition("+")
    if plus and (known is None or not known.checkpoints):
        most = whole_number("KEDGE_NAMESPACE_GENERATIONS", NAMESPACE_GENERATIONS)
        if sum(workload.checkpoints for workload in manager.jobs(f"container:{namespace}+")) >= most:
            raise Conflict(
                f"namespace {namespace} has {most} checkpoints of containers already",
                hint="delete some: kedge container list, kedge delete; or raise KEDGE_NAMESPACE_GENERATIONS",
            )
    keep_last = whole_number("KEDGE_KEEP_LAST", KEEP_LAST)
    if keep_last and (known is None or known.retention is None):
        manager.set_retention(job, RetentionPolicy(keep_last=keep_last))
