"""Before a checkpoint: can this container be dumped, and restored there? Looks only, and touches nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import network
from .criu.watches import find_watched
from .engine.runc import Container
from .findings import Finding
from .gpu.cuda import uses_cuda
from .gpu.findings import findings as gpu_findings
from .hosts import version_of
from .pids import hides_limits, list_names, pids_below, read_link, read_text
from .rootfs import find_rootfs
from .runtime.settings import chosen
from .volumes import Volume, problem_of, volumes_of

_KNOWN_DEVICES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"}
_TCP_ESTABLISHED = "01"
# Features without which programs compiled for them crash; others are only nice to have.
_CPU_FEATURES = {"avx", "avx2", "avx512f", "bmi2", "fma", "sse4_2", "xsave", "amx_tile"}


def check_container(container: Container, options: Sequence[str] = ()) -> Iterator[Finding]:
    """What stands in the way of a dump, with the option or change that removes it."""
    if container.status not in ("running", "paused"):
        yield Finding("container", "bad", f"it is {container.status}", "only a running one can be checkpointed")
        return
    pids = pids_below(container.pid)
    yield Finding("container", "ok", f"{container.id} of {container.engine}, {len(pids)} processes")
    yield from _stdio(container.pid, "--shell-job" in options)
    for pid in pids:
        yield from _process(pid, container.pid, options)
    yield from _watches(pids)
    yield from gpu_findings(pids)
    yield from _files(container)
    net = network.network_of(container.spec)
    yield Finding("network", "ok", f"mode {net['mode']}: a restore needs the same")


def _stdio(pid: int, is_shell_job: bool) -> Iterator[Finding]:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        target = read_link(f"/proc/{pid}/fd/{number}")
        if not target or target.startswith("pipe:") or target in _KNOWN_DEVICES:
            continue
        if target.startswith("/dev/pts/") or target == "/dev/console":
            if not is_shell_job:
                yield Finding(name, "warn", f"a terminal ({target})", "give --shell-job, and a terminal to the restore")
        elif target.startswith("/"):
            yield Finding(
                name, "bad", f"a file of the host ({target}): it cannot be dumped",
                "start the container with its output into a pipe (such as `runc run … | cat`) or to /dev/null",
            )  # fmt: skip


def _process(pid: int, root: int, options: Sequence[str]) -> Iterator[Finding]:
    who = f"process {pid}"
    traced = re.search(r"^TracerPid:\s*([1-9]\d*)", read_text(f"/proc/{pid}/status"), re.MULTILINE)
    if traced:
        yield Finding(who, "bad", f"traced by process {traced[1]}", "end the debugger or strace")
    if hides_limits(pid):
        what = "of another user, and root may not read its limits here: CAP_SYS_RESOURCE is missing"
        yield Finding(who, "bad", what, "run Kedge, or the engine that calls it, with all capabilities of root")
    sockets = {}
    for number in list_names(f"/proc/{pid}/fd"):
        target = read_link(f"/proc/{pid}/fd/{number}")
        if target.startswith("socket:["):
            sockets[target[8:-1]] = number
        elif target.startswith("/dev/nvidia") and uses_cuda(pid):
            continue  # the driver closes it before the dump
        elif target.startswith("/dev/") and target not in _KNOWN_DEVICES and not target.startswith("/dev/pts/"):
            yield from _device(who, pid, number, target)
        elif target.startswith(("anon_inode:[io_uring]", "anon_inode:bpf", "anon_inode:[perf_event]", "/dev/nvidia")):
            yield Finding(who, "bad", f"descriptor {number} is {target}", "CRIU cannot dump it: close it before")
    yield from _ties(who, pid, sockets, options)
    for name in ("net", "pid", "mnt"):
        own, first = read_link(f"/proc/{pid}/ns/{name}"), read_link(f"/proc/{root}/ns/{name}")
        if own and first and own != first:
            what = f"in a {name} namespace of its own inside the container"
            yield Finding(who, "warn", what, "nested namespaces are dumped only in part")


def _ties(who: str, pid: int, sockets: Mapping[str, str], options: Sequence[str]) -> Iterator[Finding]:
    """Connections and file locks, which a dump must be told to include."""
    tables = [read_text(f"/proc/{pid}/net/{kind}").splitlines()[1:] for kind in ("tcp", "tcp6")] if sockets else []
    connections = sum(_is_established(line, sockets) for lines in tables for line in lines)
    descriptors = list_names(f"/proc/{pid}/fdinfo")
    locks = sum(read_text(f"/proc/{pid}/fdinfo/{name}").count("\nlock:") for name in descriptors)
    for count, what, option in (
        (connections, "open TCP connection", "--tcp-established"),
        (locks, "file lock", "--file-locks"),
    ):
        if count and option in options:
            yield Finding(who, "ok", f"{count} {what}{'s' if count > 1 else ''}: saved")
        elif count:
            yield Finding(who, "bad", f"{count} {what}{'s' if count > 1 else ''}", f"give {option}, or close them")


def _watches(pids: Sequence[int]) -> Iterator[Finding]:
    paths, missing = find_watched(pids)
    if paths:
        yield Finding("inotify", "ok", f"watches {', '.join(paths[:5])}: saved")
    if missing:
        what = f"watches {missing} file{'s' if missing > 1 else ''} of an overlay without a name"
        yield Finding("inotify", "bad", what, "CRIU cannot dump that: end the watch before")


def _is_established(line: str, sockets: Mapping[str, str]) -> bool:
    """Whether a line of /proc/PID/net/tcp is an established connection of one of these sockets, by inode."""
    _slot, _local, _remote, state, _queues, _timer, _retransmits, _uid, _timeout, inode, *_ = line.split()
    return state == _TCP_ESTABLISHED and inode in sockets


def _device(who: str, pid: int, number: str, target: str) -> Iterator[Finding]:
    try:
        mode = os.stat(f"/proc/{pid}/fd/{number}").st_mode
    except OSError:
        return
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        yield Finding(who, "bad", f"descriptor {number} is the device {target}", "CRIU cannot dump it: close it before")


def _files(container: Container) -> Iterator[Finding]:
    rootfs = find_rootfs(container.bundle, str(container.spec.get("root", {}).get("path", "rootfs")))
    what = {
        "overlay": f"an overlay: what the container changed is saved, from {rootfs.changes}",
        "directory": "a plain directory: all of its files are saved, which takes longer",
        "none": "read-only: nothing of it is saved",
    }[rootfs.kind]
    yield Finding("root", "ok" if rootfs.kind != "directory" else "note", what)
    volumes = {volume.destination: volume for volume in volumes_of(container.spec)}
    for volume in volumes.values():
        yield _volume(volume, list(volumes.values()))
    for mount in container.spec.get("mounts", ()):
        source = str(mount.get("source", ""))
        is_bound = mount.get("type") == "bind" or "bind" in mount.get("options", ())
        if is_bound and mount.get("destination") not in volumes:
            yield Finding(
                "mount", "note", f"{mount.get('destination')} is {source} of the host: not saved",
                "a restore elsewhere needs the same there",
            )  # fmt: skip


def _volume(volume: Volume, volumes: Sequence[Volume]) -> Finding:
    who = f"volume {volume.destination}"
    if not volume.is_saved:
        return Finding(who, "note", f"{volume.kind}: not saved, {volume.reason}", "the next pod needs the same")
    if chosen("", "KEDGE_VOLUMES", ("yes", "no")) == "no":
        return Finding(
            who, "warn", f"{volume.kind}: not saved, as KEDGE_VOLUMES says", "the next pod begins without it"
        )
    if problem := problem_of(volume, [other for other in volumes if other.is_saved]):
        return Finding(who, "bad", problem, "raise KEDGE_VOLUME_BYTES, or save it without volumes: KEDGE_VOLUMES=no")
    return Finding(who, "ok", f"{volume.kind}: saved, {volume.size_bytes():,} bytes")


def check_target(here: Mapping[str, object], there: Mapping[str, object]) -> Iterator[Finding]:
    """Whether a checkpoint of a machine with the facts `here` can be restored on one with the facts `there`."""
    differences = list(_differences(here, there))
    alike = f"{there.get('arch')}, kernel {there.get('kernel')}, CRIU {there.get('criu')}: nothing stands in the way"
    yield from differences or [Finding("target", "ok", alike)]


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[Finding]:
    if here.get("arch") != there.get("arch"):
        yield Finding("target", "bad", f"{there.get('arch')}, not {here.get('arch')}", "use a machine of the same kind")
    missing = (set(here.get("cpu_features", ())) - set(there.get("cpu_features", ()))) & _CPU_FEATURES
    if missing:
        yield Finding(
            "target", "bad", f"its processor lacks {', '.join(sorted(missing))}",
            "programs that found these features use them on: choose a machine that has them",
        )  # fmt: skip
    if here.get("page_bytes") != there.get("page_bytes"):
        yield Finding("target", "bad", f"pages of {there.get('page_bytes')} bytes", "use a kernel with the same pages")
    if here.get("cgroup") != there.get("cgroup"):
        what = f"cgroup {there.get('cgroup')}, here {here.get('cgroup')}"
        yield Finding("target", "warn", what, "limits may not be restored: boot it with the same")
    old, new = version_of(here.get("criu")), version_of(there.get("criu"))
    if not new:
        yield Finding("target", "bad", "it has no CRIU", "kedge container doctor there tells how to get it")
    elif new < old:
        yield Finding("target", "warn", f"CRIU {there.get('criu')}, older than {here.get('criu')}", "install the same")
    if version_of(there.get("kernel")) < version_of(here.get("kernel")):
        what = f"kernel {there.get('kernel')}, older than {here.get('kernel')}"
        yield Finding("target", "warn", what, "what the newer one offered may be missed")
