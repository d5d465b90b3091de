"""Operations of other kinds of stores, of keys, repairs and copies, whose system calls are watched."""

from __future__ import annotations

import grp
import os
from collections.abc import Callable
from pathlib import Path

import kedge
from kedge.care.rekey import RekeyReport
from kedge.care.repair import repair
from kedge.crypto import find_master

from .children import Report
from .ledger import Ledger, Violation
from .operations import (
    NEW_KEY,
    OLD_KEY,
    Operation,
    cleanup,
    create,
    delete,
    gc,
    kind_of,
    open_place,
    opened,
    put,
    run_command,
    save,
    url_of,
    with_garbage,
    write_back,
)
from .states import make, same

# --- keys ---


def _rekey(*, is_rewrite: bool) -> Callable[[Path, Report], None]:
    def rekey(place: Path, _: Report) -> None:
        done: RekeyReport = opened(place).rekey(NEW_KEY, rewrite=is_rewrite)
        if done.unreadable:
            raise Violation(f"unreadable: {done.unreadable}")

    return rekey


def _check_key(place: Path) -> None:
    with kedge.open(url_of(place), key=NEW_KEY, create=False) as store:
        if (store.encryption or {})["old_data_keys"]:
            raise Violation("an old data key is still in use")


# --- repairs ---


def _cut_index(place: Path) -> None:
    os.truncate(place / "store" / "index.sqlite", 8192)


def _lose_index(place: Path) -> None:
    for file in (place / "store").glob("index.sqlite*"):
        file.unlink()


def _damage_journal(place: Path) -> None:
    journal = place / "store" / ".kedge" / "journal"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 0xFF
    journal.write_bytes(content)


def _repair(place: Path, _: Report) -> None:
    run_command(place, "check", "--repair", codes=(0, 6))  # 6: it says that something may be missing


def _repair_encrypted(place: Path, _: Report) -> None:
    repair(place / "store", actor="test", master=find_master(OLD_KEY))


def _rebuild(place: Path, _: Report) -> None:
    run_command(place, "rebuild")


def _damage_pack(place: Path) -> None:
    """In the newest checkpoint alone, so that a restore falls back."""
    with open_place(place) as store:
        put(store, lambda *_: None, "job", "packed", 500)
    pack = max((place / "store").rglob("*.pack"), key=lambda path: path.stat().st_mtime_ns)
    with open(pack, "r+b") as file:
        file.seek(50_000)
        file.write(b"\xff" * 8)


def _verify(place: Path, _: Report) -> None:
    opened(place).verify()


def _check_marks(place: Path) -> None:
    with open_place(place) as store:
        *others, newest = store.list("job")
        for checkpoint in others:
            kind, seed = str(checkpoint.metadata["kind"]), int(str(checkpoint.metadata["seed"]))
            if checkpoint.status == "corrupted" or not same(store.load(checkpoint.id), make(kind, seed)):
                raise Violation(f"{checkpoint} is called damaged")
        if newest.metadata["seed"] != 500:
            raise Violation("the damaged checkpoint is gone")


def _check_marked(place: Path) -> None:
    with open_place(place) as store:
        if store.list("job")[-1].status != "corrupted":
            raise Violation("the damaged checkpoint is not marked")


def _share(place: Path, _: Report) -> None:
    run_command(place, "migrate", "--store", place / "new", "--shared-group", grp.getgrgid(os.getgid()).gr_name)


def _check_shared(place: Path) -> None:
    with kedge.open(place / "new", create=False) as store:
        store.save("job", "step", 1)
    if (place / "new").stat().st_mode & 0o070 != 0o070:
        raise Violation("the new store is not shared")


# --- copies ---


def _copy(place: Path, _: Report) -> None:
    with kedge.open(place / "target") as target:
        opened(place).copy_to(target, mirror=True)


def _with_target(place: Path) -> None:
    """It has an older state of the source, with what is deleted there since."""
    with open_place(place) as store, kedge.open(place / "target") as target:
        for seed, kind in enumerate(("small", "packed", "arrays"), 300):
            put(store, lambda *_: None, "job", kind, seed)
        store.copy_to(target)
        store.delete("job", store.list("job")[0].id)


def _check_copy(place: Path) -> None:
    with open_place(place) as store, kedge.open(place / "target") as target:
        if [(c.id, c.seq) for c in target.list("job")] != [(c.id, c.seq) for c in store.list("job")]:
            raise Violation("the copy is not complete")


def _check_target(place: Path) -> None:
    if (place / "target").exists():
        with kedge.open(place / "target") as target:
            Ledger().check(target)


_FILES = kind_of("files:")
_SECRET = kind_of(is_encrypted=True)
_SECRET_FILES = kind_of("files:", is_encrypted=True)
SOME = ("small", "packed", "inline")
_COPIES = ("kedge.care.copy",)
COMMANDS = (
    "kedge.care.rebuild",
    "kedge.care.repair_files",
    "kedge.legacy.importers.writer",
    *(f"kedge.cli.commands.{name}" for name in ("check", "export", "import_", "key", "migrate", "rebuild")),
)

CARE: dict[str, Operation] = {
    "encrypted save": Operation(save("packed"), SOME, _SECRET),
    "rekey": Operation(_rekey(is_rewrite=False), SOME, _SECRET, finish=_check_key),
    "rewrite": Operation(_rekey(is_rewrite=True), SOME, _SECRET, finish=_check_key),
    "files create": Operation(create, (), _FILES, is_open=False),
    "files save small": Operation(save("small"), SOME, _FILES),
    "files save packed": Operation(save("packed"), SOME, _FILES),
    "files save arrays": Operation(save("arrays"), ("arrays",), _FILES),
    "files delete": Operation(delete, ("arrays", "small"), _FILES),
    "files cleanup": Operation(cleanup, ("small", "packed", "small", "packed"), _FILES),
    "files gc": Operation(gc, SOME, with_garbage("files:")),
    "files rewrite": Operation(_rekey(is_rewrite=True), SOME, _SECRET_FILES, finish=_check_key),
    "files repair": Operation(_repair, SOME, _FILES, _damage_journal, is_open=False, opens=False, modules=COMMANDS),
    "memory": Operation(write_back, SOME, kind_of("memory:"), is_open=False),
    "repair": Operation(_repair, SOME, spoil=_cut_index, is_open=False, opens=False, modules=COMMANDS),
    "rebuild": Operation(_rebuild, SOME, spoil=_lose_index, is_open=False, opens=False, modules=COMMANDS),
    "encrypted repair": Operation(_repair_encrypted, SOME, _SECRET, _cut_index, is_open=False, opens=False),
    "check": Operation(_verify, SOME, spoil=_damage_pack, finish=_check_marked, check=_check_marks, is_judged=False),
    "share": Operation(_share, ("small",), finish=_check_shared, modules=COMMANDS),
    "copy": Operation(_copy, SOME, _with_target, finish=_check_copy, check=_check_target, modules=_COPIES),
    "copy to a new store": Operation(_copy, SOME, finish=_check_copy, check=_check_target, modules=_COPIES),
}
