"""Containers frozen and brought back for real: CRIU, runc, overlay roots, and programs that check themselves."""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.containers.criu import relay
from tests.lab import C_COUNTER, KEDGE, PYTHON, SHELL_COUNTER, Lab, lab
from tests.parts import require
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def freeze(lab: Lab, name: str, *options: str, key: str = "k") -> str:
    answer = lab.answer("container", "checkpoint", name, "--root", lab.runtime_root, "--key", key, *options)
    return str(answer["checkpoint"]["id"])


def thaw(lab: Lab, what: str, *options: str | Path) -> None:
    lab.kedge("container", "restore", what, *options)


@pytest.mark.parametrize("language", ["python", "shell", "c"])
def test_rounds(lab: Lab, language: str) -> None:
    """Frozen and thawed again and again, a program notices nothing, and nothing is lost or done twice."""
    if language == "python":
        lab.counter("one")
    elif language == "shell":
        lab.bundle("one", "/bin/sh", "-c", SHELL_COUNTER)
        lab.start("one")
    else:
        require("gcc")
        bundle = lab.bundle("one", "/counter")
        compiler = ["gcc", "-static", "-xc", "-", "-o", bundle / "lower/counter"]
        subprocess.run(compiler, input=C_COUNTER, text=True, check=True)
        lab.start("one")
    for leave_running in (True, False) if language == "python" else (False,):
        before = lab.wait_beyond("one", lab.count("one"))
        freeze(lab, "one", *(["--leave-running"] if leave_running else []))
        if leave_running:
            lab.wait_beyond("one", lab.count("one"))  # goes on, and all of it is forgotten by the restore
            lab.remove("one")
        assert not lab.is_running("one")
        frozen_at = lab.count("one")
        assert frozen_at >= before
        thaw(lab, "k")
        assert lab.wait_beyond("one", 0 if leave_running else frozen_at) >= before


def test_a_copy_of_one_moment(lab: Lab) -> None:
    """Left running under constant writes (appends, mapped memory, links, deletes), what was kept agrees with itself."""
    bundle = lab.counter("one", pause_s=0)
    lab.wait_beyond("one", 10)
    answer = lab.answer("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k", "--leave-running")
    assert set(answer["phases_ms"]) == {"dump", "files", "store"}
    assert answer["paused_ms"] > 0
    lab.wait_beyond("one", lab.count("one"))
    copy = lab.copy_of(bundle, "two")
    thaw(lab, answer["checkpoint"]["id"], "--new-id", "two", "--bundle", copy)
    lab.wait_beyond("two", lab.count("two"))
    lab.wait_beyond("one", lab.count("one"))


DYING = """
import os, signal, sys
from kedge import CheckpointManager
from kedge.containers.bundle import ContainerSource
from kedge.containers.checkpoint import Request, make_checkpoint
from kedge.containers.criu import relay
from kedge.containers.engine import runc

stage, name, root, mutant = sys.argv[1:]
if mutant:
    relay.__file__ = mutant

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

save = CheckpointManager.save
def save_and_die(*arguments, **options):
    save(*arguments, **options)
    die()

CheckpointManager.save = die if stage == "storing" else save_and_die
with CheckpointManager(namespace="containers") as manager:
    make_checkpoint(manager, ContainerSource.of(runc.find_container(name, None, root)), Request("k"))
"""


def test_killed_when_it_is_stored(lab: Lab) -> None:
    """The container runs on, and its checkpoint is whole; what is left is cleared away. More in test_runtime_kills."""
    lab.counter("one")
    lab.wait_beyond("one", 0)
    assert lab.python(DYING, "stored", "one", lab.runtime_root, "", check=False).returncode == -9
    lab.wait_beyond("one", lab.count("one"))
    lab.remove("one")
    thaw(lab, "k")
    lab.wait_beyond("one", lab.count("one"))
    freeze(lab, "one", "--leave-running")
    left = [path for path in (lab.state / "attempts").iterdir() if {"images", "rootfs"} & set(os.listdir(path))]
    assert left == []


def test_the_kill_test_can_fail(lab: Lab, tmp_path: Path) -> None:
    """A relay that takes silence for a yes loses the container."""
    mutant = tmp_path / "relay.py"
    source = Path(relay.__file__).read_text()
    assert source.count("return kedge.recv(16) == GO_ON") == 1
    mutant.write_text(source.replace("return kedge.recv(16) == GO_ON", "return kedge.recv(16) != b'no'"))
    lab.counter("one")
    lab.wait_beyond("one", 0)
    lab.python(DYING, "storing", "one", lab.runtime_root, mutant, check=False)
    while lab.is_running("one"):
        pass
    with kedge.open(lab.store, namespace="containers") as store:
        assert store.list("container:k") == []


FREEZING = """
import sys
from kedge import CheckpointManager
from kedge.containers.bundle import ContainerSource
from kedge.containers.checkpoint import Request, make_checkpoint
from kedge.containers.engine import runc

name, root, is_mutant = sys.argv[1:]
command = runc.Container.command
if is_mutant:
    runc.Container.command = lambda *words: [word for word in command(*words) if word != "--leave-running"]
with CheckpointManager(namespace="containers") as manager:
    make_checkpoint(manager, ContainerSource.of(runc.find_container(name, None, root)), Request("k"))
"""


def test_a_runtime_that_calls_another_criu_ends_nothing(lab: Lab) -> None:
    """It does not wait for us, so it must not be the one that ends the container: such a one was lost with its images
    when the store failed afterwards. The mutant lets it."""
    lab.counter("one")
    lab.wait_beyond("one", 0)
    runtime = lab.root / "bin/runc"
    runtime.parent.mkdir()
    runtime.write_text(f'#!/bin/sh\nPATH={os.environ["PATH"]} exec {shutil.which("runc")} "$@"\n')
    runtime.chmod(0o755)
    front = f"{runtime.parent}:{os.environ['PATH']}"

    def freeze_by_it(*mutant: str) -> subprocess.CompletedProcess[str]:
        words = (sys.executable, "-c", FREEZING, "one", lab.runtime_root, "".join(mutant))
        return lab.run(*words, env=lab.environment(PATH=front), check=False)

    assert "called another CRIU" in freeze_by_it().stderr
    lab.wait_beyond("one", lab.count("one"))
    assert "called another CRIU" in freeze_by_it("mutant").stderr
    wait_for(lambda: None if lab.is_running("one") else True, "this test cannot fail")


@pytest.mark.parametrize("place", ["images", "store"])
def test_disk_full(lab: Lab, place: str) -> None:
    """No room for the images, or in the store: an error that says so, and the container runs on."""
    lab.counter("one", ballast=8 << 20)
    lab.wait_beyond("one", 0)
    small = lab.state if place == "images" else lab.store
    small.mkdir()
    lab.run("mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small)
    failed = lab.kedge("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k", check=False)
    assert failed.returncode in (1, 7)
    assert "disk is full" in failed.stderr or "No space" in failed.stderr, failed.stderr
    lab.wait_beyond("one", lab.count("one"))
    lab.run("umount", small)
    freeze(lab, "one")
    assert not lab.is_running("one")


# A root that cannot be mounted again when its files have changed places. The mutant leaves them so: the old are lost.
UNMOUNTABLE = """
import sys
from kedge import CheckpointManager
from kedge.containers import rootfs
from kedge.containers.bundle import ContainerTarget
from kedge.containers.restore import restore_newest
from kedge.errors import Conflict

tool, exchange, exchanged = rootfs._mount_tool, rootfs.exchange, []

def refuse(command, *rest, failure=Conflict, **options):
    if command == "mount":
        raise failure("that is not to be")
    tool(command, *rest, **options)

def once(*paths):
    if not (exchanged and sys.argv[1]):
        exchanged.append(exchange(*paths))

rootfs._mount_tool, rootfs.exchange = refuse, once
with CheckpointManager(namespace="containers") as manager:
    restore_newest(manager, "container", "k", ContainerTarget.of)
"""


def test_disk_full_elsewhere(lab: Lab) -> None:
    """No room for the copy of the files, for the images of a restore, or for its files: all is as it was before. So it
    is when the root cannot be mounted again."""
    bundle = lab.counter("one")
    lab.wait_beyond("one", 0)
    lab.runc("exec", "one", "sh", "-c", "head -c 16000000 /dev/urandom > /work/big")

    def mount(place: Path, size: str) -> None:
        place.mkdir(exist_ok=True)
        lab.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)

    def assert_full(*arguments: str | Path) -> None:
        failed = lab.kedge("container", *arguments, check=False)
        assert failed.returncode in (1, 7)
        assert "disk is full" in failed.stderr or "No space" in failed.stderr, failed.stderr

    mount(lab.state, "12m")
    assert_full("checkpoint", "one", "--root", lab.runtime_root, "--key", "k", "--leave-running")
    lab.wait_beyond("one", lab.count("one"))
    lab.run("umount", lab.state)
    freeze(lab, "one")
    reached = lab.count("one")
    mount(lab.state, "1m")
    assert_full("restore", "k")
    lab.run("umount", lab.state)
    (bundle / "upper/since").touch()
    for mutant, stays in (("", True), ("mutant", False)):
        assert "is not to be" in lab.python(UNMOUNTABLE, mutant, check=False).stderr
        assert (bundle / "upper/since").exists() is stays
        layers = f"lowerdir={bundle}/lower,upperdir={bundle}/upper,workdir={bundle}/work"
        lab.run("mount", "-t", "overlay", "overlay", "-o", layers, bundle / "rootfs")
    copy = lab.copy_of(bundle, "two")
    small = copy / "small"
    mount(small, "8m")  # seen in the lab's mount namespace only
    lab.run("mkdir", small / "upper", small / "work")
    lab.run("umount", copy / "rootfs")
    layers = f"lowerdir={bundle}/lower,upperdir={small}/upper,workdir={small}/work"
    lab.run("mount", "-t", "overlay", "overlay", "-o", layers, copy / "rootfs")
    assert_full("restore", "k", "--new-id", "two", "--bundle", copy)
    assert lab.run("find", small / "upper", "-mindepth", "1").stdout == ""
    assert lab.run("ls", "-A", small).stdout.split() == ["upper", "work"]
    assert lab.count("one") == reached
    thaw(lab, "k")
    lab.wait_beyond("one", reached)


def test_a_damaged_generation_gives_way_to_the_one_before(lab: Lab) -> None:
    lab.counter("one", ballast=32 << 20)
    lab.wait_beyond("one", 0)
    first = freeze(lab, "one", "--leave-running")
    lab.wait_beyond("one", lab.count("one") + 150)
    known = set(lab.store.rglob("*.pack"))
    second = freeze(lab, "one")
    new = set(lab.store.rglob("*.pack")) - known
    assert new
    for pack in new:
        data = bytearray(pack.read_bytes())
        data[len(data) * 3 // 4 :: 512] = bytes(b ^ 0xFF for b in data[len(data) * 3 // 4 :: 512])
        pack.write_bytes(data)
    damaged = lab.kedge("container", "restore", second, check=False)
    assert damaged.returncode == 6, damaged.stderr
    restored = lab.kedge("container", "restore", "k", "--json")
    assert json.loads(restored.stdout)["checkpoint"] == first
    assert second in restored.stderr
    lab.wait_beyond("one", lab.count("one"))


def test_two_at_once(lab: Lab) -> None:
    """Of two checkpoints of one container at the same time one is taken; the other is told, or comes after it."""
    lab.counter("one")
    lab.wait_beyond("one", 0)
    command = [*KEDGE, "container", "checkpoint", "one", "--root", str(lab.runtime_root), "--leave-running"]
    both = [subprocess.Popen(lab.enter(command), env=lab.environment(), stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=60)[1].decode() for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 5], [0, 0]), said
    lab.wait_beyond("one", lab.count("one"))
    with kedge.open(lab.store, namespace="containers") as store:
        assert len(store.list("container:one")) == codes.count(0)


def test_only_what_changed_is_stored(lab: Lab) -> None:
    """A process of 24 MB of which a hundredth changed: the next generation adds a twentieth of the first at most."""
    lab.counter("one", ballast=24 << 20, pause_s=0.05)
    lab.wait_beyond("one", 0)
    sizes = []
    for _ in range(2):
        identity = freeze(lab, "one", "--leave-running")
        with kedge.open(lab.store, namespace="containers") as store:
            sizes.append(store.get(identity).stored_bytes)
    assert sizes[0] > 24 << 20
    assert sizes[1] <= sizes[0] / 20


FILES = """
rm /etc/gone; rm -r /etc/dir; mkdir /etc/dir; echo new > /etc/dir/new; echo 1 > /work/a; ln /work/a /work/b
truncate -s 3M /work/sparse; echo end >> /work/sparse; mkfifo -m 640 /work/fifo; mknod /work/null c 1 3
chown 1234:4321 /work/fifo; ln -s nowhere /work/link; chmod 6755 /work/b; touch -h -d @1700000000.123456789 /work/link
python3 -c "import os, socket; os.setxattr('/work/a', 'user.note', b'x'); socket.socket(socket.AF_UNIX).bind('/work/s')"
touch /work/done; while :; do sleep 1; done
"""


def test_files_come_back_exactly(lab: Lab) -> None:
    bundle = lab.bundle("one", "/bin/sh", "-c", FILES)
    (bundle / "lower/etc/gone").write_text("x")
    (bundle / "lower/etc/dir").mkdir()
    (bundle / "lower/etc/dir/old").write_text("x")
    lab.start("one")
    while not (bundle / "upper/work/done").exists():
        assert lab.is_running("one")
    answer = lab.answer("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k")
    assert answer["sockets"] == ["work/s"]
    copy = lab.copy_of(bundle, "two")
    thaw(lab, "k", "--new-id", "two", "--bundle", copy)
    (bundle / "upper/work/s").unlink()
    assert facts_of(copy / "upper") == facts_of(bundle / "upper")
    assert stat.S_ISCHR((copy / "upper/etc/gone").lstat().st_mode)
    assert lab.runc("exec", "two", "ls", "/etc").stdout.split() == ["dir"]
    assert lab.runc("exec", "two", "ls", "/etc/dir").stdout.split() == ["new"]


def facts_of(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about every file below, but for what only one machine knows."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        names = set(os.listxattr(path, follow_symlinks=False)) - {"trusted.overlay.origin", "trusted.overlay.uuid"}
        found[str(path.relative_to(root))] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_rdev,
            status.st_mtime_ns if not path.name.endswith("work") else 0,  # the socket was removed from it
            status.st_nlink if path.is_file() else 0,
            {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
            path.read_bytes() if path.is_file() and not path.is_symlink() else None,
            status.st_blocks < 1000,
            os.readlink(path) if path.is_symlink() else None,
        )  # fmt: skip
    return found


def test_a_plain_directory_as_root(lab: Lab) -> None:
    """No overlay: all files are kept, and replaced as a whole."""
    bundle = lab.bundle("one", "/bin/sh", "-c", SHELL_COUNTER)
    lab.run("umount", bundle / "rootfs")
    (bundle / "rootfs").rmdir()
    shutil.rmtree(bundle / "upper")
    (bundle / "lower").rename(bundle / "rootfs")
    (bundle / "upper").symlink_to("rootfs")
    lab.start("one")
    lab.wait_beyond("one", 3)
    freeze(lab, "one")
    at = lab.count("one")
    (bundle / "rootfs/work/log").write_text("lost")
    thaw(lab, "k")
    lab.wait_beyond("one", at)


# --- the network ---


def test_the_network_lock_is_taken_back(lab: Lab) -> None:
    """In a namespace that outlives the container: after a dump that ends it, and after a restore that fails."""
    namespace, rules = lasting_namespace(lab)
    lab.counter("one", network=str(namespace))
    lab.wait_beyond("one", 0)
    identity = freeze(lab, "one")
    assert "CRIU" not in lab.run(*rules).stdout
    thaw(lab, "k")
    lab.wait_beyond("one", lab.count("one"))
    lab.remove("one")
    config = json.loads((lab.root / "one/config.json").read_text())
    config["process"]["args"] = ["/nothing"]
    (lab.root / "one/upper/work/cells").unlink()
    with kedge.open(lab.store, namespace="containers") as store:  # one that CRIU refuses late
        state = store.load(identity)
        assert isinstance(state, dict)
        state["images"].write_to(lab.root / "broken")
        image = lab.root / "broken/fs-1.img"
        image.write_bytes(image.read_bytes()[:14])
        state["images"] = kedge.Tree(lab.root / "broken")
        store.save("container:k", "k", state, metadata={"kind": "container"})
    failed = lab.kedge("container", "restore", "k", check=False)
    assert failed.returncode == 1, failed.stderr
    assert "CRIU" not in lab.run(*rules).stdout
    assert not (lab.root / "one/upper/work/cells").exists()  # its files are what they were
    logs = lab.answer("container", "logs", "latest")
    assert logs["action"] == "restore"
    assert logs["result"] == "failed"
    assert "Error" in logs["log"]


def lasting_namespace(lab: Lab) -> tuple[Path, tuple[str, ...]]:
    """A network namespace that outlives containers, and the command that shows its rules."""
    namespace = lab.root / "namespace"
    namespace.touch()
    lab.run("unshare", f"--net={namespace}", "ip", "link", "set", "lo", "up")
    return namespace, ("nsenter", f"--net={namespace}", "iptables", "-S")


UNLOCKED_BY_NOBODY = """
import sys
from kedge import CheckpointManager
from kedge.containers import network
from kedge.containers.bundle import ContainerSource
from kedge.containers.checkpoint import Request, make_checkpoint
from kedge.containers.engine import runc

network.remove_lock = lambda namespace: False
with CheckpointManager(namespace="containers") as manager:
    make_checkpoint(manager, ContainerSource.of(runc.find_container("one", None, sys.argv[1])), Request("k"))
"""


def test_the_lock_test_can_fail(lab: Lab) -> None:
    """Without taking it back, the lock stays in a namespace that outlives the container."""
    namespace, rules = lasting_namespace(lab)
    lab.counter("one", network=str(namespace))
    lab.wait_beyond("one", 0)
    lab.python(UNLOCKED_BY_NOBODY, lab.runtime_root)
    assert "-A CRIU -j DROP" in lab.run(*rules).stdout


def test_another_kind_of_network_is_refused(lab: Lab) -> None:
    bundle = lab.counter("one")
    lab.wait_beyond("one", 0)
    freeze(lab, "one")
    spec = json.loads((bundle / "config.json").read_text())
    spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
    (bundle / "config.json").write_text(json.dumps(spec))
    refused = lab.kedge("container", "restore", "k", check=False)
    assert refused.returncode == 5
    assert "network mode own, the bundle has host" in refused.stderr


ECHO = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 5000))
if os.fork() == 0:
    there = socket.create_connection(("127.0.0.1", 5000))
    while True:
        there.sendall(there.recv(100))
here, _ = server.accept()
log, n = open("/work/log", "a"), 0
while True:
    n += 1
    message = b"%d\\n" % n
    here.sendall(message)
    if here.recv(100) != message:
        open("/work/broken", "w").write(f"step {n}")
        break
    log.write(message.decode())
    log.flush()
    time.sleep(0.002)  # sleep: the pace of the program
"""


def test_open_connections(lab: Lab) -> None:
    """With --tcp-established both ends go on talking; without, the container runs on and the option is named."""
    namespace, rules = lasting_namespace(lab)
    lab.bundle("one", PYTHON, "-c", ECHO, network=str(namespace))
    lab.start("one")
    lab.wait_beyond("one", 5)
    root = ("--root", lab.runtime_root)
    refused = lab.kedge("container", "checkpoint", "one", *root, "--key", "k", check=False)
    assert refused.returncode == 1
    assert "--tcp-established" in refused.stderr
    assert "--tcp-established" in lab.kedge("container", "preflight", "one", *root, check=False).stdout
    lab.wait_beyond("one", lab.count("one"))
    freeze(lab, "one", "--tcp-established")
    reached = lab.count("one")
    assert "CRIU" not in lab.run(*rules).stdout
    thaw(lab, "k")
    lab.wait_beyond("one", reached)


# --- what users are told ---


def test_errors_and_preflight(lab: Lab, tmp_path: Path) -> None:
    lab.bundle("one", PYTHON, "-c", "import time; time.sleep(1000)")  # sleep: until it is killed
    with (tmp_path / "output").open("wb") as output:
        lab.start("one", stdout=output)
    root = ("--root", lab.runtime_root)
    said = lab.kedge("container", "preflight", "one", *root, "--json", check=False)
    assert said.returncode == 1
    assert any("a file of the host" in one["what"] for one in json.loads(said.stdout)["findings"])
    failed = lab.kedge("container", "checkpoint", "one", *root, check=False)
    assert failed.returncode == 1
    assert "kedge container logs" in failed.stderr
    assert lab.is_running("one")
    lab.kedge("container", "logs", "latest")
    fleeting = ("checkpoint", "one", "--store", "memory:")  # it would be gone with its only checkpoint
    for arguments, code in (
        (("checkpoint", "nobody"), 4), (("checkpoint", "../x"), 3), (("restore", "nobody"), 4), (fleeting, 3),
    ):  # fmt: skip
        assert lab.kedge("container", *arguments, *root, check=False).returncode == code
    machine = tmp_path / "there.json"
    here = lab.answer("container", "doctor")["host"]
    for arch, what in ((here["arch"], "nothing stands in the way"), ("vax", "vax, not")):
        machine.write_text(json.dumps({"host": {**here, "arch": arch}}))
        assert what in lab.kedge("container", "preflight", "one", *root, "--target", machine, check=False).stdout


def test_doctor_says_whether_mounts_reach_other_namespaces(lab: Lab) -> None:
    """Where / is private, others keep what a restore unmounts: so it was with Docker, and restores failed."""
    told = []
    for propagation in ("private", "shared"):
        program = ["sh", "-c", f'mount --make-r{propagation} / && exec "$@"', "sh", *KEDGE]
        said = lab.run("unshare", "--mount", *program, "container", "doctor", "--json", check=False).stdout
        told.append([one for one in json.loads(said)["findings"] if one["subject"] == "mounts"])
    private, shared = told
    assert "/ is private" in private[0]["what"]
    assert "mount --make-rshared /" in private[0]["fix"]
    assert shared == []
