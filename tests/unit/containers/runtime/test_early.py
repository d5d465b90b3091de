"""What `kedge-runc create` does before anything else: it knows a first container, and leaves all others alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge.containers.runtime import early
from kedge.containers.runtime.arguments import parse
from kedge.containers.runtime.opt_in import Wish, wish_of

FRONT = Path(early.__file__).with_name("kedge-runc")
KEPT = ["KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=web"]


@pytest.fixture(name="bundle")
def _bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*early.PLACES, "KEDGE_KEY", "KEDGE_DEADLINE_S"):
        if name != "PATH":
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_PYTHON", sys.executable)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write(bundle, KEPT)
    return bundle


def write(bundle: Path, environment: list[object], annotations: object = None) -> dict[str, object]:
    spec = {"process": {"env": environment}, "annotations": annotations or {}}
    (bundle / "config.json").write_text(json.dumps(spec))
    return spec


def is_first(bundle: Path, *words: str) -> bool:
    return early.mark_first(parse(["--root", str(bundle.parent), "create", "--bundle", str(bundle), *words]))


def mark(bundle: Path) -> Path:
    return Path(early.mark_path(str(bundle.parent), "one"))


@pytest.mark.parametrize(
    ("environment", "annotations"),
    [
        (KEPT, {}),
        ([*KEPT, "KEDGE_RESTORE=no", 'ODD="\\\n\u2028\U0001f9ca'], {"x": "\u00e4 \"quoted\""}),
        (["ARCH_ENABLE=1"], {"kedge.dev/key": "other+secret", "io.kubernetes.cri.sandbox-namespace": "a b"}),
    ],
)  # fmt: skip
def test_a_first_one_is_marked_as_runtime_would(
    bundle: Path, environment: list[object], annotations: dict[str, str]
) -> None:
    spec = write(bundle, environment, annotations)
    assert is_first(bundle, "one")
    wish = wish_of(spec)
    assert wish is not None
    facts = json.loads(mark(bundle).read_text())
    places = facts.pop("environment")
    assert facts == {"wish": wish.facts(), "restored": None, "bundle": str(bundle)}
    assert places["KEDGE_STORE"] == str(bundle.parent / "store")
    assert "PATH" in places
    assert '"restored": null' in mark(bundle).read_text()  # the front looks for that
    assert not (bundle.parent / "store").exists()


def test_a_container_of_arch_is_its_id_in_the_namespace_of_its_engine() -> None:
    bundle = "/run/containerd/io.containerd.runtime.v2.task/default/app"

    def of(*environment: str, place: str = bundle, **notes: str) -> Wish | None:
        return wish_of({"process": {"env": ["ARCH_ENABLE=1", *environment]}, "annotations": notes}, None, place)

    wish = of()
    assert wish is not None
    assert (wish.key, wish.place, wish.keep) == (
        "ARCH+default+app",
        "/var/tmp/arch/checkpoint/default/app",
        "until-success",
    )
    for environment, place in (
        (["ARCH_CHECKPOINT_HOST_PATH=/data/"], "/data/default/app"),
        (["ARCH_SHAREDFS_HOST_PATH=/efs", "ARCH_CHECKPOINT_HOST_PATH=/data"], "/efs/checkpoint/default/app"),
    ):
        wish = of(*environment)
        assert wish is not None
        assert wish.place == place
    wish = of("KEDGE_WORKLOAD=web", "KEDGE_KEEP=always")
    assert wish is not None
    assert (wish.key, wish.keep, wish.place) == ("web", "always", "/var/tmp/arch/checkpoint/default/app")
    wish = of("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=web")
    assert wish is not None
    assert (wish.keep, wish.place) == ("always", "")
    names = ("sandbox-namespace", "sandbox-name", "container-name")
    wish = of(**{f"io.kubernetes.cri.{name}": "a" for name in names})
    assert wish is not None
    assert (wish.key, wish.place) == ("a+a+a", "")
    assert of("ARCH_ENABLE=0", "KEDGE_CHECKPOINT=0") is None
    for place in ("", "bundle", "/bundle"):
        with pytest.raises(kedge.Validation, match="names no workload"):
            of(place=place)


def test_what_arch_left_is_for_runtime(bundle: Path) -> None:
    left = bundle.parent / "arch" / bundle.parent.name / bundle.name
    write(bundle, ["ARCH_ENABLE=1", f"ARCH_CHECKPOINT_HOST_PATH={bundle.parent / 'arch'}"])
    assert is_first(bundle, "one")
    left.mkdir(parents=True)
    assert not is_first(bundle, "two")


def test_all_others_are_left_to_runtime(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle.parent / "taken").mkdir()
    assert not is_first(bundle, "taken")
    for words in (["--no-such-flag", "one"], [], [".."], ["a/b"]):
        assert not is_first(bundle, *words)
    assert not early.mark_first(parse(["run", "--bundle", str(bundle), "one"]))
    write(bundle, [])
    assert is_first(bundle, "one")  # runc is all that it takes, and there is no mark
    write(bundle, [*KEPT, "KEDGE_RESTORE=web_1_abcdef01"])
    assert not is_first(bundle, "one")
    write(bundle, [*KEPT, 5])
    with pytest.raises(ValueError, match="config"):
        is_first(bundle, "one")
    write(bundle, KEPT)
    with kedge.open(bundle.parent / "store", namespace="containers") as store:
        store.save("container:web", "one", {"a": 1})
    assert not is_first(bundle, "one")
    write(bundle, [*KEPT, "KEDGE_RESTORE=no"])
    assert not is_first(bundle, "one")  # it may hibernate
    monkeypatch.setenv("KEDGE_STORE", "postgresql://nowhere/none")
    assert not is_first(bundle, "one")
    assert not mark(bundle).exists()


def test_little_is_imported_on_the_way(bundle: Path) -> None:
    """Each of these costs as much as everything else together."""
    kedge.open(bundle.parent / "store").close()
    program = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import os; os.execv = lambda *words: print(*sys.modules) or os._exit(0)\n"
        "from kedge.containers.runtime.early import main; main(sys.argv[2:])\n"
    )
    home = str(FRONT.parents[3])
    words = ["/bin/true", "--root", str(bundle.parent), "create", "--bundle", str(bundle), "one"]
    done = subprocess.run(
        [sys.executable, "-ISuc", program, home, *words], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert mark(bundle).exists()
    heavy = {
        "re",
        "json",
        "typing",
        "dataclasses",
        "enum",
        "subprocess",
        "pathlib",
        "site",
        "sqlite3",
        "functools",
        "kedge.errors",
    }
    assert not heavy & set(done.stdout.split())


def test_the_front_starts_it_so(bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From its own package, by a link too, and with the words that came; what fails there is said by runtime."""
    monkeypatch.setenv("KEDGE_RUNC", "/bin/echo")
    link = tmp_path / "runc"
    link.symlink_to(FRONT)
    words = ["--root", str(bundle.parent), "create", "--bundle", str(bundle), "one"]
    for program in (FRONT, link):
        mark(bundle).unlink(missing_ok=True)
        done = subprocess.run([program, *words], capture_output=True, text=True, check=True)
        assert done.stdout.split() == words
        assert mark(bundle).exists()
    write(bundle, [*KEPT, "KEDGE_POLICY=never"])
    refused = subprocess.run([FRONT, *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "use fresh, fail or retry:N" in refused.stderr


def test_an_answer_has_its_name_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(early, "alarm", lambda _: None)
    monkeypatch.setattr(early, "first_mark", lambda *_: "the mark")
    (tmp_path / "config.json").write_text("{}")
    early.look_ahead(str(tmp_path), "places")
    assert (tmp_path / early.AHEAD).read_text().endswith("\nplaces\nthe mark\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["config.json", early.AHEAD])
