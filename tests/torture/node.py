"""The installer's image built for real, and the DaemonSets of `deploy/kubernetes` run from it on a node of its own.

Nothing is pulled: the Debian that the Containerfile begins with is made here, by debootstrap. Takes a few minutes.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.test_deploy import DEPLOY, lived
from tests.node import node
from tests.parts import missing

from .images import Images

IMAGE = "registry.example/kedge-node:0.1.0"
_SUITES = {"13-slim": "trixie", "sid-slim": "sid"}


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Build, then `lived`; takes as long as it takes."""
    if reason := missing("criu") or missing("containerd") or missing("cc"):
        raise RuntimeError(reason)
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
    images = Images(folder)
    base = f"docker.io/library/debian:{debian}"
    images.start_from(base, _SUITES[debian])
    images.build(DEPLOY / "Containerfile", IMAGE, "--build-arg", f"BASE={base}")
    images.podman("save", "--output", archive, IMAGE)
