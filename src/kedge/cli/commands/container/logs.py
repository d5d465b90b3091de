"""`kedge container logs`: what attempts to checkpoint and to restore said."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.output import emit
from kedge.terminal.tables import Column, print_facts
from kedge.terminal.text import safe

_COLUMNS: tuple[Column[dict[str, str]], ...] = (
    Column("ATTEMPT", lambda attempt: attempt["attempt"], look="id", is_whole=True),
    Column("ACTION", lambda attempt: attempt["action"]),
    Column("SUBJECT", lambda attempt: attempt["subject"]),
    Column("RESULT", lambda attempt: attempt["result"]),
)


@store_command(
    "logs", json_keys='{"attempt", "action", "subject", "result", "cause", "fix", "log"}, or {"attempts": [{…}]}'
)
@click.argument("attempt", default="")
def logs_command(session: Session, attempt: str) -> None:
    """Show the log of ATTEMPT (or of the `latest` one) and explain it; without ATTEMPT, list the attempts."""
    from kedge.containers.attempts import Attempt, attempts, find_attempt
    from kedge.containers.criu.log import explain

    def described(attempt: Attempt, *names: str) -> dict[str, str]:
        facts = attempt.facts()
        return {"attempt": attempt.id, **{name: str(facts.get(name, "")) for name in names}}

    if not attempt:
        every = [described(known, "action", "subject", "result") for known in attempts()]
        session.answer_list("attempts", every, _COLUMNS, dict, empty="no attempts yet")
        return
    chosen = find_attempt(attempt)
    answer = described(chosen, "action", "subject", "result", "error")
    log = chosen.log()
    cause = explain(log) if answer["result"] == "failed" else None
    answer |= {"cause": cause.cause if cause else "", "fix": cause.fix if cause else ""}
    if session.as_json:
        emit({**answer, "log": log})
        return
    for line in log.splitlines():
        click.echo(safe(line))
    print_facts(answer.items())
