"""A container's network: which kind it has, and taking CRIU's lock back.

While it dumps or restores, CRIU drops all packets in the network namespace by a chain `CRIU` of iptables. It takes the
chain away when it is done, but not after a dump that ends the processes, nor after a restore that failed. In a
namespace that outlives the container that would cut off whoever comes next: in the worst case the whole machine.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

from kedge.errors import Conflict, CriuFailed

from .programs import USUAL_PATH, find_program, run, which

_TOOLS = ("iptables", "ip6tables")
_TIMEOUT_S = 30


class Network(TypedDict):
    """own: made with the container and gone with it; external: a namespace by path; host: none of its own; none: not
    known. `path` is that of an external one."""

    mode: str
    path: str


def network_of(spec: Mapping[str, Any]) -> Network:
    """The network that an OCI configuration asks for."""
    for namespace in spec.get("linux", {}).get("namespaces", ()):
        if namespace.get("type") == "network":
            path = str(namespace.get("path") or "")
            return Network(mode="external" if path else "own", path=path)
    return Network(mode="host", path="")


def refuse_mismatch(saved: Network, now: Network) -> None:
    """Images of one kind of network, restored into another, would lock the wrong namespace."""
    if saved["mode"] != now["mode"]:
        raise Conflict(
            f"the checkpoint was made with network mode {saved['mode']}, the bundle has {now['mode']}",
            hint="give the bundle's config.json the same kind of network namespace",
        )


def loopback_hook() -> dict[str, object]:
    """A hook of an OCI configuration that brings up `lo` in the container's network."""
    up = f"exec {find_program('nsenter')} --net=/proc/$pid/ns/net {find_program('ip')} link set lo up"
    script = f"""pid=$(sed -n 's/.*"pid": *\\([0-9]*\\).*/\\1/p') && {up}"""
    path = os.environ.get("PATH", "")
    return {"path": "/bin/sh", "args": ["sh", "-c", script], "env": [f"PATH={path}:{USUAL_PATH}"]}


@contextmanager
def namespace_of(pid: int | None, network: Network | None) -> Iterator[int | None]:
    """A descriptor of the namespace that outlives the container, held open; None when it has its own, or none."""
    mode = None if network is None else network["mode"]
    path = network["path"] if network is not None and mode == "external" else ""
    if mode == "host":
        path = "/proc/self/ns/net" if pid is None else f"/proc/{pid}/ns/net"
    if not path:
        yield None
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_lock(namespace: int | None) -> None:
    """Take CRIU's chain away in that namespace, if it is there. None: there is nothing to look at."""
    if namespace is None:
        return
    for tool in _TOOLS:
        if which(tool) is None:
            continue
        rules = _run(namespace, tool, "-S").stdout.splitlines()
        if "-N CRIU" not in rules:
            continue
        for chain in ("INPUT", "OUTPUT"):
            for _ in range(rules.count(f"-A {chain} -j CRIU")):
                _run(namespace, tool, "-D", chain, "-j", "CRIU")
        _run(namespace, tool, "-F", "CRIU")
        _run(namespace, tool, "-X", "CRIU")
        if "-N CRIU" in _run(namespace, tool, "-S").stdout.splitlines():
            raise CriuFailed(
                f"CRIU's lock of the network could not be taken back with {tool}",
                hint=f"remove it by hand: {tool} -D INPUT -j CRIU; {tool} -D OUTPUT -j CRIU; {tool} -F CRIU; "
                f"{tool} -X CRIU",
            )


def _run(namespace: int, tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    enter = [find_program("nsenter"), f"--net=/proc/self/fd/{namespace}"]
    return run([*enter, find_program(tool), "-w", *arguments], pass_fds=(namespace,), timeout_s=_TIMEOUT_S)
