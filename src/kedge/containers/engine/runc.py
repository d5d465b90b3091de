"""Containers of runc and of what runs on top of it: finding them, and asking the runtime."""

from __future__ import annotations

import glob
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kedge.containers import programs
from kedge.containers.programs import find_program
from kedge.errors import Conflict, NotFound, Validation

# Where each engine's runtime keeps its containers. "*": containerd's namespaces.
ROOTS = {
    "runc": ("/run/runc",),
    "crun": ("/run/crun",),
    "podman": ("/run/runc", "/run/crun"),
    "containerd": ("/run/containerd/runc/*",),
    "docker": ("/run/docker/runtime-runc/*",),
}
_HINT = "runc list, ctr task list or podman ps show IDs"


@dataclass(frozen=True, slots=True)
class Container:
    """A container as its runtime knows it."""

    id: str
    engine: str  # runc, crun, podman, containerd, docker
    program: str  # the runtime that is asked, absolute
    root: str  # its --root
    bundle: Path
    pid: int
    status: str
    spec: dict[str, Any]

    def command(self, name: str, *arguments: str) -> list[str]:
        return [self.program, "--root", self.root, name, *arguments]


def find_container(name: str, engine: str | None = None, root: str | None = None) -> Container:
    """A container by its ID, or by the beginning of one that is unique, as the engines show it."""
    if "/" in name or name in ("", ".", ".."):
        raise Validation(f"{name!r} is not the ID of a container", hint=_HINT)
    matches = [
        (found_engine, folder, identity)
        for found_engine, folder in _roots(engine, root)
        for identity in _identities(folder, name)
    ]
    exact = [match for match in matches if match[2] == name] or matches
    if not exact:
        where = f" of {engine}" if engine else ""
        raise NotFound(f"there is no container {name}{where}", hint=_HINT)
    if len({(folder, identity) for _, folder, identity in exact}) > 1:
        shown = ", ".join(f"{identity} in {folder}" for _, folder, identity in exact[:5])
        raise Conflict(f"{name} matches several containers: {shown}", hint="give the whole ID, and --root")
    found_engine, folder, identity = exact[0]
    return look_up(identity, found_engine, folder)


def look_up(identity: str, engine: str, root: str, program: str | None = None) -> Container:
    """Ask the runtime about a container it has."""
    if program is None:
        program = find_program("crun" if os.path.basename(root) == "crun" else "runc")
    state = ask(program, root, "state", identity)
    bundle = Path(state["bundle"])
    return Container(
        id=identity,
        engine=engine,
        program=program,
        root=root,
        bundle=bundle,
        pid=int(state.get("pid") or 0),
        status=str(state.get("status")),
        spec=read_spec(bundle),
    )


def ask(program: str, root: str, *arguments: str) -> dict[str, Any]:
    """What a command of the runtime answers in JSON; NotFound when it does not know the container."""
    done = run(program, root, *arguments)
    if done.returncode:
        raise NotFound(
            f"{os.path.basename(program)} {' '.join(arguments)}: {done.stderr.strip()[-300:]}",
            hint="runc list, ctr task list or podman ps show what runs",
        )
    answer = json.loads(done.stdout)
    if not isinstance(answer, dict):
        raise NotFound(f"{program} answered nothing about {arguments[-1]}", hint="is it another program?")
    return answer


def run(program: str, root: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run([program, "--root", root, *arguments])


def read_spec(bundle: Path) -> dict[str, Any]:
    try:
        spec = json.loads((bundle / "config.json").read_text())
    except FileNotFoundError:
        raise NotFound(f"{bundle} has no config.json", hint="give the directory of a bundle") from None
    except ValueError as error:
        raise Validation(f"{bundle}/config.json is not JSON: {error}", hint="repair it") from error
    if not isinstance(spec, dict):
        raise Validation(f"{bundle}/config.json is not a JSON object", hint="repair it")
    return spec


@cache
def runtime_version(program: str) -> str:
    lines = programs.run([program, "--version"]).stdout.splitlines()
    return lines[0].strip() if lines else ""


def _roots(engine: str | None, root: str | None) -> list[tuple[str, str]]:
    if root is not None:
        return [(engine or ("crun" if os.path.basename(root) == "crun" else "runc"), root)]
    wanted: Sequence[str] = (engine,) if engine else ("runc", "containerd", "docker", "crun")
    if engine is not None and engine not in ROOTS:
        raise Validation(f"unknown runtime: {engine!r}", hint=f"use one of {', '.join(ROOTS)}")
    return [(name, folder) for name in wanted for pattern in ROOTS[name] for folder in sorted(glob.glob(pattern))]


def _identities(folder: str, name: str) -> list[str]:
    try:
        known = os.listdir(folder)
    except FileNotFoundError:
        return []
    if name in known:
        return [name]
    return [identity for identity in known if len(name) >= 6 and identity.startswith(name)]
