"""`kedge runs fork` and `kedge runs diff`: a run again from some step, and what came of it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, apply_option, store_command
from kedge.cli.naming import JobName
from kedge.cli.pairs import parse_json_pairs
from kedge.terminal.tables import Column
from kedge.terminal.text import count_of, safe, style

if TYPE_CHECKING:
    from kedge.pipeline.comparison import StepComparison
    from kedge.pipeline.fork import ForkPlan

_STEPS: tuple[Column[StepComparison], ...] = (
    Column("STEP", lambda step: step.path, is_whole=True, look="name"),
    Column("VERDICT", lambda step: step.verdict, looks={"same": "good", "differs": "warn"}),
    Column("WHY", lambda step: step.reason),
    Column("FIRST", lambda step: step.first or "", drop=1),
    Column("SECOND", lambda step: step.second or "", drop=1),
)


@store_command(
    "fork",
    json_keys='{"run": …, "fork": the new key, "step": …, "reused": [paths], "again": [paths], "arguments": …, '
    '"queue": …, "command": […], "applied": …}',
)
@click.argument("run", type=JobName())
@click.option("--from", "step", metavar="STEP", required=True, help="The first step, or stage, to run again.")
@click.option("--key", "new_key", metavar="KEY", help="The key of the new run.  [default: made from the others]")
@click.option("--arg", "args", metavar="NAME=JSON", multiple=True, help="Change an argument; repeatable.")
@apply_option("Make the new run. Without this, only say what it would reuse.")
def fork_command(
    session: Session, run: str, step: str, new_key: str | None, args: tuple[str, ...], is_applied: bool
) -> None:
    """Start a new run that reuses the results RUN had before STEP, with changed code or arguments.

    RUN stays as it is. Steps that ended before STEP are reused, unless an argument changes their inputs; all others run
    again. The fork of a run of a queue is executed by the queue's workers. For other runs, `kedge runs resume` starts
    the program, if its command line names the run's key, as that of `kedge run` does.
    """
    from kedge.pipeline.fork import fork, plan_fork

    with session.open() as manager:
        plan = plan_fork(manager, run, step, new_key=new_key, arguments=parse_json_pairs("--arg", args))
        if is_applied:
            fork(manager, plan)
    session.answer({**plan.to_json(), "applied": is_applied}, _text(plan, is_applied))


def _text(plan: ForkPlan, is_applied: bool) -> str:
    lines = [f"{style('reused', 'good')}  {safe(path)}" for path in plan.reused]
    lines += [f"{style('again', 'warn')}   {safe(path)}" for path in plan.again]
    if plan.queue:
        follows = f"a worker of queue {plan.queue} executes it"
    elif plan.command:
        follows = f"kedge runs resume {plan.fork} starts: {safe(shlex.join(plan.command))}"
    else:
        follows = f"start its program under the key {plan.fork}"
    made = f"{plan.fork} is a fork of {plan.run}" if is_applied else f"would make {plan.fork}, a fork of {plan.run}"
    reused = f"{count_of(len(plan.reused), 'step')} reused, {len(plan.again):,} to run again"
    return "\n".join([*lines, f"{made}: {reused}; {follows}" + ("" if is_applied else "; run it again with --apply")])


@store_command("diff", json_keys='{"steps": [{path, verdict, reason, first, second}]}; first, second: checkpoint IDs')
@click.argument("first", type=JobName())
@click.argument("second", type=JobName())
def diff_command(session: Session, first: str, second: str) -> None:
    """Compare the steps of two runs: inputs, versions and results.

    `kedge diff CHECKPOINT CHECKPOINT` shows how two results differ.
    """
    from kedge.pipeline.comparison import compare_runs

    with session.open() as manager:
        steps = list(compare_runs(manager, first, second))
    session.answer_list("steps", steps, _STEPS, lambda step: step.to_json(), empty="neither run has steps")
