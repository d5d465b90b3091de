"""The runtime io.containerd.kedge.v1 below containerd: containers that opt in go on, others notice nothing."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import kedge
from kedge.containers.runtime.early import AHEAD
from kedge.model import Checkpoint
from tests.engine import OURS, PLAIN, SHIM, Containerd, containerd
from tests.lab import COUNTER, KEDGE, PYTHON, lab
from tests.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", "containerd")]
ROUNDS = int(os.environ.get("KEDGE_ROUNDS") or 1)


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("shim")) as made, containerd(made) as engine:
        yield engine


def kept_as(workload: str) -> tuple[str, str]:
    return "KEDGE_CHECKPOINT=1", f"KEDGE_WORKLOAD={workload}"


def generations(engine: Containerd, workload: str) -> list[Checkpoint]:
    with kedge.open(engine.lab.store, namespace="containers") as store:
        return store.list(f"container:{workload}")


def marks(engine: Containerd) -> list[Path]:
    return [path for path in (engine.lab.root / "marks").rglob("*") if path.is_file()]


def images_given(engine: Containerd, name: str) -> str:
    """The names of the files of CRIU in the image that containerd made of a checkpoint."""
    images = engine.ctr("image", "list").stdout.splitlines()
    index = next(line.split()[2] for line in images if line.startswith(f"containerd.io/checkpoint/{name}:"))
    parts = json.loads(engine.ctr("content", "get", index).stdout)["manifests"]
    dump = next(part["digest"] for part in parts if part["mediaType"].endswith("criu.tar"))
    get = shlex.join(map(str, engine.command("content", "get", dump)))
    return engine.lab.run("sh", "-c", f"{get} | tar -t").stdout


def stop(engine: Containerd, name: str) -> int:
    """SIGTERM, as an eviction sends it; how far its counter was."""
    engine.kill(name, "SIGTERM")
    engine.wait_stopped(name)
    return engine.count(name)


def test_stopped_in_one_container_and_going_on_in_another(engine: Containerd) -> None:
    engine.run("first", *kept_as("moving"))
    bundle = engine.home / "state/io.containerd.runtime.v2.task" / engine.namespace / "first"
    assert (bundle / AHEAD).read_text() == ""  # its shim had looked ahead, and create used that
    engine.wait_beyond("first", 5)
    # containerd pauses, asks for the checkpoint and takes the files itself: nothing may move in between
    engine.ctr("task", "pause", "first")
    reached = engine.count("first")
    engine.ctr("task", "checkpoint", "first")
    assert engine.status("first") == "PAUSED"
    assert engine.count("first") == reached
    assert "inventory.img" in images_given(engine, "first")
    assert len(generations(engine, "moving")) == 1
    engine.ctr("task", "resume", "first")
    engine.wait_beyond("first", reached)
    reached = stop(engine, "first")
    assert len(generations(engine, "moving")) == 2
    engine.remove("first")

    notes = ("kedge.dev/restore=latest", "kedge.dev/key=moving")
    engine.run("second", annotations=notes)  # it has files of its own, which become those of the first
    engine.wait_beyond("second", reached)
    tail = engine.ctr("task", "exec", "--exec-id", "e", "second", "/usr/bin/head", "-n1", "/work/log")
    assert tail.stdout == "1\n"
    engine.remove("second")
    assert marks(engine) == []


def test_the_name_of_a_running_container(engine: Containerd) -> None:
    """runc's folder is shared by all containerds of a machine: ours does not remove what another one runs."""
    engine.run("taken", *kept_as("taken"))
    engine.wait_beyond("taken", 5)
    engine.ctr("task", "checkpoint", "taken")
    place = Path("/run/containerd/runc") / engine.namespace
    bundle = json.loads(engine.lab.run("runc", "--root", place, "state", "taken").stdout)["bundle"]
    command = (SHIM.with_name("kedge-runc"), "--root", place, "create", "--bundle", bundle, "taken")
    done = engine.lab.run(*command, check=False, env=engine.environment)
    assert done.returncode != 0
    assert "exists" in done.stderr
    engine.wait_beyond("taken", engine.count("taken"))
    stop(engine, "taken")
    assert len(generations(engine, "taken")) == 2  # it is still known as one that opted in
    engine.remove("taken")


def test_who_did_not_opt_in(engine: Containerd) -> None:
    """Every call ends as it does with containerd's own shim, in the same events, and nothing of ours is written."""
    seen = {}
    for name, shim in (("plain", PLAIN), ("ours", OURS)):
        with subprocess.Popen(engine.lab.enter(engine.command("events")), stdout=subprocess.PIPE) as events:
            wait_for(lambda: True if _listens(engine, events) else None, "no events")
            seen[name] = _life(engine, name, shim)
            assert events.stdout is not None
            told: list[str] = []
            while "/tasks/delete" not in told:
                told += [line.split()[5].decode() for line in [events.stdout.readline()] if b"/tasks/" in line]
            events.terminate()
        assert told[0] == "/tasks/create"
        seen[name].append(told)
    assert seen["ours"] == seen["plain"]
    assert b"33 99" in seen["ours"]
    assert marks(engine) == []


def _listens(engine: Containerd, events: subprocess.Popen[bytes]) -> bool:
    engine.ctr("namespace", "label", engine.namespace, f"probe={os.urandom(4).hex()}")
    assert events.stdout is not None
    return bool(select.select([events.stdout], [], [], 0.1)[0])


def _life(engine: Containerd, name: str, shim: str) -> list[object]:
    program = (PYTHON, "-c", "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); signal.pause()")
    engine.run(name, shim=shim, program=program)
    echo = engine.ctr("task", "exec", "--exec-id", "echo", name, "/usr/bin/echo", "hello")
    bad = engine.ctr("task", "exec", "--exec-id", "bad", name, "/usr/bin/false", check=False)
    metrics = engine.ctr("task", "metrics", "--format", "json", name)
    found: list[object] = [echo.stdout, bad.returncode, metrics.returncode, engine.status(name), _resized(engine, name)]
    engine.ctr("task", "pause", name)
    found.append(engine.status(name))
    engine.ctr("task", "resume", name)
    found.append(engine.status(name))
    engine.kill(name, "SIGTERM")
    engine.wait_stopped(name)
    found.append(engine.ctr("task", "delete", name, check=False).returncode)
    engine.ctr("container", "delete", name)
    found.append(engine.ctr("task", "list").stdout.count(name))
    return found


def _resized(engine: Containerd, name: str) -> bytes:
    """The size that a program in it finds its terminal to have: that of ours, once it was told."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    size = 'until [ "$(stty size)" != "0 0" ]; do sleep 0.01; done; stty size'
    command = engine.command("task", "exec", "--tty", "--exec-id", "tty", name, "/usr/bin/sh", "-c", size)
    subprocess.run(engine.lab.enter(command), stdin=theirs, stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    said = os.read(ours, 1000).strip()
    os.close(ours)
    return said


@pytest.mark.parametrize("has_terminal", [True, False] if ROUNDS > 1 else [True])
def test_attach(engine: Containerd, has_terminal: bool) -> None:
    """What is said to it reaches it, and it answers: as with containerd's own shim, also when it was brought back."""
    options = ("--tty",) if has_terminal else ()

    def run(name: str, *wishes: str, shim: str = OURS) -> None:
        program = (PYTHON, "-c", "n = 0\nwhile True:\n    n += 1\n    print(n, input(), flush=True)")
        with _terminal() as (_, theirs):
            words = engine.to_run(name, *options, wishes=wishes, shim=shim, program=program)
            subprocess.run(
                engine.lab.enter(engine.command(*words)), stdin=theirs, stdout=theirs, check=True, timeout=60
            )

    run("plain", shim=PLAIN)
    plain = [_attached(engine, "plain", b"hello"), _attached(engine, "plain", b"again")]
    engine.remove("plain")
    run("talking", *kept_as("talking"))
    ours = [_attached(engine, "talking", b"hello")]
    stop(engine, "talking")
    engine.remove("talking")
    run("talking-on", *kept_as("talking"))
    ours.append(_attached(engine, "talking-on", b"again"))
    engine.remove("talking-on")
    assert ours == plain
    assert b"2 again" in ours[1]


def _attached(engine: Containerd, name: str, line: bytes) -> bytes:
    """Everything up to the answer, and the end of its line."""
    with _terminal() as (ours, theirs):
        command = engine.lab.enter(engine.command("task", "attach", name))
        attached = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.write(ours, line + b"\n")
        heard = b""
        while not re.search(rb"\d %b\s*\n" % line, heard):
            assert select.select([ours], [], [], 60)[0], heard
            heard += os.read(ours, 1000)
        attached.kill()
        attached.wait()
    return heard


@contextmanager
def _terminal() -> Iterator[tuple[int, int]]:
    """Both ends of one that does nothing by itself."""
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    try:
        yield ours, theirs
    finally:
        os.close(theirs)
        os.close(ours)


def test_a_restore_that_criu_refuses(engine: Containerd) -> None:
    """A file that it has open is another one by now: the reason is in ctr's answer, and nothing is left of the
    container. The other policies: test_pods."""
    shared = engine.lab.root / "shared"
    shared.mkdir()
    (shared / "held").write_bytes(bytes(100))
    program = (PYTHON, "-c", "held = open('/shared/held', 'r+')\n" + COUNTER, "0.002", "0")
    mounts = ("--mount", f"type=bind,src={shared},dst=/shared,options=rbind:rw")
    engine.run("held", *kept_as("refused"), program=program, more=mounts)
    engine.wait_beyond("held", 50)
    reached = stop(engine, "held")
    engine.remove("held")
    (shared / "held").write_bytes(bytes(99))
    wishes = (*kept_as("refused"), "KEDGE_POLICY=fail")
    done = engine.run("failing", *wishes, program=program, more=mounts, check=False)
    assert done.returncode != 0
    assert "shared/held is not what it was" in done.stderr
    engine.remove("failing")
    assert [one.tags for one in generations(engine, "refused")] == [{}]  # it can be tried again
    (shared / "held").write_bytes(bytes(100))
    engine.run("again", *kept_as("refused"), program=program, more=mounts)
    engine.wait_beyond("again", reached)
    engine.remove("again")
    assert marks(engine) == []
    engine.wait_shimless()


def test_the_shim_is_killed(engine: Containerd) -> None:
    """As with containerd's own shim, its container ends with it. What is kept of the workload goes on elsewhere."""
    engine.run("orphan", *kept_as("orphan"))
    engine.wait_beyond("orphan", 5)
    engine.ctr("task", "checkpoint", "orphan")
    _kill_shim(engine, "orphan")
    engine.run("heir", *kept_as("orphan"))
    assert engine.count("heir") > 5  # as soon as it is there
    _kill_shim(engine, "heir", and_then=[engine.pid("heir")])
    assert [one.tags for one in generations(engine, "orphan")] == [{}]  # what it died of is not known


def _kill_shim(engine: Containerd, name: str, and_then: Sequence[int] = ()) -> None:
    """And these processes too, before containerd can know."""
    pid = engine.pid(name)
    os.kill(engine.daemon_pid, signal.SIGSTOP)
    for process in (*engine.shims(), *and_then):
        os.kill(process, signal.SIGKILL)
    os.kill(engine.daemon_pid, signal.SIGCONT)
    wait_for(lambda: True if not Path(f"/proc/{pid}").exists() else None, "its container is still there")
    wait_for(lambda: True if marks(engine) == [] else None, "containerd did not notice")
    assert engine.status(name) == ""
    engine.ctr("container", "delete", name)
    wait_for(lambda: None if engine.shims() else True, "what removes the dead one does not end")


def test_containerd_is_killed(engine: Containerd) -> None:
    """Containers run on, and a new containerd stops and keeps them as before."""
    engine.run("surviving", *kept_as("surviving"))
    reached = engine.wait_beyond("surviving", 5)
    upper = engine.upper("surviving")
    engine.stop(signal.SIGKILL)
    wait_for(lambda: True if engine.count("surviving", upper) > reached else None, "it stands still")
    engine.start()
    assert engine.status("surviving") == "RUNNING"
    stop(engine, "surviving")
    assert len(generations(engine, "surviving")) == 1
    engine.remove("surviving")


def test_the_machine_must_go(engine: Containerd) -> None:
    """Those that opted in are kept, the small one first, in the store of their engine; nobody else is touched."""
    small = ("small", *kept_as("small"))
    engine.run(*small)
    engine.run("large", *kept_as("large"), program=(PYTHON, "-c", COUNTER, "0.002", str(40 << 20)))
    engine.run("other")
    for name in ("small", "large", "other"):
        engine.wait_beyond(name, 5)
    command = "import json; from kedge.containers import preemption as p; print([o.result for o in p.preempt(0)])"
    mine = {"KEDGE_RUNC_STATE": engine.environment["KEDGE_RUNC_STATE"], "KEDGE_STORE": "/nowhere"}
    late = engine.lab.run(sys.executable, "-c", command, env=engine.lab.environment(**mine))
    assert late.stdout == "['late', 'late']\n"
    assert (engine.status("small"), engine.status("large")) == ("RUNNING", "RUNNING")

    notice = engine.lab.root / "notice"
    command_line = engine.lab.enter([*KEDGE, "preempt", "--on-file", notice, "--every", "0.1", "--json"])
    watching = subprocess.Popen(command_line, env=engine.lab.environment(**mine), stdout=subprocess.PIPE, text=True)
    notice.touch()
    said = json.loads(watching.communicate(timeout=100)[0])
    assert said["notice"] == str(notice)
    assert [(one["id"], one["result"]) for one in said["containers"]] == [
        ("small", "checkpointed"),
        ("large", "checkpointed"),
    ]
    assert watching.returncode == 0
    assert engine.status("other") == "RUNNING"
    for name in ("small", "large"):
        engine.wait_stopped(name)
        assert len(generations(engine, name)) == 1
        engine.remove(name)
    reached = generations(engine, "small")
    engine.run(*small)
    engine.wait_beyond("small", 5)

    [mark] = marks(engine)
    mark.write_text(mark.read_text().replace(str(engine.lab.store), f"{notice}/no-store"))
    failed = engine.lab.kedge("preempt", "--now", "--json", check=False, env=engine.lab.environment(**mine))
    assert failed.returncode == 1
    [told] = json.loads(failed.stdout)["containers"]
    assert told["result"] == "signalled"
    assert "no-store" in told["reason"]
    assert generations(engine, "small") == reached
    for name in ("small", "other"):
        engine.remove(name)


def test_rounds_leave_nothing_behind(engine: Containerd) -> None:
    engine.wait_shimless()  # of those before
    before = left_by(engine)
    reached = 0
    for number in range(ROUNDS):
        name = f"round-{number}"
        engine.run(name, *kept_as("rounds"))
        bundle = engine.home / "state/io.containerd.runtime.v2.task" / engine.namespace / name
        socket = _address(bundle)
        assert socket.is_socket()
        engine.wait_beyond(name, reached)
        reached = stop(engine, name)
        engine.remove(name)
        assert not socket.exists()
        assert not bundle.exists()
    engine.wait_shimless()
    assert left_by(engine) == before
    wait_for(lambda: None if _started_by(engine) else True, "what containerd started does not end")


def _started_by(engine: Containerd) -> list[bytes]:
    """What runs with the environment of this containerd, besides itself."""
    mine = f"\0KEDGE_RUNC_STATE={engine.environment['KEDGE_RUNC_STATE']}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != engine.daemon_pid and mine in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes())
    return found


def _address(bundle: Path) -> Path:
    """Where its shim listens: containerd 1 keeps the plain address, 2 a file of parameters."""
    if (bundle / "bootstrap.json").exists():
        address = str(json.loads((bundle / "bootstrap.json").read_text())["address"])
    else:
        address = (bundle / "address").read_text()
    return Path(address.removeprefix("unix://"))


def left_by(engine: Containerd) -> dict[str, object]:
    """What a container could leave: processes, mounts, bundles, runc's state, marks, images, CRIU's chains."""
    bundles = engine.home / "state/io.containerd.runtime.v2.task" / engine.namespace
    place = Path("/run/containerd/runc") / engine.namespace
    mounts = engine.lab.run("cat", "/proc/self/mounts").stdout
    return {
        "processes": engine.shims(),
        "mounts": [line for line in mounts.splitlines() if str(engine.lab.root) in line],  # others have some too
        "bundles": sorted(os.listdir(bundles)) if bundles.exists() else [],
        "runc": sorted(os.listdir(place)) if place.exists() else [],
        "marks": marks(engine),
        "chains": engine.lab.run("iptables", "-S").stdout + engine.lab.run("ip6tables", "-S").stdout,
        "images": sorted(path for path in engine.lab.state.glob("attempts/*/*") if path.is_dir()),
    }


def test_kedge_is_uninstalled(engine: Containerd) -> None:
    """While a container runs: it is not kept any more, but can be stopped and removed."""
    engine.run("left", *kept_as("left"))
    engine.wait_beyond("left", 5)
    [link] = (engine.lab.root / "links").rglob("runc")
    link.unlink()
    engine.remove("left")
    assert generations(engine, "left") == []
    engine.wait_shimless()


def test_there_is_no_shim_of_runc(tmp_path: Path) -> None:
    """The reason is one line where containerd shows it."""

    def start(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [str(SHIM), "-namespace", "n", "-id", "i", "start"]
        environment["PATH"] = os.environ["PATH"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = start(KEDGE_SHIM="/nowhere", KEDGE_SHIM_LINKS=str(tmp_path))
    assert done.returncode != 0
    assert "/nowhere" in done.stderr
    (tmp_path / "file").write_text("")
    done = start(KEDGE_SHIM_LINKS=str(tmp_path / "file"))
    assert done.returncode == 1
    assert "kedge-runc" in done.stderr
