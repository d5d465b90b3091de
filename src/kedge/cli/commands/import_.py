"""`kedge import`: imports checkpoints of older systems, and reports what was lost."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

import click

from kedge.cli.command import Session, store_command
from kedge.cli.output import emit
from kedge.errors import Corrupted
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, print_labelled, style

if TYPE_CHECKING:
    from kedge.legacy.importers import Options, Report

_FORMATS = (
    "auto", "artemis", "jobs", "geo-core", "geo-stages", "geo-tiles", "geo-db", "geo-memory", "langgraph-sqlite",
    "langgraph-postgres", "json-dir",
)  # fmt: skip
_SHOWN = 20  # findings of a kind on a terminal; --json has all of them
_LOOKS = {"corrupted": ("✗", "bad"), "lossy": ("!", "warn"), "skipped": ("-", "dim")}


@store_command(
    "import",
    note="The import never writes to the source, follows no links in it and runs no code from it. Importing again adds "
    "what is new; an interrupted import continues. docs/coming-from.md says what each format becomes.",
    json_keys='{"dry_run", "imported", "present": imported before, "jobs", "formats": {name: count}, "skipped", '
    '"lossy", "corrupted": [{source, reason, paths}], "counts": {skipped, lossy, corrupted}, '
    '"files": {source: whole, part or skipped}, '
    '"seconds"}. With --watch '
    "one document per round. Exit code 6 when something is corrupted; the rest is imported.",
)
@click.argument("source", metavar="DIR_OR_URL")
@click.option(
    "--from",
    "form",
    type=click.Choice(_FORMATS),
    default="auto",
    metavar="FORMAT",
    help=f"Import only this format: {', '.join(_FORMATS)}.  [default: auto, by content]",
)
@click.option("--job-prefix", default="", help="Prefix for the names of all imported jobs.")
@click.option("--dry-run", is_flag=True, help="Only report what would be imported, and what would be lost.")
@click.option(
    "--allow",
    multiple=True,
    metavar="module.Class",
    help="Rebuild this class from LangGraph's values; for pickles, leave it out of the report. Repeatable.",
)
@click.option(
    "--files", default=".", metavar="DIR", help="The directory of the files that a database refers to.  [default: .]"
)
@click.option("--watch", is_flag=True, help="Keep importing what is new, until Ctrl-C.")
@click.option("--every", default=2.0, metavar="SECONDS", help="With --watch: the time between two looks.  [default: 2]")
def import_command(
    session: Session,
    source: str,
    form: str,
    job_prefix: str,
    dry_run: bool,
    allow: tuple[str, ...],
    files: str,
    watch: bool,
    every: float,
) -> None:
    """Import the checkpoints of an older system from a directory or a database.

    Formats are detected by content and may be mixed. IDs, times and parents are preserved.
    """
    from kedge.legacy.importers import Options, look

    if watch and dry_run:
        raise click.UsageError("--watch and --dry-run cannot be combined")
    options = Options(form, _prefix(job_prefix), allow, files, is_watching=watch)
    began = time.monotonic()
    with progress("looking", unit="checkpoints") as report:
        plan = look(source, options, progress=report)
    if dry_run:
        _answer(session, plan, is_plan=True, seconds=time.monotonic() - began)
        _end(plan)
    if not session.as_json:
        _say_plan(plan)
    done = _bring(session, source, options, plan.imported, began)
    if not watch:
        _end(done)
    while True:
        time.sleep(max(0.05, every))
        _bring(session, source, options, 0, time.monotonic(), only_news=True)


def _bring(
    session: Session, source: str, options: Options, expected: int, began: float, *, only_news: bool = False
) -> Report:
    from kedge.legacy.importers import bring

    with session.open(create=True) as manager, progress("importing", unit="checkpoints") as report:
        done = bring(source, manager, options, expected=expected, progress=report)
    if done.imported or not only_news:
        _answer(session, done, is_plan=False, seconds=time.monotonic() - began)
    return done


def _end(report: Report) -> NoReturn:
    click.get_current_context().exit(Corrupted.exit_code if report.counts["corrupted"] else 0)  # type: ignore[index]


def _prefix(text: str) -> str:
    from kedge.model import parse_name

    return parse_name("job prefix", text) if text else ""


def _answer(session: Session, report: Report, *, is_plan: bool, seconds: float) -> None:
    if session.as_json:
        emit(_report_json(report, is_plan=is_plan, seconds=seconds))
        return
    _print_findings(report)
    word = "would be imported" if is_plan else "imported"
    jobs = count_of(len(report.jobs), "job")
    known = f", {report.present:,} {'was' if report.present == 1 else 'were'} there already" if report.present else ""
    click.echo(f"{style('✓', 'good')} {count_of(report.imported, 'checkpoint')} {word}, {jobs}{known}")
    outcomes = Counter(report.sources.values())
    words = {"whole": "taken whole", "part": "in part", "skipped": "skipped"}
    files = ", ".join(f"{outcomes[outcome]:,} {word}" for outcome, word in words.items())  # type: ignore[index]
    click.echo(style(f"  files: {files}", "dim"))


def _report_json(report: Report, *, is_plan: bool, seconds: float) -> dict[str, object]:
    findings = {
        word: [
            {"source": f.source, "reason": f.reason, "paths": list(f.paths)}
            for f in report.findings
            if f.verdict == word
        ]
        for word in ("skipped", "lossy", "corrupted")
    }
    return {
        "dry_run": is_plan,
        "imported": report.imported,
        "present": report.present,
        "jobs": len(report.jobs),
        "formats": dict(report.by_format),
        **findings,
        "counts": {word: report.counts[word] for word in findings},  # type: ignore[index]
        "files": {source: str(outcome) for source, outcome in sorted(report.sources.items())},
        "seconds": round(seconds, 3),
    }


def _say_plan(plan: Report) -> None:
    formats = ", ".join(f"{count:,} {name}" for name, count in sorted(plan.by_format.items()))
    click.echo(
        style(f"found {count_of(plan.imported, 'checkpoint')}: {formats or 'nothing to import'}", "dim"), err=True
    )
    lost = [f"{count:,} {verdict}" for verdict, count in sorted(plan.counts.items())]
    if lost:
        click.echo(style(f"not all of it will come over as it was: {', '.join(lost)}; see below", "dim"), err=True)


def _print_findings(report: Report) -> None:
    for word, (mark, look) in _LOOKS.items():
        findings = [finding for finding in report.findings if finding.verdict == word]
        for finding in findings[:_SHOWN]:
            places = (
                f" ({', '.join(finding.paths[:8])}{', …' if len(finding.paths) > 8 else ''})" if finding.paths else ""
            )
            print_labelled(mark, look, f"{word}: {finding.source}: {finding.reason}{places}")
        left = report.counts[word] - min(len(findings), _SHOWN)  # type: ignore[index]
        if left > 0:
            click.echo(style(f"  … {left:,} more {word}: --json lists them", "dim"))
