"""`kedge approve`: decide what a run waits for."""

from __future__ import annotations

import click

from kedge.cli.naming import JobName
from kedge.cli.session import Session, emit, store_command


@store_command("approve", json_keys='{"run": …, "approval": …, "approved": true or false, "actor": …, "comment": …}')
@click.argument("run", type=JobName())
@click.argument("name", required=False)
@click.option("--deny", is_flag=True, help="Say no instead.")
@click.option("--comment", default="", help="Why; kept with the decision.")
@click.option("--by", metavar="NAME", help="Who decides.  [default: USER@HOST]")
@click.option("--resume", is_flag=True, help="Then start the program of the run again.")
def approve_command(
    session: Session, run: str, name: str | None, deny: bool, comment: str, by: str | None, resume: bool
) -> None:
    """Approve, or deny, what RUN waits for. A decision is final: the first one counts.

    RUN is a run or an execution of a workflow. NAME is the approval's path, or the name of the checkpoint; it may be
    left out when only one is waited for.
    """
    from kedge.errors import NotFound, Validation
    from kedge.pipeline.history import command_of, find_run
    from kedge.pipeline.wait import Approval, decide
    from kedge.process.workflow import Workflows

    from .runs import start_again

    with session.open() as manager:
        newest = manager.list(run, limit=1)
        is_workflow = bool(newest) and newest[0].metadata.get("kind") == "execution"
        workflows = Workflows(manager)
        if name is None:
            if is_workflow:
                checkpoints = workflows.get_execution(run)["checkpoints"]
                asked = [c["checkpoint_name"] for c in checkpoints if c["approval_status"] == "pending"]
            else:
                asked = [wait["name"] for wait in find_run(manager, run).waiting if wait.get("for") == "approval"]
            if not asked:
                raise NotFound(f"run {run} waits for no approval", hint="kedge runs show RUN says for what it waits")
            if len(asked) > 1:
                raise Validation(f"run {run} waits for several approvals", hint=f"name one of: {', '.join(asked)}")
            name = asked[0]
        start = command_of(manager, run) if resume else None  # before the decision, which is final
        if is_workflow:
            workflows.approve_checkpoint(run, name, not deny, actor=by, comment=comment)
            made = Approval(not deny, by or manager.actor, comment)
        else:
            made = decide(manager, run, name, not deny, actor=by, comment=comment)
    if session.as_json:
        facts = {"approved": made.approved, "actor": made.actor, "comment": made.comment}
        emit({"run": run, "approval": name, **facts})
    else:
        click.echo(f"{name} of {run} is {'approved' if made.approved else 'denied'} by {made.actor}")
    if start is not None:
        start_again(session, run, *start, manager.url)
