"""The end of a program that closed nothing: first what is still to be saved, then the stores."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

_saving: list[Callable[[], None]] = []
_closing: list[Callable[[], None]] = []


def save_at_end(call: Callable[[], None]) -> Callable[[], None]:
    """Call it when the program ends, while stores are open."""
    _saving.append(call)
    return call


def close_at_end(call: Callable[[], None]) -> Callable[[], None]:
    """Call it when the program ends, after all that is saved at the end."""
    _closing.append(call)
    return call


def _end() -> None:
    for call in [*reversed(_saving), *_closing]:
        call()


# Python calls what comes first here last: finalizers, of packs and of temporary directories, wait until all is saved.
weakref.finalize(_end, _end).detach()
atexit.register(_end)
