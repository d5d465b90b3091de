"""What `deploy/kubernetes` puts on a node, and takes away again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.containers import runtime
from tests.cri import Cri, Failed
from tests.engine import COUNT, IMAGE, Containerd
from tests.lab import lab

DEPLOY = Path(__file__).parents[2] / "deploy/kubernetes"
INSTALLER = DEPLOY / "holdfast-node"
Installer = Callable[..., subprocess.CompletedProcess[str]]

# A containerd that says what it is, and what it makes of its configuration: version 1 reads one file, 2 conf.d too.
_ANSWERS = """#!/bin/sh
case $* in
  --version) echo "containerd github.com/containerd/containerd {version}.0.1 abc" ;;
  *dump) cat "{home}/config.toml"; [ {version} = 1 ] || cat "{home}"/conf.d/*.toml ;;
esac
"""


def installer(home: Path, containerd: str, **more: str) -> Installer:
    payload = home / "payload"
    (payload / "bin").mkdir(parents=True)
    shutil.copy(Path(runtime.__file__).with_name("holdfast-runc"), payload / "bin")
    (payload / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (payload / "bin/python3").chmod(0o755)
    places = {
        "HOST": "", "PAYLOAD": payload, "PREFIX": home / "opt/holdfast", "CONFIG": home / "config.toml",
        "ENVIRONMENT": home / "etc/runc.env", "STATE": home / "state", "CONTAINERD": containerd, "RESTART": "",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}, **more}

    def run(command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([INSTALLER, command], env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


def pretended(home: Path, version: int, config: str, **more: str) -> Installer:
    answers = home / "containerd"
    answers.write_text(_ANSWERS.format(version=version, home=home))
    answers.chmod(0o755)
    (home / "config.toml").write_text(config)
    return installer(home, str(answers), **more)


def files_below(home: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in home.rglob("*") if path.is_file()}


V2 = 'version = 2\n\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]\nSystemdCgroup = true\n\n\n'


@pytest.mark.parametrize(
    ("version", "config", "plugin"),
    [
        (1, V2, "io.containerd.grpc.v1.cri"),
        (2, V2, "io.containerd.grpc.v1.cri"),
        (2, "version = 3\n", "io.containerd.cri.v1.runtime"),
    ],
)
def test_nothing_but_what_it_added_goes(tmp_path: Path, version: int, config: str, plugin: str) -> None:
    """Twice over: what is there already is not added again. With containerd 2, config.toml is not touched at all."""
    places = {"HOLDFAST_STORE": "postgresql://u:it's $HOME@db/x", "HOLDFAST_RESTORE_ROOTS": "/srv/dumps"}
    run = pretended(tmp_path, version, config, **places)
    before = files_below(tmp_path)
    run("install")
    installed = files_below(tmp_path)
    run("install")
    assert files_below(tmp_path) == installed
    run("status")
    where = tmp_path / ("config.toml" if version == 1 else "conf.d/holdfast.toml")
    assert f'[plugins."{plugin}".containerd.runtimes.holdfast]' in where.read_text()
    assert (
        f"SystemdCgroup = {str(config == V2).lower()}" in where.read_text().rpartition("runtimes.holdfast.options")[2]
    )
    assert version == 1 or (tmp_path / "config.toml").read_text() == config
    told = tmp_path / "etc/runc.env"
    assert told.stat().st_mode & 0o777 == 0o600
    shown = subprocess.run(
        ["sh", "-c", f'. {told}; echo "$HOLDFAST_STORE $HOLDFAST_RESTORE_ROOTS"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "postgresql://u:it's $HOME@db/x /srv/dumps\n"
    run("uninstall")
    assert files_below(tmp_path) == before
    run("uninstall")


def test_what_is_the_administrators_stays(tmp_path: Path) -> None:
    run = pretended(tmp_path, 1, V2)
    own = tmp_path / "etc/runc.env"
    own.parent.mkdir()
    own.write_text("HOLDFAST_STORE=/mine\n")
    assert "stays as it is" in run("install").stderr
    run("uninstall")
    assert own.read_text() == "HOLDFAST_STORE=/mine\n"


@pytest.mark.parametrize(
    ("version", "config", "why"),
    [
        (1, "[plugins.cri]\n", "no version 2 or 3"),
        (2, "[plugins.cri]\n", "no version 2 or 3"),
        (3, V2, "no containerd 1 or 2"),
    ],
)
def test_nodes_that_are_refused(tmp_path: Path, version: int, config: str, why: str) -> None:
    run = pretended(tmp_path, version, config)
    before = files_below(tmp_path)
    refused = run("install", check=False)
    assert refused.returncode == 1
    assert why in refused.stderr
    assert files_below(tmp_path) == before


def test_a_configuration_that_imports_nothing(tmp_path: Path) -> None:
    """containerd 2 reads conf.d only if config.toml says so; it is told what to add, and gets no half of it."""
    run = pretended(tmp_path, 2, V2)
    (tmp_path / "containerd").write_text(_ANSWERS.format(version=2, home=tmp_path).replace("conf.d", "elsewhere"))
    refused = run("install", check=False)
    assert refused.returncode == 1
    assert "imports = [" in refused.stderr
    assert not (tmp_path / "conf.d").exists()
    assert (tmp_path / "config.toml").read_text() == V2


@pytest.mark.xdist_group("engines")
@pytest.mark.requires("criu", "containerd", "cc")
def test_a_node(tmp_path: Path) -> None:
    """Install, run pods of the runtime class, refuse to go while they run, uninstall: the node is as it was."""
    with lab(tmp_path) as made:
        engine = Containerd(made, pods=True, PATH=os.environ["PATH"])
        del engine.environment["HOLDFAST_PYTHON"]
        config = engine.home / "config.toml"
        plain = config.read_text().partition('[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.holdfast]')[0]
        config.write_text(plain)
        home = engine.home
        run = installer(home, "containerd", HOLDFAST_STORE=str(made.store))
        run("install")
        engine.start()
        try:
            engine.load_image()
            _use(engine, run)
            run("uninstall")
            assert config.read_text() == plain
            assert not (home / "opt/holdfast").exists()
            assert not (home / "etc").exists()
            engine.stop()
            engine.start()
            with pytest.raises(Failed, match="RunPodSandbox"):
                Cri(engine.home / "socket", IMAGE).run_pod("late")
        finally:
            engine.stop()


def _use(engine: Containerd, run: Installer) -> None:
    cri = Cri(engine.home / "socket", IMAGE)
    first = cri.run_pod("web-0")
    counter = cri.start(first, "main", COUNT, {"HOLDFAST_CHECKPOINT": "1"})
    engine.wait_beyond(counter, 5)
    assert "still run here" in run("uninstall", check=False).stderr
    cri.stop(counter)
    reached = engine.count(counter)
    cri.remove_pod(first)
    again = cri.run_pod("web-0")
    counter = cri.start(again, "main", COUNT, {"HOLDFAST_CHECKPOINT": "1"})
    engine.wait_beyond(counter, reached)
    cri.remove_pod(again)


# --- the manifests ---


def documents(*parts: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(DEPLOY.joinpath(*parts).read_text()) if one]


def test_manifests_fit_together() -> None:
    """Every file that a kustomization names is there; what the pods ask for is what the others offer."""
    for folder in ("", "uninstall"):
        (kustomization,) = documents(folder, "kustomization.yaml")
        for name in kustomization["resources"]:
            for one in documents(folder, name):
                assert one["apiVersion"]
                assert one["kind"]
                assert one["metadata"]["name"]
        assert [image["name"] for image in kustomization["images"]] == ["holdfast-node"]
    (runtime_class,) = documents("runtimeclass.yaml")
    selector = runtime_class["scheduling"]["nodeSelector"]
    accounts = {one["metadata"]["name"] for one in documents("rbac.yaml") if one["kind"] == "ServiceAccount"}
    (namespace,) = documents("namespace.yaml")
    for folder in ("", "uninstall"):
        (daemons,) = documents(folder, "daemonset.yaml")
        pod = daemons["spec"]["template"]["spec"]
        assert daemons["metadata"]["namespace"] == namespace["metadata"]["name"]
        assert selector.items() <= pod["nodeSelector"].items()
        assert pod["serviceAccountName"] in accounts
        assert pod["automountServiceAccountToken"] is False
        labels = daemons["spec"]["template"]["metadata"]["labels"]
        assert daemons["spec"]["selector"]["matchLabels"].items() <= labels.items()
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["initContainers"] + pod["containers"]:
            assert container["image"] == "holdfast-node"
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    for example in ("deployment.yaml", "job.yaml"):
        (workload,) = documents("examples", example)
        pod = workload["spec"]["template"]["spec"]
        assert pod["runtimeClassName"] == runtime_class["metadata"]["name"] == runtime_class["handler"] == "holdfast"
        assert {"name": "HOLDFAST_CHECKPOINT", "value": "1"} in pod["containers"][0]["env"]
