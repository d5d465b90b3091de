"""A container that its engine neither starts nor removes: others of its workload wait for it a while, then it goes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kedge
from kedge.containers import attempts
from kedge.containers.runtime import arguments, claims, delete, marks, orphans, start
from kedge.containers.runtime.container import CalledContainer
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish
from kedge.containers.runtime.orphans import Orphans

ROOT = "/run/containerd/runc/k8s.io"
PID = 4242
# As an older runc does: it deletes what is created, and by force what runs, but never what is paused.
RUNC = """#!/bin/sh
cd {folder} || exit
case "$*" in
  *state*) [ -e status ] && cat status ;;
  *resume*) echo '{{"status": "running", "pid": 4242}}' > status ;;
  *delete*--force*)
    if [ -e stubborn ] || grep -qs paused status; then echo "still there" >&2; exit 1; fi
    rm -f status ;;
  *delete*) grep -q created status && [ ! -e stubborn ] && rm status || {{ echo "not stopped" >&2; exit 1; }} ;;
esac
"""


class Machine:
    """One with a store, and a runtime that has the container `a`."""

    def __init__(self, folder: Path, store: kedge.CheckpointManager, place: str) -> None:
        self.folder, self.store = folder, store
        self._environment = {"KEDGE_STORE": place}
        (folder / "runc").write_text(RUNC.format(folder=folder))
        (folder / "runc").chmod(0o755)

    def create(self, status: str) -> None:
        """restored, created or running, and claimed."""
        claim = claims.take(self.store, "k", ROOT, "a")
        restored = "k_1_00000000" if status == "restored" else None
        mark = Mark(Wish("k", "latest"), environment=self._environment, claim=claim, restored=restored)
        marks.write_mark(marks.mark_of(ROOT, "a"), mark)
        self.is_now("paused" if restored else status)

    def is_now(self, status: str) -> None:
        (self.folder / "status").write_text(json.dumps({"status": status, "pid": PID}))

    def start(self) -> None:
        self.is_now("running")
        mark = marks.find_mark(Path(ROOT, "a"))
        assert mark is not None
        marks.write_mark(marks.mark_of(ROOT, "a"), replace(mark, started=1.0))

    def call(self, command: str) -> CalledContainer:
        words = ["--root", ROOT, command, "a"]
        return CalledContainer(str(self.folder / "runc"), arguments.parse(words), self.store)

    @property
    def has_container(self) -> bool:
        return (self.folder / "status").exists()

    @property
    def status(self) -> str:
        return str(json.loads((self.folder / "status").read_text())["status"])

    def take(self, wait_s: float = 60) -> str:
        """The key that another container of the workload gets."""
        return claims.key_of(claims.take(self.store, "k", ROOT, "b", wait_s=wait_s))


@pytest.fixture(name="machine")
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KEDGE_RUNC", str(tmp_path / "runc"))
    place = str(tmp_path / "store")
    with kedge.open(place, namespace="containers") as store:
        yield Machine(tmp_path, store, place)


def is_child_of(monkeypatch: pytest.MonkeyPatch, parent: str) -> None:
    """The first process of the container, from now on."""
    for module in (orphans, claims):
        monkeypatch.setattr(module, "stat_of", lambda pid: ["S", parent] if pid == str(PID) else [])


def after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "ABANDONED_S", 0.0)


@pytest.mark.parametrize("status", ["restored", "created"])
def test_the_next_takes_its_place(machine: Machine, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    machine.create(status)
    with pytest.raises(kedge.Conflict, match="workload k has container a, which was created and is not started"):
        machine.take(wait_s=0.001)
    assert machine.has_container
    after_a_while(monkeypatch)
    assert machine.take() == "k"
    assert not machine.has_container
    assert marks.marks() == []


def test_the_next_goes_beside_one_that_is_started(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.create("restored")
    monkeypatch.setattr(claims.time, "sleep", on_sleep(machine.start))
    assert machine.take() == "k@2"
    assert machine.has_container


def on_sleep(happens: Callable[[], None]) -> Callable[[float], None]:
    return lambda _: happens()


def test_started_at_the_last_moment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look that took it for abandoned and the lock that `start` has too."""
    machine.create("restored")
    machine.start()
    after_a_while(monkeypatch)
    assert Orphans().remove(Path(ROOT, "a")) == ""
    assert machine.has_container


@pytest.mark.parametrize("what", [start.start, lambda _: Orphans().remove(Path(ROOT, "a"))])
def test_starting_and_removing_exclude_each_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, what: Callable[[CalledContainer], object]
) -> None:
    machine.create("restored")
    after_a_while(monkeypatch)
    for module in (start, orphans):
        monkeypatch.setattr(module, "ORPHAN_S", 0.0)
    with attempts.only_one(ROOT, "a"), pytest.raises(kedge.Conflict, match="somebody else"):
        what(machine.call("start"))
    assert machine.status == "paused"


def test_one_that_cannot_be_removed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.create("restored")
    (machine.folder / "stubborn").touch()
    after_a_while(monkeypatch)
    with pytest.raises(kedge.Conflict, match="not started, and cannot be removed: still there"):
        machine.take(wait_s=0.001)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_its_engine_deletes_it(machine: Machine) -> None:
    """As containerd does when whoever asked for the container is gone: without --force."""
    machine.create("restored")
    assert delete.delete(machine.call("delete")) == 0
    assert not machine.has_container
    assert machine.take() == "k"


def test_the_guard_of_a_node_removes_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its claim is not renewed: the workload may be wanted on another node."""
    machine.create("restored")
    seen = Orphans()
    assert claims.renew_here(seen) == []
    assert machine.has_container
    after_a_while(monkeypatch)
    (machine.folder / "stubborn").touch()
    assert [job for job, _ in claims.renew_here(seen)] == ["container:k"]
    (machine.folder / "stubborn").unlink()
    machine.is_now("paused")
    assert claims.renew_here(seen) == []
    assert not machine.has_container
    assert machine.take() == "k"


def test_one_whose_shim_was_killed_gives_its_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """containerd 2 forgets the containers of a pod whose shim is killed, and their processes run on."""
    machine.create("running")
    is_child_of(monkeypatch, "1")
    with pytest.raises(kedge.Conflict, match="workload k has container a, which has lost its shim"):
        machine.take(wait_s=0.001)
    assert machine.has_container
    after_a_while(monkeypatch)
    assert machine.take() == "k"
    assert not machine.has_container
    assert marks.marks() == []


def test_the_guard_removes_one_whose_shim_was_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.create("running")
    is_child_of(monkeypatch, "1")
    seen = Orphans()
    assert claims.renew_here(seen) == []
    assert machine.has_container
    after_a_while(monkeypatch)
    assert claims.renew_here(seen) == []
    assert not machine.has_container


def test_one_that_a_killed_dump_left_frozen_loses_its_shim(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every runc ends a paused container, even by force."""
    machine.create("running")
    machine.is_now("paused")
    is_child_of(monkeypatch, "1")
    after_a_while(monkeypatch)
    assert machine.take() == "k"
    assert not machine.has_container


def test_one_whose_parent_is_not_init_is_left_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is restored, runc is the parent of its first process."""
    machine.create("running")
    is_child_of(monkeypatch, "17")
    after_a_while(monkeypatch)
    with pytest.raises(kedge.Conflict, match="workload k is still being checkpointed or removed"):
        machine.take(wait_s=0.001)
    assert claims.renew_here(Orphans()) == []
    assert machine.status == "running"


def remembered(wish: Wish, restored: str | None) -> Mark:
    """As another call reads it."""
    marks.write_mark(marks.mark_of(ROOT, "a"), Mark(wish, restored=restored))
    mark = marks.find_mark(Path(ROOT, "a"))
    assert mark is not None
    return mark


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("status", ["paused", "created"])
def test_one_that_people_start_when_they_like(status: str) -> None:
    """`podman init`, `runc create`. A pod's is started at once, whichever engine it has."""
    restored = "k_1_00000000" if status == "paused" else None
    state = {"status": status, "pid": PID}
    by_hand, of_a_pod = (remembered(Wish("k", "latest", namespace=name), restored) for name in ("", "team"))
    assert not orphans.reason(Path("/run/runc/a"), by_hand, state)
    assert orphans.reason(Path("/run/runc/a"), of_a_pod, state)
    assert orphans.reason(Path(ROOT, "a"), by_hand, state)


def test_one_of_another_engine_is_not_asked_for_its_shim(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """podman and CRI-O have none, and `runc run --detach` leaves its containers to init."""
    mark = Mark(Wish("k", "latest"))
    is_child_of(monkeypatch, "1")
    for root in ("/run/runc", "/run/crio", "/run/user/0/crun"):
        assert not orphans.reason(Path(root, "a"), mark, {"status": "running", "pid": PID})
    for root in (ROOT, "/run/docker/runtime-runc/moby"):
        assert orphans.reason(Path(root, "a"), mark, {"status": "running", "pid": PID})
