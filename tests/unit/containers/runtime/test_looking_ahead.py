"""What is found out while a shim starts: `create` uses it once, for what it is about, and else looks itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kedge
from kedge.containers.runtime import early
from tests.unit.containers.runtime.test_early import FRONT, KEPT, mark, write
from tests.unit.containers.runtime.test_early import _bundle as _bundle

SHIM = FRONT.with_name("containerd-shim-kedge-v1")
# In the place of containerd's shim: says where it listens, and ends as it is told.
REAL = "#!/bin/sh\necho unix:///socket\nexit $STATUS\n"


@pytest.fixture(name="start")
def _start(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The call by which containerd starts a shim, in a bundle."""
    real = tmp_path / "real"
    real.write_text(REAL)
    real.chmod(0o755)
    monkeypatch.setenv("STATUS", "0")
    monkeypatch.setenv("KEDGE_SHIM", str(real))
    monkeypatch.setenv("KEDGE_SHIM_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("KEDGE_RUNC", "/bin/true")
    monkeypatch.chdir(bundle)
    return [str(SHIM), "-namespace", "n", "-id", "one", "start"]


def look(bundle: Path, front: Path = FRONT) -> bool:
    """Whether there is an answer then."""
    subprocess.run([front, "look-ahead", "--bundle", bundle], cwd=bundle, check=True)
    if not (bundle / early.AHEAD).exists():
        return False
    good_until(bundle, 1 << 40)  # however long this test takes
    return True


def good_until(bundle: Path, uptime_s: int) -> None:
    answer, time_ns = bundle / early.AHEAD, (bundle / "config.json").stat().st_mtime_ns
    _, *rest = answer.read_text().splitlines(keepends=True)
    answer.write_text(f"{uptime_s}\n{''.join(rest)}")
    os.utime(answer, ns=(1, time_ns))


def is_used(bundle: Path, front: Path = FRONT, **environment: str) -> bool:
    """Whether `create` does without an interpreter."""
    command = [front, "--root", bundle.parent, "create", "--bundle", bundle, "one"]
    given = {**os.environ, "KEDGE_RUNC": "/bin/true", "KEDGE_PYTHON": "/bin/false", **environment}
    is_done = subprocess.run(command, env=given, check=False).returncode == 0
    assert is_done is mark(bundle).exists()
    return is_done


@pytest.fixture(name="answered")
def _answered(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with an answer in it."""
    monkeypatch.setenv("KEDGE_RUNC", "/bin/true")
    assert look(bundle)
    return bundle


def test_an_answer_is_the_mark_that_create_would_write(answered: Path) -> None:
    text = (answered / early.AHEAD).read_text()
    assert is_used(answered)
    used = json.loads(mark(answered).read_text())
    assert used == json.loads(text.splitlines()[2])
    mark(answered).unlink()
    subprocess.run([FRONT, "--root", answered.parent, "create", "--bundle", answered, "one"], check=True)
    assert json.loads(mark(answered).read_text()) == used
    mark(answered).unlink()
    assert not is_used(answered)  # once
    assert sorted(os.listdir(answered)) == ["config.json", early.AHEAD]  # and goes with its bundle


def _changed(bundle: Path) -> dict[str, str]:
    os.utime(bundle / "config.json", ns=(1, (bundle / "config.json").stat().st_mtime_ns + 1))
    return {}


def _put_back(bundle: Path) -> dict[str, str]:
    os.utime(bundle / "config.json", (1, 1))
    return {}


def _old(bundle: Path) -> dict[str, str]:
    good_until(bundle, 0)
    return {}


def _elsewhere(bundle: Path) -> dict[str, str]:
    return {"KEDGE_STORE": str(bundle / "other")}


def _locked(bundle: Path) -> dict[str, str]:
    return {"KEDGE_KEY": "secret"}


def _taken(bundle: Path) -> dict[str, str]:
    (bundle.parent / "one").mkdir()
    return {}


def _used(bundle: Path) -> dict[str, str]:
    assert is_used(bundle)
    mark(bundle).unlink()
    # as a copy of what was read before would be: only that it is empty says that it was used
    os.utime(bundle / early.AHEAD, ns=(1, (bundle / "config.json").stat().st_mtime_ns))
    return {}


CASES = {  # what makes an answer one that is not for this call, and the safeguard that knows it
    _changed: '! [ "$config" -nt "$ahead" ]',
    _put_back: '! [ "$config" -ot "$ahead" ]',
    _old: '[ "${now%.*}" -le "$until" ]',
    _elsewhere: '[ "$of" = "$places" ]',
    _locked: '[ "$of" = "$places" ]',
    _taken: '[ ! -e "$root/$id" ]',
    _used: "printf '' >\"$ahead\"",
}


@pytest.mark.parametrize("case", CASES)
def test_answers_for_others_are_not_used(answered: Path, case: Callable[[Path], dict[str, str]]) -> None:
    assert not is_used(answered, **case(answered))


@pytest.mark.mutant
@pytest.mark.parametrize("case", CASES)
def test_each_safeguard_is_needed(answered: Path, tmp_path: Path, case: Callable[[Path], dict[str, str]]) -> None:
    """The case above notices when it is taken out."""
    text = FRONT.read_text()
    assert text.count(CASES[case]) == 1
    mutant = tmp_path / "mutant"
    mutant.write_text(text.replace(CASES[case], "true"))
    mutant.chmod(0o755)
    if case is _used:
        assert is_used(answered, mutant)
        mark(answered).unlink()
        assert is_used(answered, mutant)
    else:
        assert is_used(answered, mutant, **case(answered))


def test_nothing_is_said_of_what_is_kept_or_odd(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ([], [*KEPT, "KEDGE_RESTORE=web_1_abcdef01"]):
        write(bundle, [*environment])
        assert not look(bundle)
    write(bundle, [*KEPT])
    monkeypatch.setenv("KEDGE_KEY", "secret")
    assert not look(bundle)
    monkeypatch.delenv("KEDGE_KEY")
    with kedge.open(bundle.parent / "store", namespace="containers") as store:
        store.save("container:web", "one", {"a": 1})
    assert not look(bundle)
    write(bundle, ["KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=another"])
    assert look(bundle)


@pytest.mark.requires("strace")
@pytest.mark.faults
@pytest.mark.parametrize("call", ["write", "utimensat", "rename"])
def test_a_look_that_is_killed(bundle: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves is never taken for an answer, and is gone with the bundle."""
    monkeypatch.setenv("KEDGE_RUNC", "/bin/true")
    killing = ["strace", "-qq", "-o/dev/null", f"-etrace={call}", f"-einject={call}:signal=KILL:retval=0:when=1"]
    command = [*killing, str(FRONT), "look-ahead", "--bundle", str(bundle)]
    assert subprocess.run(command, cwd=bundle, check=False).returncode != 0
    assert sorted(os.listdir(bundle)) == [f".{early.AHEAD}", "config.json"]
    assert not is_used(bundle)
    assert is_used(bundle, KEDGE_PYTHON=sys.executable)


def test_a_shim_starts_and_has_looked(bundle: Path, start: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says and ends as the real one, and nothing of it runs any more: create may never come."""
    monkeypatch.setenv("STATUS", "7")
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("unix:///socket\n", "", 7)
    [link] = (bundle.parent / "links").rglob("runc")
    assert is_used(bundle, PATH=f"{link.parent}:{os.environ['PATH']}")  # as it is for what the shim starts
    (bundle / early.AHEAD).unlink()
    monkeypatch.setenv("KEDGE_PYTHON", "/bin/false")
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("unix:///socket\n", "", 7)
    write(bundle, [])
    assert subprocess.run(start, capture_output=True, text=True, check=False).stdout == "unix:///socket\n"
    assert os.listdir(bundle) == ["config.json"]


def test_a_bundle_that_took_the_place_of_another(bundle: Path, start: list[str], tmp_path: Path) -> None:
    """A look that was held up does not answer for the bundle that has its path by now."""
    waiting = tmp_path / "python"
    waiting.write_text(f'#!/bin/sh\nread -r line <"{tmp_path}/gate"\nexec "{sys.executable}" "$@"\n')
    waiting.chmod(0o755)
    os.mkfifo(tmp_path / "gate")
    first = subprocess.Popen(start, env={**os.environ, "KEDGE_PYTHON": str(waiting)}, stdout=subprocess.PIPE)
    with (tmp_path / "gate").open("w") as gate:  # opens when somebody waits there
        bundle.rename(tmp_path / "gone")
        bundle.mkdir()
        write(bundle, KEPT)
        second = subprocess.run(start, cwd=bundle, capture_output=True, text=True, check=True)
        assert second.stdout == "unix:///socket\n"
        (bundle / early.AHEAD).unlink()
        gate.write("go\n")
    assert first.communicate()[0] == b"unix:///socket\n"
    assert os.listdir(bundle) == ["config.json"]
    assert (tmp_path / "gone" / early.AHEAD).exists()
