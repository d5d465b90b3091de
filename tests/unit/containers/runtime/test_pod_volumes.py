"""Which files a volume that containers share gets in a restore: never some that one of them has changed since."""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import pod_starts, snapshot
from kedge.containers.bundle import Bundle
from kedge.containers.network import Network
from kedge.containers.runtime import claims
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish
from kedge.containers.runtime.pod_volumes import with_pod_volumes
from kedge.model import Checkpoint

OLD_POD, NEW_POD = "5a1b", "7c2d"


@pytest.fixture(name="store")
def _store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as store:
        yield store


class Pods:
    """Checkpoints of containers of a pod, and what lives in the pod that is to restore one."""

    def __init__(self, store: kedge.CheckpointManager, folder: Path) -> None:
        self.store = store
        self.folder = folder

    def save(
        self,
        name: str,
        content: str | None,
        moment_s: float,
        *,
        is_running: bool = False,
        starts: dict[str, float] | None = None,
    ) -> Checkpoint:
        """A checkpoint of a container, whose volume has one file, or none."""
        source = self.folder / f"{name}-{moment_s}"
        source.mkdir()
        if content is not None:
            (source / "file").write_text(content)
        volumes = {"/shared": snapshot.files_tree(source)}
        images = kedge.Tree(source)
        taken = snapshot.Snapshot("container", name, images, network=Network(mode="host", path=""), volumes=volumes)
        facts = {"sandbox": OLD_POD, "moment_s": moment_s, "names": {"/shared": "shared"}, "starts": starts or {}}
        pod = {"namespace": "team", "name": "web-0", "container": name}
        metadata = {"kind": "container", "is_running": is_running, "pod": pod, "volumes": facts}
        job = f"container:team+web-0+{name}"
        return self.store.get(self.store.save(job, "s", taken.state(), metadata=metadata))

    def bundle(self, name: str, sandbox: str = NEW_POD, *, reads_only: bool = False) -> Bundle:
        notes = {"io.kubernetes.cri.sandbox-id": sandbox, "io.kubernetes.cri.container-name": name}
        source = f"{self.folder}/pods/{sandbox}/volumes/kubernetes.io~empty-dir/shared"
        options = ["rbind", "ro" if reads_only else "rw"]
        spec: dict[str, Any] = {
            "annotations": notes,
            "mounts": [{"destination": "/shared", "type": "bind", "source": source, "options": options}],
        }
        return Bundle(self.folder / f"bundle-{name}", spec)

    def restored(
        self, checkpoint: Checkpoint, name: str, *, sandbox: str = NEW_POD, last_start_s: float = 0.0
    ) -> str | None:
        """What is put into the volume; None: it is left as it is."""
        _, taken = snapshot.load(self.store, checkpoint.id)
        taken = with_pod_volumes(
            self.store, checkpoint, taken, self.bundle(name, sandbox), namespace="team", last_start_s=last_start_s
        )
        return taken.volumes["/shared"].read("file").decode() if taken.volumes else None


@pytest.fixture(name="pods")
def _pods(store: kedge.CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    return Pods(store, tmp_path)


def live(
    pods: Pods,
    monkeypatch: pytest.MonkeyPatch,
    restored: dict[str, str | None],
    *,
    sandbox: str = NEW_POD,
    reads_only: Container[str] = (),
    volumes: str = "",
) -> None:
    """Let containers live that have the same volume, by name: the checkpoint each was restored from."""
    bundles = {name: pods.bundle(name, sandbox, reads_only=name in reads_only) for name in restored}
    specs = {bundle.path: bundle.spec for bundle in bundles.values()}
    wishes = {name: Wish(f"team+web-0+{name}", "latest", volumes=volumes) for name in restored}
    marked = [
        (Path("/run/x", name), Mark(wishes[name], str(bundles[name].path), restored=checkpoint))
        for name, checkpoint in restored.items()
    ]
    monkeypatch.setattr(claims, "marked", lambda: marked)
    monkeypatch.setattr(claims, "is_alive", lambda _: True)
    monkeypatch.setattr("kedge.containers.engine.runc.read_spec", lambda path: specs[path])


def test_the_last_of_a_pod_is_right_for_all(pods: Pods) -> None:
    first, last = pods.save("a", "of a", 10.0), pods.save("b", "of b", 20.0)
    assert pods.restored(first, "a") == "of b"
    assert pods.restored(last, "b") == "of b"


def test_one_that_ran_on_has_its_own_files(pods: Pods) -> None:
    """Left running by its checkpoint, or started again before the other was checkpointed."""
    running = pods.save("a", "of a", 10.0, is_running=True)
    pods.save("b", "of b", 20.0)
    assert pods.restored(running, "a") == "of a"
    again = pods.save("c", "of c", 11.0)
    pods.save("d", "of d", 30.0, starts={"c": 15.0})
    assert pods.restored(again, "c") == "of b"  # in which c had not run


@pytest.mark.parametrize("names", ["bc", "cb"])
def test_who_lives_keeps_its_files(pods: Pods, monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """However many live, and in whatever order they are found: what one that was restored goes on with stays."""
    first = pods.save("a", "of a", 10.0)
    live(pods, monkeypatch, {"b": "x"})
    assert pods.restored(first, "a") is None
    live(pods, monkeypatch, {name: "x" if name == "b" else None for name in names})
    assert pods.restored(first, "a") is None


def test_files_are_not_replaced_below_one_that_began_anew(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pods.save("a", "of a", 10.0)
    live(pods, monkeypatch, {"b": None})
    with pytest.raises(kedge.Conflict, match="/shared is in use by team\\+web-0\\+b") as refused:
        pods.restored(first, "a")
    assert refused.value.hint


def test_a_volume_without_files_is_left_to_one_that_began_anew(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /dev/shm mostly is, which all containers of a pod have: nothing is needed there."""
    first = pods.save("a", None, 10.0)
    live(pods, monkeypatch, {"b": None})
    assert pods.restored(first, "a") is None


def test_one_that_only_reads_a_volume_has_not_filled_it(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored or not, it put nothing in place and wrote nothing."""
    first = pods.save("a", "of a", 10.0)
    for restored in ("x", None):
        live(pods, monkeypatch, {"b": restored}, reads_only="b")
        assert pods.restored(first, "a") == "of a"


def test_one_whose_volumes_are_not_saved_may_have_written(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its restore put nothing in place."""
    first = pods.save("a", "of a", 10.0)
    live(pods, monkeypatch, {"b": "x"}, volumes="no")
    with pytest.raises(kedge.Conflict, match="in use by team\\+web-0\\+b"):
        pods.restored(first, "a")


def test_in_the_same_pod_files_stay_if_it_has_not_run_since(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pods.save("a", "of a", 10.0)
    assert pods.restored(first, "a", sandbox=OLD_POD, last_start_s=5.0) is None
    assert pods.restored(first, "a", sandbox=OLD_POD, last_start_s=12.0) == "of a"
    for sandbox in (OLD_POD, NEW_POD):
        live(pods, monkeypatch, {"b": "x"}, sandbox=sandbox)
        with pytest.raises(kedge.Conflict, match="in use by team\\+web-0\\+b"):
            pods.restored(first, "a", sandbox=sandbox, last_start_s=12.0)


def test_starts_are_noted_while_the_pod_lives(pods: Pods) -> None:
    root = pods.folder / "runc"
    (root / NEW_POD).mkdir(parents=True)
    spec = pods.bundle("a").spec
    assert pod_starts.last_start_s(str(root), spec) == 0.0
    pod_starts.note_start(str(root), spec)
    begun_s = pod_starts.last_start_s(str(root), spec)
    assert begun_s
    pod_starts.note_start(str(root), spec)
    assert pod_starts.starts_in(str(root), pods.bundle("b").spec) == {"a": pod_starts.last_start_s(str(root), spec)}
    pod_starts.take_back_start(str(root), spec, begun_s)
    assert pod_starts.last_start_s(str(root), spec) == begun_s
    (root / NEW_POD).rmdir()
    (root / "other").mkdir()
    pod_starts.note_start(str(root), pods.bundle("a", "other").spec)
    assert pod_starts.starts_in(str(root), spec) == {}
    pod_starts.note_start(str(root), {"annotations": {}})
    assert pod_starts.last_start_s(str(root), {"annotations": {}}) == 0.0
