"""`kedge cleanup`: a retention policy; its plan is shown, and executed only with --apply."""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self

import click

from kedge.cli.command import Number, Session, apply_option, store_command
from kedge.cli.names import JobName, require_job
from kedge.cli.output import emit_lists
from kedge.cli.pairs import parse_pairs
from kedge.terminal.progress import Report, progress
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, count_of, size, style

if TYPE_CHECKING:
    from kedge.care.retention import RetentionPolicy
    from kedge.care.review import Verdict
    from kedge.manager import CheckpointManager

_COUNT = Number(1)
_SHOWN = 40  # rows of a plan on screen; --json has all


@store_command(
    "cleanup",
    json_keys='{"job": … or null, "policy": {…}, "applied": bool, "delete": [as in list], '
    '"keep": [as in list, with "reasons"], "frees_bytes": …}; with --unset only {"job", "policy": null}.',
)
@click.argument("job", required=False, type=JobName())
@click.option("--all-jobs", is_flag=True, help="Clean up every job except runs and Kedge's own records.")
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N.")
@click.option(
    "--keep-last-per-level", metavar="LEVEL=N", multiple=True, help="Keep the newest N of a level; repeatable."
)
@click.option(
    "--keep-within", metavar="TIME", help="Keep those at most this much older than the newest one: 90m, 36h, 7d."
)
@click.option(
    "--hourly", type=_COUNT, metavar="N", help="Keep the newest of each hour, for the last N hours that have any."
)
@click.option("--daily", type=_COUNT, metavar="N", help="The same for days.")
@click.option("--weekly", type=_COUNT, metavar="N", help="The same for weeks.")
@click.option("--monthly", type=_COUNT, metavar="N", help="The same for months.")
@click.option("--keep-tag", "keep_tags", metavar="K[=V]", multiple=True, help="Keep those with this tag; repeatable.")
@click.option("--min-per-level", metavar="LEVEL=N", multiple=True, help="Keep at least N of a level; repeatable.")
@apply_option("Delete. Without this, only show the plan.")
@click.option("--set", "is_set", is_flag=True, help="Also store the policy with JOB: it is applied after each save.")
@click.option("--unset", "is_unset", is_flag=True, help="Remove the stored policy of JOB.")
def cleanup_command(
    session: Session,
    job: str | None,
    all_jobs: bool,
    is_applied: bool,
    is_set: bool,
    is_unset: bool,
    **rules: object,
) -> None:
    """Delete the old checkpoints of JOB, except those that any of the rules keeps.

    Without rules, the policy stored with JOB applies. Pinned checkpoints, the newest one, and the ancestors of kept
    ones are always kept. `kedge gc` frees the space. Runs, queues and LLM records are cleaned up only if JOB names
    them: whatever is deleted there runs, and is paid for, again.
    """
    from kedge.care.records import needed_for

    if (job is None) != all_jobs:
        raise click.UsageError("give a JOB, or --all-jobs" if job is None else "JOB and --all-jobs cannot be combined")
    if all_jobs and (is_set or is_unset):
        raise click.UsageError("--set and --unset need one JOB")
    if is_set and is_unset:
        raise click.UsageError("--set and --unset cannot be combined")
    with session.open() as manager:
        stored = None if job is None else require_job(manager, job).retention
        if job is not None and is_unset:
            manager.set_retention(job, None)
            session.answer({"job": job, "policy": None}, f"{style(job, 'id')} no longer has a policy of its own")
            return
        policy = _policy(rules, stored)
        if job is not None and (needed := needed_for(manager.catalogue, job)):
            click.echo(style("warning:", "warn") + f" {job} is {needed}", err=True)
        if job is not None and is_set:
            manager.set_retention(job, policy)
        if session.as_json:
            _emit(manager, policy, job, is_applied)
            return
        outcome = Outcome(manager.review(policy, job=job))
        _print_plan(outcome, job)
        if is_applied and outcome.going:
            with progress("deleting", unit="checkpoints") as report:
                outcome = Outcome(manager.review(policy, job=job, dry_run=False), report, outcome.going)
    _print_outcome(outcome, is_applied)
    if is_set:
        click.echo(f"the policy is stored: it is applied after each save of {style(job or '', 'id')}")


def _policy(rules: dict[str, object], stored: str | None) -> RetentionPolicy:
    """The policy of the options; without any, the one stored with the job."""
    from kedge.care.retention import RetentionPolicy

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
    from kedge.errors import Validation

    counts: dict[str, int] = {}
    for level, count in parse_pairs(option, texts).items():
        if not count.isascii() or not count.isdigit():
            raise Validation(f"{option} {level}={count}: not a number", hint=f"write {option} {level}=5")
        counts[level] = int(count)
    return counts


class Outcome:
    """The totals of a review, and its newest verdicts."""

    def __init__(self, verdicts: Iterable[Verdict], report: Report | None = None, expected: int = 0) -> None:
        self.staying = self.going = self.frees_bytes = 0
        self.newest: deque[Verdict] = deque(maxlen=_SHOWN)  # by job and sequence
        for _, of_job in groupby(verdicts, key=lambda verdict: verdict.checkpoint.job):
            newest: list[Verdict] = []
            for verdict in of_job:
                if len(newest) < _SHOWN:
                    newest.append(verdict)
                if verdict.reasons:
                    self.staying += 1
                    continue
                self.going += 1
                self.frees_bytes += verdict.checkpoint.stored_bytes
                if report:
                    report(self.going, max(self.going, expected))
            self.newest.extend(reversed(newest))


class Spool:
    """Documents in a temporary file: written with the newest of each job first, read with the oldest first."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._offsets = array("Q")
        self._jobs = array("Q")  # where each begins among the offsets
        self._job = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, job: str, document: object) -> None:
        if job != self._job:
            self._job = job
            self._jobs.append(len(self._offsets))
        self._offsets.append(self._file.tell())
        self._file.write(json.dumps(document).encode() + b"\n")

    def __iter__(self) -> Iterator[object]:
        stops = [*self._jobs[1:], len(self._offsets)]
        for start, stop in zip(self._jobs, stops, strict=True):
            for n in range(stop - 1, start - 1, -1):
                self._file.seek(self._offsets[n])
                yield json.loads(self._file.readline())


def _emit(manager: CheckpointManager, policy: RetentionPolicy, job: str | None, is_applied: bool) -> None:
    """As `plan_json`, in bounded memory."""
    head = {"job": job, "policy": json.loads(policy.to_json()), "applied": is_applied}
    frees_bytes = 0
    with Spool() as going, Spool() as staying:
        for verdict in manager.review(policy, job=job, dry_run=not is_applied):
            document = verdict.checkpoint.to_json()
            if verdict.reasons:
                staying.add(verdict.checkpoint.job, {**document, "reasons": list(verdict.reasons)})
            else:
                going.add(verdict.checkpoint.job, document)
                frees_bytes += verdict.checkpoint.stored_bytes
        emit_lists({**head, "frees_bytes": frees_bytes}, {"delete": going, "keep": staying})


_COLUMNS: tuple[Column[Verdict], ...] = (
    Column("PLAN", lambda v: "keep" if v.reasons else "delete", is_whole=True, looks={"delete": "bad", "keep": "good"}),
    Column("JOB", lambda v: v.checkpoint.job, drop=2),
    Column("#", lambda v: str(v.checkpoint.seq), ">", "dim", is_whole=True),
    Column("ID", lambda v: v.checkpoint.id, look="id", is_whole=True),
    Column("AGE", lambda v: age(v.checkpoint.created_at), ">", is_whole=True, drop=3),
    Column("ADDED", lambda v: size(v.checkpoint.stored_bytes), ">", is_whole=True, drop=4),
    Column("WHY", lambda v: ", ".join(v.reasons), drop=1, least=10),
)


def _print_plan(outcome: Outcome, job: str | None) -> None:
    """Print deleted and kept checkpoints in one history, newest last; of a long history, the newest part."""
    if older := outcome.staying + outcome.going - len(outcome.newest):
        click.echo(style(f"… {count_of(older, 'older checkpoint')} (--json shows all)", "dim"))
    print_table([column for column in _COLUMNS if job is None or column.title != "JOB"], outcome.newest)


def _print_outcome(outcome: Outcome, is_applied: bool) -> None:
    count = count_of(outcome.going, "checkpoint")
    if not outcome.going:
        click.echo("nothing to delete")
    elif is_applied:
        click.echo(style(f"{count} deleted", "name") + f", {outcome.staying:,} kept; kedge gc frees the space")
    else:
        freed = f"up to {size(outcome.frees_bytes)}"
        click.echo(
            style(f"would delete {count}", "name") + f" ({freed}), keep {outcome.staying:,}; run it again with --apply"
        )
