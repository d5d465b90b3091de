"""Who a pod is to its controller: what stays the same when the pod is evicted and another one takes its place.

    StatefulSet       its name, which the next pod has too           web-0
    Indexed Job       the Job and the index                          job:tiles-7
    Job               the Job                                        job:train
    Deployment        the Deployment                                 deployment:train
    anything else     its name

A runtime is not told of owners; but controllers put labels on their pods, and the engine knows those. A name is only
taken apart where a label proves what its end means. Several pods of one owner may live at once: see `claims`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from kedge.containers.runtime.opt_in import POD, SANDBOX, has_made_up_name
from kedge.errors import Unavailable

_CRIO = "/run/crio/crio.sock"
_JOB = ("batch.kubernetes.io/job-name", "job-name")
_INDEX = "batch.kubernetes.io/job-completion-index"
# Of a Deployment's ReplicaSet, whose pods are called <deployment>-<hash>-<5 characters>.
_REVISION = "pod-template-hash"


def owner_of(pod: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    """The part of a pod's identity between its namespace and the container's name."""
    if job := next((labels[name] for name in _JOB if labels.get(name)), ""):
        index = labels.get(_INDEX) or annotations.get(_INDEX)
        return f"job:{job}-{index}" if index else f"job:{job}"
    if revision := labels.get(_REVISION):
        name = re.fullmatch(rf"(.+)-{re.escape(revision)}-[a-z0-9]{{5}}", pod)
        if name is not None:
            return f"deployment:{name[1]}"
    return pod


def owner_of_container(notes: Mapping[str, str]) -> str:
    """The same for the container that is just being created: its engine is asked about its pod."""
    from .cri import pod

    if not notes.get(SANDBOX) or not has_made_up_name(notes[POD[1]]):
        return notes[POD[1]]
    own = pod(engine_address(), notes[SANDBOX])
    return owner_of(own.name, own.labels, own.annotations)


def engine_address() -> str:
    """The socket of the engine that called us: shims get it in their environment, or as an argument."""
    if address := os.environ.get("GRPC_ADDRESS") or os.environ.get("CONTAINERD_ADDRESS"):
        return address
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
    for flag, value in pairwise(words):
        if flag in ("-address", "--address"):
            return value
    if b"conmon" in Path(f"/proc/{os.getppid()}/comm").read_bytes() and os.path.exists(_CRIO):
        return _CRIO
    raise Unavailable(
        "the engine does not say where it listens, so the owner of this pod cannot be known",
        hint="set CONTAINERD_ADDRESS in /etc/kedge/runc.env, or KEDGE_WORKLOAD in the container",
    )
