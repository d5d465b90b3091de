"""What this machine can do with containers, and the exact command for what is missing."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from . import hosts
from .attempts import state_directory
from .criu.command import criu_version
from .criu.log import explain
from .findings import Finding
from .gpu.findings import findings as gpu_findings
from .programs import USUAL_PATH, run, which

_CAPABILITIES = {  # number → what goes wrong without it
    21: ("CAP_SYS_ADMIN", "nothing can be dumped", "bad"),
    19: ("CAP_SYS_PTRACE", "nothing can be dumped", "bad"),
    12: ("CAP_NET_ADMIN", "containers with a network of their own cannot be dumped", "bad"),
    24: ("CAP_SYS_RESOURCE", "processes whose limits are above the usual ones cannot be restored", "note"),
    40: ("CAP_CHECKPOINT_RESTORE", "CRIU falls back to CAP_SYS_ADMIN", "note"),
}


def findings() -> Iterator[Finding]:
    yield _root()
    yield from _criu()
    yield from _criu_of_engines()
    yield from _programs()
    yield from _kernel()
    yield from _capabilities()
    yield _state()
    yield from gpu_findings()


def _root() -> Finding:
    if os.geteuid() == 0:
        return Finding("user", "ok", "root")
    return Finding("user", "bad", "not root: CRIU can neither dump nor restore", "run it as root, or with sudo")


def _criu() -> Iterator[Finding]:
    path = which("criu")
    how = "Debian 13: apt-get install criu. Debian 12: ./dev lab in a clone of Kedge unpacks one"
    if path is None:
        yield Finding("criu", "bad", "not on this machine", how)
        return
    version = criu_version(path)
    numbers = hosts.version_of(version)
    blind = numbers < [4, 2] and hosts.version_of(os.uname().release) >= [6, 16]
    if numbers < [4, 1]:
        status, fix = "bad", f"4.1 or newer is needed: older ones fail on recent kernels. {how}"
    elif blind:
        status, fix = "warn", f"on this kernel it cannot dump TCP and UDP sockets: 4.2 or newer can. {how}"
    else:
        status, fix = "ok", ""
    yield Finding("criu", status, f"{version or 'of unknown version'} at {path}", fix)
    if os.geteuid() != 0:
        return
    checked = run([path, "check"])
    said = (checked.stderr or checked.stdout).strip().splitlines()
    if checked.returncode == 0:
        yield Finding("criu check", "ok", said[-1] if said else "good")
        return
    cause = explain("\n".join(said))
    if cause is not None and cause.code != "unknown":
        yield Finding("criu check", "bad", cause.cause, cause.fix)
    else:
        what = "the kernel lacks what CRIU needs, or a sandbox forbids it: see kedge container logs for a failed dump"
        yield Finding("criu check", "bad", "; ".join(said[-3:]), what)


def _criu_of_engines() -> Iterator[Finding]:
    """Whether engines that run here find it: a kubelet's checkpoint of a pod that did not opt in is all their own."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            name = (process / "comm").read_text().strip()
            if name not in ("containerd", "crio"):
                continue
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        path = next((os.fsdecode(entry[5:]) for entry in environment if entry.startswith(b"PATH=")), USUAL_PATH)
        criu = shutil.which("criu", path=path)
        if criu is None:
            what = f"{name} (process {process.name}) finds none: a kubelet's own /checkpoint fails"
            yield Finding("criu", "note", what, "link it to a directory of its PATH, such as /usr/local/sbin")
        else:
            yield Finding("criu", "ok", f"{name} (process {process.name}) finds {criu}")


def _programs() -> Iterator[Finding]:
    for name, package, without, status in (
        ("runc", "runc", "no container can be checkpointed", "bad"),
        ("iptables", "iptables", "containers with a network of their own cannot be checkpointed", "bad"),
        ("nsenter", "util-linux", "the network lock cannot be taken back", "bad"),
        ("containerd", "containerd", "needed only for its containers", "note"),
        ("podman", "podman", "needed only for its containers", "note"),
        ("crun", "crun", "needed only for its containers; Debian 12's cannot dump", "note"),
    ):
        path = which(name)
        if path is None:
            yield Finding(name, status, f"not on this machine: {without}", f"apt-get install {package}")
            continue
        done = run([path, "--version"])
        first = (done.stdout or done.stderr).strip().splitlines()
        what = f"{first[0] if first else 'there'} at {path}"
        if name == "crun" and "+CRIU" not in done.stdout:
            yield Finding(name, "note", f"{what}, built without CRIU", "use runc for what is to be checkpointed")
        else:
            yield Finding(name, "ok", what)


def _kernel() -> Iterator[Finding]:
    facts = hosts.facts()
    yield Finding("kernel", "ok", f"{facts['kernel']} on {facts['arch']}, cgroup {facts['cgroup']}")
    overlay = "overlay" in Path("/proc/filesystems").read_text()
    root = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if line.split(" ")[4] == "/")
    if " shared:" not in root:
        what = "/ is private: a mount namespace that is made now keeps what is unmounted here later"
        yield Finding("mounts", "note", what, "if restores fail with umount or mount: mount --make-rshared /")
    yield Finding(
        "overlay", "ok" if overlay else "note", "known" if overlay else "not loaded: all files of a root are saved",
        "" if overlay else "modprobe overlay",
    )  # fmt: skip
    if os.geteuid() == 0 and (criu := which("criu")):
        features = ("mem_dirty_track", "uffd-noncoop")
        has = {name: run([criu, "check", "--feature", name]).returncode == 0 for name in features}
        yield Finding(
            "memory", "ok" if all(has.values()) else "note",
            ", ".join(f"{name} {'works' if works else 'is missing'}" for name, works in has.items()),
            "" if all(has.values()) else "not needed: unchanged memory is found by its content when it is stored",
        )  # fmt: skip


def _capabilities() -> Iterator[Finding]:
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    mask = int(effective[1], 16) if effective else 0
    missing = [entry for number, entry in _CAPABILITIES.items() if not mask >> number & 1]
    for name, without, status in missing:
        yield Finding("capabilities", status, f"{name} is missing: {without}", "start it outside of a container")
    if not missing:
        yield Finding("capabilities", "ok", "all that CRIU uses")


def _state() -> Finding:
    place = state_directory()
    above = place
    while not above.exists():
        above = above.parent
    free = os.statvfs(above)
    room = free.f_bavail * free.f_frsize
    what = f"{place}, {room / (1 << 30):.1f} GiB free: images are written here before they go into the store"
    if not os.access(above, os.W_OK):
        return Finding("images", "bad", f"{place} is not writable", "set KEDGE_STATE_DIR to a writable directory")
    is_short = room < 2 << 30
    return Finding("images", "warn" if is_short else "ok", what, "set KEDGE_STATE_DIR" if is_short else "")
