"""`kedge audit`: whether the log of all changes is whole."""

from __future__ import annotations

import re
from dataclasses import asdict

import click

from kedge.cli.session import Session, emit, pass_on, shared_options, store_command
from kedge.errors import Corrupted
from kedge.terminal.text import count_of, style

_MARK = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


@store_command("verify", json_keys='{"ok", "entries", "head", "mark": "entries:head", "broken_at": number or null}')
@click.option("--expect", metavar="MARK", help="A mark printed before: proves that nothing up to it was rewritten.")
def verify_command(session: Session, expect: str | None) -> None:
    """Read the log from its beginning and prove that each entry follows from those before it.

    Whoever can write the store could rewrite the whole log. Keep the mark that is printed somewhere else, and give it
    to --expect the next time. Exit code 6 when an entry was altered or removed.
    """
    wanted = _MARK.fullmatch(expect) if expect is not None else None
    if expect is not None and wanted is None:
        raise click.UsageError("--expect takes a mark as it was printed: NUMBER:HEAD")
    with session.open() as manager:
        chain = manager.audit()
        then = manager.audit(int(wanted[1])) if wanted else None
    is_rewritten = wanted is not None and then is not None and (then.entries, then.head) != (int(wanted[1]), wanted[2])
    is_ok = chain.broken_at is None and not is_rewritten
    mark = f"{chain.entries}:{chain.head}"
    if session.as_json:
        emit({"ok": is_ok, **asdict(chain), "mark": mark})
    elif chain.broken_at is not None:
        click.echo(f"{style('✗', 'bad')} the log was altered at entry {chain.broken_at}, or before it")
    elif is_rewritten:
        click.echo(f"{style('✗', 'bad')} the log is not the one the mark was made of: it was rewritten or cut")
    else:
        click.echo(
            f"{style('✓', 'good')} {count_of(chain.entries, 'entry', 'entries')}, each follows from those before"
        )
        click.echo(f"  mark: {mark}")
    if not is_ok:
        click.get_current_context().exit(Corrupted.exit_code)


audit_command = click.Group(
    "audit",
    commands=[verify_command],
    callback=pass_on,
    params=shared_options(),
    help="Prove that the log of all changes (kedge events) is whole.",
    epilog="JSON: kedge audit COMMAND --help says what each one answers",
)
