"""`kedge runs`: what pipelines did; resuming, signalling and cancelling them."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from kedge.cli.command import Number, Session, apply_option, command_group, store_command
from kedge.cli.names import JobName
from kedge.cli.output import emit
from kedge.cli.pairs import parse_json
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import age, count_of, safe, style

from .runs_fork import chosen_runs, diff_command, fork_command
from .runs_watch import watch_command

if TYPE_CHECKING:
    from kedge.llm.bills import Bill
    from kedge.pipeline.history import Explanation, RunSummary
    from kedge.pipeline.items import FailedItem

_SHOWN_ITEMS = 20  # failed ones of a map
_LOOKS = {
    "error": "bad",
    "warning": "warn",
    "completed": "good",
    "ran": "good",
    "failed": "bad",
    "paused": "warn",
    "cancelled": "dim",
    "stale": "dim",
}


def _wait(wait: Mapping[str, str]) -> str:
    """What a run waits for; for an approval that was decided, by whom, and that the run can continue."""
    if "decision" in wait:
        why = f" ({wait['comment']})" if wait.get("comment") else ""
        follows = "the run can go on" if wait["decision"] == "approved" else "final"
        at = wait.get("decided_at", "")[:16].replace("T", " ")
        return f"{wait.get('name')} was {wait['decision']} by {wait.get('actor')} on {at} UTC{why}: {follows}"
    prompt = f": {wait['prompt']}" if wait.get("prompt") else ""
    return f"waits for {wait.get('for')} {wait.get('name')}{prompt}"


_RUNS: tuple[Column[RunSummary], ...] = (
    Column("RUN", lambda run: run.key, is_whole=True, look="name"),
    Column("STATUS", lambda run: "abandoned" if run.is_abandoned else str(run.status)),
    Column("PIPELINE", lambda run: run.pipeline or "", drop=2),
    Column("SESSIONS", lambda run: f"{run.sessions}", ">", drop=3),
    Column("UPDATED", lambda run: age(run.updated_at), drop=1),
    Column("NOTE", lambda run: "; ".join(map(_wait, run.waiting)) or run.error),
)
_STEPS: tuple[Column[Explanation], ...] = (
    Column("STEP", lambda step: step.path, is_whole=True, look="name"),
    Column("VERDICT", lambda step: step.verdict),
    Column("WHY", lambda step: step.reason),
    Column("CHECKPOINT", lambda step: step.checkpoint or ""),
)


def _execution_note(status: Mapping[str, object]) -> str:
    if pending := int(str(status["pending_approvals"])):
        return f"waits for {count_of(pending, 'approval')}"
    return str(status["current_checkpoint"] or "")


_EXECUTIONS: tuple[Column[Mapping[str, object]], ...] = (
    Column("EXECUTION", lambda status: str(status["execution_id"]), is_whole=True, look="name"),
    Column("STATE", lambda status: str(status["state"])),
    Column("WORKFLOW", lambda status: str(status["workflow_name"]), drop=2),
    Column("STEPS", lambda s: f"{s['completed_checkpoints']}/{s['total_checkpoints']}", ">", drop=3),
    Column("NOTE", _execution_note),
)


@store_command(
    "list",
    json_keys='{"runs": [{key, status, pipeline, version, sessions, steps_run, steps_reused, error, updated_at, '
    "is_abandoned, is_denied, waiting, progress, queue, parent}]}",
)
@click.argument("prefix", default="", type=JobName())
@click.option("--limit", type=Number(1), help="Show at most this many.")
@chosen_runs
def list_command(session: Session, prefix: str, limit: int | None, pipeline: str, status: str | None) -> None:
    """List the runs whose keys begin with PREFIX."""
    from kedge.pipeline.history import find_runs

    with session.open() as manager:
        runs = list(find_runs(manager, prefix, limit, pipeline=pipeline, status=status or ""))
    empty = "no such runs" if prefix or pipeline or status else "no runs yet"
    session.answer_list("runs", runs, _RUNS, lambda run: run.to_json(), empty=empty)


@store_command(
    "show",
    json_keys='{"run": as in list, "llm": null or as in llm stats, "steps": [{path, verdict, reason, checkpoint, '
    'seconds, attempts, llm}], "failed_items": [{map, key, error, attempts, checkpoint}], "log": […], '
    '"children": [as in list], "fork_of": null or {run, step}}',
)
@click.argument("run", type=JobName())
def show_command(session: Session, run: str) -> None:
    """Show a run and its steps."""
    from kedge.pipeline.fork import fork_of
    from kedge.pipeline.history import bills_of, children_of, explain, find_run, logs_of, run_of
    from kedge.pipeline.items import maps_of

    with session.open() as manager:
        fork = fork_of(manager, run)
        summary, steps, logs = find_run(manager, run), explain(manager, run), logs_of(manager, run)
        bills = bills_of(manager, run)
        children = [child for key in children_of(manager, run) if (child := run_of(manager, key)) is not None]
        failing = {items.path: list(items.failed.values()) for items in maps_of(manager, run) if items.failed}
    if session.as_json:
        lines = [{"at": line.timestamp, **line.metadata} for line in logs]
        shown = [{**step.to_json(), "llm": _bill_json(bills.get(step.path))} for step in steps]
        emit(
            {
                "run": summary.to_json(),
                "llm": _bill_json(bills.get("")),
                "steps": shown,
                "failed_items": [_failed_json(path, item) for path, items in failing.items() for item in items],
                "log": lines,
                "children": [child.to_json() for child in children],
                "fork_of": None if fork is None else {"run": fork[0], "step": fork[1]},
            }
        )
        return
    _print_summary(session, summary, bills, children, fork)
    click.echo()
    for line in logs:
        level = str(line.metadata.get("level", "info"))
        word = style(f"  {level}", _LOOKS.get(level, "dim")) if level != "info" else ""
        fields = line.metadata.get("fields")
        pairs = [f"{name}={value}" for name, value in fields.items()] if isinstance(fields, dict) else []
        text = safe(" ".join([str(line.metadata.get("text")), *pairs]))
        click.echo(style(age(line.created_at), "dim") + word + "  " + text)
    for step in steps:
        _print_step(step, bills, failing.get(step.path, []))


def _print_summary(
    session: Session,
    summary: RunSummary,
    bills: Mapping[str, Bill],
    children: Sequence[RunSummary],
    fork: tuple[str, str] | None,
) -> None:
    steps_run = count_of(summary.steps_run, "step")
    sessions = f"{summary.sessions}; the newest ran {steps_run}, reused {summary.steps_reused:,}"
    print_facts(
        [
            ("run", summary.key),
            ("status", session.in_this_store(_status(summary))),
            ("pipeline", summary.pipeline or ""),
            ("parent", summary.parent),
            ("fork of", "" if fork is None else f"{fork[0]}, from {fork[1]}"),
            ("version", summary.version),
            ("sessions", sessions),
            ("updated", age(summary.updated_at)),
            ("progress", _progress(summary)),
            ("models", str(bills.get("", ""))),
            *[("approval" if "decision" in wait else "waiting", _wait(wait)) for wait in summary.waiting],
            *[("child", f"{child.key} ({child.status})") for child in children],
            ("error", summary.error),
        ]
    )


def _print_step(step: Explanation, bills: Mapping[str, Bill], failed: Sequence[FailedItem]) -> None:
    from kedge.pipeline.progress import duration

    depth = "  " * step.path.count("/")
    took = "" if step.seconds is None else style(f"  {duration(step.seconds)}", "dim")
    tries = f"  {step.attempts} attempts" if step.attempts > 1 else ""
    name = safe(step.path.rpartition("/")[2] or step.path)
    note = f"  {safe(step.reason)}" if step.verdict in ("failed", "map") else ""
    money = style(f"  {bills[step.path]}", "dim") if step.path in bills else ""
    click.echo(f"{depth}{style(step.verdict, _LOOKS.get(step.verdict, 'dim'))}  {name}{took}{money}{tries}{note}")
    for item in failed[:_SHOWN_ITEMS]:
        click.echo(f"{depth}  {style('failed', 'bad')}  {safe(item.key)}  {safe(item.error)}")
    if (more := len(failed) - _SHOWN_ITEMS) > 0:
        click.echo(f"{depth}  … {count_of(more, 'more failed item')} (--json shows all)")


@store_command("explain", json_keys='{"run": …, "steps": as in show}')
@click.argument("run", type=JobName())
def explain_command(session: Session, run: str) -> None:
    """Explain why each step ran, was reused, or is stale.

    Shows the newest session. A step runs again if its path, an input or its version has changed. To run one again,
    delete its checkpoint.
    """
    from kedge.pipeline.history import explain

    with session.open() as manager:
        steps = explain(manager, run)
    if session.as_json:
        emit({"run": run, "steps": [step.to_json() for step in steps]})
    else:
        print_table(_STEPS, steps)


@store_command("resume", json_keys='{"run": …, "argv": […], "cwd": …} with --print; else what the program itself says')
@click.argument("run", type=JobName())
@click.option("--print", "only_print", is_flag=True, help="Only print the command that would be run.")
@click.option("--retry-failed", is_flag=True, help="Also run the steps whose failure the pipeline handled.")
@click.option("--retry", "steps", metavar="STEP", multiple=True, help="Of these steps, run only this one; repeatable.")
@click.option("--item", "items", metavar="MAP/KEY", multiple=True, help="Of failed items, run only this; repeatable.")
def resume_command(
    session: Session, run: str, only_print: bool, retry_failed: bool, steps: tuple[str, ...], items: tuple[str, ...]
) -> None:
    """Resume a run: start its program again, with its arguments.

    A step whose failure the pipeline handled stays failed, unless you pass --retry-failed.

    The command and its directory were recorded in the store when the run was last started, so anyone who can write to
    the store can change them. If others can (a service, a database, a shared directory), Kedge shows the command and
    asks first.
    """
    from kedge.pipeline import final_failures
    from kedge.pipeline.history import check_own_program, find_run
    from kedge.pipeline.items import failed_items, retry_items
    from kedge.pipeline.origin import command_of
    from kedge.pipeline.owner import refuse_owned

    with session.open() as manager:
        record = find_run(manager, run)
        check_own_program(manager, record)
        if not only_print:
            refuse_owned(manager, record.key)
        if items:
            failed_items(manager, run, items)  # an unknown one is refused before anything is asked for
        if retry_failed or steps:
            for path in final_failures.retry_failed(manager, run, steps):
                click.echo(f"{safe(path)} will run again", err=True)
        argv, cwd = command_of(manager, run)
        if items:
            retry_items(manager, run, items)
        store = manager.url
    if only_print:
        session.answer(
            {"run": run, "argv": argv, "cwd": cwd}, f"cd {safe(shlex.quote(cwd))} && {safe(shlex.join(argv))}"
        )
        return
    confirm_foreign(run, argv, cwd, store)
    start_again(session, run, argv, cwd, store)


def confirm_foreign(run: str, argv: list[str], cwd: str, store: str) -> None:
    """Ask before a command runs that somebody else may have written into the store; refuse where nobody can answer."""
    from kedge.errors import NotAllowed

    if _is_own(store):
        return
    if not sys.stdin.isatty():
        raise NotAllowed(
            f"run {run}: others can write its store, so its command is not run without your consent",
            hint=f"read it with kedge runs resume {run} --print, then start it yourself",
        )
    click.echo(f"Others can write this store. Run {run} was started by this command:", err=True)
    click.echo(f"  cd {safe(shlex.quote(cwd))} && {safe(shlex.join(argv))}", err=True)
    click.confirm("Run it on this machine?", default=False, abort=True, err=True)


def _is_own(store: str) -> bool:
    """Whether nobody but the user (and root) can write the store."""
    from kedge.urls import directory_of

    directory = directory_of(store)
    if directory is None:
        return False
    about = directory.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def start_again(session: Session, run: str, argv: list[str], cwd: str, store: str) -> NoReturn:
    """Become the program of a run. The store is the one that has the run, whatever the environment says here."""
    from kedge.urls import reachable

    click.echo(f"resuming {run}: {safe(' '.join(argv))}", err=True)
    sys.stdout.flush()
    os.environ["KEDGE_STORE"] = reachable(store)
    os.chdir(cwd)
    session.export_key()
    program = shutil.which(argv[0]) or sys.executable
    os.execv(program, argv)  # nosec B606 # the same program, by its arguments, without a shell


@store_command("cancel", json_keys='{"run": …, "cancelled": true, or false while its owner still works on a step}')
@click.argument("run", type=JobName())
def cancel_command(session: Session, run: str) -> None:
    """Cancel a run. A running one has its grace period to stop; then its current step is ended.

    Results of finished steps stay in the store. A step in a thread cannot be ended: the run stops after it.
    """
    from kedge.pipeline.cancellation import cancel

    with session.open() as manager:
        is_done = cancel(manager, run)
    session.answer(
        {"run": run, "cancelled": is_done},
        f"{run} is cancelled" if is_done else f"{run} is running and will stop soon",
    )


@store_command("signal", json_keys='{"run": …, "name": …, "message": ID}')
@click.argument("run", type=JobName())
@click.argument("name")
@click.argument("value", default="null", metavar="[JSON]")
@click.option("--ahead", is_flag=True, help="Send it even if the run is not waiting for it yet.")
def signal_command(session: Session, run: str, name: str, value: str, ahead: bool) -> None:
    """Send a value to a run that is waiting for it in run.signal(NAME)."""
    from kedge.errors import NotFound
    from kedge.pipeline.history import find_run
    from kedge.pipeline.inbox import send

    sent = parse_json("the value", value)
    with session.open() as manager:
        waited = [wait["name"] for wait in find_run(manager, run).waiting if wait.get("for") == "signal"]
        if name not in waited and not ahead:
            raise NotFound(
                f"run {run} does not wait for signal {name}",
                hint=(f"it waits for: {', '.join(waited)}; " if waited else "")
                + "--ahead sends it before the run asks",
            )
        message = send(manager, run, name, sent)
    session.answer({"run": run, "name": name, "message": message}, f"sent {name} to {run}")


@store_command("delete", json_keys='{"run": …, "deleted": how many records}')
@click.argument("run", type=JobName())
@apply_option("Delete. Without this, only say what would be deleted.")
def delete_command(session: Session, run: str, is_applied: bool) -> None:
    """Delete a run: its status, the results of its steps, and the messages to it.

    Afterwards, a run with the same key starts from scratch. `kedge gc` frees the space.
    """
    from kedge.pipeline.history import delete_run, find_run

    with session.open() as manager:
        summary = find_run(manager, run)
        if not is_applied:
            job = manager.catalogue.job(run)
            count = 0 if job is None else job.checkpoints
            text = f"would delete run {run} ({summary.status}, {count_of(count, 'record')}); run it again with --apply"
            session.answer({"run": run, "deleted": 0}, text)
            return
        count = delete_run(manager, run)
    session.answer({"run": run, "deleted": count}, f"run {run} is deleted ({count_of(count, 'record')})")


def _failed_json(path: str, item: FailedItem) -> dict[str, object]:
    return {"map": path, **{name: getattr(item, name) for name in ("key", "error", "attempts", "checkpoint")}}


def _bill_json(bill: Bill | None) -> dict[str, object] | None:
    return None if bill is None else bill.to_json()


def _status(run: RunSummary) -> str:
    if run.is_denied:
        return f"{run.status}: a denial is final; use another key to start anew"
    if not run.is_abandoned:
        return str(run.status)
    follows = f"resume it with kedge runs resume {run.key}"
    if run.queue:
        follows = f"a worker of queue {run.queue} takes it over, unless kedge queue list {run.queue} --dead shows it"
    return f"{run.status}, its process is gone: {follows}"


def _progress(run: RunSummary) -> str:
    if run.progress is None:
        return ""
    done, total = run.progress.get("done"), run.progress.get("total")
    return f"{done:,} of {total:,}" if done is not None and total is not None else f"{done}"


@store_command(
    "executions",
    json_keys='{"executions": [{execution_id, correlation_id, workflow_name, state, current_checkpoint, started_at, '
    "completed_at, total_checkpoints, completed_checkpoints, failed_checkpoints, pending_approvals}]}",
)
@click.option(
    "--state", type=click.Choice(["running", "paused", "completed", "failed"]), help="Only those in this state."
)
@click.option("--limit", type=Number(1), help="Show at most this many.")
@click.option("--after", metavar="EXECUTION", help="Continue listing after this execution.")
def executions_command(session: Session, state: str | None, limit: int | None, after: str | None) -> None:
    """List workflow executions, whose steps are performed by other programs and people."""
    from kedge.process.workflow import Workflows

    with session.open() as manager:
        executions = Workflows(manager).list_executions(state, limit=limit, after=after)
    empty = "no executions" + (f" are {state}" if state else " yet")
    session.answer_list("executions", executions, _EXECUTIONS, dict, empty=empty)


runs_command = command_group(
    "runs",
    [
        list_command,
        show_command,
        watch_command,
        resume_command,
        explain_command,
        fork_command,
        diff_command,
        cancel_command,
        signal_command,
        delete_command,
        executions_command,
    ],
    text="List, show, watch, explain, resume, fork, compare, signal, cancel and delete runs of pipelines.",
)
