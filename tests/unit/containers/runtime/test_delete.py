"""`kedge-runc delete` answers before its engine gives it up, whoever lets it wait; the next call does the rest."""

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.containers import attempts
from kedge.containers.runtime import arguments, delete, marks, patience
from kedge.containers.runtime.container import CalledContainer
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish
from kedge.containers.runtime.patience import ENGINES_S, SHARE
from kedge.errors import StorageError
from tests.unit.containers.runtime.test_orphans import ROOT, Machine
from tests.waiting import wait_for

RUNTIME = Path(delete.__file__).parent
# The store of the test has threads; a call of `kedge-runc` has none when it forks.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


class Gate:
    """Where a process of ours waits until it is opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stand(self, *_: object) -> None:
        (self._folder / "waiting").touch()
        wait_for((self._folder / "open").exists, "it is not opened")
        (self._folder / "passed").touch()

    def let_pass(self) -> None:
        (self._folder / "open").touch()
        wait_for((self._folder / "passed").exists, "nobody waits")


@pytest.fixture(name="machine")
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    for name in ("marks", "state", "runc"):
        variable = {"marks": "KEDGE_RUNC_STATE", "state": "KEDGE_STATE_DIR", "runc": "KEDGE_RUNC"}[name]
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(patience, "ENGINES_S", dict.fromkeys(ENGINES_S, 0.01))
    with kedge.open(str(tmp_path / "store"), namespace="containers") as store:
        machine = Machine(tmp_path, store, str(tmp_path / "store"))
        machine.create("created")
        yield machine


def call(machine: Machine, *more: str) -> CalledContainer:
    """It opens the store itself."""
    return CalledContainer(str(machine.folder / "runc"), arguments.parse(["--root", ROOT, "delete", *more, "a"]))


def restored(machine: Machine) -> None:
    """It ended right after."""
    mark = Mark(Wish("k", "latest"), restored="k_1_00000000", started=time.time())
    marks.write_mark(marks.mark_of(ROOT, "a"), mark)
    machine.is_now("created")  # what this runtime deletes without force


def fail(*_: object) -> None:
    raise StorageError("the store does not answer", hint="start it")


def test_one_that_somebody_else_has(machine: Machine) -> None:
    """Whoever stores it reads its files, which go with it."""
    with attempts.only_one(ROOT, "a"), pytest.raises(kedge.Conflict, match="somebody else"):
        delete.delete(call(machine))
    assert machine.has_container
    assert delete.delete(call(machine)) == 0
    assert not machine.has_container


def test_a_claim_that_takes_long(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is gone all the same; its claim goes when the store answers."""
    gate = Gate(tmp_path)
    monkeypatch.setattr(delete, "_release", gate.stand)
    assert delete.delete(call(machine)) == 0
    assert not machine.has_container
    assert marks.marks() == []
    assert not (tmp_path / "passed").exists()
    gate.let_pass()


def test_a_verdict_that_takes_long(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next one of the workload must know it: the container stays until it is told, once."""
    restored(machine)
    gate = Gate(tmp_path)
    monkeypatch.setattr(delete, "_blame_checkpoint", gate.stand)
    assert delete.delete(call(machine)) == 1
    wait_for((tmp_path / "waiting").exists, "nobody tells")
    with pytest.raises(kedge.Conflict):
        delete.delete(call(machine))
    assert machine.has_container
    gate.let_pass()
    wait_for(lambda: not attempts.is_busy(ROOT, "a"), "it is not told")
    monkeypatch.setattr(delete, "_blame_checkpoint", lambda *_: pytest.fail("a second time"))
    assert delete.delete(call(machine)) == 0
    assert not machine.has_container


def test_what_a_killed_checkpoint_left_takes_long(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of volumes may have to be copied back."""
    (machine.folder / "status").unlink()
    mark = Mark(Wish("k", "latest"), ending=time.time())
    marks.write_mark(marks.mark_of(ROOT, "a"), mark)
    gate = Gate(tmp_path)
    for module in (attempts, delete):
        monkeypatch.setattr(module, "put_right", gate.stand)
    assert delete.delete(call(machine)) == 0
    assert marks.marks() == []
    gate.let_pass()


def test_a_store_that_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    restored(machine)
    monkeypatch.setattr(patience, "ENGINES_S", dict.fromkeys(ENGINES_S, 600.0))
    monkeypatch.setattr(delete, "_blame_checkpoint", fail)
    assert delete.delete(call(machine)) == 1
    assert machine.has_container


def test_a_fault_of_ours(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    restored(machine)
    monkeypatch.setattr(patience, "ENGINES_S", dict.fromkeys(ENGINES_S, 600.0))
    monkeypatch.setattr(delete, "_blame_checkpoint", lambda: None)  # it is given more
    assert delete.delete(call(machine)) == 0
    assert not machine.has_container


def test_by_force(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete, "_has_lost_its_shim", lambda _: False)
    with attempts.only_one(ROOT, "a"):
        assert delete.delete(call(machine, "--force")) == 0
    assert not machine.has_container


def test_our_waits_are_shorter_than_the_engines() -> None:
    """Every wait on the way is what is left of one patience, which is less than half of the engine's."""
    assert SHARE < 0.5
    for module in ("delete", "state"):
        tree = ast.parse((RUNTIME / f"{module}.py").read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"ORPHAN_S", "sleep"}, module
        waits = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in ("wait_s", "timeout")]
        assert all(ast.unparse(node.value) == "patience.left_s" for node in waits), module
