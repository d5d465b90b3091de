"""`docker compose` and `podman-compose` with `kedge-runc`: up, stop, start, restart, down, up again, recreate."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kedge
from tests.e2e.test_docker import SOCKET, docker, import_image
from tests.lab import lab
from tests.runtime_engine import COUNT, KEPT, RUNTIME, Engine
from tests.waiting import removed, wait_for

pytestmark = [pytest.mark.requires("compose"), pytest.mark.xdist_group("containers")]
COMPOSE = Path(__file__).parents[2] / ".dev/lab/compose/usr"
SERVICE = {
    "image": "counter:1", "container_name": "counter", "network_mode": "none", "volumes": ["/usr:/usr:ro"],
    "command": [*COUNT], "environment": [*KEPT, "KEDGE_POLICY=fail"], "stop_grace_period": "100s",
}  # fmt: skip
Call = Callable[..., str]


@pytest.mark.requires("docker")
def test_docker_compose(tmp_path: Path) -> None:
    with lab(tmp_path) as made:
        engine = Engine(made)
        with docker(engine, "--iptables=false", "--ip6tables=false", "--bridge=none") as call:
            import_image(engine, call)
            file = made.root / "compose.yaml"
            file.write_text(json.dumps({"services": {"train": {**SERVICE, "runtime": "kedge"}}}))
            program = COMPOSE / "libexec/docker/cli-plugins/docker-compose"
            environment = made.environment(DOCKER_HOST=SOCKET)

            def compose(*words: str) -> str:
                return made.run(program, "--file", file, *words, env=environment).stdout

            _lived(engine, call, compose)


@pytest.mark.requires("podman")
def test_podman_compose(tmp_path: Path) -> None:
    with lab(tmp_path) as made:
        engine = Engine(made)
        with _podman(engine) as front:

            def call(*words: str | Path) -> str:
                return made.run(front, *words).stdout

            import_image(engine, call)
            file = made.root / "compose.yaml"
            limits = {name: {"soft": number, "hard": number} for name, number in (("nofile", 1024), ("nproc", 4096))}
            service = {**SERVICE, "image": "localhost/counter:1", "ulimits": limits}
            file.write_text(json.dumps({"services": {"train": service}}))
            program = (sys.executable, COMPOSE / "lib/python3/dist-packages/podman_compose.py")
            options = ("--in-pod", "0", "--podman-path", front, "--file", file)

            def compose(*words: str) -> str:
                return made.run(*program, *options, *words).stdout

            _lived(engine, call, compose)


@contextmanager
def _podman(engine: Engine) -> Iterator[Path]:
    """A podman of its own, as one command; it gives its runtimes no environment."""
    home = engine.lab.root / "podman"
    home.mkdir()
    names = ("KEDGE_STATE_DIR", "KEDGE_STORE", "KEDGE_RUNC_STATE", "KEDGE_PYTHON", "KEDGE_DEADLINE_S", "PATH")
    values = "\n".join(f"export {name}={shlex.quote(engine.environment[name])}" for name in names)
    run_root = Path(tempfile.mkdtemp(prefix="kd-"))  # podman takes no long names here
    places = f"--root {home}/root --runroot {run_root} --runtime {home}/runtime"
    fronts = {
        "runtime": f"{values}\nexec {shlex.quote(str(RUNTIME))}",
        "podman": f"exec podman {places} --cgroup-manager cgroupfs --events-backend none",
    }
    for name, text in fronts.items():
        (home / name).write_text(f'#!/bin/sh\n{text} "$@"\n')
        (home / name).chmod(0o755)
    try:
        yield home / "podman"
    finally:
        engine.lab.run(home / "podman", "rm", "--force", "--all", check=False)
        wait_for(lambda: removed(run_root), "podman still writes below its run root")


def _lived(engine: Engine, call: Call, compose: Call) -> None:
    upper = Path()

    def count() -> int:
        work = upper / "work"
        assert not (work / "broken").exists(), (work / "broken").read_text()
        text = (work / "log").read_text() if (work / "log").exists() else ""
        lines = text[: text.rfind("\n") + 1].split()
        assert lines == [str(number) for number in range(1, len(lines) + 1)], lines[-5:]
        return len(lines)

    def goes_on(reached: int) -> int:
        nonlocal upper
        upper = Path(call("inspect", "--format={{.GraphDriver.Data.UpperDir}}", "counter").strip())
        return wait_for(lambda: at if (at := count()) > reached + 5 else None, f"it does not go on from {reached}")

    compose("up", "--detach")
    reached = goes_on(0)
    compose("stop")
    reached = max(reached, count())
    compose("start")
    reached = goes_on(reached)
    compose("restart")
    reached = goes_on(reached)
    compose("down")
    compose("up", "--detach")
    reached = goes_on(reached)
    compose("up", "--detach", "--force-recreate")
    goes_on(reached)
    with kedge.open(engine.lab.store, namespace="containers") as store:
        assert len(store.list("container:counter")) == 4
    compose("down")
