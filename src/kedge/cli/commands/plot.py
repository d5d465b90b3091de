"""`kedge plot`: numbers in the metadata of checkpoints, as a curve."""

from __future__ import annotations

import sys

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.names import JobName
from kedge.terminal.text import columns, count_of, safe, style


@store_command(
    "plot",
    json_keys='{"metrics": […], "series": [{job, metric, points: [{seq, step, checkpoint, value}], best}]}',
)
@click.argument("jobs", metavar="JOB…", type=JobName(), nargs=-1, required=True)
@click.option("--metric", metavar="PATH", help="Which number: loss, eval.accuracy.  [default: the first]")
@click.option("--best", type=click.Choice(["min", "max"]), help="Also name the checkpoint with the lowest or highest.")
@click.option("--height", type=click.IntRange(3, 100), default=12, show_default=True, help="Lines of the curve.")
@click.option("--limit", type=Number(1), default=2000, show_default=True, help="Only the newest N of a job.")
def plot_command(
    session: Session, jobs: tuple[str, ...], metric: str | None, best: str | None, height: int, limit: int
) -> None:
    """Draw a number in the metadata of JOB's checkpoints over its history, several jobs in one picture."""
    from kedge.errors import NotFound, Validation
    from kedge.terminal.plot import MOST_SERIES, draw, legend, number
    from kedge.terminal.series import series_of

    if len(jobs) > MOST_SERIES:
        raise Validation(f"{len(jobs)} jobs given", hint=f"plot at most {MOST_SERIES} at once")
    with session.open() as manager:
        by_job = [series_of(manager, job, most=limit) for job in dict.fromkeys(jobs)]
    metrics = sorted({name for numbers in by_job for name in numbers})
    chosen = metric or next(iter(metrics), "")
    series = [numbers[chosen] for numbers in by_job if chosen in numbers]
    if not series:
        known = f"there are: {', '.join(safe(name) for name in metrics[:20])}" if metrics else "save with metadata="
        subject = f"number {safe(chosen)} in" if chosen else "number in"
        raise NotFound(f"job {', '.join(jobs)}: no {subject} the metadata", hint=known)
    goal = "max" if best == "max" else "min"
    best_of = {line.job: line.best(goal) if best else None for line in series}  # type: ignore[arg-type]
    if session.as_json:
        document = [
            {
                "job": line.job,
                "metric": line.metric,
                "points": [point.to_json() for point in line.points],
                "best": best_point.to_json() if (best_point := best_of[line.job]) else None,
            }
            for line in series
        ]
        session.answer({"metrics": metrics, "series": document})
        return
    click.echo(style(safe(chosen), "head") + "   " + "   ".join(legend(series)))
    for line in draw(series, columns() if sys.stdout.isatty() else 80, height):
        click.echo(line)
    for job, point in best_of.items():
        if point is not None:
            word = "lowest" if goal == "min" else "highest"
            click.echo(f"{job}: {word} {number(point.value)} at #{point.seq} {safe(point.step)}  {point.checkpoint}")
    if others := [safe(name) for name in metrics if name != chosen]:
        click.echo(style(f"--metric shows {count_of(len(others), 'other')}: {', '.join(others[:12])}", "dim"))
