"""`holdfast cleanup`: a retention policy, its plan shown first, executed only when told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from holdfast.asjson import plan_json

from .naming import JobName, require_job
from .pairs import parse_pairs
from .progress import progress
from .session import Number, Session, emit, store_command
from .tables import Column, print_table
from .text import age, count_of, size, style

if TYPE_CHECKING:
    from holdfast.retention import Plan, RetentionPolicy

_COUNT = Number(1)
_SHOWN = 40  # rows of a plan on screen; --json has all


@store_command(
    "cleanup",
    json_keys='{"job": … or null, "policy": {…}, "applied": bool, "delete": [as in list], '
    '"keep": [as in list, with "reasons"], "frees_bytes": …}; with --unset only {"job", "policy": null}.',
)
@click.argument("job", required=False, type=JobName())
@click.option("--all-jobs", is_flag=True, help="Every job instead of one.")
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N.")
@click.option(
    "--keep-last-per-level", metavar="LEVEL=N", multiple=True, help="Keep the newest N of a level; repeatable."
)
@click.option("--keep-within", metavar="TIME", help="Keep what is younger, seen from the newest: 90m, 36h, 7d, 2w.")
@click.option("--hourly", type=_COUNT, metavar="N", help="Keep the newest of each of the last N hours that have any.")
@click.option("--daily", type=_COUNT, metavar="N", help="… of the last N days.")
@click.option("--weekly", type=_COUNT, metavar="N", help="… of the last N weeks.")
@click.option("--monthly", type=_COUNT, metavar="N", help="… of the last N months.")
@click.option("--keep-tag", "keep_tags", metavar="K[=V]", multiple=True, help="Keep what has this tag; repeatable.")
@click.option("--min-per-level", metavar="LEVEL=N", multiple=True, help="Keep at least N of a level; repeatable.")
@click.option("--apply", "--yes", "-y", "is_applied", is_flag=True, help="Delete. Without it, only the plan is shown.")
@click.option("--set", "is_set", is_flag=True, help="Also store the policy: it is applied after each save of JOB.")
@click.option("--unset", "is_unset", is_flag=True, help="Forget the stored policy of JOB.")
def cleanup_command(
    session: Session,
    job: str | None,
    all_jobs: bool,
    is_applied: bool,
    is_set: bool,
    is_unset: bool,
    **rules: object,
) -> None:
    """Delete the old checkpoints of JOB and keep what any of the rules keeps.

    Without rules, the policy stored for JOB is used. Pinned checkpoints, the newest one and the ancestors
    of what stays are always kept. Space comes back with `holdfast gc`.
    """
    if (job is None) != all_jobs:
        raise click.UsageError("give a JOB, or --all-jobs" if job is None else "JOB and --all-jobs exclude each other")
    if all_jobs and (is_set or is_unset):
        raise click.UsageError("--set and --unset need one JOB")
    if is_set and is_unset:
        raise click.UsageError("--set and --unset exclude each other")
    with session.open() as manager:
        stored = None if job is None else require_job(manager, job).retention
        if job is not None and is_unset:
            manager.set_retention(job, None)
            if session.as_json:
                emit({"job": job, "policy": None})
            else:
                click.echo(f"{style(job, 'id')} has no policy of its own any more")
            return
        policy = _policy(rules, stored)
        if job is not None and is_set:
            manager.set_retention(job, policy)
        plan = manager.apply(policy, job=job)
        if not session.as_json:
            _print_plan(plan)
        if is_applied and plan.delete:
            with progress("deleting", unit="checkpoints") as report:
                plan = manager.apply(policy, job=job, dry_run=False, progress=report)
    if session.as_json:
        emit(plan_json(plan, is_applied=is_applied))
        return
    _print_outcome(plan, is_applied)
    if is_set:
        click.echo(f"the policy is stored: it is applied after each save of {style(job or '', 'id')}")


def _policy(rules: dict[str, object], stored: str | None) -> RetentionPolicy:
    """The policy of the options; without any, the one stored with the job."""
    from holdfast.retention import RetentionPolicy

    given: dict[str, Any] = {name: value for name, value in rules.items() if value}
    for name in ("keep_last_per_level", "min_per_level"):
        if name in given:
            given[name] = _levels("--" + name.replace("_", "-"), given[name])
    if given:
        return RetentionPolicy(**given)
    if stored is None:
        raise click.UsageError("say what to keep, for example --keep-last 10")
    return RetentionPolicy.from_json(stored)


def _levels(option: str, texts: Sequence[str]) -> dict[str, int]:
    from holdfast.errors import Validation

    counts: dict[str, int] = {}
    for level, count in parse_pairs(option, texts).items():
        if not count.isascii() or not count.isdigit():
            raise Validation(f"{option} {level}={count}: not a number", hint=f"write {option} {level}=5")
        counts[level] = int(count)
    return counts


def _print_plan(plan: Plan) -> None:
    """Deleted and kept ones in one history, newest last; of a long one, the newest part."""
    rows = [(c, "delete", "") for c in plan.delete]
    rows += [(kept.checkpoint, "keep", ", ".join(kept.reasons)) for kept in plan.keep]
    rows.sort(key=lambda row: (row[0].job, row[0].seq))
    shown = rows[-_SHOWN:]
    if len(shown) < len(rows):
        click.echo(style(f"… {count_of(len(rows) - len(shown), 'older checkpoint')} (--json shows all)", "dim"))
    print_table(
        (
            Column("PLAN", is_whole=True, looks={"delete": "bad", "keep": "good"}),
            Column("JOB", drop=2),
            Column("#", ">", "dim", is_whole=True),
            Column("ID", look="id", is_whole=True),
            Column("AGE", ">", is_whole=True, drop=3),
            Column("ADDED", ">", is_whole=True, drop=4),
            Column("WHY", drop=1, least=10),
        ),
        [
            (
                what,
                c.job if plan.job is None else "",
                str(c.seq),
                c.id,
                age(c.created_at),
                size(c.stored_bytes),
                why,
            )
            for c, what, why in shown
        ],
    )


def _print_outcome(plan: Plan, is_applied: bool) -> None:
    count = count_of(len(plan.delete), "checkpoint")
    if not plan.delete:
        click.echo("nothing to delete")
    elif is_applied:
        click.echo(style(f"{count} deleted", "name") + f", {len(plan.keep):,} kept; holdfast gc gives back the space")
    else:
        freed = f"up to {size(plan.frees_bytes)}"
        click.echo(style(f"would delete {count}", "name") + f" ({freed}), keep {len(plan.keep):,}; do it with --apply")
