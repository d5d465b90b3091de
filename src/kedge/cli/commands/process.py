"""`kedge process`: checkpoints of processes without a container."""

from __future__ import annotations

import click

from kedge.cli.command import Number, Session, command_group, store_command
from kedge.cli.containers import (
    answer_checkpointed,
    answer_restored,
    chosen_options,
    dump_options,
    gpu_option,
    list_checkpoints,
)
from kedge.terminal.text import safe


@store_command("checkpoint", json_keys="as for kedge container checkpoint")
@click.argument("pid")
@click.option("--key", metavar="NAME", required=True, help="The key of its checkpoints.")
@click.option("--leave-running", is_flag=True, help="Let it continue afterwards.")
@gpu_option
@dump_options
def checkpoint_command(session: Session, pid: str, key: str, leave_running: bool, gpu: str, **options: bool) -> None:
    """Checkpoint process PID and its descendants. Files that they have open for writing are included."""
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.processes import ProcessSource, parse_pid

    with session.of_memory().open(create=True) as manager:
        request = Request(key, leave_running=leave_running, options=chosen_options(options))
        checkpointed = make_checkpoint(manager, ProcessSource.of(parse_pid(pid)), request, gpu=GpuMemory(gpu))
    answer_checkpointed(session, checkpointed, was_left_running=leave_running)


@store_command("run", json_keys="none: what the command writes is what comes out")
@click.option("--key", metavar="NAME", required=True, help="The key of its checkpoints.")
@click.option("--every", "every_s", type=float, metavar="SECONDS", help="Checkpoint it this often.")
@click.option("--fresh", is_flag=True, help="Start from the beginning, even if there is a checkpoint.")
@click.option("--keep", is_flag=True, help="Keep the checkpoints even if the command succeeds.")
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
    """Run COMMAND (after --), or resume it from its checkpoint.

    SIGTERM and Ctrl-C checkpoint it and exit with status 75; the same command line resumes it. With --every it also
    survives kill -9. When it exits by itself, its exit status is passed on; after status 0, its checkpoints are
    deleted.
    """
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.supervisor import Supervision

    with session.of_memory().open(create=True) as manager:
        work = Supervision(manager, key, every_s, chosen_options(options), GpuMemory(gpu), say=_say, keep=keep)
        status = work.run(command, fresh=fresh)
    click.get_current_context().exit(status)


def _say(text: str) -> None:
    click.echo(f"kedge: {safe(text)}", err=True)


@store_command("restore", json_keys='{"id": …, "pid": …, "checkpoint": …, "phases_ms": {load, files, restore}}')
@click.argument("name", metavar="KEY|ID")
@gpu_option
def restore_command(session: Session, name: str, gpu: str) -> None:
    """Restore processes and let them run on their own.

    They are restored from the newest intact checkpoint of KEY, or from the checkpoint ID. Files that they had open for
    writing are restored first. If they were writing to pipes, such as those of `process run`, this command prints their
    output. To supervise them, use kedge process run --key KEY instead.
    """
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.processes import ProcessTarget
    from kedge.containers.restore import restore_newest

    with session.of_memory().open() as manager:
        restored = restore_newest(
            manager,
            "process",
            name,
            lambda taken: ProcessTarget.of(taken, {1: 1, 2: 2}),
            gpu=GpuMemory(gpu),
        )
    answer_restored(session, "process", restored)


@store_command("list", json_keys='{"checkpoints": [{…}]}, oldest first')
@click.argument("key", default="")
@click.option("--limit", type=Number(1), default=20, help="Show at most this many of each key.  [default: 20]")
def list_command(session: Session, key: str, limit: int) -> None:
    """List the checkpoints of processes: of KEY, or of all."""
    list_checkpoints(session, "process", key, limit)


@store_command("hibernate", json_keys='{"pid": …, "seconds": …}')
@click.argument("pid")
def hibernate_command(session: Session, pid: str) -> None:
    """Free the GPU memory of process PID. It moves to main memory, and the process waits until it is woken.

    Nothing is stored. Use this to let several jobs take turns on one GPU.
    """
    from kedge.containers.gpu.memory import hibernate
    from kedge.containers.processes import parse_pid

    _answer_turn(session, pid, hibernate(parse_pid(pid)), "hibernates")


@store_command("wake", json_keys='{"pid": …, "seconds": …}')
@click.argument("pid")
def wake_command(session: Session, pid: str) -> None:
    """Let the hibernating process PID continue on its GPU."""
    from kedge.containers.gpu.memory import wake
    from kedge.containers.processes import parse_pid

    _answer_turn(session, pid, wake(parse_pid(pid)), "is awake")


def _answer_turn(session: Session, pid: str, seconds: float, what: str) -> None:
    session.answer({"pid": int(pid), "seconds": round(seconds, 4)}, f"process {pid} {what} ({seconds:.2f} s)")


process_command = command_group(
    "process",
    [run_command, checkpoint_command, restore_command, list_command, hibernate_command, wake_command],
    text="Checkpoint and restore processes without a container. Needs root and CRIU: kedge container doctor.",
)
