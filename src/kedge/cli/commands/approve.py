"""`kedge approve`: decide what a run waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.naming import JobName

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


@store_command("approve", json_keys='{"run": …, "approval": …, "approved": true or false, "actor": …, "comment": …}')
@click.argument("run", type=JobName())
@click.argument("name", required=False)
@click.option("--deny", is_flag=True, help="Deny it instead.")
@click.option("--comment", default="", help="Why; saved with the decision.")
@click.option("--by", metavar="NAME", help="Who decides.  [default: USER@HOST]")
@click.option("--resume", is_flag=True, help="Then start the program of the run again.")
def approve_command(
    session: Session, run: str, name: str | None, deny: bool, comment: str, by: str | None, resume: bool
) -> None:
    """Approve, or deny, what RUN waits for. A decision is final: the first one counts.

    RUN is a run or an execution of a workflow. NAME is the approval's path, or the name of the checkpoint; leave it
    out when only one is pending.
    """
    from kedge.pipeline.history import command_of
    from kedge.pipeline.wait import Approval, decide
    from kedge.process.workflow import Workflows

    from .runs import start_again

    with session.open() as manager:
        newest = manager.list(run, limit=1)
        is_workflow = bool(newest) and newest[0].metadata.get("kind") == "execution"
        name = name or _pending(manager, run, is_workflow)
        start = command_of(manager, run) if resume else None  # before the decision, which is final
        if is_workflow:
            Workflows(manager).approve_checkpoint(run, name, not deny, actor=by, comment=comment)
            approval = Approval(not deny, by or manager.actor, comment)
        else:
            approval = decide(manager, run, name, not deny, actor=by, comment=comment)
    facts = {"approved": approval.approved, "actor": approval.actor, "comment": approval.comment}
    session.answer(
        {"run": run, "approval": name, **facts},
        f"{name} of {run} is {'approved' if approval.approved else 'denied'} by {approval.actor}",
    )
    if start is not None:
        start_again(session, run, *start, manager.url)


def _pending(manager: CheckpointManager, run: str, is_workflow: bool) -> str:
    """The one approval that is pending."""
    from kedge.errors import NotFound, Validation
    from kedge.pipeline.history import find_run
    from kedge.process.workflow import Workflows

    if is_workflow:
        checkpoints = Workflows(manager).get_execution(run)["checkpoints"]
        names = [c["checkpoint_name"] for c in checkpoints if c["approval_status"] == "pending"]
    else:
        names = [wait["name"] for wait in find_run(manager, run).waiting if wait.get("for") == "approval"]
    if not names:
        raise NotFound(f"run {run} waits for no approval", hint=f"kedge runs show {run} says for what it waits")
    if len(names) > 1:
        raise Validation(f"run {run} waits for several approvals", hint=f"name one of: {', '.join(names)}")
    return str(names[0])
