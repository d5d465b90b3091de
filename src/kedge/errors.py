"""Every error a user can meet: what failed, on which object, why, and what to do next.

    CheckpointError                                         code            HTTP  exit
    ├── NotFound       (FileNotFoundError, LookupError)     not_found        404     4
    │   └── ReplayMiss     the LLM call was not recorded    replay_miss      404     4
    ├── Validation     (ValueError)                         invalid          422     3
    │   ├── InvalidName                                     invalid_name     422     3
    │   ├── TooLarge       larger than is accepted          too_large        413     3
    │   └── UnsupportedType (TypeError)                     unsupported_type 422     3
    ├── Conflict                                            conflict         409     5
    │   ├── IdempotencyConflict  key used for another state idempotency_conflict 409 5
    │   ├── LeaseHeld      another process may write        lease_held       409     5
    │   ├── LeaseLost      your lease was taken over        lease_lost       409     5
    │   ├── Cancelled      the run was cancelled            cancelled        409     5
    │   ├── Denied         an approval was denied           denied           409     5
    │   └── QueueFull      the queue is at its limit        queue_full       429     5
    ├── NotAllowed     (PermissionError)                    not_allowed      403    10
    │   ├── BudgetExceeded  an LLM call would cost too much budget_exceeded  402    10
    │   └── Unauthorized   a valid token is missing         unauthorized     401    10
    ├── StepTimeout    (TimeoutError)                       timeout          504     9
    ├── WorkerDied     the process of a step was killed     worker_died      500     1
    ├── CriuFailed     a dump or a restore failed           criu_failed      500     1
    ├── GpuFailed      the GPU driver refused               gpu_failed       500     1
    ├── Corrupted      (ValueError)                         corrupted        400     6
    └── StorageError   (OSError)                            storage          503     7
        ├── NotAStore                                       not_a_store      503     7
        ├── ReadOnly       (PermissionError)                read_only        503     7
        ├── NoSpace                                         no_space         507     7
        ├── Unavailable    the same call may be repeated    unavailable      503     7
        │   └── OutcomeUnknown  it may have been done       outcome_unknown  503     7
        └── UnsupportedFormat                               unsupported_format 503   8

Each class carries its row of that table; the service and the command line read it from there.
`str(error)` is the message followed by the hint. Errors are raised, never logged and forgotten.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class CheckpointError(Exception):
    """Root of all Kedge errors. `hint` is the next step for the user."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, *, code: str = "", http: int = 0, exit: int = 0) -> None:
        """Set a class's code, status and exit code; it inherits those it does not name."""
        super().__init_subclass__()
        cls.code, cls.http_status, cls.exit_code = code or cls.code, http or cls.http_status, exit or cls.exit_code

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} — {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.__dict__))


def _rebuild(kind: type[CheckpointError], message: str, hint: str, state: dict[str, object]) -> CheckpointError:
    error = kind(message, hint=hint)
    error.__dict__.update(state)
    return error


class NotFound(CheckpointError, FileNotFoundError, LookupError, code="not_found", http=404, exit=4):
    """No such checkpoint, job, or path inside a state."""


class ReplayMiss(NotFound, code="replay_miss"):
    """In replay mode, an LLM call was made that was not recorded."""


class Validation(CheckpointError, ValueError, code="invalid", http=422, exit=3):
    """The input is wrong; nothing was changed."""


class InvalidName(Validation, code="invalid_name"):
    """A job, namespace, tag or checkpoint ID outside the grammar."""


class TooLarge(Validation, code="too_large", http=413):
    """A request is larger than the service accepts."""


class UnsupportedType(Validation, TypeError, code="unsupported_type"):
    """The state holds something the codec does not know; `path` says where."""

    def __init__(self, message: str, *, hint: str = "", path: str = "state") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class Conflict(CheckpointError, code="conflict", http=409, exit=5):
    """Another write got there first, or the request contradicts what is stored."""


class IdempotencyConflict(Conflict, code="idempotency_conflict"):
    """The idempotency key was used for another state of the same job; nothing was saved."""


class LeaseHeld(Conflict, code="lease_held"):
    """Another process holds the lease on this job (I5): `holder`, with the fencing token `token`."""

    def __init__(self, message: str, *, hint: str = "", holder: str = "", token: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.holder = holder
        self.token = token


class LeaseLost(Conflict, code="lease_lost"):
    """The lease given is no longer the current one; the write was refused (I5)."""


class Cancelled(Conflict, code="cancelled"):
    """The run was cancelled; it cannot be resumed."""


class Denied(Conflict, code="denied"):
    """An approval was denied, or it expired; the run does not continue past it."""


class QueueFull(Conflict, code="queue_full", http=429):
    """The queue is at its limit; nothing was submitted."""


class NotAllowed(CheckpointError, PermissionError, code="not_allowed", http=403, exit=10):
    """The service knows the caller, but the token does not allow this request."""


class BudgetExceeded(NotAllowed, code="budget_exceeded", http=402):
    """An LLM call was not made, as it could cost more than its budget has left."""


class Unauthorized(NotAllowed, code="unauthorized", http=401):
    """The service needs a token, or the token is unknown, expired or revoked."""


class StepTimeout(CheckpointError, TimeoutError, code="timeout", http=504, exit=9):
    """A step, or an item of a map, took longer than `timeout_s`."""


class WorkerDied(CheckpointError, code="worker_died"):
    """The process that worked on a step or an item ended without a result: killed, out of memory, or crashed."""


class CriuFailed(CheckpointError, code="criu_failed"):
    """CRIU or the container runtime refused to dump or restore.

    `attempt` names the logs that were saved. `is_verdict`: CRIU itself gave up, and was neither killed nor missing.
    """

    def __init__(self, message: str, *, hint: str = "", attempt: str = "", is_verdict: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.attempt = attempt
        self.is_verdict = is_verdict


class GpuFailed(CheckpointError, code="gpu_failed"):
    """The GPU driver refused to checkpoint or restore; the processes keep running, as far as it lets them."""


class Corrupted(CheckpointError, ValueError, code="corrupted", http=400, exit=6):
    """Stored bytes do not match their digest or cannot be what they claim to be (I2); `chunk` is that chunk's digest.

    Raised only for bytes that were read, or that the storage itself reports as missing.
    """

    def __init__(self, message: str, *, hint: str = "", chunk: bytes = b"") -> None:
        super().__init__(message, hint=hint)
        self.chunk = chunk


class StorageError(CheckpointError, OSError, code="storage", http=503, exit=7):
    """The disk, the file system or the database refused; nothing was acknowledged."""


class NotAStore(StorageError, code="not_a_store"):
    """The directory or database holds something other than a Kedge store."""


class ReadOnly(StorageError, PermissionError, code="read_only"):
    """The store cannot be written to."""


class NoSpace(StorageError, code="no_space", http=507):
    """The disk is full, or a quota is reached."""


class Unavailable(StorageError, code="unavailable"):
    """A server could not be reached, or was too busy; the same call may be repeated, and `blobs.retrying` does."""


class OutcomeUnknown(Unavailable, code="outcome_unknown"):
    """The response was lost, or a write could not be undone: the operation may or may not have been done."""


class UnsupportedFormat(StorageError, code="unsupported_format", exit=8):
    """The store was written by a newer Kedge (I8)."""


def could_not_look(subject: str, cause: Exception) -> StorageError:
    """Return the typed error for a check that could not read `subject`: whether it is sound stays unknown."""
    kind = type(cause) if isinstance(cause, StorageError) else StorageError
    reason = cause.message if isinstance(cause, CheckpointError) else str(cause) or type(cause).__name__
    hint = (cause.hint if isinstance(cause, CheckpointError) else "") or "run it again when that can be read"
    return kind(f"could not look at {subject}: {reason}", hint=f"nothing was marked because of it; {hint}")


def storage_error(action: str, where: str, cause: OSError) -> StorageError:
    """Return the typed error for an operating-system error during `action` on `where`."""
    reason = os.strerror(cause.errno) if cause.errno else str(cause)
    message = f"cannot {action} {where}: {reason}"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpace(message, hint="free some space (kedge cleanup, kedge gc), then run it again")
    if cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ReadOnly(
            message, hint="check the owner and mode of the directory and that its disk is mounted read-write"
        )
    if cause.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
        return StorageError(message, hint="check that path: it may be misspelt, or moved or deleted by somebody else")
    return StorageError(message, hint="see the system log for the device; run kedge check before relying on this store")


@contextmanager
def storage_errors(action: str, where: str | os.PathLike[str]) -> Iterator[None]:
    """Convert errors of the operating system to ours (`storage_error`); ours pass unchanged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise storage_error(action, os.fspath(where), error) from error


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the known name most similar to `word`; "" if none is similar."""
    from difflib import get_close_matches  # not for every start

    near = get_close_matches(word, list(known), n=1, cutoff=0.66)
    return f"did you mean {near[0]}?" if near else ""


def install_hint(extra: str) -> str:
    """Return how to install an optional feature. There is no release yet, so nothing is installed by name."""
    return f"install Kedge from its clone with this extra: pip install '.[{extra}]'"


def missing_extra(feature: str, extra: str, cause: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of an import that needs an extra. Other missing modules have nothing to do with extras."""
    if cause.name is None or cause.name.startswith("kedge"):
        return cause
    return ModuleNotFoundError(f"{feature} needs {cause.name}. {install_hint(extra)}", name=cause.name)
