"""The installer's image built for real, and the DaemonSets of `deploy/kubernetes` run from it on a node of its own.

Nothing is pulled: the Debian that the Containerfile begins with is made here, by debootstrap. Takes a few minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.e2e.test_deploy import DEPLOY, lived
from tests.node import node
from tests.parts import missing

IMAGE = "registry.example/kedge-node:0.1.0"
_SUITES = {"13-slim": "trixie", "sid-slim": "sid"}
_MIRROR = os.environ.get("KEDGE_LAB_MIRROR", "http://deb.debian.org/debian")


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Build, then `lived`; takes as long as it takes."""
    if reason := missing("criu") or missing("containerd") or missing("cc"):
        raise RuntimeError(reason)
    for program in ("podman", "debootstrap"):
        if shutil.which(program) is None:
            raise RuntimeError(f"no {program} on this machine (apt-get install podman debootstrap)")
    home = folder / "node"  # which the node sees
    home.mkdir()
    archive = home / "image.tar"
    build(folder, archive)
    with node(home) as made:
        made.ctr("image", "import", archive, timeout_s=600)
        lived(made, image=IMAGE)
    return {"images": 1, "mebibytes": archive.stat().st_size >> 20, "nodes": 1}


def build(folder: Path, archive: Path, debian: str = "13-slim") -> None:
    """Make the image in that folder, and pack it."""
    base = folder / "base"
    subprocess.run(["debootstrap", "--variant=minbase", _SUITES[debian], base, _MIRROR], check=True, stdout=2)
    podman = ["podman", "--root", folder / "images", "--runroot", folder / "run", "--cgroup-manager=cgroupfs"]
    name = f"docker.io/library/debian:{debian}"
    with subprocess.Popen(["tar", "-C", base, "-c", "."], stdout=subprocess.PIPE) as packed:
        subprocess.run([*podman, "import", "-", name], stdin=packed.stdout, check=True, stdout=2)
    authorities = os.environ.get("SSL_CERT_FILE")  # of a network with a certificate of its own
    trust = ["--volume", f"{authorities}:/trust.pem:ro", "--env=SSL_CERT_FILE=/trust.pem", "--env=PIP_CERT=/trust.pem"]
    command = [*podman, "build", "--pull=never", "--network=host", *(trust if authorities else ())]
    command += ["--build-arg", f"DEBIAN={debian}", "--file", DEPLOY / "Containerfile", "--tag", IMAGE, "."]
    subprocess.run(command, cwd=DEPLOY.parents[1], check=True, stdout=2)
    subprocess.run([*podman, "save", "--output", archive, IMAGE], check=True, stdout=2)
