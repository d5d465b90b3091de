"""`kedge container preflight`: whether a container can be checkpointed, before it is tried."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import chosen_options, dump_options, runtime_options
from kedge.cli.findings import answer_findings
from kedge.errors import Validation


@store_command("preflight", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}]}')
@click.argument("container")
@runtime_options
@click.option("--target", metavar="HOST.json", type=click.Path(exists=True, dir_okay=False),
              help="The output of kedge container doctor --json on the machine to restore it on.")  # fmt: skip
@dump_options
def preflight_command(
    session: Session, container: str, runtime: str | None, root: str | None, target: str | None, **options: bool
) -> None:
    """Check whether CONTAINER can be checkpointed, and restored on another machine, without touching it."""
    from kedge.containers import hosts, preflight
    from kedge.containers.engine.runc import find_container
    from kedge.containers.runtime.marks import find_mark
    from kedge.containers.snapshot import TIES

    running = find_container(container, runtime, root)
    is_opted_in = find_mark(Path(running.root, running.id)) is not None
    given = [*chosen_options(options), *(TIES if is_opted_in else ())]
    findings = list(preflight.check_container(running, given))
    if target is not None:
        try:
            findings += preflight.check_target(hosts.facts(), json.loads(Path(target).read_text())["host"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Validation(
                f"{target} does not describe a machine: {error}", hint="kedge container doctor --json there writes it"
            ) from error
    answer_findings(session, findings, 1)
