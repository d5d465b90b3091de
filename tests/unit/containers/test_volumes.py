"""Volumes of pods: which are saved, and replacing their files so that nothing else is ever left behind."""

import errno
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import snapshot, volumes
from kedge.containers.attempts import NotUndone, attempt, put_right
from kedge.containers.volumes import Volume, problem_of, replaced, saved_volumes, volumes_of

CALLS = ("rename", "unlink", "mkdir", "rmdir", "chown")
POD = "/var/lib/kubelet/pods/1234-5678"
NOTES = {"io.kubernetes.cri.sandbox-id": "abc", "io.kubernetes.cri.sandbox-uid": "1234-5678"}


def mount(destination: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["rbind", *(options or ("rw",))]}


def spec_of(*mounts: dict[str, Any], notes: dict[str, str] = NOTES) -> dict[str, Any]:
    return {"annotations": notes, "mounts": [{"destination": "/proc", "type": "proc"}, *mounts]}


@pytest.mark.parametrize(
    ("source", "options", "kind", "is_saved"),
    [
        (f"{POD}/volumes/kubernetes.io~empty-dir/cache", ("rw",), "emptyDir", True),
        (f"{POD}/volumes/kubernetes.io~empty-dir/cache", ("ro",), "emptyDir", False),
        (f"{POD}/volumes/kubernetes.io~configmap/settings", ("ro",), "configMap", False),
        (f"{POD}/volumes/kubernetes.io~secret/key", ("ro",), "secret", False),
        (f"{POD}/volumes/kubernetes.io~projected/kube-api-access-x2k8q", ("ro",), "projected", False),
        (f"{POD}/volumes/kubernetes.io~csi/pvc-1/mount", ("rw",), "csi", False),
        ("/srv/data", ("rw",), "hostPath", False),
        ("/var/lib/kubelet/pods/another/volumes/kubernetes.io~empty-dir/cache", ("rw",), "hostPath", False),
    ],
)
def test_what_is_saved(source: str, options: tuple[str, ...], kind: str, is_saved: bool) -> None:
    """The emptyDir volumes of its own pod that it writes to, and no other, whatever path somebody wrote."""
    (volume,) = volumes_of(spec_of(mount("/cache", source, *options)))
    assert (volume.kind, volume.is_saved) == (kind, is_saved)
    assert bool(volume.reason) != is_saved


def test_what_is_no_volume() -> None:
    """Files of the pod itself; and nothing of a container that is of no pod."""
    files = [mount("/etc/hosts", f"{POD}/etc-hosts"), mount("/dev/termination-log", f"{POD}/containers/main/1")]
    assert volumes_of(spec_of(*files)) == []
    empty = mount("/cache", f"{POD}/volumes/kubernetes.io~empty-dir/cache")
    assert volumes_of(spec_of(empty, notes={})) == []
    shared = mount("/dev/shm", "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/abc/shm")
    assert [volume.kind for volume in volumes_of(spec_of(shared))] == ["shm"]
    assert volumes_of(spec_of(mount("/dev/shm", "/dev/shm"))) == []  # of the node: hostIPC


def test_volumes_of_crio() -> None:
    """It tells the same in other words; who writes those of containerd besides is believed nothing."""
    notes = {
        "io.container.manager": "cri-o", "io.kubernetes.cri-o.SandboxID": "abc", "io.kubernetes.pod.uid": "1234-5678",
    }  # fmt: skip
    mounts = [
        mount("/cache", f"{POD}/volumes/kubernetes.io~empty-dir/cache"),
        mount("/dev/shm", "/run/containers/storage/overlay-containers/abc/userdata/shm"),
        mount("/other", "/var/lib/kubelet/pods/another/volumes/kubernetes.io~empty-dir/cache"),
        mount("/run/.containerenv", "/run/containers/storage/overlay-containers/def/userdata/.containerenv"),
    ]
    assert [volume.kind for volume in volumes_of(spec_of(*mounts, notes=notes))] == ["emptyDir", "shm", "hostPath"]
    forged = {**notes, "io.kubernetes.cri.sandbox-uid": "another", "io.kubernetes.cri.sandbox-id": "x"}
    assert volumes_of(spec_of(*mounts, notes=forged)) == []


def test_parts_of_volumes(tmp_path: Path) -> None:
    """A subPath is what it is part of. Whole and part at once would be put in place twice."""
    pod = tmp_path / "pods/1234-5678"
    (pod / "volumes/kubernetes.io~empty-dir/cache").mkdir(parents=True)
    (pod / "volumes/kubernetes.io~configmap/settings").mkdir(parents=True)
    part = mount("/part", f"{pod}/volume-subpaths/cache/main/0")
    other = mount("/settings", f"{pod}/volume-subpaths/settings/main/1")
    kinds = {volume.destination: volume.kind for volume in volumes_of(spec_of(part, other))}
    assert kinds == {"/part": "emptyDir", "/settings": "configMap"}
    assert [volume.destination for volume in saved_volumes(spec_of(part, other))] == ["/part"]
    whole = mount("/cache", f"{pod}/volumes/kubernetes.io~empty-dir/cache")
    with pytest.raises(kedge.Conflict, match="as a whole, and in part"):
        saved_volumes(spec_of(whole, part))


def test_a_volume_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "pods/1234-5678/volumes/kubernetes.io~empty-dir/cache"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(os.urandom(1 << 20))
    spec = spec_of(mount("/cache", str(folder)))
    assert len(saved_volumes(spec)) == 1
    monkeypatch.setenv("KEDGE_VOLUME_BYTES", str(1 << 19))
    with pytest.raises(kedge.Conflict, match="more than KEDGE_VOLUME_BYTES=524288"):
        saved_volumes(spec)
    assert saved_volumes(spec, "no") == []
    monkeypatch.setenv("KEDGE_VOLUMES", "no")
    assert saved_volumes(spec) == []
    assert problem_of(volumes_of(spec)[0], [])
    monkeypatch.delenv("KEDGE_VOLUME_BYTES")
    monkeypatch.setattr(volumes, "file_system_of", lambda _: 0x958458F6)
    assert "huge pages" in problem_of(volumes_of(spec)[0], [])
    monkeypatch.setenv("KEDGE_VOLUMES", "perhaps")
    with pytest.raises(kedge.Validation, match="got perhaps"):
        saved_volumes(spec)


# --- replacing ---

SAVED = {"a": b"as it was", "sub/b": b"too", "twin": b"as it was"}
OLD = {"a": b"since", "other/c": b"new"}


def fill(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(name="volume", params=["disk", "memory", "part"])
def _volume(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    volume = make_volume(tmp_path, request.param)
    yield volume
    if request.param == "part":
        subprocess.run(["umount", volume.source], check=True)
    shutil.rmtree(volume.source)


def make_volume(tmp_path: Path, kind: str) -> Volume:
    """With files, and a store with others. Files cannot be moved to one in memory, nor to a part of one (a subPath),
    which is mounted."""
    source = tmp_path / "source"
    source.mkdir(mode=0o750)
    fill(source, {name: data for name, data in SAVED.items() if name != "twin"})
    os.link(source / "a", source / "twin")
    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", {"tree": snapshot.files_tree(source)})
    pod = tmp_path / "pod"
    pod.mkdir()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm")) if kind == "memory" else pod / "volume"
    folder.mkdir(exist_ok=True)
    if kind == "part":
        (tmp_path / "whole/part").mkdir(parents=True)
        subprocess.run(["mount", "--bind", tmp_path / "whole/part", folder], check=True)
    folder.chmod(0o777)
    fill(folder, OLD)
    return Volume("/cache", folder, "emptyDir", "cache", pod)


def replace(volume: Volume, store: Path, at_end: Callable[[Path], None]) -> None:
    with kedge.open(store) as opened, attempt("restore", "1") as work:
        tree = opened.load("job")["tree"]
        with replaced({volume: tree}, work.files, lambda facts: work.describe(volumes=facts)) as put_in_place:
            put_in_place()
            at_end(work.path)


@pytest.mark.requires("root")
def test_the_files_of_a_volume_are_replaced(volume: Volume, tmp_path: Path) -> None:
    inode = volume.source.stat().st_ino
    replace(volume, tmp_path / "store", lambda _: None)
    assert files_in(volume.source) == SAVED
    assert volume.source.stat().st_ino == inode  # others have it mounted
    assert volume.source.stat().st_mode & 0o777 == 0o750
    assert os.path.samefile(volume.source / "a", volume.source / "twin")
    assert {path.name for path in (tmp_path / "pod").iterdir()} <= {"volume"}


@pytest.mark.requires("root")
def test_a_restore_that_fails_puts_them_back(volume: Volume, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        assert files_in(volume.source) == SAVED
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replace(volume, tmp_path / "store", fail)
    assert files_in(volume.source) == OLD
    assert volume.source.stat().st_mode & 0o777 == 0o777
    assert {path.name for path in (tmp_path / "pod").iterdir()} <= {"volume"}


@pytest.mark.requires("root")
def test_what_could_not_be_put_back_is_put_back_the_next_time(
    volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        monkeypatch.setattr(volumes, "_clear", broken)
        raise ZeroDivisionError("why it failed")

    with pytest.raises(NotUndone, match="Input/output error, after: why it failed") as caught:
        replace(volume, tmp_path / "store", fail)
    assert isinstance(caught.value.__context__, OSError | kedge.CheckpointError)
    monkeypatch.undo()
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    put_right()
    assert files_in(volume.source) == OLD
    assert {path.name for path in (tmp_path / "pod").iterdir()} <= {"volume"}


def broken(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Do it in a process that is killed before it makes that call; whether it came so far."""
    calls = itertools.count()

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **options: object) -> object:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapper

    pid = os.fork()
    if pid == 0:
        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.requires("root")
def test_killed_at_each_step_of_putting_them_back(volume: Volume, tmp_path: Path) -> None:
    """A kill within the restore, and then one within what puts it right."""
    for step in itertools.count():
        pid = os.fork()
        if pid == 0:
            try:
                replace(volume, tmp_path / "store", lambda _: os.kill(os.getpid(), signal.SIGKILL))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        was_killed = killed_at(step, put_right)
        put_right()
        assert files_in(volume.source) == OLD, step
        assert volume.source.stat().st_mode & 0o777 == 0o777
        if not was_killed:
            break
    assert step > 5


@pytest.mark.requires("root")
def test_killed_at_each_step(volume: Volume, tmp_path: Path) -> None:
    def done(work: Path) -> None:
        (work / "restore.log").write_text("Restore finished successfully")

    for step in itertools.count():
        was_killed = killed_at(step, lambda: replace(volume, tmp_path / "store", done))
        put_right()
        assert files_in(volume.source) in (OLD, SAVED), step
        assert {path.name for path in (tmp_path / "pod").iterdir()} <= {"volume"}, step
        if not was_killed:
            break
        for path in volume.source.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        fill(volume.source, OLD)
    assert step > 10
    assert files_in(volume.source) == SAVED
