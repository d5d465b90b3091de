"""Runs that nobody submitted to a queue, and that workers take over when their process dies: `pipeline(recover=True)`.

While such a run is at work, an entry of the queue `recovery` says so, marked running. Its process holds the lease of
the run and deletes the entry at the end. A worker that finds the entry, and the run without an owner, treats it as that
of a worker that died: one owner (I5), given up after so many takeovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from kedge.errors import LeaseLost, NoSpace, StorageError, Unavailable
from kedge.manager import CheckpointManager

from .entries import RECOVERY, RUNNING, Arguments, drop_entry, inputs_of, new_entry, queue_job, save_entry, shown_call
from .inbox import StoreLike, opened
from .run import Run


@contextmanager
def recoverable(make: Callable[[CheckpointManager], Run], given: StoreLike | None, call: Arguments) -> Iterator[Run]:
    """Around the call of a pipeline, in the run that `make` makes.

    Only a process that dies, or whose store fails, leaves an entry behind.
    """
    with opened(given, create=True) as store:
        run = make(store)
        with run:
            entry, _ = register(store, run.key, str(run.pipeline), call)
            try:
                yield run
            except LeaseLost:
                raise  # the run belongs to somebody else, and so does its entry
            except (Unavailable, NoSpace):
                raise  # nothing is wrong with the run, and its end may not be durable: a worker continues it
            except BaseException:
                with suppress(StorageError):  # the error of the pipeline says more
                    drop_entry(store, entry)  # while the run is ours: nobody else is to try it again
                raise
        with suppress(StorageError):  # a worker finds the run ended
            drop_entry(store, entry)


def register(store: CheckpointManager, key: str, pipeline: str, call: Arguments) -> tuple[str, Mapping[str, object]]:
    """Have a run whose lease is ours taken over if this process dies; the ID of its entry, and what it says."""
    job = queue_job(RECOVERY)
    earlier = store.list(job, tags={"run": key})  # of sessions that died
    entry = new_entry(key, pipeline, inputs_of(pipeline, call))
    saved = save_entry(store, job, entry, call, state=RUNNING)
    for record in earlier:
        drop_entry(store, record.id)
    return saved, {"entry": entry, "call": call, "given": shown_call(call)}
