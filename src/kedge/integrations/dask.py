"""`run.map` on a Dask cluster: `run.map(function, items, executor=kedge.dask(client))`.

Workers open the run's store by its URL, write the record of each item there themselves, and send back which items are
done, not what came out. Dask runs a task again when its worker dies, and also tasks that had finished there; here such
a task first looks what of it is durable, and goes on behind that.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

from kedge.errors import CheckpointError, Validation, install_hint

if TYPE_CHECKING:
    from distributed import Client


class DaskExecutor(Executor):
    """A `concurrent.futures.Executor` whose workers are those of a Dask cluster. It ends with its client."""

    is_remote = True  # workers may be on other machines, and tasks may be run again: see pipeline.fanout

    def __init__(self, client: Client, **options: object) -> None:
        self._client = client
        self._tasks = client.get_executor(pure=False, **options)  # type: ignore[no-untyped-call]

    def parallelism(self) -> int:
        """How many tasks the cluster can run at once now."""
        return max(1, sum(self._client.nthreads().values()))  # type: ignore[no-untyped-call]

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        future: Future[Any] = self._tasks.submit(fn, *args, **kwargs)
        return future

    def death(self, error: BaseException) -> str | None:
        """What the scheduler says of a task whose workers died one after another; None for other errors."""
        from distributed.scheduler import KilledWorker

        return " ".join(str(error).split()) if isinstance(error, KilledWorker) else None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._tasks.shutdown(wait=wait)


def dask(client: Client, **options: object) -> DaskExecutor:
    """An executor for `run.map` on the cluster of a `distributed.Client`.

    The run's store must be one that the workers reach: a server's URL, or a directory for workers on this machine.
    `options` go to every task: `retries`, `resources`, `priority`, `workers`, as `Client.submit` takes them.
    """
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise Validation("Dask is not installed", hint=install_hint("dask")) from error
    if not isinstance(client, Client):
        raise Validation(f"{client!r} is no Dask client", hint="use distributed.Client(address)")
    if client.asynchronous:
        raise Validation("an asynchronous Dask client", hint="use Client(address), without asynchronous=True")
    if not client.nthreads():  # type: ignore[no-untyped-call]
        raise CheckpointError("the Dask cluster has no workers", hint="start some, then run it again")
    return DaskExecutor(client, **options)
