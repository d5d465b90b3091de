"""Attacks on containers: what a user of the machine, the author of a pod, or who writes images must not get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kedge
from kedge.containers import attempts
from kedge.containers.runtime import early, marks
from kedge.containers.runtime.opt_in import Wish, wish_of
from kedge.errors import Validation


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a machine's own state, which does not exist yet."""
    place = tmp_path / "lib" / "kedge"
    monkeypatch.setenv("KEDGE_STATE_DIR", str(place))
    return place


def loose(root: Path) -> list[Path]:
    """What others than the owner can do anything with."""
    return [path for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077]


# --- a user of the machine reads the memory of containers ---


def test_the_store_of_containers_is_roots_alone(state: Path) -> None:
    before = os.umask(0o000)
    try:
        with attempts.only_one("x"), attempts.attempt("checkpoint", "x"), marks.store_of({}) as manager:
            manager.save("container:a", "a", os.urandom(300_000))
    finally:
        os.umask(before)
    assert loose(state / "containers") == loose(state / "attempts") == loose(state / "locks") == []
    assert state.stat().st_mode & 0o077 == 0


def test_a_store_from_before_is_tightened_when_it_is_opened(state: Path) -> None:
    with kedge.open(f"file:{state}/containers", namespace="containers") as manager:
        manager.save("container:a", "a", os.urandom(300_000))
    for path in (state / "containers", *(state / "containers").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    with marks.store_of({}) as manager:
        assert manager.list("container:a")
    assert loose(state / "containers") == []


def test_who_reads_other_namespaces_does_not_read_the_memory_of_containers(state: Path) -> None:
    """A token of the service is for named namespaces: `default` does not open that of containers."""
    with marks.store_of({}) as manager:
        saved = manager.save("container:a", "a", os.urandom(300_000))
    with kedge.open(f"file:{state}/containers") as other:
        assert list(other.jobs()) == []
        assert not other.exists(saved)


def test_a_store_that_a_group_shares_stays_shared(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "containers").mkdir()
    (state / "containers").chmod(0o2775)
    with marks.store_of({}) as manager:
        manager.save("container:a", "a", os.urandom(300_000))
    assert (state / "containers").stat().st_mode & 0o7777 == 0o2770
    assert (state / "containers" / "index.sqlite").stat().st_mode & 0o777 == 0o660


def test_marks_are_roots_alone(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        early.write_mark(f"{tmp_path}/run/kedge/runc//run/containerd/x", "{}")
    finally:
        os.umask(before)
    assert loose(tmp_path / "run") == []


# --- the author of a pod names the workload of another namespace ---

CONTAINERD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-namespace": "team",
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.container-name": "main",
}
CRIO = {  # as CRI-O 1.34 writes config.json
    "io.container.manager": "cri-o",
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.cri-o.SandboxID": "5a1b",
    "io.kubernetes.pod.namespace": "team",
    "io.kubernetes.pod.name": "web-0",
    "io.kubernetes.container.name": "main",
}


def wish(annotations: dict[str, str], **environment: str) -> Wish | None:
    entries = [f"{name}={value}" for name, value in {"KEDGE_CHECKPOINT": "1", **environment}.items()]
    return wish_of({"process": {"env": entries}, "annotations": annotations})


@pytest.mark.parametrize("engine", [CONTAINERD, CRIO], ids=["containerd", "CRI-O"])
def test_a_key_never_leaves_its_namespace(engine: dict[str, str]) -> None:
    own = wish(engine)
    assert own is not None
    assert own.key == "team+web-0+main"
    assert own.namespace == "team"
    named = wish(engine, KEDGE_WORKLOAD="other+web-0+main")
    assert named is not None
    assert named.key == "team+other+2bweb-0+2bmain"


@pytest.mark.parametrize(
    "forged",
    [
        {**CRIO, "io.kubernetes.cri.sandbox-namespace": "bank"},
        {**CRIO, "io.kubernetes.cri.sandbox-name": "bank"},
        {**CONTAINERD, "io.container.manager": "cri-o", "io.kubernetes.pod.namespace": "bank"},
        {name: value for name, value in CRIO.items() if "namespace" not in name},
        {name: value for name, value in CONTAINERD.items() if "namespace" not in name},
        {"io.kubernetes.pod.uid": "1"},
    ],
)
def test_a_pod_whose_namespace_is_not_sure_names_nothing(forged: dict[str, str]) -> None:
    with pytest.raises(Validation, match="namespace"):
        wish(forged, KEDGE_WORKLOAD="bank+secrets")


def test_podman_is_no_cluster() -> None:
    """It writes some annotations in the name of CRI-O too."""
    found = wish({"io.container.manager": "libpod", "io.kubernetes.cri-o.TTY": "false"}, KEDGE_WORKLOAD="web")
    assert found is not None
    assert found.key == "web"


def test_a_sandbox_of_crio_is_left_alone() -> None:
    assert wish({**CRIO, "io.kubernetes.cri-o.ContainerType": "sandbox"}) is None
