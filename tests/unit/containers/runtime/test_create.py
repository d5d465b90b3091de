"""`kedge-runc create`: what a restore that came to nothing leaves behind for the next try of the same container."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kedge
from kedge.containers import pod_starts, snapshot
from kedge.containers.bundle import Bundle, Run
from kedge.containers.guard import Guard
from kedge.containers.network import Network
from kedge.containers.runtime import create as creating
from kedge.containers.runtime import marks
from kedge.containers.runtime.arguments import parse
from kedge.containers.runtime.container import CalledContainer
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish
from kedge.errors import CriuFailed, StorageError

OLD_POD, NEW_POD = "5a1b", "7c2d"
# A runtime to which one container is known.
RUNC = """#!/bin/sh
for word; do last=$word; done
case "$*" in *" state "*) [ "$last" = b ] && echo '{"status": "running"}' ;; esac
"""


class Killed(BaseException):
    """What nobody answers to."""


class Pod:
    """A new pod, in which one container was restored and lives, and another that shares a volume is to be."""

    def __init__(self, folder: Path, policy: str) -> None:
        self.folder = folder
        self.root = folder / "runc"
        self.runc = folder / "runc.sh"
        self.runc.write_text(RUNC)
        self.runc.chmod(0o755)
        (self.root / NEW_POD).mkdir(parents=True)
        self.spec = self._write_bundle("a", policy)
        self._write_bundle("b", policy)
        other = Mark(Wish("team+web-0+b", "latest"), str(folder / "b"), restored="x")
        marks.write_mark(marks.mark_of(str(self.root), "b"), other)
        with marks.store_of(os.environ) as store:
            self._save(store)

    def _write_bundle(self, name: str, policy: str) -> dict[str, Any]:
        notes = {
            "io.kubernetes.cri.sandbox-id": NEW_POD,
            "io.kubernetes.cri.sandbox-namespace": "team",
            "io.kubernetes.cri.sandbox-name": "web-0",
            "io.kubernetes.cri.container-name": name,
        }
        source = f"{self.folder}/pods/{NEW_POD}/volumes/kubernetes.io~empty-dir/shared"
        spec: dict[str, Any] = {
            "process": {"env": ["KEDGE_CHECKPOINT=1", "KEDGE_WAIT=0", f"KEDGE_POLICY={policy}"]},
            "annotations": notes,
            "mounts": [{"destination": "/shared", "type": "bind", "source": source, "options": ["rbind", "rw"]}],
        }
        (self.folder / name / "rootfs").mkdir(parents=True)
        (self.folder / name / "config.json").write_text(json.dumps(spec))
        return spec

    def _save(self, store: kedge.CheckpointManager) -> None:
        source = self.folder / "saved"
        source.mkdir()
        (source / "file").write_text("of a")
        volumes = {"/shared": snapshot.files_tree(source)}
        network = Network(mode="host", path="")
        taken = snapshot.Snapshot("container", "a", kedge.Tree(source), network=network, volumes=volumes)
        facts = {"sandbox": OLD_POD, "moment_s": 10.0, "names": {"/shared": "shared"}, "starts": {}}
        names = {"namespace": "team", "name": "web-0", "container": "a"}
        metadata = {"kind": "container", "is_running": False, "pod": names, "volumes": facts}
        store.save("container:team+web-0+a", "s", taken.state(), metadata=metadata)

    def create(self) -> int | None:
        words = ["--root", str(self.root), "create", "--bundle", str(self.folder / "a"), "a"]
        return creating.create(CalledContainer(str(self.runc), parse(words)))

    def is_noted(self) -> bool:
        return "a" in pod_starts.starts_in(str(self.root), self.spec)


@pytest.fixture(name="make_pod")
def _make_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Pod]:
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("KEDGE_RUNC", str(tmp_path / "runc.sh"))
    return lambda policy: Pod(tmp_path, policy)


def let_fail(monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException | None) -> list[str]:
    """Of the restore, only its steps: loading, the runtime's restore, and what comes after it. Gives those taken."""
    taken_steps: list[str] = []

    def take(now: str) -> None:
        taken_steps.append(now)
        if now == step and error is not None:
            raise error

    def restore(_: object, taken: Any, target: Any, **__: object) -> None:
        take("load")
        target.run(taken, SimpleNamespace(images=Path("images"), path=Path("work")), None)
        take("settle")

    def run_bundle(_: Bundle, command: list[str], __: object, run: Run, *___: object, **____: object) -> None:
        take("prepare")
        if run(command, ()):
            raise error or AssertionError("it failed by itself")
        take("after")

    def run_guarded(*_: object) -> int:
        try:
            take("run")
        except CriuFailed:
            return 1
        return 0

    monkeypatch.setattr(creating, "restore_checkpoint", restore)
    monkeypatch.setattr(Bundle, "run", run_bundle)
    monkeypatch.setattr(Guard, "run", run_guarded)
    monkeypatch.setattr(Guard, "keep", Guard.drop)
    return taken_steps


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("load", StorageError("the store does not answer")),
        ("load", Killed()),
        ("prepare", StorageError("no space left")),
        ("run", CriuFailed("a PID is taken")),
    ],
    ids=["load", "load-killed", "prepare", "run"],
)
def test_a_restore_in_which_nothing_ran_can_be_tried_again(
    make_pod: Callable[[str], Pod], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    pod = make_pod("fail")
    let_fail(monkeypatch, step, error)
    with pytest.raises(type(error)):
        pod.create()
    assert not pod.is_noted()
    let_fail(monkeypatch, "", None)
    assert pod.create() == 0
    assert pod.is_noted()


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("run", Killed()),
        ("after", StorageError("no space left")),
        ("settle", Killed()),
        ("settle", CriuFailed("no GPU")),
    ],
    ids=["run-killed", "after", "settle-killed", "settle"],
)
def test_one_that_may_have_run_is_not_restored_on_files_that_others_go_on_with(
    make_pod: Callable[[str], Pod], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    pod = make_pod("fail")
    let_fail(monkeypatch, step, error)
    with pytest.raises(type(error)):
        pod.create()
    let_fail(monkeypatch, "", None)
    with pytest.raises(kedge.Conflict, match="/shared is in use by team\\+web-0\\+b"):
        pod.create()


def test_one_that_begins_anew_is_noted(make_pod: Callable[[str], Pod], monkeypatch: pytest.MonkeyPatch) -> None:
    pod = make_pod("fresh")
    let_fail(monkeypatch, "run", CriuFailed("not here", is_verdict=True))
    assert pod.create() is None
    assert pod.is_noted()


def test_one_whose_restore_was_killed_does_not_begin_anew(
    make_pod: Callable[[str], Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing speaks against its checkpoint: it can be restored the next time, and beginning anew would undo it."""
    pod = make_pod("fresh")
    let_fail(monkeypatch, "run", CriuFailed("runc was killed", is_verdict=False))
    with pytest.raises(CriuFailed):
        pod.create()
    assert not pod.is_noted()


def test_a_retry_after_processes_ran_is_refused_too(
    make_pod: Callable[[str], Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one create: the second try would meet what the first has written."""
    pod = make_pod("retry:2")
    steps = let_fail(monkeypatch, "settle", CriuFailed("no GPU"))
    assert pod.create() is None
    assert steps.count("run") == 1
