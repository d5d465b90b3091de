"""Docker with `kedge-runc` as a runtime, as docs/containers.md says: run, stop, start, restart, rm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kedge
from tests.lab import COUNTER, PYTHON, lab
from tests.runtime_engine import KEPT, RUNTIME, Engine
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("docker"), pytest.mark.xdist_group("containers")]
Docker = Callable[..., str]
SOCKET = "unix:///run/docker.sock"  # of the lab: nobody else sees its /run
_CONFIG = """
version = 2
root = "{home}/root"
state = "{home}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{home}/socket"
"""


# Says how often it was asked, to whoever connects to it.
SERVER = """
import socket
asked = 0
with socket.create_server(("", 8080)) as server:
    while True:
        with server.accept()[0] as connection:
            asked += 1
            connection.sendall(b"%d" % asked)
"""


@contextmanager
def docker(engine: Engine, *network: str) -> Iterator[Docker]:
    """A Docker of its own: its files, its containerd, no network but that of the lab."""
    home = engine.lab.root / "docker"
    home.mkdir()
    (home / "containerd.toml").write_text(_CONFIG.format(home=home))
    (home / "daemon.json").write_text(json.dumps({"runtimes": {"kedge": {"path": str(RUNTIME)}}}))
    places = [f"--data-root={home}/data", "--exec-root=/run/docker", f"--pidfile={home}/pid"]  # sockets: short names
    group = f"kedge-docker-{os.urandom(4).hex()}"
    places.append(f"--cgroup-parent=/{group}")

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (home / f"{name}.log").open("wb") as log:
            command = engine.lab.enter([name, *words])
            return subprocess.Popen(
                command, env=engine.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )  # what it starts has its environment

    def call(*words: str | Path, check: bool = True) -> str:
        return engine.lab.run("docker", "--host", SOCKET, "--config", home, *words, check=check).stdout

    engine.lab.run("mount", "-t", "tmpfs", "run", "/run")
    daemons = [start("containerd", f"--config={home}/containerd.toml")]
    try:
        wait_for((home / "socket").exists, "containerd does not start")
        config = ["--config-file", f"{home}/daemon.json", "--containerd", f"{home}/socket", "--host", SOCKET]
        daemons.append(start("dockerd", *config, *places, *network))
        wait_for(lambda: call("version", check=False).count("Version:") > 1, "dockerd does not start", 60)
        yield call
        for container in call("ps", "--all", "--quiet").split():
            call("rm", "--force", container)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=60)
        for made in (*Path("/sys/fs/cgroup").glob(f"*/{group}"), *Path("/sys/fs/cgroup").glob(group)):
            made.rmdir()


@pytest.mark.parametrize("propagation", ["private", "shared"])
def test_stopped_started_restarted_and_run_again(tmp_path: Path, propagation: str) -> None:
    with lab(tmp_path) as made:
        engine = Engine(made)
        made.run("mount", f"--make-r{propagation}", "/")
        with docker(engine, "--iptables=false", "--ip6tables=false", "--bridge=none") as call:
            import_image(engine, call)
            _lived(engine, call)


def test_on_the_bridge(tmp_path: Path) -> None:
    """Docker's own network, with a port of the machine: it is there again after a restore, in a new container too."""
    with lab(tmp_path) as made:
        engine = Engine(made)
        with docker(engine) as call:
            import_image(engine, call)
            wishes = [word for wish in (*KEPT, "KEDGE_POLICY=fail") for word in ("--env", wish)]
            place = ("--publish=127.0.0.1:18080:8080", "--runtime=kedge", "--volume=/usr:/usr:ro")

            def run(name: str) -> None:
                call("run", "--detach", "--name", name, *place, *wishes, "counter:1", PYTHON, "-c", SERVER)

            def ask(name: str, *, by_port: bool = False) -> int:
                form = "--format={{.NetworkSettings.IPAddress}}"
                address = ("127.0.0.1", "18080") if by_port else (call("inspect", form, name).strip(), "8080")
                code = "import socket, sys; print(socket.create_connection(sys.argv[1:], 20).recv(20).decode())"
                told = wait_for(lambda: made.run(PYTHON, "-c", code, *address, check=False).stdout, "no answer", 60)
                return int(told)

            run("first")
            assert [ask("first"), ask("first", by_port=True)] == [1, 2]
            call("stop", "-t", "100", "first")
            call("start", "first")
            assert [ask("first"), ask("first", by_port=True)] == [3, 4]
            call("restart", "-t", "100", "first")
            call("stop", "-t", "100", "first")
            call("rm", "first")
            run("second")
            assert [ask("second"), ask("second", by_port=True)] == [5, 6]


def import_image(engine: Engine, call: Docker) -> None:
    lower, archive = engine.bundle("image") / "lower", engine.lab.root / "image.tar"
    engine.lab.run("tar", "--directory", lower, "--create", "--file", archive, ".")
    call("import", archive, "counter:1")


def _lived(engine: Engine, call: Docker) -> None:
    upper = Path()

    def run(name: str) -> None:
        nonlocal upper
        wishes = [word for wish in (*KEPT, "KEDGE_POLICY=fail") for word in ("--env", wish)]
        place = ("--network=none", "--runtime=kedge", "--volume=/usr:/usr:ro")
        call("run", "--detach", "--name", name, *place, *wishes, "counter:1", PYTHON, "-c", COUNTER, "0.002", "0")
        upper = Path(call("inspect", "--format={{.GraphDriver.Data.UpperDir}}", name).strip())

    def count() -> int:
        work = upper / "work"
        assert not (work / "broken").exists(), (work / "broken").read_text()
        text = (work / "log").read_text() if (work / "log").exists() else ""
        lines = text[: text.rfind("\n") + 1].split()
        assert lines == [str(number) for number in range(1, len(lines) + 1)], lines[-5:]
        return len(lines)

    def goes_on(reached: int) -> int:
        return wait_for(lambda: at if (at := count()) > reached + 5 else None, f"it does not go on from {reached}")

    run("first")
    reached = goes_on(0)
    call("stop", "-t", "100", "first")
    reached = max(reached, count())
    call("start", "first")
    reached = goes_on(reached)
    call("restart", "-t", "100", "first")
    reached = goes_on(reached)
    assert call("exec", "first", "/usr/bin/tail", "-n", "1", "/work/log").strip().isdigit()
    call("stop", "-t", "100", "first")
    reached = count()
    call("rm", "first")
    run("second")
    goes_on(reached)
    call("kill", "second")  # it goes back to its last checkpoint
    call("start", "second")
    goes_on(reached)
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert len(store.list("container:counter")) == 3
