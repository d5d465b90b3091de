"""What `deploy/kubernetes` puts on a node, and takes away again."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import kedge
from kedge.containers.runtime import calls
from tests.cri import Failed
from tests.engine import COUNT, programs_of
from tests.node import Node, node

DEPLOY = Path(__file__).parents[2] / "deploy/kubernetes"
INSTALLER = DEPLOY / "kedge-node"
PLAIN_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
Installer = Callable[..., subprocess.CompletedProcess[str]]

# A containerd that says what it is, and what it makes of its configuration: version 1 reads one file, 2 conf.d too. Of
# version 1 any runtime replaces the one that there is by default.
_ANSWERS = """#!/bin/sh
case $* in
  --version) echo "containerd github.com/containerd/containerd {version}.0.1 abc" ;;
  *dump)
    echo "version = {version}"
    grep -v ^version "{home}/config.toml"
    if [ {version} != 1 ]; then grep -v ^version "{home}"/conf.d/*.toml; fi
    if [ {version} != 1 ] || ! grep -qs 'containerd\\.runtimes\\.' "{home}/config.toml"; then
      echo '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]'
      echo '  runtime_type = "io.containerd.runc.v2"'
    fi ;;
esac
"""


def installer(home: Path, containerd: str, **more: str) -> Installer:
    payload = home / "payload"
    (payload / "bin").mkdir(parents=True)
    shutil.copy(Path(calls.__file__).with_name("kedge-runc"), payload / "bin")
    (payload / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (payload / "bin/python3").chmod(0o755)
    places = {
        "HOST": "", "PAYLOAD": payload, "PREFIX": home / "opt/kedge", "CONFIG": home / "config.toml",
        "ENVIRONMENT": home / "etc/runc.env", "STATE": home / "state", "CONTAINERD": containerd, "RESTART": "",
        "CRIU": home / "sbin/criu",
    }  # fmt: skip
    environment = {**os.environ, **{name: str(place) for name, place in places.items()}, **more}

    def run(command: str, check: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [INSTALLER, command], env={**environment, **more}, capture_output=True, text=True, check=False
        )
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
    places = {"KEDGE_STORE": "postgresql://u:it's $HOME@db/x", "AWS_SECRET_ACCESS_KEY": "a b"}
    run = pretended(tmp_path, version, config, **places)
    before = files_below(tmp_path)
    run("install")
    installed = files_below(tmp_path)
    run("install")
    assert files_below(tmp_path) == installed
    run("status")
    where = tmp_path / ("config.toml" if version == 1 else "conf.d/kedge.toml")
    assert f'[plugins."{plugin}".containerd.runtimes.kedge]' in where.read_text()
    assert f"SystemdCgroup = {str(config == V2).lower()}" in where.read_text().rpartition("runtimes.kedge.options")[2]
    assert version == 1 or (tmp_path / "config.toml").read_text() == config
    told = tmp_path / "etc/runc.env"
    assert told.stat().st_mode & 0o777 == 0o600
    shown = subprocess.run(
        ["sh", "-c", f'. {told}; echo "$KEDGE_STORE $AWS_SECRET_ACCESS_KEY"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "postgresql://u:it's $HOME@db/x a b\n"
    run("uninstall")
    assert files_below(tmp_path) == before
    run("uninstall")


@pytest.mark.parametrize(("version", "config"), [(1, V2), (2, "version = 3\n")])
def test_in_the_place_of_kybernate(tmp_path: Path, version: int, config: str) -> None:
    """By a switch: its runtime is ours, its annotations come through, its directory is open. Off again: all goes."""
    run = pretended(tmp_path, version, config)
    before = files_below(tmp_path)
    where = tmp_path / ("config.toml" if version == 1 else "conf.d/kedge.toml")
    run("install")
    plain = files_below(tmp_path)
    assert "kybernate]" not in where.read_text()
    run("install", KEDGE_KYBERNATE="1")
    switched = files_below(tmp_path)
    run("install", KEDGE_KYBERNATE="1")
    assert files_below(tmp_path) == switched
    (runtimes,) = (plugin["containerd"]["runtimes"] for plugin in tomllib.loads(where.read_text())["plugins"].values())
    assert runtimes["kybernate"]["pod_annotations"] == ["kedge.dev/*", "kybernate.io/*"]
    assert runtimes["kybernate"]["options"] == runtimes["kedge"]["options"]
    assert runtimes["kedge"]["pod_annotations"] == ["kedge.dev/*"]
    assert "KEDGE_RESTORE_ROOTS='/var/lib/kybernate/checkpoints'\n" in (tmp_path / "etc/runc.env").read_text()
    run("install")
    assert files_below(tmp_path) == plain
    run("install", KEDGE_KYBERNATE="1", KEDGE_RESTORE_ROOTS="kybernate-system=/tmp")
    assert "KEDGE_RESTORE_ROOTS='kybernate-system=/tmp'\n" in (tmp_path / "etc/runc.env").read_text()
    run("uninstall")
    assert files_below(tmp_path) == before


def test_a_runtime_of_kybernate_itself_is_not_replaced(tmp_path: Path) -> None:
    theirs = (
        V2 + '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kybernate]\nruntime_type = "io.containerd.x"\n'
    )
    run = pretended(tmp_path, 1, theirs)
    before = files_below(tmp_path)
    refused = run("install", check=False, KEDGE_KYBERNATE="1")
    assert refused.returncode
    assert "take it out" in refused.stderr
    assert files_below(tmp_path) == before
    run("install")
    assert theirs.strip() in (tmp_path / "config.toml").read_text()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """What it leads to is changed, and keeps its owner and its mode; a folder that was there stays, empty as it was."""
    for version in (1, 2):
        home = tmp_path / str(version)
        (home / "conf.d").mkdir(parents=True)
        run = pretended(home, version, V2)
        (home / "config.toml").rename(home / "real")
        (home / "real").chmod(0o640)
        (home / "config.toml").symlink_to(home / "real")
        run("install")
        assert "runtimes.kedge]" in (home / ("config.toml" if version == 1 else "conf.d/kedge.toml")).read_text()
        assert (home / "config.toml").readlink() == home / "real"
        assert (home / "real").stat().st_mode & 0o777 == 0o640
        run("uninstall")
        assert (home / "config.toml").readlink() == home / "real"
        assert (home / "real").read_text() == V2
        assert list((home / "conf.d").iterdir()) == []


@pytest.mark.parametrize("version", [1, 2])
def test_a_node_without_configuration(tmp_path: Path, version: int) -> None:
    """containerd runs with its defaults, and its folder in /etc is not there: what was made goes again."""
    run = pretended(tmp_path, version, V2)
    (tmp_path / "config.toml").unlink()
    place = tmp_path / "new"
    (tmp_path / "containerd").write_text(_ANSWERS.format(version=version, home=place))
    before = files_below(tmp_path)
    run("install", CONFIG=str(place / "config.toml"))
    made = files_below(place)
    assert any(b"runtimes.kedge]" in text for text in made.values())
    run("install", CONFIG=str(place / "config.toml"))
    assert files_below(place) == made
    run("uninstall", CONFIG=str(place / "config.toml"))
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("command", ["install", "uninstall"])
def test_what_cannot_be_made_is_not_written(tmp_path: Path, command: str) -> None:
    """A program that fails half-way must not cost a node its configuration."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "awk").write_text("#!/bin/sh\nhead -n1\nexit 2\n")
    (broken / "awk").chmod(0o755)
    run = pretended(tmp_path, 1, V2)
    if command == "uninstall":
        run("install")
    before = (tmp_path / "config.toml").read_text()
    refused = run(command, check=False, PATH=f"{broken}:{os.environ['PATH']}")
    assert refused.returncode == 1
    assert "stays as it is" in refused.stderr
    assert (tmp_path / "config.toml").read_text() == before
    assert list(tmp_path.glob("*.kedge-*")) == []
    run(command)


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("safeguard", "instead", "test", "more"),
    [
        ("found=$(readlink -f", "found=$(echo", "test_a_link_stays_a_link", {}),
        ('cp -a "$file" "$new"', ":", "test_a_link_stays_a_link", {}),
        (
            '"$@" >"$new" ||',
            '"$@" >"$new" || true ||',
            "test_what_cannot_be_made_is_not_written",
            {"command": "install"},
        ),
    ],
)
def test_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safeguard: str, instead: str, test: str, more: dict[str, str]
) -> None:
    text = INSTALLER.read_text()
    assert text.count(safeguard) == 1
    mutant = tmp_path / "kedge-node"
    mutant.write_text(text.replace(safeguard, instead))
    mutant.chmod(0o755)
    monkeypatch.setattr(sys.modules[__name__], "INSTALLER", mutant)
    (tmp_path / "node").mkdir()
    with pytest.raises((AssertionError, OSError)):
        globals()[test](tmp_path / "node", **more)


def test_what_is_the_administrators_stays(tmp_path: Path) -> None:
    run = pretended(tmp_path, 1, V2)
    own = tmp_path / "etc/runc.env"
    own.parent.mkdir()
    own.write_text("KEDGE_STORE=/mine\n")
    assert "stays as it is" in run("install").stderr
    run("uninstall")
    assert own.read_text() == "KEDGE_STORE=/mine\n"


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


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("1.6", marks=pytest.mark.requires("containerd")),
        pytest.param("1.7", marks=pytest.mark.requires("containerd-1.7")),
    ],
)
def test_the_default_runtime_stays(tmp_path: Path, program: str) -> None:
    """As Debian packages containerd: its configuration says nothing of runtimes, so there is the default one."""
    containerd = shutil.which("containerd") if program == "1.6" else programs_of(program) / "containerd"
    (tmp_path / "config.toml").write_text(PACKAGED)
    run = installer(tmp_path, str(containerd))

    def dumped() -> dict[str, Any]:
        command = [str(containerd), "--config", tmp_path / "config.toml", "config", "dump"]
        return tomllib.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    before = dumped()
    run("install")
    runtimes = dumped()["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    assert runtimes.keys() == {"runc", "kedge"}
    del runtimes["kedge"]
    assert runtimes == before["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]
    installed = files_below(tmp_path)
    run("install")
    assert files_below(tmp_path) == installed
    run("uninstall")
    assert (tmp_path / "config.toml").read_text() == PACKAGED


PACKAGED = """version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""


def test_a_containerd_that_does_not_answer_any_more_gets_its_configuration_back(tmp_path: Path) -> None:
    """It answers questions about pods as long as it was started without a runtime of ours."""
    asked = tmp_path / "asked"
    asked.write_text(f"#!/bin/sh\n! grep -qs runtimes.kedge {tmp_path}/running\n")
    asked.chmod(0o755)
    restart = tmp_path / "restart"
    restart.write_text(f"#!/bin/sh\ncp {tmp_path}/config.toml {tmp_path}/running\necho again >>{tmp_path}/restarts\n")
    restart.chmod(0o755)
    run = pretended(tmp_path, 1, V2, ASK=str(asked), RESTART=str(restart), WAIT_S="0")
    refused = run("install", check=False)
    assert refused.returncode == 1
    assert "its configuration is as it was" in refused.stderr
    assert (tmp_path / "config.toml").read_text() == V2
    assert (tmp_path / "restarts").read_text() == "again\nagain\n"


def test_a_configuration_that_would_mean_something_else_is_put_back(tmp_path: Path) -> None:
    run = pretended(tmp_path, 1, V2)
    answers = tmp_path / "containerd"
    answers.write_text(_ANSWERS.format(version=1, home=tmp_path) + f'grep -c kedge "{tmp_path}/config.toml"; exit 0\n')
    refused = run("install", check=False)
    assert refused.returncode == 1
    assert "something else" in refused.stderr
    assert (tmp_path / "config.toml").read_text() == V2


@pytest.mark.xdist_group("engines")
@pytest.mark.requires("criu", "containerd", "cc", "cni")
def test_a_node(tmp_path: Path) -> None:
    """The DaemonSets run as pods of a node of its own, with a payload of this checkout: see `lived`."""
    payload = make_payload(tmp_path)
    with node(tmp_path, DEPLOY.parents[1], Path(sys.base_prefix), criu_folder()) as made:
        shutil.copy(INSTALLER, made.below("/usr/local/sbin"))
        programs_of_it = ("/usr", "/etc/alternatives")  # of the image, if it were one
        mounts = [(path, path, True) for path in programs_of_it]
        lived(made, mounts=[*mounts, (str(payload), "/opt/kedge", True)])


def criu_folder() -> Path:
    """Where CRIU and its libraries are, which may be outside of this checkout."""
    return Path(os.path.realpath(shutil.which("criu") or "/usr/sbin/criu")).parents[1]


def make_payload(folder: Path) -> Path:
    """What the installer copies, made of this checkout."""
    programs = folder / "payload/bin"
    programs.mkdir(parents=True)
    shutil.copy(Path(calls.__file__).with_name("kedge-runc"), programs)
    fronts = {
        "python3": sys.executable,
        "kedge": f"{sys.executable} -m kedge",
        "criu": os.path.realpath(shutil.which("criu") or "criu"),
    }
    for name, program in fronts.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    return programs.parent


def lived(made: Node, *, mounts: Sequence[tuple[str, str, bool]] = (), image: str = "") -> None:
    """Install, run pods of the runtime class, refuse to go while they run, uninstall: the node is as it was.

    Its config.toml is a link that leads elsewhere, and no world may read it: both stay so.
    """
    store = made.lab.root / "kept"
    before = made.files()
    (daemons,), (undo,) = documents("daemonset.yaml"), documents("uninstall", "daemonset.yaml")
    first, (guard,) = made.run_daemons(daemons, {"KEDGE_STORE": str(store)}, mounts, image)
    installed = made.files()
    changed = {path for path, one in before.items() if installed[path] != one}
    added = {"/".join(path.split("/")[:3]) for path in installed.keys() - before.keys()}
    drop_ins = {"/etc/containerd"} if made.version == "2" else set()
    links = set() if shutil.which("criu", path=PLAIN_PATH["PATH"]) else {"/usr/local"}
    assert added == {"/etc/kedge", "/opt/kedge"} | drop_ins | links
    asked = ("/opt/kedge/bin/kedge", "container", "doctor", "--json")
    doctor = json.loads(made.lab.run(*asked, check=False, env=PLAIN_PATH).stdout)
    assert any("containerd" in one["what"] and "finds /" in one["what"] for one in doctor["findings"]), doctor
    assert changed == (set() if drop_ins else {"config"})
    assert installed["config"][:2] == before["config"][:2]
    assert made.restarts() == 1

    web = made.cri.run_pod("web-0")
    counter = made.cri.start(web, "main", COUNT, {"KEDGE_CHECKPOINT": "1"})
    made.wait_beyond(counter, 5)
    command = ("/opt/kedge/bin/kedge", "pod", "checkpoint", "default/web-0", "--json")
    told = json.loads(made.lab.run(*command, env=PLAIN_PATH).stdout)
    assert [one["key"] for one in told["containers"]] == ["default+web-0+main"]
    kept = json.loads(made.lab.run("/opt/kedge/bin/kedge", "container", "list", "--json", env=PLAIN_PATH).stdout)
    assert [one["job"] for one in kept["checkpoints"]] == ["container:default+web-0+main"]
    assert made.cri.state(guard) == ("running", 0)
    made.cri.remove_pod(first)
    with pytest.raises(AssertionError, match="still run here"):
        made.run_daemons(undo, {}, mounts, image)
    assert made.files() == installed
    made.cri.stop(counter)
    reached = made.count(counter)
    made.cri.remove_pod(web)
    again = made.cri.run_pod("web-0")
    counter = made.cri.start(again, "main", COUNT, {"KEDGE_CHECKPOINT": "1", "KEDGE_POLICY": "fail"})
    made.wait_beyond(counter, reached)
    made.cri.remove_pod(again)

    last, _ = made.run_daemons(undo, {}, mounts, image)
    assert made.files() == before
    assert made.restarts() == 2
    made.cri.remove_pod(last)
    with pytest.raises(Failed, match="RunPodSandbox"):
        made.cri.run_pod("late")
    with kedge.open(store, namespace="containers") as kept:
        assert [job.checkpoints for job in kept.jobs("container:")] == [2]


# --- the manifests ---


def documents(*parts: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(DEPLOY.joinpath(*parts).read_text()) if one]


def test_manifests_fit_together() -> None:
    """Every file that a kustomization names is there; what the pods ask for is what the others offer."""
    for folder in ("", "uninstall", "kybernate"):
        (kustomization,) = documents(folder, "kustomization.yaml")
        for name in kustomization["resources"]:
            for one in documents(folder, name):
                assert one["apiVersion"]
                assert one["kind"]
                assert one["metadata"]["name"]
        if folder == "kybernate":
            assert kustomization["kind"] == "Component"  # a kustomization that names the folder above is refused
            assert "# components: [kybernate]" in (DEPLOY / "kustomization.yaml").read_text()
        else:
            assert [image["name"] for image in kustomization["images"]] == ["kedge-node"]
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
            assert container["image"] == "kedge-node"
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
    assert [one["rules"] for one in documents("rbac.yaml") if "rules" in one] == [
        [{"apiGroups": [""], "resources": ["nodes/checkpoint"], "verbs": ["create"]}]  # what a kubelet asks about
    ]
    for example in ("deployment.yaml", "job.yaml"):
        (workload,) = documents("examples", example)
        pod = workload["spec"]["template"]["spec"]
        assert pod["runtimeClassName"] == runtime_class["metadata"]["name"] == runtime_class["handler"] == "kedge"
        assert {"name": "KEDGE_CHECKPOINT", "value": "1"} in pod["containers"][0]["env"]
