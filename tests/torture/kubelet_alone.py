"""Static pods of a kubelet that has no API server: a pod whose manifest is taken away and put back goes on.

Such a kubelet knows no RuntimeClass, so Kedge is the default runtime of its containerd.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.node import Node, node
from tests.waiting import wait_for

from .cluster import KUBELET, Cluster
from .cluster_kills import lines_of

_MANIFESTS = "/etc/kubernetes/manifests"
_DEFAULT = """
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "kedge"
"""


def go_on(
    folder: Path,
    shared: tuple[Path, ...],
    binaries: Path,
    payload: Path,
    pod: Mapping[str, Any],
    settings: dict[str, str],
) -> None:
    folder.mkdir()
    with node(folder, *shared) as made:
        cluster = Cluster([made], binaries)
        cluster.prepare("node1")
        cluster.install_on("node1", payload, settings)
        made.configure(_DEFAULT)
        made.below(_MANIFESTS).mkdir(parents=True)
        made.below("/etc/kubernetes/kubelet.yaml").write_text(json.dumps({**KUBELET, "staticPodPath": _MANIFESTS}))
        cluster.run("kubelet", "--config=/etc/kubernetes/kubelet.yaml", "--hostname-override=node1")
        manifest = made.below(f"{_MANIFESTS}/alone.json")
        manifest.write_text(json.dumps(pod))
        lines, began = wait_for(lambda: _counting(made, 20), "a static pod does not start", 300)
        manifest.unlink()
        wait_for(lambda: not _counting(made, 0), "a static pod does not end", 300)
        manifest.write_text(json.dumps(pod))
        after, again = wait_for(lambda: _counting(made, lines), "a static pod does not return", 300)
        assert again == began, f"it began anew: {after} after {lines}"
    print("  static pod: goes on", flush=True)


def _counting(made: Node, number: int) -> tuple[int, str] | None:
    """How far its counter is, if that is beyond a number, and which start of the program it is."""
    for state in made.below("/run/containerd/runc/k8s.io").glob("*/state.json"):
        with suppress(OSError, ValueError):  # it just ended, or is being created
            work = made.below(f"/proc/{json.loads(state.read_text())['init_process_pid']}/root/work")
            if (work / "began").exists() and (lines := lines_of(work)) > number:
                return lines, (work / "began").read_text()
    return None
