"""`kedge container doctor`, `preflight` and `logs`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.session import Session, emit, store_command
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import safe

from .container_checkpoint import chosen_options, dump_options
from .doctor import Finding, print_finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kedge.containers import doctor


def _answer(session: Session, found: Iterable[doctor.Finding], **more: object) -> None:
    """Print findings; exit code 1 when one is bad."""
    findings = [Finding(one.subject, one.status, one.what, one.fix) for one in found]
    is_ok = all(finding.status != "bad" for finding in findings)
    if session.as_json:
        emit({"ok": is_ok, "findings": [asdict(finding) for finding in findings], **more})
    else:
        for finding in findings:
            print_finding(finding)
    if not is_ok:
        click.get_current_context().exit(1)


@store_command(
    "doctor", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}], "host": facts for preflight --target}'
)
def doctor_command(session: Session) -> None:
    """Look for CRIU, runc and the rest, at the kernel and at our rights; say how to add what is missing."""
    from kedge.containers.doctor import findings
    from kedge.containers.hosts import facts

    _answer(session, findings(), host=facts())


@store_command("preflight", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}]}')
@click.argument("container")
@click.option("--runtime", type=click.Choice(["runc", "crun", "podman", "containerd", "docker"]), help="Whose it is.")
@click.option("--root", metavar="DIR", help="The runtime's --root, if it is not the usual one.")
@click.option("--target", metavar="HOST.json", type=click.Path(exists=True, dir_okay=False),
              help="What kedge container doctor --json said on the machine it is to go to.")  # fmt: skip
@dump_options
def preflight_command(
    session: Session, container: str, runtime: str | None, root: str | None, target: str | None, **options: bool
) -> None:
    """Say whether CONTAINER can be frozen, and restored on another machine, without touching it."""
    from kedge.containers import hosts, preflight
    from kedge.containers.engine.runc import find_container
    from kedge.errors import Validation

    found = list(preflight.check_container(find_container(container, runtime, root), chosen_options(options)))
    if target is not None:
        try:
            there = json.loads(Path(target).read_text())["host"]
            found += preflight.check_target(hosts.facts(), there)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Validation(
                f"{target} does not describe a machine: {error}",
                hint="kedge container doctor --json there writes it",
            ) from error
    _answer(session, found)


@store_command(
    "logs", json_keys='{"attempt", "action", "subject", "result", "cause", "fix", "log"}, or {"attempts": [{…}]}'
)
@click.argument("attempt", default="")
def logs_command(session: Session, attempt: str) -> None:
    """Show the log of ATTEMPT (or `latest`) and what it means; without one, list the attempts."""
    from kedge.containers.attempts import attempts, find_attempt
    from kedge.containers.criu.log import explain

    if not attempt:
        names = ("action", "subject", "result")
        known = [(one.id, {name: str(one.facts().get(name, "")) for name in names}) for one in attempts()]
        if session.as_json:
            emit({"attempts": [{"attempt": identity, **told} for identity, told in known]})
        else:
            columns = (Column("ATTEMPT", look="id", is_whole=True), Column("WHAT"), Column("OF"), Column("RESULT"))
            print_table(columns, [(identity, *told.values()) for identity, told in known])
        return
    found = find_attempt(attempt)
    facts = found.facts()
    log = found.log()
    cause = explain(log) if facts.get("result") == "failed" else None
    answer = {
        "attempt": found.id,
        **{name: str(facts.get(name, "")) for name in ("action", "subject", "result", "error")},
        "cause": cause.cause if cause else "",
        "fix": cause.fix if cause else "",
    }
    if session.as_json:
        emit({**answer, "log": log})
        return
    for line in log.splitlines():
        click.echo(safe(line))
    print_facts(list(answer.items()))
