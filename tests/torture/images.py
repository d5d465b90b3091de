"""Images of `deploy/`, built for real. Nothing is pulled: what they begin with is made here, by debootstrap."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Images:
    """podman with images and containers of its own, below one directory."""

    def __init__(self, folder: Path) -> None:
        for program in ("podman", "debootstrap"):
            if shutil.which(program) is None:
                raise RuntimeError(f"no {program} on this machine (apt-get install podman debootstrap)")
        self.folder = folder
        self._podman = ["podman", "--root", folder / "images", "--runroot", folder / "run", "--cgroup-manager=cgroupfs"]

    def podman(self, *words: str | Path) -> None:
        subprocess.run([*self._podman, *words], cwd=ROOT, check=True, stdout=2)

    def answer(self, *words: str | Path) -> str:
        return subprocess.run([*self._podman, *words], check=True, capture_output=True, text=True, timeout=200).stdout

    def start_from(self, name: str, suite: str, *packages: str, links: Sequence[tuple[str, str]] = ()) -> None:
        """A Debian under the name of the image that a Containerfile begins with."""
        base = self.folder / "base"
        added = [f"--include={','.join(packages)}"] if packages else []
        subprocess.run(["debootstrap", "--variant=minbase", *added, suite, base, mirror()], check=True, stdout=2)
        for link, target in links:
            (base / link).symlink_to(target)
        with subprocess.Popen(["tar", "-C", base, "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run([*self._podman, "import", "-", name], stdin=packed.stdout, check=True, stdout=2)
        shutil.rmtree(base)

    def build(self, file: Path, tag: str, *words: str) -> None:
        trusted = os.environ.get("SSL_CERT_FILE")  # of a network with a certificate of its own
        trust = ["--volume", f"{trusted}:/trust.pem:ro", "--env=SSL_CERT_FILE=/trust.pem", "--env=PIP_CERT=/trust.pem"]
        settings = ["--pull=never", "--network=host", *(trust if trusted else ()), *words]
        self.podman("build", *settings, "--file", file, "--tag", tag, ".")

    def run(self, image: str, *words: str, options: Sequence[str] = ()) -> str:
        """A container without a network; limits as they are here, because not everybody may raise them."""
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = [f"--ulimit=nofile={min(1024, files)}:{files}", "--ulimit=nproc=1024:1024"]
        return self.answer("run", *limits, "--network=none", *options, image, *words)


def mirror() -> str:
    """Where this machine's apt gets Debian from; KEDGE_LAB_MIRROR names another place."""
    if chosen := os.environ.get("KEDGE_LAB_MIRROR"):
        return chosen
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    places = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return next(place for place in sorted(set(places)) if "-security" not in place)
