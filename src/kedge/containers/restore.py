"""Thawing: bringing a container back from a checkpoint, here or on another machine.

    files beside → root unmounted → load and verify → files in place → restore → running

Whatever fails, the files are as before and the network is unlocked. Nothing is changed before every byte has been read
and verified. The root is unmounted first, because that waits until all that was written to its disk is durable: the
images, which nobody needs again, would be waited for too.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import Conflict, Corrupted, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, parse_name

from . import network, snapshot
from .attempts import Attempt, attempt, only_one
from .companions import Companion, Phases, Report
from .criu.pages import validate_images
from .engine import runc
from .pids import pids_below
from .programs import find_program
from .rootfs import Rootfs, find_rootfs, replaced

Run = Callable[[Sequence[str], Sequence[int]], int]  # a command, and the descriptors that it holds


@dataclass(frozen=True, slots=True)
class Thawed:
    """What came of a restore."""

    id: str
    pid: int
    checkpoint: Checkpoint
    phases_ms: Mapping[str, float]


def thaw_container(
    manager: CheckpointManager,
    name: str,
    *,
    new_id: str | None = None,
    bundle: Path | None = None,
    root: str | None = None,
    runtime_options: Sequence[str] = (),
    companions: Sequence[Companion] = (),
    report: Report | None = None,
) -> Thawed:
    """Bring a container back: the newest sound checkpoint of a key, or the one with that ID.

    A checkpoint that turns out to be damaged is marked, and the one before it is taken, unless it was named itself.
    """
    is_id = manager.exists(name)
    while True:
        checkpoint = snapshot.find(manager, "container", name)
        try:
            return _thaw(manager, checkpoint, new_id, bundle, root, runtime_options, companions, Phases(report=report))
        except Corrupted as error:
            if is_id or manager.condemn(checkpoint.id).status != "corrupted":
                raise  # what is sound in the store is not passed over for an older one
            warnings.warn(f"checkpoint {checkpoint.id} is damaged, the one before it is used: {error}", stacklevel=2)


def _thaw(
    manager: CheckpointManager,
    checkpoint: Checkpoint,
    new_id: str | None,
    bundle: Path | None,
    root: str | None,
    runtime_options: Sequence[str],
    companions: Sequence[Companion],
    phases: Phases,
) -> Thawed:
    _, kept = snapshot.load(manager, checkpoint.id)
    if kept.kind != "container":
        raise Validation(f"{checkpoint.id} holds processes, no container", hint="use kedge process run --key")
    for companion in companions:
        companion.before_restore(checkpoint.metadata)
    identity = new_id or kept.id
    parse_name("container ID", identity)
    program = find_program("crun" if kept.runtime.get("name") == "crun" else "runc")
    place = root or str(kept.runtime.get("root") or "/run/runc")
    home = Path(bundle or kept.bundle).absolute()
    with ExitStack() as stack:
        lock = stack.enter_context(only_one(place, identity))
        if os.path.lexists(f"{place}/{identity}"):  # where the runtime keeps what it knows
            raise Conflict(f"container {identity} exists already", hint="delete it first, or give --new-id")
        spec = bundle_spec(home, kept)
        net = network.mode_of(spec)
        network.refuse_mismatch(kept.network, net)
        work = stack.enter_context(attempt("restore", identity, lock))
        rootfs = find_rootfs(home, str(spec.get("root", {}).get("path", "rootfs")))
        with phases.phase("files"):
            put_in_place = stack.enter_context(files_of(kept, rootfs, work))
        with phases.phase("load"):
            unpack_images(kept, work)
        with phases.phase("files"):
            put_in_place()
        with phases.phase("restore"):
            command = [program, "--root", place, "restore", "--detach", "--image-path", str(work.images),
                       "--work-path", str(work.path), "--bundle", str(home), "--pid-file", str(work.path / "pid"),
                       *kept.criu.get("options", ()), *runtime_options, identity]  # fmt: skip
            run_restore(command, work, net)
        stack.push(_end_if_failed(program, place, identity))
        pid = int((work.path / "pid").read_text())
        for companion in companions:
            companion.after_restore(pids_below(pid), phases)
    return Thawed(identity, pid, checkpoint, phases.milliseconds())


def _end_if_failed(program: str, root: str, identity: str) -> Callable[..., None]:
    """Its files go back to what they were when something fails from here on: then it must not run on them."""

    def on_exit(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            runc.run(program, root, "delete", "--force", identity)

    return on_exit


def unpack_images(kept: snapshot.Snapshot, work: Attempt) -> None:
    """The images as files, every byte verified, and looked at before CRIU sees them."""
    work.images.rmdir()
    kept.images.write_to(work.images, durable=False)
    validate_images(work.images)


def files_of(kept: snapshot.Snapshot, rootfs: Rootfs, work: Attempt) -> AbstractContextManager[Callable[[], None]]:
    """What puts the container's files in their place, for good; they are as before if anything fails within."""
    if kept.rootfs is None:
        return nullcontext(lambda: None)
    if kept.rootfs_kind != rootfs.kind:
        raise Conflict(
            f"the checkpoint keeps the files of a root of kind {kept.rootfs_kind}, {rootfs.point} is of kind "
            f"{rootfs.kind}",
            hint="mount the image there as it was: an overlay of the same layers with an upper directory"
            if kept.rootfs_kind == "overlay"
            else "give a bundle whose root is a plain directory",
        )
    return replaced(rootfs, kept.rootfs, lambda facts: work.describe(replaces=facts))


def run_restore(command: Sequence[str], work: Attempt, net: Mapping[str, str], run: Run | None = None) -> None:
    """Run the runtime's restore with our descriptors; CriuFailed, and no lock left behind, when it fails.

    All three streams are ours: those of the container that were pipes become them. So the runtime logs into a file.
    """
    work.describe(network=net)
    command = [command[0], f"--log={work.path / 'runtime.log'}", *command[1:]]
    with network.namespace_of(None, net) as namespace:
        if (run or _run)(command, work.held):
            from .criu.command import failure

            network.remove_lock(namespace)
            raise failure("restored", work)


def _run(command: Sequence[str], held: Sequence[int]) -> int:
    return subprocess.run(command, check=False, pass_fds=held).returncode


def bundle_spec(home: Path, kept: snapshot.Snapshot) -> dict[str, Any]:
    """The bundle's config.json; where a bundle has none, the one that was kept."""
    if not home.is_dir():
        raise NotFound(f"there is no bundle at {home}", hint="give --bundle: a directory with a root file system")
    try:
        return runc.read_spec(home)
    except NotFound:
        import json

        (home / "config.json").write_text(json.dumps(dict(kept.spec)))
        return dict(kept.spec)
