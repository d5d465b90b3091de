"""Who a pod is, what it claims, and what is told about names that mean nothing."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import kedge
from kedge.containers import attempts, hibernation, pods
from kedge.containers.engine import cri, grpc
from kedge.containers.engine.owners import owner_of
from kedge.containers.runtime import claims, exits, marks
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish, has_made_up_name, key_of, wish_of
from kedge.containers.runtime.orphans import Orphans
from kedge.containers.snapshot import find_for
from kedge.model import Lease

JOB = {"batch.kubernetes.io/job-name": "tiles", "job-name": "tiles"}
INDEX = {"batch.kubernetes.io/job-completion-index": "7"}
POD = {
    "io.kubernetes.cri.sandbox-namespace": "team",
    "io.kubernetes.cri.sandbox-name": "train-7d9c6bf5c4-x2k8q",
    "io.kubernetes.cri.container-name": "main",
    "kedge.dev/checkpoint": "1",
}


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_RUNC", "/bin/false")  # a runtime that knows no container
    with kedge.open("memory:") as store:
        yield store


@pytest.mark.parametrize(
    ("pod", "labels", "annotations", "owner"),
    [
        ("train-7d9c6bf5c4-x2k8q", {"pod-template-hash": "7d9c6bf5c4"}, {}, "deployment:train"),
        ("a-b-7d9c6bf5c4-x2k8q", {"pod-template-hash": "7d9c6bf5c4"}, {}, "deployment:a-b"),
        # a name that was cut short, or that a person gave: nothing proves what its end means
        ("train-7d9c6bf-x2k8q", {"pod-template-hash": "7d9c6bf5c4"}, {}, "train-7d9c6bf-x2k8q"),
        ("train-7d9c6bf5c4-x2k8q", {}, {}, "train-7d9c6bf5c4-x2k8q"),
        ("web-0", {"statefulset.kubernetes.io/pod-name": "web-0", "controller-revision-hash": "w-5"}, {}, "web-0"),
        ("tiles-9xk2p", JOB, {}, "job:tiles"),
        ("tiles-9xk2p", {"job-name": "tiles"}, {}, "job:tiles"),
        ("tiles-7-9xk2p", {**JOB, **INDEX}, {}, "job:tiles-7"),
        ("tiles-7-9xk2p", JOB, INDEX, "job:tiles-7"),
        ("alone", {"app": "x"}, {}, "alone"),
    ],
)
def test_owners(pod: str, labels: dict[str, str], annotations: dict[str, str], owner: str) -> None:
    assert owner_of(pod, labels, annotations) == owner


@pytest.mark.parametrize(
    ("name", "is_made_up"), [("web-0", False), ("x2k8q", False), ("a-x2k8q", True), ("a-train", False)]
)
def test_names_that_controllers_make_up(name: str, is_made_up: bool) -> None:
    assert has_made_up_name(name) is is_made_up


def test_keys_of_owners() -> None:
    assert key_of(POD, owner=lambda _: "deployment:train") == "team+deployment:train+main"
    given = wish_of({"annotations": {**POD, "kedge.dev/key": "deployment:train"}}, owner=lambda _: "never asked")
    assert given is not None
    assert given.key == "team+deployment+3atrain"  # what is given cannot look like an owner
    long = {**POD, "io.kubernetes.cri.sandbox-name": "n" * 253}
    keys = {key_of({**long, "io.kubernetes.cri.container-name": name}) for name in ("a", "b")}
    assert len(keys) == 2
    assert all(len(key) <= 100 and key.startswith("team+nnn") for key in keys)


# --- claims ---


def key(claim: Lease) -> str:
    return claims.key_of(claim)


def remember(root: str, identity: str, claim: Lease, ending: float | None = None, **environment: str) -> None:
    mark = Mark(Wish(key(claim), "latest"), claim=claim, environment=environment, ending=ending)
    marks.write_mark(marks.mark_of(root, identity), mark)


def elsewhere(store: kedge.CheckpointManager, job: str, ttl_s: float = 60) -> Lease:
    return store.take_lease(job, "x in /run/runc on another-node [m b 1 2]", ttl_s)


def test_the_second_gets_a_number(store: kedge.CheckpointManager) -> None:
    elsewhere(store, "container:k")
    second = claims.take(store, "k", "/run/runc", "b")
    assert key(second) == "k@2"
    with pytest.raises(kedge.Conflict, match="already running, as x in /run/runc on another-node"):
        claims.take(store, "k", "/run/runc", "c", only_first=True)
    store.break_lease(second)
    assert key(claims.take(store, "k", "/run/runc", "c")) == "k@2"


def test_who_is_gone_holds_nothing(store: kedge.CheckpointManager) -> None:
    """A container of this machine that its runtime does not know, created by a process that ended; or another boot."""
    for number, identity in enumerate(("pid", "boot")):
        claim = claims.take(store, f"k{number}", "/run/runc", identity)
        assert key(claims.take(store, f"k{number}", "/run/runc", "x")) == f"k{number}@2"  # it is being created: by us
        holder = claim.holder.replace(f" {os.getpid()} ", " 4194304 ")
        if identity == "boot":
            holder = claim.holder.replace(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "other")
        store.break_lease(claim)
        store.take_lease(claim.job, holder, 60)
        is_known = bool(Path("/etc/machine-id").exists() and Path("/etc/machine-id").read_text().strip())
        expected = f"k{number}" if identity == "pid" or is_known else f"k{number}@3"
        assert key(claims.take(store, f"k{number}", "/run/runc", "y")) == expected


def test_who_lives_here_loses_nothing(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also when its claim ran out long ago."""
    runtime = tmp_path / "runc"
    runtime.write_text('#!/bin/sh\necho \'{"status": "running"}\'\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("KEDGE_RUNC", str(runtime))
    claim = store.take_lease("container:k", "long ago", 0.1)
    remember("/run/runc", "a", claim)
    time.sleep(0.15)  # sleep: at least as long as the claim lasts
    assert key(claims.take(store, "k", "/run/runc", "b")) == "k@2"


class Waiting:
    """The time of `take`, in which what it waits for happens as soon as it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
        self.monotonic = time.monotonic
        self._happens = happens
        monkeypatch.setattr(claims, "time", self)

    def sleep(self, _: float) -> None:
        self._happens()


def test_who_is_frozen_elsewhere_is_waited_for(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod is evicted, and the one in its place is faster on another node than the freeze: it goes on from that."""
    claim = elsewhere(store, "container:k")
    with ExitStack() as freezing:
        freezing.enter_context(claims.leaving(store, "k"))
        with pytest.raises(kedge.Conflict, match="still being checkpointed"):
            claims.take(store, "k", "/run/runc", "b", wait_s=0.001)

        def ends() -> None:
            store.break_lease(claim)
            freezing.close()

        Waiting(monkeypatch, ends)
        assert key(claims.take(store, "k", "/run/runc", "b", wait_s=30)) == "k"


@pytest.mark.parametrize("why", ["frozen by what a killed call had started", "its shim is gone", ""])
def test_who_is_on_its_way_out_here_is_waited_for(
    why: str, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = tmp_path / "runc"
    runtime.write_text(f'#!/bin/sh\necho \'{{"status": "running", "pid": {os.getpid()}}}\'\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("KEDGE_RUNC", str(runtime))
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    root = "/run/containerd/runc/x" if "shim" in why else "/run/runc"
    claim = claims.take(store, "k", root, "a")
    remember(root, "a", claim, 1.0 if "frozen" in why else None)
    with ExitStack() as freezing:
        freezing.enter_context(attempts.only_one(root, "a"))

        def ends() -> None:
            store.break_lease(claim)
            runtime.write_text("#!/bin/sh\nexit 1\n")
            freezing.close()

        Waiting(monkeypatch, ends)
        assert key(claims.take(store, "k", root, "b", wait_s=30)) == ("k" if why else "k@2")


def test_the_guard_renews_what_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store of its engine; what has ended is left to run out, and what was lost is told."""
    runtime = tmp_path / "runc"
    runtime.write_text('#!/bin/sh\n[ "$4" != gone ] && echo \'{"status": "running"}\'\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("KEDGE_RUNC", str(runtime))
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    place = str(tmp_path / "store")
    with kedge.open(place, namespace="containers") as store:
        for identity in ("alive", "gone", "lost"):
            claim = store.take_lease(f"container:{identity}", identity, 0.1)
            remember("/run/runc", identity, claim, KEDGE_STORE=place)
            if identity == "lost":
                store.break_lease(claim)
        time.sleep(0.15)  # sleep: at least as long as the claim lasts
        monkeypatch.setattr(marks, "Lease", lambda **given: Lease(**{**given, "ttl_s": 60}))
        assert [job for job, _ in claims.renew_here(Orphans())] == ["container:lost"]
        with pytest.raises(kedge.CheckpointError, match="alive"):
            elsewhere(store, "container:alive")
        elsewhere(store, "container:gone")


def test_who_lost_its_claim_is_kept_by_itself(store: kedge.CheckpointManager) -> None:
    """A stale container's save is refused by the store (I5); it goes on under a number of its own."""
    claim = store.take_lease("container:k", "a", 60)
    mark = Mark(Wish("k", "latest"), claim=claim)
    assert claims.ensure(store, mark, "/run/runc", "a") is mark
    store.break_lease(claim)
    elsewhere(store, "container:k")
    with pytest.raises(kedge.CheckpointError, match="lease"):
        store.save("container:k", "k", {}, lease=claim)
    kept = claims.ensure(store, mark, "/run/runc", "a")
    assert kept.key == "k@2"
    store.save("container:k@2", "k", {}, lease=kept.claim)


def test_who_began_anew_adds_to_no_history(store: kedge.CheckpointManager) -> None:
    """Two that were first of their workload end one after the other: the second one must not bury the first."""
    mark = Mark(Wish("k", "latest"))
    first = claims.ensure(store, mark, "/run/runc", "a")
    assert first.key == "k"
    store.save("container:k", "k", {}, lease=first.claim)
    claims.release(store, first)
    second = claims.ensure(store, mark, "/run/runc", "b")
    assert second.key == "k@2"
    assert claims.ensure(store, second, "/run/runc", "b") is second
    wants_no_other = Mark(Wish("k", "no"))
    assert claims.ensure(store, wants_no_other, "/run/runc", "c").key == "k"


def test_a_number_of_its_own_is_found_at_once(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many histories there are of a key, and whatever else begins as it does: not one claim for each."""
    asked = []
    take = store.take_lease
    monkeypatch.setattr(store, "take_lease", lambda *given: asked.append(given[0]) or take(*given))
    for name in ("k", *(f"k@{number}" for number in range(2, 30)), "k@31", "k-other", "k@other"):
        store.save(f"container:{name}", name, {})
    assert key(claims.take(store, "k", "/run/runc", "a", only_empty=True)) == "k@30"
    assert asked == ["container:k", "container:k@30"]


def test_marks_of_containers_whatever_they_are_called(store: kedge.CheckpointManager) -> None:
    """runc takes IDs of letters, digits and +,-._ ; what lies beside a mark for a moment is none."""
    names = [".hidden", "a+b", "plain", "x.exit"]
    for name in names:
        claim = store.take_lease(f"container:{name}", "x", 60)
        remember("/run/runc", name, claim)
        Path(exits.note_of(str(marks.mark_of("/run/runc", name)))).touch()
        marks.mark_of("/run/runc", name).with_name(f"{name}~{os.getpid()}").touch()  # by one that was killed
    assert [mark.name for mark in marks.marks()] == names


# --- sleeping, and where to begin ---


def keep(store: kedge.CheckpointManager, key: str, pod: str = "", **tags: str) -> str:
    metadata = {"kind": "container", "pod": {"namespace": "team", "name": pod, "container": "main"}}
    return store.save(f"container:{key}", key, {}, tags=tags, metadata=metadata)


def test_what_sleeps_is_refused_until_it_is_woken(store: kedge.CheckpointManager) -> None:
    deployed = "team+deployment:train+main"
    keep(store, deployed, "train-7d9c6bf5c4-x2k8q", asleep="now")
    keep(store, "team+web-0+main", "web-0", asleep="now")
    keep(store, "team2+web-0+main", "web-0", asleep="now")
    with pytest.raises(kedge.Conflict, match="hibernates"):
        hibernation.refuse_asleep(store, deployed)
    for name in ("team/train-7d9c6bf5c4-x2k8q", "team/train", "team/deployment:train", "team/train/main", deployed):
        assert [one.job for one in pods.sleeping(store, name)] == [f"container:{deployed}"], name
    assert list(pods.sleeping(store, "team/train/other")) == []
    assert [one.job for one in pods.wake(store, "team/web-0")] == ["container:team+web-0+main"]
    hibernation.refuse_asleep(store, "team+web-0+main")
    with pytest.raises(kedge.Conflict, match="hibernates"):
        hibernation.refuse_asleep(store, "team2+web-0+main")
    with pytest.raises(kedge.NotFound, match="nothing named"):
        pods.wake(store, "team/web-0")


def test_where_a_container_begins(store: kedge.CheckpointManager) -> None:
    """With an ID or a key of its own namespace; never of another."""
    own, other = keep(store, "team+train"), keep(store, "other+train")
    for restore in (own, "train", "team+train"):
        assert find_for(store, Wish("team+b", restore, namespace="team")).id == own
    deployed = keep(store, "team+deployment:train+main")
    for restore in ("deployment:train+main", "team+deployment:train+main"):
        assert find_for(store, Wish("team+b", restore, namespace="team")).id == deployed
    for restore in (other, "other+train", "nobody"):
        with pytest.raises(kedge.NotFound, match="in namespace team"):
            find_for(store, Wish("team+b", restore, namespace="team"))
    assert find_for(store, Wish("b", other)).id == other


@pytest.mark.parametrize("name", ["default", "", "/", "a/", "/b", "a/b/c/d", "a//c"])
def test_names_of_pods(name: str) -> None:
    with pytest.raises(kedge.Validation, match="not the name of a pod"):
        pods.PodName.parse(name)


# --- the engine's socket ---


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(kedge.NotFound, match="no socket"):
        cri.containers(str(tmp_path / "socket"))
    (tmp_path / "file").touch()
    with pytest.raises(kedge.CheckpointError, match="does not answer"):
        cri.containers(str(tmp_path / "file"))


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0\4\0\1\0\0\0\1\0\0\0\2", b"\0\0\6\0\1\0\0\0\1\0\0\0\0\1\xff", b"HTTP/1.1"]
)
def test_answers_that_are_none(tmp_path: Path, answer: bytes) -> None:
    """Somebody who hangs up, is cut off, answers no message, or speaks something else."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen(1)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(kedge.CheckpointError, match=r"refused|answer|invalid"):
            grpc.call(str(tmp_path / "socket"), "/a/b", timeout_s=60)
        thread.join()


def test_requests_that_are_too_large() -> None:
    with pytest.raises(kedge.Validation):
        grpc.call("/nowhere", "/a", b"x" * 70_000)
    with pytest.raises(kedge.Validation):
        grpc._headers("/" + "a" * 200, {})
