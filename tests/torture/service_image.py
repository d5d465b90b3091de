"""The image of the service: built, started as its user, asked, stopped, and started again on the same data."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.waiting import wait_for

from .images import ROOT, Images

IMAGE = "kedge"
DATA = ("--volume", "kedge-data:/var/lib/kedge")
ASK = """
import json, sys, urllib.request
body = json.dumps(json.loads(sys.argv[3])).encode() if len(sys.argv) > 3 else None
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
asked = urllib.request.Request("http://127.0.0.1:7420" + sys.argv[2], body, headers)
print(urllib.request.urlopen(asked, timeout=60).read().decode())
"""


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """`minutes` is not used: it takes as long as it takes."""
    images = Images(folder)
    base = "docker.io/library/python:3.13-slim"
    images.start_from(base, "trixie", "python3-venv", links=[("usr/bin/python", "python3")])
    images.build(ROOT / "deploy" / "service" / "Containerfile", IMAGE, "--format=docker", "--build-arg", f"BASE={base}")
    images.podman("volume", "create", "kedge-data")
    token = images.run(IMAGE, "kedge", "token", "create", "admin", "--scope=admin", options=["--rm", *DATA]).split()[0]
    saved = json.dumps({"step": "first", "state": {"n": 1}})
    checkpoint = json.loads(_visit(images, token, "/api/v1/jobs/one/checkpoints", saved))
    job = json.loads(_visit(images, token, "/api/v1/jobs/one"))
    assert (checkpoint["seq"], job["last_seq"]) == (1, 1), f"saved {checkpoint}, found {job}"
    return {"images": 1, "starts": 2}


def _visit(images: Images, token: str, *words: str) -> str:
    """One request to a service that is started for it and stopped after it."""
    images.run(IMAGE, options=["--detach", "--name=service", *DATA])
    try:
        wait_for(lambda: _is_ready(images), "the service does not come up", 100)
        assert images.answer("exec", "service", "id", "-u").strip() == "7420"
        return images.answer("exec", "service", "python", "-c", ASK, token, *words)
    finally:
        images.podman("stop", "--time=30", "service")
        code = images.answer("inspect", "service", "--format={{.State.ExitCode}}").strip()
        images.podman("rm", "service")
        assert code == "0", f"the service ended with {code}"


def _is_ready(images: Images) -> bool:
    program = "import urllib.request as u; u.urlopen('http://127.0.0.1:7420/readyz', timeout=60)"
    try:
        images.answer("exec", "service", "python", "-c", program)
    except subprocess.CalledProcessError:
        return False
    return True
