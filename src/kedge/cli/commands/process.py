"""`kedge process`: checkpoints of processes without a container."""

from __future__ import annotations

import click

from kedge.cli.session import Number, Session, emit, pass_on, shared_options, store_command
from kedge.terminal.tables import print_facts
from kedge.terminal.text import safe, size

from .container_checkpoint import chosen_options, dump_options, gpu_option, list_kept


@store_command("checkpoint", json_keys='{"checkpoint": {…}, "phases_ms": {dump, files, store}, "frozen_ms": …}')
@click.argument("pid")
@click.option("--key", metavar="NAME", required=True, help="Under which name it is kept.")
@click.option("--leave-running", is_flag=True, help="Let it run on afterwards.")
@gpu_option
@dump_options
def checkpoint_command(session: Session, pid: str, key: str, leave_running: bool, gpu: str, **options: bool) -> None:
    """Checkpoint process PID and its descendants into the store, with the files they have open for writing."""
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.processes import ProcessSource, parse_pid

    with session.open(create=True) as manager:
        request = Request(key, leave_running=leave_running, options=chosen_options(options))
        made = make_checkpoint(manager, ProcessSource.of(parse_pid(pid)), request, companions=[GpuMemory(gpu)])
    if session.as_json:
        emit(
            {
                "checkpoint": made.checkpoint.to_json(),
                "phases_ms": dict(made.phases_ms),
                "frozen_ms": made.frozen_ms,
            }
        )
        return
    print_facts(
        [
            ("checkpoint", made.checkpoint.id),
            ("size", f"{size(made.checkpoint.size_bytes)}, {size(made.checkpoint.stored_bytes)} of it new"),
            ("phases", ", ".join(f"{name} {ms:.0f} ms" for name, ms in made.phases_ms.items())),
        ]
    )


@store_command("run", json_keys="none: what the command writes is what comes out")
@click.option("--key", metavar="NAME", required=True, help="Under which name it is kept.")
@click.option("--every", "every_s", type=float, metavar="SECONDS", help="Keep a checkpoint this often.")
@click.option("--fresh", is_flag=True, help="Start anew, whatever is kept.")
@click.option("--keep", is_flag=True, help="Keep the checkpoints also when the command has ended well.")
@gpu_option
@dump_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run_command(
    session: Session,
    key: str,
    every_s: float | None,
    fresh: bool,
    keep: bool,
    gpu: str,
    command: tuple[str, ...],
    **options: bool,
) -> None:
    """Run COMMAND (behind --), or restore it from the last checkpoint under that key.

    SIGTERM and Ctrl-C checkpoint it and end with exit status 75; the same command line resumes it. With --every it
    also survives being killed. When it ends by itself, its exit status is ours; after 0 nothing stays kept.
    """
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.supervisor import Supervision

    with session.open(create=True) as manager:
        companions = [GpuMemory(gpu)]
        work = Supervision(manager, key, every_s, chosen_options(options), companions, say=_say, keep=keep)
        status = work.run(command, fresh=fresh)
    click.get_current_context().exit(status)


@store_command("restore", json_keys='{"pid": …, "checkpoint": …, "phases_ms": {load, files, restore}}')
@click.argument("name", metavar="KEY|ID")
@gpu_option
def restore_command(session: Session, name: str, gpu: str) -> None:
    """Restore processes and leave them to themselves: the newest sound checkpoint of KEY, or the one with that ID.

    Files that they had open for writing are put back first. What they write to pipes, such as those of `process run`,
    comes out of this command's own streams. To watch over them, use kedge process run --key KEY instead.
    """
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.processes import ProcessTarget
    from kedge.containers.restore import restore_newest

    with session.open() as manager:
        restored = restore_newest(
            manager,
            "process",
            name,
            lambda taken: ProcessTarget.of(taken, {1: 1, 2: 2}),
            companions=[GpuMemory(gpu)],
        )
    facts = {"pid": restored.pid, "checkpoint": restored.checkpoint.id, "phases_ms": dict(restored.phases_ms)}
    if session.as_json:
        emit(facts)
        return
    phases = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in restored.phases_ms.items())
    print_facts([("pid", str(restored.pid)), ("checkpoint", restored.checkpoint.id), ("phases", phases)])


def _say(text: str) -> None:
    click.echo(f"kedge: {safe(text)}", err=True)


@store_command("list", json_keys='{"checkpoints": [{…}]}, oldest first')
@click.argument("key", default="")
@click.option("--limit", type=Number(1), default=20, help="At most this many of each key.  [default: 20]")
def list_command(session: Session, key: str, limit: int) -> None:
    """List what is kept of processes: of KEY, or of all."""
    list_kept(session, "process", "processes", key, limit)


@store_command("hibernate", json_keys='{"pid": …, "seconds": …}')
@click.argument("pid")
def hibernate_command(session: Session, pid: str) -> None:
    """Give the GPU of process PID back: its memory there moves into the process, which waits until it is woken.

    Nothing is stored: this is for several jobs that take turns on one GPU.
    """
    from kedge.containers.gpu.memory import hibernate
    from kedge.containers.processes import parse_pid

    _tell_turn(session, pid, hibernate(parse_pid(pid)), "hibernates")


@store_command("wake", json_keys='{"pid": …, "seconds": …}')
@click.argument("pid")
def wake_command(session: Session, pid: str) -> None:
    """Let process PID, which hibernates, go on on its GPU."""
    from kedge.containers.gpu.memory import wake
    from kedge.containers.processes import parse_pid

    _tell_turn(session, pid, wake(parse_pid(pid)), "is awake")


def _tell_turn(session: Session, pid: str, seconds: float, what: str) -> None:
    if session.as_json:
        emit({"pid": int(pid), "seconds": round(seconds, 4)})
    else:
        click.echo(f"process {pid} {what} ({seconds:.2f} s)")


process_command = click.Group(
    "process",
    commands=[run_command, checkpoint_command, restore_command, list_command, hibernate_command, wake_command],
    callback=pass_on,
    params=shared_options(),
    help="Checkpoint and restore processes without a container. Needs root and CRIU: kedge container doctor.",
    epilog="JSON: kedge process COMMAND --help says what each one answers",
)
