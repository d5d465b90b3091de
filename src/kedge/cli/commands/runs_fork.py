"""`kedge runs fork` and `kedge runs diff`: repeat a run from some step, and compare the results."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, apply_option, store_command
from kedge.cli.names import JobName
from kedge.cli.pairs import parse_json_pairs
from kedge.terminal.tables import Column
from kedge.terminal.text import count_of, safe, style

if TYPE_CHECKING:
    from kedge.pipeline.comparison import StepComparison
    from kedge.pipeline.fork import ForkPlan

_STEPS: tuple[Column[StepComparison], ...] = (
    Column("STEP", lambda step: step.path, is_whole=True, look="name"),
    Column("VERDICT", lambda step: step.verdict, looks={"same": "good", "different": "warn"}),
    Column("WHY", lambda step: step.reason),
    Column("FIRST", lambda step: step.first or "", drop=1),
    Column("SECOND", lambda step: step.second or "", drop=1),
)


_STATUSES = click.Choice(["running", "paused", "completed", "failed", "cancelled", "abandoned"])


def chosen_runs(command: Callable[..., None]) -> Callable[..., None]:
    """The options that choose runs by what they are."""
    command = click.option("--status", type=_STATUSES, help="Only runs with this status.")(command)
    return click.option("--pipeline", metavar="NAME", default="", help="Only runs of this pipeline.")(command)


@store_command(
    "fork",
    json_keys='{"run": …, "fork": the new key, "step": …, "reused": [paths], "again": [paths], "arguments": …, '
    '"queue": …, "command": […], "applied": …}; without RUN: {"forks": [these]}',
)
@click.argument("run", type=JobName(), required=False)
@click.option("--from", "step", metavar="STEP", required=True, help="The first step, or stage, to run again.")
@click.option("--key", "new_key", metavar="KEY", help="The key of the new run.  [default: made from the others]")
@click.option("--arg", "args", metavar="NAME=JSON", multiple=True, help="Change an argument; repeatable.")
@click.option("--new-arg", "new_args", metavar="NAME=JSON", multiple=True,
              help="Pass an argument that the pipeline did not have when RUN was started; repeatable.")  # fmt: skip
@click.option("--prefix", metavar="TEXT", default="", help="Without RUN: only runs whose keys begin with this.")
@chosen_runs
@apply_option("Make the new run. Without this, only say what it would reuse.")
def fork_command(
    session: Session, run: str | None, step: str, new_key: str | None, args: tuple[str, ...],
    new_args: tuple[str, ...], prefix: str, pipeline: str, status: str | None, is_applied: bool,
) -> None:  # fmt: skip
    """Start a new run that reuses the results RUN had before STEP, with changed code or arguments.

    Without RUN, fork all runs that --prefix, --pipeline and --status choose and that have the step. Forks themselves
    are left out.

    RUN stays as it is. Steps that ended before STEP are reused, unless an argument changes their inputs; all others run
    again. The fork of a run of a queue is executed by the queue's workers. For other runs, `kedge runs resume` starts
    the program, if its command line names the run's key, as that of `kedge run` does.
    """
    from kedge.errors import NotFound, Validation
    from kedge.pipeline.fork import fork, plan_fork, plan_forks

    changes = {
        "arguments": parse_json_pairs("--arg", args), "new_arguments": parse_json_pairs("--new-arg", new_args),
    }  # fmt: skip
    is_filtered = bool(prefix or pipeline or status)
    if (run is None) != is_filtered:
        raise Validation("name a RUN, or choose runs by --prefix, --pipeline or --status")
    if run is None and new_key is not None:
        raise Validation("--key names one fork, and this makes several", hint="omit --key")
    with session.open() as manager:
        if run is not None:
            plans = [plan_fork(manager, run, step, new_key=new_key, **changes)]
        else:
            plans = list(plan_forks(manager, step, prefix=prefix, pipeline=pipeline, status=status or "", **changes))
            if not plans:
                raise NotFound(f"no such run has a step {step}", hint="kedge runs list takes the same options")
        there = manager.catalogue.newest([plan.fork for plan in plans]).keys()
        for plan in plans if is_applied else ():
            fork(manager, plan)
    documents = [{**plan.to_json(), "applied": is_applied} for plan in plans]
    if run is not None:
        session.answer(documents[0], session.in_this_store(_text(plans[0], is_applied)))
        return
    made = "made" if is_applied else "would make"
    follows = "" if is_applied or len(there) == len(plans) else "; run it again with --apply"
    known = f" ({len(there):,} of {len(plans):,} exist)" if there else ""
    session.answer(
        {"forks": documents},
        *(session.in_this_store(_line(plan)) for plan in plans),
        f"{made} {count_of(len(plans) - len(there), 'fork')}{known}{follows}",
    )


def _line(plan: ForkPlan) -> str:
    return f"{safe(plan.run)} → {safe(plan.fork)}: {_counts(plan)}; {_follows(plan)}"


def _counts(plan: ForkPlan) -> str:
    return f"{count_of(len(plan.reused), 'step')} reused, {len(plan.again):,} to run again"


def _follows(plan: ForkPlan) -> str:
    if plan.queue:
        return f"a worker of queue {plan.queue} executes it"
    if plan.command:
        return f"kedge runs resume {plan.fork} starts: {safe(shlex.join(plan.command))}"
    return f"start its program under the key {plan.fork}"


def _text(plan: ForkPlan, is_applied: bool) -> str:
    lines = [f"{style('reused', 'good')}  {safe(path)}" for path in plan.reused]
    lines += [f"{style('again', 'warn')}   {safe(path)}" for path in plan.again]
    made = f"{plan.fork} is a fork of {plan.run}" if is_applied else f"would make {plan.fork}, a fork of {plan.run}"
    return "\n".join(
        [*lines, f"{made}: {_counts(plan)}; {_follows(plan)}" + ("" if is_applied else "; run it again with --apply")]
    )


@store_command("diff", json_keys='{"steps": [{path, verdict, reason, first, second}]}; first, second: checkpoint IDs')
@click.argument("first", type=JobName())
@click.argument("second", type=JobName())
def diff_command(session: Session, first: str, second: str) -> None:
    """Compare the steps of two runs: inputs, versions and results. The last line counts what is the same.

    `kedge diff CHECKPOINT CHECKPOINT` shows how two results differ.
    """
    from kedge.pipeline.comparison import compare_runs

    with session.open() as manager:
        steps = list(compare_runs(manager, first, second))
    session.answer_list("steps", steps, _STEPS, lambda step: step.to_json(), empty="neither run has steps")
    if steps and not session.as_json:
        click.echo(_summary(steps))


def _summary(steps: Sequence[StepComparison]) -> str:
    counts = Counter(step.verdict for step in steps)
    if counts["same"] == len(steps):
        return f"the results are the same: {count_of(len(steps), 'step')}"
    counted = [f"{count_of(count, 'step')} {verdict}" for verdict, count in counts.items()]
    return f"the runs differ: {', '.join(counted)}"
