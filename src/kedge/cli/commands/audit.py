"""`kedge audit`: verifies that the log of all changes is complete and unaltered."""

from __future__ import annotations

import re
from dataclasses import asdict

import click

from kedge.cli.command import Session, command_group, store_command
from kedge.errors import Corrupted
from kedge.terminal.text import count_of, style

_MARK = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


@store_command("verify", json_keys='{"ok", "entries", "head", "mark": "entries:head", "broken_at": number or null}')
@click.option("--expect", metavar="MARK", help="An earlier mark: also verify that nothing up to it was rewritten.")
def verify_command(session: Session, expect: str | None) -> None:
    """Verify that the log is complete and unaltered.

    Reads the whole log and verifies its hash chain. Anyone who can write to the store could rewrite the whole log, so
    keep the printed mark somewhere else, and pass it to --expect the next time. Exit code 6 if an entry was altered or
    removed.
    """
    mark = _MARK.fullmatch(expect) if expect is not None else None
    if expect is not None and mark is None:
        raise click.UsageError("--expect takes a mark as it was printed: NUMBER:HEAD")
    with session.open() as manager:
        chain = manager.audit()
        earlier = manager.audit(int(mark[1])) if mark else None
    is_rewritten = bool(mark and earlier and (earlier.entries, earlier.head) != (int(mark[1]), mark[2]))
    is_ok = chain.broken_at is None and not is_rewritten
    new_mark = f"{chain.entries}:{chain.head}"
    if chain.broken_at is not None:
        lines = [f"{style('✗', 'bad')} the log was altered at entry {chain.broken_at}, or before it"]
    elif is_rewritten:
        lines = [f"{style('✗', 'bad')} the log does not match the mark: it was rewritten or cut"]
    else:
        entries = count_of(chain.entries, "entry", "entries")
        lines = [f"{style('✓', 'good')} {entries}; the hash chain is intact", f"  mark: {new_mark}"]
    session.answer({"ok": is_ok, **asdict(chain), "mark": new_mark}, *lines)
    if not is_ok:
        click.get_current_context().exit(Corrupted.exit_code)


audit_command = command_group(
    "audit", [verify_command], text="Verify that the log of all changes (kedge events) is complete."
)
