"""`kedge-runc` in the place of runc: containers that opt in survive being stopped, and nobody else notices."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers.gpu import memory_for
from kedge.containers.runtime.opt_in import wish_of
from tests.lab import COUNTER, PYTHON, lab
from tests.runtime_engine import KEPT, RUNTIME, Engine
from tests.waiting import removed, wait_for

criu = pytest.mark.requires("criu")
pytestmark = pytest.mark.xdist_group("containers")


# A runc that cannot pause as often as a file says.
PAUSES = """#!/bin/sh
read -r left < {left}
case " $* " in *" pause "*)
  if [ $left -gt 0 ]; then echo $((left - 1)) > {left}; echo 'unable to freeze' >&2; exit 1; fi ;;
esac
exec {runc} "$@"
"""


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Iterator[Engine]:
    with lab(tmp_path) as made:
        yield Engine(made)


def created_twice(engine: Engine, name: str) -> None:
    """Two creates of one ID at once: one of them makes the container, and the other does it no harm."""
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: engine.create(name, check=False), range(2))) == [0, 1]


@criu
def test_stopped_in_one_container_and_going_on_in_another(engine: Engine) -> None:
    first = engine.bundle("one", *KEPT, "NVIDIA_VISIBLE_DEVICES=all")  # it uses none of them
    engine.start("one")
    assert engine.status("one") == "running"
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    assert engine.status("one") == "stopped"
    assert datetime.fromisoformat(json.loads(engine.call("state", "one").stdout)["created"]).year > 2000
    engine.call("resume", "one")  # containerd does so after a checkpoint
    engine.call("kill", "one", "9")
    engine.call("delete", "one")
    assert engine.call("state", "one", check=False).returncode != 0
    reached = engine.lab.count("one")

    engine.bundle("two", *KEPT, lower=first / "lower")
    created_twice(engine, "two")
    assert engine.status("two") == "created"  # it is there, and waits
    assert engine.lab.count("two") >= reached
    assert int((engine.lab.root / "two.pid").read_text()) > 0
    engine.call("start", "two")
    engine.lab.wait_beyond("two", reached)

    images = engine.lab.root / "images"
    engine.call("checkpoint", "--leave-running", "--image-path", images, "two")
    assert (images / "inventory.img").exists()
    engine.lab.wait_beyond("two", engine.lab.count("two"))
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert len(store.list("container:counter")) == 2
    engine.call("kill", "two", "KILL")
    wait_for(lambda: True if engine.status("two") == "stopped" else None, "it does not end")
    engine.call("delete", "two")
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert [one.tags for one in store.list("container:counter")] == [{}, {}]  # killed, not crashed; and all kept


@criu
@pytest.mark.parametrize(
    ("node", "container", "is_open"), [("", "close", False), ("", "keep", True), ("keep", "", True), ("", "", False)]
)
def test_locks_are_kept_and_connections_closed_or_kept(
    engine: Engine, node: str, container: str, is_open: bool
) -> None:
    """As the container says, else as its node does."""
    engine.environment["KEDGE_TCP"] = node
    program = (PYTHON, "-c", TIED)
    first = engine.bundle("one", *KEPT, program=program)
    engine.start("one")
    wait_for((first / "upper/work/log").exists, "it does not begin")
    place = ("--root", engine.lab.runtime_root, "--json")
    checked = engine.lab.kedge("container", "preflight", "one", *place, env=engine.environment)
    said = [(one["status"], one["what"]) for one in json.loads(checked.stdout)["findings"]]
    assert ("ok", "2 open TCP connections: saved") in said
    assert ("ok", "1 file lock: saved") in said
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    settings = (*KEPT, "KEDGE_POLICY=fail", f"KEDGE_TCP={container}")
    second = engine.bundle("two", *settings, lower=first / "lower", program=program)
    engine.start("two")
    log = second / "upper/work/log"
    lines = len(log.read_text().splitlines())
    wait_for(lambda: len(log.read_text().splitlines()) > lines + 5, "it does not go on")
    steps = log.read_text().splitlines()[lines + 2 :]  # the first may have been decided before
    assert set(steps) == {"locked, open" if is_open else "locked, closed"}


TIED = """
import fcntl, os, socket, time
lock = open("/work/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
listening = socket.create_server(("127.0.0.1", 7777))
near = socket.create_connection(("127.0.0.1", 7777))
far = listening.accept()[0]
while True:
    try:
        near.send(b"x")
        is_open = far.recv(1) == b"x"
    except OSError:
        is_open = False
    with open("/work/lock") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            said = "lost"
        except BlockingIOError:
            said = "locked"
    with open("/work/log", "a") as log:
        log.write(f"{said}, {'open' if is_open else 'closed'}\\n")
    time.sleep(0.01)  # sleep: the pace of the program
"""


@criu
def test_watches_on_an_overlay_go_on(engine: Engine) -> None:
    """By inotify, on directories of the image and on new ones; one that has lost its name is refused before anything is
    paused, and preflight says so."""
    program = (PYTHON, "-c", WATCHER)
    first = engine.bundle("one", *KEPT, program=program)
    engine.start("one")
    wait_for((first / "upper/work/log").exists, "it does not begin")

    def watches(name: str) -> list[tuple[str, str]]:
        place = ("--root", engine.lab.runtime_root, "--json")
        checked = engine.lab.kedge("container", "preflight", name, *place, check=False, env=engine.environment)
        findings = json.loads(checked.stdout)["findings"]
        return [(one["status"], one["what"]) for one in findings if one["subject"] == "inotify"]

    assert watches("one") == [("ok", "watches /etc, /work/watched: saved")]
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    second = engine.bundle("two", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower", program=program)
    engine.start("two")
    log = second / "upper/work/log"
    lines = len(log.read_text().splitlines())
    wait_for(lambda: len(log.read_text().splitlines()) > lines + 5, "it does not go on")
    assert set(log.read_text().splitlines()) == {"seen"}

    engine.lab.run("touch", second / "rootfs/work/unlink")
    wait_for((second / "upper/work/unlinked").exists, "it does not take the name away")
    assert watches("two")[-1][0] == "bad"
    engine.call("kill", "two", "15")
    assert "a file that has no name any more" in engine.logged()
    assert engine.status("two") == "running"  # as the first process of a container it does not heed the signal


WATCHER = """
import ctypes, os, time
libc = ctypes.CDLL(None)
os.mkdir("/work/watched")
held = os.open("/work/watched", os.O_RDONLY)
watch = libc.inotify_init1(0o4000)
for name in (b"/work/watched", b"/etc"):
    assert libc.inotify_add_watch(watch, name, 0x100) > 0
while not os.path.exists("/work/unlink"):
    open("/work/watched/file", "w").close()
    os.unlink("/work/watched/file")
    try:
        os.read(watch, 4096)
    except BlockingIOError:
        continue  # CRIU loses an event that was not read when it paused the process
    with open("/work/log", "a") as log:
        log.write("seen\\n")
    time.sleep(0.01)  # sleep: the pace of the program
os.rmdir("/work/watched")
open("/work/unlinked", "w").close()
time.sleep(1000)  # sleep: until it is killed
"""


@criu
def test_a_periodic_timer_fires_on(engine: Engine) -> None:
    """Also one that expired while everything stood still, which it mostly has: its period is a millisecond."""
    program = (PYTHON, "-c", TICKER)
    first = engine.bundle("one", *KEPT, program=program)
    engine.start("one")
    wait_for((first / "upper/work/log").exists, "it does not tick")
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    second = engine.bundle("two", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower", program=program)
    engine.start("two")
    log = second / "upper/work/log"
    lines = len(log.read_text().splitlines())
    wait_for(lambda: len(log.read_text().splitlines()) > lines + 5, "its timer never fires again")


TICKER = """
import ctypes, os, time
libc = ctypes.CDLL(None)
timer = libc.timerfd_create(1, 0o4000)
libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000), None)
while True:
    time.sleep(0.01)  # sleep: the pace of the program
    try:
        os.read(timer, 8)
    except BlockingIOError:
        continue
    with open("/work/log", "a") as log:
        log.write("tick\\n")
"""


# Each thread asks the kernel itself: CRIU cannot open the /proc files of a thread again before the thread is there.
THREADS = """
import ctypes, threading, time
libc, PR_GET_SECCOMP = ctypes.CDLL(None), 21
counts, modes = [0, 0], [0, 0, 0]
def count(place):
    while True:
        modes[place] = libc.prctl(PR_GET_SECCOMP)
        counts[place] += 1
        time.sleep(0.002)  # sleep: the pace of the program
for place in range(2):
    threading.Thread(target=count, args=(place,)).start()
while not all(counts):
    time.sleep(0.002)  # sleep: the same
while True:
    modes[2] = libc.prctl(PR_GET_SECCOMP)
    with open("/work/log", "a") as log:
        log.write(f"{min(counts)} {''.join(sorted(set(map(str, modes))))}\\n")
    time.sleep(0.002)  # sleep: the same
"""


@criu
@pytest.mark.parametrize("is_confined", [True, False])
def test_threads_go_on_and_stay_confined(engine: Engine, is_confined: bool) -> None:
    """Docker gives every container a seccomp filter."""
    denied = {"names": ["kexec_load"], "action": "SCMP_ACT_ERRNO"}
    seccomp = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [denied]}
    settings = (*KEPT, "KEDGE_POLICY=fail")

    def bundle(name: str, **options: Any) -> Path:
        made = engine.bundle(name, *settings, program=(PYTHON, "-c", THREADS), **options)
        spec = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(
            json.dumps({**spec, "linux": {**spec["linux"], **({"seccomp": seccomp} if is_confined else {})}})
        )
        return made

    first = bundle("one")
    engine.start("one")
    log = first / "upper/work/log"
    wait_for(lambda: log.exists() and log.read_text().count("\n") > 5, "it does not begin")
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    log = bundle("two", lower=first / "lower") / "upper/work/log"
    engine.start("two")
    lines = log.read_text().splitlines()
    wait_for(lambda: log.read_text().count("\n") > len(lines) + 20, "it does not go on")
    steps = [line.split() for line in log.read_text().splitlines()]
    assert [int(count) for count, _ in steps] == sorted(int(count) for count, _ in steps)
    assert int(steps[-1][0]) > int(lines[-1].split()[0])
    assert {modes for _, modes in steps} == {"2" if is_confined else "0"}


@criu
def test_a_root_that_is_shared_below_a_private_one(engine: Engine) -> None:
    """Docker shares its own folder, also where / is private."""
    settings = (*KEPT, "KEDGE_POLICY=fail")
    first = engine.bundle("one", *settings)
    engine.lab.run("mount", "--make-shared", first / "rootfs")
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    reached = engine.lab.count("one")
    for name in ("one", "two"):
        if name == "two":  # and once more
            engine.bundle("two", *settings, lower=first / "lower")
        engine.start(name)
        engine.lab.wait_beyond(name, reached)
        engine.call("kill", name, "15")
        engine.call("delete", name)
        reached = engine.lab.count(name)


@criu
@pytest.mark.parametrize("upper", ["{0}/one/upper", "one/upper"])
def test_a_root_of_many_layers(engine: Engine, upper: str) -> None:
    """Engines mount it by relative paths, because the absolute ones are too long for mount(2): containerd those of the
    layers, Docker and podman all of them."""
    bundle, root = engine.bundle("one", *KEPT, "KEDGE_POLICY=fail"), engine.lab.root
    layers = [Path("one/lower"), *(Path(f"layers/{number}") for number in range(70))]
    for layer in layers[1:]:
        (root / layer).mkdir(parents=True)
    upper = upper.format(root)
    options = f"lowerdir={':'.join(map(str, layers))},upperdir={upper},workdir={upper.replace('upper', 'work')}"
    engine.lab.run("umount", bundle / "rootfs")
    engine.lab.run("sh", "-c", 'cd "$1" && shift && exec mount "$@"', "sh", root,
                   "-t", "overlay", "overlay", "-o", options, bundle / "rootfs")  # fmt: skip
    reached = 5
    for _ in range(2):
        engine.start("one")
        reached = engine.lab.wait_beyond("one", reached)
        engine.call("kill", "one", "15")
        engine.call("delete", "one")
        reached = engine.lab.count("one")
    engine.die_at("exchanged")
    assert engine.create("one", check=False) == -signal.SIGKILL
    engine.die_at("")
    engine.start("one")
    engine.lab.wait_beyond("one", reached)


@criu
def test_a_root_keeps_how_it_was_mounted(engine: Engine) -> None:
    """Podman mounts roots without devices if it is told to (mountopt), and a restore gives none."""
    root = engine.bundle("one", *KEPT, "KEDGE_POLICY=fail") / "rootfs"

    def options() -> str:
        return engine.lab.run("findmnt", "--noheadings", "--output", "VFS-OPTIONS", root).stdout

    engine.lab.run("mount", "-o", "remount,bind,nodev,nosuid,noatime", root)
    before = options()
    assert "nodev" in before
    reached = 5
    for _ in range(2):
        engine.start("one")
        reached = engine.lab.wait_beyond("one", reached)
        assert options() == before
        engine.call("kill", "one", "15")
        engine.call("delete", "one")


@criu
def test_a_root_that_is_a_mount(engine: Engine) -> None:
    """containerd's native snapshotter mounts a plain directory there, devmapper a device."""
    bundle = engine.bundle("one", *KEPT, "KEDGE_POLICY=fail")
    engine.lab.run("umount", bundle / "rootfs")
    engine.lab.run("cp", "-a", f"{bundle}/lower/.", bundle / "upper")
    engine.lab.run("mount", "--bind", bundle / "upper", bundle / "rootfs")
    reached = 5
    for _ in range(2):
        engine.start("one")
        reached = engine.lab.wait_beyond("one", reached)
        engine.call("kill", "one", "15")
        engine.call("delete", "one")
        reached = engine.lab.count("one")
    (bundle / "upper/other").write_text("of another moment")
    engine.die_at("mounted")
    assert engine.create("one", check=False) == -signal.SIGKILL
    engine.die_at("")
    engine.environment["KEDGE_RUNC"] = "/usr/bin/false"  # what nobody can restore changes no file
    assert engine.create("one", check=False) == 1
    assert (bundle / "upper/other").exists()
    del engine.environment["KEDGE_RUNC"]
    engine.start("one")
    engine.lab.wait_beyond("one", reached)
    assert not (bundle / "upper/other").exists()


@criu
def test_a_root_that_cannot_be_mounted_again(engine: Engine) -> None:
    """No container starts on an empty directory, whatever its policy says; the next create puts the root right."""
    engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    reached, usual = engine.lab.count("one"), engine.environment["PATH"]
    tool = engine.lab.root / "bin/mount"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n[ "$2" = overlay ] || PATH={shlex.quote(usual)} exec mount "$@"\nexit 32\n')
    tool.chmod(0o755)
    engine.environment["PATH"] = f"{tool.parent}:{usual}"
    assert engine.create("one", check=False) == 1
    assert "failed" in engine.logged()
    engine.environment["PATH"] = usual
    engine.start("one")
    engine.lab.wait_beyond("one", reached)


@criu
@pytest.mark.parametrize("failures", [1, 1_000_000])
def test_a_restored_container_that_cannot_be_paused(engine: Engine, failures: int) -> None:
    """runc gives up before processes stand still, on a busy machine: it is asked again, and `start` succeeds."""
    engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    reached, left, runc = engine.lab.count("one"), engine.lab.root / "left", engine.lab.root / "bin/runc"
    left.write_text(f"{failures}\n")
    runc.parent.mkdir()
    runc.write_text(PAUSES.format(left=left, runc=shutil.which("runc")))
    runc.chmod(0o755)
    engine.environment["KEDGE_RUNC"] = str(runc)
    engine.create("one")
    assert engine.status("one") == ("created" if failures == 1 else "running")
    assert ("it runs before it is started" in engine.logged()) == (failures > 1)
    engine.call("start", "one")
    assert engine.status("one") == "running"
    engine.lab.wait_beyond("one", reached)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")


@criu
def test_what_is_mounted_below_a_volume_stays(engine: Engine) -> None:
    """Where / is shared, as on most machines: runc unmounts what it has bound for a restore."""
    volume = engine.lab.root / "volume"
    (volume / "below").mkdir(parents=True)
    engine.lab.run("mount", "--make-rshared", "/")
    engine.lab.run("mount", "--bind", volume, volume)
    engine.lab.run("mount", "-t", "tmpfs", "below", volume / "below")
    bundle = engine.bundle("one", *KEPT, "KEDGE_POLICY=fail")
    (bundle / "lower/volume").mkdir()
    spec = json.loads((bundle / "config.json").read_text())
    spec["mounts"].append(
        {"destination": "/volume", "type": "bind", "source": str(volume), "options": ["rbind", "rprivate"]}
    )
    (bundle / "config.json").write_text(json.dumps(spec))
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    engine.start("one")
    engine.lab.wait_beyond("one", engine.lab.count("one"))
    assert engine.lab.run("mountpoint", volume / "below", check=False).returncode == 0


@criu
def test_the_loopback_of_a_network_of_its_own_is_up_again(engine: Engine) -> None:
    """Before the processes go on, and nothing of the configuration has changed."""
    program = (PYTHON, "-c", LISTENER)
    first = engine.bundle("one", *KEPT, program=program)
    engine.start("one")
    wait_for((first / "upper/work/log").exists, "it does not listen")
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    second = engine.bundle("two", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower", program=program)
    before = (second / "config.json").read_bytes(), (second / "config.json").stat().st_mtime_ns
    engine.start("two")
    log = second / "upper/work/log"
    lines = len(log.read_text().splitlines())
    wait_for(lambda: len(log.read_text().splitlines()) > lines + 5, "it does not go on")
    assert set(log.read_text().split()) == {"ok"}
    assert ((second / "config.json").read_bytes(), (second / "config.json").stat().st_mtime_ns) == before
    assert not (second / ".config.json.kedge").exists()


LISTENER = """
import socket, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("127.0.0.1", 7777))
while True:
    try:
        own.sendto(b"ok", ("127.0.0.1", 7777))
        said = own.recv(10).decode()
    except OSError as error:
        said = repr(error)
    with open("/work/log", "a") as log:
        log.write(said + "\\n")
    time.sleep(0.002)  # sleep: the pace of the program
"""


@criu
def test_a_restore_gives_no_more_than_the_new_configuration(engine: Engine) -> None:
    """A container with fewer capabilities, named like one with more, does not get them from its memory."""

    def confine(bundle: Path, **process: Any) -> None:
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"].update(process)
        (bundle / "config.json").write_text(json.dumps(spec))

    first = engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    engine.call("delete", "one")
    reached = engine.lab.count("one")

    confine(engine.bundle("two", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower"), capabilities={})
    refused = engine.call("create", "--bundle", engine.lab.root / "two", "two", check=False)
    assert refused.returncode != 0
    assert "CAP_CHOWN" in refused.stderr
    confine(engine.bundle("three", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower"), noNewPrivileges=True)
    refused = engine.call("create", "--bundle", engine.lab.root / "three", "three", check=False)
    assert "new privileges" in refused.stderr
    engine.bundle("four", *KEPT, "KEDGE_POLICY=fail", lower=first / "lower")
    engine.start("four")
    engine.lab.wait_beyond("four", reached)


TALKER = """
import os, time
n = 0
while True:
    n += 1
    os.write(1, b"out %d\\n" % n)
    os.write(2, b"err %d\\n" % n)
    time.sleep(0.005)  # sleep: the pace of the program
"""


@criu
def test_its_streams_are_those_of_each_create(engine: Engine) -> None:
    """Pipes, as engines give them: what is brought back writes to the new ones, step after step, again and again."""
    engine.bundle("one", *KEPT, program=(PYTHON, "-c", TALKER))
    told: dict[str, list[str]] = {"out": [], "err": []}
    for _ in range(3):
        ends = {name: os.pipe() for name in ("stdout", "stderr")}
        engine.create("one", **{name: writing for name, (_, writing) in ends.items()})
        engine.call("start", "one")
        streams = []
        for reading, writing in ends.values():
            os.close(writing)
            streams.append(os.fdopen(reading))
        for stream in streams:
            for _ in range(5):
                what, number = stream.readline().split()
                told[what].append(number)
        engine.call("kill", "one", "TERM")
        assert engine.status("one") == "stopped"
        for stream in streams:
            with stream:
                for line in stream:
                    what, number = line.split()
                    told[what].append(number)
        engine.call("delete", "one")
    for numbers in told.values():
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert len(store.list("container:counter")) == 3


@criu
def test_one_that_crashed_after_it_was_brought_back(engine: Engine) -> None:
    """Its generation is marked, and the one before it is tried; with none left, it starts anew."""
    engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("checkpoint", "--leave-running", "--image-path", engine.lab.root / "images", "one")
    engine.lab.wait_beyond("one", engine.lab.count("one") + 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    with kedge.open(engine.lab.store, namespace="containers") as store:
        older, newer = [one.id for one in store.list("container:counter")]
    for crashed in (newer, older):
        engine.start("one")
        engine.lab.wait_beyond("one", engine.lab.count("one"))
        os.kill(int((engine.lab.root / "one.pid").read_text()), 9)
        wait_for(lambda: True if engine.status("one") == "stopped" else None, "it does not end")
        [mark] = [path for path in (engine.lab.root / "marks").rglob("*") if path.is_file()]
        mark.write_text(json.dumps({**json.loads(mark.read_text()), "started": time.time() + 600}))  # it is soon, still
        engine.call("delete", "one")
        with kedge.open(engine.lab.store, namespace="containers") as store:
            assert store.get(crashed).tags == {"crashed": "after-restore"}
    (engine.lab.root / "one/upper/work/log").unlink()
    engine.bundle("fresh", *KEPT)
    engine.start("fresh")
    engine.lab.wait_beyond("fresh", 0)


@criu
def test_what_cannot_be_frozen_gets_the_signal(engine: Engine) -> None:
    """Nowhere to write: the container ends as it would with runc, and the engine's log says why it was not kept."""
    bundle = engine.bundle("one", *KEPT)
    spec = json.loads((bundle / "config.json").read_text())
    waits = "open('/work/ready', 'w'); time.sleep(99)"  # sleep: until the signal
    program = f"import signal, time; signal.signal(15, lambda *_: exit(3)); {waits}"
    spec["process"]["args"] = [PYTHON, "-c", program]
    (bundle / "config.json").write_text(json.dumps(spec))
    engine.start("one")
    wait_for(lambda: True if (bundle / "upper/work/ready").exists() else None, "it does not start")
    engine.lab.state.mkdir()
    engine.lab.run("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", engine.lab.state)
    engine.call("kill", "one", "SIGTERM")
    wait_for(lambda: True if engine.status("one") == "stopped" else None, "it did not get the signal")
    assert "the signal is passed on" in engine.logged()


@criu
def test_processes_of_another_user(engine: Engine) -> None:
    """Without CAP_SYS_RESOURCE root cannot read their limits: that is known before anything is frozen."""
    bundle = engine.bundle("one", *KEPT)
    (bundle / "lower/work").chmod(0o777)
    spec = json.loads((bundle / "config.json").read_text())
    spec["process"]["user"] = {"uid": 1000, "gid": 1000}
    (bundle / "config.json").write_text(json.dumps(spec))
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "15")
    if "CAP_SYS_RESOURCE is missing" not in engine.logged():
        reached = engine.lab.count("one")
        engine.call("delete", "one")
        engine.start("one")
        engine.lab.wait_beyond("one", reached)
        return
    attempts = list((engine.lab.state / "attempts").glob("*"))
    assert not attempts, [list(one.iterdir()) for one in attempts]
    engine.lab.wait_beyond("one", engine.lab.count("one"))  # its first process ignores the signal


@criu
@pytest.mark.mutant
def test_the_test_of_two_creates_can_fail(engine: Engine) -> None:
    engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 0)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    engine.die_at("", "two at once")
    for _ in range(5):  # the two may happen to miss each other
        try:
            created_twice(engine, "one")
            assert engine.status("one") == "created"
        except AssertionError:
            return
        engine.call("delete", "--force", "one")
    pytest.fail("five times nothing came of it")


@criu
def test_what_takes_too_long_is_given_up(engine: Engine) -> None:
    """At the deadline CRIU stops in the middle of the dump; the container gets its signal, and is none the worse."""
    trap = "import signal; signal.signal(15, lambda *_: open('/work/told', 'a').write('x'))\n"
    bundle = engine.bundle("one", *KEPT, program=(PYTHON, "-c", trap + COUNTER, "0.002", str(256 << 20)))
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    told = bundle / "upper/work/told"

    def was_told(times: int) -> bool | None:
        return True if told.exists() and told.stat().st_size == times else None

    for number, deadline in enumerate(("0.001", "0.1"), start=1):  # so much memory takes longer on every machine
        engine.environment["KEDGE_DEADLINE_S"] = deadline
        engine.call("kill", "one", "TERM")
        wait_for(lambda n=number: was_told(n), "it was not told")
        engine.lab.wait_beyond("one", engine.lab.count("one"))
        log = max((engine.lab.state / "attempts").iterdir()) / "dump.log"
        assert not log.exists() or "Running post-dump" not in log.read_text()
    assert "not dumped in time" in engine.logged()
    engine.environment["KEDGE_DEADLINE_S"] = "100"
    engine.call("kill", "one", "TERM")
    assert engine.status("one") == "stopped"


@criu
def test_a_generation_that_cannot_be_restored(engine: Engine) -> None:
    """fresh: it starts anew; fail: it does not start, and the log says why. One that is damaged is marked."""
    first = engine.bundle("one", *KEPT)
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    engine.lab.run("mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", engine.lab.state)
    assert engine.create("one", check=False) == 1  # the generation is good, so it must not start anew
    assert "No space left" in engine.logged()
    engine.lab.run("umount", engine.lab.state)
    other = engine.bundle("two", *KEPT, "KEDGE_POLICY=fail")
    spec = json.loads((other / "config.json").read_text())
    spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "network"]
    (other / "config.json").write_text(json.dumps(spec))
    with pytest.raises(subprocess.CalledProcessError):
        engine.create("two")
    assert "network mode" in engine.logged()
    spec["process"]["env"][-1] = "KEDGE_POLICY=fresh"
    (other / "config.json").write_text(json.dumps(spec))
    engine.start("two")
    engine.lab.wait_beyond("two", 0)
    engine.call("kill", "two", "KILL")
    engine.wait_stopped("two")
    engine.call("delete", "two")

    for pack in engine.lab.store.rglob("*.pack"):
        damaged = bytearray(pack.read_bytes())
        damaged[::512] = bytes(byte ^ 0xFF for byte in damaged[::512])
        pack.write_bytes(damaged)
    engine.bundle("three", *KEPT, lower=first / "lower")
    engine.start("three")
    assert "is damaged" in engine.logged()
    engine.lab.wait_beyond("three", 0)
    engine.call("kill", "three", "TERM")
    engine.call("delete", "three")
    reached = engine.lab.count("three")
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert [one.status for one in store.list("container:counter")] == ["corrupted", "created"]
    engine.start("three")  # what is kept now rests on nothing that is damaged
    engine.lab.wait_beyond("three", reached)


@criu
def test_who_did_not_ask_gets_runc(engine: Engine) -> None:
    engine.bundle("one")
    engine.start("one")
    engine.lab.wait_beyond("one", 0)
    plain = engine.lab.runc("state", "one").stdout
    assert engine.call("state", "one").stdout == plain
    assert not (engine.lab.root / "marks").exists()
    assert engine.call("--version").stdout == engine.lab.runc("--version").stdout
    engine.call("kill", "one", "KILL")
    assert not engine.lab.store.exists()


CONTAINERD = """
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
address = "{0}/socket"
[ttrpc]
address = "{0}/socket.ttrpc"
"""


@criu
@pytest.mark.requires("containerd")
def test_under_containerd(engine: Engine) -> None:
    """ctr stops a task; another container of the same workload goes on from there."""
    bundle = engine.bundle("one")
    home = engine.lab.root / "containerd"
    home.mkdir()
    (home / "config.toml").write_text(CONTAINERD.format(home))
    command = engine.lab.enter(["containerd", "--config", home / "config.toml"])
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(command, env=engine.environment, stdout=log, stderr=log)

    def ctr(*words: str | Path, check: bool = True) -> str:
        return engine.lab.run("ctr", "--address", home / "socket", *words, check=check).stdout

    def run(name: str) -> None:
        wishes = [word for wish in KEPT for word in ("--env", wish)]
        mount = "type=bind,src=/usr,dst=/usr,options=rbind:ro"
        program = (bundle / "rootfs", name, PYTHON, "-c", COUNTER, "0.002", "0")
        ctr("run", "--detach", "--runc-binary", RUNTIME, "--rootfs", "--mount", mount, *wishes, *program)

    def end(name: str) -> None:
        wait_for(lambda: True if "STOPPED" in ctr("task", "list") else None, "it does not end")
        ctr("task", "delete", name, check=False)  # says 137, as after any kill
        ctr("container", "delete", name)

    try:
        wait_for(lambda: ctr("version", check=False) or None, "containerd does not start")
        run("first")
        engine.lab.wait_beyond("one", 5)
        ctr("task", "kill", "--signal", "SIGTERM", "first")
        end("first")
        reached = engine.lab.count("one")
        run("second")
        engine.lab.wait_beyond("one", reached)
        ctr("task", "kill", "--signal", "SIGKILL", "second")
        end("second")
        with kedge.open(engine.lab.store, namespace="containers") as store:
            assert len(store.list("container:counter")) == 1
    finally:
        daemon.terminate()
        daemon.wait(timeout=120)


@criu
@pytest.mark.requires("podman")
def test_under_podman(engine: Engine) -> None:
    """podman stops, starts and restarts a container; another one of the same workload goes on from there."""
    bundle = engine.bundle("one")
    home = engine.lab.root / "podman"
    home.mkdir()
    front = home / "runtime"  # podman gives its runtimes no environment
    names = ("KEDGE_STATE_DIR", "KEDGE_STORE", "KEDGE_RUNC_STATE", "KEDGE_PYTHON", "KEDGE_DEADLINE_S", "PATH")
    values = "\n".join(f"export {name}={shlex.quote(engine.environment[name])}" for name in names)
    front.write_text(f'#!/bin/sh\n{values}\nexec {shlex.quote(str(RUNTIME))} "$@"\n')
    front.chmod(0o755)

    run_root = Path(tempfile.mkdtemp(prefix="kd-"))  # podman takes no long names here

    def podman(*words: str | Path, check: bool = True) -> str:
        places = ("--root", home / "root", "--runroot", run_root, "--runtime", front)
        ways = ("--cgroup-manager", "cgroupfs", "--events-backend", "none")
        return engine.lab.run("podman", *places, *ways, *words, check=check).stdout

    def run(name: str) -> None:
        wishes = [word for wish in KEPT for word in ("--env", wish)]
        limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")
        program = (bundle / "rootfs", PYTHON, "-c", COUNTER, "0.002", "0")
        mount = ("--volume", "/usr:/usr:ro")
        podman("run", "--detach", "--name", name, "--network", "none", *limits, *mount, *wishes, "--rootfs", *program)

    try:
        run("first")
        engine.lab.wait_beyond("one", 5)
        podman("stop", "--time", "100", "first")
        reached = engine.lab.count("one")
        podman("start", "first")
        reached = engine.lab.wait_beyond("one", reached)
        podman("restart", "--time", "100", "first")
        engine.lab.wait_beyond("one", reached)
        podman("stop", "--time", "100", "first")
        podman("rm", "first")
        reached = engine.lab.count("one")
        run("second")
        engine.lab.wait_beyond("one", reached)
        with kedge.open(engine.lab.store, namespace="containers") as store:
            assert len(store.list("container:counter")) == 3
    finally:
        podman("rm", "--force", "--all", check=False)
        wait_for(lambda: removed(run_root), "podman still writes below its run root")


UNTIL_TOLD = """
import os, sys, time
open("/work/log", "a").write("1\\n")
while not os.path.exists("/work/end"):
    time.sleep(0.005)  # sleep: the pace of the program
sys.exit(int(open("/work/end").read()))
"""


@criu
@pytest.mark.parametrize("is_restored", [True, False])
def test_forgotten_after_a_success(engine: Engine, is_restored: bool) -> None:
    """With KEDGE_KEEP=until-success, an end with status 0 ends the history; a failure or a kill does not."""
    bundle = engine.bundle("one", *KEPT, "KEDGE_KEEP=until-success", program=(PYTHON, "-c", UNTIL_TOLD))

    def generations() -> int:
        with kedge.open(engine.lab.store, namespace="containers") as store:
            return len(store.list("container:counter"))

    def begin() -> None:
        (bundle / "upper/work/end").unlink(missing_ok=True)
        engine.start("one")
        engine.lab.wait_beyond("one", 0)

    def end(how: str) -> None:
        engine.lab.runc("exec", "one", "sh", "-c", f"echo {how} > /work/draft; mv /work/draft /work/end", check=False)
        engine.wait_stopped("one")
        engine.call("delete", "one")

    begin()
    if is_restored:
        engine.call("kill", "one", "TERM")
        engine.call("delete", "one")
        begin()
    else:
        engine.call("checkpoint", "--leave-running", "--image-path", engine.lab.root / "images", "one")
    assert generations() == 1
    if is_restored:
        end("3")
        assert generations() == 1
        with kedge.open(engine.lab.store, namespace="containers") as store:
            store.tag(store.list("container:counter")[0].id, crashed=None)
        begin()
        engine.call("kill", "one", "KILL")
        engine.wait_stopped("one")
        engine.call("delete", "one")
        assert generations() == 1
        begin()
    end("0")
    assert generations() == 0
    assert not any(path.is_file() for path in (engine.lab.root / "marks").rglob("*"))


@criu
def test_from_what_arch_left(engine: Engine) -> None:
    """A container of ARCH begins with the processes and the files that it left, under its own ID, and needs no name."""
    from kedge.legacy import arch

    first = engine.bundle("one")
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    left = engine.lab.root / "arch" / first.parent.name / first.name
    left.mkdir(parents=True)
    engine.lab.runc("checkpoint", "--image-path", left, "--work-path", left, "one")
    assert arch.save_checkpoint_file(first / "upper", left)
    engine.lab.remove("one")
    reached = engine.lab.count("one")
    (first / "upper/work/log").unlink()
    asked = ["ARCH_ENABLE=1", f"ARCH_CHECKPOINT_HOST_PATH={engine.lab.root / 'arch'}"]
    job = f"container:ARCH+{first.parent.name}+{first.name}"
    check_begins_there(engine, first, asked, str(engine.lab.root / "arch"), reached, job)


@criu
def test_from_images_in_a_directory(engine: Engine) -> None:
    """Images that another runtime dumped are the beginning, once; only below a directory that was opened for that."""
    first = engine.bundle("one")
    engine.start("one")
    engine.lab.wait_beyond("one", 5)
    shared = engine.lab.root / "shared"
    shared.mkdir()
    engine.lab.runc("checkpoint", "--image-path", shared / "images", "--work-path", engine.lab.root, "one")
    engine.lab.remove("one")
    reached = engine.lab.count("one")
    asked = [*KEPT, f"RESTORE_FROM={shared}/images"]
    check_begins_there(engine, first, asked, f"/nowhere:{shared}", reached, "container:counter")


def check_begins_there(engine: Engine, bundle: Path, asked: list[str], roots: str, reached: int, job: str) -> None:
    """Refused until the place is opened for that; then it is the first generation, and the next one is our own."""
    spec = json.loads((bundle / "config.json").read_text())
    spec["process"]["env"] += asked
    (bundle / "config.json").write_text(json.dumps(spec))
    with pytest.raises(subprocess.CalledProcessError):
        engine.create("one")
    assert "KEDGE_RESTORE_ROOTS" in engine.logged()
    engine.environment["KEDGE_RESTORE_ROOTS"] = roots
    engine.start("one")
    reached = engine.lab.wait_beyond("one", reached)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    engine.start("one")  # goes on from the newer generation
    engine.lab.wait_beyond("one", reached)
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert len(store.list(job)) == 2


# --- opting in ---


def spec_of(*environment: str) -> dict[str, Any]:
    return {"process": {"env": list(environment)}}


def test_wishes() -> None:
    assert wish_of(spec_of("PATH=/bin")) is None
    assert wish_of(spec_of("KEDGE_CHECKPOINT=0")) is None
    wish = wish_of(spec_of("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=web"))
    assert wish is not None
    assert (wish.key, wish.restore, wish.policy, wish.tries) == ("web", "latest", "fresh", 1)
    older = wish_of(spec_of("ARCH_ENABLE=1", "KEDGE_WORKLOAD=web", "RESTORE_FROM=web_1_abcdef01"))
    assert older is not None
    assert older.restore == "web_1_abcdef01"
    retry = wish_of(spec_of("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=a", "KEDGE_POLICY=retry:4"))
    assert retry is not None
    assert retry.tries == 4


def test_keys_stay_in_their_namespace() -> None:
    pod = {
        "io.kubernetes.cri.sandbox-namespace": "team", "io.kubernetes.cri.sandbox-name": "job-0",
        "io.kubernetes.cri.container-name": "main", "kedge.dev/checkpoint": "1",
    }  # fmt: skip
    found = wish_of({"annotations": pod})
    assert found is not None
    assert found.key == "team+job-0+main"
    other = wish_of({"annotations": {**pod, "kedge.dev/key": "other+secret"}})
    assert other is not None
    assert other.key == "team+other+2bsecret"
    assert wish_of({"annotations": {**pod, "io.kubernetes.cri.container-type": "sandbox"}}) is None


def test_who_was_given_a_gpu() -> None:
    """Only for those is the module of GPUs imported."""
    assert memory_for(spec_of("NVIDIA_VISIBLE_DEVICES=void")) is None
    assert memory_for({"linux": {"devices": None}, "mounts": [{"destination": "/dev/shm"}]}) is None
    for given in (
        spec_of("NVIDIA_VISIBLE_DEVICES=all"),
        {"linux": {"devices": [{"path": "/dev/nvidia0"}]}},
        {"mounts": [{"destination": "/dev/nvidiactl"}]},
    ):
        assert type(memory_for(given)).__name__ == "GpuMemory"


@pytest.mark.parametrize(
    "wrong", ["KEDGE_POLICY=maybe", "KEDGE_KEEP=never", "KEDGE_POLICY=retry:0", "KEDGE_RESTORE=../x"]
)
def test_wishes_that_cannot_be(wrong: str) -> None:
    with pytest.raises(kedge.Validation):
        wish_of(spec_of("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=web", wrong))
    with pytest.raises(kedge.Validation, match="KEDGE_WORKLOAD"):
        wish_of(spec_of("KEDGE_CHECKPOINT=1"))
