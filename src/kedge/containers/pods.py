"""The pods of a node: what runs in them, checkpointing it, letting it sleep, waking it.

Pods and containers are found through CRI, and then checkpointed like any other container. One that opted in is
checkpointed into the store of its engine, under its key and its claim. Another one can be too, by name, under the key
that it would have.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from kedge.errors import Conflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from . import hibernation
from .bundle import ContainerSource
from .checkpoint import Checkpointed, Request, make_checkpoint
from .engine import cri, runc
from .engine.owners import owner_of
from .gpu.memory import GpuMemory
from .runtime import claims, marks, opt_in
from .runtime.container import engine_of
from .runtime.marks import Mark
from .runtime.settings import chosen
from .snapshot import TIES
from .volumes import Volume, volumes_of


@dataclass(frozen=True, slots=True)
class PodName:
    """NS/POD, or NS/POD/CONTAINER."""

    namespace: str
    pod: str
    container: str = ""

    @classmethod
    def parse(cls, text: str) -> PodName:
        parts = text.split("/")
        if len(parts) not in (2, 3) or not all(parts):
            raise Validation(
                f"{text!r} is not the name of a pod", hint="write NAMESPACE/POD or NAMESPACE/POD/CONTAINER"
            )
        return cls(*parts)

    def fits(self, container: cri.PodContainer) -> bool:
        is_of_pod = (container.pod.namespace, container.pod.name) == (self.namespace, self.pod)
        return is_of_pod and self.container in ("", container.name)


@dataclass(frozen=True, slots=True)
class Workload:
    """A container of a pod, and what is known of it here."""

    container: cri.PodContainer
    place: Path | None = None  # root/identity, if it opted in
    mark: Mark | None = None  # of the same

    @property
    def name(self) -> str:
        pod = self.container.pod
        return f"{pod.namespace}/{pod.name}/{self.container.name}"

    @property
    def is_opted_in(self) -> bool:
        return self.mark is not None

    @property
    def environment(self) -> Mapping[str, str]:
        return {} if self.mark is None else self.mark.environment

    @property
    def key(self) -> str:
        if self.mark is not None:
            return self.mark.key
        pod = self.container.pod
        notes = dict(zip(opt_in.POD, (pod.namespace, pod.name, self.container.name), strict=True))
        return opt_in.key_of(notes, owner=lambda _: owner_of(pod.name, pod.labels, pod.annotations))

    def find(self) -> runc.Container:
        """As its runtime knows it."""
        if self.place is None:
            return runc.find_container(self.container.id)
        root = str(self.place.parent)
        return runc.look_up(self.container.id, engine_of(root), root, self.environment.get("KEDGE_RUNC"))

    def volumes(self, container: runc.Container) -> list[Volume]:
        """Those that it has mounted; as not saved where it, or this node, says so."""
        asked = "" if self.mark is None else self.mark.wish.volumes
        are_saved = chosen(asked, "KEDGE_VOLUMES", ("yes", "no")) == "yes"
        return [replace(volume, is_wanted=are_saved) for volume in volumes_of(container.spec)]

    def source(self) -> ContainerSource:
        return ContainerSource.of(self.find(), volumes_asked="" if self.mark is None else self.mark.wish.volumes)


def workloads(address: str) -> list[Workload]:
    """The newest start of each container of each pod of this node."""
    places = {place.name: place for place in marks.marks()}
    newest = {(container.pod.id, container.name): container for container in cri.containers(address)}
    return [_workload(container, places.get(container.id)) for container in newest.values()]


def _workload(container: cri.PodContainer, place: Path | None) -> Workload:
    mark = marks.find_mark(place) if place is not None else None
    return Workload(container, place, mark) if mark is not None else Workload(container)


def find(address: str, name: PodName) -> list[Workload]:
    """The running containers that are meant: the one that is named, or all of the pod that opted in."""
    of_pod = [workload for workload in workloads(address) if PodName(name.namespace, name.pod).fits(workload.container)]
    if not of_pod:
        raise NotFound(f"there is no pod {name.namespace}/{name.pod} on this node", hint="kedge pod list")
    named = [workload for workload in of_pod if name.fits(workload.container)]
    if not named:
        known = ", ".join(workload.container.name for workload in of_pod)
        raise NotFound(f"pod {name.pod} has no container {name.container}", hint=f"it has {known}")
    if not name.container:
        named = [workload for workload in named if workload.is_opted_in]
    if not named:
        known = ", ".join(workload.container.name for workload in of_pod)
        raise Validation(
            f"no container of {name.namespace}/{name.pod} opted in",
            hint=f"kedge pod list shows what hibernates; or name a container (NAMESPACE/POD/CONTAINER) of {known}",
        )
    running = [
        workload
        for workload in named
        if workload.container.state == "running" and not (workload.mark and workload.mark.ended)
    ]
    if not running:
        raise Conflict(
            f"{name.namespace}/{name.pod}: {', '.join(workload.container.name for workload in named)} is not running",
            hint="kedge pod list shows what runs and what hibernates",
        )
    return running


def checkpoint(workload: Workload, manager: CheckpointManager, gpu: GpuMemory) -> Checkpointed:
    """Checkpoint it, and let it run on."""
    mark = _claimed(workload, manager)
    key, lease = (mark.key, mark.claim) if mark else (workload.key, None)
    request = Request(key, leave_running=True, options=TIES, lease=lease)
    return make_checkpoint(manager, workload.source(), request, gpu=gpu)


def hibernate(workload: Workload, manager: CheckpointManager, gpu: GpuMemory) -> Checkpointed:
    """Checkpoint it, asleep, and end it. If that fails, it runs on and does not sleep."""
    mark = _claimed(workload, manager)
    if workload.place is None or mark is None:
        raise Validation(
            f"{workload.name} did not opt in, so its next start could not be held back",
            hint="run it with the runtime class of Kedge and KEDGE_CHECKPOINT=1",
        )
    path = marks.mark_of(str(workload.place.parent), workload.place.name)
    marks.write_mark(path, replace(mark, ending=time.time()))
    try:
        tags = {hibernation.ASLEEP: datetime.now(UTC).isoformat(timespec="seconds")}
        request = Request(mark.key, options=TIES, lease=mark.claim, tags=tags)
        checkpointed = make_checkpoint(manager, workload.source(), request, gpu=gpu)
    except BaseException:
        marks.write_mark(path, mark)
        raise
    claims.release(manager, mark)
    if path.exists():  # the engine may have noticed, and removed it
        marks.write_mark(path, replace(mark, claim=None, ended=time.time()))
    return checkpointed


def _claimed(workload: Workload, manager: CheckpointManager) -> Mark | None:
    """Its mark, with a claim; None if it did not opt in."""
    if workload.place is None or workload.mark is None:
        return None
    root = str(workload.place.parent)
    mark = claims.ensure(manager, workload.mark, root, workload.container.id)
    if mark is not workload.mark:
        marks.write_mark(marks.mark_of(root, workload.place.name), mark)
    return mark


def sleeping(manager: CheckpointManager, name: str) -> Iterator[Checkpoint]:
    """What sleeps by that name: NS/POD, NS/OWNER, either with /CONTAINER, or a key."""
    if "/" not in name:
        checkpoint = hibernation.asleep(manager, f"container:{name}")
        yield from [checkpoint] if checkpoint is not None else []
        return
    pod_name = PodName.parse(name)
    for checkpoint in hibernation.sleepers(manager, f"{pod_name.namespace}+"):
        pod = checkpoint.metadata.get("pod")
        names: Mapping[str, object] = pod if isinstance(pod, dict) else {}
        owner = checkpoint.job.partition("+")[2].partition("@")[0].partition("+")[0]
        if pod_name.pod not in (names.get("name"), owner, owner.partition(":")[2]):
            continue
        if pod_name.container in ("", names.get("container")):
            yield checkpoint


def wake(manager: CheckpointManager, name: str) -> list[Checkpoint]:
    """Let what sleeps by that name be restored at its next start."""
    asleep = list(sleeping(manager, name))
    if not asleep:
        raise NotFound(f"nothing named {name} hibernates", hint="kedge pod list shows what does")
    return [manager.tag(checkpoint.id, **{hibernation.ASLEEP: None}) for checkpoint in asleep]
