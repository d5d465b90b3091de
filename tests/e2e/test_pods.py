"""Pods, as a kubelet runs them: what one pod was when it was stopped, another one goes on from."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import kedge
from kedge.containers.protobuf import encode
from tests.cri import Cri, Failed
from tests.engine import COUNT, IMAGE, Containerd, containerd
from tests.lab import COUNTER, PYTHON, lab
from tests.servers.postgres import Cluster
from tests.waiting import wait_for

KEPT = {"KEDGE_CHECKPOINT": "1"}
ANSWER_S = 50  # as in test_shim_faults
pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", "containerd", "cc")]


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("pods")) as made, containerd(made, pods=True) as engine:
        yield engine


@pytest.fixture(name="cri")
def _cri(engine: Containerd) -> Cri:
    return Cri(engine.home / "socket", IMAGE)


def is_creating(engine: Containerd, starting: Future[str]) -> bool:
    """Whether a call of `kedge-runc create` of this engine is under way, or was."""
    if starting.done():
        return True
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = process.read_bytes().split(b"\0")
            if b"create" in words and any(bytes(engine.home) in word for word in words):
                return True
    return False


def jobs(engine: Containerd) -> list[str]:
    with kedge.open(engine.lab.store, namespace="containers") as store:
        return [job.name for job in store.jobs() if job.checkpoints]


def test_a_pod_goes_on_in_another(engine: Containerd, cri: Cri) -> None:
    """By environment in the one, by annotation in the other; the sandbox and a second container are left alone."""
    first = cri.run_pod("first", {"kedge.dev/checkpoint": "1"})
    counter = cri.start(first, "counter", COUNT, {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "train"})
    beside = cri.start(first, "beside", COUNT)
    engine.wait_beyond(counter, 5)
    engine.wait_beyond(beside, 5)
    cri.stop(counter)
    reached = engine.count(counter)
    assert engine.status(beside) == "RUNNING"
    assert engine.status(first) == "RUNNING"
    cri.remove_pod(first)
    assert jobs(engine) == ["container:default+train"]

    second = cri.run_pod("second")
    notes = {"kedge.dev/restore": "latest", "kedge.dev/key": "train"}
    counter = cri.start(second, "counter", COUNT, annotations=notes)
    engine.wait_beyond(counter, reached)
    cri.remove_pod(second)
    engine.wait_shimless()


@pytest.mark.requires("cni")
def test_pods_that_cannot_go_on(engine: Containerd) -> None:
    """A file that it has open is another one by now, or nothing has the name that it asks for. By its policy it begins
    anew, or StartContainer answers that it failed; every call is answered, the pod's network is not left locked, and
    the pod can be stopped and removed."""
    cri = Cri(engine.home / "socket", IMAGE, answer_s=ANSWER_S)
    shared = engine.lab.root / "shared"
    shared.mkdir()
    held = shared / "held"
    held.write_bytes(bytes(100))
    begin = "import os; held = open('/shared/held', 'r+'); open('/work/began', 'w').write(os.environ['ATTEMPT'])\n"
    program = (PYTHON, "-c", begin + COUNTER, "0.002", "0")
    mounts = [("/usr", "/usr", True), (str(shared), "/shared", False)]
    pod = cri.run_pod("held", host_network=False)
    namespace = f"--net=/proc/{engine.pid(pod)}/ns/net"

    def start(attempt: int, **wishes: str) -> str:
        environment = {**KEPT, "ATTEMPT": str(attempt), **wishes}
        return cri.start(pod, "main", program, environment, attempt=attempt, mounts=mounts)

    first = start(0)
    engine.wait_beyond(first, 50)
    cri.stop(first)
    reached = engine.count(first)
    held.write_bytes(bytes(99))
    for attempt, (policy, tries) in enumerate([("fresh", 1), ("retry:2", 2), ("fail", 1)], start=1):
        before = failed_restores(engine)
        if policy == "fail":
            with pytest.raises(Failed, match="StartContainer"):
                start(attempt, KEDGE_POLICY=policy)
            assert "shared/held is not what it was" in engine.log.read_text()
        else:
            anew = start(attempt, KEDGE_POLICY=policy)
            engine.wait_beyond(anew, 0)
            assert (engine.upper(anew) / "work/began").read_text() == str(attempt)
            cri.stop(anew, grace_s=0)  # killed, so that nothing newer is kept
        assert failed_restores(engine) - before == tries
        for tool in ("iptables", "ip6tables"):
            assert "CRIU" not in engine.lab.run("nsenter", namespace, tool, "-S").stdout
    with pytest.raises(Failed, match="StartContainer"):  # a mistake to be told, whatever the policy
        start(4, KEDGE_RESTORE="nothing-of-that-name")
    assert "nothing-of-that-name" in engine.log.read_text()
    held.write_bytes(bytes(100))
    again = start(5, KEDGE_POLICY="fail")
    engine.wait_beyond(again, reached)
    assert (engine.upper(again) / "work/began").read_text() == "0"
    cri.remove_pod(pod)
    engine.wait_shimless()


def failed_restores(engine: Containerd) -> int:
    attempts = [json.loads(path.read_text()) for path in engine.lab.state.glob("attempts/*/attempt.json")]
    return sum((one["action"], one["result"]) == ("restore", "failed") for one in attempts)


@pytest.mark.requires("cni")
def test_a_pod_with_a_network_of_its_own(engine: Containerd, cri: Cri) -> None:
    """CRIU locks the pod's network while it dumps; the container beside it must not stay cut off."""
    wishes = {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "networked"}
    first = cri.run_pod("networked-1", host_network=False)
    counter = cri.start(first, "counter", COUNT, wishes)
    engine.wait_beyond(counter, 5)
    namespace = f"--net=/proc/{engine.pid(first)}/ns/net"
    cri.stop(counter)
    for tool in ("iptables", "ip6tables"):
        assert "CRIU" not in engine.lab.run("nsenter", namespace, tool, "-S").stdout
    reached = engine.count(counter)
    cri.remove_pod(first)
    second = cri.run_pod("networked-2", host_network=False)
    counter = cri.start(second, "counter", COUNT, wishes)
    engine.wait_beyond(counter, reached)
    cri.remove_pod(second)
    engine.wait_shimless()


# --- what a controller recreates ---

DEPLOYMENT = {"app": "train", "pod-template-hash": "7d9c6bf5c4"}


def test_replicas_of_a_deployment(engine: Containerd, cri: Cri) -> None:
    """By their owner's name, whatever theirs is; and two that live at once never share a history."""
    first = cri.run_pod("train-7d9c6bf5c4-x2k8q", labels=DEPLOYMENT)
    second = cri.run_pod("train-7d9c6bf5c4-lm4zt", labels=DEPLOYMENT)
    hasty = {**KEPT, "KEDGE_WAIT": "1"}
    one = cri.start(first, "main", COUNT, hasty)
    engine.wait_beyond(one, 200)
    two = cri.start(second, "main", COUNT, hasty)
    engine.wait_beyond(two, 5)
    cri.stop(two)
    engine.wait_beyond(one, engine.count(two))
    cri.stop(one)
    reached, other = engine.count(one), engine.count(two)
    assert other < reached
    kept = [job for job in jobs(engine) if "deployment" in job]
    assert kept == ["container:default+deployment:train+main", "container:default+deployment:train+main@2"]
    for pod in (first, second):
        cri.remove_pod(pod)

    again = cri.run_pod("train-7d9c6bf5c4-b6vwj", labels=DEPLOYMENT)
    strict = {**hasty, "KEDGE_POLICY": "fail"}
    came = cri.start(again, "main", COUNT, strict)
    assert engine.wait_beyond(came, reached) > reached
    beside = cri.run_pod("train-7d9c6bf5c4-qq7hd", labels=DEPLOYMENT)
    with pytest.raises(Failed, match="StartContainer"):  # who insists on being the only one is told
        cri.start(beside, "main", COUNT, strict)
    assert "is already running" in engine.log.read_text()
    for pod in (again, beside):
        cri.remove_pod(pod)
    engine.wait_shimless()


def test_who_replaces_a_pod_that_does_not_know_it_yet_waits(engine: Containerd, cri: Cri) -> None:
    """A pod with a preStop hook is told to stop seconds after its replacement was created; twice: never checkpointed
    before, and with a history."""
    patient = {**KEPT, "KEDGE_WAIT": "60"}
    labels = {"app": "late", "pod-template-hash": "7d9c6bf5c4"}
    pod = cri.run_pod("late-7d9c6bf5c4-x2k8q", labels=labels)
    counter = cri.start(pod, "main", COUNT, patient)
    for name in ("late-7d9c6bf5c4-lm4zt", "late-7d9c6bf5c4-b6vwj"):
        engine.wait_beyond(counter, 20 + engine.count(counter))
        next_pod = cri.run_pod(name, labels=labels)
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(cri.start, next_pod, "main", COUNT, patient)
            wait_for(partial(is_creating, engine, starting), "it is not created")
            cri.stop(counter)
            reached = engine.count(counter)
            counter = starting.result()
        assert engine.wait_beyond(counter, reached) > reached
        cri.remove_pod(pod)
        pod = next_pod
    cri.remove_pod(pod)


def test_a_pod_is_kept_sleeps_and_wakes(engine: Containerd, cri: Cri) -> None:
    """With the commands on the node; who restarts it while it sleeps is refused, and goes on after it was woken."""

    environment = {**engine.environment, "CONTAINERD_ADDRESS": str(engine.home / "socket")}

    def ask(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return engine.lab.kedge("pod", *words, "--json", check=check, env=environment)

    name = "web-0"
    labels = {"statefulset.kubernetes.io/pod-name": name}
    pod = cri.run_pod(name, labels=labels)
    main = cri.start(pod, "main", COUNT, KEPT)
    beside = cri.start(pod, "beside", COUNT)
    engine.wait_beyond(main, 5)
    engine.wait_beyond(beside, 5)

    kept = json.loads(ask("checkpoint", f"default/{name}").stdout)["containers"]
    assert [(one["container"], one["key"], one["error"]) for one in kept] == [("main", "default+web-0+main", None)]
    named = json.loads(ask("checkpoint", f"default/{name}/beside").stdout)["containers"]
    assert [one["key"] for one in named] == ["default+web-0+beside"]
    listed = json.loads(ask("list", "default").stdout)
    found = {one["container"]: one for one in listed["containers"] if one["pod"] == name}
    assert found["main"]["is_opted_in"]
    assert not found["beside"]["is_opted_in"]
    assert found["main"]["generations"] == 1
    assert found["main"]["memory_bytes"] > 1 << 20
    assert engine.status(main) == "RUNNING"
    told = engine.lab.answer("container", "list", "--containerd", env=environment)["containers"]
    obstacles = {one["id"]: (one["key"], one["generations"], one["obstacle"]) for one in told}
    assert obstacles[main] == ("default+web-0+main", 1, "")
    assert obstacles[beside] == (beside, 0, "")
    assert obstacles[pod] == (pod, 0, "it is the sandbox of a pod")

    refused = ask("hibernate", f"default/{name}/beside", check=False)
    assert refused.returncode == 1
    assert "did not opt in" in refused.stdout
    ask("hibernate", f"default/{name}")
    engine.wait_stopped(main)
    reached = engine.count(main)
    with pytest.raises(Failed, match="StartContainer"):  # as a kubelet would, at once
        cri.start(pod, "main", COUNT, KEPT, attempt=1)
    assert "default+web-0+main hibernates" in engine.log.read_text()
    asleep = json.loads(ask("list").stdout)["asleep"]
    assert [one["job"] for one in asleep] == ["container:default+web-0+main"]
    ask("wake", f"default/{name}")
    woken = cri.start(pod, "main", COUNT, KEPT, attempt=2)
    engine.wait_beyond(woken, reached)
    cri.remove_pod(pod)
    engine.wait_shimless()


# --- volumes ---


class Volumes:
    """The emptyDir volumes of pods, where a kubelet has them; made and removed with their pods."""

    def __init__(self, engine: Containerd) -> None:
        self._engine = engine
        self._home = engine.lab.root / "kubelet/pods"

    def make(self, pod: str, name: str, medium: str) -> Path:
        folder = self._home / f"uid-{pod}/volumes/kubernetes.io~empty-dir/{name}"
        self._engine.lab.run("mkdir", "-p", folder)
        if medium == "Memory":
            self._engine.lab.run("mount", "-t", "tmpfs", "tmpfs", folder)
        return folder

    def remove(self, folder: Path) -> None:
        self._engine.lab.run("sh", "-c", 'umount "$0"; rm -rf "$0"', folder)

    def seen(self, folder: Path) -> Path:
        """A folder as the engine sees it."""
        return Path(f"/proc/{self._engine.daemon_pid}/root{folder}")


def content(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """All files of a folder: mode, time and bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        for path in files
    }


@pytest.mark.parametrize("medium", ["", "Memory", "shm"])
def test_volumes_that_go_with_a_pod_are_those_of_the_moment(engine: Containerd, cri: Cri, medium: str) -> None:
    """An emptyDir on disk or in memory, or the pod's /dev/shm, in which the counter counts: it stops at once when its
    files are not those of its memory. In the next pod, and again in the same one, after it went on and was killed."""
    volumes = Volumes(engine)
    program = [word.replace("/work", "/dev/shm") if medium == "shm" else word for word in COUNT]

    def pod(name: str) -> tuple[str, Path, list[tuple[str, str, bool]]]:
        identity = cri.run_pod(name)
        if medium == "shm":
            sandbox = engine.home / "state/io.containerd.grpc.v1.cri/sandboxes" / identity
            work = sandbox / "shm"
            (volumes.seen(sandbox) / "work").symlink_to("shm")
            return identity, work, [("/usr", "/usr", True)]
        work = volumes.make(name, "work", medium)
        return identity, work, [("/usr", "/usr", True), (str(work), "/work", False)]

    def beyond(number: int) -> int:
        upper = volumes.seen(work).parent
        return wait_for(lambda: n if (n := engine.count("", upper)) > number else None, "the counter stands still")

    wishes = {**KEPT, "KEDGE_WORKLOAD": f"volume-{medium}", "KEDGE_POLICY": "fail"}
    first, work, mounts = pod(f"volume-1{medium.lower()}")
    counter = cri.start(first, "main", program, wishes, mounts=mounts)
    beyond(50)
    cri.stop(counter)
    reached, frozen = engine.count("", volumes.seen(work).parent), content(volumes.seen(work))
    cri.remove_pod(first)
    if medium != "shm":
        volumes.remove(work)
    with kedge.open(engine.lab.store, namespace="containers") as store:
        state = store.load(f"container:default+volume-{medium}")
        tree = state["volumes"]["/dev/shm" if medium == "shm" else "/work"]
        saved = {entry.path: (entry.mode, entry.mtime_ns, tree.read(entry.path)) for entry in tree.entries}
    assert {name: (mode & 0o777, time, data) for name, (mode, time, data) in frozen.items()} == saved

    second, work, mounts = pod(f"volume-2{medium.lower()}")
    (volumes.seen(work) / "stranger").write_text("of an init container")
    for attempt in range(2):
        counter = cri.start(second, "main", program, wishes, mounts=mounts, attempt=attempt)
        assert not (volumes.seen(work) / "stranger").exists()
        reached = min(reached, beyond(reached + 20))
        cri.stop(counter, grace_s=0)
    cri.remove_pod(second)
    if medium != "shm":
        volumes.remove(work)
    engine.wait_shimless()


def test_a_volume_that_two_containers_share(engine: Containerd, cri: Cri) -> None:
    """Each is checkpointed by itself, one after the other. In the next pod the volume is as the last of them left it,
    and as the first of them to be there again goes on with it. What is not saved is said."""
    volumes = Volumes(engine)
    program = (PYTHON, "-c", SHARING)
    mounts = [("/usr", "/usr", True), (str(engine.lab.root / "host"), "/host", False)]
    (engine.lab.root / "host").mkdir()

    def start(pod: str, folder: Path, name: str) -> str:
        wishes = {**KEPT, "KEDGE_POLICY": "fail", "NAME": name}
        return cri.start(pod, name, program, wishes, mounts=[*mounts, (str(folder), "/shared", False)])

    def lines(folder: Path, name: str) -> int:
        log = volumes.seen(folder) / name
        return len(log.read_text().splitlines()) if log.exists() else 0

    def wait_beyond(folder: Path, name: str, number: int) -> None:
        wait_for(lambda: lines(folder, name) > number, f"{name} stands still")

    pod, folder = cri.run_pod("sharing-0"), volumes.make("sharing-0", "shared", "")
    containers = {name: start(pod, folder, name) for name in ("a", "b")}
    for name in containers:
        wait_beyond(folder, name, 5)
    told = engine.lab.answer("pod", "list", "default", "--address", engine.home / "socket", env=engine.environment)
    volumes_of = {one["container"]: one["volumes"] for one in told["containers"] if one["pod"] == "sharing-0"}
    assert {(one["path"], one["kind"], one["is_saved"]) for one in volumes_of["a"]} == {
        ("/shared", "emptyDir", True), ("/dev/shm", "shm", True),
        ("/usr", "hostPath", False), ("/host", "hostPath", False),
    }  # fmt: skip
    checked = engine.lab.kedge("container", "preflight", containers["a"], "--json", env=engine.environment)
    findings = {one["subject"]: one["what"] for one in json.loads(checked.stdout)["findings"]}
    assert findings["volume /shared"].startswith("emptyDir: saved")
    assert findings["volume /host"] == "hostPath: not saved, on this machine only"

    cri.stop(containers["a"])
    wait_beyond(folder, "b", 20 + lines(folder, "b"))
    cri.stop(containers["b"])
    reached = {name: lines(folder, name) for name in containers}
    cri.remove_pod(pod)
    volumes.remove(folder)

    pod, folder = cri.run_pod("sharing-0"), volumes.make("sharing-0", "shared", "")
    start(pod, folder, "a")
    assert lines(folder, "b") == reached["b"]
    wait_beyond(folder, "a", 20 + reached["a"])
    start(pod, folder, "b")
    wait_beyond(folder, "b", reached["b"])
    wait_beyond(folder, "a", 5 + lines(folder, "a"))
    assert not (volumes.seen(folder) / "broken").exists()
    cri.remove_pod(pod)
    volumes.remove(folder)
    engine.wait_shimless()


SHARING = """
import os, time
log = f"/shared/{os.environ['NAME']}"
n = 0
while True:
    there = open(log).read().split() if n else []
    if there != [str(k) for k in range(n)]:
        open("/shared/broken", "w").write(f"{log}: {n} {there}")
        break
    with open(log, "a") as file:
        file.write(f"{n}\\n")
    n += 1
    time.sleep(0.01)  # sleep: the pace of the program
"""


# --- other nodes ---


@pytest.mark.requires("postgres")
def test_another_node(engine: Containerd, tmp_path: Path, postgres: Cluster) -> None:
    """Two engines with nothing in common but the store. What was kept on one goes on below the other; and an archive
    as CRI-O writes it for a kubelet, of a container that did not opt in, is what a pod names as its beginning."""
    store = postgres.empty_database()
    with lab(tmp_path) as made, containerd(made, pods=True, KEDGE_STORE=store) as there:
        engine.restart(KEDGE_STORE=store)
        here, beyond = Cri(engine.home / "socket", IMAGE), Cri(there.home / "socket", IMAGE)
        first = here.run_pod("train-7d9c6bf5c4-x2k8q", labels=DEPLOYMENT)
        counter = here.start(first, "main", COUNT, KEPT)
        engine.wait_beyond(counter, 5)
        here.stop(counter)
        reached = engine.count(counter)
        here.remove_pod(first)

        second = beyond.run_pod("train-7d9c6bf5c4-lm4zt", labels=DEPLOYMENT)
        counter = beyond.start(second, "main", COUNT, KEPT)
        there.wait_beyond(counter, reached)
        beyond.remove_pod(second)

        third = here.run_pod("plain", handler="runc")
        counter = here.start(third, "main", COUNT)
        engine.wait_beyond(counter, 5)
        archive = kubelet_archive(engine, counter, tmp_path)
        reached = engine.count(counter)
        here.remove_pod(third)
        environment = made.environment(KEDGE_STORE=store)
        made.kedge("container", "import", archive, "--key", "default+brought", env=environment)
        fourth = beyond.run_pod("debug")
        counter = beyond.start(fourth, "main", COUNT, {"KEDGE_RESTORE": "brought", "KEDGE_POLICY": "fail"})
        there.wait_beyond(counter, reached)
        beyond.remove_pod(fourth)
        there.wait_shimless()


def kubelet_archive(engine: Containerd, container: str, folder: Path) -> Path:
    """Freeze a container with runc alone, which ends it, and pack it in the layout of CRI-O."""
    files = folder / "files"
    files.mkdir()
    place = ("--root", Path("/run/containerd/runc") / engine.namespace)
    paths = ("--image-path", files / "checkpoint", "--work-path", files)
    spec = engine.home / "state/io.containerd.runtime.v2.task" / engine.namespace / container / "config.json"
    told = json.loads(spec.read_text())
    told["annotations"]["io.container.manager"] = "cri-o"
    upper = engine.upper(container)
    engine.lab.run("runc", *place, "checkpoint", *paths, container)
    engine.lab.run("tar", "-C", upper, "-cf", files / "rootfs-diff.tar", "--xattrs", ".")
    documents = {
        "spec.dump": told,
        "config.dump": {"id": container, "name": "main", "rootfsImageName": IMAGE, "runtime": "runc"},
        "bind.mounts": [],
        "deleted.files": [],
    }
    for name, document in documents.items():
        (files / name).write_text(json.dumps(document))
    archive = folder / "checkpoint-plain_default-main-2026-11-16T01:00:00Z.tar"
    engine.lab.run("tar", "-C", files, "-cf", archive, ".")
    return archive


def test_an_archive_of_the_kubelet(engine: Containerd, cri: Cri, tmp_path: Path) -> None:
    """What a kubelet's /checkpoint leaves of a container that did not opt in: a pod of ours goes on from it."""
    if engine.version != "2":
        pytest.skip("only containerd 2.1 and newer write such archives")  # skip: ./dev torture shim runs it
    first = cri.run_pod("plain", handler="runc")
    counter = cri.start(first, "main", COUNT)
    engine.wait_beyond(counter, 5)
    archive = tmp_path / "checkpoint-plain_default-main-2026-11-16T01:00:00Z.tar"
    cri.call("CheckpointContainer", encode([(1, counter), (2, str(archive))]))
    reached = engine.count(counter)
    cri.remove_pod(first)
    environment = engine.environment
    engine.lab.kedge("container", "import", archive, "--key", "default+plain", env=environment)
    second = cri.run_pod("copy")
    counter = cri.start(second, "main", COUNT, {"KEDGE_RESTORE": "plain", "KEDGE_POLICY": "fail"})
    engine.wait_beyond(counter, reached)
    cri.remove_pod(second)
    engine.wait_shimless()
