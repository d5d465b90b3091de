"""Operations on what is built on a store, and on files beside it, whose system calls are watched."""

from __future__ import annotations

import json
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import kedge
from kedge.errors import storage_errors
from tests.legacy.importers.writers import jobs

from .care_operations import CARE, COMMANDS, SOME
from .children import Report
from .ledger import Violation
from .operations import DIRECTORY, Operation, kind_of, open_place, opened, put, run_command, url_of

# --- files beside the store ---


def _export(place: Path, _: Report) -> None:
    run_command(place, "export", "job", place / "out", "--force")


def _check_export(place: Path, *, is_done: bool) -> None:
    """What is there is complete, and if there was something before, something is there."""
    with open_place(place) as store:
        wanted = [checkpoint.id for checkpoint in store.list("job")]
    if not is_done and not (place / "was-there").exists() and not (place / "out").exists():
        return
    listed = json.loads((place / "out" / "checkpoints.json").read_text())
    found = [checkpoint["id"] for checkpoint in listed["checkpoints"]]
    if found != wanted and (is_done or found != wanted[:1]):
        raise Violation(f"the export has {found}, not {wanted}")
    for checkpoint in listed["checkpoints"]:
        json.loads((place / "out" / f"{checkpoint['seq']:06}" / "state.json").read_text())


def _with_export(place: Path) -> None:
    with open_place(place) as store:
        put(store, lambda *_: None, "job", "small", 0)
    run_command(place, "export", "job", place / "out")
    (place / "was-there").touch()


def _tree(place: Path) -> None:
    """Files, large and small, a sparse one, links and a fifo."""
    tree = place / "tree"
    (tree / "deep" / "er").mkdir(parents=True)
    draw = random.Random("tree")
    for name, size in (("one", 10), ("deep/two", 70_000), ("deep/er/three", 2_500_000), ("empty", 0)):
        (tree / name).write_bytes(draw.randbytes(size))
    with open(tree / "sparse", "wb") as file:
        file.truncate(1 << 20)
        file.write(b"x")
    os.link(tree / "one", tree / "deep" / "linked")
    (tree / "symbolic").symlink_to("deep/two")
    os.mkfifo(tree / "fifo")
    os.setxattr(tree / "one", "user.kedge", b"1")
    with open_place(place) as store:
        store.save("files", "step", kedge.Tree(tree, exact=True))


def _contents(root: Path) -> dict[str, object]:
    return {
        str(path.relative_to(root)): (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else path.stat().st_mode
        )
        for path in sorted(root.rglob("*"))
    }


def _save_tree(place: Path, _: Report) -> None:
    opened(place).save("files", "again", {"tree": kedge.Tree(place / "tree", exact=True), "n": 1})


def _restore_tree(place: Path, _: Report) -> None:
    tree: Any = opened(place).restore("files")
    tree.write_to(place / "out", exact=True, overwrite=True)


def _check_tree(place: Path, *, is_done: bool) -> None:
    if (is_done or (place / "out").exists()) and _contents(place / "out") != _contents(place / "tree"):
        raise Violation("what was restored is not what was saved")


def _replace_files(place: Path, _: Report) -> None:
    """What a restore of processes does to the files that they had open."""
    from kedge.containers.attempts import attempt
    from kedge.containers.moved_files import replaced

    os.environ["KEDGE_STATE_DIR"] = str(place / "state")
    files: Any = opened(place).restore("moved")
    wanted = {str(place / name): file for name, file in files.items()}
    with attempt("restore", "1") as work, replaced(wanted, work), storage_errors("write", work.path):
        (work.path / "restore.log").write_text("Restore finished successfully")


def _movable(place: Path) -> None:
    (place / "kept").write_text("as it was")
    with open_place(place) as store:
        store.save("moved", "step", {name: kedge.File(place / "kept") for name in ("changed", "gone")})
    (place / "changed").write_text("since")


def _check_moved(place: Path, *, is_done: bool) -> None:
    """All as it was, or all as it is, once what was killed is put right; no second name is left."""
    from kedge.containers.attempts import put_right

    os.environ["KEDGE_STATE_DIR"] = str(place / "state")
    if (place / "state").exists():
        put_right()
    found = [(place / name).read_text() if (place / name).exists() else None for name in ("changed", "gone")]
    if found != ["as it was"] * 2 and (is_done or found != ["since", None]):
        raise Violation(f"the files are {found}")
    if left := [path.name for path in place.glob("*.kedge-*")]:
        raise Violation(f"left over: {left}")


def _new_key(place: Path, _: Report) -> None:
    if not (place / "key").exists():
        run_command(place, "key", "new", "--out", place / "key")


def _check_new_key(place: Path) -> None:
    from kedge.crypto import parse_master

    parse_master((place / "key").read_text().strip())


def _token(place: Path, _: Report) -> None:
    from kedge.server.tokens import ACCESS, Tokens

    with kedge.open(url_of(place), namespace=ACCESS) as manager:
        tokens = Tokens(manager)
        for token in tokens.all():
            if token.name == "robot" and token.is_valid:
                tokens.revoke(token.id)
        tokens.create("robot", "write", ["default"])


def _check_token(place: Path) -> None:
    from kedge.server.tokens import ACCESS, Tokens

    with kedge.open(url_of(place), namespace=ACCESS) as manager:
        valid = [token.name for token in Tokens(manager).all() if token.is_valid]
    if valid != ["robot"]:
        raise Violation(f"valid tokens: {valid}")


# --- from older systems ---


def _older(place: Path) -> None:
    (place / "old").mkdir()
    for number in range(3):
        jobs.write(place / "old", jobs.checkpoint("older", f"s{number}", {"n": number}, number))


def _import(place: Path, _: Report) -> None:
    run_command(place, "import", place / "old")


def _check_import(place: Path) -> None:
    with open_place(place) as store:
        if [store.load(c.id) for c in store.list("older")] != [{"n": 0}, {"n": 1}, {"n": 2}]:
            raise Violation("the import is not complete")


# --- pipelines, agents ---


@kedge.pipeline(name="traced")
def traced(number: int) -> int:
    run = kedge.current_run()
    first = run.step("first", _note, number, 1)
    return int(run.step("second", _note, first, 2))


def _note(number: int, part: int) -> int:
    with open(os.environ["KEDGE_TRACED"], "a") as log:
        log.write(f"{number} {part}\n")
    return number + part


def _submit(place: Path, _: Report) -> None:
    kedge.queue("q", store=opened(place)).submit(traced, 7, key="seven")


def _work(place: Path, _: Report) -> None:
    from kedge.pipeline.consumer import Worker

    os.environ["KEDGE_TRACED"] = os.devnull
    _submit(place, _)
    short_s = 0.2  # lease: what the killed one held ends, and the entry is taken again
    worker = Worker(opened(place), ["q"], {"traced": traced}, lease_s=short_s, report=lambda *_: None)
    worker.serve(until_empty=True)


def _check_submitted(place: Path) -> None:
    with open_place(place) as store:
        if [entry.key for entry in kedge.queue("q", store=store).entries()] != ["seven"]:
            raise Violation("the run is not in the queue")


def _check_worked(place: Path) -> None:
    with open_place(place) as store:
        if kedge.queue("q", store=store).submit(traced, 7, key="seven").result(0) != 10:
            raise Violation("the run has no result")


def _agent(place: Path, _: Report) -> None:
    """A step of a thread: its checkpoint, then the writes of its tasks."""
    from langgraph.checkpoint.base import empty_checkpoint

    from kedge.integrations.langgraph import KedgeSaver

    saver = KedgeSaver(opened(place))
    for number in range(2):
        name = f"1f0a0000-0000-6000-8000-00000000000{number}"
        if (found := saver.get_tuple(_thread(name))) is not None and found.pending_writes:
            continue
        checkpoint = empty_checkpoint() | {
            "id": name,
            "channel_values": {"done": list(range(number + 1)), "text": "x" * 70_000},
            "channel_versions": {"done": f"{number + 1}", "text": "1"},
        }
        metadata: Any = {"source": "loop", "step": number, "parents": {}}
        if found is None:
            saver.put(_thread(), checkpoint, metadata, checkpoint["channel_versions"])
        saver.put_writes(_thread(name), [("done", number)], f"task-{number}")


def _thread(checkpoint: str | None = None) -> Any:
    chosen = {} if checkpoint is None else {"checkpoint_id": checkpoint}
    return {"configurable": {"thread_id": "thread", "checkpoint_ns": "", **chosen}}


def _check_agent(place: Path, *, is_done: bool) -> None:
    from kedge.integrations.langgraph import KedgeSaver

    with open_place(place) as store:
        found = list(KedgeSaver(store).list(_thread()))
    values = [each.checkpoint["channel_values"]["done"] for each in found]
    writes = [[write[1:] for write in each.pending_writes or ()] for each in found]
    if values not in ([[0, 1], [0]], [[0]], []) or (is_done and writes != [[("done", 1)], [("done", 0)]]):
        raise Violation(f"the thread has {values} and {writes}")


_FILES = ("kedge.files.restore", "kedge.files.stored_files")
_PIPELINES = ("kedge.pipeline.consumer",)

OPERATIONS: dict[str, Operation] = {
    **DIRECTORY,
    **CARE,
    **{
        name: Operation(
            _export, SOME, prepare, modules=COMMANDS,
            finish=partial(_check_export, is_done=True), check=partial(_check_export, is_done=False),
        )
        for name, prepare in (("export", kind_of()), ("export over another", _with_export))
    },
    "save tree of files": Operation(_save_tree, (), _tree, is_judged=False),
    "restore tree of files": Operation(
        _restore_tree, (), _tree, is_judged=False, modules=_FILES,
        finish=partial(_check_tree, is_done=True), check=partial(_check_tree, is_done=False),
    ),
    "restore files of processes": Operation(
        _replace_files, (), _movable, is_judged=False, modules=("kedge.containers.moved_files",),
        finish=partial(_check_moved, is_done=True), check=partial(_check_moved, is_done=False),
    ),
    "new key": Operation(_new_key, ("small",), finish=_check_new_key, modules=COMMANDS),
    "token": Operation(_token, ("small",), is_open=False, finish=_check_token, modules=("kedge.server.tokens",)),
    "import": Operation(_import, (), _older, is_open=False, finish=_check_import, is_judged=False, modules=COMMANDS),
    "submit": Operation(_submit, (), finish=_check_submitted, is_judged=False, modules=_PIPELINES),
    "work": Operation(_work, (), finish=_check_worked, is_judged=False, modules=_PIPELINES),
    "agent": Operation(
        _agent, (), is_judged=False, modules=("kedge.integrations.langgraph", "langgraph.checkpoint.base"),
        finish=partial(_check_agent, is_done=True), check=partial(_check_agent, is_done=False),
    ),
}  # fmt: skip
