"""What is done to a store while its system calls are watched: every operation that writes, each on a place of its own.

A place is a directory with the store in `store`, and what else there is beside it. An operation may be killed or fail
at any call, and is then done again: so each begins by looking at what is there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

import kedge
import kedge.codec
from kedge.care.repair import repair
from kedge.errors import LeaseHeld, Validation
from kedge.store.local import LocalStore
from kedge.store.request import parse_request
from tests.waiting import wait_for

from .children import Report
from .ledger import Ledger, Violation, about
from .states import KINDS, make

Act = Callable[[Path, Report], None]
Check = Callable[[Path, Ledger], None]

OLD_KEY, NEW_KEY = bytes(range(32)), bytes(range(32, 64))


def nothing(_: Path) -> None:
    """For operations that need no more than what all of them get."""


# --- stores of a place ---


@cache
def _kind(place: Path) -> str:
    """Read once, because what is read while calls are struck may fail."""
    return (place / "kind").read_text() if (place / "kind").exists() else ""


def url_of(place: Path, name: str = "store") -> str:
    """Its kind is told by a file beside it, so that checks know it too."""
    return f"{_kind(place)}{place / name}"


def keys_of(place: Path) -> list[bytes | None]:
    return [OLD_KEY, NEW_KEY] if (place / "encrypted").exists() else [None]


def open_place(place: Path, **options: object) -> kedge.CheckpointManager:
    """Under whichever key it is; a change of keys that was killed leaves one of two."""
    for key in keys_of(place):
        try:
            return kedge.open(url_of(place), key=key, **options)  # type: ignore[arg-type]
        except Validation:
            if key == keys_of(place)[-1]:
                raise
    raise AssertionError


_open: dict[Path, kedge.CheckpointManager] = {}


def opened(place: Path) -> kedge.CheckpointManager:
    """The store that this process has open, and keeps open."""
    if place not in _open:
        _open[place] = open_place(place)
    return _open[place]


def close_all() -> None:
    for store in _open.values():
        store.close()
    _open.clear()


def local(store: kedge.CheckpointManager) -> LocalStore:
    assert isinstance(store.store, LocalStore)
    return store.store


def put(store: kedge.CheckpointManager, note: Callable[..., None], job: str, kind: str, seed: int) -> str:
    saved = store.save(job, "traced", make(kind, seed), metadata=about(kind, seed))
    note("saved", saved, job, kind, seed)
    return saved


def remove(
    store: kedge.CheckpointManager, note: Callable[..., None], wanted: Callable[[kedge.Checkpoint], bool]
) -> None:
    for victim in store.list("job"):
        if wanted(victim):
            note("deleting", victim.id)
            store.delete("job", victim.id)
            note("deleted", victim.id)


def run_command(place: Path, *words: str | Path, codes: Sequence[int] = (0,)) -> None:
    """`kedge …` in this process; what it refuses is raised as it is."""
    from kedge.cli import cli

    with redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        code = click.Group.main(cli, ["--store", url_of(place), *map(str, words)], "kedge", standalone_mode=False)
    if code not in (None, *codes):
        raise Violation(f"kedge {' '.join(map(str, words))}: exit code {code}\n{said.getvalue()}")


# --- places ---


@dataclass(frozen=True)
class Operation:
    """`act` tells what was acknowledged; `finish` raises Violation if something is not as it was acknowledged."""

    act: Act
    kinds: Sequence[str] = ("small", "packed", "arrays", "inline", "tree")
    prepare: Callable[[Path], None] = nothing  # what else the place holds
    spoil: Callable[[Path], None] = nothing  # what is done to the place last, before it is used
    is_open: bool = True  # the process has opened the store before it is watched
    is_recorded: bool = True  # small saves are in packs as well
    finish: Callable[[Path], None] = nothing  # holds once the operation is done
    check: Callable[[Path], None] = nothing  # holds at any time
    is_judged: bool = True  # its store holds only what the ledger can judge
    opens: bool = True  # at any time; if not, once the operation is done
    modules: Sequence[str] = ()  # which it imports when it is used: else their files would be counted


def carry_out(operation: Operation, place: Path, report: Callable[..., None]) -> None:
    """The lease of one that was killed ends by itself: it is waited for."""

    def attempt() -> bool:
        try:
            operation.act(place, report)
        except LeaseHeld:
            return False
        return True

    wait_for(attempt, "the lease of one that was killed does not end")


def fill(operation: Operation, place: Path, ledger: Ledger) -> None:
    """A store with a history, and what the operation needs."""
    place.mkdir(parents=True)
    operation.prepare(place)
    if operation.kinds:
        with open_place(place) as store:
            if not operation.is_recorded:
                local(store).backlog = None
            for seed, kind in enumerate(operation.kinds):
                put(store, lambda *message: ledger.note(message), "job", kind, seed)
    operation.spoil(place)


def kind_of(kind: str = "", *, is_encrypted: bool = False) -> Callable[[Path], None]:
    def prepare(place: Path) -> None:
        (place / "kind").write_text(kind)
        if is_encrypted:
            (place / "encrypted").touch()

    return prepare


# --- saves ---


def create(place: Path, _: Report) -> None:
    open_place(place).close()


def save(kind: str) -> Act:
    def act(place: Path, report: Report) -> None:
        put(opened(place), report, "job", kind, 77)

    return act


def _save_async(place: Path, report: Report) -> None:
    store = opened(place)
    pending = [(n, store.save_async("job", "later", make("packed", n), metadata=about("packed", n))) for n in (70, 71)]
    for number, save in pending:
        report("saved", save.result(), "job", "packed", number)


def _save_many(place: Path, report: Report) -> None:
    wanted = [("small", 80), ("inline", 81), ("packed", 82), ("small", 83)]
    saves = [
        (parse_request("job", "many", metadata=about(*each)), kedge.codec.encode(make(*each)), "test")
        for each in wanted
    ]
    failures = []
    for (kind, seed), outcome in zip(wanted, opened(place).save_many(saves), strict=True):
        if isinstance(outcome, BaseException):
            failures.append(outcome)
        else:
            report("saved", outcome.id, "job", kind, seed)
    if failures:
        raise failures[0]


def _save_elsewhere(place: Path, report: Report) -> None:
    with open_place(place, namespace="other") as store:
        store.save("job", "first", {"n": 1})


def write_back(place: Path, report: Report) -> None:
    with open_place(place) as store:
        saved = [(store.save("job", "step", make("packed", n), metadata=about("packed", n)), n) for n in (90, 91)]
    for checkpoint, number in saved:  # durable once it is closed
        report("saved", checkpoint, "job", "packed", number)


# --- changes ---


def delete(place: Path, report: Report) -> None:
    remove(opened(place), report, lambda checkpoint: checkpoint.metadata["kind"] == "arrays")


def _mark(place: Path, report: Report) -> None:
    store = opened(place)
    newest = store.list("job")[-1].id
    store.tag(newest, kind="best", other=None)
    store.pin(newest)
    store.set_status(newest, "archived")


def _check_marks(place: Path) -> None:
    with open_place(place) as store:
        newest = store.list("job")[-1]
        if (newest.tags, newest.is_pinned, newest.status) != ({"kind": "best"}, True, "archived"):
            raise Violation(f"{newest} is not marked")


def _branch(place: Path, report: Report) -> None:
    store = opened(place)
    kind, seed = store.list("job")[-1].metadata["kind"], store.list("job")[-1].metadata["seed"]
    copies = store.copy("job", "branch")
    report("saved", copies[-1].id, "branch", kind, seed)


def _check_branch(place: Path) -> None:
    with open_place(place) as store:
        if [c.metadata for c in store.list("branch")] != [c.metadata for c in store.list("job")]:
            raise Violation("the branch is not the job")


def cleanup(place: Path, report: Report) -> None:
    store = opened(place)
    doomed = [checkpoint.id for checkpoint in store.list("job")[:-2]]
    for checkpoint in doomed:
        report("deleting", checkpoint)
    store.cleanup("job", keep_last=2)
    for checkpoint in doomed:
        report("deleted", checkpoint)


def _retain(place: Path, report: Report) -> None:
    store = opened(place)
    for checkpoint in store.list("job"):
        report("deleting", checkpoint.id)
    store.set_retention("job", kedge.RetentionPolicy(keep_last=2))
    put(store, report, "job", "packed", 60)


def _delete_job(place: Path, report: Report) -> None:
    store = opened(place)
    doomed = [checkpoint.id for checkpoint in store.list("job")]
    for checkpoint in doomed:
        report("deleting", checkpoint)
    store.delete_job("job")
    for checkpoint in doomed:
        report("deleted", checkpoint)


def _lease(place: Path, report: Report) -> None:
    with opened(place).lease("leased", ttl_s=0.1) as lease:  # lease: nobody else wants it
        saved = opened(place).save("leased", "step", make("small", 8), metadata=about("small", 8), lease=lease)
        report("saved", saved, "leased", "small", 8)


def gc(place: Path, report: Report) -> None:
    report("gc", opened(place).gc().packs_removed)


def with_garbage(kind: str = "") -> Callable[[Path], None]:
    def prepare(place: Path) -> None:
        kind_of(kind)(place)
        with open_place(place) as store:
            for seed, state in enumerate(("packed", "arrays", "inline", "packed", "tree"), 100):
                put(store, lambda *_: None, "job", state, seed)
            put(store, lambda *_: None, "job", "arrays", 0)  # shares chunks with what stays
            remove(store, lambda *_: None, lambda checkpoint: True)

    return prepare


def _record(place: Path, report: Report) -> None:
    backlog = local(opened(place)).backlog
    assert backlog is not None
    report("recorded", backlog.copy())


def _check_packs(place: Path) -> None:
    """Without its index the store has all it acknowledged, under the same numbers."""
    with open_place(place) as store:
        before = [(c.id, c.seq) for job in store.jobs() for c in store.list(job.name)]
    for file in (place / "store").glob("index.sqlite*"):
        file.unlink()
    repair(place / "store", actor="test")
    with open_place(place) as store:
        if (after := [(c.id, c.seq) for job in store.jobs() for c in store.list(job.name)]) != before:
            raise Violation(f"the packs tell of {after}, not of {before}")


DIRECTORY: dict[str, Operation] = {
    "create": Operation(create, (), is_open=False),
    **{f"save {kind}": Operation(save(kind)) for kind in KINDS},
    "save async": Operation(_save_async),
    "save many": Operation(_save_many),
    "namespace": Operation(_save_elsewhere, ("small",), is_open=False),
    "mark": Operation(_mark, ("small", "packed"), finish=_check_marks),
    "branch": Operation(_branch, ("small", "packed"), finish=_check_branch),
    "delete": Operation(delete),
    "delete job": Operation(_delete_job),
    "cleanup": Operation(cleanup, ("small", "packed", "small", "packed")),
    "retention": Operation(_retain, ("small", "packed", "small", "packed")),
    "lease": Operation(_lease, ("small",)),
    "gc": Operation(gc, prepare=with_garbage()),
    "record": Operation(_record, ("small", "inline", "packed", "small"), is_recorded=False, finish=_check_packs),
}
