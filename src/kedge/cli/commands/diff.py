"""`kedge diff`: what changed from one checkpoint to another, by path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import Ref
from kedge.cli.output import emit
from kedge.store.reference import REFERENCE_HELP
from kedge.terminal.checkpoints import ID, NUMBER, STEP
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, clip, count_of, pad, pieces, safe, size, style, terminal_width, width_of

if TYPE_CHECKING:
    from kedge.diff import Change, Diff
    from kedge.files import TreeChange
    from kedge.manager import CheckpointManager
    from kedge.model import Checkpoint

_SIGNS = {"added": ("+", "good"), "removed": ("-", "bad"), "changed": ("~", "warn"), "type_changed": ("~", "warn")}
_SHOWN_FILES = 50
_SHOWN_CHARACTERS = 100
_LINE_LOOKS = {"+": "good", "-": "bad", "@": "type"}


@store_command(
    "diff",
    note=f"OLD and NEW are: {REFERENCE_HELP}",
    json_keys='{"same": bool, "old", "new": IDs, "added", "removed", "changed": counts, "bytes_changed", '
    '"shared_bytes", "changes": [{path, kind, old, new, old_bytes, new_bytes, detail, elements, elements_changed, '
    'bytes_changed, max_abs_difference, files: of trees}], "left_out": changes that are counted but not listed}',
)
@click.argument("old", type=Ref())
@click.argument("new", type=Ref())
def diff_command(session: Session, old: str, new: str) -> None:
    """Show what changed from OLD to NEW, by path inside the state.

    For arrays, shows how many elements changed and by how much. Equal arrays are not read.
    """
    with session.open() as manager:
        before, after = manager.find(old), manager.find(new)
        diff = manager.diff(before.id, after.id)
        inside = [_changed_files(manager, before, after, change) for change in diff.changes]
    if session.as_json:
        changes = [
            {**change.to_json(), **({"files": list(map(_file_json, files))} if files else {})}
            for change, files in zip(diff.changes, inside, strict=True)
        ]
        emit({"same": diff.is_empty, **diff.to_json(), "changes": changes})
        return
    _print_sides(before, after)
    _print_changes(dict(zip((change.path for change in diff.changes), inside, strict=True)), diff.changes)
    if diff.left_out:
        click.echo(style(f"… {count_of(diff.left_out, 'more change')}", "dim"))
    _print_total(diff)


def _print_changes(inside: Mapping[str, Sequence[TreeChange]], changes: Sequence[Change]) -> None:
    width = terminal_width()
    names = max((min(width_of(safe(change.path or "state")), 36) for change in changes), default=0)
    for run in _runs(changes):
        if len(run) > 3:
            _print_run(run, width)
            continue
        for change in run:
            if files := inside[change.path]:
                _print_files(change, files, names, width)
            else:
                _print_change(change, names, width)


def _changed_files(
    manager: CheckpointManager, before: Checkpoint, after: Checkpoint, change: Change
) -> list[TreeChange]:
    """What changed inside a tree of files that is in both states."""
    from kedge.diff.outline import open_state
    from kedge.files import FilesSummary, diff_trees

    sides = (change.old, change.new)
    if not all(isinstance(side, FilesSummary) and side.kind == "Tree" for side in sides):
        return []
    old, new = (open_state(manager.store, side.id).files_at(change.path) for side in (before, after))
    return diff_trees(old, new)


def _file_json(change: TreeChange) -> dict[str, object]:
    from kedge.terminal.entries import entry_json

    return {
        "path": change.path.encode("utf-8", "backslashreplace").decode(),
        "what": change.what,
        "fields": list(change.fields),
        "old": None if change.old is None else entry_json(change.old),
        "new": None if change.new is None else entry_json(change.new),
    }


def _print_files(change: Change, files: Sequence[TreeChange], names: int, width: int | None) -> None:
    """A tree of files, and below it what changed in it."""
    counts = Counter(file.what for file in files)
    total = ", ".join(f"{counts[what]:,} {what}" for what in ("changed", "added", "removed") if counts[what])
    sign, look = _SIGNS["changed"]
    click.echo(style(f"{sign} {pad(safe(change.path or 'state'), names)}", look) + f"  {_value(change.new)}: {total}")
    for file in files[:_SHOWN_FILES]:
        sign, look = _SIGNS[file.what]
        sizes = [size(entry.size_bytes) for entry in (file.old, file.new) if entry is not None]
        what = f"{', '.join(file.fields)}, " if file.fields else ""
        detail = f"  {what}{' → '.join(dict.fromkeys(sizes))}"
        line = safe(f"    {sign} {file.path}")
        if width is not None:
            line = clip(line, max(20, width - len(detail)))
        click.echo(style(line, look) + style(detail, "dim"))
    if len(files) > _SHOWN_FILES:
        click.echo(style(f"    … {count_of(len(files) - _SHOWN_FILES, 'more change')} (--json has all)", "dim"))


def _print_sides(before: Checkpoint, after: Checkpoint) -> None:
    side: Column[Checkpoint] = Column("", lambda c: "old" if c is before else "new", look="dim", is_whole=True)
    when: Column[Checkpoint] = Column("AGE", lambda c: age(c.created_at), ">", is_whole=True, drop=1)
    print_table((side, NUMBER, ID, STEP, when), (before, after))
    click.echo()


def _runs(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Changes one by one, but items added to or removed from a list one after the other together."""
    run: list[Change] = []
    for change in changes:
        if run and _follows(run[-1], change):
            run.append(change)
            continue
        if run:
            yield run
        run = [change]
    if run:
        yield run


def _follows(last: Change, change: Change) -> bool:
    (above, _, number), (next_above, _, next_number) = last.path.rpartition("/"), change.path.rpartition("/")
    is_item = number.isdecimal() and next_number.isdecimal()
    is_same = last.kind == change.kind and str(change.kind) in ("added", "removed") and above == next_above
    return is_same and is_item and int(next_number) == int(number) + 1


def _print_run(run: Sequence[Change], width: int | None) -> None:
    sign, look = _SIGNS[str(run[0].kind)]
    above, _, first = run[0].path.rpartition("/")
    head = safe(f"{sign} {above}/{first}…{run[-1].path.rpartition('/')[2]}")
    items = [_value(change.new if change.new is not None else change.old) for change in run[:6]]
    detail = safe(f"{count_of(len(run), 'item')}: {', '.join(items)}, …")
    click.echo(
        style(head, look) + "  " + (detail if width is None else clip(detail, max(20, width - width_of(head) - 2)))
    )


def _print_change(change: Change, names: int, width: int | None) -> None:
    from kedge.diff import TextDelta

    sign, look = _SIGNS[str(change.kind)]
    head = f"{sign} {pad(safe(change.path or 'state'), names)}"
    if isinstance(change.detail, TextDelta):
        click.echo(style(head.rstrip(), look))
        for line in str(change.detail).split("\n"):
            text = safe(line)
            click.echo("    " + style(text if width is None else clip(text, width - 4), _LINE_LOOKS.get(line[:1], "")))
        return
    detail = safe(_detail(change))
    if width is None or width_of(head) + 2 + width_of(detail) <= width:
        click.echo(f"{style(head, look)}  {detail}")
        return
    click.echo(style(clip(head.rstrip(), width), look))
    lines = list(islice(pieces(detail, width - 4), 5))
    for line in lines[:3] if len(lines) > 4 else lines:
        click.echo(f"    {line}")
    if len(lines) > 4:
        click.echo(f"    {clip(lines[3] + ' …', width - 4)}")


def _detail(change: Change) -> str:
    """What changed, in one line."""
    from kedge.diff import ArrayDelta

    kind = str(change.kind)
    if isinstance(change.detail, ArrayDelta):
        delta = str(change.detail)
        if change.detail.bytes_changed == 1:
            delta = delta.replace("1 bytes differ", "1 byte differs")
        return f"{_value(change.new)}: {delta}"
    if kind == "added":
        return _value(change.new)
    if kind == "removed":
        return _value(change.old)
    note = f" ({change.detail})" if change.detail and kind != "type_changed" else ""
    return f"{_value(change.old)} → {_value(change.new)}{note}"


def _value(value: object) -> str:
    from kedge.terminal.tree import describe

    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        return f"{value[:_SHOWN_CHARACTERS]!r}… · {count_of(len(value), 'character')}"
    return describe(value)[0]


def _print_total(diff: Diff) -> None:
    if diff.is_empty:
        click.echo("the states are the same")
        return
    counts = f"{diff.changed:,} changed, {diff.added:,} added, {diff.removed:,} removed"
    arrays = f"{size(diff.bytes_changed)} of arrays changed, {size(diff.shared_bytes)} the same"
    has_arrays = diff.bytes_changed or diff.shared_bytes
    click.echo(style(f"\n{counts}" + (f" · {arrays}" if has_arrays else ""), "dim"))
