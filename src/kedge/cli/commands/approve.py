"""`kedge approve`: approves or denies what a run is waiting for."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import JobName


@store_command("approve", json_keys='{"run": …, "approval": …, "approved": true or false, "actor": …, "comment": …}')
@click.argument("run", type=JobName())
@click.argument("name", required=False)
@click.option("--deny", is_flag=True, help="Deny it instead.")
@click.option("--comment", default="", help="The reason; saved with the decision.")
@click.option("--by", metavar="NAME", help="Who decides.  [default: USER@HOST]")
@click.option("--resume", is_flag=True, help="Then resume the run: start its program again.")
def approve_command(
    session: Session, run: str, name: str | None, deny: bool, comment: str, by: str | None, resume: bool
) -> None:
    """Approve or deny what RUN is waiting for. The first decision is final.

    RUN is a run or a workflow execution. NAME is the path of the approval or the name of the checkpoint; you can omit
    it if only one is pending.
    """
    from kedge.errors import NotFound, Validation
    from kedge.pipeline.approval import decide, pending_approvals
    from kedge.pipeline.history import run_of
    from kedge.pipeline.origin import command_of
    from kedge.pipeline.outcome import what_follows

    from .runs import confirm_foreign, start_again

    if deny and resume:
        raise click.UsageError("--deny and --resume cannot be combined: a denial is final")
    with session.open() as manager:
        if name is None:
            names = [approval.name for approval in pending_approvals(manager, run)]
            if not names:
                raise NotFound(
                    f"run {run} is not waiting for an approval", hint=f"kedge runs show {run} shows what was decided"
                )
            if len(names) > 1:
                raise Validation(f"run {run} is waiting for several approvals", hint=f"name one of: {', '.join(names)}")
            name = names[0]
        start = command_of(manager, run) if resume else None  # before the decision, which is final
        if start is not None:
            confirm_foreign(run, *start, manager.url)
        decision = decide(manager, run, name, not deny, actor=by, comment=comment)
        summary = run_of(manager, run)  # None: an execution
        if summary is None:
            follows = "whoever executes its steps goes on by its state, which kedge runs executions shows"
        elif deny:
            follows = "the run ends there; use another key to start anew"
        else:
            follows = what_follows(manager, run, summary.queue) + ("" if summary.queue else ", if it is paused")
    facts = {"approved": decision.approved, "actor": decision.actor, "comment": decision.comment}
    text = f"{name} of {run} is {decision.word} by {decision.actor}"
    session.answer({"run": run, "approval": name, **facts}, text if resume else f"{text}; next: {follows}")
    if start is not None:
        start_again(session, run, *start, manager.url)
