"""Containers of an OCI runtime as sources of checkpoints and targets of restores."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import Conflict, CriuFailed, NotFound, storage_errors
from kedge.files import Tree
from kedge.model import parse_name

from . import network, volumes
from .attempts import Attempt
from .checkpoint import Files, Source
from .credentials import confinement, refuse_more
from .criu import leftovers
from .criu.command import Dump, failure, was_killed, with_config
from .criu.watches import config_for
from .engine import runc
from .network import Network
from .page_writer import PageWriter
from .phases import Phases
from .pids import is_alive, pids_below
from .programs import find_program
from .restore import Target
from .rootfs import Rootfs, copy_away, find_rootfs, replaced, seeing
from .safe_copy import copy_tree
from .snapshot import Snapshot, files_tree
from .volumes import Volume, volumes_of

Run = Callable[[Sequence[str], Sequence[int]], int]  # a command, and the descriptors that it holds


@dataclass(frozen=True, slots=True)
class Bundle:
    """The directory of a container: its config.json and its root file system."""

    path: Path
    spec: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Bundle:
        return cls(path, runc.read_spec(path))

    @property
    def network(self) -> Network:
        return network.network_of(self.spec)

    def rootfs(self) -> Rootfs:
        """As it is mounted now."""
        return find_rootfs(self.path, str(self.spec.get("root", {}).get("path", "rootfs")))

    @contextmanager
    def files(self, taken: Snapshot, attempt: Attempt) -> Iterator[Callable[[], None]]:
        """What puts the checkpoint's files into the root and the volumes (see restore.Target)."""
        rootfs = self.rootfs()
        root_files = self._root_files(taken, rootfs, attempt)
        with root_files as put_root, self._volume_files(taken, rootfs, attempt) as put_volumes:

            def put_in_place() -> None:
                put_root()
                put_volumes()

            yield put_in_place

    def _volume_files(
        self, taken: Snapshot, rootfs: Rootfs, attempt: Attempt
    ) -> AbstractContextManager[Callable[[], None]]:
        """With those of a root that is itself a mount."""
        here = {volume.destination: volume for volume in volumes_of(self.spec) if volume.is_saved}
        if missing := sorted(taken.volumes.keys() - here.keys()):
            raise Conflict(
                f"the checkpoint has the files of an emptyDir volume at {missing[0]}, the container has none there",
                hint="give the pod the same volumes",
            )
        trees = {here[destination]: tree for destination, tree in taken.volumes.items()}
        if rootfs.is_mount and taken.rootfs is not None:
            trees[Volume("/", rootfs.point, "root", "root")] = taken.rootfs
        return volumes.replaced(trees, attempt.files, lambda facts: attempt.describe(volumes=facts))

    def _root_files(
        self, taken: Snapshot, rootfs: Rootfs, attempt: Attempt
    ) -> AbstractContextManager[Callable[[], None]]:
        if taken.rootfs is None:
            return nullcontext(lambda: None)
        if taken.rootfs_kind != rootfs.kind:
            raise Conflict(
                f"the checkpoint has the files of a root of kind {taken.rootfs_kind}, {rootfs.point} is of kind "
                f"{rootfs.kind}",
                hint="mount the image there as it was: an overlay of the same layers with an upper directory"
                if taken.rootfs_kind == "overlay"
                else "give a bundle whose root is a plain directory",
            )
        if rootfs.is_mount:
            return nullcontext(lambda: None)
        return replaced(rootfs, taken.rootfs, lambda facts: attempt.describe(replaces=facts))

    def run(
        self, command: Sequence[str], attempt: Attempt, run: Run, pages: PageWriter, *, closes_tcp: bool = False
    ) -> None:
        """Run the runtime's restore with our descriptors; CriuFailed, and no lock left behind, when it fails. Conflict
        if it would give more than the configuration does.

        All three streams are ours: those of the container that were pipes become them. So the runtime logs into a file.
        With `closes_tcp`, connections are closed in the restored processes; runtimes have no word for that, CRIU has.
        """
        refuse_more(attempt.images, self.spec)
        makes = leftovers.to_be_made(cgroup=self._cgroup(attempt.subject))
        attempt.describe(network=self.network, makes=makes)
        wait_for_pages = pages.hook() if os.path.basename(command[0]) == "runc" else None
        if wait_for_pages is None:  # not known to run hooks in a restore
            pages.wait()
        command = [command[0], f"--log={attempt.path / 'runtime.log'}", *command[1:]]
        if closes_tcp:
            settings = with_config(attempt, ["tcp-close"])
            command = [find_program("env"), *(f"{name}={value}" for name, value in settings.items()), *command]
        with network.namespace_of(None, self.network) as namespace, self._with_hook(wait_for_pages):
            if status := run(seeing(self.rootfs(), command), attempt.held):
                if was_killed(status):  # what it had started goes on: it must be gone before files are as before
                    leftovers.wait_for_others(attempt.held)
                    leftovers.end_unfinished(**makes)
                network.remove_lock(namespace)
                raise failure("restored", attempt, killed="the runtime" if was_killed(status) else "")

    def _cgroup(self, identity: str) -> str:
        """How the path of its cgroup ends, for whichever driver."""
        path = str(self.spec.get("linux", {}).get("cgroupsPath") or identity)
        if path.count(":") == 2:
            _, prefix, name = path.split(":")
            path = f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
        return f"/{path.lstrip('/')}"

    @contextmanager
    def _with_hook(self, last: Mapping[str, object] | None) -> Iterator[None]:
        """With hooks of ours, before the processes go on. A hook is one of config.json, which is as before again when
        the runtime has read it.

        A network of its own is made anew, and no runtime brings up its `lo` in a restore, as it does in a create.
        """
        first = [network.loopback_hook()] if self.network["mode"] == "own" else []
        if not first and last is None:
            yield
            return
        hooks = dict(self.spec.get("hooks") or {})
        hooks["createRuntime"] = [*first, *(hooks.get("createRuntime") or ()), *([] if last is None else [last])]
        before = (self.path / "config.json").read_bytes()
        self._write_config(json.dumps({**self.spec, "hooks": hooks}).encode())
        try:
            yield
        finally:
            self._write_config(before)

    def _write_config(self, content: bytes) -> None:
        """By rename, with its old times: nobody reads half of it, or takes it for a newer one."""
        config = self.path / "config.json"
        new = self.path / ".config.json.kedge"
        with storage_errors("write", config):
            status = config.stat()
            new.write_bytes(content)
            os.chmod(new, status.st_mode)
            os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
            new.rename(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSource(Source):
    """A running container. `image_path`: where the caller wants the images too."""

    container: runc.Container
    rootfs: Rootfs
    image_path: Path | None
    volumes: Sequence[Volume]  # those of its pod that are saved

    @classmethod
    def of(
        cls, container: runc.Container, image_path: Path | None = None, *, volumes_asked: str = ""
    ) -> ContainerSource:
        """Conflict if the container does not run, or a volume of its pod cannot be saved. `volumes_asked`: yes or no,
        whether they are."""
        if container.status not in ("running", "paused"):
            raise Conflict(
                f"container {container.id} is {container.status}", hint="only a running one can be checkpointed"
            )
        bundle = Bundle(container.bundle, container.spec)
        version = runc.runtime_version(container.program)
        return cls(
            kind="container",
            id=container.id,
            pid=container.pid,
            lock=(container.root, container.id),
            runtime={"name": container.engine, "version": version, "root": container.root},
            network=bundle.network,
            locks_network=True,
            bundle=str(bundle.path),
            spec=bundle.spec,
            container=container,
            rootfs=bundle.rootfs(),
            image_path=image_path,
            volumes=volumes.saved_volumes(bundle.spec, volumes_asked),
        )

    def dump(self, attempt: Attempt, options: Sequence[str], *, leave_running: bool) -> Dump:
        command = self.container.command(
            "checkpoint", "--image-path", str(attempt.images), "--work-path", str(attempt.path), *options,
            "--leave-running", self.id,
        )  # fmt: skip
        forget = () if leave_running else self.container.command("delete", "--force", self.id)
        return Dump(command, forget, config_for(pids_below(self.pid)))

    def files(self, attempt: Attempt, phases: Phases, *, leave_running: bool) -> Files:
        if self.image_path is not None:
            give_images(attempt.images, self.image_path)
        root = None if self.rootfs.kind == "none" else self.rootfs.changes
        with phases.phase("files"):
            copies = self._copy_volumes(attempt)
            if leave_running and root is not None:
                copy_away(root, attempt.rootfs)
                root = attempt.rootfs
        facts = volumes.facts_of(self.volumes, self.spec, self.container.root)
        return Files(self.rootfs.kind, root, volumes=copies, facts=facts)

    def _copy_volumes(self, attempt: Attempt) -> dict[str, Tree]:
        """Copies also when it is to end: other containers of the pod write on, and whoever kills it meanwhile, because
        its time is over, removes its volumes."""
        trees = {}
        for number, volume in enumerate(self.volumes):
            attempt.files.mkdir(mode=0o700, exist_ok=True)
            copy_tree(volume.source, attempt.files / str(number))
            trees[volume.destination] = files_tree(attempt.files / str(number))
        if trees and not is_alive(self.pid):
            raise Conflict(
                f"container {self.id} was killed while its volumes were copied",
                hint="give it more time to stop: terminationGracePeriodSeconds",
            )
        return trees


def give_images(images: Path, target: Path) -> None:
    """The caller's image path gets the images too: by hard links where that is possible."""
    with storage_errors("write", target):
        target.mkdir(parents=True, exist_ok=True)
        for source in images.iterdir():
            image = target / source.name
            image.unlink(missing_ok=True)
            try:
                os.link(source, image)
            except OSError:  # another file system
                shutil.copy2(source, image)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTarget(Target):
    """A container of runc or crun, which does not exist yet."""

    program: str
    root: str
    bundle: Bundle

    @classmethod
    def of(
        cls, taken: Snapshot, *, new_id: str | None = None, bundle: Path | None = None, root: str | None = None
    ) -> ContainerTarget:
        """What is not given is as it was. Refuses what the checkpoint does not fit into."""
        container_id = parse_name("container ID", new_id or taken.id)
        root = root or str(taken.runtime.get("root") or "/run/runc")
        path = Path(bundle or taken.bundle).absolute()
        if not path.is_dir():
            raise NotFound(f"there is no bundle at {path}", hint="give --bundle: a directory with a root file system")
        has_spec = (path / "config.json").exists()
        target = Bundle.read(path) if has_spec else Bundle(path, dict(taken.spec))
        network.refuse_mismatch(taken.network, target.network)
        program = find_program("crun" if taken.runtime.get("name") == "crun" else "runc")
        return cls(id=container_id, lock=(root, container_id), program=program, root=root, bundle=target)

    def refuse_taken(self) -> None:
        if os.path.lexists(f"{self.root}/{self.id}"):  # where the runtime keeps what it knows
            raise Conflict(f"container {self.id} exists already", hint="delete it first, or give --new-id")

    @contextmanager
    def files(self, taken: Snapshot, attempt: Attempt) -> Iterator[Callable[[], None]]:
        config = self.bundle.path / "config.json"
        if not config.exists():
            config.write_text(json.dumps(dict(self.bundle.spec)))
        with self.bundle.files(taken, attempt) as put_in_place:
            yield put_in_place

    def run(self, taken: Snapshot, attempt: Attempt, pages: PageWriter) -> None:
        command = [
            self.program, "--root", self.root, "restore", "--detach", "--image-path", str(attempt.images),
            "--work-path", str(attempt.path), "--bundle", str(self.bundle.path), "--pid-file",
            str(attempt.path / "pid"), *taken.options(), *confinement(self.bundle.spec), self.id,
        ]  # fmt: skip
        try:
            self.bundle.run(command, attempt, run_watched, pages)
        except CriuFailed:
            self.end(attempt)  # it is there, if its runtime was killed after all else
            raise

    def end(self, attempt: Attempt) -> None:
        done = runc.run(self.program, self.root, "delete", "--force", self.id)
        if done.returncode:
            warnings.warn(f"container {self.id} could not be removed again: {done.stderr.strip()}", stacklevel=2)


def run_watched(command: Sequence[str], held: Sequence[int]) -> int:
    """Run a restore; its exit status. Should its CRIU be killed, what that leaves behind is ended."""
    process = subprocess.Popen(command, pass_fds=held)
    ended = os.pidfd_open(process.pid)  # Popen.wait with a timeout sleeps up to 50 ms beyond the end
    try:
        while not select.select([ended], [], [], leftovers.LOOK_S)[0]:
            leftovers.end_if_criu_was_killed(process.pid, held)
    finally:
        os.close(ended)
    return process.wait()
